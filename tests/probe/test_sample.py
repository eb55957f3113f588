"""The steps of a probe: microbatches as full as they can come, and nothing else than training runs."""

import pytest
import torch
from hypothesis import given
from probe.probing import one_thread
from strategies import specs

from oomguard._core.units import GIB
from oomguard._device.find import open_device
from oomguard._estimate.terms import longest_tokens
from oomguard._probe.record import Request
from oomguard._probe.sample import SpecMeter, longest_lengths, random_microbatch, tiny_candidate, tiny_spec
from oomguard._rnn import Microbatch
from oomguard._spec.spec import Spec


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def meter(spec: Spec, **knobs: int) -> SpecMeter:
    request = Request(spec=spec, candidate=one_thread(spec, **knobs), device="cpu", budget_bytes=GIB)
    return SpecMeter(request, open_device("cpu"))


@given(specs())
def test_every_spec_has_a_tiny_one_that_can_be_served(spec: Spec) -> None:
    small = tiny_spec(spec)
    candidate = tiny_candidate(small, one_thread(spec))
    assert (small.cell, small.head, small.loss, small.optimizer) == (spec.cell, spec.head, spec.loss, spec.optimizer)
    assert (small.one_call, candidate.microbatch) == (small.layers == 1 or not (spec.dropout or spec.layer_norm), 1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 9])
def test_the_longest_sequences_are_those_that_the_estimate_counts(rows: int, packed: bool) -> None:
    spec = Spec(cell="gru", lengths={10: 5, 100: 2, 40: 1}, packed=packed)
    lengths = longest_lengths(spec, rows)
    assert lengths is not None
    assert lengths[0] == 100
    if packed:
        assert sum(lengths) == longest_tokens(spec, rows)


def test_padding_is_there_where_it_can_be_since_its_mask_costs_memory() -> None:
    lengths = longest_lengths(Spec(cell="gru", lengths={10: 5, 100: 20}), 4)
    assert lengths == [100, 100, 100, 10]


def test_the_same_seed_gives_the_same_values() -> None:
    spec = Spec(cell="gru", seq=6, features=3, batch=2)
    microbatch, same, other = (random_microbatch(spec, 2, dice(seed)) for seed in (1, 1, 2))
    assert torch.equal(microbatch.inputs, same.inputs)
    assert torch.equal(microbatch.targets, same.targets)
    assert not torch.equal(microbatch.inputs, other.inputs)


@pytest.mark.parametrize(
    ("changes", "inputs", "targets"),
    [
        ({}, (6, 2, 3), (6, 2, 1)),
        ({"batch_first": True}, (2, 6, 3), (2, 6, 1)),
        ({"head": "last-step", "outputs": 5}, (6, 2, 3), (2, 5)),
        ({"features": None, "vocab": 9}, (6, 2), (6, 2)),
        ({"head": "last-step", "loss": "cross-entropy", "outputs": 4}, (6, 2, 3), (2,)),
    ],
)
def test_microbatches_have_the_shape_that_the_spec_says(
    changes: dict[str, object], inputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    spec = Spec(**{"cell": "gru", "seq": 6, "features": 3, "batch": 2} | changes)  # type: ignore[arg-type]
    microbatch = random_microbatch(spec, 2, dice())
    assert (tuple(microbatch.inputs.shape), tuple(microbatch.targets.shape)) == (inputs, targets)
    assert microbatch.inputs.count_nonzero() > 0


def test_a_measured_step_meets_held_gradients_but_does_not_run_the_whole_batch() -> None:
    spec = Spec(cell="gru", seq=5, features=3, hidden=4, batch=12)
    sampled = meter(spec, microbatch=2)
    sampled.warm_up()
    sampled.step()
    sampled.step()
    assert (len(sampled.pass_seconds), len(sampled.update_seconds)) == (4, 2)


def test_the_time_of_a_step_counts_every_pass_and_an_uneven_one_by_its_share() -> None:
    spec = Spec(cell="gru", seq=5, features=3, hidden=4, batch=7)
    sampled = meter(spec, microbatch=2)
    sampled.pass_seconds, sampled.update_seconds = [2.0, 4.0, 2.0], [1.0, 1.0, 5.0]
    figures = sampled.figures()
    assert figures["seconds_per_step"] == 3.5 * 2.0 + 1.0
    assert figures["tokens_per_second"] == pytest.approx(7 * 5 / 8.0)


def test_nobody_holds_a_microbatch_while_the_next_is_made() -> None:
    spec = Spec(cell="gru", seq=5, features=3, hidden=4, batch=4)
    feed = meter(spec, microbatch=2)._feed()
    first: Microbatch | None = next(feed)
    alive = torch.utils.weak.WeakTensorKeyDictionary({first.inputs: True})  # type: ignore[union-attr]
    first = None
    assert len(alive) == 0


def test_terms_count_what_tensors_take() -> None:
    spec = Spec(cell="lstm", seq=5, features=3, hidden=4, layers=1, batch=2)
    sampled = meter(spec)
    sampled.warm_up()
    sampled.step()
    weights_bytes = 4 * sum(p.numel() for p in sampled.training.model.parameters())
    counters_bytes = 4 * len(list(sampled.training.model.parameters()))  # Adam's steps
    assert sampled.sizes == {
        "weights": weights_bytes,
        "gradients": weights_bytes,
        "optimizer": 2 * weights_bytes + counters_bytes,
        "input": 4 * (5 * 2 * 3 + 5 * 2),
    }


def test_weights_that_share_a_storage_count_once() -> None:
    spec = Spec(cell="gru", seq=5, vocab=10, hidden=4, layers=1, batch=2, tied=True)
    sampled = meter(spec)
    whole = torch.zeros(100)
    assert sampled.bytes_of([whole[:50], whole[50:], whole]) == 400


def test_a_request_gives_the_same_weights_each_time() -> None:
    spec = Spec(cell="gru", seq=5, features=3, hidden=4, batch=2)
    first, second = (meter(spec).training.model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
