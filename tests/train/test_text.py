"""A model of text goes on with a prompt, each token drawn with the state that all tokens before have left."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import plan_of, saved

import oomguard
from oomguard._cli.app import run
from oomguard._core.errors import MisuseError
from oomguard._rnn.model import Recurrent

pytestmark = pytest.mark.filterwarnings("ignore:The plan's peak was measured with")
TEXT = "abcab cabé "


def train(home: Path, *, characters: bool = True, text: str = TEXT * 60, **fields: Any) -> Recurrent:
    """Train a model of a text, and return it."""
    (home / "book.txt").write_text(text, encoding="utf-8")
    plan = plan_of(vocab=6 if characters else 256, features=None, seq=10, hidden=16, **fields)
    options: dict[str, Any] = {"characters": characters, "run": str(home / "run"), "validation": 0}
    return oomguard.train(plan, str(home / "book.txt"), epochs=3, lr=0.03, **options).model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that was trained on characters."""
    home = tmp_path_factory.mktemp("text")
    train(home)
    return home


def test_the_state_is_carried_as_if_everything_before_was_read_again(tmp_path: Path) -> None:
    model, vocabulary = train(tmp_path), "".join(sorted({*TEXT}))
    prompt = "abcab cabé abcab c"  # longer than the sequences of the training
    tokens, generator = [vocabulary.index(character) for character in prompt], torch.Generator().manual_seed(7)
    model.eval()
    for _ in range(30):
        with torch.no_grad():
            logits = model(torch.tensor(tokens)[:, None], None)[0][-1, 0, : len(vocabulary)].double()
        tokens.append(int(torch.multinomial((logits / 0.5).softmax(-1), 1, generator=generator)))
    drawn = oomguard.predict(str(tmp_path / "run"), prompt=prompt, length=30, temperature=0.5, seed=7)
    assert drawn == "".join(vocabulary[token] for token in tokens)


def test_the_same_seed_draws_the_same_text(home: Path) -> None:
    run_of, drawn = str(home / "run"), dict[int, str]()
    for seed in (0, 1, 0):
        text = oomguard.predict(run_of, prompt="ab", temperature=2.0, seed=seed)
        assert text.startswith("ab")
        assert len(text) == 202
        assert drawn.setdefault(seed, text) == text
    assert drawn[0] != drawn[1]


def test_without_temperature_the_likeliest_comes_whatever_the_seed(home: Path) -> None:
    drawn = {oomguard.predict(str(home / "run"), prompt="c", length=40, temperature=0, seed=seed) for seed in (0, 1)}
    assert len(drawn) == 1


def test_bytes_are_drawn_too(tmp_path: Path) -> None:
    train(tmp_path, characters=False)
    drawn = oomguard.predict(str(tmp_path / "run"), prompt="é", length=20, temperature=0)
    assert drawn.startswith("é")
    assert {*drawn} <= {*TEXT, "\N{REPLACEMENT CHARACTER}"}


def test_the_command_prints_the_text(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["predict", str(home / "run"), "--prompt", "abc", "--length", "25", "--temperature", "0.8", "--seed", "4"]
    assert run(line) == 0
    printed = capsys.readouterr().out
    assert printed == oomguard.predict(str(home / "run"), prompt="abc", length=25, temperature=0.8, seed=4) + "\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--prompt abx", "character 2 of the prompt is 'x'"),
        ("--prompt a --length 0", "--length must be a whole number from 1"),
        ("--prompt a --length long", "--length must be a whole number from 1"),
        ("--prompt a --temperature -1", "--temperature must be a number from 0 on"),
        ("--prompt a --temperature warm", "--temperature must be a number from 0 on"),
        ("--prompt a --seed -1", "--seed must be a whole number"),
        ("--length 5", "--prompt must be text of at least one character"),
        ("--prompt a --data book.txt", "A prompt takes the place of data, but got --prompt and --data"),
        ("--prompt a --output text.npy", "got --prompt and --output"),
        ("--prompt a --probabilities", "got --prompt and --probabilities"),
        ("--prompt a --stride 3", "got --prompt and --stride"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    home: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", str(home / "run"), *line.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_bad_options_are_told_without_importing_torch(home: Path) -> None:
    words = ["predict", str(home / "run"), "--prompt", "a", "--length", "0"]
    call = f"import sys; from oomguard._cli.app import run; code = run({words!r})"
    check = "assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", f"{call}; {check}"], capture_output=True, check=False)
    assert done.returncode == 2, done.stderr


def test_only_a_model_that_predicts_the_next_token_of_a_text_goes_on(tmp_path: Path) -> None:
    oomguard.train(plan_of(), saved(tmp_path / "data.npy"), steps=1, run=str(tmp_path / "numbers"))
    with pytest.raises(MisuseError, match="trained on something else"):
        oomguard.predict(str(tmp_path / "numbers"), prompt="a")
    train(tmp_path, bidirectional=True)
    with pytest.raises(MisuseError, match="has seen the tokens that come after"):
        oomguard.predict(str(tmp_path / "run"), prompt="a")
    with pytest.raises(MisuseError, match="there is no checkpoint"):
        oomguard.predict(str(tmp_path / "nowhere"), prompt="a")
