"""The stepper: pieces of a batch add up to the gradient of the whole batch, for any model, loss and optimizer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import plan_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, pad_sequence

import oomguard
from oomguard._core.errors import GuardError, MisuseError
from oomguard._guard.stepper import Loss, Stepper

SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
IGNORED = -100


class Tagger(nn.Module):
    """Tags every token of sequences of unequal length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, tokens: PackedSequence) -> Tensor:
        embedded = PackedSequence(self.embed(tokens.data), *tokens[1:])
        scores: Tensor = self.head(pad_packed_sequence(self.lstm(embedded)[0], batch_first=True)[0])
        return scores


def make(seed: int = 0) -> tuple[Tagger, dict[str, Any]]:
    torch.manual_seed(seed)
    lengths = [3, 9, 1, 7, 7, 2, 4]
    tokens = pack_sequence([torch.randint(11, (n,)) for n in lengths], enforce_sorted=False)
    return Tagger().double(), {"tokens": tokens, "tags": [torch.randint(4, (n,)) for n in lengths]}


def token_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum over all tokens, and their number."""
    tags = pad_sequence(batch["tags"], batch_first=True, padding_value=IGNORED)
    loss = cross_entropy(model(batch["tokens"]).flatten(0, 1), tags.flatten(), reduction="sum", ignore_index=IGNORED)
    return loss, (tags != IGNORED).sum()


def row_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean over rows of what each row has once."""
    first_scores: Tensor = model(batch["tokens"])[:, 0]
    return first_scores.square().sum(1).mean()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def stepper(model: nn.Module, loss: Loss = token_loss, microbatch: int | None = 2, **more: Any) -> Stepper:
    optimizer = more.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    return oomguard.stepper("64GiB", model, loss, optimizer, microbatch=microbatch, **more)


def fails_once(loss: Callable[..., Any], most: int) -> Callable[..., Any]:
    """A loss that runs out of memory with more than so many rows."""

    def limited(model: nn.Module, batch: Any) -> Any:
        if len(batch["tags"]) > most:
            raise RuntimeError(SHORT)
        return loss(model, batch)

    return limited


# ---- the gradient of the whole batch


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_pieces_of_a_token_mean_give_the_gradient_of_the_whole_batch(rows: int) -> None:
    model, batch = make()
    with stepper(model, microbatch=rows) as step:
        loss = step(batch)
    found = gradient(model)
    fresh, _ = make()
    total, count = token_loss(fresh, batch)
    (total / count).backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(found, gradient(fresh), rtol=1e-12, atol=1e-15)
    assert loss.item() == pytest.approx((total / count).item(), rel=1e-13)
    assert not loss.requires_grad


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_pieces_of_a_row_mean_give_the_gradient_of_the_whole_batch(rows: int) -> None:
    model, batch = make()
    with stepper(model, row_loss, rows) as step:
        loss = step(batch)
    found = gradient(model)
    fresh, _ = make()
    whole = row_loss(fresh, batch)
    whole.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(found, gradient(fresh), rtol=1e-12, atol=1e-15)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-13)


def test_a_batch_in_one_piece_trains_exactly_as_a_plain_loop() -> None:
    model, batch = make()
    plain, _ = make()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    with stepper(model, microbatch=None, optimizer=torch.optim.Adam) as step:
        for _ in range(3):
            step(batch)
            total, count = token_loss(plain, batch)
            optimizer.zero_grad()
            (total / count).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert torch.equal(weights(model), weights(plain))


def test_a_step_that_runs_out_of_memory_loses_nothing(tmp_path: Path) -> None:
    model, batch = make()
    calm, _ = make()
    with stepper(model, fails_once(token_loss, 2), None, events=str(tmp_path / "events.jsonl")) as step:
        losses = [step(batch).item() for _ in range(3)]
        assert (step.guard.rows, step.guard.steps) == (2, 3)
    with stepper(calm, microbatch=None) as step:
        assert losses == pytest.approx([step(batch).item() for _ in range(3)], rel=1e-12)
    assert torch.allclose(weights(model), weights(calm), rtol=1e-12, atol=1e-15)
    assert (tmp_path / "events.jsonl").read_text().count('"oom"') == 2


