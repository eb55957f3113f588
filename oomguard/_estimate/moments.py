"""The moments of a step, each with the bytes in use by term. The peak is the largest of them."""

from oomguard._estimate import passes, terms
from oomguard._estimate.call import Count, Flag, maximum, minimum, where
from oomguard._estimate.engines import cudnn
from oomguard._estimate.malloc import in_heap
from oomguard._estimate.passes import Pass, stays_on_host
from oomguard._estimate.target import CUBLAS_HANDLES

TERMS = ("runtime", "weights", "gradients", "optimizer", "activations", "workspace", "logits", "input", "loader")
MATH_BUFFER_BYTES = 3_400_000
"""Buffers that the CPU's matrix library keeps after its first large product (measured: 3.3 to 3.5 MB, one thread)."""
HEAP_PERCENT = {"rnn": 170, "gru": 115, "lstm": 115, "equal": 170, "segments": 20}
"""Size of glibc's own heap, in percent of the bytes in use there: with PyTorch's own kernels (`rnn` to `lstm`);
for logits and, in segments, the gradients of head and embedding (`equal`). In segments it grows by that much more.
memalign cannot use a hole of just the size that it is asked for (glibc before 2.38), and of two equal blocks a vanilla
RNN frees one. (Second steps of rows `tune` of benchmarks/results/system_peaks.csv: 1.3 to 2.2 for 14 RNNs, 1.1 to 1.4
for 6 GRUs, 1.65 and 1.75 for the logits of LSTMs.)"""

Terms = dict[str, Count]
Moments = dict[str, Terms]


def training_moments(step: Pass, kept: Pass) -> Moments:
    """The moments of a training step.

    `kept` is the pass whose activations live at once: the same piece, or the whole sequence if nothing is recomputed.
    """
    spec, last = step.spec, len(step.calls) - 1
    standing = _standing(step) | {"gradients": where(_held(step), _all_gradients(step), 0)}
    kept_bytes = _activations(kept, last) + passes.between_bytes(kept, last) + _gathered(step, kept)
    loss, gradient = terms.logits_bytes(spec, _predictions(step), step.element_bytes)
    moments: Moments = {"forward": {"activations": kept_bytes, "workspace": step.footprints[-1].forward}}
    if step.first_trained:
        moments["forward of the frozen layers"] = _frozen(step)
    moments["loss"] = {"activations": kept_bytes, "logits": loss}
    moments["backward of the head"] = {
        "gradients": terms.gradients_bytes(spec)["embedding" if spec.tied else "head"],
        "activations": kept_bytes + step.width_bytes,
        "logits": gradient,
    }
    # between the second and the last layer every figure is linear in the layer: the ends tell the peak
    first = step.first_trained
    for layer in sorted({index for index in (first, first + 1, last) if first <= index <= last}):
        moments[f"backward of {_name(step, layer)}"] = _backward(step, kept, layer)
    if spec.vocab is not None and "embedding" not in spec.frozen:
        moments["backward of the embedding"] = _embedding(step)
    update = {"optimizer": _optimizer(step)}
    return _plus(standing, moments) | _plus(standing | {"input": 0, "gradients": 0}, update)  # the microbatch is gone


