"""Plain text: tokens are bytes, read from the file as it is, or characters, converted once."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oomguard.checks import shown
from oomguard.data.cache import Appended, cached
from oomguard.data.columns import forecasts
from oomguard.data.options import DataOptions
from oomguard.data.rows import Store
from oomguard.data.source import Array, Ints, Mapped, fingerprint, nothing_in, unreadable
from oomguard.errors import MisuseError
from oomguard.spec import Spec

CHUNK_BYTES = 1 << 20
BYTES = 256
"""Tokens, if they are bytes."""


def open_text(path: Path, spec: Spec, options: DataOptions) -> Store:
    """One long series of tokens; the target of each is the next."""
    if spec.vocab is None or not forecasts(spec):
        raise MisuseError(
            rule="Text is learned by predicting the next token, so it needs --vocab, and --outputs of the same size",
            got=f"got vocab {spec.vocab}, outputs {spec.outputs}, loss {spec.loss}",
            advice=f"Set --vocab {BYTES} for bytes, and leave --outputs out.",
        )
    size_bytes = path.stat().st_size
    if not size_bytes:
        raise nothing_in(path)
    about = {"kind": "text", "path": str(path), "bytes": size_bytes, "content": fingerprint(path)}
    if options.characters:
        tokens, vocabulary = _characters(path, spec, options)
        about |= {"vocabulary": vocabulary}
    elif options.vocabulary is not None:
        raise MisuseError(rule="A vocabulary is for characters", got="tokens are bytes", advice="Add --characters.")
    else:
        tokens = Mapped(str(path), np.uint8, (size_bytes,))
        tokens.unit = "byte"
    borders = np.array([0, tokens.count], dtype=np.int64)
    ahead = 0 if options.inputs_only else 1
    checked = options.characters or spec.vocab >= BYTES  # every byte is a token then
    return Store(inputs=tokens, targets=tokens, borders=borders, long=True, ahead=ahead, checked=checked, about=about)


def _characters(path: Path, spec: Spec, options: DataOptions) -> tuple[Mapped, str]:
    """The file's characters as tokens, from the cache, and the vocabulary."""
    given = None if options.vocabulary is None else options.vocabulary

    def convert(home: Path) -> dict[str, Any]:
        vocabulary = "".join(map(chr, _distinct(path))) if given is None else given
        with Appended(home / "tokens", _dtype(len(vocabulary)), None) as array:
            for codes in _codes(path):
                place = (path, array.rows)
                array.append(_tokens(codes, vocabulary, place, trained=options.inputs_only))
        return {"vocabulary": vocabulary, "tokens": array.rows}

    home, about = cached(path, options.cache, {"characters": True, "vocabulary": given}, convert)
    vocabulary = about["vocabulary"]
    if len(vocabulary) > (spec.vocab or 0):
        raise MisuseError(
            rule="--vocab must be at least the number of different characters",
            got=f"{path} has {len(vocabulary):,}, and --vocab is {spec.vocab:,}",
            advice=f"Set --vocab {len(vocabulary)}, or let tokens be bytes (--vocab {BYTES}).",
        )
    tokens = Mapped(str(home / "tokens"), _dtype(len(vocabulary)), (about["tokens"],))
    tokens.unit = "character"
    return tokens, vocabulary


def _dtype(size: int) -> type[np.generic]:
    return np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32


def _codes(path: Path) -> Iterator[Array]:
    """The numbers of the file's characters in Unicode, a chunk at a time."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            chunk = file.read(CHUNK_BYTES)
            waiting = len(decoder.getstate()[0])  # bytes of a character that the chunk before began
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                place = offset - waiting + error.start
                raise unreadable(path, ValueError(f"byte {place:,} is no UTF-8: leave --characters out")) from None
            offset += len(chunk)
            if text:
                yield np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
            if not chunk:
                return


def _distinct(path: Path) -> Ints:
    found = np.empty(0, dtype=np.int64)
    for codes in _codes(path):
        found = np.union1d(found, codes.astype(np.int64))
    return found


def _tokens(codes: Array, vocabulary: str, place: tuple[Path, int], *, trained: bool) -> Array:
    """The place of each character in the vocabulary; `place` is the file, and how many characters came before."""
    known = np.frombuffer(vocabulary.encode("utf-32-le"), dtype=np.uint32)
    order = np.argsort(known)
    places = np.minimum(np.searchsorted(known[order], codes), len(known) - 1)
    unknown = known[order][places] != codes
    if unknown.any():
        first = int(unknown.argmax())
        raise MisuseError(
            rule="Every character must be in the vocabulary",
            got=f"{place[0]}, character {place[1] + first:,} is {shown(chr(int(codes[first])))}",
            advice="Take it out of the file: the model was trained without it."
            if trained
            else "Add it to --vocabulary, or take it out of the file.",
        )
    return order[places]
