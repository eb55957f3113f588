"""Exact recurrent calls, for any model and for the model of a spec.

For any model: segmented.py (`segmented`, `segment`), calls.py (one call in pieces), pieces.py (where it is cut),
room.py (how many segments fit into a budget), scan.py (`scan`), losses.py (`chunked_loss`, `piecewise_loss`). For the
model of a spec: model.py, run.py (one microbatch in pieces), bptt.py (backpropagation through time). recompute.py
computes pieces again for all of them, and rng.py sets random numbers back.
"""

from oomguard._rnn.bptt import backward
from oomguard._rnn.run import Microbatch, count_targets, evaluate, outputs

__all__ = ["Microbatch", "backward", "count_targets", "evaluate", "outputs"]
