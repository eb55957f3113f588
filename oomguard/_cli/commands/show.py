"""`oomguard tradeoffs`, `explore` and `show`."""

import json as json_
import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from oomguard._cli import flags, parsing
from oomguard._cli.flags import JSON, LOUDNESS, SPEC
from oomguard._cli.program import DOES_NOT_FIT, FITS, Answer, answer, command, say
from oomguard._core.errors import MisuseError, check_whole, conflict, wrong
from oomguard._core.units import read_budget


@command("tradeoffs", Spec=SPEC, **flags.FIXED_KNOBS, Where=flags.WHERE, Table=flags.TABLE, Output=flags.TABLE_OUTPUT)
def _tradeoffs(*, output: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Compare candidates: what each needs in memory and how fast it is, as a table or as charts.

    Figures come from arithmetic, for any device; with a plan or a ledger, measurements correct them. By default,
    microbatch, segments and precision vary. A range is 1..64 (all), 1..64*2 (doublings) or 100..1000+100 (steps).

    [bold]Examples[/bold]

    - oomguard tradeoffs --model lstm --seq 10000 --device a100-80gb
    - oomguard tradeoffs --plan plan.json --output tradeoffs.html
    - oomguard tradeoffs --model gru --over seq=1000..64000*2 --over segments=1,16
    - oomguard tradeoffs --model package.module:task --seq 1000

    Exit codes: 0 something fits, 1 nothing fits, 2 wrong usage.
    """
    name, knobs = parsing.read_task(values, ("batch",))
    if name is not None:
        return _task_tradeoffs(name, knobs, values, output, json=json)
    from oomguard._report.subject import find_subject
    from oomguard._report.tradeoffs import check_written, make_table, save, show_tradeoffs, table_json

    arguments = parsing.read_table(values)
    budget_bytes = read_budget(values.get("budget"))
    curve = check_written(output, values.get("curve"))
    if output is not None:
        parsing.check_output(output, values, f"tradeoffs{Path(output).suffix}")
    subject = find_subject(**arguments, budget=budget_bytes)
    table = make_table(subject)
    code = FITS if table["fits"].any() else DOES_NOT_FIT
    path = None if output is None else save(subject, table, output, curve)
    text = partial(show_tradeoffs, subject, table, path)
    return answer(json, lambda: table_json(subject, table), text, code)


def _task_tradeoffs(
    name: str, knobs: dict[str, Any], values: dict[str, Any], output: str | None, *, json: bool
) -> Answer:
    from oomguard._api.measure import tradeoffs
    from oomguard._report.task_table import check_task_output, save_task_table, show_task_table, task_table_json

    for other in ("plan", "ledger", "curve"):
        if other in values:
            raise conflict("The table of a task is traced", f"--model {name}", f"--{other}")
    check_task_output(output)
    if output is not None:
        parsing.check_output(output, values, "tradeoffs.csv")
    where = {key: values[key] for key in ("device", "budget") if key in values}
    table = tradeoffs(name, over=parsing.read_varied(values), **where, **knobs)
    path = None if output is None else save_task_table(table, output)
    code = FITS if table["fits"].any() else DOES_NOT_FIT
    return answer(json, lambda: task_table_json(table), partial(show_task_table, table, path), code)


@command(
    "explore",
    flags.PLAN._replace(optional=True),
    Spec=SPEC,
    **flags.FIXED_KNOBS,
    Where=flags.WHERE,
    Page=flags.EXPLORED,
    Output=[JSON],
)
def _explore(*, plan: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Explore trade-offs in a browser: sliders for model, knobs, device and budget, answered at once by arithmetic.

    The page is served on this machine alone, under an address that nobody can guess, until Ctrl-C. With a plan or a
    ledger, measured peaks stand beside estimates. --json prints the answer for the given settings, and serves nothing.

    [bold]Examples[/bold]

    - oomguard explore --model lstm --seq 10000 --budget 6GiB
    - oomguard explore plan.json
    - oomguard explore --preset char-lm --device rtx-4090 --port 8000
    - oomguard explore --model gru --seq 2000 --allow-probes
    - oomguard explore --model package.module:task --seq 1000 --budget 6GiB
    """
    from oomguard._api.measure import make_explorer

    options = parsing.read_options(values, flags.EXPLORED)
    check_whole("port", options.get("port"), 0, 65_535)
    name, knobs = parsing.read_task(values)
    if name is not None and "ledger" in values:
        raise conflict("The records of a task are in its plan", f"--model {name}", "--ledger")
    if name is not None:
        own = {key: values.get(key) for key in ("device", "budget")}
        arguments = {"about": name, "measured": plan} | knobs | own
    else:
        arguments = parsing.read_table(values | ({} if plan is None else {"plan": plan}))
        arguments = {"about": arguments.pop("spec"), "budget": values.get("budget")} | arguments
    explorer = make_explorer(**arguments, allow_probes=options.get("allow_probes", False))
    with closing(explorer):
        if json:
            return Answer(json_.dumps(explorer.whole_answer(explorer.settings), indent=2) + "\n")
        from oomguard._explore.server import serve

        serve(explorer, options.get("port", 0), lambda address: say(f"Serving {address} until Ctrl-C"))
    return Answer("")


@command("show", flags.PLAN, Output=[flags.SEQUENCES, flags.HTML, flags.FORCE, *LOUDNESS, JSON])
def _show(*, plan: str, html: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Explain a plan: the choice and its reasons, the evidence, what to expect, and the fallbacks.

    For the directory of a run, also what it has reached and the options that it was trained with.

    [bold]Examples[/bold]

    - oomguard show plan.json
    - oomguard show plan.json --html report.html --sequences 50000
    - oomguard show plan.json --json
    """
    from oomguard._plan.store import load_plan
    from oomguard._plan.task_value import TaskPlan
    from oomguard._report.plan import explain, plan_json
    from oomguard._report.runs import run_section
    from oomguard._report.tables import show_sections
    from oomguard._report.task import explain_task

    sequences = parsing.read_options(values, [flags.SEQUENCES]).get("sequences")
    check_whole("sequences", sequences, 1, 10**15)
    loaded = load_plan(plan)
    run = run_section(plan, is_spec=not isinstance(loaded, TaskPlan))
    if isinstance(loaded, TaskPlan):
        if html is not None or sequences is not None:
            rule, advice = "The plan of a task is shown as text or JSON", "Leave --html and --sequences out."
            raise MisuseError(rule=rule, got="got another form", advice=advice)
        return answer(json, lambda: plan_json(loaded), partial(show_sections, [*explain_task(loaded), *run]))
    if html is not None:
        from oomguard._report.page import save_page

        if os.path.exists(html) and os.path.samefile(html, plan):
            raise wrong("html", "another file than the plan", html, "Write it as --html report.html.")
        parsing.check_output(html, values, "report.html", "html")
        path = save_page(loaded, html, sequences)
        return Answer(plan_json(loaded) if json else f"{path}\n")
    text = partial(show_sections, [*explain(loaded, sequences), *run])
    return answer(json, lambda: plan_json(loaded), text)
