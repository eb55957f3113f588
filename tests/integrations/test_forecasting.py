"""The callback inside of packages that make their own modules, batches and trainers: the weights of their trainings."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from oomguard._plan.task_value import TaskPlan
from oomguard.integrations.lightning import OomGuard

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # of the packages, on one another
VALUES = np.sin(np.arange(160) / 7).astype("float32")
QUIET = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
ROWS = 40


def trained_by_darts(*callbacks: Any) -> Any:
    darts = pytest.importorskip("darts", reason="the package darts is not installed")
    models = pytest.importorskip("darts.models")
    options = {"accelerator": "cpu", "max_steps": 3, "callbacks": [*callbacks], **QUIET}
    model = models.BlockRNNModel(
        input_chunk_length=20,
        output_chunk_length=4,
        model="LSTM",
        hidden_dim=8,
        batch_size=ROWS,
        random_state=0,
        pl_trainer_kwargs=options,
    )
    model.fit(darts.TimeSeries.from_values(VALUES))
    return model.model


def trained_by_pytorch_forecasting(*callbacks: Any) -> Any:
    forecasting = pytest.importorskip("pytorch_forecasting", reason="the package pytorch-forecasting is not installed")
    import lightning
    import pandas as pd

    frame = pd.DataFrame({"value": VALUES, "time": range(len(VALUES)), "group": "a"})
    names: Any = {"time_idx": "time", "target": "value", "group_ids": ["group"]}
    lengths = {"min_encoder_length": 20, "max_encoder_length": 20, "max_prediction_length": 4}
    data = forecasting.TimeSeriesDataSet(frame, time_varying_unknown_reals=["value"], **names, **lengths)
    torch.manual_seed(0)
    model = forecasting.RecurrentNetwork.from_dataset(data, hidden_size=8, rnn_layers=1, dropout=0.0)
    options: Any = {"accelerator": "cpu", "max_steps": 3, "callbacks": [*callbacks], **QUIET}
    trainer = lightning.Trainer(**options)
    trainer.fit(model, data.to_dataloader(train=True, batch_size=ROWS, shuffle=False))
    return model


def trained_by_neuralforecast(*callbacks: Any) -> Any:
    forecasting = pytest.importorskip("neuralforecast", reason="the package neuralforecast is not installed")
    models = pytest.importorskip("neuralforecast.models")
    import pandas as pd

    frames = [
        pd.DataFrame({"unique_id": f"series {i}", "ds": pd.date_range("2020", periods=40), "y": VALUES[i : i + 40]})
        for i in range(ROWS)
    ]
    model = models.LSTM(
        h=4,
        input_size=20,
        encoder_hidden_size=8,
        encoder_n_layers=1,
        max_steps=3,
        batch_size=ROWS,
        windows_batch_size=None,
        random_seed=0,
        accelerator="cpu",
        callbacks=[*callbacks],
        **QUIET,
    )
    forecast = forecasting.NeuralForecast(models=[model], freq="D")
    forecast.fit(pd.concat(frames))
    return forecast.models[0]


def weights(module: Any) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


@pytest.mark.parametrize(
    "train",
    [trained_by_darts, trained_by_pytorch_forecasting, trained_by_neuralforecast],
    ids=lambda train: train.__name__,
)
def test_a_model_of_a_package_is_planned_and_trained_in_microbatches_with_its_own_weights(train: Any) -> None:
    plans = list[TaskPlan | None]()

    class Kept(OomGuard):  # a package may train with a copy of the callback
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_fit_end(trainer, pl_module)
            plans.append(self.plan)

    plain = weights(train())
    whole = train(Kept("8GiB", segments=1, timeout=200))
    (plan,) = plans
    assert plan is not None
    assert plan.confirmed
    assert plan.batch == ROWS
    assert plan.layout
    assert weights(whole) == pytest.approx(plain, rel=1e-4, abs=1e-6)
    chosen = replace(plan.candidate, microbatch=15, accumulation=3)
    pieces = train(OomGuard(plan=replace(plan, candidate=chosen, fallbacks=())))
    assert weights(pieces) == pytest.approx(plain, rel=1e-4, abs=1e-6)
