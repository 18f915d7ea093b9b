"""Operations that each rank carries out on its own blocks, with explicit adjoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl, LaidOutTensor

Adjoint = Callable[[list[Any], list[Any]], list[Any]]
"""A function from (inputs, cotangents of the outputs) to the cotangents of the inputs.

They are mtf tensors or None. An output that nothing depends on has the cotangent None.
"""


class BlockOperation(mtf.Operation):
    """An operation that a function carries out on this rank's blocks; see `on_blocks`."""

    def __init__(
        self,
        lower: Callable[..., Any],
        inputs: Sequence[Any],
        outputs: Sequence[tuple[Any, tf.DType]],
        adjoint: Adjoint | None,
        name: str,
    ) -> None:
        super().__init__(list(inputs), name=name)
        self._outputs = [mtf.Tensor(self, shape, dtype) for shape, dtype in outputs]
        self._lower, self._adjoint = lower, adjoint

    @property
    def has_gradient(self) -> bool:
        """Whether an adjoint was given."""
        return self._adjoint is not None

    def gradient(self, grad_ys: list[Any]) -> list[Any]:
        """Returns the cotangents of the inputs, from the adjoint that was given."""
        assert self._adjoint is not None
        return self._adjoint(self.inputs, grad_ys)

    def lower(self, lowering: Any) -> None:
        """Lowers to the function itself."""
        impl = lowering.mesh_impl(self)
        blocks = [lowering.tensors[x].to_laid_out_tensor().one_slice for x in self.inputs]
        results = self._lower(impl, *blocks)
        results = results if isinstance(results, (tuple, list)) else [results]
        for output, result in zip(self.outputs, results, strict=True):
            if not isinstance(result, mtf.LazyAllreduceSum):
                result, shape = tf.convert_to_tensor(result), impl.slice_shape(output.shape)
                if result.shape.rank is None or result.shape.as_list() != shape:
                    result = tf.reshape(result, shape)
                result = LaidOutTensor([result])
            lowering.set_tensor_lowering(output, result)


def on_blocks(
    lower: Callable[..., Any],
    inputs: Sequence[Any],
    outputs: Sequence[tuple[Any, tf.DType]],
    *,
    adjoint: Adjoint | None = None,
    name: str,
) -> list[Any]:
    """Makes an operation of a function of this rank's blocks, which may communicate.

    Args:
        lower: `lower(impl, *blocks)` returns one block or several, or sums over ranks that are
            still pending (`mtf.LazyAllreduceSum`); `impl` is the `HvdSimdMeshImpl`.
        inputs: mtf tensors.
        outputs: the shape and the dtype of each result.
        adjoint: the adjoint; without it, the operation has no gradient.
        name: the name of the operation.

    Returns:
        mtf tensors.
    """
    return list(BlockOperation(lower, inputs, outputs, adjoint, name).outputs)


def local(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    outputs: Sequence[tuple[Any, tf.DType]],
    *,
    adjoint: Adjoint | None = None,
    name: str = "local",
) -> list[Any]:
    """Applies a TensorFlow function to each rank's blocks.

    Args:
        function: a function from blocks to one block or several, with as many elements as the
            outputs.
        inputs: mtf tensors.
        outputs: the shape and the dtype of each result.
        adjoint: the adjoint; without it, the operation has no gradient.
        name: the name of the operation.

    Returns:
        mtf tensors.
    """
    return on_blocks(
        lambda _, *blocks: function(*blocks), inputs, outputs, adjoint=adjoint, name=name
    )


def _split_axes(shapes: Sequence[Any], impl: HvdSimdMeshImpl) -> set[int]:
    """Returns the mesh axes over which any dimension of any of the shapes is split."""
    layouts = [impl.tensor_layout(shape) for shape in shapes]
    sizes = [dim.size for dim in impl.shape]
    return {a for layout in layouts for a in layout if a is not None and sizes[a] > 1}


