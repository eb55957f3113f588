"""Files for schedulers: each job as a script, a document or a program that asks for card, host memory and time.

What a user wrote is quoted in the shell's words (command.py), in YAML as a JSON string or an indented block, and in
Python as a literal. Names of files and of jobs are made of letters, digits and dashes.
"""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from oomguard._core.errors import MisuseError, check_choice
from oomguard._core.system import write_file
from oomguard._core.units import GIB, MIB
from oomguard._fleet.command import Work, make_work, slugs
from oomguard._fleet.value import Fleet

IMAGE, CLAIM = "oomguard", "oomguard"  # of examples/kubernetes.yaml
KAI_QUEUE = "default"


def slurm(work: Work) -> str:
    """A script for sbatch."""
    need = work.resources
    seconds = need.seconds
    minutes = [] if seconds is None else [f"#SBATCH --time={math.ceil(seconds / 60)}"]
    options = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={work.slug}",
        f"#SBATCH --gres=gpu:{'' if need.label is None else need.label + ':'}1",
        f"#SBATCH --mem={need.host_bytes // MIB}M",
        *minutes,
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@120",  # two minutes before the limit, for a checkpoint
        "#SBATCH --open-mode=append",
        f"# {need.card}: {_mib(need.card_bytes)} MiB of the card are needed, margin included",
    ]
    return "\n".join([*options, work.script])


def sky(work: Work) -> str:
    """A task of SkyPilot, on the cheapest card with enough memory."""
    need = work.resources
    card = need.label or f"{math.ceil(need.card_bytes / GIB)}GB+"
    resources = {"accelerators": card, "memory": f"{math.ceil(need.host_bytes / GIB)}+"}
    return to_yaml({"name": work.slug, "num_nodes": 1, "resources": resources, "run": work.script})


def k8s(work: Work) -> str:
    """A job of Kubernetes, on a node whose cards have enough memory by the label of GPU feature discovery."""
    need = work.resources
    terms = [{"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": [str(_mib(need.card_bytes))]}]
    if need.label is not None:
        terms.append({"key": "nvidia.com/gpu.product", "operator": "In", "values": [need.label]})
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": terms}]}}
    return to_yaml(_job(work, {"affinity": {"nodeAffinity": required}}, {"nvidia.com/gpu": "1"}, {}, {}))


def kai(work: Work) -> str:
    """A job of Kubernetes that the KAI scheduler puts on a card which it may share."""
    notes = {"gpu-memory": str(_mib(work.resources.card_bytes))}
    return to_yaml(_job(work, {"schedulerName": "kai-scheduler"}, {}, notes, {"kai.scheduler/queue": KAI_QUEUE}))


def _job(work: Work, pod: dict[str, Any], card: dict[str, str], notes: dict[str, str], labels: dict[str, str]) -> Any:
    memory, seconds = f"{work.resources.host_bytes // MIB}Mi", work.resources.seconds
    container = {
        "name": "train",
        "image": IMAGE,
        "workingDir": "/work",
        # Kubernetes puts variables in the place of $(NAME); a doubled dollar stays one
        "command": ["bash", "-c", work.script.replace("$(", "$$(")],
        "resources": {"requests": {"memory": memory}, "limits": {"memory": memory} | card},
        "volumeMounts": [{"name": "work", "mountPath": "/work"}],
    }
    volumes = [{"name": "work", "persistentVolumeClaim": {"claimName": CLAIM}}]
    spec = {"restartPolicy": "Never", **pod, "containers": [container], "volumes": volumes}
    metadata: dict[str, Any] = {"annotations": notes} if notes else {}
    metadata |= {"labels": labels} if labels else {}
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [1, 2, 70]}},
        {"action": "Ignore", "onExitCodes": {"containerName": "train", "operator": "In", "values": [130, 137]}},
    ]
    limit = {} if seconds is None else {"activeDeadlineSeconds": seconds}
    template = ({"metadata": metadata} if metadata else {}) | {"spec": spec}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": work.slug, "annotations": {"oomguard/name": work.name}},
        "spec": limit | {"backoffLimit": 20, "podFailurePolicy": {"rules": rules}, "template": template},
    }


RAY = '''\
"""Submits a job to Ray: python {file} [ADDRESS]."""

import sys

JOB = {job}
ENTRYPOINT = {entrypoint}

if __name__ == "__main__":
    from ray.job_submission import JobSubmissionClient

    print(JobSubmissionClient(*sys.argv[1:2]).submit_job(entrypoint=ENTRYPOINT, **JOB))
'''


