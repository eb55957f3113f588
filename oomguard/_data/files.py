"""Arrays (`.npy` files or in memory), plain text and pairs as stores; of a file no more than the header is read.

Arrays are N x T x F, or one long series T x F; tokens are N x T, or T. Text is one long series of tokens: bytes, mapped
as they are in the file, or characters, converted once. Pairs that come only once are written to the disk.
"""

import mmap
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from oomguard._core.errors import MisuseError, conflict, shown
from oomguard._core.system import new_temporary
from oomguard._data.options import DataOptions, choose_columns, forecasts, from_the_end, target_width
from oomguard._data.rows import Arrays, checked_pair
from oomguard._data.source import Appended, Array, Ints, Mapped, cached, fingerprint, no_data, unreadable, writable
from oomguard._spec.spec import Spec

CHUNK_CHARACTERS = 1 << 20  # characters of text that are converted at a time
BYTE_TOKENS = 256  # size of the vocabulary if tokens are bytes


def open_array(data: Path | Array, spec: Spec, options: DataOptions) -> Arrays:
    if options.fill == "forward":
        rule = "Values are filled forward in tables"
        raise MisuseError(rule=rule, got="this data is an array", advice="Use --fill mean or zero, or --nan cut.")
    mapped = map_array(data)
    shape, path = mapped.array.shape, mapped.path
    axes = 1 if spec.vocab is not None else 2
    single = len(shape) == 1 and spec.features == 1  # one number per step
    if len(shape) not in (axes, axes + 1) and not single:
        raise MisuseError(
            rule=f"An array must be {'N x T x F, or T x F' if axes == 2 else 'N x T, or T'}, N series of T steps",
            got=f"{path} is {' x '.join(map(str, shape)) or 'a single number'}",
            advice="Reshape it, or check --features and --vocab.",
        )
    if 0 in shape:
        raise no_data(path)
    long = single or len(shape) == axes
    mapped = replace(mapped, grouped=not long)
    about = {"kind": "npy", "path": path, "shape": list(shape), "bytes": mapped.array.nbytes}
    own_targets = None if options.targets is None else _map_targets(options, spec, mapped)
    has_columns = axes == 2 and not single
    names = [str(number) for number in range(shape[-1] if has_columns else 1)]
    input_names, target_names, ahead = choose_columns(names, spec, from_the_end(options, len(names)), path)
    inputs = replace(mapped, columns=tuple(map(int, input_names))) if has_columns else mapped
    targets = inputs
    if own_targets is not None:
        targets, about["targets"] = own_targets, options.targets
    elif has_columns and target_names != input_names:
        targets = replace(mapped, columns=tuple(map(int, target_names)))
    series, steps = (1, shape[0]) if long else shape[:2]
    return Arrays(
        inputs=inputs,
        targets=targets,
        borders=np.arange(series + 1) * steps,
        long=long,
        fill=options.fill,
        ahead=ahead,
        per_series=not long and own_targets is not None and not own_targets.grouped,
        about=about | {"content": fingerprint(data, *([Path(options.targets)] if options.targets else []))},
    )


def map_array(data: Path | Array) -> Mapped:
    """A `.npy` file, or an array in memory, which may be a map of a file."""
    if not isinstance(data, np.ndarray):
        mapped = _open_npy(data)
    elif isinstance(data, np.memmap) and _is_whole_file(data):
        mapped = Mapped(data, str(data.filename))
    else:
        mapped = Mapped(np.asarray(data), "the array")  # no longer an np.memmap, whose pages are released
    if mapped.array.dtype.kind not in "fiub":
        raise MisuseError(
            rule="An array must hold numbers",
            got=f"{mapped.path} holds {mapped.array.dtype}",
            advice="Save it as float32, or int64 for tokens.",
        )
    return mapped


