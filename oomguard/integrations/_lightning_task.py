"""The task that a training of Lightning is: what `OomGuard` sends to child processes, and what it refuses."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from oomguard._batch import Rows
from oomguard._core.errors import MisuseError, shown
from oomguard._step import check_optimizer
from oomguard._task.layout import mapped, tensors_of
from oomguard._task.task import Task
from oomguard.integrations._fit import Batch, BatchOfRows, Parameters, largest_batch

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Weight = Callable[[Batch], Any]
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that may change a batch before the training step gets it."""
_PROPERTIES = (
    *("current_epoch", "global_step", "max_epochs", "max_steps", "min_epochs", "global_rank", "local_rank"),
    *("world_size", "accumulate_grad_batches", "log_every_n_steps", "precision", "default_root_dir", "fast_dev_run"),
    *("limit_train_batches", "limit_val_batches", "state"),
)
"""Plain properties of a trainer that a training step may read. In a child, they are those before the training."""
_STATES: dict[str, Any] = {
    **{"training": True, "validating": False, "testing": False, "predicting": False, "sanity_checking": False},
    **{"logger": None, "loggers": [], "callbacks": [], "num_training_batches": float("inf")},
}


class TrainedModule(nn.Module):
    """A LightningModule with its optimizer, so that copies have both, and with what it may ask its trainer."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, trainer: "Trainer") -> None:
        super().__init__()
        self.module, self.optimizer = module, optimizer
        known = {name: getattr(trainer, name, None) for name in _PROPERTIES}
        strategy = SimpleNamespace(root_device=trainer.strategy.root_device)
        self.trainer = SimpleNamespace(**known, **_STATES, strategy=strategy)
        self.__module__, self.__qualname__ = type(module).__module__, type(module).__qualname__  # the name of the task

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of the module."""
        return Parameters(self, super().parameters(recurse))


def loss_of(model: TrainedModule, batch: Batch, weight: Weight | None = None) -> Any:
    """The loss that the training step returns for a batch; with a weight, the sum and the weight."""
    module: Any = model.module
    vars(module).update(_trainer=model.trainer, log=_ignore, log_dict=_ignore)
    if str(model.trainer.precision).endswith("-true"):  # Lightning converts the inputs to the precision of the weights
        kind = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        batch = mapped(lambda tensor: tensor.to(kind) if tensor.is_floating_point() else tensor, batch)
    loss = loss_in(run_step(module.training_step, batch))
    return loss if weight is None else (loss * weight(batch), weight(batch))


def run_step(step: Callable[..., Any], batch: Batch) -> Any:
    """What a training step returns for the first batch."""
    takes_index = len(inspect.signature(step).parameters) > 1
    return step(batch, 0) if takes_index else step(batch)


def loss_in(output: Any) -> Any:
    """The loss in what a training step returned; None if it skips the batch."""
    return output["loss"] if isinstance(output, Mapping) else output


def _ignore(*_: object, **__: object) -> None:
    """In the place of `self.log`, in a child."""


def package_of(trainer: "Trainer", name: str) -> Any:
    """A module of the package that a trainer is of: `lightning.pytorch` or `pytorch_lightning`."""
    return import_module(f"{type(trainer).__module__.partition('.trainer')[0]}.{name}")


