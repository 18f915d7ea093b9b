"""Blocks of bigfile, read by the definition of the format alone."""

import re

import numpy as np


def block_of(folder):
    """The values of a bigfile block by its definition, after a look at sizes and checksums."""
    lines = (folder / "header").read_text().splitlines()
    dtype, members, count = (line.split(": ")[1] for line in lines[:3])
    files = []
    for line in lines[3:]:
        name, items, total, folded = re.fullmatch(r"(\w{6}): (\d+) : (\d+) : (\d+)", line).groups()
        raw = (folder / name).read_bytes()
        assert sum(raw) % 2**32 == int(total)
        first = (int(total) & 0xFFFF) + (int(total) >> 16)
        assert (first & 0xFFFF) + (first >> 16) == int(folded)
        files.append(np.frombuffer(raw, dtype).reshape(-1, int(members)))
        assert len(files[-1]) == int(items)
    assert len(files) == int(count)
    return np.concatenate(files)


def attributes_of(folder):
    """The attributes of a bigfile block by its definition."""
    found = {}
    for line in (folder / "attr-v2").read_text().splitlines():
        name, dtype, count, raw = line.split(" #HUMANE ")[0].split()
        found[name] = np.frombuffer(bytes.fromhex(raw), dtype)
        assert len(found[name]) == int(count)
    return found
