"""Which candidate of each job is fastest on each card, by arithmetic: for all jobs of one model at once.

For each pair of a job and a card this is what `find_feasible_config` finds for a card that is only named. Jobs of one
model differ in numbers alone, so their candidates are estimated together. Cards differ in the size of their memory and
hardly in the arithmetic, so that most of them share one estimate.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._core.progress import tell
from oomguard._estimate import terms
from oomguard._estimate.breakdown import estimate_batch, split
from oomguard._estimate.cards import Card
from oomguard._estimate.margins import OFFSET_BYTES, allocator_on, bare
from oomguard._estimate.target import Target, on_card
from oomguard._fleet.pairs import NEVER_BYTES, SHAPE, Floats, Ints, Mask, Pairs
from oomguard._predict import speed
from oomguard._search.space import (
    WORTH_LOSSY,
    Choices,
    Space,
    lossy,
    make_space,
    microbatches,
    shapes,
    worth_trying,
)
from oomguard._spec.candidate import Candidates
from oomguard._spec.rows import SpecRows, with_rows
from oomguard._spec.spec import Spec

CHUNK_JOBS = 512  # jobs whose candidates are in memory at once: some hundred thousand rows
BLOCKS, ROWS = (1, 8, 64, 1 << 40), 8192
"""How many candidates of each job are estimated at a time, and of all jobs at least: most jobs fit in one piece, nearly
all others in one of the next few, and so many rows take hardly longer than one."""
AFTER = 1e12
"""Seconds added to the time of candidates that change the gradient, so that they are chosen only if no other fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A job as far as its candidates depend on it."""

    spec: Spec
    allow: tuple[str, ...] = ("precision",)
    fixed: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Hashable:
        """Equal for jobs that differ only in number and length of their sequences."""
        values = msgspec.structs.asdict(self.spec) | {"seq": None, "batch": None}
        values["lengths"] = tuple((self.spec.lengths or {}).items())
        return (*values.values(), *self.choices)

    @property
    def choices(self) -> tuple[Hashable, ...]:
        """Equal for jobs whose candidates are chosen by the same rules."""
        return self.allow, tuple(self.fixed.items())


class Table(NamedTuple):
    """The shapes of all candidates of several jobs: job by job, the fastest first, equals in the order of a search."""

    starts: Ints  # the first row of each job, and the end of the last one
    shape: NDArray[np.int64]  # a row for each knob of `SHAPE`
    guess: Floats  # seconds of a step in fp32 by a guess that only orders candidates

    def block(self, job: int, first: int, count: int) -> tuple[int, int]:
        """The rows of a job from its row `first` on: at least so many, and all that are as fast as the last of them."""
        begin, end = int(self.starts[job]) + first, int(self.starts[job + 1])
        if end - begin <= count:
            return begin, end
        return begin, begin + int(np.searchsorted(self.guess[begin:end], self.guess[begin + count - 1], "right"))


class Rows(NamedTuple):
    """Candidates of several jobs in one setting, without the runtime of a card; those of a job in order of speed."""

    jobs: Ints  # the job of each row, counted from 0, in ascending order
    columns: dict[str, Ints]  # the shape of each candidate, and figures as `Pairs` has them
    runs: Mask  # whether the engine can run it

    @property
    def needed_bytes(self) -> Ints:
        return np.where(self.runs, self.columns["peak_bytes"] + self.columns["margin_bytes"], 2 * NEVER_BYTES)

    def best(self, room_bytes: int) -> tuple[Ints, Ints]:
        """The jobs of which something fits into so much memory, and the first such row of each."""
        hits = np.flatnonzero(self.needed_bytes <= room_bytes)
        jobs, first = np.unique(self.jobs[hits], return_index=True)
        return jobs, hits[first]


class Unit(NamedTuple):
    """A setting that is a candidate on some cards for some jobs, with the arithmetic that these cards share."""

    target: Target
    setting: dict[str, Any]
    cards: list[tuple[int, Mask]]  # numbers of the cards, each with a mask of the jobs


def fit_all(requests: Sequence[Request], cards: Sequence[Card], pairs: Pairs, numbers: Sequence[int]) -> None:
    """Write the fastest candidate that fits into each pair. `numbers` are the rows of the requests in `pairs`."""
    models = defaultdict[Hashable, list[int]](list)
    for place, request in enumerate(requests):
        models[request.model].append(place)
    fitter, done = Fitter(cards, pairs), 0
    for members in models.values():
        for start in range(0, len(members), CHUNK_JOBS):
            chunk = members[start : start + CHUNK_JOBS]
            tell(f"Estimated {done:,} of {len(requests):,} jobs", done / len(requests))
            fitter.fit([requests[place] for place in chunk], np.array([numbers[place] for place in chunk]))
            done += len(chunk)


class Fitter:
    """Fits jobs of one model after another. Spaces are made once for all."""

    def __init__(self, cards: Sequence[Card], pairs: Pairs) -> None:
        self.cards, self.pairs = cards, pairs
        self._spaces: dict[Hashable, Space] = {}

    def fit(self, requests: list[Request], jobs: Ints) -> None:
        """Estimate candidates of jobs of one model, the fastest first, until nothing that is left can be faster than
        what fits. `jobs` are their rows in the pairs.
        """
        sizes = (np.array([getattr(one.spec, name) for one in requests]) for name in ("steps", "batch"))
        specs = with_rows(requests[0].spec, *sizes)
        units = self._units(requests, specs)
        table = make_table(requests[0], self._spaces[requests[0].choices], specs)
        places, bounds = np.zeros(len(jobs), dtype=np.int64), table.guess[table.starts[:-1]]
        for count in BLOCKS:
            asked = np.flatnonzero((self.pairs.guess[jobs] > bounds[:, None]).any(axis=1))
            if not len(asked):
                return
            count = max(count, ROWS // len(asked)) if count > 1 else count
            blocks = [table.block(job, int(places[job]), count) for job in asked.tolist()]
            for unit in units:
                self._try(unit, specs, table, jobs, Blocks(asked, blocks, bounds))
            ends = np.array([end for _, end in blocks])
            places[asked] = ends - table.starts[asked]
            left = ends < table.starts[asked + 1]
            bounds[asked] = np.where(left, table.guess[np.minimum(ends, len(table.guess) - 1)], np.inf)

    def _try(self, unit: Unit, specs: SpecRows, table: Table, jobs: Ints, blocks: "Blocks") -> None:
        """Offer the candidates of some blocks in one setting to its cards."""
        guess = self.pairs.guess[jobs]
        wanted = [(card, mask & (guess[:, card] > blocks.bounds)) for card, mask in unit.cards]
        slowest = np.max([np.where(mask, guess[:, card], 0.0) for card, mask in wanted], axis=0)
        rows = estimated(specs, table, blocks, slowest, unit)
        if rows is not None:
            for card, mask in wanted:
                self._offer(rows, jobs, mask, card, unit.setting)

    def _offer(self, rows: Rows, jobs: Ints, mask: Mask, card: int, setting: dict[str, Any]) -> None:
        """Offer candidates to a card, for the jobs that the mask has; they are taken where they are faster."""
        known, pairs = self.cards[card], self.pairs
        found, chosen = rows.best(known.usable_bytes - known.context_bytes)
        faster = mask[found] & (rows.columns["guess"][chosen] < pairs.guess[jobs[found], card])
        columns = {name: values[chosen[faster]] for name, values in rows.columns.items()}
        columns["peak_bytes"] = columns["peak_bytes"] + known.context_bytes
        pairs.set(jobs[found[faster]], card, setting, columns)
        every, first = np.unique(rows.jobs, return_index=True)
        needed = np.minimum.reduceat(rows.needed_bytes, first) + known.context_bytes
        place = jobs[every[mask[every]]], card
        before = pairs.least_bytes[place]
        pairs.least_bytes[place] = np.where(before == 0, needed[mask[every]], np.minimum(before, needed[mask[every]]))

    def _units(self, requests: list[Request], specs: SpecRows) -> list[Unit]:
        """All settings in the order of a search, each with its cards."""
        found: dict[Hashable, Unit] = {}
        for number, card in enumerate(self.cards):
            target = on_card(card)
            worth = worth_trying(specs, target, card.usable_bytes)
            keeps = np.broadcast_to(np.asarray(worth["keep"]), len(requests))
            for keep in {*keeps.tolist()}:
                mask = keeps == keep
                key = target.card_precisions, worth["offload"], worth["update"], keep
                for setting in self._space(requests[int(mask.argmax())], card, key).settings:
                    shared = _arithmetic(target, setting["precision"])
                    unit = found.setdefault((shared, *setting.items()), Unit(shared, setting, []))
                    unit.cards.append((number, mask))
        return sorted(found.values(), key=lambda unit: _order(unit.setting))

    def _space(self, request: Request, card: Card, key: Hashable) -> Space:
        key = request.choices, key
        if key not in self._spaces:
            target = on_card(card)
            choices = Choices(precisions=target.card_precisions, allow=request.allow, fixed=request.fixed)
            self._spaces[key] = self._spaces[request.choices] = make_space(
                request.spec, target, card.usable_bytes, choices
            )
        return self._spaces[key]


class Blocks(NamedTuple):
    """The next candidates of some jobs."""

    asked: Ints  # the jobs
    rows: list[tuple[int, int]]  # for each of them the first row in the table, and the end
    bounds: Floats  # for every job of the table, whatever was asked: the guess of its next candidate


def _arithmetic(target: Target, precision: str) -> Target:
    """The card without its name and its runtime. Since sm 6.0, only fp16 depends on the generation."""
    target = msgspec.structs.replace(target, device="a card", runtime_bytes=0)
    if precision == "fp16" or (target.capability or (0, 0)) < (6, 0):
        return target
    return msgspec.structs.replace(target, capability=(8, 0), multiprocessors=1)


def _order(setting: dict[str, Any]) -> tuple[bool, ...]:
    """The place of a setting in the order of `make_space`, whose first values are the usual ones."""
    usual = {"precision": "fp32", "offload": False, "update": "foreach", "keep": "device", "state_8bit": False}
    return tuple(setting.get(name, value) != value for name, value in usual.items())


def make_table(request: Request, space: Space, specs: SpecRows) -> Table:
    """The shapes of all candidates of each job in order of the time model's guess."""
    ways, sizes = dict[int, NDArray[np.int64]](), dict[int, NDArray[np.int64]]()
    parts, fixed = [], space.choices.fixed
    for steps, batch in zip(specs.row_steps.tolist(), specs.batch.tolist(), strict=True):
        if steps not in ways:
            found = shapes(msgspec.structs.replace(request.spec, seq=steps, batch=1), space)
            ways[steps] = np.array([[way[name] or 0 for way in found] for name in SHAPE[1:]])
        if batch not in sizes:
            sizes[batch] = np.array([fixed["microbatch"]] if "microbatch" in fixed else microbatches(batch))
        table = np.repeat(ways[steps], len(sizes[batch]), axis=1)
        parts.append(np.concatenate([np.tile(sizes[batch], ways[steps].shape[1])[None], table]))
    counts = np.array([part.shape[1] for part in parts])
    jobs, shape = np.repeat(np.arange(len(parts)), counts), np.concatenate(parts, axis=1)
    guess = _guess(_rows(specs, jobs), shape)
    order = np.lexsort((guess, jobs))
    return Table(np.r_[0, np.cumsum(counts)], shape[:, order], guess[order])


