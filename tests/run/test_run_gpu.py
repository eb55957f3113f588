"""`oomguard run` with a script that trains on a card."""

import sys
from pathlib import Path

import pytest
from run.scripts import run, write

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TRAIN = """
import sys, torch
lstm = torch.nn.LSTM(16, 128).cuda()
optimizer = torch.optim.Adam(lstm.parameters())
for _ in range(3):
    loss = lstm(torch.randn(int(sys.argv[1]), 64, 16, device="cuda"))[0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(torch.cuda.max_memory_reserved())
"""


def test_calls_that_exceed_the_budget_of_a_card_go_in_segments(tmp_path: Path) -> None:
    script = write(tmp_path, TRAIN)
    plain = run(tmp_path, sys.executable, script, "4000")
    (before,) = plain.report["processes"]
    assert (plain.code, before["device"], before["calls"][0]["in_segments"]) == (0, "cuda:0", 0), plain.err
    assert before["peak_bytes"] >= int(plain.out)
    budget_bytes = before["base_bytes"] + (before["peak_bytes"] - before["base_bytes"]) * 2 // 3
    ours = run(tmp_path, sys.executable, script, "4000", flags=("--budget", str(budget_bytes), "--force"))
    (after,) = ours.report["processes"]
    assert (ours.code, after["device"], after["calls"][0]["in_segments"]) == (0, "cuda:0", 3), ours.err
    assert after["base_bytes"] < after["peak_bytes"] <= budget_bytes
    assert after["host_peak_bytes"] > 0
    assert "on cuda:0" in ours.err


def test_memory_of_a_card_that_runs_out_has_its_summary(tmp_path: Path) -> None:
    limit = "import torch; torch.cuda.set_per_process_memory_fraction(0.001)"
    ran = run(tmp_path, sys.executable, write(tmp_path, limit + TRAIN), "4000", flags=("--only-watch",))
    assert (ran.code, ran.report["verdict"]) == (1, "OOM"), ran.err
