"""Task: what it takes, what it refuses, and how it is found by name."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from task.models import loader, squares, waves
from torch.utils.data import DataLoader, IterableDataset

from oomguard import MisuseError, Task
from oomguard._task.child import batches_of
from oomguard._task.task import packed, resolve


def make(**changes: Any) -> Task:
    usual: dict[str, Any] = {"model": torch.nn.Identity, "loss": squares, "batch": waves}
    return Task(**usual | changes)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def one_parameter(model: Any) -> Any: ...


def with_default(model: Any, batch: Any, scale: float = 1.0) -> Any: ...


def with_state(model: Any, batch: Any, state: Any) -> Any: ...


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model must be a function, but got None"),
        ({"optimizer": 3}, "optimizer must be a function, but got 3"),
        ({"batch": None}, "either data or batch, but got neither"),
        ({"data": loader()}, "either data or batch, but got both"),
        ({"batch": None, "data": [1, 2]}, "must be a DataLoader whose samples have indices, but got"),
        ({"batch": None, "data": DataLoader(Stream())}, r"Stream at .*test_task\.py:\d+ can only be iterated"),
        ({"batch": None, "data": DataLoader([1], batch_size=None)}, "this loader has batch_size=None"),  # type: ignore[arg-type]
        ({"loss": one_parameter}, r"test_task\.py:\d+ takes 1 required parameters"),
    ],
)
def test_a_wrong_argument_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        make(**changes)


@pytest.mark.parametrize(("loss", "piecewise"), [(squares, False), (with_default, False), (with_state, True)])
def test_a_piecewise_loss_is_recognised_by_its_parameters(loss: Callable[..., Any], piecewise: bool) -> None:
    assert make(loss=loss).piecewise == piecewise


@pytest.mark.parametrize("name", ["task.models:forecast", "task.models:made_later"])
def test_a_task_is_found_by_name(name: str) -> None:
    assert resolve(name).loss.__name__ == "likelihood"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("task.nowhere:task", "there is no module task.nowhere"),
        ("task.models:nothing", "task.models has no nothing"),
        ("task.models:not_a_task", "it is 5"),
        ("task.models:Forecast", "it is Forecast"),
        ("task.models:likelihood", "raised TypeError"),
    ],
)
def test_a_name_without_a_task_is_refused(name: str, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        resolve(name)


def test_a_module_that_fails_is_named_with_its_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_task.py").write_text("x = 1\nx.missing\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MisuseError, match=r"failing_task\.py:2 raised AttributeError"):
        resolve("failing_task:task")


def test_functions_of_a_script_are_sent_by_value() -> None:
    factor = 3.0
    sent = batches_of(packed(make(loss=lambda model, batch: batch.mean() * factor))).task
    assert sent.loss(None, torch.ones(2)) == 3.0


def test_a_function_that_cannot_be_sent_is_named_with_its_line() -> None:
    lock = threading.Lock()

    def reading(rows: int, steps: int) -> Any:
        with lock:
            return waves(rows, steps)

    with pytest.raises(MisuseError, match=r"its batch at .*test_task\.py:\d+ cannot be pickled"):
        packed(make(batch=reading))
