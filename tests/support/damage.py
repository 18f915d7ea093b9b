"""Files as others may hand them over: flipped, cut, linked, endless, or with other values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

TEXTS = (".json", ".csv", ".txt", ".toml")
WRONG = (
    None, True, -1, 0, 3, 1.5, 1e300, float("nan"), float("inf"), 10**400, 2**63, "", "a text",
    "\x1b[2J", "\ud800", "x" * 5000, [], [[]], [None], ["a", "b", "c"], [1e9] * 3,
    [float("nan")] * 3, [4, 8, 8], {}, {"a": 1},
)  # fmt: skip
"""Values in place of one in a JSON file."""
WORDS = ("", "nan", "inf", "-1", "1e999", "a", "9" * 5000, "[", '"', "\x00", "0x10", "1,2,3")
"""Words in place of one in a text file."""
ARRAYS = (
    b"text", 0, -1, 1e300, np.nan, np.inf, np.zeros(0), np.zeros(6), np.full(6, np.nan),
    np.array([0, 2**62, 0, 0, 0, 0]), np.array([b"a", b"b"]), np.zeros((2, 2)), np.array([1, 1j]),
)  # fmt: skip
"""Values in place of an attribute or a data set of an HDF5 file."""


def flipped(path: Path, generator: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    for place in generator.integers(len(data), size=1 + generator.integers(4)) if data else ():
        data[place] ^= 1 << generator.integers(8)
    path.write_bytes(data)


def cut(path: Path, generator: np.random.Generator) -> None:
    os.truncate(path, int(generator.integers(max(1, path.stat().st_size))))


def zeroed(path: Path, generator: np.random.Generator) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def random(path: Path, generator: np.random.Generator) -> None:
    path.write_bytes(generator.bytes(path.stat().st_size))


def lengthened(path: Path, generator: np.random.Generator) -> None:
    with path.open("ab") as file:
        file.write(generator.bytes(1000))


def endless(path: Path, generator: np.random.Generator) -> None:
    """Makes a sparse file, which takes no room on the disk."""
    os.truncate(path, 2**43)


def missing(path: Path, generator: np.random.Generator) -> None:
    path.unlink()


def pipe(path: Path, generator: np.random.Generator) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path, generator: np.random.Generator) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def circle(path: Path, generator: np.random.Generator) -> None:
    path.unlink()
    path.symlink_to(path.name)


def folder(path: Path, generator: np.random.Generator) -> None:
    path.unlink()
    path.mkdir()


def unreadable(path: Path, generator: np.random.Generator) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")


def nested(path: Path, generator: np.random.Generator) -> None:
    path.write_text("[" * 200_000)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields all containers in a value of JSON, with the keys of what is in them."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def other_value(path: Path, generator: np.random.Generator) -> None:
    """Gives a value another type in a JSON file or an HDF5 file; a word in any other text."""
    if path.suffix == ".hdf5":
        return _of_hdf5(path, generator)
    if path.suffix == ".json":
        table = json.loads(path.read_text())
        container, key = _any(list(_places(table)) or [(table, "new")], generator)
        if generator.random() < 0.2 and table:
            del container[key]
        else:
            container[key] = _any(WRONG, generator)
        path.write_text(json.dumps(table))
        return None
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return flipped(path, generator)
    word = _any(list(re.finditer(r"[\w.+-]+", text)) or [re.match("", text)], generator)
    path.write_text(text[: word.start()] + _any(WORDS, generator) + text[word.end() :])
    return None


def _of_hdf5(path: Path, generator: np.random.Generator) -> None:
    with h5py.File(path, "r+") as file:
        places: list[tuple[Any, str]] = []

        def note(name: str, item: Any) -> None:
            places.extend((item.attrs, key) for key in item.attrs)
            if isinstance(item, h5py.Dataset):
                places.extend([(file, name)] * 5)

        file.visititems(note)
        holder, name = _any(places, generator)
        value = _any(ARRAYS, generator)
        if holder is file and generator.random() < 0.5:  # one value that is not finite
            data = file[name][...]
            values = data[_any(data.dtype.names, generator)] if data.dtype.names else data
            wrong = np.nan if values.dtype.kind == "f" else np.iinfo(values.dtype).max
            values.flat[generator.integers(values.size)] = wrong
            value = data
        del holder[name]
        if generator.random() < 0.9:
            holder[name] = value


def _any(values: Any, generator: np.random.Generator) -> Any:
    return values[generator.integers(len(values))]


Damage = Callable[[Path, np.random.Generator], None]
DAMAGES: tuple[Damage, ...] = (
    flipped, cut, zeroed, random, lengthened, endless, missing, pipe, device, circle, folder,
    unreadable, nested, *[other_value] * 8,
)  # fmt: skip