def _is_whole_file(data: "np.memmap[Any, Any]") -> bool:
    """Whether a map is that of a whole file that is there; not a slice, nor mode "c", whose changes are in no file."""
    base: object = data.base  # of a slice, the array it is a slice of
    return isinstance(base, mmap.mmap) and data.mode != "c" and Path(data.filename or "").is_file()


def _open_npy(path: Path) -> Mapped:
    try:
        with path.open("rb") as file:
            start = file.read(len(np.lib.format.MAGIC_PREFIX))
        if start == np.lib.format.MAGIC_PREFIX:
            return Mapped.npy(path)
    except Exception as error:  # NumPy reads the header as Python, with errors of many kinds
        raise unreadable(path, error) from None
    if not start:
        raise no_data(path)
    raise MisuseError(
        rule="A .npy file is one that np.save has written",
        got=f"{path} does not begin like one",
        advice="Save it with np.save, or give its --format.",
    )


def _map_targets(options: DataOptions, spec: Spec, inputs: Mapped) -> Mapped:
    """The targets in a file of their own, for each step or for each series."""
    if options.target is not None:
        first = f"--target {','.join(options.target)}"
        raise conflict("Targets are columns or a file of their own", first, f"--targets {options.targets}")
    targets, width = map_array(Path(str(options.targets))), target_width(spec)
    lead = inputs.array.shape[: 1 + inputs.grouped]
    shape = targets.array.shape
    shapes = [shape, (*shape, 1)]  # a single number needs no axis
    may_be_per_series = inputs.grouped and spec.head == "last-step"
    if may_be_per_series and (lead[0], width) in shapes:
        return targets
    if (*lead, width) in shapes:
        return replace(targets, grouped=inputs.grouped)
    wanted = " x ".join(map(str, (*lead, width)))
    if may_be_per_series:
        wanted += f" (or {lead[0]} x {width}, one for each series)"
    raise MisuseError(
        rule=f"The targets of {inputs.path} must be {wanted}",
        got=f"{targets.path} is {' x '.join(map(str, shape))}",
        advice="Check --targets, --outputs and --head.",
    )


def open_text(path: Path, spec: Spec, options: DataOptions) -> Arrays:
    """A text as one long series of tokens; the target of each token is the next one."""
    if spec.vocab is None or not forecasts(spec):
        raise MisuseError(
            rule="Text is learned by predicting the next token, so it needs --vocab, and --outputs of the same size",
            got=f"got vocab {spec.vocab}, outputs {spec.outputs}, loss {spec.loss}",
            advice=f"Set --vocab {BYTE_TOKENS} for bytes, and leave --outputs out.",
        )
    size_bytes = path.stat().st_size
    if not size_bytes:
        raise no_data(path)
    about = {"kind": "text", "path": str(path), "bytes": size_bytes, "content": fingerprint(path)}
    if options.characters:
        tokens, about["vocabulary"] = _characters(path, spec.vocab, options)
    elif options.vocabulary is not None:
        raise MisuseError(rule="A vocabulary is for characters", got="tokens are bytes", advice="Add --characters.")
    else:
        tokens = Mapped(np.memmap(path, np.uint8, "r"), str(path), unit="byte")
    return Arrays(
        inputs=tokens,
        targets=tokens,
        borders=np.array([0, len(tokens.array)]),
        long=True,
        ahead=0 if options.inputs_only else 1,
        checked=options.characters or spec.vocab >= BYTE_TOKENS,  # then every byte is a token
        about=about,
    )


def _characters(path: Path, vocab: int, options: DataOptions) -> tuple[Mapped, str]:
    """The file's characters as tokens, from the cache, and the vocabulary."""

    def convert(home: Path) -> dict[str, str]:
        vocabulary = options.vocabulary or characters_of(path)
        with Appended(home / "tokens.npy", index=np.min_scalar_type(len(vocabulary) - 1)) as array:
            for text in _chunks(path):
                array.append(_tokens(text, vocabulary, (path, array.rows), trained=options.inputs_only))
        return {"vocabulary": vocabulary}

    settings = {"characters": True, "vocabulary": options.vocabulary}
    home, about = cached(path, options.cache, settings, convert)
    vocabulary = about["vocabulary"]
    if len(vocabulary) > vocab:
        raise MisuseError(
            rule="--vocab must be at least the number of different characters",
            got=f"{path} has {len(vocabulary):,}, and --vocab is {vocab:,}",
            advice=f"Set --vocab {len(vocabulary)}, or let tokens be bytes (--vocab {BYTE_TOKENS}).",
        )
    return replace(Mapped.npy(home / "tokens.npy"), unit="character"), vocabulary


