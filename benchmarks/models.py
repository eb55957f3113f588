"""The models of the benchmarks, in two sets that have no hidden size in common: TUNE and JUDGE.

Constants of oomguard may be fitted to models of TUNE, and only to those. Claims about plans, batches and estimates are
measured on JUDGE, and on random models with the hidden sizes of JUDGE. tests/test_benchmarks.py checks that no comment
on a constant names a judged model.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from oomguard._core.units import GIB, MIB
from oomguard._estimate import terms
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.call import GATES
from oomguard._spec.candidate import make_candidate
from oomguard._spec.read import make_spec

TUNE_HIDDEN = (32, 48, 96, 128, 256, 384)
JUDGE_HIDDEN = (80, 112, 160, 200, 320, 512)
HIDDEN = {"tune": TUNE_HIDDEN, "judge": JUDGE_HIDDEN}
"""The hidden sizes of each set."""
JUDGE_VOCAB = 2000
"""With a vocabulary of at least this size, a model of hidden size 64 is judged too. Other models of hidden size 64 are
in neither list. Among stored rows they count as tune rows."""


class Model(NamedTuple):
    """A model, and a budget for its training step."""

    name: str
    fields: dict[str, Any]
    """Fields of the spec."""
    budget_bytes: int
    plain_fits: bool
    """Whether the plain step fits the budget: the whole batch in one pass, with the heap setting `tight`."""


TUNE = (
    Model("lstm-128x1", {"cell": "lstm", "hidden": 128, "layers": 1, "seq": 400, "features": 16, "batch": 32},
          900 * MIB, True),
    Model("lstm-128x2", {"cell": "lstm", "hidden": 128, "layers": 2, "seq": 600, "features": 16, "batch": 32},
          450 * MIB, False),
    Model("gru-128x1", {"cell": "gru", "hidden": 128, "layers": 1, "seq": 500, "features": 16, "batch": 32},
          400 * MIB, False),
    Model("rnn-96x2", {"cell": "rnn", "hidden": 96, "layers": 2, "seq": 700, "features": 16, "batch": 48},
          380 * MIB, False),
    Model("lstm-48x2-vocab3000",
          {"cell": "lstm", "hidden": 48, "layers": 2, "seq": 150, "vocab": 3000, "batch": 32}, 410 * MIB, False),
    Model("gru-96x1-bidirectional",
          {"cell": "gru", "hidden": 96, "layers": 1, "bidirectional": True, "seq": 400, "features": 16, "batch": 32},
          600 * MIB, True),
    Model("lstm-384x1", {"cell": "lstm", "hidden": 384, "layers": 1, "seq": 200, "features": 32, "batch": 32},
          700 * MIB, True),
)  # fmt: skip
"""Models that constants may be fitted to."""
JUDGE = (
    Model("lstm-160x2-vocab2000",
          {"cell": "lstm", "hidden": 160, "layers": 2, "seq": 100, "vocab": 2000, "batch": 32}, 395 * MIB, False),
    Model("gru-112x1-bidirectional",
          {"cell": "gru", "hidden": 112, "layers": 1, "bidirectional": True, "seq": 400, "features": 16, "batch": 32},
          390 * MIB, False),
    Model("rnn-200x2", {"cell": "rnn", "hidden": 200, "layers": 2, "seq": 600, "features": 24, "batch": 32},
          375 * MIB, False),
    Model("lstm-320x1", {"cell": "lstm", "hidden": 320, "layers": 1, "seq": 240, "features": 32, "batch": 32},
          700 * MIB, True),
    Model("gru-80x3", {"cell": "gru", "hidden": 80, "layers": 3, "seq": 250, "features": 16, "batch": 48},
          600 * MIB, True),
    Model("lstm-64x1-vocab5000",
          {"cell": "lstm", "hidden": 64, "layers": 1, "seq": 120, "vocab": 5000, "batch": 32}, 430 * MIB, False),
    Model("lstm-512x1", {"cell": "lstm", "hidden": 512, "layers": 1, "seq": 112, "features": 40, "batch": 32},
          650 * MIB, True),
)  # fmt: skip
"""Models that plans are judged on."""
SETS = {"tune": TUNE, "judge": JUDGE}
BATCH_SEQ = {
    **{"lstm-160x2-vocab2000": 50, "gru-112x1-bidirectional": 100, "rnn-200x2": 200},
    **{"lstm-320x1": 100, "gru-80x3": 100, "lstm-512x1": 50},
}
"""Judged models whose largest batch is looked for, with the time steps of their sequences. The sequences are short, so
that 100 to 700 of them fit: with fewer, one sequence would be more than 1 % of the batch."""
BATCH_BUDGETS_BYTES = (600 * MIB, 900 * MIB)

ROW_GROWTH_BYTES = (50 * MIB, 2 * GIB)
"""Range of the growth of a random row."""
MAX_STEPS = 20_000
"""Time steps of a random row that runs on native kernels, which compute them one by one."""
CASE_BYTES = (360 * MIB, 1200 * MIB)
"""Range of the budgets of random cases."""
CASE_OPERATIONS = 2e10
"""Operations of a step of a random case. The limit keeps a step under about a second."""


def is_judged(fields: dict[str, Any]) -> bool:
    """Tell whether a model belongs to the judged set, by its hidden size."""
    return fields["hidden"] in JUDGE_HIDDEN or (fields["hidden"] == 64 and (fields.get("vocab") or 0) >= JUDGE_VOCAB)


def draw_row(rng: random.Random, sizes: Sequence[int], max_work: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a random spec with one of these hidden sizes, and knobs of a candidate.

    Its step grows by 50 MiB to 2 GiB. `max_work` limits the multiplications in two optimizer steps.
    """
    while True:
        drawn = _try_row(rng, sizes, max_work)
        if drawn is not None:
            return drawn


