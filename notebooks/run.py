"""Execute the notebooks from top to bottom and store them with their outputs.

    python notebooks/run.py [NOTEBOOK ...] [--output DIR]

Without names, all notebooks run. Without `--output`, each notebook is overwritten. The kernel is the Python that runs
this script, even if other kernels are installed, and its working directory is the folder of the notebooks.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets import default

HERE = Path(__file__).parent
CELL_SECONDS = 300
"""Time limit of one cell. No cell needs nearly as much, so only a cell that hangs is stopped."""
VOLATILE = ("execution", "widgets")
"""Metadata that changes from run to run and is not stored."""
WIDGET = "application/vnd.jupyter.widget-view+json"
"""Names an object of a kernel that runs. It is not stored, but the text of the widget is."""


class OwnKernel(AsyncKernelManager):
    """Starts this Python as the kernel, and talks to it through socket files, so that no port is opened."""

    @default("kernel_spec_manager")
    def _only_this_python(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])  # without installed kernels, this Python is used

    @default("transport")
    def _by_files(self) -> str:
        return "ipc"

    @default("ip")
    def _there(self) -> str:
        return f"{os.environ['JUPYTER_RUNTIME_DIR']}/socket"


def execute(source: Path, target: Path) -> None:
    """Run one notebook, and write it with its outputs."""
    notebook = nbformat.read(source, as_version=4)
    resources = {"metadata": {"path": str(HERE)}}
    NotebookClient(notebook, kernel_manager_class=OwnKernel, timeout=CELL_SECONDS, resources=resources).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not is_empty(output)]
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)
        for name in VOLATILE:
            cell.metadata.pop(name, None)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(notebook, target)


def is_empty(output: Any) -> bool:
    """Whether an output shows nothing, as progress does when it has ended."""
    return output.output_type == "display_data" and not any(output.data.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="notebooks to execute (default: all)")
    parser.add_argument("--output", type=Path, help="directory of the executed notebooks (default: overwrite them)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR"):
            os.environ[name] = home  # no file of the user is read or written
        os.environ["OOMGUARD_CACHE"] = ""  # no calibration of an earlier search is used
        for source in args.notebooks or sorted(HERE.glob("*.ipynb")):
            began = time.monotonic()
            if args.output is not None:
                args.output.mkdir(parents=True, exist_ok=True)
            execute(source, (args.output or source.parent) / source.name)
            print(f"{source.name}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
