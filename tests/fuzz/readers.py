"""Everything that reads what may come from anybody, each with good input to begin from.

A reader may return or raise an error of oomguard's own, with a short message. Anything else is a fault.
"""

import io
import json
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd
from fuzz.mutate import changed_bytes, changed_values, changed_words
from plan.making import reckoned
from trainings import load_newest, new_training, train

from oomguard._cli.app import run
from oomguard._core.errors import OomguardError
from oomguard._data.open import check_data, open_data
from oomguard._data.options import DataOptions
from oomguard._guard.events import Events
from oomguard._keras.task import read_model
from oomguard._plan.store import decode_plan
from oomguard._probe.record import Ledger
from oomguard._probe.verdict import Verdict
from oomguard._spec.read import load_fields, make_spec
from oomguard._spec.spec import Spec
from oomguard._train.checkpoint import CHECKSUMS, FACTS, TrainState, checksum_of, restore, save
from oomguard._train.metrics import Metrics
from oomguard._train.settings import RunSettings, read_settings, write_settings

LONGEST = 2500  # characters of a message, at most: a screen
INTERNAL = 70  # the exit code of a fault of oomguard's own
SPEC = Spec(cell="gru", seq=5, features=2, hidden=4, layers=1, batch=2)


class Reader(NamedTuple):
    """A function that reads a file of some suffix, good content, and how the content is changed."""

    suffix: str
    good: Callable[[], list[bytes]]
    read: Callable[[Path], object]
    is_json: bool = False

    def change(self, rng: Random) -> bytes:
        """Return changed content."""
        content = rng.choice(self.good())
        if self.is_json and rng.random() < 0.8:
            return changed_values(rng, content.decode()).encode()
        return changed_bytes(rng, content)


def fault_of(reader: Reader, content: bytes, directory: Path) -> str | None:
    """Read some content, and say what is wrong with how that ended; None if nothing is."""
    path = directory / f"input{reader.suffix}"
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            reader.read(path)
        except OomguardError as error:
            return f"a message of {len(str(error))} characters" if len(str(error)) > LONGEST else None
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
    foreign = [warning for warning in caught if issubclass(warning.category, RuntimeWarning | DeprecationWarning)]
    return f"a warning of another package: {foreign[0].message}" if foreign else None


COMMANDS = (
    "estimate --model lstm --seq 1000 --budget 1GiB",
    "estimate --model gru --vocab 100 --lengths 5:3,9:1 --device t4 --json",
    "tradeoffs --model lstm --seq 1000 --device a100-80gb --over microbatch=1..64",
    "plan --model lstm --seq 100 --device t4 --output /nowhere/plan.json",
    "show plan.json",
    "devices",
)


def _words(path: Path) -> None:
    words = json.loads(path.read_bytes())
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(words)
    assert code in (0, 1, 2), code
    assert len(err.getvalue()) <= LONGEST, "a long message"


def _command_lines() -> list[bytes]:
    return [json.dumps(command.split()).encode() for command in COMMANDS]


class CommandLines(Reader):
    """Words of a command line."""

    def change(self, rng: Random) -> bytes:
        """Return other words: those of another command among them."""
        more = [word for command in COMMANDS for word in command.split()]
        return json.dumps(changed_words(rng, json.loads(rng.choice(self.good())), more)).encode()


@cache
def _plans() -> list[bytes]:
    return [msgspec.json.encode(reckoned(seq=10, hidden=8))]


@cache
def _records() -> list[bytes]:
    from probe.probing import TINY, one_thread

    from oomguard._probe.record import Measured, Request, make_record

    now = pd.Timestamp("2026-01-01", tz="UTC").to_pydatetime()
    request = Request(spec=TINY, candidate=one_thread(TINY), device="cpu", budget_bytes=1 << 30)
    terms = dict.fromkeys(("runtime", "weights", "gradients", "optimizer", "input", "rest"), 1)
    found = Measured(verdict=Verdict.FITS, message="It ran.", peak_bytes=6, seconds_per_step=1.0, steps=1, terms=terms)
    return [msgspec.json.encode(make_record(request, found, now)) + b"\n"]


