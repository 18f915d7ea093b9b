"""White noise keyed by (seed, global cell): the same field on any number of ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from meshimpl import philox
from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import LaidOutTensor


class WhiteNoiseOperation(mtf.Operation):
    """Unit normal values that depend on the seed and on the cell's place in the grid only."""

    def __init__(self, seed: Any, grid: Any, dtype: tf.DType, name: str | None = None) -> None:
        super().__init__([seed], name=name or "white_noise")
        self._grid = grid
        self._outputs = [mtf.Tensor(self, mtf.Shape(seed.shape.dims + grid.dims), dtype)]

    def lower(self, lowering: Any) -> None:
        """Draw this rank's cells; nothing is communicated."""
        impl = lowering.mesh_impl(self)
        (output,) = self.outputs
        seeds = lowering.tensors[self.inputs[0]].to_laid_out_tensor().one_slice
        size = impl.slice_shape(self._grid)
        begin = tf.unstack(impl.slice_begin_tensor(self._grid), num=self._grid.ndims)
        index = philox.global_index(self._grid.to_integer_list, begin, size)
        count = seeds.shape.num_elements()
        fields = [
            tf.cast(philox.normal(index, 0, seed), output.dtype)
            for seed in tf.unstack(tf.reshape(seeds, [-1]), num=count)
        ]
        value = tf.reshape(tf.stack(fields), impl.slice_shape(output.shape))
        lowering.set_tensor_lowering(output, LaidOutTensor([value]))


def white_noise(seed: Any, grid: Any, dtype: tf.DType = tf.float32, name: str | None = None) -> Any:
    """A field of independent unit normal values.

    The values are drawn in float64 and rounded, so that float32 and float64 give one universe.

    Args:
        seed: integer mtf tensor; a scalar, or of shape [batch] for a field each.
        grid: `mtf.Shape` of one field.
        dtype: float32 or float64.
        name: of the operation.

    Returns:
        mtf tensor of shape seed.shape + grid.
    """
    return WhiteNoiseOperation(mtf.cast(seed, tf.int64), grid, dtype, name).outputs[0]
