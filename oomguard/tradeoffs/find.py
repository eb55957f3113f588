"""From what a user gives to what a table or a curve is about."""

from typing import Any

from oomguard.asked import find_budget, find_place, read_spec
from oomguard.candidate import KNOBS
from oomguard.checks import check_whole
from oomguard.spec import Spec
from oomguard.tradeoffs.make import check_apart, make_subject, usual_over
from oomguard.tradeoffs.measured import read_measured
from oomguard.tradeoffs.subject import Subject
from oomguard.tradeoffs.values import Over, check_own_spec, fields_for, read_over
from oomguard.units import MAX_BYTES, parse_bytes


def find_subject(
    spec: Spec | None = None,
    *,
    over: dict[str, Any] | None = None,
    device: str | None = None,
    budget: int | str | None = None,
    measured: Any = None,
    **fields: Any,
) -> tuple[Subject, Over]:
    """What `tradeoffs` and `curves` are about, and what varies.

    >>> subject, over = find_subject(cell="gru", seq=64, batch=4, device="t4")
    >>> subject.place.device, over["microbatch"]
    ('t4-16gb', [1, 2, 4])
    """
    evidence, varied = read_measured(measured), {} if over is None else read_over(over)
    given = {name: value for name, value in fields.items() if name not in KNOBS}
    fixed = {name: value for name, value in fields.items() if name in KNOBS and value is not None}
    if evidence.plan is not None and spec is None and "cell" not in given:
        check_own_spec(given)
        spec = evidence.plan.spec
    spec = read_spec(spec, given if spec else given | fields_for(varied, given))
    budget_bytes = parse_bytes(budget) if isinstance(budget, str) else budget
    check_whole("budget", budget_bytes, 1, MAX_BYTES)
    if device is None and evidence.plan is not None:
        place, limit_bytes = evidence.plan.where.place, evidence.plan.budget_bytes
    else:
        place, limit_bytes = find_place(device or "cpu"), find_budget(device or "cpu").limit_bytes
    subject = make_subject(spec, place, budget_bytes or limit_bytes, evidence, fixed)
    varied = varied if over is not None else usual_over(subject, fixed)
    check_apart(varied, fixed)
    return subject, varied
