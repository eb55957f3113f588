"""A script that calls recurrent layers in every way in which scripts do, and prints what came of each as JSON."""

import json
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

torch.set_num_threads(1)
warnings.filterwarnings("ignore", category=DeprecationWarning)
INPUTS = torch.arange(60 * 3 * 4).remainder(7).div(7).view(60, 3, 4)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def gradients(model: nn.Module, forward: Callable[[], Tensor]) -> list[float]:
    """The loss and the sums of the gradients."""
    torch.manual_seed(1)
    loss = forward().square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.item(), *(float(weight.grad.abs().sum()) for weight in model.parameters() if weight.grad is not None)]


def of_layer(make: Callable[[], nn.Module], inputs: Tensor | PackedSequence = INPUTS) -> list[float]:
    model = seeded(make)

    def forward() -> Tensor:
        out = model(inputs)[0]
        return out.data if isinstance(out, PackedSequence) else out

    return gradients(model, forward)


def functional() -> list[float]:
    """A call of torch.gru itself, by its name and with the weights of a layer."""
    layer = seeded(lambda: nn.GRU(4, 8))
    weights: list[Tensor] = [*layer.parameters()]
    return gradients(
        layer, lambda: torch.gru(INPUTS, torch.zeros(1, 3, 8), weights, True, 1, 0.0, True, False, False)[0]
    )


def in_a_thread() -> list[float]:
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(of_layer(lambda: nn.GRU(4, 8))))
    thread.start()
    thread.join()
    return found[0]


class Tagger(nn.Module):
    """A model that TorchScript can compile."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.lstm(inputs)[0], inputs


def scripted() -> list[float]:
    model = seeded(Tagger)
    compiled: Any = torch.jit.script(model)
    return gradients(model, lambda: compiled(INPUTS)[0])


def compiled() -> list[float]:
    """A model under torch.compile, which runs its recurrent layer outside of the graph."""
    model = seeded(Tagger)
    run: Any = torch.compile(model, backend="eager")
    return gradients(model, lambda: run(INPUTS)[0])


def traced() -> list[float]:
    model = seeded(lambda: nn.GRU(4, 8))
    compiled: Any = torch.jit.trace(model, (INPUTS,))  # type: ignore[no-untyped-call]
    return gradients(model, lambda: compiled(INPUTS)[0])


def with_workers() -> list[float]:
    """Workers of a loader that run a recurrent layer themselves."""
    layer = seeded(lambda: nn.GRU(4, 8))

    def collate(rows: list[Tensor]) -> Tensor:
        with torch.no_grad():
            out: Tensor = layer(torch.stack(rows, 1))[0]
        return out

    rows: Any = INPUTS.unbind(1)
    loader: torch.utils.data.DataLoader[Tensor] = torch.utils.data.DataLoader(
        rows, batch_size=3, num_workers=1, collate_fn=collate
    )
    model = seeded(lambda: nn.Linear(8, 1))
    return gradients(model, lambda: model(next(iter(loader))))


def own_segments() -> list[float]:
    import oomguard

    model = oomguard.segment(seeded(lambda: nn.GRU(4, 8)), 3)
    return gradients(model, lambda: model(INPUTS)[0])


def with_wrong_arguments() -> list[float]:
    """A call that torch refuses, for which it has to give its own message."""
    try:
        torch.gru(INPUTS, None, [], True, 1, 0.0, True, False, False)  # type: ignore[call-overload]
    except Exception as error:
        return [float(sum(map(ord, str(error))))]
    return []


def without_gradient() -> list[float]:
    model = seeded(lambda: nn.GRU(4, 8))
    with torch.no_grad():
        return [float(model(INPUTS)[0].sum())]


CASES: dict[str, Callable[[], list[float]]] = {
    "lstm": lambda: of_layer(lambda: nn.LSTM(4, 8, 2)),
    "batch first": lambda: of_layer(lambda: nn.LSTM(4, 8, batch_first=True), INPUTS.transpose(0, 1)),
    "both directions": lambda: of_layer(lambda: nn.GRU(4, 8, 2, bidirectional=True)),
    "projection": lambda: of_layer(lambda: nn.LSTM(4, 8, proj_size=3)),
    "rnn": lambda: of_layer(lambda: nn.RNN(4, 8, nonlinearity="relu")),
    "dropout": lambda: of_layer(lambda: nn.LSTM(4, 8, 2, dropout=0.5)),
    "packed": lambda: of_layer(lambda: nn.GRU(4, 8), pack_sequence([INPUTS[:, 0], INPUTS[:40, 1], INPUTS[:30, 2]])),
    "functional": functional,
    "thread": in_a_thread,
    "scripted": scripted,
    "compiled": compiled,
    "traced": traced,
    "workers": with_workers,
    "own segments": own_segments,
    "wrong arguments": with_wrong_arguments,
    "no gradient": without_gradient,
}

if __name__ == "__main__":
    print(json.dumps({name: case() for name, case in CASES.items() if name != "own segments" or "--own" in sys.argv}))
