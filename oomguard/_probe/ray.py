"""Probes on a Ray cluster. Each node of the cluster is a worker of the search, or each card, and a probe is a task.

A task asks for what the estimate of its candidate says, so that Ray keeps other work out of that memory. Tasks run this
package as it is installed on the node; nothing but values is sent.
"""

import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import msgspec

from oomguard._core.errors import MisuseError, shown
from oomguard._core.progress import tell
from oomguard._device.budget import Budget
from oomguard._device.cpu import Cpu, cores
from oomguard._device.cuda import Cuda
from oomguard._device.find import find_budget, find_target, open_device
from oomguard._estimate.breakdown import estimate_step, margin_bytes
from oomguard._estimate.target import CUDA_HOST_BYTES, Target
from oomguard._probe.record import Record, torch_version
from oomguard._probe.runner import Free, LostError, Runner
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

LOOK_SECONDS = 60.0  # seconds in which a node must have said what it is: its first task starts a process
START_SECONDS = 30.0  # seconds beside its own that a probe may wait for its resources and a process
POLL_SECONDS = 0.2


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a node of the cluster says of its device."""

    title: str  # the processor or the card
    torch: str | None
    cores: int
    precisions: tuple[str, ...]
    driver: str | None
    target: Target
    budget: Budget
    free: Free

    @property
    def kind(self) -> tuple[str, str | None, int]:
        """What is the same on all workers of a search."""
        return self.title, self.torch, 0 if self.target.cuda else self.cores


class RayDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a node. `oomguard._device.cpu.Cpu` documents the methods."""

    name: str
    place: Place

    def title(self) -> str:
        return self.place.title

    def precisions(self) -> tuple[str, ...]:
        return self.place.precisions

    def driver(self) -> str | None:
        return self.place.driver

    def environment(self, candidate: Candidate, engine: str) -> dict[str, str]:
        here = Cuda() if self.place.target.cuda else Cpu()
        return here.environment(candidate, engine)


class RayRunner(AbstractContextManager["RayRunner", None]):
    """Probes candidates on one node, as `Runner` does here. Every probe has a new child process."""

    def __init__(self, ray: Any, node: dict[str, Any], device: RayDevice, seconds: float) -> None:
        self.ray, self.node, self.device, self.seconds = ray, node, device, seconds
        self._task: Any = None
        self._free = device.place.free

    def free(self) -> Free:
        """The memory that was free when the last probe began there, as far as Ray gives it away."""
        most_bytes = int(self.node["Resources"].get("memory", math.inf)) if not self.device.place.target.cuda else None
        return self._free if most_bytes is None else self._free._replace(device_bytes=min(most_bytes, self._free[0]))

    def probe(
        self, spec: Spec, candidate: Candidate, *, timeout: float, rival: Candidate | None = None, **limits: Any
    ) -> Record:
        """Run a probe there. Raises `LostError` if the node does not answer any more."""
        needs = [self._needs(spec, one) for one in (candidate, rival) if one is not None]
        most = {name: max(one[name] for one in needs) for name in needs[0]}
        asked = {"spec": spec, "candidate": candidate, "timeout": timeout, "rival": rival} | limits
        self._task = _on(self.ray, self.node, _measure, **most, max_retries=0).remote(
            self.device.place.target.device, self.seconds, asked
        )
        deadline = time.monotonic() + timeout + START_SECONDS
        try:
            while not self.ray.wait([self._task], timeout=POLL_SECONDS)[0]:
                if time.monotonic() > deadline:
                    raise LostError(f"{self.device.name} did not answer in time")
            task, self._task = self._task, None  # it has ended, and close() has nothing to do
            record, self._free = self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            raise LostError(f"{self.device.name} failed: {str(error).splitlines()[0]}") from None
        finally:
            self.close()
        return msgspec.json.decode(record, type=Record)

    def close(self) -> None:
        """End the probe that runs, if there is one."""
        task, self._task = self._task, None
        if task is not None:
            self.ray.cancel(task, force=True)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _needs(self, spec: Spec, candidate: Candidate) -> dict[str, int]:
        """The resources that Ray is asked for."""
        target = self.device.place.target
        estimate = estimate_step(spec, candidate, target)
        if target.cuda:  # a card for itself: a neighbour would change the times
            return {"num_gpus": 1, "num_cpus": 1, "memory": CUDA_HOST_BYTES + int(estimate.host_bytes)}
        needed_bytes = int(estimate.total_bytes + margin_bytes(spec, estimate, target))
        threads = candidate.threads or self.device.place.cores
        return {"num_cpus": threads, "memory": min(needed_bytes, self.free().device_bytes)}


