"""The estimate of a task: what a trace counts, what happens where nothing can be traced, and bad input."""

import inspect
import os
import random
import time
from functools import partial
from typing import Any

import pytest
import torch
from surface import freeze
from task import models
from task.models import Forecast, WordModel, carried, likelihood, squares, text, waves
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import oomguard
from oomguard import MisuseError, Task
from oomguard._core.system import run_elsewhere
from oomguard._estimate.cards import card
from oomguard._estimate.target import CPU, on_card
from oomguard._task.batches import Batches
from oomguard._task.check import finding
from oomguard._task.child import Answer, answers, begin
from oomguard._task.layout import mapped
from oomguard._task.task import packed
from oomguard._task.trace import Trace, build, copied, evaluate, make_optimizer, trace

TASKS = {name: value for name, value in vars(models).items() if isinstance(value, Task) and name != "contrast_tagger"}
each = pytest.mark.parametrize("name", TASKS)


def traced(task: Task, rows: int = 4, steps: int = 12, **how: Any) -> Trace:
    batches = Batches(task)
    batch = batches.make(rows, steps if task.batch is not None else None)
    torch.manual_seed(0)
    return trace(task, build(task), batch, how.pop("target", CPU), heap="tight", **how)


def peak_bytes(step: Trace) -> int:
    return step.moments[step.peak][0]


@each
def test_a_trace_counts_what_a_real_pass_counts(name: str) -> None:
    random.seed(0)
    fake, real = traced(TASKS[name]), traced(TASKS[name], fake=False)
    assert peak_bytes(fake) == pytest.approx(peak_bytes(real), rel=0.02)
    assert fake.cells == real.cells


@each
def test_terms_are_complete_on_the_cpu_and_on_a_card(name: str) -> None:
    for target in (CPU, on_card(card("t4"))):
        step = traced(TASKS[name], target=target)
        _, labels = step.moments[step.peak]
        assert {"weights", "input"} <= {term for term, _ in labels}
        assert sum(labels.values()) <= peak_bytes(step)
        assert step.engine == ("" if name == "feed_forward" else step.engine)
        assert not target.cuda or step.engine in ("cudnn", "")


OPTIMIZERS = [
    one
    for one in vars(torch.optim).values()
    if inspect.isclass(one) and one.__module__.startswith("torch.optim.") and one.__name__ not in ("Optimizer", "LBFGS")
]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_the_state_of_every_optimizer_is_counted(kind: Any) -> None:
    if kind.__name__ in ("SparseAdam", "Muon"):  # for sparse gradients, and for matrices only
        pytest.skip("it does not train this model")
    task = Task(model=Forecast, loss=likelihood, batch=lambda r, s: torch.randn(r, s, 2), optimizer=lambda p: kind(p))
    model = build(task)
    optimizer = make_optimizer(task, model)
    torch.autograd.backward(evaluate(task, model, torch.randn(2, 5, 2))[0])
    optimizer.step()
    sizes: list[int] = []
    for state in optimizer.state.values():
        mapped(lambda one: sizes.append(one.untyped_storage().nbytes()), dict(state))
    step = traced(task)
    found = [labels for (phase, _), (_, labels) in step.moments.items() if phase == "backward"]
    assert max(sum(n for (term, _), n in labels.items() if term == "optimizer") for labels in found) == sum(sizes)


