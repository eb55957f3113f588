"""The table of a fleet as a DataFrame: a row for each pair of a job and a card."""

from typing import Any

import numpy as np
import pandas as pd

from oomguard._fleet.pairs import NEVER_BYTES, Ints
from oomguard._fleet.value import Fleet

SETTINGS = ("precision", "keep", "update", "offload")  # knobs that are names or switches


def table_of(fleet: Fleet) -> pd.DataFrame:
    """All pairs; what is not known is empty, and so are the knobs where nothing fits."""
    pairs, (jobs, cards) = fleet.pairs, fleet.pairs.fits.shape
    prices = np.array([card.price for card in fleet.cards])
    fits = pairs.fits.ravel()
    epochs = np.where(fleet.sequences == 0, np.nan, fleet.sequences / fleet.batches)
    seconds = pairs.seconds * epochs[:, None]
    numbers = np.arange(cards)
    cheapest, fastest = fleet.cheapest[:, None] == numbers, fleet.fastest[:, None] == numbers
    microbatch = pairs.column("microbatch")
    shape = {
        "microbatch": microbatch,
        "accumulation": -(-fleet.batches[:, None] // np.maximum(microbatch, 1)),
        "segments": pairs.column("segments"),
        "window": pairs.column("window"),
    }
    choice = np.select([cheapest & fastest, cheapest, fastest], ["cheapest fastest", "cheapest", "fastest"], "")
    columns = {
        "job": np.repeat(np.array([job.name for job in fleet.jobs], dtype=object), cards),
        "card": np.tile(np.array([card.name for card in fleet.cards], dtype=object), jobs),
        "price": np.tile(prices, jobs),
        "fits": fits,
        "choice": choice.ravel(),
        "needed_bytes": _known(pairs.needed_bytes),
        **{name: _known(np.where(pairs.fits, getattr(pairs, name), -1)) for name in ("peak_bytes", "margin_bytes")},
        "host_bytes": _known(np.where(pairs.fits, pairs.host_bytes, -1)),
        **{name: _known(np.where(pairs.fits & (column > 0), column, -1)) for name, column in shape.items()},
        **{
            name: np.array(pairs.setting_column(name), dtype=object).ravel() for name in ("precision", "keep", "update")
        },
        "offload": np.array(pairs.setting_column("offload"), dtype=object).ravel(),
        "seconds_per_step": pairs.seconds.ravel(),
        "measured": pairs.measured.ravel(),
        "seconds_per_epoch": seconds.ravel(),
        "cost_per_epoch": (seconds / 3600 * prices).ravel(),
    }
    return pd.DataFrame(columns)


def _known(values: Ints) -> Any:
    """Whole numbers, with a missing value where they are negative, or so large that nothing runs."""
    flat = values.ravel().astype(np.int64)
    return pd.arrays.IntegerArray(flat, (flat < 0) | (flat >= NEVER_BYTES))
