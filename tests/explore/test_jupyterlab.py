"""The explorer in JupyterLab: a slider of a notebook in a browser moves the figures that the kernel computes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser

from oomguard._core.units import format_bytes

CODE = 'import oomguard\noomguard.explore(cell="gru", seq=500, hidden=64, device="t4", budget="4GiB")'
FLAGS = ["--model", "gru", "--seq", "500", "--hidden", "64", "--device", "t4", "--budget", "4GiB", "--layers", "16"]
FOLDERS = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
"""Where Jupyter reads and writes files of the user, as environment variables."""
OPTIONS = (
    *("--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"),
    *("--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"),
)


@pytest.fixture
def address(browser: Browser, tmp_path: Path) -> Iterator[str]:
    """The address of a notebook in a JupyterLab on loopback. (Without a browser, none is started.)"""
    cell: dict[str, Any] = {
        "cell_type": "code",
        "id": "a",
        "source": CODE,
        "metadata": {},
        "outputs": [],
        "execution_count": None,
    }
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "explore.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    command = [sys.executable, "-m", "jupyterlab", *OPTIONS, f"--ServerApp.root_dir={tmp_path / 'files'}"]
    environment = os.environ | {name: str(tmp_path / "home") for name in FOLDERS}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = (re.search(r"(http://127\.0\.0\.1:\d+/lab)(\?token=\w+)", line) for line in process.stderr)
        found = next(match for match in lines if match)
        yield f"{found[1]}/tree/explore.ipynb{found[2]}"
        process.terminate()
        process.stderr.read()


@pytest.mark.timeout(300)
def test_a_slider_in_jupyterlab_shows_what_the_command_prints(browser: Browser, address: str) -> None:
    page, hosts = browser.new_page(viewport={"width": 1400, "height": 1000}), set[str | None]()
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    page.set_default_timeout(120_000)
    page.goto(address)
    page.locator(".jp-Cell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    slider = page.locator('.explorer .control:has(input[name="layers"]) input[type="range"]')
    slider.focus()
    slider.press("End")
    page.locator('.explorer .copied + pre:has-text("--layers 16")').wait_for()
    shown = page.inner_text('.explorer tr[data-term="total"] td.r')
    page.close()
    command = [sys.executable, "-m", "oomguard", "estimate", *FLAGS, "--json"]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout)
    assert shown == format_bytes(printed["total_bytes"])
    assert hosts - {None} == {"127.0.0.1"}  # None: parts of the page itself, as data: and blob: addresses
