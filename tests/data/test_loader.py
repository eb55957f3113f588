"""The loader: batches in order, microbatches one at a time, the same with workers and after a restart."""

import gc
import signal
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from data.making import numbers, saved, spec, tokens
from torch.utils.data import DataLoader, TensorDataset

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, MIB
from oomguard._data.loader import WORKER_BYTES, Batch, Loader, size_loader
from oomguard._data.open import open_source
from oomguard._data.order import Position
from oomguard._device.proc import read_status
from oomguard._estimate.terms import loader_bytes
from oomguard._rnn import Microbatch, count_targets
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec
from oomguard._step import prepare, step

BUCKETS = {3: 4, 8: 2}


class Counted:
    """Pairs of many lengths, whose values say which they are. Knows which were asked for."""

    def __init__(self, count: int = 23) -> None:
        self.lengths = np.random.default_rng(0).integers(1, 9, count)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        steps = int(self.lengths[index])
        return np.full((steps, 2), index + 1, np.float32), np.full((steps, 1), index + 1, np.float32)


def loader(**changes: Any) -> Loader:
    wanted = spec(seq=8, batch=6)
    fields: dict[str, Any] = {
        "source": open_source(Counted(), wanted),
        "spec": wanted,
        "buckets": BUCKETS,
    }
    return Loader(**fields | changes)


def same(first: Microbatch, other: Microbatch) -> bool:
    lengths = (first.lengths is None) == (other.lengths is None)
    if first.lengths is not None and other.lengths is not None:
        lengths = torch.equal(first.lengths, other.lengths)
    return lengths and torch.equal(first.inputs, other.inputs) and torch.equal(first.targets, other.targets)


def all_same(firsts: list[Microbatch], others: list[Microbatch]) -> bool:
    return len(firsts) == len(others) and all(map(same, firsts, others))


def flat(loader: Loader, start: Position | None = None) -> list[Microbatch]:
    return [microbatch for batch in loader.batches(start) for microbatch in batch.microbatches()]


def seen(microbatches: list[Microbatch]) -> list[int]:
    return sorted(int(value) for microbatch in microbatches for value in microbatch.inputs.amax(dim=(0, 2)))


def test_every_sequence_comes_once() -> None:
    assert seen(flat(loader())) == list(range(1, 24))


def test_the_targets_of_a_batch_are_those_that_its_microbatches_have() -> None:
    for head in ("per-step", "last-step"):
        wanted = spec(seq=5, batch=4, head=head)
        made = Loader(source=open_source(numbers(33, 3), wanted), spec=wanted, buckets={5: 3})
        for batch in made.batches():
            assert batch.targets == sum(count_targets(wanted, microbatch) for microbatch in batch.microbatches())


def test_the_targets_are_known_without_reading() -> None:
    dataset = Counted()
    made = loader(source=open_source(dataset, spec(seq=8)))
    assert sum(batch.targets for batch in made.batches()) == dataset.lengths.sum()
    assert dataset.asked == []


