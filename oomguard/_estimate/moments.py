"""The moments of a step, each with the bytes in use by term. The peak is the largest of them."""

from oomguard._estimate import terms
from oomguard._estimate.call import Count, Flag, maximum, where
from oomguard._estimate.engines import cudnn
from oomguard._estimate.passes import (
    Pass,
    between_bytes,
    border_bytes,
    by_layer_bytes,
    entry_bytes,
    layout_copies,
    stays_on_host,
)
from oomguard._estimate.target import CUBLAS_HANDLES

TERMS = ("runtime", "weights", "gradients", "optimizer", "activations", "workspace", "logits", "input", "loader")
MATH_BUFFER_BYTES = 3_400_000
"""Buffers that the CPU's matrix library keeps after its first large product (measured: 3.3 to 3.5 MB, one thread)."""

Terms = dict[str, Count]
Moments = dict[str, Terms]


def training_moments(step: Pass, kept: Pass) -> Moments:
    """The moments of a training step.

    `kept` is the pass whose activations live at once: the same piece, or the whole sequence if nothing is recomputed.
    """
    standing = _standing(step) | {"gradients": where(_held(step), _all_gradients(step), 0)}
    layers = range(step.first_trained, len(step.calls))
    found: Moments = {"forward": _plus(standing, _forward(step, kept))}
    if step.first_trained:
        found["forward of the frozen layers"] = _plus(standing, _frozen(step))
    found["loss"] = _plus(standing, _loss(step, kept))
    found["backward of the head"] = _plus(standing, _head(step, kept))
    # between the second and the last layer every figure is linear in the layer: the ends tell the peak
    for layer in sorted({index for index in (layers.start, layers.start + 1, layers.stop - 1) if index in layers}):
        found[f"backward of {_name(step, layer)}"] = _plus(standing, _backward(step, kept, layer))
    if step.spec.vocab is not None and "embedding" not in step.spec.frozen:
        found["backward of the embedding"] = _plus(standing, _embedding(step))
    found["optimizer"] = _plus(standing | {"input": 0}, _optimizer(step))  # the microbatch is gone
    return found


def _plus(standing: Terms, more: Terms) -> Terms:
    """Add the bytes of one moment to those in use at every moment."""
    return standing | {term: standing[term] + size for term, size in more.items()}


def _name(step: Pass, index: int) -> str:
    """Name a call for reports."""
    if len(step.calls) > 1:
        return f"layer {index + 1}"
    return "the layers" if step.spec.layers > 1 else "the layer"


def evaluation_moments(step: Pass) -> Moments:
    """The moments of an evaluation pass without gradients: each layer reads one output and makes the next.

    The optimizer's state counts: evaluation comes between training steps.
    """
    standing = _standing(step)
    found: Moments = {}
    for index in sorted({0, len(step.calls) - 1}):
        reads = entry_bytes(step) if index == 0 else step.element_bytes * step.tokens * step.calls[index].inputs
        more = {"activations": reads + step.width_bytes, "workspace": step.footprints[index].inference}
        found[f"forward of {_name(step, index)}"] = _plus(standing, more)
    logits = 8 * _predictions(step) * step.spec.classes
    found["loss"] = _plus(standing, {"activations": step.width_bytes, "logits": logits})
    return found


def _standing(step: Pass) -> Terms:
    """Bytes in use at every moment: runtime, weights, optimizer state, the microbatch, the loader's part (CPU)."""
    spec, candidate, target = step.spec, step.candidate, step.target
    return dict.fromkeys(TERMS, 0) | {
        "runtime": target.runtime_bytes,
        "weights": terms.weights_bytes(spec) + _cast_bytes(step),
        "optimizer": 0 if candidate.offload and target.cuda else terms.optimizer_bytes(spec, candidate),
        "workspace": _libraries(step),
        "input": _input_bytes(step),
        "loader": 0 if target.cuda else terms.loader_bytes(spec, candidate, pinned=False),
    }


