"""The plans of several processes that train together: which of them a process takes, and what all of them share.

Cards may differ. Then every process has the microbatch, the segments and the fallbacks of its own plan, and takes rows
of every batch in proportion to its speed. The model, the batch, the lossy knobs and the update must be the same.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from oomguard._core.errors import MisuseError, flag
from oomguard._device.cpu import Cpu
from oomguard._device.cuda import Cuda
from oomguard._plan.store import load_plan, save_plan
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan
from oomguard._spec.candidate import ALLOW_WORDS
from oomguard._spec.spec import Spec
from oomguard._train import TrainOptions

if TYPE_CHECKING:
    from oomguard._train.ranks import Ranks

AnyPlan = TypeVar("AnyPlan", Plan, TaskPlan)
PlanOrPath = Plan | TaskPlan | str | os.PathLike[str]
SAME_KNOBS = (*ALLOW_WORDS, "update", "shards")
"""Knobs that decide on the gradient and on the update: every process makes the same update of its copy of the weights,
and kernels of another kind would round it differently."""


def own_plan(given: PlanOrPath | Sequence[PlanOrPath]) -> Plan | TaskPlan:
    """The plan of this process: the only one for its processor or card, or else the one with its number."""
    plans = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    loaded = [load_plan(plan) if isinstance(plan, str | os.PathLike) else plan for plan in plans]
    if len(loaded) == 1:
        return loaded[0]
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if world == 1:
        rule, got = "Several plans are for several processes", f"got {len(loaded)} plans and one process"
        advice = "Start as many with torchrun, or give oomguard train one plan (and --resume, to go on with a run)."
        raise MisuseError(rule=rule, got=got, advice=advice)
    kinds = {plan.where.cuda for plan in loaded}
    if len(kinds) > 1:
        got, advice = "some are for the CPU and some for cards", "Give plans of one kind."
        raise MisuseError(rule="All processes train on cards, or all on the CPU", got=got, advice=advice)
    title = Cuda(int(os.environ.get("LOCAL_RANK", "0"))).title() if True in kinds else Cpu().title()
    own: list[Plan | TaskPlan] = []
    for plan in loaded:
        own += [plan] if plan.environment.title == title and plan not in own else []
    if len(own) == 1:
        return own[0]
    if len(loaded) == world:
        return loaded[rank]
    raise MisuseError(
        rule="Several plans are one for each kind of card, or one for each process",
        got=f"{len(own)} of {len(loaded)} are for {title}, and there are {world} processes",
        advice="Give each process its plan, in the order of their numbers.",
    )


def plans_of(run: str | os.PathLike[str]) -> list[PlanOrPath]:
    """The plans that a run began with, in the order of its processes: one file if all had the same."""
    others = Path(run).glob("plan-*.json")
    return [Path(run) / "plan.json", *sorted(others, key=lambda path: int(path.stem.removeprefix("plan-")))]


def join_plans(ranks: "Ranks", plan: AnyPlan, options: TrainOptions) -> tuple["Ranks", AnyPlan]:
    """Check that the plans of all processes belong together. Returns how fast each is, and how its own plan is run."""
    shards = plan.candidate.shards
    if shards not in (1, ranks.world):
        raise MisuseError(
            rule=f"The plan has the optimizer's state shared by {shards:,} processes",
            got=f"{ranks.world:,} {'trains' if ranks.world == 1 else 'train'}",
            advice=f"Start {shards:,} with torchrun, or make a plan with --shards {ranks.world}.",
        )
    if ranks.world == 1:
        return ranks, plan
    ranks.check_same(_facts(plan, options))
    seconds = ranks.gather(plan.seconds_per_step)
    known = [1.0 / each for each in seconds if each]  # rows of a microbatch tell less, but every plan has them
    speeds = known if len(known) == ranks.world else ranks.gather(float(plan.candidate.microbatch))
    if isinstance(plan, Plan) and len({*ranks.gather(tuple(bucket.longest for bucket in plan.buckets))}) > 1:
        plan = msgspec.structs.replace(plan, buckets=(), padding=None)  # batches are drawn from the same buckets
    return replace(ranks, speeds=tuple(speeds)), plan


def _facts(plan: Plan | TaskPlan, options: TrainOptions) -> dict[str, Any]:
    """All that the processes of a training must have in common, by its flags."""
    facts: dict[str, Any] = {"the task": plan.task if isinstance(plan, TaskPlan) else None}
    if isinstance(plan, TaskPlan):
        facts |= {"--batch": plan.batch, "--seq": plan.seq}
    else:
        facts |= {flag(field.name): getattr(plan.spec, field.name) for field in msgspec.structs.fields(Spec)}
    facts |= {flag(name): getattr(plan.candidate, name) for name in SAME_KNOBS}
    return facts | {flag(name): value for name, value in msgspec.structs.asdict(options).items() if name != "run"}


def save_plans(ranks: "Ranks", plan: Plan | TaskPlan, directory: Path) -> None:
    """Store the plan of the run; if not all processes have the same, each stores its own."""
    same = len({*ranks.gather(msgspec.json.encode(plan))}) == 1
    if ranks.first:
        save_plan(plan, directory / "plan.json")
    elif not same:
        save_plan(plan, directory / f"plan-{ranks.rank}.json")
