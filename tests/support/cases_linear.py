"""Cases: products, convolutions and pools."""

from typing import Any

from conformance import Cases, Input, dim, shape

from meshimpl.compat import mtf

cases = Cases(between_neighbours=True)
IMAGE = Input(shape(b=4, h=4, w=6, i=4))
VOLUME = Input(shape(b=4, d=4, h=4, w=2, i=4))
STRIDE_2D, STRIDE_3D = [1, 2, 2, 1], [1, 2, 2, 2, 1]


@cases(Input(shape(x=4, y=8)), Input(shape(y=8, z=4)), splits="x y z")
def matrix_product(mesh: Any, a: Any, b: Any) -> Any:
    return [
        mtf.matmul(a, b),
        mtf.einsum([a, b], output_shape=shape()),
        mtf.einsum([a, b], output_shape=shape(z=4, y=8, x=4)),
    ]


@cases(Input(shape(x=4, y=8)), Input(shape(y=8)), Input(shape(x=4)), splits="x y z")
def products_of_three_and_transposes(mesh: Any, a: Any, b: Any, c: Any) -> Any:
    return [
        mtf.einsum([a, b, c], output_shape=shape(y=8)),
        mtf.transpose(a, shape(y=8, x=4)),
        mtf.einsum([a, b], output_shape=shape(x=4, z=4)),
    ]


@cases(Input(shape(x=4, y=8)))
def cumulative_sum(mesh: Any, a: Any) -> Any:
    return [mtf.cumsum(a, a.shape[1]), mtf.cumsum(a, a.shape[0], exclusive=True)]


@cases(
    IMAGE, Input(shape(fh=3, fw=3, i=4, o=4)), Input(shape(fh=2, fw=2, i=4, o=4)), splits="b i o"
)
def conv2d(mesh: Any, a: Any, f: Any, g: Any) -> Any:
    return [
        mtf.Conv2dOperation(a, f, [1, 1, 1, 1], "SAME").outputs[0],
        mtf.Conv2dOperation(a, f, [1, 1, 1, 1], "VALID").outputs[0],
        mtf.Conv2dOperation(a, g, STRIDE_2D, "SAME").outputs[0],
    ]


@cases(
    VOLUME,
    Input(shape(fd=3, fh=3, fw=1, i=4, o=4)),
    Input(shape(fd=2, fh=2, fw=2, i=4, o=4)),
    splits="b i o",
)
def conv3d(mesh: Any, a: Any, f: Any, g: Any) -> Any:
    return [
        mtf.Conv3dOperation(a, f, [1, 1, 1, 1, 1], "SAME").outputs[0],
        mtf.Conv3dOperation(a, f, [1, 1, 1, 1, 1], "VALID").outputs[0],
        mtf.Conv3dOperation(a, g, STRIDE_3D, "SAME").outputs[0],
    ]


@cases(IMAGE, Input(shape(fh=2, fw=2, o=4, i=4)), splits="b i o")
def conv2d_transpose(mesh: Any, a: Any, f: Any) -> Any:
    return mtf.Conv2dTransposeOperation(a, f, STRIDE_2D, "SAME").outputs[0]


@cases(VOLUME, Input(shape(fd=2, fh=2, fw=2, o=4, i=4)), splits="b i o")
def conv3d_transpose(mesh: Any, a: Any, f: Any) -> Any:
    return mtf.Conv3dTransposeOperation(a, f, STRIDE_3D, "SAME").outputs[0]


@cases(
    Input(shape(b=2, D=4, H=4, d=2, h=3, w=3, i=2)),
    Input(shape(fd=3, fh=3, fw=3, i=2, o=2)),
    splits="D H",
)
def conv3d_on_blocks(mesh: Any, a: Any, f: Any) -> Any:
    """A convolution of a volume in split blocks: periodic halos here, zeros outside there."""
    padded = mtf.pad(a, [1, 1], "w")
    for wrap in (True, False):
        haloed = mtf.halo_exchange(padded, dim("D", 4), dim("d", 2), 1, wrap=wrap)
        haloed = mtf.halo_exchange(haloed, dim("H", 4), dim("h", 3), 1, wrap=wrap)
        yield mtf.Conv3dOperation(haloed, f, [1, 1, 1, 1, 1], "VALID").outputs[0]


@cases(IMAGE, splits="b i")
def pools_in_two_dimensions(mesh: Any, a: Any) -> Any:
    return [mtf.PoolOperation(a, (2, 3), (2, 3), kind).outputs[0] for kind in ("MAX_2D", "AVG_2D")]


@cases(Input(VOLUME.shape, "float32"), splits="b i")
def pools_in_three_dimensions(mesh: Any, a: Any) -> Any:
    """TensorFlow has no `max_pool3d` in double precision."""
    size = (2, 2, 2)
    return [mtf.PoolOperation(a, size, size, kind).outputs[0] for kind in ("MAX_3D", "AVG_3D")]


@cases(Input(shape(x=4, y=12)), splits="x")
def pools_in_one_dimension(mesh: Any, a: Any) -> Any:
    return [
        mtf.pool_tensor_1d(a, a.shape[1], mtf.reduce_max, 3),
        mtf.pool_tensor_1d(a, a.shape[1], mtf.reduce_mean, 2),
    ]