class Late(torch.optim.SGD):
    """Keeps a copy of the weights from the second step on, as one that averages them does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if "steps" in state:
                state.setdefault("average", weight.detach().clone())
            state["steps"] = True


def test_state_that_an_optimizer_makes_in_a_later_step_is_counted() -> None:
    how: dict[str, Any] = {"model": Forecast, "loss": likelihood, "batch": lambda r, s: torch.randn(r, s, 2)}
    kinds = (Late, torch.optim.SGD)
    late, plain = (traced(Task(optimizer=partial(kind, lr=0.1), **how)) for kind in kinds)
    weights = sum(weight.nbytes for weight in build(Task(**how)).parameters())
    assert peak_bytes(late) - peak_bytes(plain) == pytest.approx(weights, rel=0.1)


def test_held_gradients_of_an_accumulation_count() -> None:
    once, twice = (traced(models.word_model, rows=1, steps=2, passes=passes) for passes in (1, 2))
    assert peak_bytes(twice) > peak_bytes(once)


def test_segments_lower_the_peak_of_a_long_sequence() -> None:
    plain, cut = (traced(models.word_model, steps=2000, segments=segments) for segments in (1, 20))
    rnn = [max(n for (_, part), (n, _) in one.moments.items() if part == "rnn") for one in (plain, cut)]
    assert rnn[1] < rnn[0]


def test_parts_are_named_by_module_and_logits_are_recognised() -> None:
    class Wide(WordModel):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Linear(8, 3000)

    task = Task(model=Wide, loss=carried, batch=text)
    found = oomguard.estimate(task, microbatch=8, steps=40, device="t4")
    assert next(iter(found.parts)) == "decoder (logits)"
    assert {"rnn", "encoder", "batch", "optimizer state"} <= {*found.parts}
    assert sum(found.terms.values()) == found.total_bytes
    assert found.terms["logits"] > 3000 * 320 * 4
    assert found.moment == "backward of the loss"
    assert (found.engine, found.steps, found.candidate.microbatch) == ("cudnn", 40, 8)
    assert found.reserved_bytes is not None
    assert found.reserved_bytes > (found.allocated_bytes or 0) > 0


class Looking(Forecast):
    """A model that looks into its data, as many do: lengths, masks, checks for NaN."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        lengths = torch.full((len(x),), x.shape[1], dtype=torch.int64)
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        mean, scale = super().forward(x)
        if torch.isnan(mean).any() or mean.abs().max().item() > 1e9:
            raise ValueError("not finite")
        assert mean[mask].shape == (int(mask.sum()),)
        return mean.masked_fill(~mask, 0.0), scale


def test_a_model_that_looks_into_whole_numbers_and_checks_for_nan_is_traced() -> None:
    task = Task(model=Looking, loss=likelihood, batch=lambda rows, steps: torch.randn(rows, steps, 2))
    assert traced(task).cells == ("gru",)


