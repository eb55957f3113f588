"""Whole searches on a CUDA card, whichever is there."""

from collections.abc import Callable

import pytest
from device.cards import two_cards

import oomguard
from oomguard._core.units import GIB, MIB
from oomguard._device.find import open_device
from oomguard._probe.verdict import Verdict
from oomguard._search.run import Progress
from oomguard._spec.spec import Spec

pytestmark = pytest.mark.gpu

SPECS = [
    Spec(cell="lstm", seq=10_000),
    Spec(cell="gru", seq=4000, hidden=512, layers=3, batch=64),
    Spec(cell="rnn", seq=6000, hidden=256, batch=64),
]
LSTM = SPECS[0]
WORDS = Spec(cell="lstm", seq=500, vocab=20_000, hidden=512, batch=32)


def test_the_peak_of_many_words_is_within_its_margin() -> None:
    plan = oomguard.find_feasible_config(WORDS, device="cuda", budget=3 * GIB)
    assert plan.ooms == 0
    assert plan.confirmed
    assert plan.peak_bytes <= plan.expected.peak_bytes + plan.expected.margin_bytes


@pytest.mark.parametrize("spec", SPECS, ids=["long", "deep", "simple"])
def test_a_plan_for_the_card_ran_there_and_nothing_ran_out(spec: Spec) -> None:
    plan = oomguard.find_feasible_config(spec, device="cuda", budget=3 * GIB)
    assert plan.ooms == 0
    assert plan.confirmed
    assert plan.record is not None
    assert plan.record.verdict is Verdict.FITS
    assert plan.peak_bytes <= plan.budget_bytes <= 3 * GIB
    assert plan.expected.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.03)


def test_what_a_neighbour_takes_in_the_middle_of_a_search_costs_nothing_but_room(
    neighbour: Callable[[int], None],
) -> None:
    before = open_device("cuda").budget().left_bytes
    taken: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.probes == 2 and not taken:
            taken.append(before // 3)
            neighbour(before // 3)

    plan = oomguard.find_feasible_config(LSTM, device="cuda", progress=watch)
    assert taken
    assert plan.ooms == 0
    assert all(one.verdict is not Verdict.OVER for one in plan.records)
    assert plan.budget_bytes <= before - taken[0] + 64 * MIB
    assert plan.peak_bytes <= plan.budget_bytes


@two_cards
def test_two_cards_search_together() -> None:
    plan = oomguard.find_feasible_config(LSTM, device="cuda:0,cuda:1", budget=3 * GIB)
    assert plan.ooms == 0
    assert {one.device for one in plan.records} == {"cuda:0", "cuda:1"}
    assert plan.peak_bytes <= 3 * GIB


def test_a_plan_for_the_card_says_where_it_was_made() -> None:
    plan = oomguard.find_feasible_config(
        cell="gru", seq=200, hidden=64, device="cuda", budget=2 * GIB, max_probes=1, allow="none"
    )
    card = open_device("cuda")
    found = plan.environment
    assert (found.title, found.device, found.driver) == (card.title(), "cuda", card.driver())
    assert found.library == card.library()
    assert plan.candidate.lossy == ()
