"""The answers of the explorer: what the present settings need, what fits around them, and how to write them down."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._core.errors import Field, MisuseError, check_names, fields_of, flag
from oomguard._core.units import GIB, MIB, format_bytes, read_budget
from oomguard._device.find import find_budget, find_target
from oomguard._estimate.breakdown import Estimate, estimate_batch, estimate_step, margin_bytes
from oomguard._estimate.cards import names as card_names
from oomguard._estimate.target import Target
from oomguard._explore.explorer import Explorer, Settings
from oomguard._plan.advice import advise, in_flags
from oomguard._plan.make import pareto_front
from oomguard._predict.calibration import Calibration
from oomguard._probe.record import Record
from oomguard._probe.runner import Runner
from oomguard._report.estimate import title, to_json
from oomguard._report.subject import Subject, is_on
from oomguard._report.words import candidate_words, peak_words, times
from oomguard._search.space import segment_counts
from oomguard._spec.candidate import KNOBS, Candidate, Candidates, make_candidate, serve
from oomguard._spec.lengths import same_model
from oomguard._spec.read import make_spec
from oomguard._spec.spec import MAX_SEQ, Spec

SHOWN = ("cell", "hidden", "layers", "bidirectional", "features", "vocab", "optimizer", "seq", "batch")
"""The fields of a spec that the page has a control for. Other fields keep the value that the explorer began with."""
TURNED = ("microbatch", "segments", "precision", "window")  # the knobs that it has a control for
REACH = {"hidden": 4096, "layers": 16, "features": 4096, "seq": 1_000_000, "batch": 1024}
"""Where sliders end. The box beside a slider takes larger numbers."""
LENGTHS = tuple(2.0**power for power in range(-4, 5))  # of the region, in units of the length that is asked for
NO_MODEL = ("device", "budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Settings, checked."""

    spec: Spec
    candidate: Candidate
    target: Target
    budget_bytes: int


def read_question(settings: Settings) -> Question:
    """Check settings; raises MisuseError if they describe no candidate. Empty values count as left out."""
    check_names("setting", settings, [*fields_of(Spec), *KNOBS, *NO_MODEL])
    given = {name: value for name, value in settings.items() if value not in (None, "")}
    device, budget = str(given.pop("device", "cpu")), given.pop("budget", None)
    target = find_target(device)
    spec = make_spec({name: value for name, value in given.items() if name not in KNOBS})
    candidate = make_candidate(spec, **{name: value for name, value in given.items() if name in KNOBS})
    limit_bytes = read_budget(budget) or find_budget(device).limit_bytes
    return Question(spec=spec, candidate=candidate, target=target, budget_bytes=limit_bytes)


def settings_of(subject: Subject, budget: int | str | None = None) -> dict[str, Any]:
    """The settings that an explorer of a subject begins with."""
    spec, candidate = subject.spec, subject.candidate
    knobs = {name: value for name, value in _changed(candidate, Candidate).items() if name != "accumulation"}
    if candidate.microbatch == spec.batch:
        del knobs["microbatch"]
    settings = {name: getattr(spec, name) for name in SHOWN} | _changed(spec, Spec) | knobs
    if budget is None and subject.plan is not None:
        budget = exact_text(subject.budget_bytes)
    where = {"device": subject.target.device, "budget": None if budget is None else str(budget)}
    return {name: value for name, value in (settings | where).items() if value is not None}


def exact_text(size_bytes: int) -> str:
    """Bytes as a budget that means exactly as many."""
    unit, name = next((one for one in ((GIB, "GiB"), (MIB, "MiB")) if size_bytes % one[0] == 0), (1, "B"))
    return f"{size_bytes // unit}{name}"


def answer(settings: Settings, records: Sequence[Record] = ()) -> dict[str, Any]:
    """All that the page shows for some settings, or why they describe nothing."""
    try:
        question = read_question(settings)
        estimate = estimate_step(question.spec, question.candidate, question.target)
    except MisuseError as error:
        return {"error": str(error)}
    margin = margin_bytes(question.spec, estimate, question.target)
    estimate = replace(estimate, budget_bytes=question.budget_bytes, margin_bytes=margin)
    records = [one for one in records if is_on(one, question.target) and same_model(one.spec, question.spec)]
    calibration = Calibration(question.spec, records, question.target)
    safe_bytes = int(estimate.total_bytes + estimate.margin_bytes)
    if calibration.records:
        safe_bytes = calibration.predict(estimate)[0].safe_bytes
    fits = estimate.runs and safe_bytes <= question.budget_bytes
    words = f", by {times(len(records), 'probe')} of this model" if calibration.records else ""
    return {
        "fits": bool(fits),
        "estimate": to_json(estimate),
        "title": title(question.spec, estimate),
        "verdict": verdict(estimate, safe_bytes) + words,
        "moment": peak_words(str(estimate.moment)),
        "bars": bars({name: int(size) for name, size in estimate.terms.items()}, estimate),
        "advice": [] if fits and not estimate.fits else advise(question.spec, estimate, question.target),
        "region": _region(question, calibration),
        "front": _front(question, calibration, records),
        "measured": [*_measured(question, records)],
        "tracing": "",
        "copies": _copies(question, settings),
    }


