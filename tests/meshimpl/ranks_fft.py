"""The distributed FFTs against numpy's on the whole grid, their adjoints, and their complaints."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from meshimpl import launch
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations import fft
from meshimpl.operations.fft import PAIR, fft3d, ifft3d, irfft3d, rfft3d

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.every_split, pytest.mark.dealt]

LAYOUT = {"row": "x:row;ky:row", "col": "y:col;kz:col"}
# Unequal sides, half axes that do not divide by 2 or 4, ky that does not divide by 4.
GRIDS = [(8, 8, 8), (8, 12, 10), (4, 4, 6), (16, 8, 4)]
# Complex fields: kz and ky that do not divide by 2 or 4.
COMPLEX_GRIDS = [(8, 4, 5), (4, 12, 6)]
CASES = [(grid, True) for grid in GRIDS] + [(grid, False) for grid in COMPLEX_GRIDS]
EPSILON = {tf.float64: 2.0**-52, tf.float32: 2.0**-23}


def layout(mesh):
    return ";".join(LAYOUT[name] for name in mesh.names)


def functions(mesh, grid, dtype=tf.float64, batch=None, real=True, in_order=False):
    """The transform and its inverse, of real fields or of pairs; their shapes."""
    transform, inverse_of = (rfft3d, irfft3d) if real else (fft3d, ifft3d)
    transform = functools.partial(transform, in_order=True) if in_order else transform
    dims = [mtf.Dimension(n, s) for n, s in zip("xyz", grid, strict=True)]
    dims = dims if real else [*dims, PAIR]
    shape = mtf.Shape([mtf.Dimension("batch", batch), *dims] if batch else dims)
    forward = MeshFunction(lambda _, a: transform(a), mesh, layout(mesh), {"a": (shape, dtype)})
    forward(np.zeros(shape.to_integer_list))
    (spectral,) = forward.output_shapes
    inverse = MeshFunction(
        lambda _, a: inverse_of(a, shape), mesh, layout(mesh), {"a": (spectral, dtype)}
    )
    return forward, inverse, shape, spectral


def as_complex(pairs):
    return pairs[..., 0] + 1j * pairs[..., 1]


def expected_spectrum(field, real=True):
    """numpy's spectrum in the order [..., kz, ky, kx]."""
    axes = (-3, -2, -1)
    modes = np.fft.rfftn(field, axes=axes) if real else np.fft.fftn(as_complex(field), axes=axes)
    return np.swapaxes(modes, -3, -1)


@pytest.mark.parametrize("dtype", [tf.float64, tf.float32])
@pytest.mark.parametrize(("grid", "real"), CASES)
def test_forward_and_inverse_are_numpys(mesh, grid, real, dtype):
    forward, inverse, shape, _ = functions(mesh, grid, dtype, real=real)
    field = np.random.default_rng(1).normal(size=shape.to_integer_list)
    block = forward(field)
    pairs = forward.gather(block).astype(np.float64)
    expected = expected_spectrum(field.astype(dtype.as_numpy_dtype).astype(np.float64), real)
    kz, ky, _ = expected.shape
    tolerance = 20 * EPSILON[dtype] * np.sqrt(field.size)
    np.testing.assert_allclose(as_complex(pairs[:kz, :ky]), expected, rtol=0, atol=tolerance)
    assert not pairs[kz:].any() and not pairs[:, ky:].any(), "padded modes must be zero"
    back = inverse.gather(inverse(block))
    np.testing.assert_allclose(back, field, rtol=0, atol=20 * EPSILON[dtype])


@pytest.mark.ranks(1, 4)
def test_transfers_as_on_gpus(mesh, monkeypatch):
    """There XLA pads, transposes and crops: what moves is the same to the bit."""
    field = np.random.default_rng(2).normal(size=(8, 12, 10))

    def there_and_back():
        forward, inverse, _, _ = functions(mesh, field.shape)
        block = forward(field)
        return block.numpy(), inverse(block).numpy()

    expected = there_and_back()
    compiled = []

    def compile_too(*arguments):
        compiled.append(arguments)
        return original(*arguments)

    original = fft._compiled.__wrapped__
    monkeypatch.setattr(fft, "_has_gpu", lambda: True)
    monkeypatch.setattr(fft, "_compiled", compile_too)
    for found, whole in zip(there_and_back(), expected, strict=True):
        np.testing.assert_array_equal(found, whole)
    assert compiled


@pytest.mark.ranks(1)
def test_passes_on_one_gpu(mesh, monkeypatch):
    """Each way two transforms and one compiled transposition; nothing is copied or scaled."""
    monkeypatch.setattr(fft, "_has_gpu", lambda: True)
    monkeypatch.setattr(fft, "_compiled", fft._compiled.__wrapped__)
    shape = mtf.Shape([mtf.Dimension(name, 8) for name in "xyz"])
    plan = fft.pencils(shape, functions(mesh, (8, 8, 8))[0].impl)

    def passes(transform, dtype, *block):
        spec = tf.TensorSpec([1, *block], dtype)
        graph = tf.function(transform).get_concrete_function(spec).graph
        free = {"Placeholder", "Const", "Reshape", "Identity", "NoOp"}
        return [x.type for x in graph.get_operations() if x.type not in free]

    compiled = "PartitionedCall"
    assert passes(plan.forward, tf.float32, *plan.block) == ["RFFT", compiled, "FFT2D"]
    conjugated = functools.partial(plan.inverse, conjugated=True)
    found = passes(conjugated, tf.complex64, *plan.spectral_block)
    assert found == ["FFT2D", compiled, "IRFFT"]


