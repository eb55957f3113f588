"""Child processes that run this package."""

import subprocess

import pytest

from oomguard._core.errors import MisuseError
from oomguard._core.system import command, run_elsewhere


def test_a_child_has_this_package() -> None:
    done = subprocess.run(command("print(oomguard.__name__)"), capture_output=True, text=True, check=True)
    assert done.stdout == "oomguard\n"


def test_a_function_that_runs_in_a_child_returns_its_result() -> None:
    assert run_elsewhere("math", "sqrt", 16.0) == 4.0


def test_a_function_that_fails_in_a_child_raises_its_error_here() -> None:
    with pytest.raises(MisuseError, match="Write it as 6GiB"):
        run_elsewhere("oomguard._core.units", "parse_bytes", "2000000TiB")
