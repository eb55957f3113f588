"""The callback of Keras on a card: a batch that exceeds the budget runs in segments or in smaller pieces."""

import gc
import os
from typing import Any

import numpy as np
import pytest
import torch

os.environ["KERAS_BACKEND"] = "torch"
keras: Any = pytest.importorskip("keras", reason="keras is not installed (extra keras)")
from oomguard._device.cuda import Cuda  # noqa: E402
from oomguard.integrations.keras import OomGuard  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:[^R]*RNN module weights"),  # Keras gives cuDNN its weights one by one
]
ROWS, STEPS = 64, 1000


def fitted(**options: Any) -> tuple[int, int]:
    """The peak of a training of one batch, and the rows that it was run in."""
    layer = keras.layers.LSTM(128, return_sequences=True, recurrent_initializer="glorot_uniform")
    model = keras.Sequential([keras.Input((STEPS, 8)), layer, keras.layers.Dense(1)])
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile("sgd", loss, jit_compile=False)
    assert model.weights[0].value.device.type == "cuda"
    guard = OomGuard(**options)
    inputs, targets = np.zeros((ROWS, STEPS, 8), "float32"), np.zeros((ROWS, STEPS, 1), "float32")
    history = model.fit(inputs, targets, batch_size=ROWS, verbose=0, callbacks=[guard]).history
    del model, layer
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return guard.peak_bytes, history["oomguard_microbatch"][0]


@pytest.mark.parametrize(("segments", "whole"), [(None, True), (1, False)], ids=["segments", "smaller pieces"])
def test_a_batch_that_exceeds_the_budget_of_a_card_is_trained_within_it(segments: int | None, whole: bool) -> None:
    base_bytes = Cuda(0).reading().now_bytes
    plain_bytes, rows = fitted(segments=1)
    assert rows == ROWS
    budget_bytes = base_bytes + (plain_bytes - base_bytes) * 2 // 3
    peak_bytes, rows = fitted(budget=budget_bytes, segments=segments)
    assert base_bytes < peak_bytes <= budget_bytes
    assert (rows == ROWS) == whole