def layer(function: Callable[..., Any], inputs: Sequence[Any], shape: Any, *, name: str) -> Any:
    """Applies a differentiable function to each rank's blocks, such as a layer of a network.

    Args:
        function: a function from blocks to one block, without communication, which TensorFlow
            differentiates. The gradient computes intermediate values again, unless TensorFlow
            recognises them as the same.
        inputs: mtf tensors. A mesh axis that splits one of them must also split the result. Other
            inputs, such as kernels, may be whole along it.
        shape: the `mtf.Shape` of the result, which has the first input's dtype.
        name: the name of the operation.

    Raises:
        ValueError: if an input is split over a mesh axis and the result is not.
    """
    impl = inputs[0].mesh.impl
    lost = _split_axes([x.shape for x in inputs], impl) - _split_axes([shape], impl)
    if lost:
        axes = ", ".join(impl.shape[a].name for a in sorted(lost))
        raise ValueError(f"{name}: an input is split over {axes}, but the result {shape} is not")

    def adjoint(inputs: list[Any], cotangents: list[Any]) -> list[Any]:
        wrt = [i for i, x in enumerate(inputs) if x.dtype.is_floating]

        def product(impl: HvdSimdMeshImpl, *slices: tf.Tensor) -> list[Any]:
            """The vector-Jacobian product for every floating input.

            Where an input, such as a kernel, is whole and the layer's work is split, its product is
            a sum over those ranks. It stays pending, so that several travel in one message.
            """
            *blocks, cotangent = slices
            watched = [blocks[i] for i in wrt]
            with tf.GradientTape() as tape:
                tape.watch(watched)
                result = function(*blocks)
            products = tape.gradient(result, watched, tf.reshape(cotangent, result.shape))
            return [pending(impl, inputs[i].shape, g) for i, g in zip(wrt, products, strict=True)]

        def pending(impl: HvdSimdMeshImpl, whole: Any, product: tf.Tensor) -> Any:
            axes = sorted(_split_axes([shape], impl) - _split_axes([whole], impl))
            block = tf.reshape(product, impl.slice_shape(whole))
            return mtf.LazyAllreduceSum(impl, LaidOutTensor([block]), axes) if axes else block

        outputs = [(inputs[i].shape, inputs[i].dtype) for i in wrt]
        products = on_blocks(product, [*inputs, *cotangents], outputs, name=f"{name}_gradient")
        by_input = dict(zip(wrt, products, strict=True))
        return [by_input.get(i) for i in range(len(inputs))]

    return local(function, inputs, [(shape, inputs[0].dtype)], adjoint=adjoint, name=name)[0]


class TogetherOperation(mtf.Operation):
    """An operation that carries out pending sums of tensors over ranks, in few messages."""

    def __init__(self, tensors: Sequence[Any], largest: int) -> None:
        super().__init__(list(tensors), name="together")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype) for x in tensors]
        self._largest = largest

    def lower(self, lowering: Any) -> None:
        """Lowers to one message for all small tensors with the same ranks and dtype.

        The last of the large tensors is sent first: it belongs to the last layer, whose gradient is
        known while the other gradients are still being computed.
        """
        impl = lowering.mesh_impl(self)
        groups: dict[Any, list[tuple[Any, tf.Tensor]]] = {}
        for x, output in reversed(list(zip(self.inputs, self.outputs, strict=True))):
            lowered = lowering.tensors[x]
            small = x.shape.size * x.dtype.size <= self._largest
            if small and isinstance(lowered, mtf.LazyAllreduceSum) and not lowered._reduced:
                key = tuple(lowered.mesh_axes), x.dtype
                block = lowered.laid_out_input.one_slice
                groups.setdefault(key, []).append((output, block))
            else:
                lowering.set_tensor_lowering(output, lowered.to_laid_out_tensor())
        for (axes, _), members in groups.items():
            flat = tf.concat([tf.reshape(block, [-1]) for _, block in members], axis=0)
            total = impl.allreduce(LaidOutTensor([flat]), axes, "SUM").one_slice
            sizes = [block.shape.num_elements() for _, block in members]
            for (output, block), part in zip(members, tf.split(total, sizes), strict=True):
                whole = LaidOutTensor([tf.reshape(part, block.shape)])
                lowering.set_tensor_lowering(output, whole)


def together(tensors: Sequence[Any], largest: int = 2**20) -> list[Any]:
    """Returns the same tensors with pending sums over ranks carried out, small ones together.

    Args:
        tensors: mtf tensors, such as the gradients of all weights.
        largest: the size up to which a tensor is sent together with others [bytes].
    """
    return list(TogetherOperation(tensors, largest).outputs)


def sum_over_ranks(x: Any, like: Any) -> Any:
    """Returns the sum of ranks' own parts of a tensor, over the ranks that share its block.

    Args:
        x: mtf tensor whose blocks differ between ranks that hold the same block.
        like: mtf tensor whose layout says over which ranks the parts are spread.
    """
    impl = x.mesh.impl
    axes = sorted(_split_axes([like.shape], impl) - _split_axes([x.shape], impl))

    def lower(impl: HvdSimdMeshImpl, block: tf.Tensor) -> Any:
        return mtf.LazyAllreduceSum(impl, LaidOutTensor([block]), axes) if axes else block

    return on_blocks(lower, [x], [(x.shape, x.dtype)], name="sum_over_ranks")[0]


