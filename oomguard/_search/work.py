"""Workers: processes that take probes of a search which another process began, perhaps on other machines.

The study of a search says what a worker must know. The rest is Optuna's: records and running probes of all workers are
in its storage, and every worker chooses its next probe by the same rule.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from oomguard._core.errors import MisuseError, nearest, shown
from oomguard._core.progress import Status, tell
from oomguard._device.cpu import cores
from oomguard._device.find import Device, find_target, open_device
from oomguard._probe.cache import Cache, user_directory
from oomguard._probe.record import torch_version
from oomguard._probe.runner import Runner
from oomguard._search.run import Limits, Progress, Search, measured_on
from oomguard._search.space import Problem
from oomguard._search.study import OUTAGES, AbsentError, TrialStore, masked, studies_in

LOOK_SECONDS = 1.0  # seconds after which a worker that waits for a search looks for one again


class SharedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must know of a search: values alone, no code and no address of a storage."""

    problem: Problem  # without cached records, which each machine has for itself
    sampler: str
    max_probes: int
    seconds: float  # its limit of time
    until: float  # when the search ends at the latest, by the clock
    title: str  # the processor or the card that it is for
    cores: int | None  # CPU: processors that a probe may use
    torch: str | None  # the version of torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker has done."""

    study: str
    """The name of the study."""
    probes: int
    """Probes that this worker ran."""
    all_probes: int
    """Probes that all workers ran."""
    ended: str
    """Why the search ended, as in a plan; `stopped` if that of the plan was interrupted, and not this worker."""


@contextmanager
def shared(search: Search) -> Iterator[None]:
    """Let workers take part in a search while it runs."""
    trials, problem = search.trials, search.problem
    content = SharedSearch(
        problem=replace(problem, cached=()),
        sampler=trials.sampler.name,
        max_probes=search.limits.max_probes,
        seconds=search.limits.seconds,
        until=time.time() + search.left,
        title=search.cache.title,
        cores=None if problem.target.cuda else problem.space.choices.cores,
        torch=torch_version(),
    )
    trials.share(msgspec.json.encode(content).decode())
    try:
        yield
    finally:
        with suppress(*OUTAGES):
            trials.end("stopped" if search.ended == "interrupted" else search.ended or "done")
            trials.close()


def work(
    storage: str,
    device: str = "cpu",
    study: str | None = None,
    wait: float = 0.0,
    progress: Callable[[Progress], None] | None = None,
) -> Work:
    """Run probes of a search on a device until the search ends. `wait`: seconds to wait for a search to begin."""
    here = open_device(device)
    name, content, ended = _wait_for(storage, study, wait)
    _check_kind(name, content, here)
    target, cache = find_target(device), Cache(user_directory(), here.title())
    problem = replace(
        content.problem,
        target=target,
        host_bytes=Runner(device).free().host_bytes if target.cuda else None,
        cached=tuple(measured_on(here.title(), cache.read(content.problem.spec))),
    )
    search = Search(
        problem=problem,
        trials=TrialStore(name, problem, storage, content.sampler),
        ledger=None,
        cache=cache,
        limits=Limits(max_probes=content.max_probes, seconds=content.seconds),
        began=time.monotonic() - content.seconds + content.until - time.time(),
        progress=progress,
        ended=ended,
        helps=True,
    )
    result = search.run([device])
    probes, all_probes = search.trials.own_records(), len(search.trials.records())
    search.trials.close()
    return Work(study=name, probes=probes, all_probes=all_probes, ended=result.ended)


def _wait_for(storage: str, study: str | None, wait: float) -> tuple[str, SharedSearch, str | None]:
    """The search to join: its study, what a worker must know, and why it has ended; None if it is under way."""
    deadline = time.monotonic() + wait
    while True:
        left = deadline - time.monotonic()
        try:
            return _choose(masked(storage), studies_in(storage), study, waits=left > 0)
        except AbsentError:
            if left <= 0:
                raise
        tell(Status("Waiting for a search", seconds_left=left))
        time.sleep(min(LOOK_SECONDS, left))


def _choose(
    storage: str, studies: dict[str, dict[str, Any]], study: str | None, *, waits: bool
) -> tuple[str, SharedSearch, str | None]:
    """One of the searches of a storage. If the worker waits, those that have ended do not count."""
    found = {name: (_read(name, values["search"]), values.get("ended")) for name, values in studies.items()}
    under_way = {name: one for name, one in found.items() if one[1] is None and one[0].until > time.time()}
    if study is not None:
        found = {name: one for name, one in found.items() if name == study}
        under_way = {name: one for name, one in under_way.items() if name == study}
    chosen = under_way or ({} if waits else found)
    if not chosen:
        got = "there is none" if study is None else f"there is no search {shown(study)}"
        advice = "Begin one with oomguard plan and the same --storage, or wait for one with --wait 10min."
        if study is not None and studies:
            advice = nearest(study, [*studies])
        raise AbsentError(rule="A worker needs a search in the storage", got=f"{got} in {storage}", advice=advice)
    if len(chosen) > 1:
        rule, names = "The storage has several searches", ", ".join(sorted(chosen))
        raise MisuseError(rule=rule, got="", advice=f"Choose one with --study: {names}.")
    ((name, (content, ended)),) = chosen.items()
    return name, content, ended


def _read(name: str, text: object) -> SharedSearch:
    try:
        return msgspec.json.decode(str(text), type=SharedSearch)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MisuseError(
            rule="A worker needs the version of oomguard that began the search",
            got=f"that of {shown(name)} cannot be read ({error})",
            advice="Install the same version on all machines.",
        ) from None


def _check_kind(name: str, content: SharedSearch, here: Device) -> None:
    """Raise unless this machine is of the kind that the search is for: its records would be those of another one."""
    count = None if content.cores is None else cores()
    asked, got = (content.title, content.torch, content.cores), (here.title(), torch_version(), count)
    if asked != got:
        raise MisuseError(
            rule=f"The search {name} is for {_kind_words(*asked)}",
            got=f"this is {_kind_words(*got)}",
            advice="Begin another search for this kind of machine: run oomguard plan here with the same --storage.",
        )


def _kind_words(title: str, torch: str | None, count: int | None) -> str:
    processors = "" if count is None else f", {count} of its processors"
    return f"{title}{processors} and torch {torch}"
