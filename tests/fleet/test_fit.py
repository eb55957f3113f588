"""Jobs that are fitted together get what a plan for a named card gives each of them alone."""

from typing import Any

import pytest

import oomguard
from oomguard._device.find import find_budget, find_target
from oomguard._estimate import cards
from oomguard._fleet.fit import Request, fit_all
from oomguard._fleet.pairs import NEVER_BYTES, Pairs
from oomguard._plan.find import Question, Site, _problem, find_plan
from oomguard._plan.make import best

NAMES = ("p100-16gb", "v100-16gb", "t4", "rtx-4090", "a100-80gb", "h100-80gb")
SPECS: list[dict[str, Any]] = [
    {"cell": "lstm", "seq": 500},
    {"cell": "lstm", "seq": 30_000},
    {"cell": "lstm", "seq": 200_000, "batch": 3},
    {"cell": "lstm", "seq": 64, "batch": 4000},
    {"cell": "gru", "seq": 30_000, "hidden": 2000, "batch": 50},
    {"cell": "gru", "seq": 700, "hidden": 2000, "batch": 700},
    {"cell": "rnn", "seq": 5000, "hidden": 12_000, "batch": 7},
    {"cell": "lstm", "seq": 9000, "bidirectional": True, "hidden": 640, "batch": 64},
    {"cell": "lstm", "seq": 100_000, "bidirectional": True, "hidden": 640, "batch": 64},
    {"cell": "gru", "seq": 4000, "vocab": 50_000, "sparse_embedding": True, "optimizer": "sgd", "batch": 256},
    {"cell": "gru", "seq": 8000, "vocab": 50_000, "sparse_embedding": True, "optimizer": "sgd", "batch": 64},
    {"cell": "lstm", "lengths": {100: 900, 60_000: 9}, "packed": True, "batch": 256},
    {"cell": "gru", "seq": 1, "batch": 1},
]
RULES: list[dict[str, Any]] = [
    {},
    {"allow": ()},
    {"allow": ("precision", "window")},
    {"fixed": {"segments": 1}},
    {"fixed": {"microbatch": 1}},
    {"fixed": {"precision": "fp16"}},
]


def alone(request: Request, card: str) -> tuple[object, ...]:
    """The candidate, the peak and the margin of a plan for a named card; what is needed if there is none."""
    question = Question(spec=request.spec, devices=(card,), allow=request.allow, fixed=request.fixed)
    table, row = best(_problem(question, Site(target=find_target(card), budget=find_budget(card))), ())
    if row is None:
        return (int(table.expected.safe_bytes[table.smallest]) if table.runs.any() else 2 * NEVER_BYTES,)
    expected = table.expected[row]
    return table.candidates[row], expected.peak_bytes, expected.margin_bytes


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_many_jobs_get_what_each_gets_alone(rules: dict[str, Any]) -> None:
    requests = [
        Request(spec=oomguard.Spec(**fields), **rules)
        for fields in SPECS
        if "window" not in rules.get("allow", ()) or not fields.get("bidirectional")
    ]
    pairs = Pairs(len(requests), len(NAMES))
    fit_all(requests, [*map(cards.card, NAMES)], pairs, range(len(requests)))
    for number, request in enumerate(requests):
        for column, name in enumerate(NAMES):
            needed_bytes = int(pairs.needed_bytes[number, column])
            found: tuple[object, ...] = (min(needed_bytes, 2 * NEVER_BYTES),)  # the runtime is added to it
            if pairs.fits[number, column]:
                candidate = pairs.candidate(number, column, request.spec.batch)
                found = candidate, pairs.peak_bytes[number, column], pairs.margin_bytes[number, column]
            assert found == alone(request, name), (request, name)
    assert pairs.fits.any()


def test_it_is_what_a_plan_says() -> None:
    fleet = oomguard.fleet([{"name": "a", "cell": "lstm", "seq": 50_000, "hidden": 512}], ["t4"], progress=False)
    plan = find_plan(Question(spec=oomguard.Spec(cell="lstm", seq=50_000, hidden=512), devices=("t4",)))
    option = fleet.result(0).cheapest
    assert option is not None
    assert (option.candidate, option.peak_bytes, option.margin_bytes) == (
        plan.candidate,
        plan.expected.peak_bytes,
        plan.expected.margin_bytes,
    )


def test_jobs_that_ask_for_the_same_are_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = list[int]()

    def count(requests: Any, *rest: Any) -> None:
        fitted.append(len(requests))
        fit_all(requests, *rest)

    monkeypatch.setattr("oomguard._fleet.find.fit_all", count)
    jobs = [{"name": f"job {number}", "cell": "gru", "seq": 100 + number % 2} for number in range(10)]
    found = oomguard.fleet(jobs, ["t4"], progress=False)
    assert fitted == [2]
    assert len({found.result(number).needed_bytes for number in range(10)}) == 2
