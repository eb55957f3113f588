"""Prunes hidden units: a run with a smaller dense model of the most used units of every layer, to be fine-tuned."""

import shlex
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from oomguard._core.errors import MisuseError
from oomguard._core.progress import tell
from oomguard._data.loader import read_microbatch
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.call import GATES
from oomguard._plan.find import plan_again
from oomguard._plan.store import load_spec_plan, save_plan
from oomguard._plan.value import Plan
from oomguard._rnn import Microbatch
from oomguard._rnn.model import Recurrent, build, turned
from oomguard._rnn.run import without_graph
from oomguard._spec.spec import Spec
from oomguard._step import prepare
from oomguard._train.checkpoint import Checkpoint, TrainState, load_weights, save
from oomguard._train.evaluate import evaluation_candidate, find_checkpoint, validate, validation_source
from oomguard._train.ranks import Ranks
from oomguard._train.results import Shrunk
from oomguard._train.settings import CHECKPOINTS, RunSettings, read_settings, write_settings

SEQUENCES, STEPS = 32, 512
"""Validation sequences, and their first steps, in which the activity of hidden units is measured."""
Units = dict[tuple[int, int], Tensor]  # by layer and direction: numbers of hidden units, or a figure for each of them


def shrink_run(run: Path, share: float, path: Path) -> Shrunk:
    """Write a run with the most used hidden units of another, as many in every layer."""
    checkpoint, plan = find_checkpoint(run), load_spec_plan(run / "plan.json")
    state, spec = checkpoint.state, checkpoint.spec or plan.spec
    _check(spec, share, state)
    model = build(spec)
    load_weights(checkpoint, model)
    source, activity, losses = validation_source(run, state, spec), None, None
    if source is not None:
        tell("Measuring the activity of hidden units")
        activity = measure_activity(model, read_microbatch(source, np.arange(min(len(source), SEQUENCES))))
    smaller = pruned(model, round(spec.hidden * share), activity)
    new_plan = plan_again(plan, smaller.spec)
    if source is not None:
        candidates = [evaluation_candidate(each.spec, new_plan.candidate, plan.where) for each in (smaller, model)]
        pairs = zip((smaller, model), candidates, strict=True)
        losses = [validate(each, source, candidate, Ranks()) for each, candidate in pairs]
    _write(run, path, new_plan, smaller, checkpoint)
    notes = [] if activity else ["The run names no data for validation: weights alone decided which units are used."]
    if spec.layer_norm:
        notes.append("The outputs of layers are normalised over fewer units, which changes them in itself.")
    notes.append(f"To fine-tune it: oomguard resume {shlex.quote(str(path))} --epochs 1")
    before, after = (estimate_step(each.spec, each.candidate, plan.where).total_bytes for each in (plan, new_plan))
    return Shrunk(
        run=str(path),
        hidden=smaller.spec.hidden,
        hidden_before=spec.hidden,
        parameters=sum(weight.numel() for weight in smaller.parameters()),
        parameters_before=sum(weight.numel() for weight in model.parameters()),
        peak_bytes=int(after),
        peak_before_bytes=int(before),
        loss=None if losses is None else losses[0],
        loss_before=None if losses is None else losses[1],
        notes=tuple(notes),
    )


def _check(spec: Spec, share: float, state: TrainState) -> None:
    """Raise if the model cannot have fewer hidden units."""
    rule, advice = "Hidden units can be pruned in the built-in model", "Train a smaller model of your own."
    if state.model is not None:
        raise MisuseError(rule=rule, got=f"this run has the model {state.model}", advice=advice)
    if spec.tied:
        got, advice = "it shares the weights of the embedding and the head", "Train a smaller one instead."
        raise MisuseError(rule="The embedding of a pruned model keeps its width", got=got, advice=advice)
    hidden = round(spec.hidden * share)
    if hidden in (0, spec.hidden):
        got = f"{share:g} of {spec.hidden} is {hidden}"
        raise MisuseError(rule="--hidden must leave fewer units, and at least one", got=got, advice="Change it.")
    msgspec.structs.replace(spec, hidden=hidden)  # raises if a projection is not smaller


def _write(run: Path, path: Path, plan: Plan, model: Recurrent, checkpoint: Checkpoint) -> None:
    """Write a run that is at its first step: plan, settings and a checkpoint."""
    state = checkpoint.state
    save_plan(plan, path / "plan.json")
    settings = read_settings(run) or RunSettings(options=state.data_options, known=True)
    train = msgspec.structs.replace(settings.train, run=str(path), resume=False)
    write_settings(path, msgspec.structs.replace(settings, train=train))
    training = prepare(plan.spec, msgspec.structs.replace(plan.candidate, shards=1))  # the whole state
    training.model.load_state_dict(model.state_dict())
    begun = TrainState(data=state.data, data_options=state.data_options, normaliser=state.normaliser)
    save(path / CHECKPOINTS, training, begun)


