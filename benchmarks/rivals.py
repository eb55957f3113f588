"""Predict the memory of a step with other tools: torch's MemTracker (with fake tensors), torchinfo and accelerate.

    python benchmarks/rivals.py '{"spec": {...}, "candidate": {...}}'

prints one JSON line with the bytes over the runtime that MemTracker and torchinfo predict, or null if a tool has no
answer. Both predict one full microbatch, because neither supports accumulation. MemTracker refuses a model that is
called more than once, as with segments. The prediction of accelerate depends only on the weights, so it is not stored:
`accelerate_bytes` computes it when it is needed.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from peak import random_microbatches

from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

NONE = {"memtracker_bytes": None, "torchinfo_bytes": None}


def predict(spec: dict[str, Any], knobs: dict[str, Any], timeout: float = 30) -> dict[str, Any]:
    """Predict with both tools in a new process, so that a tool that crashes or hangs does not stop the benchmark."""
    request = json.dumps({"spec": spec, "candidate": knobs})
    command = [sys.executable, str(Path(__file__)), request]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return dict(NONE)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def memtracker_bytes(spec: Spec, candidate: Candidate) -> int:
    """Trace one optimizer step under FakeTensorMode, with the optimizer state in memory, and return its peak."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from oomguard._step import prepare, step

    with FakeTensorMode():
        training = prepare(spec, candidate)
        for parameter in training.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        tracker = MemTracker()
        tracker.track_external(training.model, training.optimizer)
        microbatch = list(random_microbatches(spec, candidate))[-1]  # MemTracker cannot trace more than one
        with tracker:
            step(training, [microbatch], 1)
        peaks = tracker.get_tracker_snapshot("peak")
    return int(peaks[torch.device("cpu")]["Total"])


def torchinfo_bytes(spec: Spec, candidate: Candidate) -> int:
    """Add up input, forward/backward pass and parameters in torchinfo's summary of one microbatch."""
    import torch
    import torchinfo

    from oomguard._rnn.model import build

    class Stateless(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(spec)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.model(inputs, None)[0]

    inputs = list(random_microbatches(spec, candidate))[-1].inputs  # the last microbatch is a full one
    summary = torchinfo.summary(Stateless(), input_data=[inputs], verbose=0)
    return int(summary.total_input + summary.total_output_bytes + summary.total_param_bytes)


def accelerate_bytes(spec: Spec) -> int:
    """Compute what `accelerate estimate-memory` reports for training with Adam in fp32: 4 times the weights.

    The command itself accepts only models of the Hugging Face Hub. This function does the same for the model of a spec.
    """
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    from oomguard._rnn.model import build

    with init_empty_weights():
        model = build(spec)
    total_bytes, _ = calculate_maximum_sizes(model)
    return int(max(estimate_training_usage(total_bytes, "float32").values()))


def main() -> None:
    import torch

    torch.set_num_threads(1)
    request = json.loads(sys.argv[1])
    spec = make_spec(request["spec"])
    candidate = make_candidate(spec, **request["candidate"])
    torch._C._set_mkldnn_enabled(candidate.engine != "native")
    answer: dict[str, Any] = dict(NONE)
    for tool in (torchinfo_bytes, memtracker_bytes):
        try:
            answer[tool.__name__] = tool(spec, candidate)
        except Exception as error:  # a tool that raises has no answer; stderr says why
            print(f"{tool.__name__}: {error}", file=sys.stderr)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
