"""What a plan says, and that a page says it too."""

import re
from html import unescape
from typing import Literal

import msgspec
import pytest
from plan.making import EVERY, bucketed, fronted, lossy, measured, reckoned, record, shorter

from oomguard._core.units import GIB, MIB, format_bytes
from oomguard._plan.find import AIMS as SEARCHED
from oomguard._plan.value import Plan, Reach, Shortfall, Way
from oomguard._report.notebook import to_html
from oomguard._report.page import plan_page
from oomguard._report.plan import AIMS, ENDED, explain, explain_shortfall, plan_json, summarize, train_command
from oomguard._report.tables import Section, Table
from oomguard._report.words import candidate_words, speed_words
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

every_plan = pytest.mark.parametrize("kind", EVERY)


def text(sections: list[Section]) -> str:
    """All words of some sections."""
    return "\n".join(
        line
        for section in sections
        for line in (
            section.title,
            *section.sentences,
            *([] if section.table is None else map(" ".join, (section.table.header, *section.table.rows))),
            *section.lines,
        )
    )


def titled(plan: Plan, title: str) -> Section:
    return next(section for section in explain(plan) if section.title == title)


@every_plan
def test_every_kind_of_plan_is_explained(kind: str) -> None:
    titles = [section.title for section in explain(EVERY[kind]())]
    assert titles[0].startswith("Plan for lstm 64 → 256 × 2 layers, T = ")
    assert {"Why", "Memory", "Evidence", "Time", "Fallbacks", "Environment"} <= {*titles}


@every_plan
def test_every_sentence_is_one(kind: str) -> None:
    sentences = [sentence for section in explain(EVERY[kind]()) for sentence in section.sentences]
    assert [
        each for each in sentences if not re.match(r"[A-Z\d]|bf16", each) or each[-1] not in ".:" or ".." in each
    ] == []


def test_the_result_comes_first_and_is_short() -> None:
    first = summarize(measured())[0]
    assert first.title == "Plan for lstm 64 → 256 × 2 layers, T = 10,000, batch 32 on a100-80gb"
    assert first.sentences == (
        "Microbatch 32 × 1 pass, fp32, engine cudnn, allocator system.",
        "Peak 618.00 MiB of 79.14 GiB (measured, 1 pass at full length), 21.5 s per step, 1.49 sequences/s.",
        "Plain PyTorch would need 6.23 GiB: it fits too.",
    )


def test_a_summary_has_no_tables() -> None:
    assert all(section.table is None for section in summarize(measured()))


def unrun(plan: Plan) -> Plan:
    """As if another candidate had run."""
    return msgspec.structs.replace(plan, record=None)


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        (reckoned(), "(by arithmetic alone)."),
        (shorter(), "(predicted; measured only with T = 500, 5 % of the full length), about 20.0 s per step,"),
        (shorter(reckoned(seq=1_000_000)), "(predicted; measured only with T = 500, less than 1 % of the full length)"),
        (measured(record=None), "(predicted from 1 probe of other candidates)"),
        (
            unrun(shorter()),
            "(predicted from 1 probe of other candidates, the longest with T = 500, 5 % of the full length)",
        ),
    ],
)
def test_a_peak_says_how_it_is_known(plan: Plan, how: str) -> None:
    assert how in summarize(plan)[0].sentences[1]


@pytest.mark.parametrize(
    ("peak_bytes", "margin_bytes", "phrase"),
    [
        (900 * GIB, GIB, "would need 900.00 GiB: it does not fit."),
        (79 * GIB, GIB, "with the margin of error: it may not fit."),
        (GIB, GIB, "but cudnn cannot run 10,000 steps at once."),
    ],
)
def test_what_is_wrong_with_plain_pytorch_is_told(peak_bytes: int, margin_bytes: int, phrase: str) -> None:
    plan = reckoned()
    expected = msgspec.structs.replace(plan.plain.expected, peak_bytes=peak_bytes, margin_bytes=margin_bytes)
    plain = msgspec.structs.replace(plan.plain, fits=False, expected=expected)
    assert phrase in text(summarize(msgspec.structs.replace(plan, plain=plain)))


