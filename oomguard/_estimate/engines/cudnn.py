"""cuDNN, the engine of every recurrent layer on a CUDA card: what a call keeps, and what it needs while it runs.

Notation of the docstrings: e bytes of an element, N tokens, T steps, B rows, I inputs, H hidden size, L layers,
D directions, g gates; `u = e*N*H*D`, the bytes of one output; R16 rounds up to 16 bytes. PyTorch's part was read in
aten/src/ATen/native/cudnn/RNN.cpp (torch 2.8; 1.9.1 and 2.15 make the same allocations).
"""

from oomguard._estimate.call import GATES, Call, Count, Flag, Footprint, maximum, minimum, round_up, where
from oomguard._estimate.malloc import block_bytes
from oomguard._estimate.target import Target

MAX_STEPS = 65_535  # more gives CUDNN_STATUS_NOT_SUPPORTED, not an out-of-memory error: pytorch issue 133751
STANDARD_UNITS = 3  # workspace in u, A100, cuDNN 9.1, 4 layers: HanXuxx/RNN_kernel docs/a100_baseline_study.md
PERSIST_UNITS = {"gru": 19, "lstm": 21, "rnn": 13}  # as above, for SMALL_H; rnn is a guess: 12 in 7.6.5, and one more
STATES = {"gru": 13, "lstm": 20, "rnn": 5}  # states beside them in cuDNN 9: assumed, a bound of 7.6.5's


def reserve_bytes(call: Call) -> Count:
    """The buffer that a call in training mode keeps from forward to backward.

    RNN `R16(uL)`, LSTM `R16(4uL) + R16(uL)`, GRU `R16(6uL)`, all `+ R16(u(L-1))` for the outputs of the inner
    layers. Dropout inside the kernel would add its masks; oomguard runs dropout between calls.

    Exact on 4,302 answers of cuDNN 7.6.5; cuDNN 9's published peaks agree. With a projection nothing is published: the
    formula assumes that u*L more is kept, the outputs before they are projected.
    """
    layers = call.layers
    unit = call.element_bytes * call.tokens * (call.hidden * call.directions)
    kept = {"rnn": (1,), "gru": (6,), "lstm": (4, 1)}[call.cell]
    if call.projection:
        kept = (*kept, 1)
    return sum(round_up(unit * (k * layers), 16) for k in kept) + round_up(unit * (layers - 1), 16)


def is_persistent(call: Call, card: Target, *, half: bool, backward: bool) -> Flag:
    """Whether PyTorch picks a persistent algorithm (`get_algo`) instead of STANDARD.

    That is PERSIST_STATIC_SMALL_H for small H, and PERSIST_STATIC for some calls in fp16 (`half`; not in bf16).
    Forward and backward can differ, since their limits of H do.
    """
    assert card.capability is not None
    if call.packed or call.projection:
        return False
    limit = (256 if backward else 384) if call.cell == "rnn" else (128 if backward else 192)
    if call.hidden <= limit and card.capability >= (6, 0):
        return True
    return half and _is_persist_static(call, card.capability, card.multiprocessors or 0)


def _is_persist_static(call: Call, capability: tuple[int, int], multiprocessors: int) -> Flag:
    """Whether fp16 runs PERSIST_STATIC: `use_persist_common_heuristics` and `use_persist_device_heuristics`."""
    (major, minor), rows, steps = capability, call.rows, call.steps
    if call.layers > 1 or call.directions > 1 or call.hidden > 1024 or call.hidden % 128 or call.inputs % 128:
        return False
    if major == 7 and minor != 5:
        suitable = ((rows % 16 == 0) & (rows != 80) & (rows != 112)) | (rows == 8)
        long_enough = ((steps >= 40) & (rows <= 128)) | ((steps >= 20) & (rows <= 96)) | ((steps >= 10) & (rows <= 32))
        return suitable & long_enough
    if major < 8 or multiprocessors < 98 or minor == 6 or call.cell == "gru":
        return False
    limit = 128 if call.cell == "lstm" or call.hidden < 896 else 95
    return (rows % 8 == 0) & (rows <= limit)