def test_leading_dimensions_are_transformed_one_by_one(mesh):
    forward, inverse, _, _ = functions(mesh, (8, 8, 6), batch=3)
    field = np.random.default_rng(2).normal(size=(3, 8, 8, 6))
    block = forward(field)
    pairs = forward.gather(block)[:, :4, :8]
    np.testing.assert_allclose(as_complex(pairs), expected_spectrum(field), atol=1e-12)
    np.testing.assert_allclose(inverse.gather(inverse(block)), field, atol=1e-14)


@pytest.mark.parametrize(("grid", "real"), CASES)
@pytest.mark.parametrize("which", [0, 1])
def test_gradient_is_the_adjoint(mesh, grid, real, which):
    """<u, A v> = <A^T u, v>, with u and v anything: padded and non-Hermitian modes too."""
    check_adjoint(mesh, functions(mesh, grid, real=real)[which], which)


def check_adjoint(mesh, function, which):
    """<u, A v> = <A^T u, v>, for the transform, or for its inverse."""
    ((shape, _),) = function.inputs.values()
    rng = np.random.default_rng(3)
    v = function.block_of("a", rng.normal(size=shape.to_integer_list))
    whole_u = rng.normal(size=function.output_shapes[0].to_integer_list) if which == 0 else None
    with tf.GradientTape() as tape:
        tape.watch(v)
        image = function(v)
        if whole_u is None:
            whole_u = rng.normal(size=function.output_shapes[0].to_integer_list)
        begin = function.impl.slice_begin(function.output_shapes[0], mesh.rank)
        u = whole_u[tuple(slice(b, b + n) for b, n in zip(begin, image.shape, strict=True))]
        part = tf.reduce_sum(image * u)
    pulled = tape.gradient(part, v)
    left = float(mesh.world.allreduce(part))
    right = float(mesh.world.allreduce(tf.reduce_sum(pulled * v)))
    assert left == pytest.approx(right, rel=1e-12, abs=1e-10)


@pytest.mark.ranks(1)
def test_mode_numbers(mesh):
    """Those of a complex field are signed along each axis; each mode then stands for itself."""
    function, *_ = functions(mesh, (4, 6, 5), real=False)
    ((shape, _),) = function.inputs.values()
    plan = fft.pencils(shape, function.impl)
    for numbers, size in zip(plan.mode_numbers(), (4, 6, 5), strict=True):
        np.testing.assert_array_equal(numbers.ravel(), size * np.fft.fftfreq(size))
    np.testing.assert_array_equal(plan.multiplicity(), 1)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_is_the_difference(mesh, which):
    """A quadratic loss: its central difference is exact but for rounding."""
    function = functions(mesh, (8, 4, 6))[which]
    ((shape, _),) = function.inputs.values()
    rng = np.random.default_rng(4)
    v = function.block_of("a", rng.normal(size=shape.to_integer_list))
    direction = function.block_of("a", rng.normal(size=shape.to_integer_list))

    def loss(x):
        return tf.reduce_sum(function(x) ** 2)

    with tf.GradientTape() as tape:
        tape.watch(v)
        value = loss(v)
    slope = float(mesh.world.allreduce(tf.reduce_sum(tape.gradient(value, v) * direction)))
    step = 1e-3
    up, down = loss(v + step * direction), loss(v - step * direction)
    difference = float(mesh.world.allreduce(up - down)) / (2 * step)
    assert slope == pytest.approx(difference, rel=1e-9)


def test_complaints(line):
    ranks = launch.detect().size
    shape = [("x", 4 * ranks), ("y", 4), ("z", 4 * ranks)]

    def build(layout_text, dtype=tf.float32, size=shape, transform=rfft3d):
        function = MeshFunction(lambda _, a: transform(a), line, layout_text, {"a": (size, dtype)})
        return function(np.zeros([n for _, n in size]))

    with pytest.raises(ValueError, match="float32 or float64"):
        build("x:row;ky:row", tf.float16)
    with pytest.raises(ValueError, match="fft3d takes a complex field .* is it one for rfft3d"):
        build("x:row;ky:row", transform=fft3d)
    with pytest.raises(ValueError, match="rfft3d takes a real field .* is it one for fft3d"):
        build("x:row;ky:row", size=[*shape, ("pair", 2)])
    if ranks > 1:
        with pytest.raises(ValueError, match="z whole"):
            build("z:row")
        with pytest.raises(ValueError, match="ky be split over row"):
            build("x:row")
        with pytest.raises(ValueError, match="kx stay whole"):
            build("x:row;ky:row;kx:row")
        with pytest.raises(ValueError, match=f"x={ranks + 1} does not divide"):
            build("x:row;ky:row", size=[("x", ranks + 1), ("y", 4), ("z", 4)])
