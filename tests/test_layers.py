"""The import direction: a file imports only from above it, so that every file can be read with those above it alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "oomguard"
ORDER = [
    *("_core", "_spec", "_estimate", "_device", "_batch", "_rnn", "_task", "_keras", "_adam8bit", "_step", "_probe"),
    *("_predict", "_search", "_data", "_plan", "_fleet", "_guard", "_train", "_run", "_report", "_explore", "_api"),
    *("_cli", "integrations"),
]
"""Packages and modules of oomguard in import order; inside a package, modules may import one another."""
SHOWN = ("_plan/value.py", "_plan/task_value.py", "_probe/record.py", "_estimate/breakdown.py")
NOTEBOOK_DISPLAY = {(file, "_report") for file in SHOWN}
"""Imports against the order: Python asks a value itself for its text and its HTML, which `_report` makes."""
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
each_file = pytest.mark.parametrize(
    "file", [file for file in FILES if str(file) not in ("__init__.py", "__main__.py")], ids=str
)


def layer_of(file: Path) -> str:
    """The file or folder of the package that a file belongs to."""
    return file.with_suffix("").parts[0]


def imports(file: Path, source: str) -> Iterator[str]:
    """Dotted names of all that the source of a file of the package imports, wherever in it, relative ones resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ("oomguard", *file.parent.parts)
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            home = ".".join(part for part in (base, node.module) if part)
            yield from (f"{home}.{alias.name}" for alias in node.names)


def upward_imports(file: Path, source: str) -> list[str]:
    """The imports of a file that point against the order, or at the package as a whole."""
    own = ORDER.index(layer_of(file))
    imported = []
    for name in imports(file, source):
        if name.removeprefix("import ").split(".")[0] != "oomguard":
            continue
        # `import oomguard.x` binds the whole package, and `from oomguard import x` asks it: both hide the direction
        layer = "" if name.startswith("import ") else name.split(".")[1]
        if layer not in ORDER or (ORDER.index(layer) > own and (str(file), layer) not in NOTEBOOK_DISPLAY):
            imported.append(name)
    return imported


def importers(package: str) -> set[str]:
    """Files of ours that import another package."""
    return {
        str(file)
        for file in FILES
        for name in imports(file, (PACKAGE / file).read_text())
        if name.removeprefix("import ").split(".")[0] == package
    }


@each_file
def test_a_file_imports_only_from_above_it(file: Path) -> None:
    assert upward_imports(file, (PACKAGE / file).read_text()) == []


@each_file
def test_every_file_has_its_place_in_the_order(file: Path) -> None:
    assert layer_of(file) in ORDER


def test_nothing_above_the_device_imports_torch() -> None:
    above = set(ORDER[: ORDER.index("_device")])
    assert not {file for file in importers("torch") if layer_of(Path(file)) in above}


def test_only_the_search_imports_optuna() -> None:
    assert importers("optuna") <= {"_search/run.py", "_search/sampler.py", "_search/study.py", "integrations/optuna.py"}


def test_only_the_device_imports_nvml() -> None:
    assert importers("pynvml") <= {"_device/nvml.py"}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("_core/units.py", "from oomguard._spec.spec import Spec"),
        ("_core/units.py", "import oomguard._spec.spec"),
        ("_core/units.py", "import oomguard._spec.spec as spec"),
        ("_core/units.py", "from oomguard import Spec"),
        ("_core/units.py", "from .. import _spec"),
        ("_core/units.py", "from .._spec.spec import Spec"),
        ("_core/units.py", "def late():\n    from oomguard._cli.app import main"),
        ("_core/units.py", "if TYPE_CHECKING:\n    from oomguard._api.measure import estimate"),
        ("_estimate/terms.py", "from oomguard._device import cpu"),
        ("_estimate/engines/cudnn.py", "from ..._device.cuda import Reading"),
        ("_estimate/engines/cudnn.py", "from oomguard.nowhere import thing"),
        ("_train/loop.py", "import math, oomguard._report"),
    ],
)
def test_an_upward_import_is_found(file: str, source: str) -> None:
    assert len(upward_imports(Path(file), source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("_spec/spec.py", "from oomguard._core.errors import MisuseError"),
        ("_spec/spec.py", "from .._core.errors import MisuseError"),
        ("_estimate/terms.py", "from oomguard._estimate import malloc"),
        ("_estimate/terms.py", "from oomguard._estimate.engines import cudnn"),
        ("_estimate/engines/cudnn.py", "from oomguard._estimate.call import Call"),
        ("_estimate/engines/cudnn.py", "from ..call import Call"),
        ("_cli/app.py", "from oomguard._api.measure import estimate"),
        ("_core/units.py", "import math\nimport torch.nn\nfrom numpy import array\nimport oomguards"),
    ],
)
def test_an_import_from_above_is_allowed(file: str, source: str) -> None:
    assert upward_imports(Path(file), source) == []