def test_a_step_that_never_fits_is_an_error() -> None:
    model, batch = make()
    with stepper(model, fails_once(token_loss, 0)) as step, pytest.raises(GuardError, match="last rung"):
        step(batch)


def test_a_piece_without_targets_has_no_weight() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    batch = torch.randn(4, 2).double(), torch.tensor([0.0, 0.0, 1.0, 1.0]).double()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, mask = batch
        return (model(inputs).squeeze(1).square() * mask).sum(), mask.sum()

    whole = model(batch[0][2:]).square().mean()
    exact = torch.cat([part.flatten() for part in torch.autograd.grad(whole, [*model.parameters()])])
    with stepper(model, loss, 2) as step:
        assert step(batch).item() == pytest.approx(whole.item(), rel=1e-13)
    assert torch.allclose(gradient(model), exact, rtol=1e-12)


def test_tensors_may_have_their_rows_in_any_dimension() -> None:
    torch.manual_seed(0)
    model = nn.GRU(3, 4).double()
    batch = torch.randn(5, 6, 3).double(), torch.randn(1, 6, 4).double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(*batch)[0]
        return outputs.square().mean()

    loss(model, batch).backward()  # type: ignore[no-untyped-call]
    exact = gradient(model)
    with stepper(model, loss, dim=1) as step:
        step(batch)
    assert torch.allclose(gradient(model), exact, rtol=1e-12)


def test_a_plan_sizes_the_pieces() -> None:
    model, batch = make()
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        seen.append(len(batch["tags"]))
        return token_loss(model, batch)

    plan = plan_of(((4, 1), (2, 1), (1, 1)), seq=9)
    with oomguard.stepper(plan, model, loss, torch.optim.SGD(model.parameters())) as step:
        step(batch)
    assert seen == [4, 3]


# ---- clipping, schedulers, GradScaler


def test_the_whole_gradient_is_clipped_once() -> None:
    model, batch = make()
    plain, _ = make()
    with stepper(model, clip=0.01) as step:
        step(batch)
    total, count = token_loss(plain, batch)
    (total / count).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert torch.allclose(gradient(model), gradient(plain), rtol=1e-12, atol=1e-15)


def test_clip_may_be_a_function_that_is_called_once_with_the_parameters() -> None:
    model, batch = make()
    calls: list[int] = []

    def clip(parameters: list[Tensor]) -> None:
        calls.append(len(parameters))
        nn.utils.clip_grad_value_(parameters, 1e-3)

    with stepper(model, clip=clip) as step:
        step(batch)
    assert calls == [len([*model.parameters()])]
    assert gradient(model).abs().max() == 1e-3


def test_a_scheduler_and_a_moving_average_follow_the_step() -> None:
    model, batch = make()
    step = stepper(model)
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 1, gamma=0.5)
    average = torch.optim.swa_utils.AveragedModel(model)
    with step:
        for _ in range(2):
            step(batch)
            schedule.step()
            average.update_parameters(model)
    assert step.optimizer.param_groups[0]["lr"] == 0.1 / 4
    assert int(average.n_averaged) == 2


