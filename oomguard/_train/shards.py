"""The optimizer's state that several processes share, in one checkpoint: it has that of all weights.

So a run can be resumed with another number of processes. The tensors come to the first process one at a time, while it
writes the file: each process has room for one of them, since no gradients are there.
"""

from collections import deque

import msgspec
import torch
from torch import Tensor

from oomguard._step import TaskTraining
from oomguard._train.ranks import Ranks
from oomguard._train.tensors import OptimizerState, get_state, in_order


class SharedState:
    """The state of a training whose optimizer's state is shared. Every process makes one at the same time."""

    def __init__(self, ranks: Ranks, training: TaskTraining) -> None:
        self.ranks, self.device = ranks, training.device
        own, self._own = get_state(training)
        forms = {name: (tensor.dtype, tensor.shape) for name, tensor in self._own.items() if _is_state(name)}
        kept, self.tensors = dict(own.kept), {**self._own}
        self._owners: dict[str, int] = {}
        for rank, (part, others) in enumerate(ranks.gather((own.kept, forms))):
            kept |= part
            for name, (dtype, shape) in others.items():
                self._owners[name], self.tensors[name] = rank, torch.empty(shape, dtype=dtype, device="meta")
        self.optimizer: OptimizerState = msgspec.structs.replace(own, kept=kept)
        self._waiting = deque(name for name in in_order(self.tensors) if self._owners.get(name))

    def fetch(self, name: str) -> Tensor:
        """A tensor from the process that has it. All processes have to ask for those of others in the same order."""
        owner = self._owners.get(name, 0)
        if owner == 0:
            return self._own[name]
        assert self._waiting.popleft() == name, "tensors are fetched in the order of the file"
        kept = self._own.get(name)
        tensor = torch.empty_like(self.tensors[name], device=self.device) if kept is None else kept.to(self.device)
        self.ranks.spread([(tensor, owner)])
        return tensor

    def lend(self) -> None:
        """Give the first process what it has not fetched yet."""
        while self._waiting:
            self.fetch(self._waiting[0])


def _is_state(name: str) -> bool:
    return name.startswith("optimizer.")
