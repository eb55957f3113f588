"""PyTorch's own kernels on the CPU: GRU and RNN, LSTM with oneDNN off or with a projection.

They run step by step, so every step leaves small tensors and autograd nodes behind. Notation: a *state block* is
B x H floats, a *gate block* B x gates x H. Blocks under glibc's mmap threshold live in the C heap, whose high-water
mark stays resident; larger ones are given back as soon as they are freed (see malloc.py).
"""

from dataclasses import dataclass

from oomguard.estimate.call import GATES, Call, Count, Footprint, maximum, where
from oomguard.estimate.malloc import in_heap, mapped_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What the autograd graph of one time step holds (read from torch 2.13's allocations, see the docstrings)."""

    states: int
    """State blocks kept for backward, beside one gate block (for RNN: without it)."""
    gate_blocks: int
    """Gate blocks kept for backward."""
    holes: int
    """State blocks that forward frees at once, leaving holes in the heap which only smaller things can use."""
    loose: float
    """State blocks per step by which the heap grows in backward, because its holes do not fit."""
    node_bytes: int
    """Autograd nodes and tensor objects: what remains of a step with blocks of no size."""


STEPS = {
    "rnn": Steps(states=1, gate_blocks=0, holes=1, loose=1.0, node_bytes=5_400),
    "gru": Steps(states=4, gate_blocks=1, holes=0, loose=0.6, node_bytes=18_200),
    "lstm": Steps(states=3, gate_blocks=1, holes=1, loose=0.0, node_bytes=16_500),
}


def footprint(call: Call, *, allocator: str = "steady") -> Footprint:
    """What one layer (one or two directions) needs.

    Per step and direction, with s the state block and q the gate block (q = s for RNN):
    - kept: `states x s + gate_blocks x q`, the nodes and the holes (nodes fill holes: the larger of the two counts);
    - forward: the input's projection for all steps, N x gates x H; the output's stack is the caller's;
    - backward: the gate blocks' gradients, one for each step, and their stack, 2 x N x gates x H; less the gate blocks
      that backward has given back, where they are not in the heap;
    - weights: the recurrent weights' gradient is summed step by step, so three of them exist at once.
    """
    kind, gates = STEPS[call.cell], GATES[call.cell]
    state = 4 * call.rows * call.hidden
    gate = state * gates
    small, gate_small = in_heap(state, allocator), in_heap(gate, allocator)
    nodes = maximum(kind.node_bytes, where(small, state * kind.holes, 0))
    heap = nodes + where(small, state * kind.states, 0) + where(gate_small, gate * kind.gate_blocks, 0)
    kept = where(small, 0, mapped_bytes(state) * kind.states) + where(
        gate_small, 0, mapped_bytes(gate) * kind.gate_blocks
    )
    stacked = 4 * call.tokens * (gates * call.hidden)
    loose = where(small, (state * int(kind.loose * 10)) // 10, 0)
    gradients = gate + loose - where(gate_small, 0, gate * kind.gate_blocks)
    output = 4 * call.tokens * (call.output * call.directions)
    return Footprint(
        kept=call.steps * kept * call.directions,
        keeps_output=False,
        heap=call.steps * heap * call.directions,
        forward=maximum(stacked, output) if call.directions == 2 else stacked,
        backward=stacked + call.steps * gradients,
        weight_gradients=_weight_gradients(call),
        inference=stacked + call.steps * (state + kind.node_bytes // 8),
    )


def _weight_gradients(call: Call) -> Count:
    """Of one direction after the other: first three of the recurrent weights, then one each of all weights."""
    rows = GATES[call.cell] * call.hidden
    recurrent, projection = rows * call.output, call.hidden * (call.projection or 0)
    direction = rows * (call.inputs + 2) + recurrent + projection
    return 4 * ((call.directions - 1) * direction + max(direction, 3 * recurrent + 3 * projection))