def _try_row(rng: random.Random, sizes: Sequence[int], max_work: float) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Draw a row. Return None if it is too large, too small or too slow."""
    spec: dict[str, Any] = {
        "cell": rng.choice(["lstm", "gru", "rnn"]),
        "hidden": rng.choice(sizes),
        "layers": rng.choice([1, 2, 3]),
        "bidirectional": rng.random() < 0.3,
        "head": rng.choice(["per-step", "per-step", "last-step"]),
        "optimizer": rng.choice(["adam", "adam", "sgd"]),
        "batch_first": rng.random() < 0.1,
        "layer_norm": rng.random() < 0.1,
        "dropout": 0.2 if rng.random() < 0.1 else 0.0,
    }
    if rng.random() < 0.45:
        spec |= {"vocab": rng.choice([50, 256, 1000, 5000, 20_000, 50_000]), "embedding": rng.choice([64, 128, 300])}
        spec |= {"outputs": 2} if spec["head"] == "last-step" else {}
    else:
        spec |= {"features": rng.choice([1, 16, 64, 128, 300]), "outputs": rng.choice([1, 8])}
    microbatch = 2 ** rng.randrange(9)
    segments = 1 if spec["bidirectional"] or rng.random() < 0.35 else rng.choice([2, 4, 10, 25, 50, 100])
    knobs: dict[str, Any] = {"microbatch": microbatch, "segments": segments}
    if spec["cell"] == "lstm" and rng.random() < 0.25:
        knobs["engine"] = "native"
    spec["batch"] = microbatch * rng.choice([1, 1, 2, 3]) - (rng.randrange(microbatch) if rng.random() < 0.2 else 0)
    if spec["batch"] < microbatch:
        return None
    return _with_length(spec, knobs, MIB * 2 ** rng.uniform(5.9, 10.8 if segments == 1 else 7), max_work)


def _with_length(
    spec: dict[str, Any], knobs: dict[str, Any], growth_bytes: float, max_work: float
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Set the length at which the estimated growth is about `growth_bytes`. Return None if the row is not usable."""
    low, high = 4 * knobs["segments"], 200_000
    while high - low > low // 50 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if row_growth_bytes(spec | {"seq": middle}, knobs) < growth_bytes else (low, middle)
    spec = spec | {"seq": low}
    width = spec["hidden"] * (2 if spec["bidirectional"] else 1)
    outputs = spec.get("outputs", spec.get("vocab")) if spec["head"] == "per-step" else 0
    work = 6 * low * spec["batch"] * (2 * GATES[spec["cell"]] * width * width * spec["layers"] + width * outputs)
    slow = (spec["cell"] != "lstm" or "engine" in knobs) and low * spec["layers"] * 2 > MAX_STEPS
    inside = ROW_GROWTH_BYTES[0] <= row_growth_bytes(spec, knobs) <= ROW_GROWTH_BYTES[1]
    return (spec, knobs) if inside and work < max_work and not slow else None


def row_growth_bytes(spec: dict[str, Any], knobs: dict[str, Any]) -> int:
    """Estimate the growth of a row over the runtime."""
    made = make_spec(spec)
    return int(estimate_step(made, make_candidate(made, **knobs)).growth_bytes)


def draw_case(rng: random.Random, sizes: Sequence[int]) -> tuple[dict[str, Any], int]:
    """Draw a random spec with one of these hidden sizes, and a budget in which the plain step often does not fit."""
    cell, has_tokens = rng.choice(["lstm", "gru", "rnn"]), rng.random() < 0.25
    while True:  # the cell and the kind of input stay, or else most cases would be those that need the least work
        fields: dict[str, Any] = {
            "cell": cell,
            "seq": round(50 * 60 ** rng.random()),
            "hidden": rng.choice(sizes),
            "layers": rng.choice([1, 2, 3]),
            "batch": rng.randint(1, 64),
            "bidirectional": rng.random() < 0.25,
            "dropout": rng.choice([0.0, 0.0, 0.2]),
            "head": rng.choice(["per-step", "per-step", "last-step"]),
            "optimizer": rng.choice(["adam", "adamw", "sgd", "sgd-momentum", "rmsprop", "adagrad"]),
        }
        fields |= {"vocab": rng.choice([50, 2000, 5000])} if has_tokens else {"features": rng.choice([1, 8, 64])}
        spec = make_spec(fields)
        plain = estimate_step(spec, make_candidate(spec))
        # The budget leaves 0.1 to 1.2 times the growth of the plain step.
        room_bytes = plain.growth_bytes * 0.1 * 12 ** rng.random()
        budget_bytes = round(plain.terms["runtime"] + room_bytes)
        embedding = (spec.vocab or 0) * spec.inputs  # these weights are only looked up
        operations = 6 * (terms.weights_bytes(spec) / 4 - embedding) * spec.steps * spec.batch
        if CASE_BYTES[0] <= budget_bytes <= CASE_BYTES[1] and operations <= CASE_OPERATIONS:
            return fields, budget_bytes
