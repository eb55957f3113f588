"""What other tools predict for the same step: torch's MemTracker (under fake tensors), torchinfo, accelerate.

    python benchmarks/rivals.py '{"spec": {...}, "candidate": {...}}'

prints one JSON line with bytes over the runtime, or null where the tool gives no answer. The first two are asked about
one full microbatch; neither knows accumulation, and MemTracker refuses a model that is called more than once
(segments). What accelerate says depends on the weights alone, so nobody needs to store it: see `accelerate_bytes`.
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
    """Both predictions, from a process of their own, so that a tool that fails or never ends costs nothing else."""
    asked = json.dumps({"spec": spec, "candidate": knobs})
    command = [sys.executable, str(Path(__file__)), asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return dict(NONE)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def memtracker_bytes(spec: Spec, candidate: Candidate) -> int:
    """Peak of an optimizer step under FakeTensorMode, with the optimizer's state in place."""
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
        microbatch = list(random_microbatches(spec, candidate))[-1]  # it cannot follow more than one, nor segments
        with tracker:
            step(training, [microbatch], 1)
        peaks = tracker.get_tracker_snapshot("peak")
    return int(peaks[torch.device("cpu")]["Total"])


def torchinfo_bytes(spec: Spec, candidate: Candidate) -> int:
    """Input, forward/backward pass and parameters of torchinfo's summary of one microbatch."""
    import torch
    import torchinfo

    from oomguard._rnn.model import build

    class Stateless(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(spec)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.model(inputs, None)[0]

    inputs = list(random_microbatches(spec, candidate))[-1].inputs  # the last is a full one
    summary = torchinfo.summary(Stateless(), input_data=[inputs], verbose=0)
    return int(summary.total_input + summary.total_output_bytes + summary.total_param_bytes)


def accelerate_bytes(spec: Spec) -> int:
    """What `accelerate estimate-memory` says of training with Adam in fp32: 4 times the weights.

    The command itself asks for a model of the Hugging Face Hub; this is what it does with one.
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
    asked = json.loads(sys.argv[1])
    spec = make_spec(asked["spec"])
    candidate = make_candidate(spec, **asked["candidate"])
    torch._C._set_mkldnn_enabled(candidate.engine != "native")
    answer: dict[str, Any] = dict(NONE)
    for tool in (torchinfo_bytes, memtracker_bytes):
        try:
            answer[tool.__name__] = tool(spec, candidate)
        except Exception as error:  # a rival that raises has no answer: say why on stderr
            print(f"{tool.__name__}: {error}", file=sys.stderr)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
