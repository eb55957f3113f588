"""`oomguard export` and `oomguard shrink`."""

from typing import TYPE_CHECKING, Any

import msgspec

from oomguard._cli import flags, parsing
from oomguard._cli.program import Answer, answer, command

if TYPE_CHECKING:  # imported where it is used, since --json does not need it
    from rich.console import Console


@command("export", flags.RUN, Output=flags.EXPORTED)
def _export(*, run: str, json: bool = False, **values: Any) -> Answer:
    """Write the model of a run as a file for other programs, and check that it gives what predict gives.

    TorchScript and ONNX include the scaling of the data, and take any number of rows and steps. A state_dict is the
    weights alone. If the outputs differ by more than rounding, nothing is written.

    [bold]Examples[/bold]

    - oomguard export runs/lstm-1000 --to onnx --output prices.onnx
    - oomguard export runs/lstm-1000 --to torchscript
    - oomguard export runs/tagger --model package.module:task
    """
    from oomguard._api.files import export

    done = export(run, **parsing.read_options(values, flags.EXPORTED))
    return answer(json, lambda: msgspec.to_builtins(done), lambda console: _print_lines(str(done), console))


@command("shrink", flags.RUN, Output=flags.SHRUNK)
def _shrink(*, run: str, json: bool = False, **values: Any) -> Answer:
    """Prune the least used hidden units of every layer into a smaller run, to be fine-tuned by oomguard resume.

    A unit is used as much as the weights that read it are large, times its activity on the validation data. The smaller
    run has a plan of its own, by arithmetic.

    [bold]Examples[/bold]

    - oomguard shrink runs/lstm-1000 --hidden 0.75
    - oomguard shrink runs/lstm-1000 --hidden 0.5 --output runs/half
    - oomguard shrink book --json
    """
    from oomguard._api.files import shrink

    done = shrink(run, **parsing.read_options(values, flags.SHRUNK))
    return answer(json, lambda: msgspec.to_builtins(done), lambda console: _print_lines(str(done), console))


def _print_lines(text: str, console: "Console") -> None:
    """Print lines that the terminal wraps."""
    for line in text.splitlines():
        console.print(line)
