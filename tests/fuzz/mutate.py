"""Changes to good input: to its bytes, and to the values of JSON, TOML or a command line."""

import json
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 5, 2**31, 10**30, 0.0, -0.5, 3.5, 1e308, float("nan"), float("inf")),
    *("", "x", "a" * 2000, "../../etc/passwd", "/dev/zero", "a\0b", "\x1b[31m", "é\u202e", "1,2", "-1", "nan"),
    *([], {}, [1, 2], {"a": 1}, [[[]]], {"": None}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a nested one, itself left out."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed_values(rng: Random, text: str) -> str:
    """Return JSON in which a few values are missing, or something else."""
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        paths = [*places(value)]
        if not paths:
            break
        *outer, last = rng.choice(paths)
        holder = value
        for key in outer:
            holder = holder[key]
        if rng.random() < 0.25:
            del holder[last]
        else:
            holder[last] = deepcopy(rng.choice(JUNK))
    return json.dumps(value)


def changed_bytes(rng: Random, content: bytes) -> bytes:
    """Return bytes of which a few are flipped, missing, twice there, or something else."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.choice((1, 1, 4, 100)))
        how = rng.randrange(5)
        if how == 0:
            data[place:end] = bytes(byte ^ 1 << rng.randrange(8) for byte in data[place:end])
        elif how == 1:
            del data[place:end]
        elif how == 2:
            data[place:place] = data[place:end] * rng.choice((1, 2, 50))
        elif how == 3:
            data[place:end] = str(rng.choice(JUNK)).encode("utf-8", "surrogatepass")
        else:
            del data[place:]
    return bytes(data)


def changed_words(rng: Random, words: list[str], more: list[str]) -> list[str]:
    """Return a command line in which a few words are missing, doubled, in another place, or something else."""
    words = [*words]
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(words) + 1)
        how = rng.randrange(4)
        if how == 0:
            del words[place : place + 1]
        elif how == 1:
            words.insert(place, rng.choice(more))
        elif how == 2:
            words[place : place + 1] = [str(rng.choice(JUNK)).replace("\0", "")]
        elif words:
            words.insert(place, rng.choice(words))
    return words
