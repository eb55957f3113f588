"""Validation: the mean loss over data that is not trained on, in microbatches as large as an evaluation pass allows."""

from collections.abc import Callable

import msgspec
import numpy as np
from torch import Tensor

from oomguard.bptt import Microbatch, count_targets, evaluate
from oomguard.candidate import Candidate
from oomguard.data.collate import collate
from oomguard.data.source import Ints, Source
from oomguard.errors import GuardError
from oomguard.estimate.breakdown import estimate_step
from oomguard.estimate.place import Place
from oomguard.model import Recurrent
from oomguard.probe.verdict import Verdict, judge
from oomguard.spec import Spec
from oomguard.train.ranks import Ranks

MOST_ROWS = 4096
"""Of an evaluation pass: beyond that no kernel gets faster."""


def evaluation_candidate(spec: Spec, candidate: Candidate, place: Place) -> Candidate:
    """How an evaluation pass is run beside a training with this candidate: with more sequences, since no gradient needs
    its activations. By its estimate it stays below a training step, which is known to fit.

    >>> from oomguard.estimate.place import CPU
    >>> evaluation_candidate(Spec(cell="lstm", seq=1000), Candidate(microbatch=4, accumulation=8), CPU).microbatch
    16
    """
    most_bytes = estimate_step(spec, candidate, place).total_bytes
    if spec.bidirectional:  # the second direction reads from the end: it goes through as a whole
        candidate = msgspec.structs.replace(candidate, segments=1)
    best = msgspec.structs.replace(candidate, microbatch=1, accumulation=1)
    while best.microbatch < MOST_ROWS:
        larger = msgspec.structs.replace(best, microbatch=2 * best.microbatch)
        if estimate_step(spec, larger, place, training=False).total_bytes > most_bytes:
            break
        best = larger
    return best


def validate(model: Recurrent, source: Source, candidate: Candidate, ranks: Ranks) -> float:
    """The mean loss over all real targets of a source. An out-of-memory error halves the microbatch from there on."""
    total, targets, rows, start = 0.0, 0, candidate.microbatch, 0
    order = ranks.share(by_length(source))
    with ranks.together():
        while start < len(order):
            batch = read(model.spec, source, order[start : start + rows])
            loss = tried(lambda batch=batch: evaluate(model, batch, candidate), last=rows == 1)  # type: ignore[misc]
            if loss is None:
                rows //= 2
                continue
            total, targets, start = total + float(loss), targets + count_targets(model.spec, batch), start + rows
    total, count = ranks.sums([total, targets])
    return total / max(1, count)


def by_length(source: Source) -> Ints:
    """All sequences, the longest first: neighbours are padded little, and what does not fit shows at once."""
    return np.argsort(-source.lengths, kind="stable")


def read(spec: Spec, source: Source, sequences: Ints) -> Microbatch:
    """Some sequences as a microbatch."""
    return collate(spec, (source[int(one)] for one in sequences), source.lengths[sequences])


def tried(run: Callable[[], Tensor], *, last: bool) -> Tensor | None:
    """What it gives; None if it ran out of memory, unless there is nothing smaller to try."""
    try:
        return run()
    except Exception as error:
        if judge(error) is not Verdict.OOM:
            raise
        why = str(error)
    if last:
        raise GuardError(
            rule="An evaluation pass of one sequence must fit",
            got=f"memory ran out ({why.strip().partition(chr(10))[0]})",
            advice="Free memory, or make a plan for a smaller budget.",
        )
    return None
