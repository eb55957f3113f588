"""Backpropagation through time: one microbatch, forward and backward, in one of four ways.

- plain: the whole sequence at once, as PyTorch users write it.
- segmented (exact): forward once keeping only the states at the segments' borders; then, from the last segment to the
  first, each is recomputed with its graph and differentiated. With two levels only every so many borders are kept, and
  those between are made anew. Of a bidirectional model, each direction of each layer goes in segments of its own.
- chunked (exact): the segments are kept, not recomputed: only workspace and logits are saved.
- windowed (lossy): the gradient is cut at every window's start.

All add `scale x sum of the losses over real steps and sequences` to the gradients and return that sum, detached. The
loss is computed piece by piece, so the logits of the whole sequence never exist (except in the plain pass).
"""

from torch import Tensor

from oomguard.bptt.by_layer import by_layer
from oomguard.bptt.evaluate import evaluate, outputs
from oomguard.bptt.run import Microbatch, Run, count_targets
from oomguard.bptt.segments import Stack, descend
from oomguard.bptt.whole import chunked, plain, windowed
from oomguard.candidate import Candidate
from oomguard.model import Recurrent

__all__ = ["Microbatch", "backward", "count_targets", "evaluate", "outputs"]


def backward(model: Recurrent, batch: Microbatch, candidate: Candidate, scale: float | Tensor = 1.0) -> Tensor:
    """One microbatch's loss and gradients, the way the candidate says."""
    steps = batch.inputs.shape[model.time_dim]
    if candidate.window is not None:
        length = candidate.window
    else:
        length = -(-steps // candidate.segments)
    run = Run(model=model, batch=batch, length=length, candidate=candidate, scale=scale)
    with run.dice.put_down():
        if candidate.window is not None:
            windowed(run)
        elif run.pieces == 1:
            plain(run)
        elif model.spec.bidirectional:
            by_layer(run)
        elif candidate.recompute:
            descend(Stack(run), range(run.pieces), None, [], candidate.levels)
        else:
            chunked(run)
    return run.total