class Cluster(AbstractContextManager["Cluster", None]):
    """The workers of a Ray cluster that are of one kind, by name. Leave it to end the connection and all its tasks."""

    def __init__(self, address: str, devices: Sequence[str], seconds: float) -> None:
        device = devices[0].removesuffix(":0")
        if len(devices) > 1 or device not in ("cpu", "cuda"):
            advice = "Every node, or every card, is a worker."
            rule = "On Ray, --device is cpu or cuda"
            raise MisuseError(rule=rule, got=f"got {shown(','.join(devices))}", advice=advice)
        tell("Connecting to Ray")
        self.ray = _connect(address)
        try:
            self.workers = {runner.device.name: runner for runner in self._find(device, seconds)}
        except BaseException:
            self.ray.shutdown()
            raise

    @property
    def devices(self) -> list[RayDevice]:
        """The devices of the workers."""
        return [runner.device for runner in self.workers.values()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.ray.shutdown()

    def _find(self, device: str, seconds: float) -> list[RayRunner]:
        """A runner for each node or card of the most frequent kind that has the torch of this process."""
        resource = "GPU" if device == "cuda" else "CPU"
        nodes = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get(resource, 0) >= 1]
        if not nodes:
            advice = "Choose another --device, or another cluster."
            raise MisuseError(rule=f"--device {device} needs a node with a {resource}", got="got none", advice=advice)
        found = [(node, place) for node, place in self._look(nodes, device) if place.torch == torch_version()]
        if not found:
            rule, got = "The nodes need the torch of this process", f"none of them has torch {torch_version()}"
            raise MisuseError(rule=rule, got=got, advice="Install the same version everywhere.")
        kind, count = Counter(place.kind for _, place in found).most_common(1)[0]
        if count < len(nodes):
            others = f"{len(nodes) - count} of {len(nodes)} nodes of the cluster take no part"
            warnings.warn(f"{others}, since they are not like the others ({kind[0]}, torch {kind[1]}).", stacklevel=2)
        places = [(node, place) for node, place in found if place.kind == kind]
        devices = [
            (node, RayDevice(name=f"{device}:{number} of node {node['NodeID'][:12]}", place=place))
            for node, place in places
            for number in range(int(node["Resources"][resource]) if device == "cuda" else 1)
        ]
        return [RayRunner(self.ray, node, one, seconds) for node, one in devices]

    def _look(self, nodes: list[dict[str, Any]], device: str) -> list[tuple[dict[str, Any], Place]]:
        """What the nodes say of their devices, as far as they answer."""
        tell("Asking the nodes of the cluster what they are")
        needs = {"num_cpus": 0, "num_gpus": int(device == "cuda"), "max_retries": 0}
        asked = {_on(self.ray, node, _look, **needs).remote(device): node for node in nodes}
        done, late = self.ray.wait([*asked], num_returns=len(asked), timeout=LOOK_SECONDS)
        found, why = list[tuple[dict[str, Any], Place]](), f"{len(late)} did not answer in time"
        for task in done:
            try:
                place = msgspec.json.decode(self.ray.get(task), type=Place)
                found.append((asked[task], _within(place, asked[task])))
            except (self.ray.exceptions.RayError, MisuseError) as error:
                why = str(error).strip().splitlines()[-1]
        for task in late:
            self.ray.cancel(task, force=True)
        if not found:
            rule, advice = "The nodes of the cluster need oomguard", "Install the same version everywhere."
            raise MisuseError(rule=rule, got=f"none of {len(nodes)} answered ({why})", advice=advice)
        return found


def _connect(address: str) -> Any:
    """Ray, connected to the cluster: `ray` for the one that runs here or that RAY_ADDRESS names, or `ray://host`."""
    try:
        import ray
    except ImportError as error:
        advice = "Run `pip install 'oomguard[ray]'`, or leave --on out."
        raise MisuseError(rule="--on ray needs Ray", got=f"it is not installed ({error})", advice=advice) from None
    if address != "ray" and not address.startswith("ray://"):
        rule = "--on takes ray or the address of a Ray cluster"
        raise MisuseError(rule=rule, got=f"got {shown(address)}", advice="Write it as ray or ray://host:10001.")
    try:
        ray.init("auto" if address == "ray" else address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # whatever Ray raises: there are many kinds
        raise MisuseError(
            rule="--on needs a Ray cluster that can be reached",
            got=f"{address} cannot ({str(error).strip().splitlines()[0]})",
            advice="Start one with ray start --head, or give its address as in ray://host:10001.",
        ) from None
    return ray


def _on(ray: Any, node: dict[str, Any], function: Any, **options: Any) -> Any:
    """A function as a task of one node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(function).options(scheduling_strategy=place, **options)


def _within(place: Place, node: dict[str, Any]) -> Place:
    """What a node is, with no more processors than Ray gives away of it."""
    return msgspec.structs.replace(place, cores=min(place.cores, int(node["Resources"].get("CPU", place.cores))))


def _look(device: str) -> bytes:
    """What the node is on which this runs."""
    here = open_device(device)
    place = Place(
        title=here.title(),
        torch=torch_version(),
        cores=cores(),
        precisions=tuple(here.precisions()),
        driver=here.driver(),
        target=find_target(device),
        budget=find_budget(device),
        free=Runner(device).free(),
    )
    return msgspec.json.encode(place)


def _measure(device: str, seconds: float, asked: dict[str, Any]) -> tuple[bytes, Free]:
    """Run a probe on the node on which this runs, within what is free there. Also returns that."""
    with Runner(device, seconds=seconds) as runner:
        free = runner.free()
        budget_bytes = min(asked["budget_bytes"], free.device_bytes)
        return msgspec.json.encode(runner.probe(**asked | {"budget_bytes": budget_bytes})), free