def split_again(batch: Batch, size: int) -> list[Microbatch]:
    """The batch in microbatches of at most `size` sequences, as the guard's smaller candidates read it."""
    smaller = replace(batch.loader, buckets={bound: min(size, rows) for bound, rows in BUCKETS.items()})
    return [smaller.read(part) for part in smaller.order.microbatches(batch.sequences)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_batch_can_be_asked_for_again_in_smaller_microbatches(size: int) -> None:
    for batch in loader().batches():
        whole, pieces = list(batch.microbatches()), split_again(batch, size)
        assert seen(whole) == seen(pieces)
        assert all(piece.inputs.shape[1] <= size for piece in pieces)


def test_microbatches_are_read_one_at_a_time() -> None:
    dataset = Counted()
    made = loader(source=open_source(dataset, spec(seq=8)), buckets={8: 2})
    feed = next(made.batches()).microbatches()
    next(feed)
    assert len(dataset.asked) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_nobody_holds_a_microbatch_while_the_next_is_made(workers: int) -> None:
    batch = next(running := loader(workers=workers).batches())
    feed = batch.microbatches()
    inputs = next(feed).inputs
    gone = weakref.ref(inputs)
    del inputs
    assert gone() is None
    running.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("done", [0, 2, 3, 4])
def test_training_goes_on_in_the_middle_of_an_epoch(workers: int, done: int) -> None:
    made = loader(seed=3)
    expected = [list(batch.microbatches()) for batch in made.batches(Position(epoch=1))]
    rest = flat(replace(made, workers=workers), Position(epoch=1, done=done))
    assert all_same(rest, [microbatch for batch in expected[done:] for microbatch in batch])


def test_what_was_done_is_not_read_again() -> None:
    dataset = Counted()
    made = loader(source=open_source(dataset, spec(seq=8)))
    rest = seen(flat(made, Position(done=2)))
    assert sorted(index + 1 for index in dataset.asked) == rest
    assert len(rest) == 23 - 2 * 6


def test_a_batch_knows_where_training_is_after_it() -> None:
    positions = [batch.after for batch in loader().batches(Position(epoch=2))]
    assert positions == [*(Position(epoch=2, done=done) for done in (1, 2, 3)), Position(epoch=3)]


def test_workers_give_the_same_batches_as_none(tmp_path: Path) -> None:
    wanted = spec(seq=5, batch=4)
    source = open_source(saved(tmp_path / "x.npy", numbers(103, 3)), wanted)
    made = Loader(source=source, spec=wanted, buckets={5: 3}, seed=1)
    assert all_same(flat(replace(made, workers=2, prefetch=1)), flat(made))


def test_workers_leave_the_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    flat(loader(workers=1))
    assert torch.equal(torch.rand(3), expected)


def test_a_batch_that_was_split_again_does_not_disturb_the_workers() -> None:
    plain, made = loader(), loader(workers=1)
    expected = [list(batch.microbatches()) for batch in plain.batches()]
    for number, batch in enumerate(made.batches()):
        feed = batch.microbatches()
        if number == 1:  # out of memory in the first microbatch: again, smaller
            assert same(next(feed), expected[1][0])
            assert seen(split_again(batch, 1)) == seen(expected[1])
        elif number == 2:  # out of memory, and again as it was
            next(feed)
            assert all_same(list(batch.microbatches()), expected[2])
        else:
            assert all_same(list(feed), expected[number])


def test_a_worker_tells_what_is_wrong_with_the_data(tmp_path: Path) -> None:
    series = numbers(20, 3)
    series[13, 1] = np.nan
    wanted = spec(seq=5)
    source = open_source(saved(tmp_path / "x.npy", series), wanted)
    made = Loader(source=source, spec=wanted, buckets={5: 2}, workers=1)
    before = len(children())
    with pytest.raises(MisuseError, match=r"x\.npy, row 13, column 1 is nan"):
        flat(made)
    assert len(children()) == before  # it is gone, though the error still holds the loop that asked it


def children() -> list[Any]:
    return [child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())]


def test_workers_end_with_the_epoch_and_when_it_is_left(tmp_path: Path) -> None:
    gc.collect()
    before = {child.pid for child in children()}
    made = loader(workers=2)
    flat(made)
    assert {child.pid for child in children()} <= before
    running = made.batches()
    list(next(running).microbatches())
    assert len({child.pid for child in children()} - before) == 2
    running.close()  # type: ignore[attr-defined]
    assert {child.pid for child in children()} <= before


def test_what_a_killed_worker_had_to_do_is_done_here() -> None:
    before = {child.pid for child in children()}
    made = loader(workers=1, buckets={8: 1}, prefetch=1)
    received = []
    for batch in made.batches():
        for microbatch in batch.microbatches():
            received.append(microbatch)
            if len(received) == 8:  # in the middle of a batch
                [worker] = (child for child in children() if child.pid not in before)
                worker.kill()
    assert batch.lost is not None
    assert all(same(*pair) for pair in zip(received, flat(replace(made, workers=0)), strict=True))


def test_a_worker_that_dies_disturbs_nobody_who_does_not_wait_for_it() -> None:
    before = {child.pid for child in children()}
    running = loader(workers=1).batches()
    batch = next(running)
    next(iter(batch.microbatches()))
    [worker] = (child for child in children() if child.pid not in before)
    worker.kill()
    for _ in range(20):
        time.sleep(0.01)  # PyTorch's handler would raise its error here
    assert batch.lost is None
    running.close()  # type: ignore[attr-defined]


def test_workers_leave_the_handler_of_ended_children_as_it_was() -> None:
    other = iter(DataLoader(TensorDataset(torch.zeros(4)), num_workers=1))  # PyTorch has set its handler by now
    next(other)
    before = signal.getsignal(signal.SIGCHLD)
    running = loader(workers=1).batches()
    next(running)
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    running.close()  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGCHLD) is before is not signal.SIG_DFL


def test_memory_of_workers_does_not_grow_over_epochs(tmp_path: Path) -> None:
    wanted = spec(seq=50, batch=32, features=8, outputs=1)
    path = saved(tmp_path / "x.npy", np.ones((40_000, 9), np.float32))
    source = open_source(path, wanted)
    made = Loader(source=source, spec=wanted, buckets={50: 8}, workers=1)
    peaks = []
    for epoch in range(4):
        running = made.batches(Position(epoch=epoch))
        for batch in running:
            for _ in batch.microbatches():
                pass
            if batch.position.done == len(made) - 1:
                peaks.append(max(worker_anonymous_bytes()))
    assert peaks[-1] <= peaks[0] + 2 * MIB


