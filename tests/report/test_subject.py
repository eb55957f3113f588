"""What a table or a chart is about."""

from oomguard import Candidate, Spec, find_feasible_config
from oomguard._estimate.target import CPU
from oomguard._report.subject import Subject, find_subject, subject_of


def test_a_prediction_says_which_candidates_fit() -> None:
    spec, candidate = Spec(cell="lstm", seq=1000), Candidate(microbatch=32)
    subject = Subject(spec=spec, target=CPU, budget_bytes=1 << 30, candidate=candidate)
    assert subject.predict(subject.vary(microbatch=[8, 32]))["fits"].tolist() == [True, False]


def test_a_table_varies_microbatch_segments_and_precision_unless_told_otherwise() -> None:
    subject = find_subject(cell="gru", seq=64, batch=6, device="t4")
    assert subject.target.device == "t4-16gb"
    assert subject.varied == {
        "microbatch": [1, 2, 4, 6],
        "segments": [1, 2, 4, 8],
        "precision": ["fp32", "fp16"],
    }


def test_charts_have_microbatches_between_powers_of_two_and_that_of_the_candidate() -> None:
    subject = find_subject(cell="gru", seq=100, batch=10, microbatch=5, device="t4")
    assert subject.microbatches == [1, 2, 3, 4, 5, 6, 8, 10]


def test_a_plan_for_a_card_is_drawn_in_the_half_precision_of_that_card() -> None:
    plan = find_feasible_config(cell="gru", seq=100, device="t4")
    assert subject_of(plan).precisions == ("fp32", "fp16")