def check(trainer: "Trainer", module: "LightningModule") -> Optimizer:
    """The optimizer of a training; raises if it is one that cannot be run in pieces."""
    name, strategy = type(module).__name__, type(trainer.strategy).__name__
    if not module.automatic_optimization:
        got = f"{name} optimizes manually"
        advice = "Use oomguard.stepper in its training_step, and leave the callback out."
        raise MisuseError(rule="OomGuard runs modules with automatic optimization", got=got, advice=advice)
    if strategy not in ("SingleDeviceStrategy", "DDPStrategy"):
        advice = "Train on one device, or with strategy='ddp'."
        raise MisuseError(rule="OomGuard needs all weights in each process", got=f"got {strategy}", advice=advice)
    if trainer.strategy.root_device.type not in ("cpu", "cuda"):
        got, advice = f"got {trainer.strategy.root_device}", "Use accelerator='cpu' or 'gpu'."
        raise MisuseError(rule="OomGuard knows the memory of CPUs and CUDA cards", got=got, advice=advice)
    if overrides(module, "backward"):
        advice = "Leave one of the two out."
        raise MisuseError(
            rule="OomGuard runs the backward pass itself", got=f"{name} has its own backward", advice=advice
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        got, advice = "training_step takes dataloader_iter", "Write training_step(self, batch, batch_idx)."
        raise MisuseError(rule="OomGuard needs the batch to run it in pieces", got=got, advice=advice)
    if trainer.world_size > 1 and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        got, advice = f"{name} has SyncBatchNorm", "Use another kind of normalization, or leave OomGuard out."
        raise MisuseError(rule="Processes run pieces of a batch without exchange", got=got, advice=advice)
    if len(trainer.optimizers) != 1:
        got, advice = f"{name} has {len(trainer.optimizers)}", "Return one optimizer from configure_optimizers."
        raise MisuseError(rule="OomGuard needs one optimizer", got=got, advice=advice)
    check_optimizer(trainer.optimizers[0])
    return trainer.optimizers[0]


def overrides(instance: Any, name: str) -> bool:
    """Whether the class of a LightningModule or a LightningDataModule has its own hook of that name."""
    kind = type(instance)
    base = next((one for one in kind.__mro__ if one.__name__ in ("LightningModule", "LightningDataModule")), kind)
    return getattr(kind, name) is not getattr(base, name)


def source_of(trainer: "Trainer") -> Any:
    """Where the training loader comes from: the module, the datamodule, or the loaders that fit was given."""
    return trainer.fit_loop._data_source


def rows_of(trainer: "Trainer") -> int | None:
    """The rows of a batch of the training loader; None if it does not say."""
    rows = getattr(source_of(trainer).dataloader(), "batch_size", None)
    return rows if isinstance(rows, int) else None


def data_of(trainer: "Trainer", module: "LightningModule", dim: object) -> tuple[dict[str, Any], int, int | None]:
    """The data of the task, the rows of a batch, and its time steps if samples have no indices."""
    loader: Any = source_of(trainer).dataloader()
    datamodule: Any = vars(trainer).get("datamodule")
    places = [place for place in (module, datamodule) if place is not None]
    changed = any(overrides(place, name) for place in places for name in TRANSFER)
    if not changed and isinstance(loader, DataLoader) and loader.batch_size is not None and _is_indexed(loader):
        return {"data": loader}, loader.batch_size, None
    batch = module._on_before_batch_transfer(_largest_of(trainer, loader))
    batch = mapped(lambda tensor: tensor.cpu(), trainer.strategy.batch_to_device(batch, dataloader_idx=0))
    found = Rows(batch, dim)
    return {"batch": BatchOfRows(batch, dim)}, found.count, found.steps


def _is_indexed(loader: "DataLoader[Any]") -> bool:
    try:
        Task(model=nn.Module, loss=loss_of, data=loader)
    except MisuseError:
        return False
    return True


def _largest_of(trainer: "Trainer", loader: Any) -> Batch:
    """The largest of the first batches, as the training step gets it."""
    combined: Any = package_of(trainer, "utilities").CombinedLoader
    if isinstance(loader, Mapping | list | tuple):
        loader = combined(loader, "max_size_cycle")
    batches = (one[0] if isinstance(loader, combined) else one for one in loader)
    batch = largest_batch(batches, lambda one: sum(tensor.nbytes for tensor in tensors_of(one)))
    if batch is None:
        raise MisuseError(rule="The training loader must have batches", got="it has none", advice="Check the data.")
    return batch


def set_rows(trainer: "Trainer", module: "LightningModule", rows: int) -> None:
    """Let the training loader make batches of so many rows: by `batch_size` of the module, or by another loader."""
    source = source_of(trainer)
    if takes_batch_size(trainer, module):
        package_of(trainer, "utilities.parsing").lightning_setattr(module, "batch_size", rows)
    elif not source.is_module() and isinstance(source.instance, DataLoader) and source.instance.batch_size is not None:
        source.instance = _resized(source.instance, rows)
    if rows_of(trainer) != rows:
        raise MisuseError(
            rule="The rows of a batch must be settable",
            got=f"the training loader has {shown(rows_of(trainer))} and not {rows:,}",
            advice="Give the module or the datamodule a batch_size that its loaders use, or give fit a DataLoader.",
        )


def _resized(loader: "DataLoader[Any]", rows: int) -> "DataLoader[Any]":
    """The same loader with other rows."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "drop_last", "worker_init_fn", "generator")
    same: dict[str, Any] = {name: getattr(loader, name) for name in (*names, "persistent_workers", "prefetch_factor")}
    if _is_indexed(loader):
        same["sampler"] = loader.sampler
    return DataLoader(loader.dataset, batch_size=rows, **same)


def takes_batch_size(trainer: "Trainer", module: "LightningModule") -> bool:
    """Whether the loader is made by a module or a datamodule that has a `batch_size`."""
    parsing = package_of(trainer, "utilities.parsing")
    return bool(source_of(trainer).is_module() and parsing.lightning_hasattr(module, "batch_size"))
