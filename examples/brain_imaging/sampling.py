"""How volumes are measured: sensitivities of coils, masks in k-space, and the order of modes.

Masks and spectra of users have the zero frequency in the middle, at index n // 2 along each axis,
and so has sigpy. Spectra on the mesh begin with it, as numpy's do, in the order [kz, ky, kx].
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from anatomy import InputError

CENTRE = 0.08
"""The share of each phase-encoding direction whose middle is sampled completely."""


def coil_maps(
    sides: tuple[int, ...], coils: int, seed: list[int], block: tuple[slice, ...] | None = None
) -> np.ndarray:
    """Returns smooth complex sensitivities whose squared magnitudes add up to 1 in each cell.

    The coils are in two rings around the z axis. Their places, widths and phases are random.

    Args:
        sides: the cells (x, y, z) of the whole volume.
        coils: the number of coils.
        seed: determines the maps.
        block: the part of the volume to make; all of it by default.

    Returns:
        complex64 [coil, x, y, z].
    """
    rng, block = np.random.default_rng(seed), block or (slice(None),) * 3
    axes = [(np.arange(n)[part] + 0.5) / n - 0.5 for n, part in zip(sides, block, strict=True)]
    turn, maps = rng.uniform(0, 2 * np.pi), []
    for number in range(coils):
        angle = turn + 2 * np.pi * number / coils + rng.normal(0, 0.1)
        height = 0.25 * (-1) ** number + rng.normal(0, 0.05)
        place = 0.6 * np.cos(angle), 0.6 * np.sin(angle), height
        width, slopes = rng.uniform(0.4, 0.55), rng.uniform(-np.pi, np.pi, 3)
        lines = [
            np.exp(-(((a - p) / width) ** 2) / 2 + 1j * s * a)
            for a, p, s in zip(axes, place, slopes, strict=True)
        ]
        maps.append(np.einsum("x,y,z->xyz", *lines) * np.exp(1j * rng.uniform(0, 2 * np.pi)))
    found = np.stack(maps)
    return (found / np.sqrt(np.sum(np.abs(found) ** 2, axis=0))).astype(np.complex64)


def random_mask(sides: tuple[int, int], acceleration: float, seed: list[int]) -> np.ndarray:
    """Returns a mask of the phase-encoding plane, denser towards the middle.

    Exactly round(ny nz / acceleration) lines are sampled. A rectangle in the middle is complete,
    and the density of the other lines falls as (1 - r)^3 from there to the corners at r = 1.

    Args:
        sides: (ny, nz).
        acceleration: cells of the plane for each line that is sampled, at least 1.
        seed: determines the mask.

    Returns:
        bool [ky, kz], the zero frequency at index n // 2.

    Raises:
        InputError: it is below 1, or the middle alone has more lines.
    """
    if not 1 <= acceleration < math.inf:
        raise InputError(f"acceleration {acceleration:g}: must be at least 1, and finite")
    wanted = round(math.prod(sides) / acceleration)
    offsets = [np.abs(np.arange(n) - n // 2) / (n / 2) for n in sides]
    middle = np.logical_and.outer(*[offset <= CENTRE for offset in offsets])
    if not middle.sum() <= wanted <= middle.size:
        raise InputError(
            f"acceleration {acceleration:g}: a plane of {sides[0]} x {sides[1]} lines allows 1 to "
            f"{middle.size / middle.sum():.1f}, because its middle is sampled completely"
        )
    radius = np.hypot(*np.meshgrid(*offsets, indexing="ij")) / math.sqrt(2)
    density = (1 - radius) ** 3 + 1e-3
    # The largest of log density + Gumbel noise are draws without replacement.
    rank = np.log(density) + np.random.default_rng(seed).gumbel(size=sides)
    chosen = np.argsort(np.where(middle, np.inf, rank), axis=None)[middle.size - wanted :]
    mask = np.zeros(middle.size, bool)
    mask[chosen] = True
    return mask.reshape(sides)


def read_mask(path: Path, sides: tuple[int, int, int]) -> np.ndarray:
    """Returns the mask of a file, bool [ky, kz] or [kx, ky, kz].

    Raises:
        InputError: the file cannot be read, has another shape, or samples nothing.
    """
    try:
        mask = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"--mask {path}: no array can be read from it: {error}") from None
    if not isinstance(mask, np.ndarray):
        raise InputError(f"--mask {path}: no array can be read from it: it is an .npz of several")
    if mask.shape not in (sides, sides[1:]):
        raise InputError(
            f"--mask {path} has shape {mask.shape}; volumes of {sides} need {sides[1:]} (ky, kz) "
            f"or {sides} (kx, ky, kz)"
        )
    if not np.isin(mask, (0, 1)).all() or not mask.any():
        raise InputError(f"--mask {path}: must have zeros and ones, and at least one 1")
    return mask.astype(bool)


def mesh_order(mask: np.ndarray, nx: int, modes: tuple[int, int, int]) -> np.ndarray:
    """Returns a mask in the order of spectra on the mesh, float32 [kz, ky, kx] with its padding."""
    whole = np.fft.ifftshift(np.broadcast_to(mask, (nx, *mask.shape[-2:])))
    found = np.zeros(modes, np.float32)
    found[: whole.shape[2], : whole.shape[1]] = whole.T
    return found


def centred(spectrum: np.ndarray) -> np.ndarray:
    """Returns the spectrum that a centred, orthonormal FFT gives, complex [coil, kx, ky, kz].

    Args:
        spectrum: pairs [coil, kz, ky, kx, pair] from the mesh, without padding, orthonormal.
    """
    whole = np.moveaxis(spectrum[..., 0] + 1j * spectrum[..., 1], (1, 2, 3), (3, 2, 1))
    for axis, n in enumerate(whole.shape[1:], 1):
        ramp = np.exp(2j * np.pi * np.fft.fftfreq(n) * (n // 2))
        whole = whole * np.expand_dims(ramp, [a for a in range(4) if a != axis])
    return np.fft.fftshift(whole, axes=(1, 2, 3)).astype(np.complex64)
