"""Tensors on their way to the disk, one at a time, with the checksum of what was written.

safetensors itself reads them. It does not write them, since it first copies all tensors of a card to host memory, which
may not have the room, and the checksum would take reading the whole file again.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from oomguard.files import opened, write_all

_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
"""Names in the header (safetensors 0.8, lib.rs, Dtype): all that weights and optimizer states are made of."""
_ALIGNED_BYTES = 8  # safetensors 0.8, lib.rs: the header is padded with spaces, so that what follows is aligned


class Sum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file must be like to be whole."""

    sha256: str
    """Checksum of its bytes, in hexadecimal."""
    size_bytes: int
    """How many there are."""


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Sum:
    """Write a new file piece by piece, and return once it is on the disk."""
    found, size_bytes = hashlib.sha256(), 0
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
        for piece in pieces:
            found.update(piece)
            write_all(file, piece)
            size_bytes += len(piece)
            del piece  # otherwise this tensor still lives in host memory while the next one comes from the card
        os.fsync(file)
    return Sum(sha256=found.hexdigest(), size_bytes=size_bytes)


def sum_of(path: Path) -> Sum:
    """What is there now."""
    with path.open("rb") as file:
        return Sum(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size_bytes=file.tell())


def packed(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The pieces of a safetensors file. Tensors that share memory (tied or flattened weights) are written each alone.

    >>> b"".join(packed({"one": torch.zeros(2, dtype=torch.int8)}))[8:].decode().rstrip("\\0")
    '{"one":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}} '
    """
    # the widest numbers first, so that all are aligned without gaps, which the format does not have
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    yield _header({name: tensors[name] for name in names})
    for name in names:
        yield _content(tensors[name])


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Eight bytes that say how long it is; dtype, shape and place of every tensor as JSON."""
    places, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        places[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(places, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    return len(text).to_bytes(8, "little") + text


def _content(tensor: Tensor) -> memoryview:
    """The bytes of one tensor: its own if it is on the CPU and in one piece, otherwise a copy."""
    whole = tensor.detach().cpu().contiguous()
    view: memoryview = whole.flatten().view(torch.uint8).numpy().data
    return view