def in_system_heap(step: Pass, kept: Pass, moments: Moments) -> Moments:
    """The moments of a second or later step with glibc's own thresholds, with all that its heap keeps.

    Freed blocks stay resident in the heap, so its high-water mark and the mapped blocks of any moment add up.
    """
    percent: Count = HEAP_PERCENT[step.spec.cell] if step.engine == "native" else 100
    percent = percent + where(step.pieces > 1, HEAP_PERCENT["segments"], 0)
    of_parts, heaps, grown = terms.gradients_bytes(step.spec), Terms(), Terms()
    ends = of_parts["head"] + of_parts.get("embedding", 0)
    for name, parts in moments.items():
        heaps[name] = parts["activations"] + parts["workspace"] + parts["logits"] + parts["gradients"]
        if name != "optimizer":  # the update finds room in what backward has freed
            mapped, logits = _mapped_bytes(step, kept, parts)
            heaps[name] = heaps[name] - mapped
            equal = logits + where(step.pieces > 1, minimum(ends, parts["gradients"]), 0)
            rest = heaps[name] - logits - parts["gradients"]
            grown[name] = heaps[name] + rest // 100 * (percent - 100) + equal // 100 * (HEAP_PERCENT["equal"] - 100)
    high: Count = maximum(*grown.values())
    # a byte less where another moment sets the mark, so that reports name that one as the peak
    spare = {name: maximum(high - heap - where(grown.get(name, 0) < high, 1, 0), 0) for name, heap in heaps.items()}
    return {name: parts | {"workspace": parts["workspace"] + spare[name]} for name, parts in moments.items()}


def _mapped_bytes(step: Pass, kept: Pass, parts: Terms) -> tuple[Count, Count]:
    """Bytes of a moment in blocks with pages of their own, or kept all the time (`by_layer_bytes`); logits in the heap.

    Of six floats that oneDNN keeps, five are in its block.
    """

    def large(block: Count, size: Count) -> Count:
        return where(in_heap(block, "system"), 0, size)

    call, standing = step.footprints[-1], passes.by_layer_bytes(kept)
    outputs = maximum(parts["activations"] - _heap_bytes(kept) - standing, 0)
    inside = outputs // 6 * 5 if step.engine == "onednn" else 0
    work = maximum(parts["workspace"] - MATH_BUFFER_BYTES, 0)
    scratch = minimum(call.scratch, work)
    logits = large(step.element_bytes * _predictions(step) * step.spec.classes, parts["logits"])
    mapped: Count = large(step.width_bytes, outputs - inside) + large(call.block, inside + work - scratch)
    mapped = standing + mapped + large(call.scratch, scratch) + logits
    return mapped, parts["logits"] - logits


def _plus(standing: Terms, moments: Moments) -> Moments:
    """Add the bytes in use at every moment to those of each."""
    return {
        name: standing | {term: standing[term] + size for term, size in more.items()} for name, more in moments.items()
    }


def _name(step: Pass, index: int) -> str:
    """Name a call for reports."""
    if len(step.calls) > 1:
        return f"layer {index + 1}"
    return "the layers" if step.spec.layers > 1 else "the layer"


def evaluation_moments(step: Pass) -> Moments:
    """The moments of an evaluation pass without gradients: each layer reads one output and makes the next.

    The optimizer's state counts: evaluation comes between training steps.
    """
    moments: Moments = {}
    for index in sorted({0, len(step.calls) - 1}):
        reads = passes.entry_bytes(step) if index == 0 else step.element_bytes * step.tokens * step.calls[index].inputs
        more = {"activations": reads + step.width_bytes, "workspace": step.footprints[index].inference}
        moments[f"forward of {_name(step, index)}"] = more
    moments["loss"] = {"activations": step.width_bytes, "logits": 8 * _predictions(step) * step.spec.classes}
    return _plus(_standing(step), moments)