def _input_bytes(step: Pass) -> Count:
    """The microbatch, or only the piece of it that has come over."""
    whole = terms.input_bytes(step.spec, step.candidate)
    return -(-whole // step.pieces) if stays_on_host(step) else whole


def _cast_bytes(step: Pass) -> int:
    """Autocast's cache of weights cast to half precision, until the pass ends; an embedding is only cast as a head."""
    if step.candidate.precision == "fp32":
        return 0
    parts = terms.parameters(step.spec)
    if not step.spec.tied:
        parts.pop("embedding", None)
    return 2 * sum(terms.elements(shapes) for shapes in parts.values())


def _libraries(step: Pass) -> int:
    if not step.target.cuda:
        return MATH_BUFFER_BYTES
    scaler = terms.SCALER_BYTES if step.candidate.precision == "fp16" else 0
    return CUBLAS_HANDLES * step.target.cublas_bytes + scaler


def _held(step: Pass) -> Flag:
    """Whether gradients of an earlier microbatch or piece exist."""
    return (step.candidate.accumulation > 1) | (step.pieces > 1)


def _all_gradients(step: Pass) -> int:
    return sum(terms.gradients_bytes(step.spec).values()) + terms.sparse_gradient_bytes(step.spec)


def _heap_bytes(kept: Pass) -> Count:
    return sum(footprint.heap for footprint in kept.footprints[kept.first_trained :])


def _activations(kept: Pass, upto: int) -> Count:
    """Bytes that forward has kept up to call `upto`, with all that stays resident in the heap."""
    first = kept.first_trained
    # what the first trained part reads: the entry, or the output of the last frozen layer
    reads = kept.width_bytes if first else entry_bytes(kept)
    total = reads + _borders(kept) + _heap_bytes(kept)
    if kept.by_layer:  # one call's graph at a time; whole outputs of all layers (the last becomes its own gradient)
        return total + (0 if stays_on_host(kept) else by_layer_bytes(kept)) + kept.footprints[upto].kept
    for index in range(first, upto + 1):
        total = total + kept.footprints[index].kept + (between_bytes(kept, index) if index < upto else 0)
    return total


def _borders(step: Pass) -> Count:
    return 0 if stays_on_host(step) else border_bytes(step)


def _all_activations(step: Pass, kept: Pass) -> Count:
    last = len(kept.calls) - 1
    return _activations(kept, last) + between_bytes(kept, last) + _gathered(step, kept)


def _gathered(step: Pass, kept: Pass) -> Count:
    """Chunks that are kept differentiate the head at once, and hold the gradients of their outputs until the end; the
    graph of each has a copy of the weights of its own, if they are cast."""
    outputs = kept.width_bytes - step.width_bytes if step.spec.head == "per-step" else 0
    return outputs + where(step.candidate.recompute, 0, step.pieces - 1) * _recast_bytes(step)


def _recast_bytes(step: Pass) -> int:
    """cuDNN: the flat copy of its weights in half precision that a call makes and keeps until backward. (The first of
    them is among the weights, `_cast_bytes`.)"""
    half = step.engine == "cudnn" and step.candidate.precision != "fp32"
    return sum(int(cudnn.flat_weight_bytes(call)) for call in step.calls) if half else 0


def _forward(step: Pass, kept: Pass) -> Terms:
    """The last call's forward: everything kept, and what it needs while it runs."""
    return {"activations": _all_activations(step, kept), "workspace": step.footprints[-1].forward}


def _frozen(step: Pass) -> Terms:
    """Forward of the frozen layers below all trained ones: they keep nothing, but in training mode they fill their
    buffers; each reads one output and makes the next."""
    below = step.footprints[: step.first_trained]
    busiest = maximum(*(maximum(footprint.kept + footprint.forward, footprint.inference) for footprint in below))
    return {"activations": _borders(step) + entry_bytes(step) + 2 * step.width_bytes, "workspace": busiest}


def _predictions(step: Pass) -> Count:
    return step.tokens if step.spec.head == "per-step" else step.candidate.microbatch


def _loss(step: Pass, kept: Pass) -> Terms:
    """The loss: everything kept, the outputs and the loss's own buffers."""
    logits, _ = terms.logits_bytes(step.spec, _predictions(step), step.element_bytes)
    return {"activations": _all_activations(step, kept), "logits": logits}


def _head(step: Pass, kept: Pass) -> Terms:
    """The head's backward: the gradients of the outputs, of its weights and of the last layer's output."""
    _, logits = terms.logits_bytes(step.spec, _predictions(step), step.element_bytes)
    return {
        "gradients": terms.gradients_bytes(step.spec)["embedding" if step.spec.tied else "head"],
        "activations": _all_activations(step, kept) + step.width_bytes,
        "logits": logits,
    }


def _backward(step: Pass, kept: Pass, index: int) -> Terms:
    """Backward of one call: what lower calls keep, the gradient of its output, its work, gradients of all above."""
    of_parts = terms.gradients_bytes(step.spec)
    above = sum(of_parts[f"layer{i}"] for i in range(index + 1, len(step.calls))) + of_parts["head"]
    if step.spec.tied:
        above += of_parts["embedding"]
    new = 0 if f"layer{index}" in step.spec.frozen else step.footprints[index].weight_gradients
    copies: Count = 0
    if step.engine == "onednn" and index == len(step.calls) - 1 and not step.spec.bidirectional:
        copies = layout_copies(step)  # of the gradient; two directions copy their halves anyway
    return {
        "gradients": new + where(_held(step), 0, above),
        "activations": _activations(kept, index) + _gathered(step, kept) + step.width_bytes * (1 + copies),
        "workspace": step.footprints[index].backward,
    }


def _embedding(step: Pass) -> Terms:
    """Backward of the embedding: the gradient of its output, and a gradient as large as itself (or sparse rows)."""
    embedding = terms.gradients_bytes(step.spec)["embedding"]
    rows = 4 * step.tokens * step.spec.inputs  # autocast leaves embeddings in fp32
    again = embedding * (2 if step.spec.tied else 1)
    return {
        "gradients": again + where(_held(step), 0, _all_gradients(step) - embedding),
        "activations": rows + _heap_bytes(step),
    }


def _optimizer(step: Pass) -> Terms:
    """The update: all gradients and the optimizer's temporary copies."""
    spec, candidate = step.spec, step.candidate
    visiting = 0
    if candidate.offload:  # the state comes to the card parameter by parameter: room for the largest, in and out
        largest = max(terms.elements([shape]) for shape in terms.trained(spec))
        visiting = 2 * terms.STATES_PER_WEIGHT.get(spec.optimizer, 1) * 4 * largest
    coalesced = terms.sparse_gradient_bytes(spec)  # coalescing copies a sparse gradient
    return {
        "gradients": coalesced + where(_held(step), 0, _all_gradients(step)),
        "activations": _heap_bytes(step),
        "workspace": terms.update_bytes(spec, candidate) + visiting,
    }
