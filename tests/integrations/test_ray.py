"""Ray Tune with real processes on this machine: trials ask for the memory they need, and those too large end alone."""

import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from oomguard import GuardError, MisuseError, Spec

pytest.importorskip("ray.tune", reason="ray is not installed (extra ray)")
STUDY = """
import json, sys, warnings
warnings.simplefilter("ignore")
import ray
from ray import tune
import oomguard
from oomguard.integrations.ray import feasible, resources

def model_of(config):
    return oomguard.Spec(cell="lstm", seq=config["seq"], hidden=32, layers=1, batch=16)

def train(config):
    import time, torch
    torch.set_num_threads(1)
    knobs = feasible(model_of(config), "500MiB").candidate
    lstm, began = torch.nn.LSTM(64, 32), time.time()
    with oomguard.segmented(segments=knobs.segments):
        for rows in torch.randn(config["seq"], 16, 64).split(knobs.microbatch, 1):
            lstm(rows)[0].square().mean().backward()
    time.sleep(1.0)
    tune.report({"loss": 1.0, "rows": knobs.microbatch, "pieces": knobs.segments, "began": began, "ended": time.time()})

ray.init(num_cpus=2, object_store_memory=80 << 20, _memory=700 << 20, include_dashboard=False, _temp_dir=sys.argv[1],
         log_to_driver=False, configure_logging=False)
try:
    trainable = tune.with_resources(train, resources(model_of, "500MiB"))
    space = {"seq": tune.grid_search([50, 200, 4000, 500_000_000])}
    config = tune.RunConfig(storage_path=sys.argv[2], verbose=0)
    results = tune.Tuner(trainable, param_space=space, run_config=config).fit()
    rows = [dict(result.metrics or {}, seq=(result.config or result.metrics["config"])["seq"],
                 error=str(result.error or "")) for result in results]
    names = ("seq", "rows", "pieces", "began", "ended", "error")
    print("RESULTS" + json.dumps([{name: row.get(name) for name in names} for row in rows]))
finally:
    ray.shutdown()
"""


def spec_of(config: dict[str, Any]) -> Spec:
    return Spec(cell="lstm", seq=config["seq"], hidden=64, batch=16)


def bundle_of(needs: Any, **config: Any) -> dict[str, float]:
    (bundle,) = needs(config).bundles
    return dict(bundle)


def test_a_longer_sequence_asks_for_more_memory_up_to_the_budget() -> None:
    from oomguard.integrations.ray import resources

    needs = resources(spec_of, "1GiB", cpus=2)
    short, long = bundle_of(needs, seq=100), bundle_of(needs, seq=100_000)
    assert short["CPU"] == 2
    assert short["memory"] < long["memory"] <= 1 << 30


def test_on_a_card_a_trial_asks_for_a_share_of_it() -> None:
    from oomguard.integrations.ray import resources

    short = bundle_of(resources(spec_of, "10GiB", device="t4"), seq=100)
    assert 0 < short["GPU"] < 0.2
    assert "memory" not in short


def test_what_does_not_fit_or_describes_no_model_asks_for_no_memory() -> None:
    from oomguard.integrations.ray import resources

    assert bundle_of(resources(spec_of, "100MiB"), seq=100) == {"CPU": 1.0}
    assert bundle_of(resources(spec_of, "1GiB"), seq=-3) == {"CPU": 1.0}


def test_a_trial_that_does_not_fit_ends_with_the_figures() -> None:
    from oomguard.integrations.ray import feasible

    with pytest.raises(GuardError, match=r"needs .* of .*Narrow the search space") as caught:
        feasible(spec_of({"seq": 10_000}), "400MiB", device="t4")
    assert caught.value.figures["needed_bytes"] > caught.value.figures["budget_bytes"]


def test_a_wrong_budget_is_refused() -> None:
    from oomguard.integrations.ray import resources

    with pytest.raises(MisuseError, match="budget"):
        resources(spec_of, "6 bananas")


@pytest.mark.skipif(" " in sys.executable, reason="Ray cannot start workers with a Python whose path has a space")
@pytest.mark.timeout(400)
def test_a_study_with_real_processes_ends_with_a_result_of_every_trial(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # a path of a socket has at most 107 characters
        command = [sys.executable, "-c", STUDY, short, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380, cwd=tmp_path)
    assert "RESULTS" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    rows = {row["seq"]: row for row in json.loads(done.stdout.partition("RESULTS")[2].splitlines()[0])}
    assert not any(rows[seq]["error"] for seq in (50, 200, 4000))
    assert (rows[50]["rows"], rows[50]["pieces"]) == (16, 1)
    assert "A trial must fit its budget" in rows[500_000_000]["error"]
    ran = sorted((rows[seq]["began"], rows[seq]["ended"]) for seq in (50, 200, 4000))
    # each needs more than half of the 700 MiB that Ray may give away, so that no two run at a time on the two CPUs
    assert all(ended <= began for (_, ended), (began, _) in pairwise(ran))