def _guess(rows: SpecRows, shape: NDArray[np.int64]) -> Floats:
    """Seconds of a step by the guess of the time model, as `CandidateTable.costs` has it without records."""
    candidates = _candidates(rows, shape, {})
    each = speed.guess(rows, candidates, "cudnn", cuda=True)
    seconds = each * (rows.steps * rows.batch) + 20 * terms.weights_bytes(rows) / speed.SPEED["cuda"]
    return np.asarray(seconds + AFTER * lossy(candidates))


def _rows(specs: SpecRows, jobs: Ints) -> SpecRows:
    """The specs with a row for each candidate."""
    return with_rows(specs, specs.row_steps[jobs], specs.batch[jobs])


def _candidates(rows: SpecRows, shape: NDArray[np.int64], setting: dict[str, Any]) -> Candidates:
    knobs: dict[str, Any] = dict(zip(SHAPE, shape, strict=True))
    windows = np.where(knobs["window"] == 0, None, knobs["window"]) if knobs["window"].any() else None
    knobs |= {"recompute": knobs["recompute"].astype(bool), "window": windows}
    return Candidates(**setting | knobs, accumulation=-(-rows.batch // knobs["microbatch"]))


def estimated(specs: SpecRows, table: Table, blocks: Blocks, slowest: Floats, unit: Unit) -> Rows | None:
    """The figures of those candidates of some blocks that are faster than the slowest of their pairs."""
    index = np.concatenate([np.arange(begin, end) for begin, end in blocks.rows])
    jobs = np.repeat(blocks.asked, [end - begin for begin, end in blocks.rows])
    setting = unit.setting
    worth = 1.0 if setting["precision"] == "fp32" else WORTH_LOSSY
    guess = table.guess[index] * worth + AFTER * bool(setting.get("state_8bit"))
    kept = guess < slowest[jobs]
    if not kept.any():
        return None
    index, jobs, guess = index[kept], jobs[kept], guess[kept]
    rows, shape = _rows(specs, jobs), table.shape[:, index]
    estimate = estimate_batch(rows, _candidates(rows, shape, setting), unit.target)
    known, rest = split(estimate)
    kind = str(estimate.engine), allocator_on("cuda", setting.get("allocator")), setting["precision"]
    share = np.ceil(1024 * bare("cuda", *kind, False)) / 1024
    figures = {
        "peak_bytes": np.ceil(known + rest).astype(np.int64),
        "margin_bytes": np.ceil(rest * (1 + OFFSET_BYTES / rest) * share).astype(np.int64),
        "host_bytes": np.broadcast_to(np.asarray(estimate.host_bytes), len(jobs)),
        "guess": guess,
    }
    columns = dict(zip(SHAPE, shape, strict=True)) | figures
    return Rows(jobs, columns, np.broadcast_to(np.asarray(estimate.runs), len(jobs)))