def test_a_plan_for_several_processes_is_started_with_as_many() -> None:
    alone = measured()
    shared = measured(candidate=msgspec.structs.replace(alone.candidate, shards=2))
    assert train_command(alone, "a b.json") == "oomguard train 'a b.json' --data FILE"
    assert train_command(shared, "p.json") == "torchrun --nproc-per-node 2 -m -- oomguard train p.json --data FILE"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (shorter(), "T = 500, not at full length. There was no time for that: raise --timeout to have it measured."),
        (measured(record=None, ended="max-probes"), "raise --max-probes to have it measured."),
        (measured(record=None, ended="interrupted"), "The search was interrupted: run it again"),
        (measured(), "1 probe took too long and was ended: raise --timeout to let it finish."),
    ],
)
def test_a_plan_that_was_not_run_whole_says_why_and_what_to_do(plan: Plan, words: str) -> None:
    for sections in (summarize(plan), explain(plan)):
        assert words in text(sections)


def test_a_time_is_told_with_its_spread_if_it_is_noisy() -> None:
    quiet, noisy = measured(time_spread=0.04), measured(time_spread=0.15)
    assert ", 21.5 s per step," in text(summarize(quiet))
    assert ", about 21.5 s ±15 % per step," in text(summarize(noisy))
    assert "takes about 21.5 s ±15 %:" in text([titled(noisy, "Time")])
    assert "±15 % is how much repeated times of a step differ here" in text([titled(noisy, "Time")])
    assert "±" not in text(explain(quiet))
    assert "21.5 s ±15 %" in plan_page(noisy)
    assert '"time_spread": 0.15' in plan_json(noisy)
    assert ", about 21.5 s ±100 % and more per step," in text(summarize(measured(time_spread=6.6)))


@pytest.mark.parametrize(
    ("steps", "bound", "words"),
    [
        (10_000, "memory", "Longer sequences are predicted to need too much memory."),
        (10_000, "step-time", "Longer sequences are predicted to take more than 1 min 0 s per step (--step-time)."),
        (20_000, "memory", "These are the longest that ran. Up to T = 20,000 may fit: raise --timeout to try."),
    ],
)
def test_what_ends_longer_sequences_is_told(steps: int, bound: Literal["memory", "step-time"], words: str) -> None:
    plan = measured(maximize=("seq",), reach=Reach(steps=steps, bound=bound, step_seconds=60.0))
    assert words in text(summarize(plan))
    assert "Goal: the longest sequences that fit." in text(explain(plan))


def test_an_exact_plan_says_that_its_gradient_is() -> None:
    assert "the gradient is that of plain PyTorch" in text([titled(measured(), "Why")])


def test_a_lossy_knob_says_what_it_bought() -> None:
    why = text([titled(lossy(), "Why")])
    assert (
        "bf16 is lossy. Compared with the best candidate without it (microbatch 32 × 1 pass, 7 segments, fp32," in why
    )
    assert "it brings 1.80 times the speed and a peak that is 2.00 GiB lower." in why
    assert "the gradient is that of plain PyTorch" not in why


def test_a_lossy_knob_without_which_nothing_fits_says_so() -> None:
    assert "Nothing that was searched fits without it." in text([titled(lossy(exact=False), "Why")])


def test_a_lossy_knob_that_was_given_is_not_said_to_be_needed() -> None:
    assert "Nothing was searched without it." in text([titled(lossy(exact=False, fits=True), "Why")])


def test_where_speed_stops_growing_is_said() -> None:
    assert "Beyond a microbatch of 8, speed grows by less than 2 %." in text([titled(measured(), "Why")])
    assert "up to the whole batch of 32" in text([titled(measured(enough_rows=32), "Why")])


def test_a_budget_that_was_not_free_is_told() -> None:
    plan = measured(asked_budget_bytes=900 * GIB)
    assert "Only 79.14 GiB of the budget of 900.00 GiB were free." in text(explain(plan))


