"""Who sees what is being done: terminals, logs and functions of the user, and nobody."""

import contextlib
import io
import threading
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from oomguard._core.progress import Status, current, listening, nobody, tell
from oomguard._core.system import Elsewhere
from oomguard._report import screens
from oomguard._report.progress import following, search_status, showing, train_statuses
from oomguard._report.screens import FIRST_SECONDS, PAUSE_SECONDS, WATCHED_SECONDS, Log, Moment, Screen, Terminal, bar
from oomguard._search.run import Progress
from oomguard._train.loop import TrainProgress

Capture = pytest.CaptureFixture[str]


class Clock:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(screens, "monotonic", own)
    return own


def run(screen: Screen, clock: Clock, told: dict[float, str | Status], seconds: int) -> None:
    """Let time pass, and tell what there is at its time."""
    for second in range(seconds + 1):
        clock.now = float(second)
        if second in told:
            news = told[second]
            screen.take(Status(news) if isinstance(news, str) else news)
        else:
            screen.show(Moment(screen.status, clock.now - screen.told_at))


def seconds_of(lines: str) -> list[float]:
    return [float(line.split()[0]) for line in lines.splitlines()]


def training(step: int, **more: Any) -> TrainProgress:
    usual: dict[str, Any] = {"total": 9, "loss": 0.5, "validation": None, "tokens_per_second": 1.0}
    return TrainProgress(step=step, **usual | {"peak_bytes": 0, "budget_bytes": 1, "rung": 0} | more)


def test_a_log_is_never_silent_for_five_seconds_while_somebody_may_watch(clock: Clock, capsys: Capture) -> None:
    log = Log()
    run(log, clock, {0: "Starting PyTorch", 2: "Reading the data", 30: "Training"}, 60)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Reading the data"
    assert "Training" in lines
    assert 12 <= len(lines) <= 20
    assert any(line.startswith("Reading the data, for ") for line in lines)


def test_a_long_log_has_a_few_lines_a_minute(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    log, times = Log(), [0.0]
    monkeypatch.setattr(log, "note", lambda _: times.append(clock.now))
    run(log, clock, {0: "Waiting", 133: "Waiting for something else"}, 600)
    pauses = [(before, after - before) for before, after in pairwise(times)]
    assert all(pause < 5 for began, pause in pauses if began < WATCHED_SECONDS - FIRST_SECONDS)
    assert all(pause <= PAUSE_SECONDS for _, pause in pauses)
    assert sum(began >= 300 for began, _ in pauses) <= 300 / PAUSE_SECONDS


def test_what_is_done_at_once_leaves_no_line(clock: Clock, capsys: Capture) -> None:
    run(Log(), clock, {0: "Reading the data", 1: "Predicting"}, 2)
    assert capsys.readouterr().err == ""


def test_a_verbose_log_has_everything_with_its_time(clock: Clock, capsys: Capture) -> None:
    run(Log(verbose=True), clock, {0: "One", 1: "Two", 2: "Three"}, 3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split() for line in lines] == [["0.0", "s", "One"], ["1.0", "s", "Two"], ["2.0", "s", "Three"]]


def test_a_log_has_every_validation_and_every_event(clock: Clock, capsys: Capture) -> None:
    status = train_statuses()
    validated = [training(1), training(2, validation=0.25), training(3, validation=0.25)]
    run(Log(), clock, dict(enumerate(map(status, validated))), 3)
    assert capsys.readouterr().err == "Step 2 of 9, loss 0.5, 1.00 tokens/s, validation 0.25\n"


def test_a_training_with_a_loss_that_is_not_a_number_is_logged_once() -> None:
    status, value = train_statuses(), float("nan")
    assert [status(training(step, validation=value)).milestone for step in (1, 2)] == [True, False]


def test_a_terminal_wraps_what_it_cannot_show_in_one_line() -> None:
    buffer = io.StringIO()
    terminal = Terminal(Console(file=buffer, width=40))
    words = "Probe 3: a few real steps with a microbatch of 16 and more words to the very end"
    terminal.console.print(terminal.render(Moment(Status(words, lines=("one", "two")), 7.0)))
    assert " ".join(buffer.getvalue().split()) == f"{words}, for 7.0 s one two"


def test_a_bar_is_as_full_as_its_share() -> None:
    assert [bar(share).count("█") for share in (0.0, 0.5, 1.0, 2.0)] == [0, 8, 16, 16]
    assert bar(None) == ""


def test_a_terminal_is_left_as_it_was() -> None:
    buffer = io.StringIO()
    terminal = Terminal(Console(file=buffer, force_terminal=True, width=60))
    terminal.take(Status("Something"))
    terminal.start()
    terminal.close()
    assert "Something" in buffer.getvalue()
    assert "\x1b[?25h" in buffer.getvalue()  # the cursor is shown again


def test_fast_steps_are_not_all_drawn(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.StringIO()
    terminal, drawn = Terminal(Console(file=buffer, width=60)), list[str]()
    monkeypatch.setattr(terminal, "show", lambda moment: drawn.append(moment.text))
    for step in range(100):
        clock.now = step / 100
        terminal.take(Status(f"Step {step}"))
    assert 5 <= len(drawn) <= 11
    assert terminal.status.words == "Step 99"


def test_nothing_is_shown_where_nobody_looks(capsys: Capture) -> None:
    with showing(False):
        with showing(True):
            tell("Something")
        assert current() is nobody
    assert capsys.readouterr() == ("", "")


def test_what_is_told_inside_is_heard_once() -> None:
    told: list[Status] = []
    with listening(told.append), showing(True), showing(True):
        tell("Something", 0.5)
    assert told == [Status("Something", 0.5)]
    assert current() is None


def test_a_function_of_the_user_takes_progress_in_the_place_of_a_screen() -> None:
    given: list[Progress] = []
    seen: list[Status] = []
    progress = Progress(probes=1, running=(), best=None, seconds_left=3.0, budget_bytes=1)
    with listening(seen.append), following(given.append, search_status) as follow:
        follow(progress)
        tell("Something")
    assert (given, seen) == ([progress], [])


def test_a_thread_of_a_search_is_heard() -> None:
    told: list[Status] = []
    progress = Progress(probes=1, running=(), best=None, seconds_left=3.0, budget_bytes=1)
    with listening(told.append), following(True, search_status) as follow:
        thread = threading.Thread(target=follow, args=(progress,))
        thread.start()
        thread.join()
    assert [status.words for status in told] == ["Searching: 1 probe done"]


def test_a_child_tells_through_its_parent() -> None:
    told: list[Status] = []
    with listening(told.append), Elsewhere() as child:
        assert child.call("oomguard._core.progress", "tell", "From a child") is None
    assert told == [Status("From a child")]
    with listening(nobody), Elsewhere() as child:
        news: list[object] = []
        child.call("oomguard._core.system", "send_news", {"step": 1}, news=news.append)
    assert news == [{"step": 1}]


def test_an_error_ends_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Log] = []

    def make(**_: Any) -> Log:
        made.append(Log())
        return made[0]

    monkeypatch.setattr("oomguard._report.progress.make_screen", make)
    with contextlib.suppress(ZeroDivisionError), showing(True):
        tell("Something")
        1 / 0  # noqa: B018
    assert not made[0]._ticker.is_alive()
    assert "oomguard progress" not in [thread.name for thread in threading.enumerate()]
