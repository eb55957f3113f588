"""The fallbacks: a ladder of ever smaller peaks, in the setting of the chosen candidate, with the same gradient."""

import numpy as np

from oomguard.estimate.breakdown import estimate_step
from oomguard.estimate.place import Place
from oomguard.plan.value import Expected, Rung, figures
from oomguard.search.screen import SETTING, Screened, rows_like
from oomguard.units import MIB

SMALLER, LEAST_BYTES = 0.75, 4 * MIB
"""What a rung grows by over the runtime, as a share of the rung above it; and by how much it is smaller, at least."""


def make_ladder(view: Screened, row: int, place: Place, *, timed: bool) -> tuple[Rung, ...]:
    """From the chosen candidate down: each rung the fastest that is a quarter smaller, the last the smallest there is.

    Only what can change in a running process changes: the microbatch and the pieces.
    """
    alike = rows_like(view.candidates, view.candidates[row], [*SETTING, "threads", "window"])
    alike &= np.broadcast_to(view.estimate.runs, len(alike))
    peaks, seconds = view.prediction.peak_bytes, view.prediction.seconds_per_step
    runtime_bytes = min(int(np.min(view.estimate.terms["runtime"])), int(peaks[alike].min()))
    rows: list[int] = []
    smallest = int(np.lexsort((seconds, peaks, ~alike))[0])
    peak = int(peaks[row])
    while True:
        smaller = alike & (peaks <= peak - max(LEAST_BYTES, (1 - SMALLER) * (peak - runtime_bytes)))
        if not smaller.any():
            break
        rows.append(int(np.argmin(np.where(smaller, seconds, np.inf))))
        peak = int(peaks[rows[-1]])
    if peaks[smallest] < peak and smallest != row:
        rows.append(smallest)
    return tuple(_rung(view, one, place, timed=timed) for one in rows)


def _rung(view: Screened, row: int, place: Place, *, timed: bool) -> Rung:
    candidate, expected = view.candidates[row], view.prediction[row]
    found = estimate_step(view.spec, candidate, place)
    return Rung(
        candidate=candidate,
        estimate=figures(found),
        expected=Expected(
            peak_bytes=expected.peak_bytes,
            margin_bytes=expected.margin_bytes,
            seconds_per_step=expected.seconds_per_step if timed else None,
        ),
    )
