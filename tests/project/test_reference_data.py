"""The reference data of the repository: its size, its description, and what its parts cover."""

import re

import numpy as np
import pytest
from reference import DATA, reference

NAMES = sorted(path.stem for path in DATA.glob("*.npz"))
LARGEST = 15_000_000
"""Size of all files together [bytes]."""
README = (DATA / "README.md").read_text(encoding="utf-8")


def described(name):
    """The arrays in README's section of a file, and in the table that is common to all."""
    first, *sections = README.split("\n## ")
    (own,) = [text for text in sections if name in text.splitlines()[0].split(", ")]
    rows = [line for line in (first + own).splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall("`(\\w+)`", row.split("|")[1])}


def test_the_files_are_small():
    assert NAMES and sum((DATA / f"{name}.npz").stat().st_size for name in NAMES) <= LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_every_array_is_described(name):
    assert set(reference(name)) <= described(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_plane_of_a_grid_has_stored_values(name):
    """So that a defect at the border of any rank's part is seen."""
    for places in {"sites", "cells", "pixels"} & set(reference(name)):
        index = reference(name)[places]
        assert len(np.unique(index, axis=1).T) == index.shape[1]
        for axis in index:
            stored = np.bincount(axis)
            assert len(stored) in (16, 32, 64, 128) and stored.min() > 0
