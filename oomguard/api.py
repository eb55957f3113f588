"""The whole tool on one screen: every verb as a function."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard.asked import find_budget, find_place, read_candidate, read_spec
from oomguard.candidate import KNOBS, Candidate, Candidates
from oomguard.checks import check_whole, flag, nearest, shown
from oomguard.errors import MisuseError
from oomguard.estimate.batch import estimate_batch
from oomguard.estimate.breakdown import Estimate, estimate_step
from oomguard.estimate.margin import margin_bytes
from oomguard.probe.record import Record
from oomguard.probe.runner import TIMEOUT_SECONDS, Runner
from oomguard.spec import Spec
from oomguard.units import MAX_BYTES, parse_bytes, parse_seconds

if TYPE_CHECKING:  # imported where it is used: an estimate does not wait for the search
    from pandas import DataFrame

    from oomguard.curves.value import Curve
    from oomguard.guard.guard import Guard
    from oomguard.plan.value import Plan
    from oomguard.search.run import Progress
    from oomguard.train.job import Result, Told


def estimate(
    spec: Spec | None = None,
    candidate: Candidate | Candidates | None = None,
    *,
    device: str = "cpu",
    budget_bytes: int | None = None,
    training: bool = True,
    **fields: Any,
) -> Estimate:
    """Predict the peak of one optimizer step (or, with `training=False`, of an evaluation pass) by arithmetic.

    Fields of the spec and knobs may be given by name instead. Without a candidate, the whole batch goes in one pass.
    Arrays of knobs (or `Candidates`) give arrays of figures. `device` is `cpu`, `cuda`, `cuda:1` or the name of a card
    that need not be here; the budget is what that leaves free, unless it is given.

    >>> estimate(cell="lstm", seq=1000, device="a100-80gb").fits
    True
    >>> estimate(Spec(cell="lstm", seq=1000), microbatch=[1, 32], device="a100-80gb").fits.tolist()
    [True, True]
    """
    spec = read_spec(spec, {name: value for name, value in fields.items() if name not in KNOBS})
    knobs = {name: value for name, value in fields.items() if name in KNOBS}
    check_whole("budget", budget_bytes, 0, MAX_BYTES)
    candidate = read_candidate(spec, candidate, knobs)
    place = find_place(device)
    limit_bytes = find_budget(device).limit_bytes if budget_bytes is None else budget_bytes
    if isinstance(candidate, Candidates):
        return replace(estimate_batch(spec, candidate, place, training=training), budget_bytes=limit_bytes)
    found = estimate_step(spec, candidate, place, training=training)
    margin = margin_bytes(spec, found.growth_bytes, candidate, place)
    return replace(found, budget_bytes=limit_bytes, margin_bytes=margin)


def probe(
    spec: Spec | None = None,
    candidate: Candidate | None = None,
    *,
    device: str = "cpu",
    budget_bytes: int | None = None,
    timeout: float | str = TIMEOUT_SECONDS,
    **fields: Any,
) -> Record:
    """Run a few real steps of one candidate in a child process, under a budget, and record what came of it.

    Arguments as those of `estimate`, but the device must be here. Whatever happens to the child is a verdict; many
    probes are cheaper in one `oomguard.Runner`, which keeps its child.

    >>> record = probe(cell="gru", seq=20, hidden=8, batch=2, threads=1)
    >>> record.verdict.name, record.steps
    ('FITS', 3)
    """
    spec = read_spec(spec, {name: value for name, value in fields.items() if name not in KNOBS})
    found = read_candidate(spec, candidate, {name: value for name, value in fields.items() if name in KNOBS})
    if isinstance(found, Candidates):
        raise MisuseError(
            rule="A probe runs one candidate", got="got several", advice="Probe one after the other in a Runner."
        )
    with Runner(device, timeout=_seconds(timeout)) as runner:
        return runner.probe(spec, found, budget_bytes=budget_bytes)


def find_feasible_config(
    spec: Spec | None = None,
    *,
    data: Any = None,
    budget: int | str | None = None,
    device: str = "cpu",
    maximize: str | Sequence[str] = "throughput",
    allow: str | Sequence[str] = "precision",
    max_probes: int = 24,
    timeout: float | str = 100.0,
    ledger: str | None = None,
    storage: str | None = None,
    progress: "Callable[[Progress], None] | None" = None,
    **fields: Any,
) -> "Plan":
    """Find the fastest (or largest, or longest) candidate that fits, by a search that probes real runs, as a `Plan`.

    Fields of the spec may be given by name, and knobs that are to be fixed. `budget` is bytes or a size such as
    "6GiB", `timeout` seconds or a duration such as "5min"; `maximize` and `allow` are as `--maximize` and `--allow`
    take them; several devices, "cuda:0,cuda:1", search together. Instead of a histogram of `lengths`, `data` may be
    given as `train` takes it, with the options that say how it is cut (`id`, `stride`, ...). Raises `NothingFitsError`
    if not even the smallest candidate fits.

    >>> plan = find_feasible_config(cell="gru", seq=50, hidden=16, batch=4, threads=1, max_probes=2)
    >>> plan.ooms, plan.candidate.microbatch * plan.candidate.accumulation >= 4
    (0, True)
    """
    from oomguard.plan.find import Question, find_plan
    from oomguard.search.run import Limits

    if data is not None:
        spec, fields = _spec_for(spec, data, fields), {name: fields[name] for name in fields if name in KNOBS}
    spec = read_spec(spec, {name: value for name, value in fields.items() if name not in KNOBS})
    question = Question(
        spec=spec,
        devices=_words("device", device),
        budget_bytes=parse_bytes(budget) if isinstance(budget, str) else budget,
        maximize=_words("maximize", maximize),
        allow=tuple(word for word in _words("allow", allow) if word != "none"),
        fixed={name: value for name, value in fields.items() if name in KNOBS and value is not None},
        limits=Limits(max_probes=max_probes, seconds=_seconds(timeout)),
        ledger=ledger,
        storage=storage,
    )
    check_whole("budget", question.budget_bytes, 1, MAX_BYTES)
    return find_plan(question, find_place(question.devices[0]), find_budget(question.devices[0]), progress)


def tradeoffs(
    spec: Spec | None = None,
    *,
    over: dict[str, Any] | None = None,
    device: str | None = None,
    budget: int | str | None = None,
    measured: Any = None,
    **fields: Any,
) -> "DataFrame":
    """What each setting costs in memory and brings in speed: a DataFrame with one row per candidate.

    `over` says what varies, knobs and fields of the spec: `{"microbatch": range(1, 65), "seq": "1000..8000*2"}`
    (without it: microbatch, segments and precision). Fields and knobs that are to be fixed may be given by name.
    `measured` is a plan, its file, a ledger's directory or records: they fill `measured_peak_bytes`,
    `measured_seconds_per_step`, `measured_tokens_per_second` and `verdict`, and calibrate the other columns; of a plan,
    its spec, device, budget and other knobs are taken too. A row's `total_bytes` is the sum of its terms, by
    arithmetic; `peak_bytes` is the same, calibrated if anything was measured.

    >>> table = tradeoffs(cell="lstm", seq=1000, over={"microbatch": [8, 32], "segments": [1, 10]}, budget="1GiB")
    >>> table[["microbatch", "segments", "fits"]].values.tolist()
    [[8, 1, True], [8, 10, True], [32, 1, False], [32, 10, True]]
    """
    from oomguard.tradeoffs.find import find_subject
    from oomguard.tradeoffs.table import make_table

    return make_table(*find_subject(spec, over=over, device=device, budget=budget, measured=measured, **fields))


def curves(
    about: "Plan | Spec | None" = None,
    *,
    over: dict[str, Any] | None = None,
    device: str | None = None,
    budget: int | str | None = None,
    measured: Any = None,
    **fields: Any,
) -> "list[Curve]":
    """Curves of a plan, or of a model as `tradeoffs` takes it: each a question and its answer as a picture.

    They are of one model: `over` takes values of microbatch, segments, precision and seq (of which the longest).
    A notebook shows a curve; `.figure()` is one of Plotly's, `.save("front.png")` writes it.

    >>> [one.name for one in curves(cell="gru", seq=100, device="t4", hidden=8, layers=1)][:3]
    ['front', 'region', 'segments']
    """
    from oomguard.curves.make import curves_of
    from oomguard.plan.value import Plan
    from oomguard.tradeoffs.find import find_subject
    from oomguard.tradeoffs.make import look_at

    if isinstance(about, Plan):
        about, measured = None, about
    subject, varied = find_subject(about, over=over, device=device, budget=budget, measured=measured, **fields)
    return curves_of(subject if over is None else look_at(subject, varied))


def guard(plan: "Plan", *, device: str | None = None, events: str | None = None) -> "Guard":
    """What keeps a loop of your own within memory: `with oomguard.guard(plan) as guard`. See `Guard` for an example.

    `device` is the plan's unless it is given; `events` is a file to which every change is appended as a JSON line.

    >>> plan = find_feasible_config(cell="gru", seq=8, hidden=8, batch=4, device="t4")
    >>> with guard(plan, device="cpu") as kept:
    ...     kept.rung, kept.rows
    (0, 4)
    """
    from oomguard.device import open_device
    from oomguard.guard.guard import Guard
    from oomguard.metrics import Events

    return Guard(
        plan,
        device=open_device(plan.where.device if device is None else device),
        events=None if events is None else Events(events),
    )


def train(
    plan: "Plan | str | os.PathLike[str]",
    data: Any,
    model: Callable[..., Any] | str | None = None,
    *,
    progress: "Callable[[Told], None] | None" = None,
    **options: Any,
) -> "Result":
    """Execute a plan (or the plan in a file) on data: a path, an array, a Dataset, or pairs (inputs, targets).

    Options are fields of `TrainOptions` (`epochs`, `steps`, `lr`, `run`, `resume`, ...) and of `DataOptions` (`target`,
    `validation`, `seed`, ...), by name. Raises `GuardError` if memory runs out on the plan's last rung.

    >>> import numpy as np, tempfile, warnings
    >>> plan = find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = train(plan, numbers, epochs=2, validation=0, run=directory)
    >>> result.steps, result.ended
    (20, 'done')
    """
    from oomguard.data.options import DataOptions
    from oomguard.plan.store import load_plan
    from oomguard.plan.value import Plan
    from oomguard.train.options import TrainOptions
    from oomguard.train.start import run_training

    kinds: tuple[Any, ...] = (TrainOptions, DataOptions)
    for name in options:
        _known(name, [field for kind in kinds for field in kind.__struct_fields__])
    asked = [kind(**{k: v for k, v in options.items() if k in kind.__struct_fields__}) for kind in kinds]
    found = load_plan(plan) if isinstance(plan, str | os.PathLike) else plan
    if not isinstance(found, Plan):
        raise MisuseError(
            rule="A training executes a plan, or the plan in a file",
            got=f"got {shown(found)}",
            advice="Give what find_feasible_config or load_plan returns, or the path of plan.json.",
        )
    return run_training(found, data, (asked[0], asked[1]), model, progress)


def predict(
    run: str | os.PathLike[str],
    data: Any,
    *,
    output: str | None = None,
    probabilities: bool = False,
    device: str | None = None,
    model: Callable[..., Any] | str | None = None,
    **options: Any,
) -> Any:
    """What the model of a run (its best by validation, otherwise its last) says of data, sequence by sequence.

    The data has the form it was trained on, and is read as it was then, unless `options` (fields of `DataOptions`) say
    otherwise. Numbers are in the units of the targets; of classes it is the likeliest, or the `probabilities` of all.
    Into `output` (.npy or .csv) they are streamed; otherwise they come as an array, padded with NaN or -100.
    A `model` of your own is built by the name of its function, unless that is given again.

    >>> import numpy as np, tempfile, warnings
    >>> plan = find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = train(plan, numbers, validation=0, run=directory)
    ...     predict(directory, numbers[:5]).shape
    (5, 8, 1)
    """
    from oomguard.data.options import DataOptions
    from oomguard.train.predict import Wanted, run_prediction

    for name in options:
        _known(name, [*DataOptions.__struct_fields__])
    wanted = Wanted(output=output, probabilities=probabilities, device=device, model=model)
    return run_prediction(run, data, wanted, options)


def _spec_for(spec: Spec | None, data: Any, fields: dict[str, Any]) -> Spec:
    """The spec, or that of the fields, with the lengths of the data."""
    from oomguard.data.lengths import CUTTING, UNKNOWN, spec_for
    from oomguard.data.options import DataOptions

    options = DataOptions(**{name: value for name, value in fields.items() if name in CUTTING})
    own = {name: value for name, value in fields.items() if name not in (*CUTTING, *KNOBS)}
    if spec is None:
        own = {"lengths": UNKNOWN} | own
    elif isinstance(spec, Spec) and spec.lengths is None:
        spec = msgspec.structs.replace(spec, lengths=UNKNOWN)
    return spec_for(read_spec(spec, own), data, options)


def _known(name: str, names: list[str]) -> None:
    if name not in names:
        raise MisuseError(rule="Options go by their names", got=f"got {shown(name)}", advice=nearest(name, names))


def _words(name: str, text: str | Sequence[str]) -> tuple[str, ...]:
    """`throughput,seq` as its words."""
    words = text.split(",") if isinstance(text, str) else [*text] if isinstance(text, Iterable) else [text]
    if not all(isinstance(word, str) for word in words):
        raise MisuseError(
            rule=f"{flag(name)} takes a name, or several",
            got=f"got {shown(text)}",
            advice=f"Leave {name} out, or give it text.",
        )
    return tuple(word.strip() for word in words if word.strip())


def _seconds(timeout: float | str) -> float:
    """Seconds, or a duration as `--timeout` takes it."""
    return parse_seconds(timeout) if isinstance(timeout, str) else timeout
