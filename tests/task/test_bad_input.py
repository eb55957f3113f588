"""A fault in the user's code is told in one message with the user's own line, whatever oomguard was asked for."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from task.faulty import (
    Damaged,
    Dense,
    Elsewhere,
    Frozen,
    Locked,
    SizedStream,
    Stream,
    Valueless,
    as_dict,
    as_float,
    as_numpy,
    cannot_build,
    changing,
    detached,
    fails_on_long_samples,
    faulty,
    loader,
    mean,
    not_a_number,
    nothing,
    of_rows,
    with_number,
    with_output,
    with_text,
)

import oomguard
from oomguard import MisuseError, Task
from oomguard._cli.app import run
from oomguard._report.task import summarize_task
from oomguard._task.ask import send
from oomguard._task.child import batches_of, try_task
from oomguard._task.task import packed, resolve

LINE = r"faulty\.py:\d+"
FAULTS: dict[str, tuple[Callable[[], Task], str]] = {
    "loss of each row": (lambda: faulty(loss=of_rows), rf"one number, but .*{LINE} returned a tensor of shape \(2,\)"),
    "loss as a float": (lambda: faulty(loss=as_float), rf"one number, but .*{LINE} returned 0\.\d+"),
    "loss in NumPy": (lambda: faulty(loss=as_numpy), rf"one number, but .*{LINE} returned array\("),
    "loss in a dict": (lambda: faulty(loss=as_dict), rf"one number, but .*{LINE} returned {{'loss'"),
    "no loss": (lambda: faulty(loss=nothing), rf"one number, but .*{LINE} returned None"),
    "loss without a gradient": (lambda: faulty(loss=detached), rf"{LINE} returned a loss without a gradient.*detach"),
    "NaN": (lambda: faulty(loss=not_a_number), rf"must be finite, but .*{LINE} returned nan"),
    "loss and output": (lambda: faulty(loss=with_output), rf"The weight .*{LINE} returned a tensor of shape"),
    "loss and text": (lambda: faulty(loss=with_text), rf"The weight .*{LINE} returned 'a note' beside it"),
    "a change in place": (lambda: faulty(loss=changing), rf"A step .*{LINE} raised RuntimeError: .*modified"),
    "another device": (lambda: faulty(model=Elsewhere), rf"The loss must run on a batch, but .*{LINE} raised"),
    "no values": (lambda: faulty(model=Valueless), rf"{LINE} returned a tensor of shape \(\) on meta"),
    "no gradients": (lambda: faulty(model=Frozen), rf"{LINE} returned a loss without a gradient.*parameters that requ"),
    "a model that fails": (lambda: faulty(model=cannot_build), rf"must build a module, but .*{LINE} raised KeyError"),
    "a module without values": (
        lambda: faulty(model=Elsewhere().to("meta")),
        rf"move to cpu, but .*{LINE} raised NotImp",
    ),
    "no model": (lambda: faulty(model=lambda: 5), r"return a torch.nn.Module, but .*test_bad_input\.py:\d+ returned 5"),
    "no optimizer": (lambda: faulty(optimizer=lambda own: 5), r"torch.optim.Optimizer, but .*input\.py:\d+ returned 5"),
    "no samples": (lambda: faulty(data=loader([])), "The dataset must have samples, but it has none"),
    "damaged samples": (lambda: faulty(data=loader(Damaged())), rf"samples by index, but .*{LINE} raised OSError"),
    "a stream": (lambda: faulty(data=loader(Stream())), rf"Stream at .*{LINE} can only be iterated.*give batch="),
    "a stream of known length": (lambda: faulty(data=loader(SizedStream())), rf"{LINE} can only be iterated"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_the_line_of_the_user(fault: str) -> None:
    make, message = FAULTS[fault]
    with pytest.raises(MisuseError, match=message):
        try_task(packed(make()), None)


def test_a_weight_may_be_a_number_of_numpy_or_missing() -> None:
    for loss in (with_number, lambda model, batch: (mean(model, batch), None)):
        try_task(packed(faulty(loss=loss)), None)


MODULES = {
    "raises": ("x = {}\nx['key']\n", r"raises\.py:2 raised KeyError"),
    "exits": ("import sys\n\nsys.exit(3)\n", r"exits\.py:3 raised SystemExit"),
    "unreadable": ("x = 1\ndef (:\n", r"unreadable\.py:2 raised SyntaxError"),
    "refused": ("import oomguard\ntask = oomguard.Task(model=5, loss=len)\n", r"model must be a .*refused\.py:2\)"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = MODULES[name]
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MisuseError, match=message):
        resolve(f"{name}:task")


def test_a_collate_function_that_fails_on_some_samples_is_told() -> None:
    with pytest.raises(MisuseError, match=rf"collate_fn must collate 4 samples, but .*{LINE} raised ValueError: too l"):
        batches_of(packed(faulty(data=loader(made=fails_on_long_samples)))).make(4)


def test_a_function_that_ignores_the_number_of_rows_is_told() -> None:
    task = faulty(batch=lambda rows, steps: torch.ones(3, steps, 3))
    with pytest.raises(MisuseError, match=r"input\.py:\d+ returned parts of the same sizes for 2 and for 3 rows"):
        _ = batches_of(packed(task)).layout


def holding(value: Any) -> Callable[..., Any]:
    def loss(model: Any, batch: Any) -> Any:
        assert value is not None
        return mean(model, batch)

    return loss


def test_what_no_other_process_can_have_is_named_with_its_line(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file, socket.socket() as opened:
        for value in (file, opened, threading.Lock()):
            with pytest.raises(MisuseError, match=r"its loss at .*input\.py:\d+ cannot be pickled.*inside the fu"):
                send(faulty(loss=holding(value)))
    with pytest.raises(MisuseError, match=rf"its data at .*{LINE} cannot be pickled"):
        send(faulty(data=loader(made=Locked())))


@pytest.mark.parametrize(
    "line",
    ["estimate", "probe", "plan --output {folder}/plan.json", "train --run {folder} --epochs 1", "tradeoffs"],
)
def test_every_command_ends_with_2_and_the_line_of_the_user(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*line.format(folder=tmp_path).split(), "--model", "task.faulty:scalar"]) == 2
    printed = capsys.readouterr()
    assert "faulty.py:" in printed.err
    assert "returned a tensor of shape (2,). Return the mean over the batch" in printed.err
    assert printed.out == ""


def test_a_model_without_recurrent_calls_is_planned_by_its_other_knobs() -> None:
    task = Task(model=Dense, loss=mean, batch=lambda rows, steps: torch.randn(rows, steps, 3))
    plan = oomguard.find_feasible_config(task, steps=200, batch=64, device="t4", budget="600MiB", allow="none")
    assert plan.candidate.accumulation > 1
    assert plan.candidate.segments == 1
    assert "no recurrent calls that segments could reach: they will not help" in " ".join(
        summarize_task(plan).sentences
    )
