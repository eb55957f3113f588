"""One forward and backward pass: its recurrent calls, and the bytes kept between them."""

from dataclasses import dataclass

import numpy as np

from oomguard._estimate import terms
from oomguard._estimate.call import Call, Count, Footprint, Knobs, maximum, minimum, where
from oomguard._estimate.engines import cudnn, native, onednn
from oomguard._estimate.malloc import heap_of
from oomguard._estimate.target import Target, engine_for
from oomguard._spec.spec import Spec

MARK_BYTES = 5056
"""The state of the CPU's random numbers, kept at every border if there is dropout (a Mersenne twister, torch 2.13)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over one piece of the sequence: the whole sequence, a segment or a window."""

    spec: Spec
    candidate: Knobs
    target: Target
    engine: str
    calls: tuple[Call, ...]  # the recurrent calls, first layer first
    footprints: tuple[Footprint, ...]  # the footprint of each call
    tokens: Count  # tokens of the piece
    pieces: Count  # number of pieces of the sequence

    @property
    def element_bytes(self) -> Count:
        """Bytes of one element that the layers compute."""
        return self.calls[0].element_bytes

    @property
    def width_bytes(self) -> Count:
        """Bytes of one layer's output for the piece."""
        return self.element_bytes * self.tokens * self.spec.width

    @property
    def by_layer(self) -> bool:
        """Whether a bidirectional model runs in pieces: each direction of each layer alone, on whole outputs."""
        return self.calls[0].directions < self.spec.directions

    @property
    def first_trained(self) -> int:
        """Index of the first call that needs a graph: everything below it is frozen."""
        if self.spec.vocab is not None and "embedding" not in self.spec.frozen:
            return 0
        frozen = [f"layer{i}" in self.spec.frozen for i in range(len(self.calls))]
        return frozen.index(False) if False in frozen else len(self.calls)


