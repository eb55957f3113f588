"""Execute the notebooks from top to bottom and store them with their outputs.

    python notebooks/run.py [NOTEBOOK ...] [--output DIR]

Without names all of them, and each where it lies. The kernel is the Python that runs this script, whatever kernels are
installed beside it, and it works in the folder of the notebooks.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets import default

HERE = Path(__file__).parent
SECONDS = 300
"""For one cell: far more than any needs, so that only one that hangs is ended."""
VOLATILE = ("execution", "widgets")
"""Metadata that changes from run to run and says nothing."""


class OwnKernel(AsyncKernelManager):
    """Starts this very Python as the kernel, and talks to it through files: no port is opened."""

    @default("kernel_spec_manager")
    def _only_this_python(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])  # where no kernel is installed, ipykernel of this Python is taken

    @default("transport")
    def _by_files(self) -> str:
        return "ipc"

    @default("ip")
    def _there(self) -> str:
        return f"{os.environ['JUPYTER_RUNTIME_DIR']}/socket"


def execute(source: Path, target: Path) -> None:
    """Run one notebook and write it with what came of it."""
    notebook = nbformat.read(source, as_version=4)
    place = {"metadata": {"path": str(HERE)}}
    NotebookClient(notebook, kernel_manager_class=OwnKernel, timeout=SECONDS, resources=place).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        for name in VOLATILE:
            cell.metadata.pop(name, None)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(notebook, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="those to execute (all)")
    parser.add_argument("--output", type=Path, help="where they are stored (where they lie)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR"):
            os.environ[name] = home  # nothing of the user's is read or written
        os.environ["OOMGUARD_CACHE"] = ""  # nor are calibrations of earlier searches
        for source in asked.notebooks or sorted(HERE.glob("*.ipynb")):
            began = time.monotonic()
            execute(source, (asked.output or source.parent) / source.name)
            print(f"{source.name}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
