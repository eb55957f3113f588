"""The commands and the resources of a job on a cluster, for every scheduler the same.

Everything that a user wrote is quoted: a name or a path stays one word of a shell, whatever it contains.
"""

import re
import shlex
from typing import Any, NamedTuple

from oomguard._core.errors import MisuseError, flag, shown
from oomguard._core.units import MIB
from oomguard._estimate import terms
from oomguard._estimate.target import CPU_RUNTIME_BYTES, CUDA_HOST_BYTES
from oomguard._fleet.read import Job
from oomguard._fleet.value import Option
from oomguard._spec.spec import Spec

DATA_BYTES = 200 * MIB  # host memory for data on disk: the claim of benchmarks/data_stay_on_disk.py
UNIT_BYTES = 256 * MIB  # sizes are rounded up to this
SLACK, PLANNING_SECONDS = 1.5, 300
"""A time limit is that many times the time that is known for all epochs, and the time of a plan."""


class Resources(NamedTuple):
    """What a job asks a scheduler for."""

    card: str  # the kind of card, as oomguard names it
    label: str | None  # the kind of card, as the scheduler names it
    card_bytes: int  # memory of the card: peak and margin
    host_bytes: int  # memory of the host: runtime, data, pinned buffers, and what is kept there
    seconds: int | None  # the time limit; None if no time is known


class Work(NamedTuple):
    """A job that is ready to be written."""

    slug: str  # its name in the letters that every scheduler and file system takes
    name: str  # its name as the user wrote it
    script: str  # lines for bash
    resources: Resources


def slugs(names: list[str]) -> list[str]:
    """Names for files and schedulers: lower-case letters, digits and single dashes, at most 48, each once."""
    taken, found = set[str](), list[str]()
    for name in names:
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower(), flags=re.ASCII).strip("-")[:40].strip("-") or "job"
        slug, number = plain, 1
        while slug in taken:
            number += 1
            slug = f"{plain}-{number}"
        taken.add(slug)
        found.append(slug)
    return found


def make_work(job: Job, option: Option, slug: str, label: str | None, *, shared: bool) -> Work:
    """The script and the resources of a job on a card. On a card that it shares, it keeps to what it asks for."""
    card_bytes = option.peak_bytes + option.margin_bytes
    resources = Resources(option.card, label, card_bytes, _host_bytes(job, option), _seconds(job, option))
    return Work(slug, job.name, _script(job, slug, card_bytes if shared else None), resources)


def _host_bytes(job: Job, option: Option) -> int:
    """Memory of the host: the process on the card, the one that plans, data, a pinned microbatch, and what is kept."""
    pinned = 0
    if job.request is not None:
        pinned = int(terms.power_of_two(int(terms.input_bytes(job.request.spec, option.candidate))))
    used = CUDA_HOST_BYTES + CPU_RUNTIME_BYTES + DATA_BYTES + option.host_bytes + pinned
    return -(-used // UNIT_BYTES) * UNIT_BYTES


def _seconds(job: Job, option: Option) -> int | None:
    """The time limit: as the job says or, if its epochs and their time are known, from those."""
    if job.seconds is not None:
        return max(60, round(job.seconds))
    if job.epochs is None or option.seconds_per_epoch is None:
        return None
    return round(SLACK * job.epochs * option.seconds_per_epoch + PLANNING_SECONDS)


def _script(job: Job, slug: str, budget_bytes: int | None) -> str:
    """Plan on the card at the first start, check the plan at every start, and train from the newest checkpoint."""
    if job.request is not None and job.data is None:
        rule = f"Job {shown(job.name)} needs data to be trained"
        raise MisuseError(rule=rule, got="it has none", advice='Add data = "waves.npy" to it.')
    run = f"runs/{slug}"
    plan = f"{run}/first-plan.json"
    model = _task_words(job) if job.request is None else _spec_words(job)
    budget = [] if budget_bytes is None else ["--budget", f"{budget_bytes // MIB}MiB"]
    allow = ["--allow", ",".join(job.allow) or "none"]
    planned = ["oomguard", "plan", *model, *allow, *budget, "--device", "cuda", "--output", plan]
    trained = ["oomguard", "train", plan]
    trained += ["--model", str(job.task)] if job.request is None else [f"--data={job.data}"]
    trained += [] if job.epochs is None else ["--epochs", str(job.epochs)]
    trained += ["--run", run, "--save-every", "10min", "--resume"]
    return "\n".join(
        [
            "set -euo pipefail",
            f"mkdir -p {run}",
            f"if [ ! -f {plan} ]; then {shlex.join(planned)}; fi",
            shlex.join(["oomguard", "check", plan]),
            f"exec {shlex.join(trained)}",
            "",
        ]
    )


def _task_words(job: Job) -> list[str]:
    if not isinstance(job.task, str):
        rule = f"Job {shown(job.name)} must name its task, so that another process finds it"
        raise MisuseError(rule=rule, got="got a Task", advice='Give task = "package.module:task".')
    words = ["--model", job.task]
    words += [] if job.seq is None else ["--seq", str(job.seq)]
    return words + ([] if job.batch is None else ["--batch", str(job.batch)])


def _spec_words(job: Job) -> list[str]:
    """The fields of the spec that are not at their defaults, and the fixed knobs, as flags."""
    assert job.request is not None
    spec = job.request.spec
    usual = Spec(cell=spec.cell, seq=spec.seq, vocab=spec.vocab, hidden=spec.hidden)
    words = ["--model", spec.cell, "--seq", str(spec.seq)]
    for name in Spec.__struct_fields__:
        value = getattr(spec, name)
        if value is not None and (name in ("vocab", "hidden") or value != getattr(usual, name)):
            words += _flag_words(name, value)
    return words + [word for name, value in job.request.fixed.items() for word in _flag_words(name, value)]


def _flag_words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name if value else f"no_{name}")]
    if isinstance(value, dict):
        value = ",".join(f"{length}:{count}" for length, count in value.items())
    return [flag(name), ",".join(value) if isinstance(value, tuple) else str(value)]