def ray(work: Work) -> str:
    """A program that submits the job to Ray."""
    need = work.resources
    job: dict[str, Any] = {"entrypoint_num_gpus": 1, "entrypoint_memory": need.host_bytes}
    if need.label is not None:
        job["entrypoint_resources"] = {f"accelerator_type:{need.label}": 0.001}
    job["metadata"] = {"job_submission_id": work.slug, "name": work.name}
    entrypoint = shlex.join(["bash", "-c", work.script])
    return RAY.format(file=f"{work.slug}.py", job=_literal(job), entrypoint=_literal(entrypoint))


SUBMITIT = '''\
"""Submits a job with submitit: python {file} [CLUSTER], where CLUSTER is slurm (default), local or debug."""

import sys

PARAMETERS = {parameters}
COMMAND = {command}

if __name__ == "__main__":
    import submitit

    executor = submitit.AutoExecutor(folder={folder}, cluster=(sys.argv[1:2] or ["slurm"])[0])
    executor.update_parameters(**PARAMETERS)
    job = executor.submit(submitit.helpers.CommandFunction(COMMAND))
    print(job.job_id)
    if executor.cluster != "slurm":
        print(job.result())
'''


def submitit(work: Work) -> str:
    """A program that submits the job with submitit."""
    need = work.resources
    parameters: dict[str, Any] = {"name": work.slug, "mem_gb": math.ceil(need.host_bytes / GIB), "gpus_per_node": 1}
    if need.label is not None:
        parameters["slurm_gres"] = f"gpu:{need.label}:1"
        del parameters["gpus_per_node"]
    if need.seconds is not None:
        parameters["timeout_min"] = math.ceil(need.seconds / 60)
    return SUBMITIT.format(
        file=f"{work.slug}.py",
        parameters=_literal(parameters),
        command=_literal(["bash", "-c", work.script]),
        folder=_literal(f"submitit/{work.slug}"),
    )


EMITTERS: dict[str, tuple[Callable[[Work], str], str]] = {
    "slurm": (slurm, ".sbatch"),
    "sky": (sky, ".yaml"),
    "k8s": (k8s, ".yaml"),
    "kai": (kai, ".yaml"),
    "ray": (ray, ".py"),
    "submitit": (submitit, ".py"),
}
"""What writes the file of a job for each scheduler, and the ending of the file."""


def emit(fleet: Fleet, scheduler: str, folder: str, *, fastest: bool = False, force: bool = False) -> list[str]:
    """Write a file for each job that fits a card: its cheapest or, where times are known, its fastest one."""
    check_choice("emit", scheduler, EMITTERS)
    write, ending = EMITTERS[scheduler]
    names = slugs([job.name for job in fleet.jobs])
    chosen = fleet.fastest if fastest else fleet.cheapest
    files = dict[Path, str]()
    for number, slug in enumerate(names):
        card = int(chosen[number]) if chosen[number] >= 0 else int(fleet.cheapest[number])
        if card >= 0:
            option, label = fleet.option(number, card), fleet.cards[card].label
            work = make_work(fleet.jobs[number], option, slug, label, shared=scheduler == "kai")
            files[Path(folder) / f"{slug}{ending}"] = write(work)
    _check_new(files, force=force)
    return [str(write_file(path, text.encode(), "A job")) for path, text in files.items()]


def _check_new(files: Iterable[Path], *, force: bool) -> None:
    for path in files:
        if path.exists() and not force:
            advice = "Add --force to replace it, or give another --output."
            raise MisuseError(rule="--output must be a folder without such files", got=f"{path} exists", advice=advice)


def _mib(size_bytes: int) -> int:
    return -(-size_bytes // MIB)


def _literal(value: Any) -> str:
    """A literal of Python in ASCII, for numbers, texts, lists and dicts of these, which get a line for each key."""
    if isinstance(value, dict):
        return "".join(["{\n", *(f"    {key!a}: {item!a},\n" for key, item in value.items()), "}"])
    return ascii(value)


_BLOCK = re.compile(r"([!-~][ -~]*\n)+")  # lines that begin with no space, in printable ASCII: a block keeps them


def to_yaml(document: Any) -> str:
    """A document as YAML, of dicts, lists, texts and whole numbers: texts are JSON strings, or blocks of lines."""
    return "\n".join(_yaml(document, 0)) + "\n"


def _yaml(value: Any, indent: int) -> list[str]:
    """The lines of a dict or a list."""
    space, lines = " " * indent, list[str]()
    pairs = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in pairs:
        head = f"{space}- " if key is None else f"{space}{_key(key)}: "
        if isinstance(item, dict | list) and item:
            inner = _yaml(item, indent + 2)
            # the first line of an item of a list stands beside its dash
            lines += [head + inner[0].lstrip(), *inner[1:]] if key is None else [head.rstrip(), *inner]
        elif isinstance(item, str) and _BLOCK.fullmatch(item):
            lines += [f"{head}|", *(f"{space}  {line}" for line in item[:-1].split("\n"))]
        else:
            lines.append(head + json.dumps(item))
    return lines


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", key) else json.dumps(key)
