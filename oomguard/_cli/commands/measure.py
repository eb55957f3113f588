"""`oomguard estimate` and `oomguard probe`."""

from functools import partial
from typing import TYPE_CHECKING, Any

from oomguard._cli import flags, parsing
from oomguard._cli.flags import JSON, LOUDNESS, SPEC, Flag
from oomguard._cli.program import DOES_NOT_FIT, FITS, Answer, answer, command
from oomguard._core.progress import tell
from oomguard._core.units import read_budget
from oomguard._keras.read import is_keras
from oomguard._spec.read import PRESETS

if TYPE_CHECKING:  # imported where it is used, since --json does not need it
    from rich.console import Console


_ESTIMATED = [*flags.CANDIDATE, Flag("evaluate", "", "Estimate an evaluation pass, without gradients.", bool)]
_PRESETS = "\n\n".join(
    ["[bold]Presets[/bold]", *(f"- {name}: {preset['description']}" for name, preset in PRESETS.items())]
)


@command(
    "estimate",
    epilog=_PRESETS,
    Spec=SPEC,
    Candidate=_ESTIMATED,
    Where=flags.WHERE,
    Output=[flags.TRACED, *LOUDNESS, JSON],
)
def _estimate(*, device: str = "cpu", budget: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Estimate the peak memory of one candidate by arithmetic: no run, no GPU, no torch.

    Flags override a preset and a spec file. --no-packed and the like turn off a switch of a spec file. A model of your
    own is named by its oomguard.Task: one step of it is traced in a child process, which takes a few seconds. A file of
    Keras (.keras, .json or .h5) is read without Keras, and the same model in PyTorch is traced.

    [bold]Examples[/bold]

    - oomguard estimate --model lstm --seq 10000
    - oomguard estimate --preset char-lm --device rtx-4090 --precision bf16
    - oomguard estimate --model spec.toml --segments 100 --budget 6GiB --json
    - oomguard estimate --model package.module:task --seq 1000 --microbatch 8
    - oomguard estimate --model model.keras --seq 1000 --batch 32

    Exit codes: 0 it fits, 1 it does not fit, 2 wrong usage.
    """
    from oomguard._api.measure import estimate
    from oomguard._device.find import find_budget, find_target
    from oomguard._report.estimate import show_estimate, show_task_estimate, to_json

    limit, limit_bytes = "--budget", read_budget(budget)
    limited = parsing.read_options(values, [flags.TRACED])
    keras = is_keras(values.get("model"))
    name, knobs = parsing.read_keras(values) if keras else parsing.read_task(values)
    if name is None:
        spec, candidate = parsing.read(values)
    if limit_bytes is None:
        free = find_budget(device)
        limit, limit_bytes = free.binding.name, free.limit_bytes
    training = not values.get("evaluate", False)
    if keras:
        return _estimate_keras(str(name), device, (limit, limit_bytes), json, training, knobs | limited)
    if name is not None:
        found = estimate(name, device=device, budget_bytes=limit_bytes, **limited, **knobs)
        text = partial(show_task_estimate, name, found, limit)
        return answer(json, lambda: to_json(found), text, FITS if found.fits else DOES_NOT_FIT)
    result = estimate(spec, candidate, device=device, budget_bytes=limit_bytes, training=training, **limited)

    def show(console: "Console") -> None:
        from oomguard._plan.advice import advise

        show_estimate(spec, result, limit, advise(spec, result, find_target(device)), console)

    return answer(json, lambda: to_json(result), show, FITS if result.fits else DOES_NOT_FIT)


def _estimate_keras(
    path: str, device: str, limit: tuple[str, int], json: bool, training: bool, options: dict[str, Any]
) -> Answer:
    from oomguard._api.measure import estimate_keras
    from oomguard._report.keras import keras_json, show_keras

    tell("Reading the model")
    model, found, advice = estimate_keras(path, device, limit[1], training=training, **options)
    show = partial(show_keras, model, found, limit[0], advice)
    return answer(json, lambda: keras_json(model, found, advice), show, FITS if found.fits else DOES_NOT_FIT)


_PROBED = [flags.TIMEOUT, flags.LEDGER, *LOUDNESS, JSON]


@command("probe", Spec=SPEC, Candidate=flags.PROBED, Where=flags.HERE, Output=_PROBED)
def _probe(*, device: str = "cpu", budget: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Run a few real steps of one candidate in a child process, and compare them with the estimate.

    The child is limited to the budget: a candidate that is too large ends in a verdict, not in a crash.

    [bold]Examples[/bold]

    - oomguard probe --model lstm --seq 2000 --batch 8
    - oomguard probe --model gru --seq 10000 --segments 50 --threads 1
    - oomguard probe --model spec.toml --device cuda --precision bf16 --json
    - oomguard probe --model package.module:task --microbatch 8

    Exit codes: 0 it fits, 1 it does not fit, 2 wrong usage.
    """
    from oomguard._api.measure import estimate, probe
    from oomguard._probe.record import open_ledger
    from oomguard._report.estimate import record_json, show_record
    from oomguard._task.estimate import COUNTED

    options = parsing.read_options(values, [flags.TIMEOUT])
    name, knobs = parsing.read_task(values)
    if name is not None:
        counted = {knob: value for knob, value in knobs.items() if knob in (*COUNTED, "steps")}
        traced = estimate(name, device=device, budget=budget, **options, **counted)
        knobs["microbatch"] = traced.candidate.microbatch  # that of the loader, unless it was given
        found = probe(name, device=device, budget=budget, **options, **knobs)
        show = partial(show_record, found, traced)
        return answer(json, lambda: record_json(found, traced), show, FITS if found.verdict.ran else DOES_NOT_FIT)
    spec, candidate = parsing.read(values)
    estimated = estimate(spec, candidate, device=device, budget=budget)
    ledger = open_ledger(values["ledger"]) if "ledger" in values else None
    record = probe(spec, candidate, device=device, budget=budget, **options)
    if ledger is not None:
        ledger.append(record)
    code = FITS if record.verdict.ran else DOES_NOT_FIT
    text = partial(show_record, record, estimated)
    return answer(json, lambda: record_json(record, estimated), text, code)
