"""Checkpoints: what a training needs to go on bit for bit where it was, whatever stopped it.

- `save` writes a directory under a temporary name, puts it on the disk, and only then gives it its name. A kill at any
  moment leaves the checkpoints that were there, or these and the new one, each of them whole. The last few are kept.
- `load` finds the newest one whose checksums agree, and says so if it had to pass over another.
- `restore` gives weights, optimizer, scaler and random numbers back to a training, `load_weights` only the weights to
  a model.

Nothing is pickled: tensors are in safetensors, the rest in JSON. Tensors go to the disk and come from it one at a time,
so neither direction needs room for a second model.
"""

from oomguard.checkpoint.resume import load_weights, restore
from oomguard.checkpoint.store import Checkpoint, load, save

__all__ = ["Checkpoint", "load", "load_weights", "restore", "save"]