def test_the_evidence_has_estimate_expected_and_measured() -> None:
    plan = measured()
    sizes = (plan.estimate.total_bytes, plan.expected.peak_bytes, plan.expected.margin_bytes, 618 * MIB)
    assert all(format_bytes(size) in text(summarize(plan)) for size in sizes)


def test_the_evidence_has_every_record_and_marks_the_chosen() -> None:
    table = titled(measured(), "Evidence").table
    assert table is not None
    assert [row[-1] for row in table.rows] == ["TIMEOUT", "FITS *"]
    assert table.rows[0][-3:-1] == ("–", "–")


def test_knobs_that_differ_are_told_record_by_record() -> None:
    plan = measured()
    other = record(plan, candidate=msgspec.structs.replace(plan.candidate, precision="bf16"))
    section = titled(msgspec.structs.replace(plan, records=(*plan.records, other)), "Evidence")
    assert section.table is not None
    assert "other knobs" in section.table.header
    assert section.sentences[-1] == "All of them: engine cudnn, allocator system."


@pytest.mark.parametrize("ended", ENDED)
def test_how_the_search_ended_is_said(ended: str) -> None:
    assert ENDED[ended] in text(summarize(measured(ended=ended)))


def test_what_ran_out_of_memory_is_counted() -> None:
    assert "2 probes in 1 min 26 s, 1 ran out of memory;" in text(summarize(measured(ooms=1)))


def test_every_aim_of_a_search_has_words() -> None:
    assert {*AIMS} == {*SEARCHED}


@pytest.mark.parametrize(
    ("plan", "sequences", "phrase"),
    [
        (measured(), None, "1,000 sequences (32 steps) take about 11 min 12 s."),
        (measured(), 50_000, "An epoch of 50,000 sequences (1,563 steps) takes about 9 h 20 min."),
        # (5000 * 1 s + 300 * 10 s + 20 * 80 s) / 32
        (bucketed(), None, "An epoch of 5,320 sequences (167 steps) takes about 5 min 0 s."),
        (bucketed(), 10_640, "An epoch of 10,640 sequences (333 steps) takes about 10 min 0 s."),
        (reckoned(), None, "no time is known."),
    ],
)
def test_an_epoch_has_its_time(plan: Plan, sequences: int | None, phrase: str) -> None:
    time = next(section for section in explain(plan, sequences) if section.title == "Time")
    assert time.sentences[-1].endswith(phrase)


def test_buckets_and_padding_are_shown() -> None:
    plan = bucketed()
    section = titled(plan, "Lengths")
    assert plan.padding is not None
    assert f"{plan.padding.before:.1%} of all computed tokens would be padding" in text([section])
    assert section.table is not None
    assert [row[:2] for row in section.table.rows] == [
        (f"{bucket.longest:,}", f"{bucket.sequences:,}") for bucket in plan.buckets
    ]


def test_a_front_that_nobody_timed_has_no_speeds() -> None:
    table = titled(fronted(), "Front").table
    assert table is not None
    assert len(table.rows) == len(fronted().front)
    assert table.header[-1] == "peak"


def test_every_fallback_is_shown_with_its_peak() -> None:
    plan = reckoned()
    table = titled(plan, "Fallbacks").table
    assert table is not None
    assert [row[-1] for row in table.rows] == [
        format_bytes(fallback.expected.peak_bytes) for fallback in plan.fallbacks
    ]


def test_a_plan_without_fallbacks_says_so() -> None:
    assert "There are none" in text([titled(measured(fallbacks=()), "Fallbacks")])


def test_exports_are_lines_for_the_shell() -> None:
    start = titled(EVERY["exports"](), "Start")
    exports = ("export PYTORCH_ALLOC_CONF=expandable_segments:True", "export MALLOC_ODD_='a b'")
    assert start.lines == (*exports, "oomguard train plan.json --data FILE")


