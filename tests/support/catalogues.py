"""Catalogues of random numbers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import flowpm_dist as fpm
from flowpm_dist.catalogues.catalogue import Catalogue
from meshimpl.process_mesh import ProcessMesh

SIZE = (40.0, 50.0, 60.0)


@functools.cache
def about() -> dict[str, Any]:
    numbers = fpm.Cosmology.planck18().numbers()
    known = {"a": 0.5, "grid": [32, 32, 32], "box_size": list(SIZE), "cosmology": numbers}
    return {**known, "linking_length": 0.2, "minimum": 20}


def made(
    count: int = 50, members: bool = True, mesh: ProcessMesh | None = None, **more: np.ndarray
) -> Catalogue:
    """Halos of random numbers, of which some have equal masses: whole on each rank of a mesh."""
    rng = np.random.default_rng(1)
    number = rng.integers(20, 40, count)
    columns = {
        "id": rng.permutation(10**12 + np.arange(count)),
        "number": number,
        "mass": number * 1.2345678e10,
        "position": rng.random((count, 3)) * SIZE,
        "velocity": rng.normal(0, 300, (count, 3)),
        "axis_directions": rng.normal(size=(count, 3, 3)),
        "radius_200m": np.where(rng.random(count) < 0.2, np.nan, 1.0),
        "edge": rng.random(count) < 0.5,
        **more,
    }
    numbers = rng.integers(0, 2**40, number.sum()) if members else None
    ranks, is_whole = mesh or ProcessMesh(""), mesh is not None
    return Catalogue("halos", columns, about(), ranks, count, is_whole, numbers).sorted()


def assert_same(one: Catalogue, other: Catalogue) -> None:
    assert (one.kind, one.about, one.total) == (other.kind, other.about, other.total)
    assert [*one.columns] == [*other.columns]
    for name, values in one.columns.items():
        assert values.dtype == other[name].dtype
        np.testing.assert_array_equal(values, other[name], err_msg=name)
    assert (one.members is None) == (other.members is None)
    if one.members is not None:
        np.testing.assert_array_equal(one.members, other.members)
