"""Check at the start of a job whether this is the machine that a plan was made for, and has its memory. No torch."""

import re
from collections.abc import Iterator
from importlib import metadata

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.units import format_bytes
from oomguard._device import nvml
from oomguard._device.cpu import Cpu
from oomguard._device.cuda import built_for_cards
from oomguard._device.find import card_index, find_budget
from oomguard._device.nvml import CardStatus, NoNvmlError
from oomguard._estimate import cards
from oomguard._estimate.breakdown import estimate_step, margin_bytes
from oomguard._estimate.target import Target, on_card
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan
from oomguard._probe.record import torch_version
from oomguard._spec.candidate import Candidate

CUDNN = tuple(f"nvidia-cudnn-cu{version}" for version in (13, 12, 11))  # the packages that pip installs cuDNN from


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One fact that the plan was made with, beside that of this machine."""

    name: str
    planned: str | None  # as the plan has it; None if it does not say
    here: str | None  # as it is here; None if nothing tells
    same: bool | None  # whether a job may rely on it; None where one of the two is not known


class RungHere(msgspec.Struct, frozen=True, kw_only=True):
    """The first candidate of a plan that fits what is free here now."""

    number: int  # 0 is the chosen candidate, 1 the first fallback
    candidate: Candidate
    needed_bytes: int  # peak and margin


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan was made for, beside this machine as it is now."""

    device: str  # the device that was looked at, as `--device` takes it
    named: bool  # whether the plan is by arithmetic, for a card that was only named: such a plan is not trained
    compared: tuple[Compared, ...]
    needed_bytes: int  # peak and margin of the chosen candidate, on the device of the plan
    free_bytes: int | None  # bytes that a process may use there; None if the device is not here
    rung: RungHere | None  # the candidate that fits; None if none does
    fallbacks: int  # how many the plan has

    @property
    def ok(self) -> bool:
        """Whether nothing differs and the chosen candidate fits."""
        return all(one.same is not False for one in self.compared)


def check_plan(plan: Plan | TaskPlan, device: str | None = None) -> Check:
    """Compare what a plan was made for with a device of this machine: by default, the one that the plan names."""
    planned = plan.where.device
    if device is None:
        device = planned if planned == "cpu" or card_index(planned) is not None else "cuda"
    index = card_index(device)
    if (index is not None) != plan.where.cuda or (index is None and device != "cpu"):
        raise MisuseError(
            rule=f"A plan for {planned} is checked on {'a card that is here' if plan.where.cuda else 'the CPU'}",
            got=f"got --device {device}",
            advice=f"Use --device {'cuda or cuda:1' if plan.where.cuda else 'cpu'}, or leave it out.",
        )
    here: CardStatus | None = None
    missing, free_bytes = "", None
    if index is None:
        free_bytes = find_budget("cpu").limit_bytes
    else:
        try:
            here = nvml.card_status(index)
            free_bytes = here.budget(device).limit_bytes
        except NoNvmlError as error:
            missing = f"none ({error.got})"
    title = here.name if here is not None else missing or Cpu().title()
    same_device = _compare_device(plan, here, title)
    target = on_card(here.known, device) if here is not None and not same_device.same else None
    needed_bytes = _needed_bytes(plan, None)[0][1]
    free = Compared(
        name="free memory",
        planned=format_bytes(needed_bytes),
        here=None if free_bytes is None else format_bytes(free_bytes),
        same=None if free_bytes is None else needed_bytes <= free_bytes,
    )
    return Check(
        device=device,
        named=_is_named(plan),
        compared=(same_device, free, *_host(plan), *_software(plan, here)),
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
        rung=None if free_bytes is None else _first_that_fits(plan, target, free_bytes),
        fallbacks=len(plan.fallbacks),
    )


