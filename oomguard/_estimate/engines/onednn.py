"""oneDNN, the engine of LSTM layers on the CPU (fp32): `mkldnn_rnn_layer`, one call per layer and direction.

Notation of the docstrings: N tokens, I inputs, H hidden size, D directions; `ld(n)` is oneDNN's leading dimension.
Which regions of the workspace are *touched* (and so resident) in which pass was measured with torch 2.13 (oneDNN 3)
on an AVX2 machine; the sizes of the regions are in oneDNN's src/cpu/rnn/rnn_utils.hpp.
"""

from oomguard._estimate.call import Call, Footprint, maximum, where
from oomguard._estimate.malloc import in_heap


def leading(width: int) -> int:
    """oneDNN's leading dimension of a row of floats: a multiple of 16, but no multiple of 256, for the cache's sake.

    rnn_utils.hpp, `get_good_ld`, oneDNN 3.
    """
    padded = (width + 15) // 16 * 16
    return padded + 16 if padded % 256 == 0 else padded


STALE = 4
"""One in this many bytes that oneDNN does not touch in its block, in glibc's own heap, is on a page that earlier blocks
touched (0.07 to 0.4 of them in the second step of 4 LSTMs)."""


def footprint(call: Call, *, heap: str = "tight") -> Footprint:
    """Footprint of one layer with one or two directions.

    Per token and direction, in floats, with `M = ld(max(I, H))`:
    - kept: output H + gates ld(4H) + cell states ld(H), and with two directions one M;
    - forward: scratch gates ld(4H);
    - backward: scratch gates ld(4H) + states and their gradients 3M + ld(H) + the input's gradient I, and with two
      directions H, the contiguous copy of this direction's part of the gradient; one direction runs after the other.

    Beside the gradients, weights are copied into padded rows and their gradients made there: 2 x (I+H) x ld(4H).
    Limits: without projection, fp32; measured within 1 % for H from 100 to 512 and I from 8 to 512.
    """
    hidden, inputs, both = call.hidden, call.inputs, call.directions == 2
    gates, widest = leading(4 * hidden), leading(max(inputs, hidden))
    kept = call.tokens * (hidden + gates + leading(hidden) + (widest if both else 0))
    block = call.tokens * (gates + 10 * widest)  # 10: by the sizes from which glibc maps it (9 to 11, rows `tune`)
    if heap == "system":
        kept = kept + where(in_heap(4 * block, heap), maximum(block - kept, 0) // STALE, 0)
    backward = gates + 3 * widest + leading(hidden) + inputs + (hidden if both else 0)
    gradients = 4 * call.directions * 4 * hidden * (inputs + hidden + 2)
    return Footprint(
        kept=4 * kept * call.directions,
        keeps_output=not both,
        forward=4 * call.tokens * gates,
        backward=4 * call.tokens * backward,
        weight_gradients=gradients + 2 * 4 * gates * (inputs + hidden),
        inference=4 * call.tokens * (gates + 2 * hidden if both else widest),
        scratch=4 * call.tokens * gates,
        block=4 * block,
    )