def verdict(estimate: Estimate, safe_bytes: int) -> str:
    """Whether an estimate fits with its margin, and by how much."""
    if not estimate.runs:
        return f"Cannot run: {estimate.engine} cannot run {int(estimate.steps):,} steps at once"
    spare_bytes = int(estimate.budget_bytes or 0) - safe_bytes
    if spare_bytes >= 0:
        return f"Fits with {format_bytes(spare_bytes)} to spare"
    return f"Does not fit by {format_bytes(-spare_bytes)}"


def bars(parts: Mapping[str, int], estimate: Estimate) -> list[dict[str, Any]]:
    """The parts of a peak by size, then their total, the margin and the budget, each with its bytes."""
    sizes = sorted(((int(size), name) for name, size in parts.items() if size), reverse=True)
    rows = [(name, size) for size, name in sizes]
    rows += [(name, int(getattr(estimate, f"{name}_bytes") or 0)) for name in ("total", "margin", "budget")]
    return [{"name": name, "bytes": size, "text": format_bytes(size)} for name, size in rows]


def _region(question: Question, calibration: Calibration) -> dict[str, Any]:
    """For lengths and microbatches around those asked for: 2 fits as it is, 1 fits in segments, 0 does not fit."""
    spec = question.spec
    lengths = sorted({min(MAX_SEQ, max(1, round(spec.steps * share))) for share in LENGTHS})
    rows = sorted({*(1 << power for power in range(spec.batch.bit_length())), spec.batch})
    specs = [msgspec.structs.replace(spec, seq=steps, lengths=None) for steps in lengths]
    cells = [_fitting(question, calibration, other, rows) for other in specs]
    return {"microbatches": rows, "lengths": lengths, "cells": cells}


def _fitting(question: Question, calibration: Calibration, spec: Spec, rows: list[int]) -> list[int]:
    counts = [1, *(segment_counts(spec.steps)[::4] if question.candidate.window is None else [])]
    window = question.candidate.window
    window = None if window is None else min(window, spec.steps)
    sizes, pieces = map(np.ravel, np.meshgrid(rows, counts, indexing="ij"))
    knobs = msgspec.structs.asdict(question.candidate) | {"accumulation": None, "window": window}
    knobs |= {"microbatch": sizes, "segments": pieces}
    try:
        estimate = estimate_batch(spec, serve(spec, Candidates(**knobs)), question.target)
    except MisuseError:  # longer or wider than anything that can be estimated
        return [0] * len(rows)
    within = np.asarray(estimate.runs & (sum(_peaks(calibration, spec, estimate)) <= question.budget_bytes))
    table = np.broadcast_to(within, sizes.shape).reshape(len(rows), len(counts))
    return [2 if row[0] else int(row.any()) for row in table]


def _peaks(calibration: Calibration, spec: Spec, estimate: Estimate) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The peaks of candidates and their margins, as probes correct them, if there are any."""
    if not calibration.records:
        return np.asarray(estimate.total_bytes), np.asarray(estimate.margin_bytes)
    return calibration.of(spec).predict_memory(estimate)


def _front(question: Question, calibration: Calibration, records: Sequence[Record]) -> dict[str, Any]:
    """The candidates that fit and that no other one beats in memory and speed, the present one, and those measured.

    Speeds are shares of the fastest one's: guesses, as long as nothing was measured.
    """
    spec, target = question.spec, question.target
    sizes = sorted({*(max(1, round(spec.batch / passes)) for passes in (1, 2, 3, 4, 6, 8, 16, 32, 64)), 1})
    counts = [1, *segment_counts(spec.steps)[::2]] if question.candidate.window is None else [1]
    rows, pieces = map(np.ravel, np.meshgrid(sizes, counts, indexing="ij"))
    knobs = msgspec.structs.asdict(question.candidate) | {"accumulation": None}
    candidates = serve(spec, Candidates(**knobs | {"microbatch": rows, "segments": pieces}))
    estimate = estimate_batch(spec, candidates, target)
    seconds = calibration.predict_time(estimate)[0]
    alone = estimate_batch(spec, _alone(question.candidate), target)
    own, own_peak = float(calibration.predict_time(alone)[0][0]), int(_peaks(calibration, spec, alone)[0].item())
    peaks, margins = _peaks(calibration, spec, estimate)
    fits = np.flatnonzero(np.asarray(estimate.runs) & (peaks + margins <= question.budget_bytes))
    best = fits[pareto_front(peaks[fits], seconds[fits])] if len(fits) else fits
    ran = [one for one in records if one.spec == spec and one.peak_bytes and one.seconds_per_step]
    fastest = float(min([own, *seconds[best], *(one.seconds_per_step or own for one in ran)]))

    def point(peak_bytes: int, its_seconds: float, **more: Any) -> dict[str, Any]:
        size = {"peak_bytes": peak_bytes, "text": format_bytes(peak_bytes)}
        return {**size, "speed": fastest / its_seconds, **more}

    ordered = sorted(best.tolist(), key=lambda row: int(peaks[row]))
    chosen = [{"microbatch": int(rows[row]), "segments": int(pieces[row])} for row in ordered]
    return {
        "points": [
            point(int(peaks[row]), float(seconds[row]), knobs=knobs) for row, knobs in zip(ordered, chosen, strict=True)
        ],
        "now": point(own_peak, own),
        "ran": [
            point(one.peak_bytes or 0, one.seconds_per_step or own, words=candidate_words(one.candidate)) for one in ran
        ],
        "probes": len(calibration.own),
    }


def _alone(candidate: Candidate) -> Candidates:
    """One candidate as an array of one."""
    return Candidates(**msgspec.structs.asdict(candidate) | {"microbatch": [candidate.microbatch]})


def _measured(question: Question, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Records, beside the estimate of what they ran."""
    for record in records:
        if record.peak_bytes is None:
            continue
        estimate = estimate_step(record.spec, record.candidate, question.target)
        yield {
            "microbatch": record.candidate.microbatch,
            "seq": record.spec.steps,
            "words": candidate_words(record.candidate),
            "verdict": record.verdict.name,
            "measured": format_bytes(record.peak_bytes),
            "estimated": format_bytes(int(estimate.total_bytes)),
        }


