"""Arrays (`.npy` files or in memory) and plain text as stores; of a file no more than the header is read.

Arrays are N x T x F, or one long series T x F; tokens are N x T, or T. Text is one long series of tokens: bytes, mapped
as they are in the file, or characters, converted once.
"""

import math
import mmap
from collections.abc import Iterator
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np

from oomguard._core.errors import MisuseError, shown
from oomguard._data.options import DataOptions
from oomguard._data.source import Appended, Array, Ints, Mapped, Store, cached, fingerprint, no_data, unreadable
from oomguard._data.values import choose_columns, forecasts, target_width
from oomguard._spec.spec import Spec

CHUNK_CHARACTERS = 1 << 20
"""Characters of text that are converted at a time."""
BYTE_TOKENS = 256
"""Size of the vocabulary if tokens are bytes."""


def open_array(data: Path | Array, spec: Spec, options: DataOptions) -> Store:
    """An array as a store."""
    inputs = map_array(data)
    size_bytes = int(inputs.dtype.itemsize) * math.prod(inputs.shape)
    about = {"kind": "npy", "path": inputs.path, "shape": list(inputs.shape), "bytes": size_bytes}
    axes = 1 if spec.vocab is not None else 2
    single = len(inputs.shape) == 1 and spec.features == 1  # one number per step
    if len(inputs.shape) not in (axes, axes + 1) and not single:
        raise MisuseError(
            rule=f"An array must be {'N x T x F, or T x F' if axes == 2 else 'N x T, or T'}, N series of T steps",
            got=f"{inputs.path} is {' x '.join(map(str, inputs.shape)) or 'a single number'}",
            advice="Reshape it, or check --features and --vocab.",
        )
    if 0 in inputs.shape:
        raise no_data(inputs.path)
    long = single or len(inputs.shape) == axes
    inputs = inputs if long else replace(inputs, group=inputs.shape[1])
    series, steps = (1, inputs.shape[0]) if long else inputs.shape[:2]
    has_columns = axes == 2 and not single
    names = [str(number) for number in range(inputs.shape[-1] if has_columns else 1)]
    targets, per_series, files = inputs, False, [data]
    if options.targets is not None:
        targets, per_series = _map_targets(options, spec, inputs, long=long)
        about["targets"] = options.targets
        files.append(Path(options.targets))
    columns = choose_columns(names, spec, options, inputs.path)
    return Store(
        inputs=inputs,
        targets=targets,
        borders=np.arange(series + 1, dtype=np.int64) * steps,
        long=long,
        input_columns=columns.inputs if has_columns else None,
        target_columns=columns.targets if has_columns and options.targets is None else None,
        ahead=columns.ahead,
        per_series=per_series,
        about=about | {"content": fingerprint(*files)},
    )


def map_array(data: Path | Array) -> Mapped:
    """A `.npy` file, or an array in memory; an `np.memmap` as its file, since what is read of it stays resident."""
    if isinstance(data, np.memmap) and _is_whole_file(data):
        mapped = Mapped.of(data)
    elif isinstance(data, np.ndarray):
        mapped = Mapped("the array", data.dtype, data.shape, held=data)
    else:
        mapped = _open_npy(data)
    if mapped.dtype.kind not in "fiub":
        raise MisuseError(
            rule="An array must hold numbers",
            got=f"{mapped.path} holds {mapped.dtype}",
            advice="Save it as float32, or int64 for tokens.",
        )
    return mapped


def _is_whole_file(data: "np.memmap[Any, Any]") -> bool:
    """Whether a map is that of a whole file that is there; not a slice, nor mode "c", whose changes are in no file."""
    base: Any = data.base  # of a slice, the array it is a slice of
    if not isinstance(base, mmap.mmap) or data.mode == "c":
        return False
    return data.filename is not None and Path(data.filename).is_file()


def _open_npy(path: Path) -> Mapped:
    try:
        with path.open("rb") as file:
            start = file.read(len(np.lib.format.MAGIC_PREFIX))
        mapped = Mapped.npy(path) if start == np.lib.format.MAGIC_PREFIX else None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if not start:
        raise no_data(path)
    if mapped is None:
        raise MisuseError(
            rule="A .npy file is one that np.save has written",
            got=f"{path} does not begin like one",
            advice="Save it with np.save, or give its --format.",
        )
    return mapped


def _map_targets(options: DataOptions, spec: Spec, inputs: Mapped, *, long: bool) -> tuple[Mapped, bool]:
    """The targets in a file of their own, and whether there is one for each series instead of for each step."""
    if options.target is not None:
        raise MisuseError(
            rule="Targets are columns or a file of their own",
            got=f"got --target {','.join(options.target)} and --targets {options.targets}",
            advice="Leave one of the two out.",
        )
    targets, width = map_array(Path(str(options.targets))), target_width(spec)
    lead = inputs.shape[:1] if long else inputs.shape[:2]
    shapes = [targets.shape, (*targets.shape, 1)]  # a single number needs no axis
    may_be_per_series = not long and spec.head == "last-step"
    if may_be_per_series and (lead[0], width) in shapes:
        return targets, True
    if (*lead, width) in shapes:
        return targets if long else replace(targets, group=targets.shape[1]), False
    wanted = " x ".join(map(str, (*lead, width)))
    if may_be_per_series:
        wanted += f" (or {lead[0]} x {width}, one for each series)"
    raise MisuseError(
        rule=f"The targets of {inputs.path} must be {wanted}",
        got=f"{targets.path} is {' x '.join(map(str, targets.shape))}",
        advice="Check --targets, --outputs and --head.",
    )


def open_text(path: Path, spec: Spec, options: DataOptions) -> Store:
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
        tokens, vocabulary = _characters(path, spec.vocab, options)
        about |= {"vocabulary": vocabulary}
    elif options.vocabulary is not None:
        raise MisuseError(rule="A vocabulary is for characters", got="tokens are bytes", advice="Add --characters.")
    else:
        tokens = Mapped(str(path), np.dtype(np.uint8), (size_bytes,), unit="byte")
    return Store(
        inputs=tokens,
        targets=tokens,
        borders=np.array([0, tokens.count], dtype=np.int64),
        long=True,
        ahead=0 if options.inputs_only else 1,
        checked=options.characters or spec.vocab >= BYTE_TOKENS,  # then every byte is a token
        about=about,
    )


def _characters(path: Path, vocab: int, options: DataOptions) -> tuple[Mapped, str]:
    """The file's characters as tokens, from the cache, and the vocabulary."""

    def convert(home: Path) -> dict[str, Any]:
        letters: set[str] = set()
        for text in () if options.vocabulary else _chunks(path):
            letters.update(text)
        vocabulary = options.vocabulary or "".join(sorted(letters))
        size = len(vocabulary)
        dtype = np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32
        with Appended(home / "tokens.npy", index=dtype) as array:
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


def _chunks(path: Path) -> Iterator[str]:
    """The text of a file, some characters at a time."""
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
    order = np.argsort(known)
    places = np.minimum(np.searchsorted(known[order], codes), len(known) - 1)
    unknown = known[order][places] != codes
    if unknown.any():
        first = int(unknown.argmax())
        advice = "Add it to --vocabulary, or take it out of the file."
        raise MisuseError(
            rule="Every character must be in the vocabulary",
            got=f"{place[0]}, character {place[1] + first:,} is {shown(text[first])}",
            advice="Take it out of the file: the model was trained without it." if trained else advice,
        )
    return order[places]
