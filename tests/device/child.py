"""Code run in a process of its own: peaks and limits belong to a whole process."""

import os
import subprocess
import sys

from oomguard._core.units import MIB

BIG_BYTES = 256 * MIB
PRELUDE = f"""
import mmap, resource
from oomguard._device.cpu import Cpu
BIG_BYTES = {BIG_BYTES}
cpu = Cpu()
def commit(size_bytes=BIG_BYTES):
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def touch(size_bytes=BIG_BYTES):
    return bytearray(b"x") * size_bytes
def soft():
    return resource.getrlimit(resource.RLIMIT_DATA)[0]
"""


def child(code: str, **environment: str) -> str:
    """What the code prints."""
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def numbers(code: str, **environment: str) -> list[int]:
    """The whole numbers that the code prints."""
    return [int(word) for word in child(PRELUDE + code, **environment).split()]
