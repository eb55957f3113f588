"""One optimizer step: the same code in the probe and in training."""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

from oomguard.bptt import backward
from oomguard.candidate import Candidate
from oomguard.checks import flag
from oomguard.errors import MisuseError
from oomguard.model import Recurrent, trainable

_PLAIN: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "adamw": AdamW, "rmsprop": RMSprop, "adagrad": Adagrad}


def make_optimizer(model: Recurrent, candidate: Candidate, lr: float = 1e-3) -> Optimizer:
    """The spec's optimizer over the trained parameters, run the way the candidate says."""
    name = model.spec.optimizer
    parameters = trainable(model)
    foreach = candidate.update == "foreach"
    how = {"fused": True} if candidate.update == "fused" else {"foreach": foreach}
    if name in ("sgd", "sgd-momentum"):
        return SGD(parameters, lr=lr, momentum=0.9 if name == "sgd-momentum" else 0.0, **how)
    if name == "adafactor":
        return Adafactor(parameters, lr=lr, foreach=foreach)
    if name in _PLAIN:
        return _PLAIN[name](parameters, lr=lr, **how)
    raise MisuseError(
        rule="The optimizer must be one that PyTorch has",
        got=f"{name} needs another library",
        advice="Take --optimizer adam for a run; estimates know it.",
    )


def _check_runnable(model: Recurrent, candidate: Candidate) -> None:
    """Raise for what can be estimated but not run yet, rather than run something else."""
    asked = {
        "precision": candidate.precision != "fp32",
        "offload": candidate.offload,
        "state_8bit": candidate.state_8bit,
        "packed": model.spec.packed,
    }
    if any(asked.values()):
        raise MisuseError(
            rule="A step runs in fp32, with its state where the weights are, on padded sequences",
            got=f"got {', '.join(flag(name) for name, wanted in asked.items() if wanted)}, which can only be estimated",
            advice="Leave it out for a run.",
        )


def step(
    model: Recurrent,
    optimizer: Optimizer,
    microbatches: Iterable[tuple[Tensor, Tensor]],
    candidate: Candidate,
    targets: int,
) -> Tensor:
    """Accumulate the gradient of all microbatches, then update once; returns the mean loss over the targets.

    `targets` is the number of targets in the whole batch, so that unequal microbatches weigh what they hold.
    """
    _check_runnable(model, candidate)
    total: Tensor | None = None
    for inputs, wanted in microbatches:
        loss = backward(model, inputs, wanted, candidate, scale=1.0 / targets)
        total = loss if total is None else total + loss
        del inputs, wanted  # otherwise this microbatch still lives while the next one is made
    assert total is not None, "a batch has at least one microbatch"
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total / targets
