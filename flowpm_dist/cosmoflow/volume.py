"""Checks that a user's volume is like those that a network was trained on."""

from __future__ import annotations

import numpy as np

from flowpm_dist.io.volume import Volume, VolumeError


def check_volume(
    volume: Volume, width: int, channels: int, size: float, box_size: float | None, a: float | None
) -> list[str]:
    """See that a volume is such as a network was trained on, as far as it tells without reading.

    Args:
        volume: opened.
        width: cells along a side in the training.
        channels: likewise.
        size: of the box in the training [Mpc/h].
        box_size: of the volume, as the user says [Mpc/h].
        a: scale factor in the training, where it is known.

    Returns:
        What could not be seen, in words.

    Raises:
        VolumeError: another number of cells, box or scale factor.
    """
    wanted = (width,) * 3
    shapes = [wanted, (*wanted, 1)] if channels == 1 else [(*wanted, channels)]
    trained = f"the network was trained on {width}^3 cells in a box of {size:g} Mpc/h"
    if tuple(volume.array.shape) not in shapes:
        raise VolumeError(
            f"{volume.where} has shape {tuple(volume.array.shape)}; must be {shapes[0]}: {trained}"
        )
    told = volume.box_size if box_size is None else (box_size,) * 3
    if told is not None and not np.allclose(told, size, rtol=1e-4):
        sides = f"{told[0]:g}" if len(set(told)) == 1 else " x ".join(f"{s:g}" for s in told)
        raise VolumeError(f"{volume.where} is a box of {sides} Mpc/h: {trained}")
    if None not in (volume.a, a) and not np.isclose(volume.a, a, rtol=1e-4):  # type: ignore[arg-type]
        raise VolumeError(
            f"{volume.where} is at scale factor {volume.a:g}: the network was trained at {a:g}"
        )
    if told is None:
        return [f"The size of the box is not known: {trained}."]
    return []