def _copies(question: Question, settings: Settings) -> dict[str, str]:
    """The settings as a command, as Python and as the file of a spec."""
    spec, knobs = _changed(question.spec, Spec), _changed(question.candidate, Candidate)
    given = {name for name, value in settings.items() if value not in (None, "")}
    knobs = {name: value for name, value in knobs.items() if name != "accumulation" and name in given}
    where = {name: settings[name] for name in NO_MODEL if name in given and settings[name] != "cpu"}
    model = {"model" if name == "cell" else name: value for name, value in spec.items() if name != "lengths"}
    switched_off = {f"no_{name}": True for name, value in knobs.items() if value is False}
    left = {name: value for name, value in knobs.items() if value is not False}
    command = f"oomguard estimate {in_flags(**model, **left, **switched_off, **where)}"
    if question.spec.lengths is not None:
        pairs = (f"{steps}:{count}" for steps, count in question.spec.lengths.items())
        command += f" {flag('lengths')} {','.join(pairs)}"
    arguments = ", ".join(f"{name}={value!r}" for name, value in {**spec, **knobs, **where}.items())
    lines = [f"{name} = {toml_value(value)}" for name, value in spec.items()]
    return {"command": command, "python": f"oomguard.estimate({arguments})", "toml": "\n".join(lines)}


def _changed(value: msgspec.Struct, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields whose values are not those that follow from the others."""
    fields = {name: getattr(value, name) for name in fields_of(struct)}
    usual = {name: field.default for name, field in fields_of(struct).items()}
    if isinstance(value, Spec):
        usual |= {"embedding": value.hidden} if value.vocab else {"features": 64}
        usual |= {"outputs": value.vocab or 1, "loss": "cross-entropy" if value.vocab else "mse"}
    return {name: field for name, field in fields.items() if field != usual[name]}


def toml_value(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {number}' for key, number in value.items()) + "}"
    return json.dumps(value)


def controls() -> list[dict[str, Any]]:
    """The controls of the page, from the fields of a spec and the table of knobs."""
    fields = fields_of(Spec)
    own = [control_of(fields[name]) for name in SHOWN] + [control_of(KNOBS[name].field) for name in TURNED]
    return [*own, *places()]


def places() -> list[dict[str, Any]]:
    """The controls of the device and of the budget."""
    device = {"name": "device", "kind": "choice", "choices": ["cpu", *card_names()], "optional": False}
    return [device, {"name": "budget", "kind": "text", "optional": True}]


def control_of(field: Field) -> dict[str, Any]:
    """The control of a field."""
    control: dict[str, Any] = {"name": field.name, "kind": "text", "optional": field.optional}
    if field.name == "microbatch":
        control["optional"] = True  # the batch
    if field.choices:
        return control | {"kind": "choice", "choices": [*field.choices]}
    if field.kind is bool:
        return control | {"kind": "switch"}
    if field.bounds is not None:
        high = REACH.get(field.name)
        return control | {"kind": "number", "low": field.bounds.low, "most": field.bounds.high, "high": high}
    return control


class SpecExplorer(Explorer):
    """Answers questions about a spec by arithmetic."""

    def __init__(self, settings: Settings, records: Sequence[Record] = (), *, probes: bool = False) -> None:
        super().__init__(settings, probes=probes)
        self.records = [*records]

    def controls(self) -> list[dict[str, Any]]:
        return controls()

    def answer(self, settings: Settings) -> dict[str, Any]:
        return answer(settings, self.records)

    def probe(self, settings: Settings) -> Record:
        question = read_question(settings)
        with Runner(question.target.device) as runner:
            record = runner.probe(question.spec, question.candidate, budget_bytes=question.budget_bytes)
        self.records.append(record)
        return record