def workspace_bytes(call: Call, persistent: Flag) -> Count:
    """Scratch memory of a forward or backward call in training mode, freed when it returns.

    cuDNN 9: STANDARD `3u`, PERSIST_STATIC_SMALL_H `19u` (GRU) or `21u` (LSTM), and `STATES*L*D*D*H*B`: published for 4
    layers, one direction, I < H and long sequences. Assumed: 13u for RNN; no dependence on L; 2 directions as u grows;
    PERSIST_STATIC like SMALL_H; never less than 7.6.5, which counts for short sequences, wide inputs, 2 directions.
    Not known at all: bf16. A probe on the card calibrates these.
    """
    width = call.hidden * call.directions
    states = call.rows * (width * call.layers * call.directions * STATES[call.cell])
    standard = maximum(standard_elements(call), states + call.tokens * (STANDARD_UNITS * width))
    persist = maximum(persist_elements(call), states + call.tokens * (PERSIST_UNITS[call.cell] * width))
    return layout_bytes(call, where(persistent, persist, standard))


def layout_bytes(call: Call, elements: Count) -> Count:
    """`R16(e * (weight matrices + layout))`, and 112 bytes more where e*B*H is no multiple of 16: there each of at most
    seven pieces is rounded by itself.

    With the layouts of 7.6.5: to the byte on 619 of its 719 answers (the aligned ones), at most 128 bytes above on the
    others.
    """
    unaligned = (call.element_bytes * call.rows * call.hidden) & 15 != 0
    return round_up(call.element_bytes * (elements + round_up(matrix_elements(call), 8)), 16) + 112 * unaligned


def standard_elements(call: Call) -> Count:
    """7.6.5's STANDARD, the larger of two layouts (they look like the forward and the backward pass), in elements.

    With a burst of c = min(T, k1 + k2*L) steps whose input products are computed at once (`_burst`):
    gates:   `H*D * ((10|16 + 2D)*L*B + g*c*B) + H*N * (4 if D=2)`, GRU | LSTM, never RNN
    outputs: `H*D * (2|4 + 2D)*L*B + (D=1: max(I,H)*N + H*c*B; D=2: 4*max(I,H)*N + 2*H*N, 4*H*N if L > 1)`
    Assumed with a projection: one output more.
    """
    directions, hidden, burst = call.directions, call.hidden, _burst(call)
    width, wide, lstm = hidden * directions, max(call.inputs, hidden), call.cell == "lstm"
    elements = call.rows * (width * call.layers * ((4 if lstm else 2) + 2 * directions))
    if directions == 1:
        elements = elements + call.tokens * wide + burst * hidden
    else:
        elements = elements + call.tokens * (4 * wide + hidden * (2 + 2 * (call.layers > 1)))
    if call.cell != "rnn":
        states = call.rows * (width * call.layers * ((16 if lstm else 10) + 2 * directions))
        tokens = call.tokens * (hidden * (4 if directions == 2 else 0))
        elements = maximum(elements, states + burst * (width * GATES[call.cell]) + tokens)
    return elements + call.tokens * width if call.projection else elements


def persist_elements(call: Call) -> Count:
    """7.6.5's PERSIST_STATIC, the larger of two layouts, in elements; `H*D * (1|3 + D)*L*B` for states, and

    gates:   `H*N * ((4+D)*g + (4 if D=2))`, GRU | LSTM
    outputs: `D*D*max(I,H)*N + H*N * (x + D + (D if L > 1))`, x = 9 for RNN, 14 for GRU.
    LSTM shows the first in all answers (I up to 1.6 H), so that its x is at most 16: 16 is assumed.
    """
    directions, hidden = call.directions, call.hidden
    slots = call.layers * directions
    states = hidden * slots * ((3 if call.cell == "lstm" else 1) + directions)
    kept = {"rnn": 9, "gru": 14, "lstm": 16}[call.cell] + directions * (1 + (call.layers > 1))
    tokens = directions**2 * max(call.inputs, hidden) + hidden * kept
    if call.cell != "rnn":
        extra = 4 if directions == 2 else 0
        tokens = max(tokens, hidden * ((4 + directions) * GATES[call.cell] + extra))
    return call.rows * states + call.tokens * tokens


def _burst(call: Call) -> Count:
    """Tokens whose input products are computed at once: `min(N, (k1 + k2*L)*B)`.

    k1, k2 = 32, 32 at B = 1; 16, 16 at 8; 8, 4 from 20 to 64; 8, 2 at 128 and 256. Between, and for packed input,
    nothing is known: the larger is assumed.
    """
    rows, layers = call.rows, call.layers
    steps = 8 + 2 * layers + where(rows < 128, 2 * layers, 0) + where(rows < 20, 8 + 12 * layers, 0)
    return minimum(call.tokens, (steps + where(rows < 8, 16 * (1 + layers), 0)) * rows)