def piece_steps(spec: Spec, candidate: Knobs) -> Count:
    """Time steps of the longest piece: `ceil(T / segments)`, the window, or T."""
    if candidate.window is not None:
        return minimum(candidate.window, spec.steps)
    return -(-spec.steps // candidate.segments)


def make_pass(spec: Spec, candidate: Knobs, target: Target, *, steps: Count) -> Pass:
    """The pass over a piece of `steps` time steps."""
    engine = engine_for(spec, candidate, target)
    tokens = steps * candidate.microbatch
    if target.cuda:  # the CPU computes the padding too, which is faster (model.py)
        tokens = minimum(tokens, terms.longest_tokens(spec, candidate.microbatch))
    calls = _calls(spec, candidate, target, engine, steps, tokens)
    if engine == "cudnn":
        half, batch_first = candidate.precision == "fp16", spec.batch_first
        footprints = [cudnn.footprint(call, target, half=half, batch_first=batch_first) for call in calls]
    else:
        footprint = onednn.footprint if engine == "onednn" else native.footprint
        heap = "cuda" if target.cuda else heap_of(candidate.allocator, engine)
        footprints = [footprint(call, heap=heap) for call in calls]
    return Pass(spec, candidate, target, engine, calls, tuple(footprints), tokens, pieces=-(-spec.steps // steps))


def _calls(spec: Spec, candidate: Knobs, target: Target, engine: str, steps: Count, tokens: Count) -> tuple[Call, ...]:
    """One call for all layers where cuDNN can; otherwise one for each layer.

    On the CPU half precision is not measured (many CPUs refuse it): it counts like fp32, since casts come on top.
    """
    by_direction = spec.bidirectional and (candidate.window is not None or bool(np.any(candidate.segments > 1)))
    together = spec.one_call and not by_direction and engine == "cudnn"
    layers = spec.layers if together else 1
    return tuple(
        Call(
            cell=spec.cell,
            steps=steps,
            rows=candidate.microbatch,
            tokens=tokens,
            inputs=spec.inputs if i == 0 else spec.width,
            hidden=spec.hidden,
            projection=spec.projection,
            layers=layers,
            directions=1 if by_direction else spec.directions,
            element_bytes=4 if candidate.precision == "fp32" or not target.cuda else 2,
            packed=spec.packs and target.cuda,
            input_gradient=i > 0 or (spec.vocab is not None and "embedding" not in spec.frozen),
        )
        for i in range(spec.layers // layers)
    )


def between_bytes(step: Pass, index: int) -> Count:
    """Bytes kept between call `index` and the reader of its output, beside those that the engine keeps.

    The output itself unless the engine keeps it; the normalisation's output and its two statistics per token; dropout's
    mask (4 bytes an element on the CPU, 1 on CUDA) and output. Dropout alone does not need its input again.
    """
    spec, width_bytes = step.spec, step.width_bytes
    dropout = spec.dropout > 0 and index < len(step.calls) - 1
    kept: Count = 0
    if not step.footprints[index].keeps_output and (spec.layer_norm or not dropout):
        kept = kept + width_bytes
    if spec.layer_norm:
        kept = kept + 8 * step.tokens + (0 if dropout else width_bytes)
        if step.element_bytes < 4:  # autocast normalises in fp32: a cast of the input is kept, the output is cast back
            kept = kept + 2 * (4 * step.tokens * spec.width)
    if step.engine == "onednn" and index == len(step.calls) - 1 and spec.head == "per-step":
        kept = kept + layout_copies(step) * width_bytes  # the head reads a copy, the engine keeps the original
    if spec.bidirectional and spec.lengths is not None and not step.target.cuda and not step.by_layer:
        # the second direction reads a copy in its own order of time, and its outputs are turned back (model.py)
        kept = kept + step.element_bytes * step.tokens * (step.calls[index].inputs + spec.width // 2)
    if dropout:
        kept = kept + width_bytes + step.tokens * (spec.width * (1 if step.target.cuda else 4))
    return kept


def entry_bytes(step: Pass) -> Count:
    """Bytes that the first layer reads beside the input itself: embeddings, a cast to half precision, a copy."""
    made = step.spec.vocab is not None or step.element_bytes < 4
    copies = layout_copies(step) * (step.spec.directions if step.engine == "native" else 1)
    if made:  # the copy replaces the tensor that was made here
        copies = maximum(copies, 1)
    return copies * step.element_bytes * step.tokens * step.spec.inputs


def layout_copies(step: Pass) -> Count:
    """1 where batch_first makes an engine read its input through a contiguous copy (native: each direction), else 0.

    A single sequence is contiguous in either layout. cuDNN's copies are in its own footprint.
    """
    if not step.spec.batch_first or step.engine == "cudnn":
        return 0
    return where(step.candidate.microbatch > 1, 1, 0)


def border_bytes(step: Pass) -> Count:
    """The states at the borders of segments: `borders x layers x D x B x (H, and for LSTM its cell)`, fp32."""
    spec, candidate = step.spec, step.candidate
    if candidate.window is not None:
        return 0
    state = (spec.projection or spec.hidden) + (spec.hidden if spec.cell == "lstm" else 0)
    borders = step.pieces - 1 if step.by_layer else borders_kept(candidate.segments, candidate.levels)
    marks = 0 if step.target.cuda or not spec.dropout else MARK_BYTES * (spec.layers if step.by_layer else 1)
    each = candidate.microbatch * (4 * spec.layers * spec.directions * state) + marks
    return where(candidate.recompute, borders, 0) * each


def borders_kept(pieces: Count, levels: Count) -> Count:
    """Border states alive at once: all but one with one level; with k about `k x pieces ** (1 / k)`."""
    one, two, three = (_borders_on(number, pieces) for number in (1, 2, 3))
    return where(levels == 1, one, where(levels == 2, two, three))


def _borders_on(levels: int, pieces: Count) -> Count:
    """Border states alive at once: those between groups of pieces on the highest level, and those within one group."""
    if levels == 1:
        return pieces - 1
    size = np.ceil(np.power(np.asarray(pieces, dtype=np.float64), 1 - 1 / levels)).astype(np.int64)
    group = size if isinstance(pieces, np.ndarray) else int(size)
    return -(-pieces // group) - 1 + _borders_on(levels - 1, group)


def by_layer_bytes(step: Pass) -> Count:
    """Segments of a bidirectional model: whole outputs of all layers, and one gradient of that size if there are more
    than one (the last output becomes its own gradient)."""
    whole = step.element_bytes * (step.spec.steps * step.candidate.microbatch) * step.spec.width
    return (step.spec.layers + (step.spec.layers > 1)) * whole if step.by_layer else 0


def stays_on_host(step: Pass) -> bool:
    """Whether a card sees only one piece of the microbatch at a time."""
    return step.target.cuda and step.candidate.keep == "host"
