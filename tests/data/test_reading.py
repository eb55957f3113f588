"""Nothing is read that was not asked for: files far larger than what reading them takes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data.making import spec, tokens, written

from oomguard.data.cuts import Cuts, whole
from oomguard.data.lengths import read_lengths
from oomguard.data.loader import Loader
from oomguard.data.open import check_source, open_data, open_source
from oomguard.data.options import DataOptions
from oomguard.data.order import Bucket
from oomguard.data.source import RESIDENT_BYTES
from oomguard.device.proc import PROC, read_sizes, read_text
from oomguard.units import GIB, MIB

linux = pytest.mark.skipif(not (PROC / "self/status").exists(), reason="needs /proc")

CONVERT = """
import resource, sys
import pyarrow.csv, pyarrow.parquet, pyarrow.compute, pandas, numpy, oomguard.data.tables
from oomguard.data.open import open_source
from oomguard.data.options import DataOptions
from oomguard.spec import Spec
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
    loader = Loader(source=data.train, spec=wanted, buckets=(Bucket(longest=1 << 12, microbatch=4),))
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


@linux
def test_a_csv_is_converted_in_a_fraction_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    dice = np.random.default_rng(0)
    with path.open("w") as file:
        file.write("id,a,b,c,y\n")
        block = dice.normal(size=(50_000, 4))
        ids = dice.integers(0, 50, 50_000)
        lines = "".join(f"{i},{','.join(map(repr, row))}\n" for i, row in zip(ids, block.tolist(), strict=True))
        for _ in range(20):
            file.write(lines)
    size_bytes = path.stat().st_size
    done = subprocess.run([sys.executable, "-c", CONVERT, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert size_bytes > 60 * MIB
    assert int(done.stdout) < size_bytes


def test_a_window_costs_nothing_before_it_is_asked_for() -> None:
    cuts = Cuts(pieces=whole(np.array([0, 10**12])), ahead=1, seq=1000, stride=1)
    assert len(cuts) == 10**12 - 1000
    assert cuts[123_456_789_000] == (123_456_789_000, 1000, 0)


def test_lengths_are_read_without_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "l.txt", "3\n4\n")
    code = f"import sys\nfrom oomguard.data.lengths import read_lengths\nprint(read_lengths({str(path)!r}))\n"
    code += "assert not {'torch', 'pyarrow', 'pandas'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{read_lengths(path)}\n", "")
