"""`oomguard plan` and `oomguard work`."""

from functools import partial
from typing import Any

import msgspec

from oomguard._cli import flags, parsing
from oomguard._cli.flags import JSON, LOUDNESS, SPEC
from oomguard._cli.program import DOES_NOT_FIT, FITS, INTERRUPTED, MISUSE, Answer, answer, command, say
from oomguard._core.errors import MisuseError
from oomguard._core.progress import tell
from oomguard._core.units import parse_seconds


@command(
    "plan",
    Spec=SPEC,
    Data=flags.CUT,
    **flags.FIXED_KNOBS,
    Where=flags.ANYWHERE,
    Search=flags.SEARCH,
    Output=flags.PLANNED,
)
def _plan(*, device: str = "cpu", output: str = "plan.json", json: bool = False, **values: Any) -> Answer:
    """Find the fastest candidate that fits, by a few real probes, and write it to a plan file with its evidence.

    Probes run in child processes that are limited to the budget. Ctrl-C ends the search with the best plan so far.
    For a card that this machine does not have, the plan is made by arithmetic alone. With --storage, workers (oomguard
    work) take part, and with --on, the nodes of a Ray cluster run the probes.

    [bold]Examples[/bold]

    - oomguard plan --model lstm --seq 10000
    - oomguard plan --preset char-lm --device a100-80gb --maximize throughput,seq
    - oomguard plan --model lstm --data sales.csv --id shop --target sales
    - oomguard plan --model package.module:task --budget 6GiB

    Exit codes: 0 a plan was written, 1 nothing fits (with advice) or --require-measured is not met, 2 wrong usage.
    """
    from oomguard._api.plan import find_feasible_config
    from oomguard._plan.store import save_plan
    from oomguard._plan.task_value import TaskPlan
    from oomguard._plan.value import NothingFitsError, Plan
    from oomguard._report.plan import explain_shortfall, plan_json, shortfall_json, show_result, unmeasured_words
    from oomguard._report.tables import show_sections
    from oomguard._report.task import show_task_result

    parsing.check_output(output, values)
    name, knobs = parsing.read_task(values, ("batch",))
    spec, fixed, data = parsing.read_planned(values) if name is None else (name, knobs, None)
    options = parsing.read_options(values, [flags.BUDGET, *flags.SEARCH])
    plan: Plan | TaskPlan
    try:
        asked: dict[str, Any] = {"device": device} | options | fixed
        plan = find_feasible_config(**asked) if name is None else find_feasible_config(name, **asked)
    except NothingFitsError as error:
        shortfall = error.shortfall
        text = partial(show_sections, explain_shortfall(shortfall, spec, device), first_style="bold red")
        return answer(json, lambda: shortfall_json(shortfall), text, DOES_NOT_FIT)
    if data is not None:
        plan = msgspec.structs.replace(plan, data=data)
    try:
        path, code = save_plan(plan, output), FITS
    except MisuseError as error:  # the plan is shown even if it cannot be saved
        say(str(error))
        path, code = None, MISUSE
    if code == FITS and values.get("require_measured") and not plan.confirmed:
        say(f"--require-measured is not met. {unmeasured_words(plan)}")
        code = DOES_NOT_FIT
    show = partial(show_task_result, plan, path) if isinstance(plan, TaskPlan) else partial(show_result, plan, path)
    return answer(json, lambda: plan_json(plan), show, code)


@command("work", Where=[flags.PRESENT], Search=flags.WORKED, Output=[*LOUDNESS, JSON])
def _work(*, storage: str | None = None, device: str = "cpu", json: bool = False, **values: Any) -> Answer:
    """Run probes for a search that oomguard plan has begun with the same --storage, until the search ends.

    Start one worker per card or machine, of the kind that the search is for. A worker that is killed loses nothing:
    another one runs its probe again. The storage is a file for workers of one machine, and PostgreSQL for several.

    [bold]Examples[/bold]

    - oomguard work --storage sqlite:///search.db
    - oomguard work --storage postgresql://me@host/searches --device cuda:0
    - oomguard work --storage postgresql://me@host/searches --wait 10min

    Exit codes: 0 the search has ended, 2 wrong usage, 130 interrupted.
    """
    from oomguard._report.progress import following, search_status
    from oomguard._report.work import show_work, work_json

    if not storage:
        advice = "Write it as oomguard work --storage sqlite:///search.db."
        raise MisuseError(rule="oomguard work needs the storage of a search", got="got no --storage", advice=advice)
    wait = parse_seconds(values.get("wait", 0.0), "wait")
    with following(True, search_status) as follow:
        tell("Looking for a search")
        from oomguard._search.work import work

        done = work(storage, device, values.get("study"), wait, follow)
    code = INTERRUPTED if done.ended == "interrupted" else FITS
    return answer(json, lambda: work_json(done), partial(show_work, done), code)