def _table(suffix: str) -> list[bytes]:
    """A table of two series."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"shop": [1] * 9 + [2] * 9, "a": rng.normal(size=18), "b": rng.normal(size=18)})
    buffer = io.BytesIO()
    if suffix == ".parquet":
        table.to_parquet(buffer)
    else:
        buffer.write(table.to_csv(index=False, sep="\t" if suffix == ".tsv" else ",").encode())
    return [buffer.getvalue()]


def _array() -> list[bytes]:
    buffer = io.BytesIO()
    np.save(buffer, np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32))
    return [buffer.getvalue()]


def _data(path: Path) -> None:
    if path.suffix == ".npy":
        check_data(open_data(path, SPEC, DataOptions(validation=0.0)))
    else:
        cache = str(path.parent / "cache")
        options = DataOptions(validation=0.0, cache=cache, id="shop", columns=("a",), target=("b",), stride=5)
        check_data(open_data(path, msgspec.structs.replace(SPEC, features=1), options))


def _text(path: Path) -> None:
    spec = Spec(cell="gru", seq=5, vocab=64, hidden=4, layers=1, batch=2)
    check_data(open_data(path, spec, DataOptions(characters=True, validation=0.0, cache=str(path.parent / "cache"))))


@cache
def _home() -> Path:
    """A directory with a checkpoint, kept as long as the process lives."""
    home = Path(tempfile.mkdtemp(prefix="oomguard-fuzz-"))
    training = new_training()
    train(training, 0, 1)
    save(home, training, TrainState(step=1))
    return home


def _facts() -> list[bytes]:
    if not (kept := _home() / "kept.json").exists():
        kept.write_bytes((next(_home().glob("step-*")) / FACTS).read_bytes())
    return [kept.read_bytes()]


def _checkpoint(path: Path) -> None:
    """Put facts into a checkpoint, with the right checksum, and restore it."""
    folder = next(_home().glob("step-*"))
    (folder / FACTS).write_bytes(path.read_bytes())
    sums = json.loads((folder / CHECKSUMS).read_text())
    sums[FACTS] = msgspec.to_builtins(checksum_of(folder / FACTS))
    (folder / CHECKSUMS).write_text(json.dumps(sums))
    training = new_training()
    restore(load_newest(_home()), training)
    train(training, 1, 2)


def _settings() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        write_settings(Path(directory), RunSettings())
        return [(Path(directory) / "settings.json").read_bytes()]


def _read_settings(path: Path) -> None:
    (path.parent / "settings.json").write_bytes(path.read_bytes())
    read_settings(path.parent)


def _metrics(path: Path) -> None:
    (path.parent / "metrics.csv").write_bytes(path.read_bytes())
    Metrics(path.parent, 1).write(2, loss=0.5)


def _rows() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        metrics = Metrics(Path(directory), 0)
        for step in (1, 2, 3):
            metrics.write(step, loss=1.0 / step)
        return [(Path(directory) / "metrics.csv").read_bytes()]


EVENT = b'{"time":"2026-01-01T00:00:00+00:00","kind":"resume","step":3,"reason":"The run was resumed."}\n'
SPECS = (
    b'cell = "lstm"\nseq = 1000\nhidden = 32\nbatch = 8\noptimizer = "adam"\n',
    b'cell = "gru"\nvocab = 50\ntied = true\nembedding = 16\nhidden = 16\noutputs = 50\n[lengths]\n5 = 3\n9 = 1\n',
)


def _keras() -> list[bytes]:
    """Models as Keras 2 and Keras 3 write them."""
    return [path.read_bytes() for path in sorted((Path(__file__).parents[1] / "integrations").glob("keras_*.json"))]


@cache
def _keras_archives() -> list[bytes]:
    """The same in archives."""
    made = []
    for content in _keras():
        with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("config.json", content)
        made.append(buffer.getvalue())
    return made


READERS: dict[str, Reader] = {
    "flags": CommandLines(".json", _command_lines, _words),
    "spec": Reader(".toml", lambda: [*SPECS], lambda path: make_spec(load_fields(path))),
    "plan": Reader(".json", _plans, lambda path: decode_plan(path.read_bytes(), "plan.json"), is_json=True),
    "ledger": Reader(".jsonl", _records, lambda path: Ledger(path).read(), is_json=True),
    "events": Reader(".jsonl", lambda: [EVENT], lambda path: Events(path).read(), is_json=True),
    "csv": Reader(".csv", lambda: _table(".csv"), _data),
    "tsv": Reader(".tsv", lambda: _table(".tsv"), _data),
    "parquet": Reader(".parquet", lambda: _table(".parquet"), _data),
    "npy": Reader(".npy", _array, _data),
    "text": Reader(".txt", lambda: [b"the cat sat on the mat, and the dog did not. " * 3], _text),
    "checkpoint": Reader(".json", _facts, _checkpoint, is_json=True),
    "settings": Reader(".json", _settings, _read_settings, is_json=True),
    "metrics": Reader(".csv", _rows, _metrics),
    "keras": Reader(".json", _keras, lambda path: read_model(str(path), 7), is_json=True),
    "keras archive": Reader(".keras", _keras_archives, lambda path: read_model(str(path), 7)),
}