def test_training_goes_on_with_another_optimizer_as_in_a_plain_loop() -> None:
    (model, batch), (plain, _) = make(), make()
    with stepper(model) as step:
        step(batch)
        step = replace(step, optimizer=torch.optim.ASGD(model.parameters(), lr=0.1, t0=0))
        step(batch)
        with pytest.raises(MisuseError, match="LBFGS calls a closure"):
            replace(step, optimizer=torch.optim.LBFGS(model.parameters()))
    for kind in (torch.optim.SGD, partial(torch.optim.ASGD, t0=0)):
        optimizer = kind(plain.parameters(), lr=0.1)
        total, weight = token_loss(plain, batch)
        (total / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(weights(model), weights(plain), rtol=1e-10)


@pytest.mark.parametrize("infinite", [False, True])
def test_a_scaler_scales_the_loss_and_skips_a_gradient_that_overflows(infinite: bool) -> None:
    model, batch = make()
    plain, _ = make()
    before, scaler = weights(model), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = token_loss(model, batch)
        return total * (float("inf") if infinite else 1.0), count

    with stepper(model, loss, clip=0.5, scaler=scaler) as step:
        step(batch)
    with stepper(plain, clip=0.5) as step:
        step(batch)
    if infinite:
        assert torch.equal(weights(model), before)
        assert scaler.get_scale() == 512
    else:
        assert torch.allclose(weights(model), weights(plain), rtol=1e-10)


def test_gradients_of_before_do_not_count() -> None:
    model, batch = make()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    with stepper(model) as step:
        step(batch)
    fresh, _ = make()
    with stepper(fresh) as step:
        step(batch)
    assert torch.equal(weights(model), weights(fresh))


def test_sparse_gradients_are_corrected_and_clipped() -> None:
    torch.manual_seed(0)
    embed = nn.Embedding(9, 2, sparse=True).double()
    tokens, sizes = torch.randint(9, (4, 3)), torch.tensor([1.0, 2.0, 3.0, 3.0])

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]).square().sum(), batch[1].sum()

    with stepper(embed, loss, 1, clip=0.1) as step:
        step((tokens, sizes))
    assert embed.weight.grad is not None
    found = embed.weight.grad.to_dense()
    embed.zero_grad()
    embed.sparse = False
    before = embed.weight.detach() + 0.1 * found
    exact = torch.autograd.grad((before.requires_grad_()[tokens].square().sum() / 9), before)[0]
    assert torch.allclose(found, exact * 0.1 / exact.norm(), rtol=1e-4)


# ---- what is refused


def test_an_optimizer_that_calls_a_closure_is_refused() -> None:
    model, _ = make()
    with pytest.raises(MisuseError, match="LBFGS calls a closure"):
        stepper(model, optimizer=torch.optim.LBFGS)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: mse_loss(model(batch), batch, reduction="none"), r"a tensor of shape \(2, 2\)"),
        (lambda model, batch: 3.0, "a float"),
        (lambda model, batch: mse_loss(model(batch), batch).detach(), r"a tensor of shape \(\)"),
    ],
)
def test_a_loss_that_is_not_a_scalar_with_a_gradient_is_refused(loss: Any, words: str) -> None:
    with stepper(nn.Linear(2, 2), loss) as step, pytest.raises(MisuseError, match=words):
        step(torch.ones(4, 2))


def test_the_limit_on_memory_ends_with_the_block() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    model, batch = make()
    with stepper(model) as step:
        step(batch)
        assert resource.getrlimit(resource.RLIMIT_DATA) != before
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


# ---- on a card


@pytest.mark.gpu
def test_on_a_card_a_model_without_a_plan_trains_within_a_budget() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(16, 64, batch_first=True).cuda()
    batch = torch.randn(64, 400, 16).cuda()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch)[0]
        return outputs.square().mean()

    def train(budget: int | None) -> tuple[Stepper, float, Tensor]:
        torch.cuda.empty_cache()
        with oomguard.stepper(budget, model, loss, torch.optim.SGD(model.parameters(), lr=0.0)) as step:
            value = step(batch).item()
        found = gradient(model).cpu()
        model.zero_grad()
        return step, value, found

    train(None)  # loads the kernels
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved()
    roomy, value, exact = train(None)
    assert roomy.guard.rung == 0
    peak_bytes = roomy.guard.watch.peak_bytes
    budget = peak_bytes - (torch.cuda.max_memory_reserved() - before_bytes) // 2
    tight, again, found = train(budget)
    assert tight.guard.rung > 0
    assert tight.guard.watch.peak_bytes <= budget < peak_bytes
    assert again == pytest.approx(value, rel=1e-5)
    assert torch.allclose(found, exact, rtol=1e-3, atol=1e-6)
