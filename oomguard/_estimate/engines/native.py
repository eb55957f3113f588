"""PyTorch's own kernels on the CPU: GRU and RNN, LSTM with oneDNN off or with a projection.

They run step by step, so every step leaves small tensors and autograd nodes behind. Notation: a *state block* is
B x H floats, a *gate block* B x gates x H. Blocks under glibc's mmap threshold live in the C heap, whose high-water
mark stays resident; larger ones are given back as soon as they are freed (see malloc.py).
"""

from typing import NamedTuple

from oomguard._estimate.call import GATES, Call, Count, Flag, Footprint, maximum, where
from oomguard._estimate.malloc import in_heap, mapped_bytes


class Steps(NamedTuple):
    """The memory that one time step leaves behind: blocks as torch 2.13 records its allocations, the rest fitted."""

    states: int  # state blocks kept for backward
    gates: int  # gate blocks kept for backward
    holes: int  # state blocks that forward frees at once, leaving holes in the heap that only smaller things can use
    node_bytes: int  # bytes of autograd nodes and tensor objects of a step
    tenths: int  # tenths of a state block by which backward raises the heap, since its blocks do not fit the holes
    tenths_mapped: int  # as `tenths`, if gate blocks are too large for the heap and leave no holes in it
    tenths_weights: int
    """As `tenths`, if the gradient of the recurrent weights lives in the heap too and leaves large holes."""


STEPS = {
    "rnn": Steps(states=1, gates=0, holes=1, node_bytes=4_700, tenths=5, tenths_mapped=5, tenths_weights=-2),
    "gru": Steps(states=4, gates=1, holes=0, node_bytes=16_700, tenths=3, tenths_mapped=12, tenths_weights=2),
    "lstm": Steps(states=3, gates=1, holes=1, node_bytes=15_400, tenths=5, tenths_mapped=10, tenths_weights=-6),
}
OBJECT_BYTES = 400  # bytes of a tensor's own objects at each step without a graph (measured: 350 to 450)


def footprint(call: Call, *, heap: str = "tight") -> Footprint:
    """Footprint of one layer with one or two directions.

    Per step and direction, with s the state block and q the gate block (for RNN q = s):
    - kept: `states x s + gates x q`, and in the heap the nodes or the holes (nodes fill holes: the larger counts);
    - forward: the input's projection for all steps, N x q/B; the output's stack is the caller's;
    - backward: the gradients of all gate blocks, their stack, what the heap grows by (`_loose_bytes`), and the input's
      gradient. Blocks with pages of their own are given back before that. When the stack is made, the gradient of the
      output is gone (but for a second direction that still needs its half), so it is taken off here;
    - weights: the recurrent weights' gradient is summed step by step, so three of them exist at once.

    In the heap `system` only what is in use counts here, without holes: `in_system_heap` (moments.py) adds them.

    Limits: the heap's part holds for glibc 2.36's memalign; newer ones (2.38 on) reuse holes better.
    """
    kind, both = STEPS[call.cell], call.directions == 2
    blocks = _blocks(call, heap)
    stacked = call.element_bytes * call.tokens * (GATES[call.cell] * call.hidden)
    output = call.element_bytes * call.tokens * (call.output * call.directions)
    entry = call.element_bytes * call.tokens * call.inputs if call.input_gradient else 0
    loose = where(blocks.state_small, _loose_bytes(call, blocks), 0)
    in_the_heap = call.steps * (blocks.gate + loose) + entry
    freed = blocks.gate * kind.gates + (blocks.state * kind.states if heap == "system" else 0)
    with_pages = maximum(call.steps * (blocks.gate + loose - freed), entry)
    work = stacked + where(blocks.gate_small & (heap != "system"), in_the_heap, with_pages)
    mapped, heaped = _kept_bytes(kind, blocks)
    alone = blocks.state * (2 if call.cell == "gru" else 1)
    return Footprint(
        kept=call.steps * call.directions * mapped,
        keeps_output=False,
        heap=call.steps * call.directions * heaped,
        forward=maximum(stacked, output) if both else stacked,
        backward=maximum(work - (0 if both else output), 0),
        weight_gradients=_weight_gradients(call),
        inference=stacked + call.steps * call.directions * (OBJECT_BYTES + alone),
        scratch=stacked,
    )


class Blocks(NamedTuple):
    """The two sizes of block that a step asks for, and where the C allocator puts them."""

    heap: str
    state: Count
    gate: Count
    state_small: Flag
    gate_small: Flag


def _blocks(call: Call, heap: str) -> Blocks:
    state = call.element_bytes * call.rows * call.hidden
    if call.packed:  # what runs on average
        state = call.element_bytes * call.hidden * call.tokens // call.steps
    gate = state * GATES[call.cell]
    return Blocks(heap, state, gate, in_heap(state, heap), in_heap(gate, heap))


def _kept_bytes(kind: Steps, blocks: Blocks) -> tuple[Count, Count]:
    """Bytes that one step keeps in blocks with pages of their own, and in the C heap: small blocks and autograd nodes.

    On CUDA there is no such heap.
    """
    mapped = where(blocks.state_small, 0, mapped_bytes(blocks.state) * kind.states)
    mapped = mapped + where(blocks.gate_small, 0, mapped_bytes(blocks.gate) * kind.gates)
    if blocks.heap == "cuda":
        return mapped, 0
    holes = 0 if blocks.heap == "system" else kind.holes
    filled = maximum(kind.node_bytes, where(blocks.state_small, blocks.state * holes, 0))
    states = where(blocks.state_small, blocks.state * kind.states, 0)
    return mapped, filled + states + where(blocks.gate_small, blocks.gate * kind.gates, 0)


def _loose_bytes(call: Call, blocks: Blocks) -> Count:
    """Bytes by which backward raises the heap at each step, fitted in tenths of a state block.

    A vanilla RNN with small states pins the heap above the far larger gradients of its recurrent weights (16 to 64
    KiB, hidden sizes 64 to 127): 0.18 of those at each step, and up to 0.6 in single runs.
    """
    if blocks.heap == "system":
        return 0
    kind = STEPS[call.cell]
    weights = 4 * GATES[call.cell] * call.hidden * call.output
    if not in_heap(weights, blocks.heap):
        return blocks.state * where(blocks.gate_small, kind.tenths, kind.tenths_mapped) // 10
    loose = blocks.state * kind.tenths_weights // 10
    if call.cell != "rnn" or weights < 16_384:
        return loose
    return where(blocks.state * 8 <= weights, weights * 18 // 100, loose)


def _weight_gradients(call: Call) -> Count:
    """Bytes of weight gradients, one direction at a time: three of the recurrent weights, then one of each weight."""
    rows = GATES[call.cell] * call.hidden
    recurrent, projection = rows * call.output, call.hidden * (call.projection or 0)
    direction = rows * (call.inputs + 2) + recurrent + projection
    return 4 * ((call.directions - 1) * direction + max(direction, 3 * recurrent + 3 * projection))
