"""A user's volume compared with those that a network was trained on.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowpm_dist.io.volume import Volume, VolumeError
from flowpm_dist.observables.observations import Observations
from flowpm_dist.observables.options import DensityOptions, ObservationOptions

SAME_BOX = 1e-4
"""Relative difference of boxes and scale factors that are taken as equal."""

READ_AT_ONCE = 2**26
"""Size of the part of a volume that is checked at once, unless one chunk is larger [bytes]."""


def check_volume(
    volume: Volume,
    width: int,
    channels: int | None,
    size: float,
    box_size: float | None,
    a: float | None,
) -> list[str]:
    """Checks that a volume resembles those of a training, as far as its files show without reading.

    Args:
        volume: opened.
        width: cells along a side in the training.
        channels: likewise; None where only its files show it.
        size: of the box in the training [Mpc/h].
        box_size: of the volume, as the user says [Mpc/h].
        a: scale factor in the training, where it is known.

    Returns:
        What could not be seen, in words.

    Raises:
        VolumeError: another number of cells, box or scale factor.
    """
    wanted = (width,) * 3
    shape = tuple(volume.array.shape)
    beyond = shape[3:]
    shapes = {1: ((), (1,)), None: (beyond,)}.get(channels, ((channels,),))
    trained = f"the network was trained on {width}^3 cells in a box of {size:g} Mpc/h"
    if shape[:3] != wanted or beyond not in shapes:
        raise VolumeError(
            f"{volume.where} has shape {shape}; must be {(*wanted, *shapes[0])}: {trained}"
        )
    known, own = (box_size,) * 3 if box_size is not None else volume.box_size, volume.box_size
    if known is not None and own is not None and not np.allclose(known, own, rtol=SAME_BOX):
        raise VolumeError(
            f"{volume.where} states a box of {_shown(own)} Mpc/h, but --box-size "
            f"is {box_size:g}: leave --box-size out, or correct the file"
        )
    if known is not None and not np.allclose(known, size, rtol=SAME_BOX):
        raise VolumeError(f"{volume.where} is a box of {_shown(known)} Mpc/h: {trained}")
    if a is not None and volume.a is not None and not np.isclose(volume.a, a, rtol=SAME_BOX):
        raise VolumeError(
            f"{volume.where} is at scale factor {volume.a:g}: the network was trained at {a:g}"
        )
    if known is None:
        return [f"The size of the box is not known: {trained}."]
    return []


def check_values(volume: Volume, seen: ObservationOptions | None = None) -> None:
    """Checks that every value of a volume is that of a density, reading slabs along x in turn.

    Args:
        volume: opened.
        seen: what the network was trained for. Values below 0 are refused unless it makes them,
            and cells that it does not observe are not checked.

    Raises:
        VolumeError: see `refuse_values`; or a file cannot be read.
    """
    not_finite = negative = 0
    positive = seen is None or seen.is_positive
    array = volume.array
    chunk = (getattr(array, "chunks", None) or (1,))[0]
    plane = 8 * int(np.prod(array.shape[1:]))
    slab = chunk * max(1, READ_AT_ONCE // max(1, chunk * plane))
    for first in range(0, array.shape[0], slab):
        part = read_part(volume, slice(first, first + slab))
        if np.isfinite(part).all() and not (positive and (part < 0).any()):
            continue  # whatever is observed of it, so that the mask need not be read
        part = as_observed(part, (first, 0), volume, seen)
        not_finite += int(np.sum(~np.isfinite(part)))
        negative += int(np.sum(part < 0)) if positive else 0
    refuse_values(volume, not_finite, negative)


def as_observed(
    part: np.ndarray,
    offset: tuple[int, int],
    volume: Volume,
    seen: ObservationOptions | None,
) -> np.ndarray:
    """Returns a part of a volume with what an observation has in the cells that it does not see.

    Args:
        part: [x, y, z] or [x, y, z, channel].
        offset: its first cell along x and y.
        volume: that it is from.
        seen: the observation; None, or one without a mask, leaves the part as it is.

    Raises:
        VolumeError: the mask cannot be read.
    """
    mask = None if seen is None else seen.value("mask")
    if seen is None or mask is None:
        return part
    observations = Observations(DensityOptions(mask=mask), volume.array.shape[:3])
    mask = observations.block((*offset, 0), part.shape[:3]).mask
    return np.where(mask.reshape(*mask.shape, *(1,) * (part.ndim - 3)) > 0, part, seen.unobserved)


def refuse_values(volume: Volume, not_finite: int, negative: int) -> None:
    """Raises VolumeError if a volume has values that are not finite, or negative ones."""
    if not_finite:
        raise VolumeError(f"{volume.where} has {not_finite} values that are not finite")
    if negative:
        raise VolumeError(
            f"{volume.where} has {negative} negative values; must be a density or counts (of "
            "an overdensity: add 1)"
        )


def read_part(volume: Volume, cut: Any) -> np.ndarray:
    """Returns a part of a volume, float64.

    Raises:
        VolumeError: the file cannot be read.
    """
    try:
        return np.array(volume.array[cut], dtype=np.float64)
    except (OSError, ValueError, RuntimeError) as error:
        raise VolumeError(f"{volume.where} cannot be read ({error})") from error


def _shown(sides: tuple[float, ...]) -> str:
    return f"{sides[0]:g}" if len(set(sides)) == 1 else " x ".join(f"{side:g}" for side in sides)