def matrix_elements(call: Call) -> int:
    """Elements of all weight matrices, without biases: `g*H*(in + P)` for each layer and direction, P = H if not
    projected, plus `P*H` if projected."""
    gates, out, directions = GATES[call.cell], call.output, call.directions
    inputs = directions * call.inputs + directions * (call.layers - 1) * directions * out
    slots = directions * call.layers
    projection = slots * out * call.hidden if call.projection else 0
    return gates * call.hidden * (inputs + slots * out) + projection


def flat_weight_bytes(call: Call) -> Count:
    """The flat buffer that holds all weights and biases of the call; the parameters are views into it.

    Its gradient is one such buffer too. Biases are in it even if the module has none. Under autocast PyTorch makes
    another in the lower precision (`_cudnn_rnn_cast_reflatten`), kept until backward: take `element_bytes` 2.
    """
    biases = 2 * GATES[call.cell] * call.hidden * call.layers * call.directions
    return call.element_bytes * (matrix_elements(call) + biases)


def kept_bytes(call: Call) -> Count:
    """Bytes that a call in training mode keeps until backward: `hx + cx + y + hy + cy + reserve`, in blocks.

    hx and cx are the zeros that the module makes if it is given no state. The input is kept by whoever made it.
    """
    return 2 * _states_bytes(call) + block_bytes(output_bytes(call)) + block_bytes(reserve_bytes(call))


def forward_extra_bytes(call: Call, workspace: Count, *, input_copied: bool = False) -> Count:
    """Bytes that forward needs besides `kept_bytes`: the workspace and, for batch_first, a copy of the input."""
    return block_bytes(workspace) + (input_copy_bytes(call) if input_copied else 0)


def backward_extra_bytes(
    call: Call, workspace: Count, *, input_copied: bool = False, gradient_copied: bool = True
) -> Count:
    """Bytes that backward needs at its peak besides `kept_bytes` and the incoming gradient of the output.

    `dhy + dcy + dx + dhx + dcx + workspace + x copy + max(dy copy, dw)`: first the data gradient runs, then the weight
    gradient. PyTorch makes dx even if nobody needs it, and zeros for the gradients of the final states if they have
    none. It copies dy with batch_first, and where dy is an expanded scalar (`out.sum()`). dw is one flat buffer
    (`flat_weight_bytes`) that afterwards *is* the `.grad` of the parameters if they had none
    (`zero_grad(set_to_none=True)`); if they had, it is added to them and freed: do not count the gradients twice.
    """
    inputs = input_copy_bytes(call) * (2 if input_copied else 1)  # dx, and perhaps a copy of x
    weights = block_bytes(flat_weight_bytes(call))
    phase = maximum(weights, block_bytes(output_bytes(call))) if gradient_copied else weights
    return 2 * _states_bytes(call) + inputs + block_bytes(workspace) + phase


def input_copy_bytes(call: Call) -> Count:
    """A contiguous copy of the input: with batch_first (not packed), in forward and again in backward."""
    return block_bytes(call.element_bytes * call.tokens * call.inputs)


def state_bytes(call: Call) -> dict[str, Count]:
    """One hidden state of all layers and directions and, for LSTM, one cell state, by the letter of its name."""
    slots = call.element_bytes * call.rows * (call.layers * call.directions)
    hidden = {"h": slots * call.output}
    return {**hidden, "c": slots * call.hidden} if call.cell == "lstm" else hidden


def _states_bytes(call: Call) -> Count:
    return sum(block_bytes(size) for size in state_bytes(call).values())


def output_bytes(call: Call) -> Count:
    """The output, and also its gradient: u, less with a projection."""
    return call.element_bytes * call.tokens * (call.output * call.directions)


def footprint(call: Call, card: Target, *, half: bool, batch_first: bool) -> Footprint:
    """Footprint of one call. The weights that half precision casts are not part of it."""
    forward, backward = (
        workspace_bytes(call, is_persistent(call, card, half=half, backward=late)) for late in (False, True)
    )
    copied = batch_first and not call.packed
    ahead = forward_extra_bytes(call, forward, input_copied=copied)
    gradients = block_bytes(flat_weight_bytes(call))
    return Footprint(
        kept=kept_bytes(call),
        keeps_output=True,
        forward=ahead,
        backward=backward_extra_bytes(call, backward, input_copied=copied, gradient_copied=copied) - gradients,
        weight_gradients=gradients,
        inference=ahead,
    )
