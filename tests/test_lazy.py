"""What an import costs: the answer to "will it fit?" must not wait for torch."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "pandas", "optuna", "plotly", "matplotlib", "pyarrow"}


def output_of(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(code: str) -> set[str]:
    """The packages that a fresh interpreter has loaded after running the code."""
    return set(output_of(f"{code}\nimport sys\nprint()\nprint(*sys.modules)").splitlines()[-1].split())


def test_importing_the_package_loads_no_other_package() -> None:
    assert not modules_after("import oomguard") & {*HEAVY, "numpy", "msgspec", "typer", "rich"}


@pytest.mark.parametrize("name", ["Spec", "Candidate", "Estimate", "MisuseError", "OomguardError", "estimate"])
def test_a_public_name_loads_nothing_heavy(name: str) -> None:
    assert not modules_after(f"from oomguard import {name}") & HEAVY


def test_estimating_in_python_loads_nothing_heavy() -> None:
    code = "import oomguard; oomguard.estimate(oomguard.Spec(cell='lstm', seq=10))"
    assert not modules_after(code) & HEAVY


@pytest.mark.parametrize("more", ["", "--json", "--device a100-80gb", "--help"])
def test_estimating_on_the_command_line_loads_nothing_heavy(more: str) -> None:
    words = f"oomguard estimate --model lstm --seq 100 {more}".split()
    code = (
        f"import sys\nfrom oomguard.cli import main\nsys.argv = {words}\ntry:\n    main()\nexcept SystemExit as stop:\n"
    )
    assert not modules_after(code + "    assert not stop.code, stop.code") & HEAVY


@pytest.mark.parametrize(
    "first",
    [
        "",
        "import oomguard.estimate",
        "from oomguard.estimate.breakdown import Estimate",
        "from oomguard.estimate import breakdown",
        "from oomguard import Estimate",
        "from oomguard import api",
        "from oomguard import *",
        "import oomguard; oomguard.estimate",
    ],
)
def test_the_public_estimate_is_the_function_whatever_was_imported_first(first: str) -> None:
    assert output_of(f"{first}\nimport oomguard\nprint(oomguard.estimate.__module__)") == "oomguard.api\n"


def test_the_files_behind_the_public_estimate_can_still_be_imported_after_it() -> None:
    code = "from oomguard import estimate\nfrom oomguard.estimate.breakdown import Estimate\nprint(Estimate.__module__)"
    assert output_of(code) == "oomguard.estimate.breakdown\n"


@pytest.mark.parametrize("name", ["curves", "guard", "probe", "tradeoffs", "train"])
def test_a_public_function_is_not_the_folder_of_its_name(name: str) -> None:
    code = f"from oomguard import {name} as early\nimport oomguard.{name}\nfrom oomguard import {name}\n"
    assert output_of(f"{code}print({name}.__module__, early is {name})") == "oomguard.api True\n"


def test_every_public_name_is_there() -> None:
    assert output_of("import oomguard\nprint([n for n in oomguard.__all__ if not hasattr(oomguard, n)])") == "[]\n"


def test_every_public_name_is_listed_before_it_is_used() -> None:
    assert output_of("import oomguard\nprint(set(oomguard.__all__) - set(dir(oomguard)))") == "set()\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert output_of("import oomguard\nprint(hasattr(oomguard, 'nothing'))") == "False\n"
