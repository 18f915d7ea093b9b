"""How maps stand in the place of volumes: as one layer of cells, with a channel for each source.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import numpy as np


def as_volumes(kappa: np.ndarray) -> np.ndarray:
    """Returns maps [n, source, x, y] as volumes [n, x, y, 1]; several sources are channels."""
    volumes = np.moveaxis(kappa, 1, -1)[:, :, :, np.newaxis]
    return np.ascontiguousarray(volumes if kappa.shape[1] > 1 else volumes[..., 0])


def as_maps(volumes: np.ndarray) -> np.ndarray:
    """Returns the maps [n, source, x, y] that `as_volumes` made volumes of."""
    channels = volumes if volumes.ndim == 5 else volumes[..., np.newaxis]
    return np.moveaxis(channels[:, :, :, 0], -1, 1)