def _standing(step: Pass) -> Terms:
    """Bytes in use at every moment: runtime, weights, optimizer state, the microbatch, the loader's part (CPU)."""
    spec, candidate, target = step.spec, step.candidate, step.target
    scaler = terms.SCALER_BYTES if candidate.precision == "fp16" else 0
    microbatch = terms.input_bytes(spec, candidate)
    imported = 0 if target.cuda or not terms.in_8_bits(spec, candidate) else terms.TORCHAO_BYTES
    return dict.fromkeys(TERMS, 0) | {
        "runtime": target.runtime_bytes + imported,
        "weights": terms.weights_bytes(spec) + _cast_bytes(step),
        "optimizer": 0 if candidate.offload and target.cuda else terms.optimizer_bytes(spec, candidate),
        "workspace": CUBLAS_HANDLES * target.cublas_bytes + scaler if target.cuda else MATH_BUFFER_BYTES,
        "input": -(-microbatch // step.pieces) if stays_on_host(step) else microbatch,
        "loader": 0 if target.cuda else terms.loader_bytes(spec, candidate, pinned=False),
    }


def _cast_bytes(step: Pass) -> int:
    """Autocast's cache of weights cast to half precision, until the pass ends; an embedding is only cast as a head."""
    if step.candidate.precision == "fp32":
        return 0
    parts = terms.parameters(step.spec)
    if not step.spec.tied:
        parts.pop("embedding", None)
    return 2 * sum(terms.elements(shapes) for shapes in parts.values())


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
    reads = kept.width_bytes if first else passes.entry_bytes(kept)
    waiting: Count = 0 if stays_on_host(kept) else passes.border_bytes(kept) + passes.by_layer_bytes(kept)
    total = reads + waiting + _heap_bytes(kept)
    if kept.by_layer:  # one call's graph at a time
        return total + kept.footprints[upto].kept
    for index in range(first, upto + 1):
        total = total + kept.footprints[index].kept + (passes.between_bytes(kept, index) if index < upto else 0)
    return total


def _gathered(step: Pass, kept: Pass) -> Count:
    """Chunks that are kept differentiate the head at once, and hold the gradients of their outputs until the end; the
    graph of each has a flat copy of cuDNN's weights of its own, if they are cast. (`_cast_bytes` has the first.)"""
    outputs = kept.width_bytes - step.width_bytes if step.spec.head == "per-step" else 0
    if step.engine != "cudnn" or step.candidate.precision == "fp32":
        return outputs
    copy = sum(int(cudnn.flat_weight_bytes(call)) for call in step.calls)
    return outputs + where(step.candidate.recompute, 0, step.pieces - 1) * copy


def _frozen(step: Pass) -> Terms:
    """Forward of the frozen layers below all trained ones: they keep nothing, but in training mode they fill their
    buffers; each reads one output and makes the next."""
    below = step.footprints[: step.first_trained]
    busiest = maximum(*(maximum(footprint.kept + footprint.forward, footprint.inference) for footprint in below))
    borders = 0 if stays_on_host(step) else passes.border_bytes(step)
    return {"activations": borders + passes.entry_bytes(step) + 2 * step.width_bytes, "workspace": busiest}


def _predictions(step: Pass) -> Count:
    return step.tokens if step.spec.head == "per-step" else step.candidate.microbatch


def _backward(step: Pass, kept: Pass, index: int) -> Terms:
    """Backward of one call: what lower calls keep, the gradient of its output, its work, gradients of all above."""
    of_parts = terms.gradients_bytes(step.spec)
    above = sum(of_parts[f"layer{i}"] for i in range(index + 1, len(step.calls))) + of_parts["head"]
    if step.spec.tied:
        above += of_parts["embedding"]
    new = 0 if f"layer{index}" in step.spec.frozen else step.footprints[index].weight_gradients
    copies: Count = 0
    if step.engine == "onednn" and index == len(step.calls) - 1 and not step.spec.bidirectional:
        copies = passes.layout_copies(step)  # of the gradient; two directions copy their halves anyway
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
    """The update: the gradients of all weights that this process updates, and the optimizer's temporary copies."""
    spec, candidate = step.spec, step.candidate
    visiting = 0
    if candidate.offload:  # the state comes to the card parameter by parameter: room for the largest, in and out
        largest = max(terms.elements([shape]) for shape in terms.trained(spec))
        visiting = 2 * terms.STATES_PER_WEIGHT.get(spec.optimizer, 1) * 4 * largest
    coalesced = terms.sparse_gradient_bytes(spec)  # coalescing copies a sparse gradient
    own = terms.largest_share(spec, candidate.shards, lambda shapes: 4 * terms.elements(shapes))
    return {
        "gradients": coalesced + where(candidate.shards == 1, _all_gradients(step), own),
        "activations": _heap_bytes(step),
        "workspace": terms.update_bytes(spec, candidate) + visiting,
    }
