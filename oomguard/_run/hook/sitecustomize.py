"""Python loads this file when it starts, from the folder that `oomguard run` puts on PYTHONPATH.

It loads the sitecustomize that it hides, and then waits for torch: a script without torch runs as if this were not
here. It has to run in Python 3.6 and newer, with the standard library alone, and must never make a script fail.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # at run time, importing typing would cost time
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class Waiting:
    """A finder of modules that leaves finding to the others, and calls oomguard when an awaited module is imported."""

    names = ("torch", "torch._dynamo", "keras")

    def __init__(self) -> None:
        self.busy = False  # while the others are asked

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if self.busy or name not in self.names:
            return None
        self.busy = True
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self.busy = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            call_after(spec.loader, name)
        return spec


def call_after(loader: "Any", name: str) -> None:
    """Let a loader call oomguard after it has run its module."""
    run = loader.exec_module

    def exec_module(module: "Any") -> None:
        run(module)
        start(name)

    loader.exec_module = exec_module


def start(name: str) -> None:
    """Tell oomguard that a module was imported. Without torch there is nothing to do."""
    if "torch" not in sys.modules or "OOMGUARD_RUN" not in os.environ:
        return
    try:
        import importlib.util

        spec = importlib.util.find_spec("oomguard")
        if spec is None or spec.origin is None:  # not installed beside this script: take the one that runs it
            load_package()
        importlib.import_module("oomguard._run.inside").start(name)
    except Exception as error:
        report(error)


def load_package() -> None:
    """Load the oomguard that this file is part of, without changing where other packages are found."""
    import importlib.util

    folder = os.path.dirname(os.path.dirname(HERE))
    path = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location("oomguard", path, submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None, path  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules["oomguard"] = module
    spec.loader.exec_module(module)


def report(error: Exception) -> None:
    """Leave a note for `oomguard run` why this process is not watched."""
    try:
        path = os.path.join(os.environ["OOMGUARD_RUN"], f"{os.getpid()}.failed")
        with open(path, "w") as file:
            file.write(f"{sys.executable}\n{type(error).__name__}: {error}\n")
    except OSError:
        pass


def load_hidden() -> None:
    """Load the sitecustomize that Python would have loaded without this one, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, Waiting())
load_hidden()
