"""One thread for every test, and the same examples in every run. To look further: pytest --hypothesis-profile deep"""

import gc
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# set here, before anything imports torch: most tests never do, so torch.set_num_threads(1) would cost them the import
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["KERAS_BACKEND"] = "torch"  # Keras reads it when it is imported first
os.environ["OOMGUARD_CACHE"] = ""  # no test reads or writes the user's calibrations, nor does a process that it starts
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it would be ignored

HOLD = """
import sys, torch
kept = torch.ones(int(sys.argv[1]), dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""

settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("deep", max_examples=1000, deadline=None, database=None)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def empty_card(request: pytest.FixtureRequest) -> None:
    """A test on a card finds nothing there that the one before it has left."""
    if request.node.get_closest_marker("gpu"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """One browser for all tests of a process: Playwright cannot be started twice in one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"there is no browser here ({', '.join(names)})")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def neighbour() -> Iterator[Callable[[int], None]]:
    """Lets another process take so many bytes of cuda:0 (0: give all back).

    Where a card cannot be shared for real, the command in OOMGUARD_TEST_NEIGHBOUR is run with the bytes instead.
    """
    import torch

    command = os.environ.get("OOMGUARD_TEST_NEIGHBOUR")
    others: list[subprocess.Popen[str]] = []

    def take(size_bytes: int) -> None:
        while others:
            others.pop().communicate()  # it ends with its stdin
        if command:
            subprocess.run([*shlex.split(command), str(size_bytes)], check=True)
        elif size_bytes:
            free_bytes = torch.cuda.mem_get_info(0)[0]
            size_bytes = min(size_bytes, free_bytes * 3 // 4)  # it needs some for itself
            words = [sys.executable, "-c", HOLD, str(size_bytes)]
            others.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stdout = others[0].stdout
            assert stdout is not None
            assert stdout.readline() == "held\n"
            if torch.cuda.mem_get_info(0)[0] > free_bytes - size_bytes // 2:
                take(0)
                pytest.skip("this card does not show one process what another holds of it")

    yield take
    take(0)
