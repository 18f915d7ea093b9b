"""Maps of slabs of the box: data, what was found, and what is left."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.field import Field
from flowpm_dist.io.pictures import project
from flowpm_dist.reconstruction.parts import Observed
from flowpm_dist.reconstruction.universe import Universe


def slab_maps(
    observed: Observed, found: Universe, truth: Universe | None, layers: int
) -> dict[str, np.ndarray] | None:
    """Returns maps by title, the residual last. On all ranks together.

    Args:
        observed: the data.
        found: the universe that was found.
        truth: where it is known.
        layers: cells along z that a map is a mean over.

    Returns:
        [x, y] [mean density] on rank 0, each a mean over what is observed; None on other ranks.
    """
    box = found.expected.box
    seen = tf.constant(observed.mask > 0)
    share = project(Field(tf.cast(seen, box.dtype), box), layers)
    data = tf.constant(observed.density(), box.dtype)
    blocks = {"data": data, "reconstruction": found.expected.block}
    blocks = ({} if truth is None else {"truth": truth.expected.block}) | blocks
    blocks["residual"] = data - found.expected.block
    maps = {}
    for title, block in blocks.items():
        of_data = title in ("data", "residual")
        whole = project(Field(tf.where(seen, block, 0) if of_data else block, box), layers)
        if whole is None or share is None:
            continue
        some = np.where(share > 0, share, np.nan)
        maps[title] = whole / some if of_data else whole
    return maps or None
