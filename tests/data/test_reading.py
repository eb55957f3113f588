"""Nothing is read that was not asked for: files far larger than what reading them takes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from data.making import spec, tokens, written
from pyarrow import parquet

from oomguard._core.units import GIB, MIB
from oomguard._data.loader import Loader
from oomguard._data.open import check_source, open_data, open_source, read_lengths
from oomguard._data.options import DataOptions
from oomguard._data.order import Cuts, whole
from oomguard._data.source import RESIDENT_BYTES
from oomguard._device.proc import PROC, read_sizes, read_text

linux = pytest.mark.skipif(not (PROC / "self/status").exists(), reason="needs /proc")

CONVERT = """
import resource, sys
import pyarrow.csv, pyarrow.parquet, pyarrow.compute, pandas, numpy, oomguard._data.tables
from oomguard._data.open import open_source
from oomguard._data.options import DataOptions
from oomguard._spec.spec import Spec
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
source = open_source(sys.argv[1], Spec(cell="gru", seq=100_000, features=3), DataOptions(id="id"))
assert len(source) == 50
print(peak() - before)
"""


def anonymous_bytes() -> int:
    return read_sizes(read_text(PROC / "self/status"))["RssAnon"]


def file_bytes() -> int:
    return read_sizes(read_text(PROC / "self/status"))["RssFile"]


def sparse(path: Path, *shape: int) -> Path:
    """A file with a header and a hole."""
    np.lib.format.open_memmap(path, "w+", np.float32, shape).flush()
    return path


@linux
def test_a_file_of_four_gib_costs_next_to_nothing(tmp_path: Path) -> None:
    path = sparse(tmp_path / "x.npy", 1 << 16, 1 << 12, 4)
    assert path.stat().st_size > 4 * GIB
    assert path.stat().st_blocks * 512 < 64 * MIB
    before = anonymous_bytes()
    wanted = spec(seq=1 << 12, features=3)
    data = open_data(path, wanted, DataOptions(normalise="none"))
    loader = Loader(source=data.train, spec=wanted, buckets={1 << 12: 4})
    batch = next(loader.batches())
    assert next(iter(batch.microbatches())).inputs.shape == (1 << 12, 4, 3)
    assert anonymous_bytes() - before < 24 * MIB


@linux
def test_what_was_read_of_a_file_does_not_stay_resident(tmp_path: Path) -> None:
    wanted = spec(seq=1 << 10, features=15)
    source = open_source(sparse(tmp_path / "x.npy", 1 << 12, 1 << 10, 16), wanted)  # 256 MiB
    before = file_bytes()
    assert check_source(source) == 1 << 22
    assert file_bytes() - before < 2 * RESIDENT_BYTES


@linux
def test_what_was_read_of_a_map_from_python_does_not_stay_resident(tmp_path: Path) -> None:
    wanted = spec(seq=1 << 10, features=15)
    given = np.memmap(tmp_path / "x.raw", np.float32, "w+", 512, (1 << 12, 1 << 10, 16))  # 256 MiB
    source = open_source(given, wanted)
    before = file_bytes()
    assert check_source(source) == 1 << 22
    assert file_bytes() - before < 30 * MIB


@linux
def test_windows_of_a_long_series_cost_eight_bytes_each(tmp_path: Path) -> None:
    path = sparse(tmp_path / "x.npy", 1 << 30, 1)
    before = anonymous_bytes()
    wanted = spec(seq=1000, features=1)
    source = open_source(path, wanted, DataOptions(stride=1000))
    assert len(source) == -(-((1 << 30) - 1) // 1000)
    assert anonymous_bytes() - before < 8 * len(source) * 1.5 + MIB


@linux
def test_text_of_a_gib_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.touch()
    os.truncate(path, GIB)
    before = anonymous_bytes()
    source = open_source(path, tokens(vocab=256, seq=10_000))
    assert source[50_000][0].shape == (10_000,)
    assert anonymous_bytes() - before < 8 * MIB


def large_csv(path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows, ids = rng.normal(size=(50_000, 4)).tolist(), rng.integers(0, 50, 50_000)
    lines = "".join(f"{each},{','.join(map(repr, row))}\n" for each, row in zip(ids, rows, strict=True))
    with (path / "t.csv").open("w") as file:
        file.write("id,a,b,c,y\n")
        for _ in range(40):
            file.write(lines)
    return path / "t.csv"


def large_parquet(path: Path) -> Path:
    """In a single row group, which must not be in memory whole."""
    rng, rows = np.random.default_rng(0), 4_000_000
    columns = {name: rng.random(rows) for name in "abcy"}
    table = pa.table({"id": np.sort(rng.integers(0, 50, rows)), **columns})
    parquet.write_table(table, path / "t.parquet", row_group_size=rows, use_dictionary=False)
    return path / "t.parquet"


@linux
@pytest.mark.parametrize("make", [large_csv, large_parquet])
def test_a_table_is_converted_in_a_fraction_of_its_size(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    assert path.stat().st_size > 120 * MIB
    done = subprocess.run([sys.executable, "-c", CONVERT, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 80 * MIB


def test_a_window_costs_nothing_before_it_is_asked_for() -> None:
    cuts = Cuts(pieces=whole(np.array([0, 10**12])), ahead=1, seq=1000, stride=1)
    assert len(cuts) == 10**12 - 1000
    assert cuts[123_456_789_000] == (123_456_789_000, 1000, 0)


def test_lengths_are_read_without_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "l.txt", "3\n4\n")
    code = f"import sys\nfrom oomguard._data.open import read_lengths\nprint(read_lengths({str(path)!r}))\n"
    code += "assert not {'torch', 'pyarrow', 'pandas'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{read_lengths(path)}\n", "")