def test_the_command_that_trains_is_said() -> None:
    assert titled(measured(exports={}), "Start").lines == ("oomguard train plan.json --data FILE",)


def test_what_calibration_did_is_said() -> None:
    assert "multiplies the estimate, without its runtime, by 0.900." in text([titled(measured(), "Evidence")])
    assert "Calibration" not in text(explain(reckoned()))


@every_plan
def test_every_table_says_what_its_rows_are(kind: str) -> None:
    assert all(section.table.caption for section in explain(EVERY[kind]()) if section.table is not None)


SHORT = Shortfall(
    needed_bytes=4 * GIB,
    budget_bytes=GIB,
    candidate=Candidate(microbatch=1, accumulation=32),
    terms={"runtime": GIB, "weights": 2 * GIB},
    term="weights",
    ways=(
        Way(change="--seq 5", needed_bytes=GIB // 2, fits=True, allowed=False),
        Way(change="--allow window", needed_bytes=2 * GIB, fits=False, allowed=True),
    ),
    records=(),
)


def test_a_shortfall_says_what_is_needed_what_stands_in_the_way_and_every_way() -> None:
    first, ways = explain_shortfall(SHORT, Spec(cell="lstm", seq=10), "cpu")
    assert "needs 4.00 GiB with its margin, of 1.00 GiB: microbatch 1 × 32 passes, fp32." in first.sentences[0]
    assert "the term weights: 2.00 GiB of 3.00 GiB" in first.sentences[1]
    assert ways.sentences == ("It would fit with --seq 5.",)
    assert ways.table is not None
    assert ways.table.rows == (
        ("--seq 5", "512.00 MiB", "yes", "no"),
        ("--allow window", "2.00 GiB", "no", "yes"),
    )


@pytest.mark.parametrize(
    ("ways", "phrase"), [(SHORT.ways[1:], "None of these"), ((), "No change that was tried lowers it")]
)
def test_a_shortfall_that_no_way_ends_asks_for_memory(ways: tuple[Way, ...], phrase: str) -> None:
    sections = explain_shortfall(msgspec.structs.replace(SHORT, ways=ways), Spec(cell="lstm", seq=10), "cpu")
    assert phrase in text(sections)
    assert "raise the budget above 4.00 GiB" in text(sections)


def test_a_candidate_is_told_by_what_it_turns() -> None:
    turned = Candidate(microbatch=4, segments=9, recompute=False, offload=True, keep="host", update="loop", threads=1)
    assert candidate_words(turned) == (
        "microbatch 4 × 1 pass, 9 segments without recomputation, fp32, microbatch and border states in host memory, "
        "1 thread, optimizer state in host memory, update loop"
    )


@pytest.mark.parametrize("per_second", [1e-9, 8e-5, 0.02, 3.0, 7e7])
def test_a_speed_is_a_figure_that_one_can_read(per_second: float) -> None:
    assert re.fullmatch(r"[\d,.e-]+ sequences/(s|min|h|day)", speed_words(per_second, "sequences"))


def test_a_table_of_unequal_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="as many cells"):
        Table(header=("a", "b"), rows=(("1",),), align="ll")


@every_plan
def test_the_page_has_every_word_and_figure(kind: str) -> None:
    plan = EVERY[kind]()
    page = unescape(plan._repr_html_())
    wanted = text(explain(plan)).replace("\n", " ").split(" ")
    assert [word for word in wanted if word not in page] == []


def test_everything_on_a_page_is_escaped() -> None:
    nasty = "<script>alert('&')</script>"
    table = Table(header=(nasty,), rows=((nasty,),), align="l")
    page = to_html([], None, [Section(title=nasty, sentences=(nasty,), table=table, lines=(nasty,))] * 2)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&#39;&amp;&#39;)") == 10


def test_a_page_needs_nothing_from_elsewhere() -> None:
    page = measured()._repr_html_()
    assert not re.search(r"https?://|src=|href=|@import|url\(", page)
    assert len(page) < 20_000