def worker_anonymous_bytes() -> list[int]:
    return [child.memory_info().rss - child.memory_info().shared for child in children()] or [0]


def test_a_worker_takes_no_more_than_was_reckoned() -> None:
    made = loader(workers=1)
    running = made.batches()
    list(next(running).microbatches())
    assert 0 < max(worker_private_bytes()) < WORKER_BYTES
    running.close()  # type: ignore[attr-defined]


def worker_private_bytes() -> list[int]:
    return [child.memory_full_info().uss for child in children()]


def test_a_step_trains_on_a_batch() -> None:
    made = loader()
    torch.manual_seed(0)
    training = prepare(made.spec, Candidate(microbatch=4, accumulation=2))
    batches = (batch for epoch in range(3) for batch in made.batches(Position(epoch=epoch)))
    losses = [float(step(training, batch.microbatches(), batch.targets).loss) for batch in batches]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


def test_the_size_of_microbatches_does_not_change_the_gradient() -> None:
    def weights(size: int | None) -> list[torch.Tensor]:
        made = loader()
        torch.manual_seed(0)
        training = prepare(replace_optimizer(made.spec), Candidate(microbatch=1, accumulation=6))
        batch: Batch = next(made.batches())
        microbatches = batch.microbatches() if size is None else split_again(batch, size)
        step(training, microbatches, batch.targets)
        return [p.detach() for p in training.model.parameters()]

    for each, other in zip(weights(None), weights(1), strict=True):
        torch.testing.assert_close(each, other)


def replace_optimizer(wanted: Spec) -> Spec:
    return spec(seq=wanted.seq, batch=wanted.batch, optimizer="sgd")


def test_a_source_that_was_cut_for_longer_sequences_is_not_loaded() -> None:
    wanted = spec(seq=8)
    source = open_source(Counted(), wanted)
    with pytest.raises(AssertionError, match="cut for a spec with longer sequences"):
        Loader(source=source, spec=spec(seq=3), buckets=BUCKETS)


@pytest.mark.parametrize("changes", [{"workers": -1}, {"workers": 1000}, {"prefetch": 0}])
def test_values_are_checked_at_birth(changes: dict[str, int]) -> None:
    with pytest.raises(MisuseError, match="must be a whole number"):
        loader(**changes)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_microbatches_for_a_card_are_pinned(workers: int) -> None:
    for microbatch in flat(loader(pinned=True, workers=workers)):
        assert microbatch.inputs.is_pinned()
        assert microbatch.targets.is_pinned()


@pytest.mark.parametrize("free_bytes", [0, 200 * MIB, 400 * MIB, GIB, 10 * GIB])
@pytest.mark.parametrize("microbatch", [1, 32])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_loader_fits_into_what_is_free(free_bytes: int, microbatch: int, pinned: bool) -> None:
    wanted = Spec(cell="lstm", seq=10_000, batch=32)
    workers, prefetch = size_loader(wanted, Candidate(microbatch=microbatch), free_bytes, cores=8, pinned=pinned)
    taken = Candidate(microbatch=microbatch, workers=workers, prefetch=prefetch)
    assert workers * WORKER_BYTES + loader_bytes(wanted, taken, pinned=pinned) <= max(free_bytes, 0)
    assert prefetch >= 1


def test_more_free_memory_never_gives_fewer_workers() -> None:
    wanted = Spec(cell="lstm", seq=10_000, batch=32)
    workers = [size_loader(wanted, Candidate(microbatch=32), free * 100 * MIB, cores=8)[0] for free in range(40)]
    assert workers == sorted(workers)
    assert (workers[0], workers[-1]) == (0, 4)


def test_a_core_is_left_for_the_training() -> None:
    assert size_loader(Spec(cell="lstm", seq=1000, batch=32), Candidate(microbatch=32), GIB, cores=4) == (3, 2)


def test_one_core_gets_no_workers() -> None:
    assert size_loader(tokens(), Candidate(microbatch=1), GIB, cores=1)[0] == 0


def test_reading_leaves_no_memory_behind(tmp_path: Path) -> None:
    wanted = spec(seq=100, batch=8, features=8, outputs=1)
    source = open_source(saved(tmp_path / "x.npy", np.ones((60_000, 9), np.float32)), wanted)
    made = Loader(source=source, spec=wanted, buckets={100: 4})
    flat_sizes = []
    for epoch in range(3):
        for batch in made.batches(Position(epoch=epoch)):
            for _ in batch.microbatches():
                pass
        status = read_status()
        assert status is not None
        flat_sizes.append(status.resident_bytes)
    assert flat_sizes[-1] - flat_sizes[0] < 4 * MIB
