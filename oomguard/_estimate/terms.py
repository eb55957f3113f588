"""The terms of an estimate that do not depend on the engine: one pure function each, bytes throughout.

Counts may be NumPy arrays. Notation: T steps, B microbatch, N = T*B tokens, V vocabulary, O outputs.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from heapq import heapreplace

import numpy as np

from oomguard._estimate.call import GATES, Count, Ints, Knobs
from oomguard._spec.spec import MAX_BATCH, Spec

Shape = tuple[int, ...]
SCALER_BYTES = 3 * 512
"""GradScaler's scale, growth counter and found_inf, a block each; it unscales gradients in place, without copies."""
QUANTILE_BLOCK = 256  # elements per scale of an 8-bit state: bitsandbytes 0.45 and torchao 0.18, blockwise
QUANTISED_FROM = 4096  # elements; smaller tensors keep a 32-bit state: bitsandbytes 0.45 (min_8bit_size), torchao 0.18
UPDATED_PIECE = 1 << 18  # elements of a weight that `_adam8bit` updates at once
PIECE_COPIES = 14  # fp32 copies of such a piece while it is updated; measured with torchao 0.18: 13.3
TORCHAO_BYTES = 12 << 20  # resident bytes of torchao 0.18, imported beside an optimizer of torch 2.13: 11.7 MiB

