"""Which sequences come when: buckets by length, batches, microbatches. Arithmetic on numbers, no data is read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from oomguard.checks import check_whole
from oomguard.data.cuts import shuffled
from oomguard.data.source import Ints
from oomguard.errors import MisuseError
from oomguard.spec import MAX_SEQ


class Bucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sequences of similar length, and how many of them are gone through together.

    A pass has at most `longest x microbatch` steps, padding counted: that is what the plan has measured, or reckoned
    with. Shorter sequences do not come in more rows for that: not all memory is in steps (each row has its states, at
    every border of a segment too), so the peak is certain for so many rows only.
    """

    longest: int
    """Steps of the longest sequence that it holds."""
    microbatch: int
    """Sequences per pass at most."""

    def __post_init__(self) -> None:
        check_whole("longest of a bucket", self.longest, 1, MAX_SEQ, optional=False)
        check_whole("microbatch", self.microbatch, 1, 1 << 20, optional=False)


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where training is in the data: all that a checkpoint needs to go on from there."""

    epoch: int = 0
    """Which time through the data, from 0."""
    done: int = 0
    """Batches of this epoch that are done."""

    def __post_init__(self) -> None:
        check_whole("epoch", self.epoch, 0, 1 << 40, optional=False)
        check_whole("done", self.done, 0, 1 << 40, optional=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Epoch:
    """The batches of one time through the data."""

    order: Ints
    """Every sequence once; so many in a row are a batch."""
    turns: Ints
    """The batches' numbers in the order they come."""
    batch: int
    """How many."""

    def __len__(self) -> int:
        return len(self.turns)

    def sequences(self, number: int) -> Ints:
        """The sequences of the batch that comes as this one."""
        start = int(self.turns[number]) * self.batch
        return self.order[start : start + self.batch]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """The order of all sequences in every epoch, from (seed, epoch) alone.

    A batch comes from one bucket; what is left of the buckets fills batches together, neighbours first. All batches
    are full but perhaps the last of an epoch, which is kept.

    >>> order = Order(lengths=np.array([3, 9, 2, 8, 1]), buckets=(Bucket(longest=4, microbatch=2),
    ...               Bucket(longest=9, microbatch=1)), batch=2)
    >>> epoch = order.epoch(0)
    >>> [sorted(epoch.sequences(number).tolist()) for number in range(len(epoch))]
    [[1, 3], [2, 4], [0]]
    """

    lengths: Ints
    buckets: tuple[Bucket, ...]
    batch: int
    seed: int = 0
    bounds: Ints = field(init=False)
    """The longest of each bucket."""

    def __post_init__(self) -> None:
        buckets = tuple(sorted(self.buckets, key=lambda bucket: bucket.longest))
        object.__setattr__(self, "buckets", buckets)
        object.__setattr__(self, "bounds", np.array([bucket.longest for bucket in buckets], dtype=np.int64))
        longest = int(self.lengths.max(initial=0))
        if not buckets or longest > buckets[-1].longest:
            raise MisuseError(
                rule="The largest bucket must hold the longest sequence",
                got=f"it holds {buckets[-1].longest if buckets else 0:,} steps, and sequence "
                f"{int(self.lengths.argmax()):,} has {longest:,}",
                advice="Add a bucket, or cut the data.",
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.lengths) // self.batch)

    def epoch(self, epoch: int) -> Epoch:
        """The batches of one time through."""
        home = np.searchsorted(self.bounds, self.lengths)  # the smallest bucket that holds it
        full, left = [], []
        for number in range(len(self.buckets)):
            members = np.flatnonzero(home == number)
            members = members[shuffled(len(members), (self.seed, epoch, number))]
            whole = len(members) // self.batch * self.batch
            full.append(members[:whole])
            left.append(members[whole:])
        turns = shuffled(len(self.lengths) // self.batch, (self.seed, epoch, len(self.buckets)))
        if len(self.lengths) % self.batch:
            turns = np.append(turns, len(turns))
        return Epoch(order=np.concatenate([*full, *left]), turns=turns, batch=self.batch)

    def microbatches(self, sequences: Ints, size: int | None = None) -> list[Ints]:
        """A batch cut into microbatches, the longest sequences first, so that they are padded little.

        Each is of one bucket and as its bucket says, or of at most `size` sequences.
        """
        check_whole("microbatch", size, 1, 1 << 20)
        ranked = sequences[np.argsort(-self.lengths[sequences], kind="stable")]
        homes = np.searchsorted(self.bounds, self.lengths[ranked])
        falling = -homes
        found, start = [], 0
        while start < len(ranked):
            bucket = self.buckets[homes[start]]
            rows = min(bucket.microbatch, size or bucket.microbatch)
            same = int(np.searchsorted(falling, falling[start], side="right"))
            stop = min(start + rows, same)
            found.append(ranked[start:stop])
            start = stop
        return found


def padding_share(order: Order, epoch: int = 0) -> float:
    """The share of all steps gone through in an epoch that are padding."""
    batches, real, padded = order.epoch(epoch), int(order.lengths.sum()), 0
    for number in range(len(batches)):
        parts: Sequence[Ints] = order.microbatches(batches.sequences(number))
        padded += sum(len(part) * int(order.lengths[part].max()) for part in parts)
    return 1 - real / padded