def _compare_device(plan: Plan | TaskPlan, here: CardStatus | None, title: str) -> Compared:
    """The processor or the card. A plan by arithmetic has the name of a card as `--device` takes it."""
    planned = plan.environment.title
    same = planned == title
    if here is not None and not same and _is_named(plan):
        same = here.known.name == cards.card(planned).name
    return Compared(name="card" if plan.where.cuda else "processor", planned=planned, here=title, same=same)


def _is_named(plan: Plan | TaskPlan) -> bool:
    """Whether the plan is for a card that was only named, so that nothing of that machine was read."""
    return plan.where.cuda and card_index(plan.where.device) is None


def _host(plan: Plan | TaskPlan) -> Iterator[Compared]:
    """The host's memory for a plan of a card that counts some."""
    if plan.estimate.host_bytes:
        free_bytes = find_budget("cpu").limit_bytes
        sizes = format_bytes(plan.estimate.host_bytes), format_bytes(free_bytes)
        same = plan.estimate.host_bytes <= free_bytes
        yield Compared(name="free host memory", planned=sizes[0], here=sizes[1], same=same)


def _software(plan: Plan | TaskPlan, here: CardStatus | None) -> Iterator[Compared]:
    """Driver, torch and cuDNN, by their packages and by NVML."""
    made, torch = plan.environment, torch_version()
    if plan.where.cuda:
        yield _compare("driver", made.driver, None if here is None else nvml.driver())
    if _is_named(plan):  # it was made on another machine, perhaps with a build for another device
        compared = _compare("torch", _release(made.torch), _release(torch))
    else:
        compared = _compare("torch", made.torch, torch)
    if plan.where.cuda and torch is not None and not built_for_cards():
        compared = Compared(name="torch", planned=compared.planned, here=f"{torch}, built without CUDA", same=False)
    yield compared if torch is not None else msgspec.structs.replace(compared, here="not installed", same=False)
    if made.library is not None and made.library.startswith("cuDNN"):
        installed = _cudnn()
        version = made.library if made.library in installed else next(iter(installed), None)
        yield _compare("cuDNN", made.library, version)


def _compare(name: str, planned: str | None, here: str | None) -> Compared:
    same = None if planned is None or here is None else planned == here
    return Compared(name=name, planned=planned, here=here, same=same)


def _release(version: str | None) -> str | None:
    """A version without its build, such as `+cpu`."""
    return None if version is None else version.partition("+")[0]


def _cudnn() -> list[str]:
    """The versions of cuDNN that are installed as packages, as plans name them."""
    found = []
    for name in CUDNN:
        try:
            version = re.match(r"\d+\.\d+\.\d+", metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
        found += [f"cuDNN {version[0]}"] if version else []
    return found


def _needed_bytes(plan: Plan | TaskPlan, target: Target | None) -> list[tuple[Candidate, int]]:
    """The chosen candidate and the fallbacks, each with its peak and margin: those of the plan, on its own device.

    For another card (`target`) those of a spec are estimated anew, and what cannot run there is left out. A task is
    not traced again: its peaks hardly depend on the card.
    """
    if target is None or isinstance(plan, TaskPlan):
        margin = 0 if plan.confirmed else plan.expected.margin_bytes
        rungs = [(rung.candidate, rung.expected.safe_bytes) for rung in plan.fallbacks]
        return [(plan.candidate, plan.peak_bytes + margin), *rungs]
    found = []
    for candidate in (plan.candidate, *(rung.candidate for rung in plan.fallbacks)):
        estimate = estimate_step(plan.spec, candidate, target)
        needed_bytes = int(estimate.total_bytes) + int(margin_bytes(plan.spec, estimate, target))
        runs = bool(estimate.runs) and candidate.precision in target.card_precisions
        found.append((candidate, needed_bytes if runs else 1 << 62))
    return found


def _first_that_fits(plan: Plan | TaskPlan, target: Target | None, free_bytes: int) -> RungHere | None:
    for number, (candidate, needed_bytes) in enumerate(_needed_bytes(plan, target)):
        if needed_bytes <= free_bytes:
            return RungHere(number=number, candidate=candidate, needed_bytes=needed_bytes)
    return None
