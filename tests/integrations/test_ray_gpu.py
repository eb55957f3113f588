"""Ray Tune on a card: a trial asks Ray for its share of the card, and runs there with the knobs that fit."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray.tune", reason="ray is not installed (extra ray)")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STUDY = """
import json, sys, warnings
warnings.simplefilter("ignore")
import ray
from ray import tune
import oomguard
from oomguard.integrations.ray import feasible, resources

def model_of(config):
    return oomguard.Spec(cell="lstm", seq=config["seq"], features=64, hidden=128, layers=1, batch=64)

def train(config):
    import torch
    knobs = feasible(model_of(config), "2GiB", device="cuda").candidate
    lstm = torch.nn.LSTM(64, 128).cuda()
    with oomguard.segmented(segments=knobs.segments):
        lstm(torch.randn(config["seq"], knobs.microbatch, 64, device="cuda"))[0].square().mean().backward()
    share = tune.get_context().get_trial_resources().bundles[0]["GPU"]
    tune.report({"share": share, "pieces": knobs.segments, "peak_bytes": torch.cuda.max_memory_reserved()})

ray.init(num_cpus=2, num_gpus=1, object_store_memory=80 << 20, include_dashboard=False, _temp_dir=sys.argv[1],
         log_to_driver=False, configure_logging=False)
try:
    trainable = tune.with_resources(train, resources(model_of, "2GiB", device="cuda"))
    config = tune.RunConfig(storage_path=sys.argv[2], verbose=0)
    results = tune.Tuner(trainable, param_space={"seq": tune.grid_search([100, 20_000])}, run_config=config).fit()
    print("RESULTS" + json.dumps([{name: result.metrics[name] for name in ("share", "pieces", "peak_bytes")}
                                  for result in results]))
finally:
    ray.shutdown()
"""


@pytest.mark.skipif(" " in sys.executable, reason="Ray cannot start workers with a Python whose path has a space")
def test_trials_ask_for_shares_of_a_card_and_train_there(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        words = [sys.executable, "-c", STUDY, folder, str(tmp_path / "results")]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=280)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS")]
    assert lines, done.stderr[-2000:]
    short, long = json.loads(lines[0].removeprefix("RESULTS"))
    assert 0 < short["share"] < long["share"] <= 1
    assert short["pieces"] == 1 < long["pieces"]
    assert 0 < short["peak_bytes"] < long["peak_bytes"]
