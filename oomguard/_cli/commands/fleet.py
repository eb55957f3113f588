"""`oomguard check` and `oomguard fleet`."""

from functools import partial
from typing import Any

from oomguard._cli import flags, parsing
from oomguard._cli.flags import JSON, Flag
from oomguard._cli.program import DOES_NOT_FIT, FITS, Answer, answer, command
from oomguard._core.errors import MisuseError, check_choice

JOBS = Flag("jobs", "JOBS", "TOML file of jobs.")


@command("check", flags.PLAN, Where=[flags.CHECKED], Output=[JSON])
def _check(*, plan: str, device: str | None = None, json: bool = False, **_: Any) -> Answer:
    """Check at the start of a job whether this is the machine that a plan was made for: card, free memory, software.

    Driver, card and free memory are read through NVML, and versions from installed packages. Nothing is run and torch
    is not imported, so the answer takes less than two seconds. If something differs, it is named, with the first
    fallback of the plan that fits what is free.

    [bold]Examples[/bold]

    - oomguard check plan.json
    - oomguard check runs/lstm-1000 --json
    - oomguard check plan.json --device cuda:1

    Exit codes: 0 all is as planned, 1 something differs, 2 wrong usage.
    """
    from oomguard._plan.check import check_plan
    from oomguard._plan.store import load_plan
    from oomguard._report.check import check_json, show_check

    found = check_plan(load_plan(plan), device)
    show = partial(show_check, found, plan)
    return answer(json, lambda: check_json(found, plan), show, FITS if found.ok else DOES_NOT_FIT)


@command("fleet", JOBS, Cards=[flags.CARD_LIST], Output=flags.FLEET_OUTPUT)
def _fleet(*, jobs: str, cards: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Find the cheapest and the fastest card for each of many jobs, with the knobs with which it fits.

    A jobs file has \\[\\[job]] tables with a name and the fields of a spec, or the name of a task; lists are grids. A
    cards file has \\[\\[card]] tables with name, count and price (per hour). Memory is by arithmetic; times and costs
    are known where `measured` of a job names plans or ledgers.

    [bold]Examples[/bold]

    - oomguard fleet jobs.toml --cards cards.toml
    - oomguard fleet jobs.toml --cards cards.toml --html fleet.html
    - oomguard fleet jobs.toml --cards cards.toml --emit slurm --output slurm

    Exit codes: 0 every job fits a card, 1 some job fits none (with advice), 2 wrong usage.
    """
    from oomguard._fleet.emit import emit
    from oomguard._fleet.find import find_fleet
    from oomguard._fleet.read import read_cards, read_jobs
    from oomguard._report.fleet import save_fleet, show_fleet

    if cards is None:
        advice = "Write it as oomguard fleet jobs.toml --cards cards.toml."
        raise MisuseError(rule="oomguard fleet needs a list of cards", got="got no --cards", advice=advice)
    for name in ("csv", "html"):
        if name in values:
            parsing.check_output(values[name], values, f"fleet.{name}", name)
    scheduler, folder = values.get("emit"), values.get("output")
    if (scheduler is None) != (folder is None):
        rule = "--emit and --output are given together"
        raise MisuseError(rule=rule, got="got one", advice="Write it as --emit slurm --output jobs.")
    if scheduler is not None:
        check_choice("emit", scheduler, flags.SCHEDULERS)
    found = find_fleet(read_jobs(jobs), read_cards(cards))
    written = [save_fleet(found, values[name], page=name == "html") for name in ("csv", "html") if name in values]
    if scheduler is not None and folder is not None:
        how = {name: bool(values.get(name)) for name in ("fastest", "force")}
        written += emit(found, scheduler, folder, **how)
    show = partial(show_fleet, found, written)
    return answer(json, found.to_dict, show, FITS if found.fits else DOES_NOT_FIT)
