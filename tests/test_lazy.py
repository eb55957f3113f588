"""What an import costs: the answer to "will it fit?" must not wait for torch."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "pandas", "optuna", "jinja2", "matplotlib", "pyarrow"}


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
    code = f"import sys\nfrom oomguard._cli.app import main\nsys.argv = {words}\n"
    code += "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code"
    assert not modules_after(code) & HEAVY


@pytest.mark.parametrize("name", ["curves", "estimate", "guard", "probe", "tradeoffs", "train"])
def test_no_package_shadows_a_public_function(name: str) -> None:
    code = "import pkgutil, oomguard\nprint([m.name for m in pkgutil.iter_modules(oomguard.__path__)])\n"
    assert repr(name) not in output_of(code)
    assert output_of(f"from oomguard import {name}\nprint({name}.__module__)").startswith("oomguard._api.")


def test_every_public_name_is_there() -> None:
    assert output_of("import oomguard\nprint([n for n in oomguard.__all__ if not hasattr(oomguard, n)])") == "[]\n"


def test_every_public_name_is_listed_before_it_is_used() -> None:
    assert output_of("import oomguard\nprint(set(oomguard.__all__) - set(dir(oomguard)))") == "set()\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert output_of("import oomguard\nprint(hasattr(oomguard, 'nothing'))") == "False\n"