def characters_of(path: Path) -> str:
    """The different characters of a text, sorted."""
    return "".join(sorted(set().union(*_chunks(path))))


def _chunks(path: Path) -> Iterator[str]:
    with path.open("rb") as raw, TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        try:
            while text := file.read(CHUNK_CHARACTERS):
                yield text
        except UnicodeDecodeError as error:
            place = raw.tell() - len(error.object) + error.start
            raise unreadable(path, ValueError(f"byte {place:,} is not UTF-8: leave --characters out")) from None


def _tokens(text: str, vocabulary: str, place: tuple[Path, int], *, trained: bool) -> Ints:
    """The place of each character in the vocabulary; `place` is the file and the number of characters before."""
    known, codes = (np.frombuffer(part.encode("utf-32-le"), dtype=np.uint32) for part in (vocabulary, text))
    token_of = np.full(sys.maxunicode + 1, -1)
    token_of[known] = np.arange(len(known))
    tokens = token_of[codes]
    unknown = tokens < 0
    if unknown.any():
        first = int(unknown.argmax())
        advice = "Add it to --vocabulary, or take it out of the file."
        raise MisuseError(
            rule="Every character must be in the vocabulary",
            got=f"{place[0]}, character {place[1] + first:,} is {shown(text[first])}",
            advice="Take it out of the file: the model was trained without it." if trained else advice,
        )
    return tokens


def spool(pairs: Iterable[Any], spec: Spec, options: DataOptions) -> Arrays:
    """Pairs that come only once, written to the disk: every epoch needs them again, in another order.

    The files are removed when the store is collected, or when this process ends; a forked worker leaves them alone.
    """
    base = Path(options.cache or tempfile.gettempdir())
    with writable(base):
        home = new_temporary(base)

    def remove(pid: int) -> None:
        if os.getpid() == pid:
            shutil.rmtree(home, ignore_errors=True)

    try:
        lengths = _write_pairs(pairs, spec, options, home)
        inputs, targets = Mapped.npy(home / "inputs.npy"), Mapped.npy(home / "targets.npy")
    except BaseException:
        remove(os.getpid())
        raise
    weakref.finalize(inputs, remove, os.getpid())
    content = fingerprint(Path(inputs.path), Path(targets.path))
    return Arrays(
        inputs=inputs,
        targets=targets,
        borders=np.cumsum([0, *lengths]),
        per_series=spec.head == "last-step",
        checked=True,
        about={"kind": "pairs", "path": type(pairs).__name__, "bytes": inputs.array.nbytes, "content": content},
    )


def _write_pairs(pairs: Iterable[Any], spec: Spec, options: DataOptions, home: Path) -> list[int]:
    """Write all pairs into two arrays, and return the steps of each."""
    lengths: list[int] = []
    with (
        Appended(home / "inputs.npy", None if spec.vocab is not None else spec.inputs) as inputs,
        Appended(home / "targets.npy", None if spec.loss == "cross-entropy" else spec.classes) as targets,
    ):
        for number, item in enumerate(islice(pairs, options.limit)):
            sequence, target = checked_pair(spec, item, options.nan, f"pair {number:,}")
            inputs.append(sequence)
            targets.append(target if spec.head == "per-step" else target[None])
            lengths.append(len(sequence))
    if not lengths:
        raise no_data(f"the {type(pairs).__name__}")
    return lengths
