"""Checks that a user's volume resembles the volumes that a network was trained on.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.io.volume import Volume, VolumeError
from flowpm_dist.observables.observations import Observations
from flowpm_dist.observables.options import DensityOptions, ObservationOptions

SAME = 1e-4
"""Relative difference of boxes and scale factors that are taken as equal."""

FAR = 100
"""Factor between a volume's mean and the mean of the training volumes that is refused."""

READ_AT_ONCE = 2**26
"""Size of the part of a volume that is checked at once, unless one chunk is larger [bytes]."""


def check_volume(
    volume: Volume, plan: TrainingPlan, channels: int | None, box_size: float | None
) -> list[str]:
    """Checks, without reading its values, that a volume resembles the training volumes.

    Args:
        volume: the user's volume.
        plan: the plan of the training.
        channels: channels of a training volume; None if they are not known.
        box_size: side of the user's volume, if the user gives it [Mpc/h].

    Returns:
        Sentences about what could not be checked.

    Raises:
        VolumeError: the volume has other cells, another box or another scale factor.
    """
    grid, shape, where = plan.box.grid, tuple(volume.array.shape), volume.where
    a, size = plan.evolution.last if plan.simulates else None, plan.box.size[0]
    trained = f"the network was trained on {plan.width}^3 cells in a box of {size:g} Mpc/h"
    trailing = {1: ((), (1,)), None: (shape[3:],)}.get(channels, ((channels,),))
    if shape[1:4] == grid and shape[:3] != grid:
        raise VolumeError(
            f"{where} holds {shape[0]} volumes, and predict takes one: give them one by one; the "
            "network that flowpm-dist export writes takes many at once"
        )
    if shape[:3] != grid or shape[3:] not in trailing:
        raise VolumeError(f"{where} has shape {shape}; must be {(*grid, *trailing[0])}: {trained}")
    stated, sides = volume.box_size, volume.box_size if box_size is None else (box_size,) * 3
    if sides is not None and stated is not None and not np.allclose(sides, stated, rtol=SAME):
        raise VolumeError(
            f"{where} states a box of {_shown(stated)} Mpc/h, but --box-size is {box_size:g}: "
            "leave --box-size out, or correct the file"
        )
    if sides is not None and not np.allclose(sides, size, rtol=SAME):
        raise VolumeError(f"{where} is a box of {_shown(sides)} Mpc/h: {trained}")
    if a is not None and volume.a is not None and not np.isclose(volume.a, a, rtol=SAME):
        raise VolumeError(
            f"{where} is at scale factor {volume.a:g}: the network was trained at {a:g}"
        )
    if sides is not None:
        return []
    return [
        f"The volume does not state the size of its box, and {trained}. Parameters of a volume of "
        "another size are wrong: give its side as --box-size [Mpc/h] to check it."
    ]


def check_values(volume: Volume, observation: ObservationOptions | None = None) -> None:
    """Checks that all values of a volume are densities. Reads one slab along x after another.

    Args:
        volume: the user's volume.
        observation: the observation that the network was trained for. Values below 0 are refused
            unless this observation has them. Cells that it does not observe are not checked.

    Raises:
        VolumeError: see `refuse_values`; or a file cannot be read.
    """
    not_finite = negative = 0
    positive = observation is None or observation.is_positive
    array = volume.array
    chunk = (getattr(array, "chunks", None) or (1,))[0]
    plane = 8 * int(np.prod(array.shape[1:]))
    slab = chunk * max(1, READ_AT_ONCE // max(1, chunk * plane))
    for first in range(0, array.shape[0], slab):
        part = read_part(volume, slice(first, first + slab))
        if np.isfinite(part).all() and not (positive and (part < 0).any()):
            continue  # valid with any mask, so the mask need not be read
        part = as_observed(part, (first, 0), volume, observation)
        not_finite += int(np.sum(~np.isfinite(part)))
        negative += int(np.sum(part < 0)) if positive else 0
    refuse_values(volume, not_finite, negative)


def as_observed(
    part: np.ndarray,
    offset: tuple[int, int],
    volume: Volume,
    observation: ObservationOptions | None,
) -> np.ndarray:
    """Returns a part of a volume; cells that the observation masks get its value for them.

    Args:
        part: [x, y, z] or [x, y, z, channel].
        offset: its first cell along x and y.
        volume: the volume that the part belongs to.
        observation: the observation; without one, or without a mask, the part is unchanged.

    Raises:
        VolumeError: the mask cannot be read.
    """
    mask = None if observation is None else observation.value("mask")
    if observation is None or mask is None:
        return part
    observations = Observations(DensityOptions(mask=mask), volume.array.shape[:3])
    mask = observations.block((*offset, 0), part.shape[:3]).mask
    return np.where(
        mask.reshape(*mask.shape, *(1,) * (part.ndim - 3)) > 0, part, observation.unobserved
    )


def refuse_values(volume: Volume, not_finite: int, negative: int) -> None:
    """Raises VolumeError if a volume has values that are not finite, or negative ones."""
    if not_finite:
        raise VolumeError(f"{volume.where} has {not_finite} values that are not finite")
    if negative:
        raise VolumeError(
            f"{volume.where} has {negative} negative values; must be a density or counts (of "
            "an overdensity: add 1)"
        )


def check_mean(volume: Volume, mean: np.ndarray, expected: float) -> None:
    """Checks the mean of a volume that is not divided by it.

    Args:
        volume: the user's volume.
        mean: the mean of each channel.
        expected: the mean that training volumes have on average.

    Raises:
        VolumeError: the mean of a channel is `FAR` times larger or smaller.
    """
    for value in mean[(mean > FAR * expected) | (mean < expected / FAR)]:
        raise VolumeError(
            f"{volume.where} has mean {value:.4g}; the network was trained on volumes with means "
            f"of about {expected:g}: bring it to their unit"
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
