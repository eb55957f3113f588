"""The model of a spec, and backpropagation through time: model.py, run.py (one microbatch in pieces), bptt.py."""

from oomguard._rnn.bptt import backward
from oomguard._rnn.run import Microbatch, count_targets, evaluate, outputs

__all__ = ["Microbatch", "backward", "count_targets", "evaluate", "outputs"]
