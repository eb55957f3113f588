"""The cuDNN engine against what cuDNN 7.6.5 answered, what PyTorch 1.9.1 allocated, and what was published."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from estimate.cuda_allocator import SMALL_BYTES, Cache, Event
from hypothesis import given
from hypothesis import strategies as st

from oomguard._estimate.call import GATES, Call
from oomguard._estimate.cards import card
from oomguard._estimate.engines import cudnn
from oomguard._estimate.malloc import block_bytes
from oomguard._estimate.target import on_card

pd = pytest.importorskip("pandas", reason="pandas, of the extra dev, reads the facts")
FACTS = Path(__file__).parents[1] / "facts"
# oomguard runs dropout between the calls, so rows with dropout inside the kernel do not concern it
SIZES = pd.read_csv(FACTS / "cudnn765_sizes.csv").query("dropout == 0")
STEPS = pd.read_csv(FACTS / "torch191_steps.csv").query("dropout == 0")
PUBLISHED = pd.read_csv(FACTS / "cudnn_published.csv")
PEAKS = PUBLISHED[PUBLISHED.kind == "peak_allocated"]
RESERVES = PUBLISHED[PUBLISHED.kind == "reserve"]
WORKSPACES = PUBLISHED[PUBLISHED.kind == "workspace"]
CUBLAS_BYTES = 8_519_680
V100, A100 = on_card(card("v100")), on_card(card("a100"))
each_step_row = pytest.mark.parametrize(
    "row", list(STEPS.itertuples()), ids=lambda row: f"{row.cell}-{row.dtype}-T{row.T}-H{row.H}"
)


def call_of(row: Any) -> Call:
    """The call that a row of the 7.6.5 files describes."""
    return Call(
        cell={"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn"}[row.cell],
        steps=int(row.T),
        rows=int(row.B),
        tokens=int(row.T) * int(row.B),
        inputs=int(row.I),
        hidden=int(row.H),
        layers=int(row.layers),
        directions=1 + int(row.bidirectional),
        element_bytes={"fp16": 2, "fp32": 4}[row.dtype],
    )


def published_call(row: Any, tokens: int) -> Call:
    steps, rows = (tokens, 1) if np.isnan(row.seq) else (int(row.seq), int(row.microbatch))
    inputs, hidden, layers = int(row.input), int(row.hidden), int(row.layers)
    return Call(cell=row.cell, steps=steps, rows=rows, tokens=tokens, inputs=inputs, hidden=hidden, layers=layers)


def workspace_765_bytes(call: Call, algorithm: str = "STANDARD") -> Any:
    """The workspace by the layouts of cuDNN 7.6.5, which ours of cuDNN 9 are never below."""
    elements = cudnn.standard_elements(call) if algorithm == "STANDARD" else cudnn.persist_elements(call)
    return cudnn.layout_bytes(call, elements)


def answers() -> Any:
    """All rows of the sizes file beside our reserve and workspace."""
    calls = [call_of(row) for row in SIZES.itertuples()]
    return SIZES.assign(
        reserve=[cudnn.reserve_bytes(call) for call in calls],
        workspace=[workspace_765_bytes(call, name) for call, name in zip(calls, SIZES.algo, strict=True)],
        aligned=[call.element_bytes * call.rows * call.hidden % 16 == 0 for call in calls],
        weights=[cudnn.flat_weight_bytes(call) for call in calls],
    )


def test_weights_of_cudnn_765_are_exact() -> None:
    table = answers()
    wrong = table[table.weights != table.weight_bytes]
    assert wrong.empty, wrong.to_string()


def test_reserve_of_cudnn_765_is_exact() -> None:
    table = answers()
    wrong = table[table.reserve != table.reserve_bytes]
    assert wrong.empty, wrong.to_string()


@pytest.mark.parametrize("row", list(RESERVES.itertuples()), ids=lambda row: row.cell)
def test_published_reserve_is_exact(row: Any) -> None:
    assert cudnn.reserve_bytes(published_call(row, tokens=25_000)) == row.bytes


def test_workspace_is_never_below_cudnn_765() -> None:
    table = answers()
    low = table[table.workspace < table.workspace_bytes]
    assert low.empty, low.to_string()


def test_workspace_of_aligned_rows_is_exact() -> None:
    table = answers()
    wrong = table[table.aligned & (table.workspace != table.workspace_bytes)]
    assert wrong.empty, wrong.to_string()


def test_workspace_of_unaligned_rows_is_at_most_128_bytes_above() -> None:
    table = answers()
    high = table[table.workspace > table.workspace_bytes + 128]
    assert high.empty, high.to_string()


def test_median_overestimate_of_the_workspace_is_below_a_thousandth() -> None:
    table = answers()
    assert (table.workspace / table.workspace_bytes - 1).median() < 1e-3


@pytest.mark.parametrize("rows", [1, 8, 25, 125])  # the thread tells T x B = 25,000, not which
@pytest.mark.parametrize("row", list(WORKSPACES.itertuples()), ids=lambda row: row.cell)
def test_published_workspaces_of_an_older_cudnn_are_not_underestimated(row: Any, rows: int) -> None:
    shape = {"cell": row.cell, "inputs": row.input, "hidden": row.hidden, "layers": row.layers}
    call = Call(**shape, steps=25_000 // rows, rows=rows, tokens=25_000)
    assert workspace_765_bytes(call) >= row.bytes


@pytest.mark.parametrize(("algorithm", "workspace"), [("PERSIST_STATIC", 348_651_520), ("STANDARD", 31_719_424)])
def test_workspace_quoted_in_the_facts_is_exact(algorithm: str, workspace: int) -> None:
    call = Call(cell="lstm", steps=128, rows=64, tokens=128 * 64, inputs=512, hidden=1024, element_bytes=2)
    assert workspace_765_bytes(call, algorithm) == workspace


@each_step_row
def test_workspace_is_what_torch_191_allocated(row: Any) -> None:
    """Not part of the sizes file: the peak of forward shows the block, which holds up to 1 MiB more than asked for."""
    block = row.s1_peak_fwd - row.s1_after_fwd
    spare = 1 << 20 if block > 1 << 20 else 0
    assert block - spare <= block_bytes(workspace_765_bytes(call_of(row))) <= block + 512


def parameter_bytes(call: Call) -> list[int]:
    """The parameters one by one, as Adam sees them."""
    gate_bytes = int(call.element_bytes) * GATES[call.cell] * call.hidden
    widths = [call.inputs] + [call.hidden * call.directions] * (call.layers - 1)
    layers = [[gate_bytes * width, gate_bytes * call.hidden, gate_bytes, gate_bytes] for width in widths]
    return [size for layer in layers for size in layer * call.directions]


def input_bytes(call: Call) -> int:
    """The input of a call."""
    return int(call.element_bytes * call.tokens * call.inputs)


def forward_trace(call: Call, workspace: int) -> list[Event]:
    """The allocations of a forward call in their order. Plain numbers; no layout copies."""
    states = [(letter, int(size)) for letter, size in cudnn.state_bytes(call).items()]
    run: list[Event] = [("workspace", workspace), ("reserve", int(cudnn.reserve_bytes(call))), ("workspace", None)]
    begin, end = [(f"{letter}x", size) for letter, size in states], [(f"{letter}y", size) for letter, size in states]
    return [*begin, ("y", int(cudnn.output_bytes(call))), *end, *run]


def backward_trace(call: Call, workspace: int) -> list[Event]:
    """The allocations of a backward call after `forward_trace`, with a copied gradient of the output.

    It leaves y, hy and cy, which the caller holds, and dw, which becomes the gradient.
    """
    states = [(letter, int(size)) for letter, size in cudnn.state_bytes(call).items()]
    run: list[Event] = [("workspace", workspace), ("workspace", None)]
    begin = [(f"d{letter}y", size) for letter, size in states]
    end = [("dx", input_bytes(call)), *((f"d{letter}x", size) for letter, size in states)]
    freed = [*(name for name, _ in (*begin, *end)), "reserve", *(f"{letter}x" for letter, _ in states)]
    data, weights = ("dy", int(cudnn.output_bytes(call))), ("dw", int(cudnn.flat_weight_bytes(call)))
    return [*begin, data, *end, *run, ("dy", None), weights, *run, *((name, None) for name in freed)]


def adam_191(cache: Cache, parameters: list[int], first: bool) -> None:
    """Adam of torch 1.9.1, parameter by parameter: two moments, then `denom = exp_avg_sq.sqrt() / correction`."""
    if first:
        cache.run([(f"moment {moment} {i}", size) for i, size in enumerate(parameters) for moment in (1, 2)])
    for i, size in enumerate(parameters):
        cache.run([(f"root {i}", size), (f"denom {i}", size), (f"root {i}", None), (f"denom {i - 1}", None)])
    cache.run([(f"denom {len(parameters) - 1}", None)])


def steps_191(call: Call, workspace: int) -> dict[str, int]:
    """Three training steps of torch 1.9.1 as torch191_steps.csv measured them; step 1 and 3 are columns there.

    `zero_grad` keeps the gradients, so that from step 2 on dw is added to them and freed.
    """
    cache, columns, parameters = Cache(), {}, parameter_bytes(call)
    each = [(f"parameter {i}", size) for i, size in enumerate(parameters)]
    cache.run([*each, ("weights", int(cudnn.flat_weight_bytes(call))), *((name, None) for name, _ in each)])
    cache.run([("x", input_bytes(call))])
    columns["base_alloc"] = cache.allocated_bytes
    for step in (1, 2, 3):
        cache.restart_peak()
        columns[f"s{step}_before"] = cache.allocated_bytes
        cache.run(forward_trace(call, workspace))
        columns |= {f"s{step}_after_fwd": cache.allocated_bytes, f"s{step}_peak_fwd": cache.peak_bytes}
        cache.run([("loss", 4), ("loss gradient", 4)])
        cache.run([(("gradient" if n == "dw" and step == 1 else n), s) for n, s in backward_trace(call, workspace)])
        cache.run([("dw", None), ("loss gradient", None), ("loss", None)])
        columns[f"s{step}_peak_bwd"] = cache.peak_bytes
        adam_191(cache, parameters, first=step == 1)
        columns |= {f"s{step}_peak_step": cache.peak_bytes, f"s{step}_max_reserved": cache.reserved_bytes}
        cache.run([("y", None), ("hy", None), ("cy", None)])
    return columns


@each_step_row
def test_every_column_of_the_torch_191_steps_is_exact(row: Any) -> None:
    """The workspace is ours; where rows are not aligned, ours is a few bytes too large: then the row's own block."""
    call = call_of(row)
    workspace = workspace_765_bytes(call)
    columns = steps_191(call, min(workspace, row.s1_peak_fwd - row.s1_after_fwd))
    wrong = {name: (columns[name], getattr(row, name)) for name in columns if name in STEPS.columns}
    assert not {name: pair for name, pair in wrong.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("step", [1, 3])
@each_step_row
def test_sums_of_blocks_fall_short_by_at_most_1_mib_for_each_large_block(row: Any, step: int) -> None:
    """The closed forms, without the allocator's model: what `block_bytes` leaves out is all that they leave out."""
    call, before = call_of(row), getattr(row, f"s{step}_before")
    workspace = min(workspace_765_bytes(call), row.s1_peak_fwd - row.s1_after_fwd)
    after = before + cudnn.kept_bytes(call)
    sums = {
        "after_fwd": after,
        "peak_fwd": after + cudnn.forward_extra_bytes(call, workspace),
        "peak_bwd": after + 2 * block_bytes(4) + cudnn.backward_extra_bytes(call, workspace),
    }
    trace = dict([*forward_trace(call, workspace)[:-1], *backward_trace(call, workspace)[::-1]])
    large = sum(size is not None and size > SMALL_BYTES for size in trace.values())
    short = {name: getattr(row, f"s{step}_{name}") - got for name, got in sums.items()}
    assert all(0 <= missing <= large * SMALL_BYTES for missing in short.values()), short


def a100_peak_bytes(call: Call) -> int:
    """The study's loop: batch_first, Linear(H, 1), MSE, AdamW, 32 batches of inputs and targets on the card.

    Four times the weights (with gradients and moments), and two cuBLAS workspaces: one for each thread's handle,
    since backward runs in a thread of its own. In backward the head has left the output's gradient.
    """
    weights = block_bytes(cudnn.flat_weight_bytes(call)) + 2 * block_bytes(4 * call.hidden)
    target_bytes = block_bytes(4 * call.tokens)
    batches = 32 * (cudnn.input_copy_bytes(call) + target_bytes)
    resident = 4 * weights + batches + 2 * CUBLAS_BYTES + cudnn.kept_bytes(call)
    forward, backward = (
        cudnn.workspace_bytes(call, cudnn.is_persistent(call, A100, half=False, backward=backward))
        for backward in (False, True)
    )
    ahead = resident + cudnn.forward_extra_bytes(call, forward, input_copied=True)
    back = resident + cudnn.backward_extra_bytes(call, backward, input_copied=True)
    return int(max(ahead, back + block_bytes(cudnn.output_bytes(call)) + target_bytes))


@pytest.mark.parametrize("row", list(PEAKS.itertuples()), ids=lambda row: f"{row.cell}-H{row.hidden}")
def test_published_a100_peak_is_within_1_percent(row: Any) -> None:
    peak = a100_peak_bytes(published_call(row, tokens=int(row.seq * row.microbatch)))
    assert abs(peak / row.bytes - 1) < 0.01


def test_forward_and_backward_algorithms_differ_between_their_limits() -> None:
    call = Call(cell="gru", steps=10, rows=8, tokens=80, inputs=9, hidden=160)
    forward, backward = (cudnn.is_persistent(call, A100, half=False, backward=back) for back in (False, True))
    assert (forward, backward) == (True, False)


@pytest.mark.parametrize(
    ("change", "persistent"),
    [
        ({}, True),
        ({"rows": 12}, False),
        ({"rows": 136}, False),
        ({"cell": "gru"}, False),
        ({"layers": 2}, False),
        ({"inputs": 100}, False),
        ({"packed": True}, False),
        ({"projection": 128}, False),
        ({"hidden": 128}, True),
    ],
)
def test_fp16_on_an_a100_is_persistent_only_for_some_shapes(change: dict[str, Any], persistent: bool) -> None:
    call = Call(cell="lstm", steps=100, rows=64, tokens=6400, inputs=128, hidden=512, element_bytes=2)
    assert cudnn.is_persistent(replace(call, **change), A100, half=True, backward=False) == persistent


def test_bf16_is_not_persistent() -> None:
    call = Call(cell="lstm", steps=100, rows=64, tokens=6400, inputs=128, hidden=512, element_bytes=2)
    assert not cudnn.is_persistent(call, A100, half=False, backward=False)


@pytest.mark.parametrize("algorithm", ["STANDARD", "PERSIST_STATIC"])
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_workspace_of_cudnn_9_is_not_below_that_of_7(cell: str, algorithm: str) -> None:
    for directions, inputs, steps in [(1, 8, 3), (2, 8, 3), (1, 900, 500), (2, 900, 500)]:
        call = Call(
            cell=cell, steps=steps, rows=8, tokens=8 * steps, inputs=inputs, hidden=64, layers=2, directions=directions
        )
        assert cudnn.workspace_bytes(call, algorithm != "STANDARD") >= workspace_765_bytes(call, algorithm)


def test_packing_never_needs_more_than_padding() -> None:
    padded = Call(cell="lstm", steps=50, rows=7, tokens=350, inputs=9, hidden=31, layers=3, directions=2)
    packed = replace(padded, tokens=200, packed=True)
    assert cudnn.kept_bytes(packed) <= cudnn.kept_bytes(padded)


counts = st.tuples(st.integers(1, 2000), st.integers(1, 300))
models = st.fixed_dictionaries(
    {
        "cell": st.sampled_from(["rnn", "gru", "lstm"]),
        "inputs": st.sampled_from([1, 7, 128, 1024]),
        "hidden": st.sampled_from([1, 17, 128, 160, 512]),
        "layers": st.integers(1, 5),
        "directions": st.integers(1, 2),
        "packed": st.booleans(),
        "element_bytes": st.sampled_from([2, 4]),
    }
)


def everything(call: Call, half: bool) -> list[Any]:
    """Every function of counts, on one call."""
    chosen = [
        cudnn.is_persistent(call, card, half=half, backward=back) for card in (A100, V100) for back in (False, True)
    ]
    workspaces = [cudnn.workspace_bytes(call, persistent) for persistent in chosen]
    back = cudnn.backward_extra_bytes(call, workspaces[1], input_copied=True)
    ahead = cudnn.forward_extra_bytes(call, workspaces[0], input_copied=True)
    return [*chosen, *workspaces, back, ahead, cudnn.reserve_bytes(call), cudnn.kept_bytes(call)]


@given(model=models, half=st.booleans(), many=st.lists(counts, min_size=1, max_size=20))
def test_arrays_give_the_same_as_one_at_a_time(model: dict[str, Any], half: bool, many: list[tuple[int, int]]) -> None:
    steps, rows = (np.array(column) for column in zip(*many, strict=True))
    call = Call(steps=steps, rows=rows, tokens=steps * rows, **model)
    together = [np.broadcast_to(value, len(many)).tolist() for value in everything(call, half)]
    singles = [everything(Call(steps=t, rows=b, tokens=t * b, **model), half) for t, b in many]
    assert together == [list(column) for column in zip(*singles, strict=True)]


@given(model=models, half=st.booleans(), count=counts)
def test_plain_numbers_give_plain_numbers(model: dict[str, Any], half: bool, count: tuple[int, int]) -> None:
    steps, rows = count
    call = Call(steps=steps, rows=rows, tokens=steps * rows, **model)
    assert all(isinstance(value, int) for value in everything(call, half))