STATES_PER_WEIGHT = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1, "adam8bit": 2}
FOREACH_COPIES = {"sgd": 0, "sgd-momentum": 0, "adam": 1, "adamw": 1, "rmsprop": 1, "adagrad": 2, "adafactor": 1}
"""Copies of all gradients that a foreach step makes; measured with torch 2.13, as are `LOOP_COPIES`."""
LOOP_COPIES = {"adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1, "adafactor": 1}
"""Copies of one tensor when the optimizer takes one after the other."""


def parameters(spec: Spec) -> dict[str, list[Shape]]:
    """Shapes of the weights of every part, in the order PyTorch has them; tied weights count once, as the embedding."""
    parts: dict[str, list[Shape]] = {}
    if spec.vocab is not None:
        parts["embedding"] = [(spec.vocab, spec.inputs)]
    rows, output = GATES[spec.cell] * spec.hidden, spec.projection or spec.hidden
    for layer in range(spec.layers):
        inputs = spec.inputs if layer == 0 else spec.width
        direction: list[Shape] = [(rows, inputs), (rows, output), (rows,), (rows,)]
        if spec.projection:
            direction.append((spec.projection, spec.hidden))
        norm: list[Shape] = [(spec.width,), (spec.width,)] if spec.layer_norm else []
        parts[f"layer{layer}"] = direction * spec.directions + norm
    weight: list[Shape] = [] if spec.tied else [(spec.classes, spec.width)]
    parts["head"] = [*weight, (spec.classes,)]
    return parts


def elements(shapes: list[Shape]) -> int:
    """The number of elements of all tensors with these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def weights_bytes(spec: Spec) -> int:
    """All weights in fp32, trained or not: `4 x elements`. Mixed precision keeps them too, as master weights."""
    return 4 * sum(elements(shapes) for shapes in parameters(spec).values())


def gradients_bytes(spec: Spec) -> dict[str, int]:
    """The gradient of each part, fp32: `4 x elements` of what is trained; a sparse one is `sparse_gradient_bytes`."""
    return {
        part: 0 if part in spec.frozen or (part == "embedding" and spec.sparse_embedding) else 4 * elements(shapes)
        for part, shapes in parameters(spec).items()
    }


def sparse_gradient_bytes(spec: Spec) -> int:
    """A sparse embedding's gradient of the whole batch: an index and a row for every token, `T x batch x (8 + 4 E)`.

    Rows of one token are only summed when the optimizer coalesces them.
    """
    if not spec.sparse_embedding or "embedding" in spec.frozen:
        return 0
    return spec.steps * spec.batch * (8 + 4 * spec.inputs)


def trained(spec: Spec) -> list[Shape]:
    """Shapes of all trained weights, in order."""
    return [shape for part, shapes in parameters(spec).items() if part not in spec.frozen for shape in shapes]


def divide(sizes: Sequence[int], shards: int) -> list[int]:
    """The process that keeps the state of each weight, by the elements of the weights: shares are about equal.

    From the largest weight on, each goes to the process that has least. Process 0 has the largest share.
    """
    shares, owners = [(0, shard) for shard in range(shards)], [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size, owners[index] = shares[0]
        heapreplace(shares, (size + sizes[index], owners[index]))
    turns = {shard: turn for turn, (_, shard) in enumerate(sorted(shares, key=lambda share: (-share[0], share[1])))}
    return [turns[owner] for owner in owners]


def largest_share(spec: Spec, shards: Count, size_of: Callable[[list[Shape]], int]) -> Count:
    """The largest size of the trained weights of any of the processes that share the optimizer's state."""
    if isinstance(shards, np.ndarray):
        values, rows = np.unique(shards, return_inverse=True)
        return np.array([largest_share(spec, int(value), size_of) for value in values], dtype=np.int64)[rows]
    shapes = trained(spec)
    if shards == 1:
        return size_of(shapes)
    shares: dict[int, list[Shape]] = {}
    for shape, owner in zip(shapes, divide([*map(math.prod, shapes)], int(shards)), strict=True):
        shares.setdefault(owner, []).append(shape)
    return max(map(size_of, shares.values()), default=0)


def optimizer_bytes(spec: Spec, candidate: Knobs) -> Count:
    """The optimizer's state between steps: that of all trained weights, or the largest share of a process.

    SGD none; momentum, RMSprop, Adagrad one fp32 number per weight; Adam two; Adafactor a row and a column of each
    matrix; in 8 bits one byte instead of four, and a scale for every 256, except for tensors of less than 4,096
    elements or not of whole blocks.
    """

    def state_bytes(shapes: list[Shape]) -> int:
        if spec.optimizer == "adafactor":
            return sum(4 * sum(shape) for shape in shapes)
        states = STATES_PER_WEIGHT[spec.optimizer]
        if in_8_bits(spec, candidate):
            sizes = [math.prod(shape) for shape in shapes]
            return states * sum(n + 4 * (n // QUANTILE_BLOCK) if is_quantised(n) else 4 * n for n in sizes)
        return states * 4 * elements(shapes)

    return largest_share(spec, candidate.shards, state_bytes)


def in_8_bits(spec: Spec, candidate: Knobs) -> bool:
    """Whether the optimizer's state is kept in 8 bits."""
    return spec.optimizer == "adam8bit" or bool(candidate.state_8bit)


def is_quantised(count: int) -> bool:
    """Whether the state of a weight with so many elements is kept in 8 bits, if others are.

    torchao keeps weights that are not of whole blocks in 32 bits; bitsandbytes does not, and then needs a little less.
    """
    return count >= QUANTISED_FROM and count % QUANTILE_BLOCK == 0


def update_bytes(spec: Spec, candidate: Knobs) -> Count:
    """Temporary copies during the optimizer step.

    foreach works on all gradients at once (`FOREACH_COPIES`). One after the other, a tensor needs `LOOP_COPIES` of its
    own size while the one before it still has its last: `max(copies x n_i + n_(i-1))`. Fused needs none. With a state
    in 8 bits, a piece of a weight is updated at a time.
    """

    def copies_bytes(shapes: list[Shape]) -> int:
        if in_8_bits(spec, candidate):
            return PIECE_COPIES * 4 * min(UPDATED_PIECE, max(map(math.prod, shapes)))
        if candidate.update == "foreach" and spec.optimizer in FOREACH_COPIES:
            return FOREACH_COPIES[spec.optimizer] * 4 * elements(shapes)
        if candidate.update == "fused" or spec.optimizer not in LOOP_COPIES:
            return 0
        sizes = [0, *(math.prod(shape) for shape in shapes)]
        return 4 * max(LOOP_COPIES[spec.optimizer] * size + before for before, size in itertools.pairwise(sizes))

    return largest_share(spec, candidate.shards, copies_bytes)


def input_bytes(spec: Spec, candidate: Knobs) -> Count:
    """One microbatch on the device: features in fp32 or tokens in int64, and its targets.

    `N x (4 I or 8) + targets x (4 O or 8)`, with N targets per step or B at the last.
    """
    tokens = spec.steps * candidate.microbatch  # padded: packing is done on the way into the kernel
    targets = tokens if spec.head == "per-step" else candidate.microbatch
    target_bytes = 8 if spec.loss == "cross-entropy" else 4 * spec.classes
    return tokens * (8 if spec.vocab else 4 * spec.inputs) + targets * target_bytes


def longest_tokens(spec: Spec, microbatch: Count) -> Count:
    """Tokens of the worst microbatch that can come up: the longest sequences together.

    Padded to the longest, T x B: padding is computed too. Packed, with a histogram of lengths, the sum of the B
    longest.
    """
    if not (spec.packs and spec.lengths):
        return spec.steps * microbatch
    lengths = np.array(sorted(spec.lengths, reverse=True))
    counts = np.array([min(spec.lengths[int(length)], MAX_BATCH) for length in lengths])  # more make no difference
    sequences, tokens = np.cumsum(counts), np.cumsum(counts * lengths)
    rank = np.minimum(np.searchsorted(sequences, microbatch), len(lengths) - 1)
    missing = sequences[rank] - microbatch  # negative if there are too few sequences: then the shortest are repeated
    total = tokens[rank] - missing * lengths[rank]
    return total if isinstance(microbatch, np.ndarray) else int(total)


def logits_bytes(spec: Spec, predictions: Count, element_bytes: Count) -> tuple[Count, Count]:
    """The head's outputs with the loss's own buffers: at the loss's peak, and when the head's backward begins.

    Cross-entropy keeps the log-softmax in fp32 and makes two gradients of that size (of the negative log-likelihood,
    of the log-softmax); the mean squared error keeps the outputs and makes one. Then one gradient is left.
    """
    single = predictions * spec.classes
    if spec.loss == "cross-entropy":
        return 12 * single, element_bytes * single
    return (4 + element_bytes) * single, element_bytes * single


def loader_bytes(spec: Spec, candidate: Knobs, *, pinned: bool) -> Count:
    """Host memory of the input pipeline: every worker has `prefetch` microbatches ready and one in the making.

    Pinned memory is rounded up to a power of two (pytorch issues 95823 and 150517).
    """
    microbatch = input_bytes(spec, candidate)
    return candidate.workers * (candidate.prefetch + 1) * (power_of_two(microbatch) if pinned else microbatch)


def power_of_two(size: Count) -> Count:
    """The next power of two; a power of two stays."""
    if isinstance(size, np.ndarray):
        mantissa, exponent = np.frexp(size.astype(np.float64))
        exponents: Ints = (exponent - (mantissa == 0.5)).astype(np.int64)
        return np.left_shift(np.ones_like(exponents), exponents)
    return 1 << (int(size) - 1).bit_length()
