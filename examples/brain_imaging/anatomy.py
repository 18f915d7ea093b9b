"""Complex volumes of heads, made from a template of the brain by a seed.

Each volume is another deformation, position, contrast and phase of the same three tissues. With
`--anatomy made-up` the tissues are nested, wavy ellipsoids, and no package is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import ndimage
from scipy.spatial.transform import Rotation

TISSUES = ("white matter", "grey matter", "fluid")
SIZE = 200.0
"""Side of a cube that holds a head [mm]."""


class InputError(ValueError):
    """A mistake of the user; the message says what to change."""


@dataclass(frozen=True)
class Anatomy:
    """Shares of tissues on a grid.

    Attributes:
        tissues: float32 [tissue, x, y, z], the share of each of `TISSUES`, 0 to 1.
        texture: float32 [x, y, z], the relative brightness within the tissues, about 1.
        centre: the middle of the brain [cells].
        cell: the side of a cell [mm].
    """

    tissues: np.ndarray
    texture: np.ndarray
    centre: np.ndarray
    cell: float = 1.0


@functools.cache
def template() -> Anatomy:
    """Returns the ICBM 2009a MNI152 template (Fonov et al. 2011), from files within nilearn.

    Raises:
        InputError: nilearn is not installed.
    """
    try:
        from nilearn import datasets
    except ImportError as error:
        raise InputError(
            f"the template of the brain is in the package nilearn, which cannot be imported "
            f"({error}): pip install nilearn, or use --anatomy made-up"
        ) from None

    def cells(load: Callable[..., object]) -> np.ndarray:
        return load(resolution=1).get_fdata(dtype=np.float32)  # type: ignore[attr-defined]

    inside = cells(datasets.load_mni152_brain_mask) > 0
    white, grey = (
        np.clip(cells(load), 0, 1) * inside
        for load in (datasets.load_mni152_wm_template, datasets.load_mni152_gm_template)
    )
    total = np.maximum(white + grey, 1)
    white, grey = white / total, grey / total
    tissues = np.stack([white, grey, inside - white - grey])
    bright = cells(datasets.load_mni152_template)
    mean = [np.average(bright, weights=tissue) for tissue in tissues]
    expected = np.einsum("txyz,t->xyz", tissues, mean)
    texture = np.where(inside, bright / np.maximum(expected, 0.05), 1)
    corners = np.argwhere(inside)
    centre = (corners.min(axis=0) + corners.max(axis=0)) / 2
    return Anatomy(tissues, np.clip(texture, 0.5, 1.5).astype(np.float32), centre)


@functools.cache
def made_up() -> Anatomy:
    """Returns a head of nested ellipsoids with folds, for tests."""
    places = np.linspace(-1, 1, int(SIZE) // 4)  # cells of 4 mm
    x, y, z = np.meshgrid(places, places, places, indexing="ij", sparse=True)
    angle, height = np.arctan2(y, x), np.arctan2(z, np.hypot(x, y))
    radius = np.sqrt((x / 0.75) ** 2 + (y / 0.9) ** 2 + (z / 0.8) ** 2)
    folds = 0.06 * np.cos(14 * angle) * np.cos(10 * height)
    inside, white, fluid = radius < 1, radius + folds < 0.8, radius < 0.25
    tissues = np.stack([white & ~fluid, inside & ~white, fluid]).astype(np.float32)
    return Anatomy(tissues, np.ones_like(tissues[0]), np.full(3, (len(places) - 1) / 2), 4.0)


ANATOMIES: dict[str, Callable[[], Anatomy]] = {"mni152": template, "made-up": made_up}


def smooth_field(
    rng: np.random.Generator, sides: tuple[int, ...], points: int, spread: float
) -> np.ndarray:
    """Returns a smooth random field [x, y, z], a spline through random values.

    Args:
        rng: the source of random numbers.
        sides: the cells along x, y, z.
        points: the random values along each side.
        spread: their standard deviation.
    """
    values, spline = rng.normal(0, spread, [points] * 3), {"order": 3, "mode": "grid-mirror"}
    basis = [
        ndimage.zoom(np.eye(points), [1, side / points], grid_mode=True, **spline) for side in sides
    ]
    return np.einsum("abc,ax,by,cz->xyz", values, *basis, optimize=True)


def head(anatomy: Anatomy, seed: list[int], side: int, voxel: float) -> np.ndarray:
    """Returns a complex volume of a head, complex64 [side, side, side], zero outside the brain.

    The 99th percentile of its magnitude within the brain is 1.

    Args:
        anatomy: the tissues.
        seed: determines position, deformation, contrast, brightness and phase.
        side: the number of cells along each side.
        voxel: the side of a cell [mm].
    """
    rng, sides = np.random.default_rng(seed), (side, side, side)
    turn = Rotation.from_rotvec(rng.normal(0, 0.12, 3)).as_matrix()
    scales = rng.uniform(0.9, 1.1, 3) * [rng.choice([-1, 1]), 1, 1]
    reach = 4 + 0.3 * max(0.0, SIZE - side * voxel)
    middle = anatomy.centre * anatomy.cell + rng.uniform(-reach, reach, 3)
    line = (np.arange(side) - (side - 1) / 2) * voxel
    places = np.stack(np.meshgrid(line, line, line, indexing="ij"))
    places = np.einsum("ij,jxyz->ixyz", turn * scales, places) + middle[:, None, None, None]
    places += np.stack([smooth_field(rng, sides, 6, 4.0) for _ in range(3)])
    places /= anatomy.cell
    shares = [ndimage.map_coordinates(tissue, places, order=1) for tissue in anatomy.tissues]
    texture = ndimage.map_coordinates(anatomy.texture, places, order=1, cval=1.0)
    signals = rng.uniform(0.15, 1.0, len(shares))
    magnitude = np.tensordot(signals, shares, 1) * texture ** rng.uniform(-1, 1)
    magnitude *= np.exp(smooth_field(rng, sides, 4, 0.1))
    magnitude[np.sum(shares, axis=0) < 0.02] = 0
    magnitude /= np.percentile(magnitude[magnitude > 0], 99)
    phase = rng.uniform(-np.pi, np.pi) + smooth_field(rng, sides, 4, 0.8)
    return (magnitude * np.exp(1j * phase)).astype(np.complex64)