class Opaque(nn.Module):
    """A model that leaves torch for a moment, which fake tensors cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 16), nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(torch.from_numpy(x.numpy() * 2.0))[0])


class Staircase(Opaque):
    def forward(self, x: Tensor) -> Any:
        assert x.numpy() is not None
        return super().forward(x) if x.shape[0] < 40 else super().forward(x).repeat(1, 1, 30)


def test_a_mask_whose_values_are_not_known_is_taken_to_choose_all() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        hidden = model(batch)[0]
        chosen = hidden[hidden > -2].mean() + hidden.masked_select(hidden > -2).mean()
        rows, _, _ = (hidden.detach() > -2).nonzero(as_tuple=True)
        return chosen + (hidden * 0).flatten()[: len(rows)].sum()  # type: ignore[no-any-return]

    task = Task(model=lambda: nn.GRU(3, 256), loss=loss, batch=waves)
    fake, real = traced(task, steps=60), traced(task, steps=60, fake=False)
    assert peak_bytes(fake) == pytest.approx(peak_bytes(real), rel=0.02)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.zeros(inputs.shape[1], 8)
        for step in inputs.unbind(0):
            hidden = self.cell(step, hidden)
        return hidden


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_model_in_torchscript_is_traced_and_checked() -> None:
    def build() -> nn.Module:
        return nn.Sequential(torch.jit.script(Loop()), nn.BatchNorm1d(8))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).pow(3).mean()  # type: ignore[no-any-return]

    task = Task(model=build, loss=loss, batch=waves)
    fake, real = traced(task), traced(task, fake=False)
    assert peak_bytes(fake) == pytest.approx(peak_bytes(real), rel=0.02)
    begin(packed(task), 5, 1 << 40)
    found = finding("microbatch")
    assert "BatchNorm" in found.reason
    with torch.random.fork_rng():
        model = build()
    copy = copied(model)
    copy(torch.ones(5, 2, 3)).sum().backward()
    assert all(weight.grad is not None for weight in copy.parameters())
    assert all(weight.grad is None for weight in model.parameters())


def test_relative_lengths_that_a_loss_scales_in_place_do_not_keep_a_model_from_being_traced() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        lengths = batch["relative"].mul_(len(batch["frames"]))
        outputs = model(batch["frames"])[0]
        total: Tensor = sum(outputs[: int(length), row].square().sum() for row, length in enumerate(lengths))
        return total / len(lengths)

    def batch(rows: int, steps: int) -> dict[str, Tensor]:
        return {"frames": torch.randn(steps, rows, 3), "relative": torch.linspace(0.5, 1, rows)}

    task = Task(model=lambda: nn.LSTM(3, 6), loss=loss, batch=batch)
    assert peak_bytes(traced(task)) == pytest.approx(peak_bytes(traced(task, fake=False)), rel=0.02)


def test_a_model_that_needs_longer_rows_than_a_tiny_batch_is_refused_with_advice() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Any:
        if len(batch) < 100:
            raise ValueError("too short")
        return squares(model, batch)

    task = Task(model=lambda: nn.Linear(3, 1), loss=loss, batch=waves)
    with pytest.raises(MisuseError, match=r"ValueError: too short\. .* let batch\(\) make more"):
        oomguard.estimate(task, microbatch=4, steps=300)


def test_a_model_that_cannot_be_traced_is_extrapolated_from_tiny_passes() -> None:
    class Clear(Opaque):
        def forward(self, x: Tensor) -> Any:
            return self.head(self.rnn(x * 2.0)[0])

    found, expected = (
        answered(Task(model=kind, loss=squares, batch=waves), 16, 200, heap="system") for kind in (Opaque, Clear)
    )
    assert "extrapolated" in found.notes[0]
    assert not expected.notes
    assert peak_bytes(found.step) == pytest.approx(peak_bytes(expected.step), rel=0.03)


def test_passes_of_more_rows_are_tried_where_few_rows_run_in_another_kernel() -> None:
    """The first passes have at most 6 rows."""

    class Switch(Opaque):
        def forward(self, x: Tensor) -> Any:
            wide = x.repeat(1, 1, 200) if x.shape[1] < 5 else x
            return super().forward(x) + 0.0 * wide.exp().sum()

    found, expected = (answered(Task(model=kind, loss=squares, batch=waves), 16, 200) for kind in (Switch, Opaque))
    assert peak_bytes(found.step) == pytest.approx(peak_bytes(expected.step), rel=0.1)


def test_no_estimate_is_given_where_a_held_out_pass_disagrees() -> None:
    with pytest.raises(MisuseError, match=r"must grow evenly with rows and length.* No estimate can be given"):
        answered(Task(model=Staircase, loss=squares, batch=waves), 16, 200)


# ---- bad input


def returns_rows(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).mean((0, 2))


def returns_nan(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).mean() / 0.0 * 0.0


def detached(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).mean().detach()


def elsewhere(model: nn.Module, batch: Tensor) -> Any:
    return model(batch.to("meta")).mean()


def pairs_of_waves(rows: int, steps: int) -> Tensor:
    return torch.randn(rows, steps, 2)


def dies(model: nn.Module, batch: Tensor) -> Any:
    os._exit(7)


def answered(task: Task, rows: int | None = 2, steps: int | None = 5, **how: Any) -> Answer:
    """What the child would answer, without a child."""
    begin(packed(task), steps, 1 << 40)
    return answers([{"rows": rows, "steps": steps, "target": CPU, "heap": "tight"} | how])[0]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (returns_rows, r"must be one number, but .*test_estimate\.py:\d+ returned a tensor of shape \(2,\)"),
        (returns_nan, r"must be finite, but .*test_estimate\.py:\d+ returned nan"),
        (detached, r"must depend on the parameters, but .*test_estimate\.py:\d+"),
        (elsewhere, r"test_estimate\.py:\d+ raised \w+: .* device"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_loss_is_refused_with_the_line_of_the_user(loss: Any, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        answered(Task(model=lambda: nn.Linear(3, 2), loss=loss, batch=waves))


def test_a_model_that_cannot_move_to_its_device_is_refused() -> None:
    with pytest.raises(MisuseError, match=r"must move to cpu, but .*test_estimate\.py:\d+ raised NotImplementedError"):
        answered(Task(model=lambda: nn.Linear(3, 2).to("meta"), loss=squares, batch=waves))


def test_the_module_itself_can_be_given() -> None:
    built, made = (answered(Task(model=model, loss=squares, batch=waves)) for model in (Opaque, Opaque()))
    assert peak_bytes(built.step) == peak_bytes(made.step)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(MisuseError, match="must step without a closure, but got LBFGS"):
        answered(Task(model=Forecast, loss=likelihood, batch=pairs_of_waves, optimizer=torch.optim.LBFGS))


def greedy(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).mean() + torch.ones(4 << 30, dtype=torch.uint8).sum()


def test_a_tiny_step_that_needs_more_than_the_limit_is_refused() -> None:
    task = Task(model=lambda: nn.Linear(3, 2), loss=greedy, batch=waves)
    with pytest.raises(MisuseError, match=r"test_estimate\.py:\d+ raised RuntimeError: .*allocate"):
        run_elsewhere("oomguard._task.child", "begin", packed(task), 5, 1 << 30)


def test_equally_long_samples_of_a_loader_give_its_batch_size() -> None:
    data = DataLoader(TensorDataset(torch.randn(50, 9, 2)), 5)
    found = answered(Task(model=Forecast, loss=lambda m, b: likelihood(m, b[0]), data=data), None, None)
    assert found.rows == 5
    assert found.step.steps == 8
    assert found.notes == ("Samples are equally long, by all 50 samples.",)


def test_a_task_that_kills_its_process_is_refused() -> None:
    with pytest.raises(MisuseError, match="its process ended early"):
        oomguard.estimate(Task(model=lambda: nn.Linear(3, 2), loss=dies, batch=waves), microbatch=2, steps=5)


def test_a_task_that_takes_too_long_is_given_up() -> None:
    def slow(model: nn.Module, batch: Tensor) -> Any:
        time.sleep(60)
        return squares(model, batch)

    with pytest.raises(MisuseError, match=r"neither a trace nor tiny passes were after .* Raise --timeout"):
        oomguard.estimate(Task(model=Forecast, loss=slow, batch=waves), steps=5, timeout="2s")


def test_a_function_of_rows_and_steps_needs_steps() -> None:
    with pytest.raises(MisuseError, match="needs a number of steps"):
        answered(models.forecast, steps=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden": 8}, "Unknown knob 'hidden'"),
        ({"engine": "native"}, "does not count every knob, but got --engine native"),
        ({"steps": 0}, "--steps must be a whole number"),
        ({"microbatch": 0}, "--microbatch must be a whole number"),
    ],
)
def test_other_fields_than_knobs_of_a_task_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        oomguard.estimate(models.forecast, **{"steps": 5} | fields)


# ---- by name, on the command line


def test_a_task_is_estimated_by_name_on_the_command_line() -> None:
    ran = freeze.run("estimate --model task.models:tagger --microbatch 6 --budget 4GiB --json")
    assert ran.code == 0, ran.err
    document = ran.document
    assert document["candidate"]["microbatch"] == 6
    assert document["notes"] == ["The longest of all 12 samples has 8 steps."]
    assert "encoder" in document["parts"]
    assert document["total_bytes"] == sum(document["terms"].values())


def test_a_model_without_recurrence_is_estimated_with_a_note() -> None:
    ran = freeze.run("estimate --model task.models:feed_forward --seq 20 --device t4")
    assert ran.code == 0, ran.err
    assert "they will not help" in ran.out
    assert "parts at the peak" in ran.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model task.models:nothing", "has no nothing"),
        ("--model task.models:forecast --hidden 8", "--hidden describes a built-in model"),
    ],
)
def test_wrong_flags_of_a_task_end_with_exit_code_2(flags: str, message: str) -> None:
    ran = freeze.run(f"estimate {flags}")
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
