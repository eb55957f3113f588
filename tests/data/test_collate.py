"""Microbatches as the step takes them: layout, padding, masks."""

from typing import Any

import numpy as np
import pytest
import torch
from data.making import numbers, spec, tokens

from oomguard._data.loader import collate
from oomguard._data.source import Pair
from oomguard._probe.sample import random_microbatch
from oomguard._rnn import count_targets
from oomguard._rnn.run import IGNORED
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec
from oomguard._step import prepare, step


def pair(wanted: Spec, steps: int) -> Pair:
    lead = (steps,) if wanted.head == "per-step" else ()
    inputs = numbers(steps, 2) + 1 if wanted.vocab is None else np.arange(1, steps + 1)
    if wanted.loss == "cross-entropy":
        return inputs, np.ones(lead, dtype=np.int64)
    return inputs, np.ones((*lead, wanted.classes), dtype=np.float32)


def made(wanted: Spec, *lengths: int) -> Any:
    return collate(wanted, (pair(wanted, steps) for steps in lengths), np.array(lengths))


KINDS = [
    spec(),
    spec(outputs=3),
    spec(loss="cross-entropy", outputs=3),
    spec(head="last-step"),
    spec(head="last-step", loss="cross-entropy", outputs=3),
    tokens(),
    tokens(head="last-step"),
    spec(batch_first=True),
    tokens(batch_first=True),
    spec(packed=True),
]
each = pytest.mark.parametrize("wanted", KINDS, ids=str)


@each
def test_a_full_microbatch_has_the_layout_that_probes_measure(wanted: Spec) -> None:
    microbatch, probed = made(wanted, 4, 4, 4), random_microbatch(wanted, 3, torch.Generator())
    for own, other in zip(microbatch[:2], probed[:2], strict=True):
        assert (own.shape, own.dtype, own.stride()) == (other.shape, other.dtype, other.stride())


@each
def test_padding_is_zero_and_its_targets_do_not_count(wanted: Spec) -> None:
    microbatch = made(wanted, 3, 1)
    assert microbatch.inputs.shape[1 if wanted.batch_first else 0] == 3  # its own longest, not the spec's
    inputs = microbatch.inputs if wanted.batch_first else microbatch.inputs.transpose(0, 1)
    assert inputs[1, 1:].count_nonzero() == 0
    assert inputs[0].count_nonzero() == inputs[0].numel()
    assert microbatch.lengths.tolist() == [3, 1]
    assert count_targets(wanted, microbatch) == (4 if wanted.head == "per-step" else 2)


def test_classes_are_padded_with_the_ignored_one() -> None:
    assert made(tokens(), 3, 1).targets.T.tolist() == [[1, 1, 1], [1, IGNORED, IGNORED]]


def test_lengths_are_there_only_with_padding_or_packing() -> None:
    assert made(spec(), 3, 3).lengths is None
    assert made(spec(packed=True), 3, 3).lengths.tolist() == [3, 3]
    assert made(spec(bidirectional=True, lengths={4: 1}), 3, 3).lengths.tolist() == [3, 3]


@each
def test_the_step_takes_it(wanted: Spec) -> None:
    torch.manual_seed(0)
    training = prepare(wanted, Candidate(microbatch=2))
    microbatch = made(wanted, 3, 1)
    loss = step(training, [microbatch], count_targets(wanted, microbatch)).loss
    assert torch.isfinite(loss)