def measure_activity(model: Recurrent, batch: Microbatch) -> Units:
    """The root mean square of the output of every hidden unit; none for layers whose output is projected."""
    time, lengths = model.time_dim, batch.lengths
    steps = min(STEPS, batch.inputs.shape[time])
    lengths = None if lengths is None else lengths.clamp(max=steps)
    activity: Units = {}
    with without_graph(model):
        hidden = model.enter(batch.inputs.narrow(time, 0, steps))
        for layer in range(model.spec.layers):
            outputs = []
            for direction in range(model.spec.directions):
                inputs = turned(hidden, lengths, time) if direction else hidden
                made, _ = model.direction(layer, direction)(inputs)
                outputs.append(turned(made, lengths, time) if direction else made)
                activity[layer, direction] = _root_mean_square(outputs[-1], lengths, time)
            hidden = model.normalise(layer, torch.cat(outputs, -1))
    return {} if model.spec.projection else activity


def _root_mean_square(made: Tensor, lengths: Tensor | None, time: int) -> Tensor:
    """The root mean square over all real steps."""
    if lengths is None:
        return made.square().mean((0, 1)).sqrt()
    steps = torch.arange(made.shape[time])[:, None]
    real = (steps < lengths).T if time else steps < lengths
    return made[real].square().mean(0).sqrt()


def usage(model: Recurrent, activity: Units | None) -> Units:
    """How much each hidden unit is used: the norm of the weights that read it, times its activity if that is known."""
    spec, reading, used = model.spec, dict[tuple[int, int], list[Tensor]](), Units()
    for layer in range(spec.layers):
        readers = [model.head.weight]
        if layer + 1 < spec.layers:
            readers = [_weight(model, layer + 1, other, "weight_ih_l0") for other in range(spec.directions)]
        for direction in range(spec.directions):
            own = slice(direction * spec.hidden, (direction + 1) * spec.hidden)
            if spec.projection:
                reading[layer, direction] = [_weight(model, layer, direction, "weight_hr_l0")]
            else:
                recurrent = _weight(model, layer, direction, "weight_hh_l0")
                reading[layer, direction] = [recurrent, *(reader[:, own] for reader in readers)]
    for place, weights in reading.items():
        norm = torch.cat([weight.detach() for weight in weights]).norm(dim=0)
        used[place] = norm * activity[place] if activity else norm
    return used


def pruned(model: Recurrent, hidden: int, activity: Units | None = None) -> Recurrent:
    """A model of the most used hidden units, so many in each direction of each layer."""
    spec = model.spec
    smaller = build(msgspec.structs.replace(spec, hidden=hidden))
    kept = {place: used.topk(hidden).indices.sort().values for place, used in usage(model, activity).items()}
    columns = torch.arange(spec.inputs)  # of the input of a layer that stay
    with torch.no_grad():
        for layer in range(spec.layers):
            for direction in range(spec.directions):
                _copy_direction(model, smaller, (layer, direction), columns, kept[layer, direction])
            columns = torch.arange(spec.width)
            if not spec.projection:
                columns = torch.cat([side * spec.hidden + kept[layer, side] for side in range(spec.directions)])
            if spec.layer_norm:
                for name, weight in smaller.norms[layer].named_parameters():
                    weight.copy_(model.norms[layer].get_parameter(name)[columns])
        smaller.head.weight.copy_(model.head.weight[:, columns])
        smaller.head.bias.copy_(model.head.bias)
        if model.embedding is not None and smaller.embedding is not None:
            smaller.embedding.weight.copy_(model.embedding.weight)
    return smaller


def _copy_direction(
    model: Recurrent, smaller: Recurrent, place: tuple[int, int], columns: Tensor, kept: Tensor
) -> None:
    """Copy the weights of the kept hidden units of one direction of a layer."""
    spec = model.spec
    rows = torch.cat([gate * spec.hidden + kept for gate in range(GATES[spec.cell])])
    for name, weight in smaller.direction(*place).named_parameters():
        old = _weight(model, *place, name)
        if name.startswith("weight_hr"):  # from the hidden units to the projection
            weight.copy_(old[:, kept])
        elif name.startswith("weight_ih"):
            weight.copy_(old[rows][:, columns])
        elif name.startswith("weight_hh") and not spec.projection:
            weight.copy_(old[rows][:, kept])
        else:
            weight.copy_(old[rows])


def _weight(model: Recurrent, layer: int, direction: int, name: str) -> Tensor:
    return model.direction(layer, direction).get_parameter(name)