def maximum_over_ranks(x: Any) -> Any:
    """Returns the maximum over all ranks, element by element, whatever the layout of `x`."""
    return on_blocks(
        lambda impl, block: impl.mesh.world.allreduce(block, "max"),
        [x],
        [(x.shape, x.dtype)],
        name="maximum_over_ranks",
    )[0]


def pointwise(
    function: Callable[..., Any], *fields: Any, outputs: Sequence[Any] | None = None
) -> Any:
    """Applies a function to this rank's blocks; the function and its gradient are compiled.

    Args:
        function: a function of as many blocks as there are fields. Its value at a point must depend
            on the fields there only, or on a whole dimension that no layout splits. It is compiled
            once for each object and shape, so pass the same object again.
        fields: mtf tensors of floating values, split alike.
        outputs: the `mtf.Shape` of each of several results. By default there is one, of the first
            field's shape. The results have its dtype.

    Returns:
        An mtf tensor, or a list of them if `outputs` is given.
    """
    forward, backward = _compiled(function, len(fields))
    shapes = [fields[0].shape] if outputs is None else outputs

    def adjoint(inputs: list[Any], cotangents: list[Any]) -> list[Any]:
        known = [
            mtf.zeros(fields[0].mesh, shape, fields[0].dtype) if dy is None else dy
            for dy, shape in zip(cotangents, shapes, strict=True)
        ]
        return local(backward, [*inputs, *known], [(x.shape, x.dtype) for x in inputs])

    results = local(
        forward,
        fields,
        [(shape, fields[0].dtype) for shape in shapes],
        adjoint=adjoint,
        name="pointwise",
    )
    return results[0] if outputs is None else results


@functools.lru_cache(maxsize=256)
def _compiled(
    function: Callable[..., Any], count: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the function of `count` blocks and its vector-Jacobian product, compiled.

    The arguments of the product are those blocks, followed by the cotangents.
    """

    def backward(*blocks: tf.Tensor) -> list[tf.Tensor]:
        inputs, cotangents = list(blocks[:count]), list(blocks[count:])
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            results = function(*inputs)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        zero = tf.UnconnectedGradients.ZERO
        return tape.gradient(results, inputs, cotangents, unconnected_gradients=zero)

    compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
    return compiled(function), compiled(backward)


def after(x: Any, other: Any) -> Any:
    """Returns `x`, available only once `other` has been computed, which limits memory use."""

    def wait(value: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([first]):
            return tf.identity(value)

    return local(
        wait, [x, other], [(x.shape, x.dtype)], adjoint=lambda _, dys: [dys[0], None], name="after"
    )[0]


def combine(factors: Sequence[Any], terms: Sequence[Any]) -> Any:
    """Returns sum_n factors[n] terms[n], computed in one pass.

    Args:
        factors: mtf tensors with leading dimensions of the terms' shape, such as scalars.
        terms: mtf tensors of one shape and dtype.
    """
    shape, dtype = terms[0].shape, terms[0].dtype

    def adjoint(inputs: list[Any], cotangents: list[Any]) -> list[Any]:
        (dy,) = cotangents
        by_factor = [
            mtf.reduce_sum(dy * x, output_shape=f.shape)
            for f, x in zip(inputs[: len(factors)], terms, strict=True)
        ]
        return by_factor + [combine([f], [dy]) for f in factors]

    inputs = [*factors, *terms]
    return local(sum_of_products, inputs, [(shape, dtype)], adjoint=adjoint, name="combine")[0]


@tf.function(jit_compile=True, autograph=False)
def sum_of_products(*blocks: tf.Tensor) -> tf.Tensor:
    """Returns the sum of products of `combine` on one rank.

    Args:
        blocks: the factors' blocks, followed by as many blocks of terms.
    """
    count = len(blocks) // 2
    total = None
    for factor, term in zip(blocks[:count], blocks[count:], strict=True):
        missing = term.shape.rank - factor.shape.rank
        part = tf.reshape(factor, factor.shape.as_list() + [1] * missing) * term
        total = part if total is None else total + part
    return total


def vector(parts: Sequence[Any]) -> Any:
    """Returns components [...] as one mtf tensor [..., component]."""
    shape = mtf.Shape([*parts[0].shape.dims, mtf.Dimension("component", len(parts))])
    return pointwise(_stack, *parts, outputs=[shape])[0]


def one_component(x: Any, number: int) -> Any:
    """Returns a component [...] of an mtf tensor [..., component]; it has no gradient."""
    shape = mtf.Shape(x.shape.dims[:-1])
    return local(lambda block: block[..., number], [x], [(shape, x.dtype)], name="one_component")[0]


def _stack(*blocks: tf.Tensor) -> tf.Tensor:
    return tf.stack(blocks, axis=-1)
