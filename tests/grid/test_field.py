"""Fields on one rank: arithmetic as numpy's, arrays, identity, and what is refused."""

import operator
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from derivatives import check_derivative

import flowpm_dist as fpm
from flowpm_dist.grid.box import cached_on_mesh
from flowpm_dist.simulation import State
from flowpm_dist.statistics import bispectrum
from meshimpl import ProcessMesh

MESH = ProcessMesh("row:1,col:1")
BOX = fpm.Box((4, 6, 8), (8.0, 12.0, 16.0), MESH, tf.float64)
RNG = np.random.default_rng(1)


def field(*trailing, box=BOX):
    shape = box.local_batch + box.block + trailing
    return fpm.Field(tf.constant(RNG.uniform(0.5, 2.0, shape), box.dtype), box)


SCALAR, OTHER, VECTOR = field(), field(), field(3)
OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]


@pytest.mark.parametrize("operation", OPERATORS)
def test_arithmetic_is_numpys(operation):
    a, b, v = SCALAR.numpy(), OTHER.numpy(), VECTOR.numpy()
    for other in (2, 0.5, np.float64(0.5), np.int64(2), tf.constant(2), tf.constant(0.5), b):
        number = np.asarray(other)
        for found, expected in (
            (operation(SCALAR, other), operation(a, number)),
            (operation(other, SCALAR), operation(number, a)),
        ):
            assert isinstance(found, fpm.Field) and found.box == BOX and found.dtype == tf.float64
            np.testing.assert_allclose(found.block, expected, rtol=1e-15)
    for other, array in ((OTHER, b), (OTHER.block, b), (a > 0, a > 0)):
        np.testing.assert_allclose(operation(SCALAR, other).block, operation(a, array), rtol=1e-15)
    shift = [0.5, 1.0, 2.0]
    for found, expected in (
        (operation(VECTOR, shift), operation(v, np.array(shift))),
        (operation(VECTOR, VECTOR), operation(v, v)),
        (operation(SCALAR, VECTOR), operation(a[..., np.newaxis], v)),
        (operation(VECTOR, SCALAR), operation(v, a[..., np.newaxis])),
    ):
        np.testing.assert_allclose(found.block, expected, rtol=1e-15)
    np.testing.assert_array_equal((-VECTOR).block, -v)


def test_a_field_keeps_its_precision():
    single = fpm.Box(BOX.grid, BOX.size, MESH)
    one = field(box=single)
    for other in (2.0, np.float64(2.0), np.ones(BOX.grid), tf.constant(2.0, tf.float64)):
        assert (one * other).dtype == (other * one).dtype == tf.float32
    with pytest.raises(ValueError, match="float32; and grid .* float64"):
        one + SCALAR


def test_one_number_for_each_universe():
    batch = fpm.Box(BOX.grid, BOX.size, MESH, tf.float64, batch=8)  # as many as cells along z
    numbers = tf.range(1.0, 9.0)
    for trailing in ((), (3,)):
        whole = field(*trailing, box=batch)
        found = numbers * whole
        for i in range(8):
            np.testing.assert_array_equal(found.block[i], (i + 1) * whole.block[i])
    three = fpm.Box(BOX.grid, BOX.size, MESH, tf.float64, batch=3)
    with pytest.raises(ValueError, match="for each universe or for each component"):
        field(3, box=three) * np.ones(3)


def test_gradients_flow_to_both_operands():
    """Against central differences."""

    blocks = [f.block for f in (SCALAR + 1.0, OTHER, VECTOR)]
    weights = RNG.normal(size=(*BOX.grid, 3))
    for number, of_one in enumerate(blocks):

        def loss(block, number=number):
            given = [*blocks[:number], block, *blocks[number + 1 :]]
            a, b, v = (fpm.Field(tf.convert_to_tensor(each), BOX) for each in given)
            made = (2.0 - a * b / (1.0 + v)) ** 2 + a**b - (-v) / a
            return tf.reduce_sum(made.block * weights) + tf.reduce_sum((a - 1.0).delta().block ** 3)

        check_derivative(loss, of_one, 1e-5, rtol=1e-7)


def test_which_results_keep_the_window_of_painting():
    """Those that are linear in one painted density, or in several."""
    painted = fpm.Field(SCALAR.block, BOX, "cic")
    kept = [
        *(painted + 1, 1 - painted, 2 * painted, painted / 2, -painted, painted - painted),
        *(painted.delta(), painted.on(BOX), (painted + tf.constant(1.0)) * np.float32(2)),
    ]
    lost = [
        *(painted**2, 1 / painted, 2**painted, painted * painted, painted * painted.numpy()),
        *(painted + SCALAR, SCALAR - painted, painted + SCALAR.numpy(), painted * VECTOR),
    ]
    assert [found.window for found in kept] == ["cic"] * len(kept)
    assert [found.window for found in lost] == [None] * len(lost)


def test_spectra_divide_the_window_out():
    """Against the modes of the particles themselves, by sums over all of them."""
    sim = fpm.Simulation(fpm.Cosmology.planck18(), 16, 64.0, [0.1, 1.0], precision="float64")
    state, half_nyquist = sim.lpt(seed=2), 4
    x = state.positions().numpy().reshape(-1, 3) * (2 * np.pi / 64)
    numbers = np.fft.fftfreq(16, 1 / 16)
    waves = [np.exp(-1j * np.outer(numbers, along)) for along in x.T]
    modes = np.einsum("xp,yp,zp->xyz", *waves, optimize=True) / len(x)
    k = np.sqrt(sum(n**2 for n in np.meshgrid(numbers, numbers, numbers)))
    here = np.abs(k - half_nyquist) < 0.5
    truth = np.mean(np.abs(modes[here]) ** 2) * 64**3

    density, shifted = state.density(), state.density(shift=0.5)

    def ratio(field, **options):
        found = fpm.power_spectrum(field, interlaced=shifted, **options)
        return found.power[half_nyquist - 1] / truth

    assert ratio(density) == pytest.approx(1, abs=0.01)
    same = pytest.approx(ratio(density), rel=1e-12)
    assert ratio(density.delta() * 1) == same and ratio(density, window="cic") == same
    assert 0.6 < ratio(density, window=None) < 0.75
    assert fpm.power_spectrum(density.numpy(), 64.0).power == pytest.approx(
        fpm.power_spectrum(density, window=None).power
    )
    shells = bispectrum(density).bispectrum / bispectrum(density, window=None).bispectrum
    assert shells[-1] > 1.5
    found = fpm.compare(density, state.linear_delta)  # divided in the painted one alone
    for power, field in ((found.power_a, density), (found.power_b, state.linear_delta)):
        assert power[3] == pytest.approx(fpm.power_spectrum(field).power[3], rel=1e-12)
    (output,) = sim.run(seed=2, outputs=[0.5], on_output=State.density)
    assert output.window == "cic"
    with pytest.raises(ValueError, match="window 'cci': 'own', 'cic', 'tsc', 'pcs' or None"):
        fpm.power_spectrum(density, window="cci")


def test_overdensity():
    counts = 3.0 * SCALAR
    expected = SCALAR.numpy() / SCALAR.numpy().mean() - 1
    np.testing.assert_allclose(counts.delta().block, expected, atol=1e-14)
    for wrong, message in ((counts.delta(), "whose mean is"), (VECTOR, "of a vector field")):
        with pytest.raises(ValueError, match=message):
            wrong.delta()
    single = field(box=fpm.Box(BOX.grid, BOX.size, MESH)).delta()
    with pytest.raises(ValueError, match="a density or counts, with a mean above 0"):
        single.delta()


def test_a_field_is_an_array_to_numpy():
    whole = SCALAR.numpy()
    for found in (np.asarray(SCALAR), np.array(SCALAR, copy=True), SCALAR.__array__()):
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, whole)
    np.testing.assert_array_equal(np.log(SCALAR), np.log(whole))
    assert np.mean(SCALAR) == whole.mean()
    assert np.asarray(SCALAR, np.float32).dtype == np.float32
    np.testing.assert_array_equal(np.asarray(VECTOR), VECTOR.numpy())
    with pytest.raises(ValueError, match="cannot be had uncopied"):
        np.array(SCALAR, copy=False)


def test_a_field_is_no_tensor():
    """TensorFlow would gather it and drop its gradient."""
    with pytest.raises(TypeError, match="take field.block"):
        tf.reduce_sum(SCALAR)


def test_identity_and_repr():
    same = fpm.Field(SCALAR.block, BOX)
    assert SCALAR == SCALAR and SCALAR != same and SCALAR != 1.0
    assert len({SCALAR, same, SCALAR}) == 2
    about = "grid 4 x 6 x 8, size 8 x 12 x 16 Mpc/h, mesh row:1,col:1, float64)"
    assert repr(SCALAR) == f"Field({about}"
    assert repr(VECTOR) == f"Field(vector, {about}"
    state = fpm.Simulation(fpm.Cosmology.planck18(), 4, 8.0, [0.1, 1.0]).lpt(seed=1)
    assert state == state and len({state, state}) == 1
    assert (
        repr(state)
        == "State(a = 1, grid 4 x 4 x 4, size 8 x 8 x 8 Mpc/h, mesh row:1,col:1, float32)"
    )


def test_operands_that_do_not_fit_are_told():
    larger = field(box=fpm.Box(BOX.grid, (8.0, 12.0, 20.0), MESH, tf.float64))
    finer = field(box=BOX.finer(2))
    for other in (larger, finer):
        with pytest.raises(ValueError, match="two fields are not on the same box: grid 4 x 6 x 8"):
            SCALAR + other
    for other in (np.ones(8), tf.ones([6, 8]), np.ones((2, *BOX.grid)), VECTOR.block):
        with pytest.raises(ValueError, match="the other operand has shape"):
            SCALAR * other
    for other in ("1", None, 1j, tf.constant("1"), [None]):
        with pytest.raises(TypeError):
            SCALAR + other


def test_what_ranks_keep_together_is_not_driven_out_by_what_one_does_alone():
    """Ranks of a mesh forget together: each mesh has a cache of its own."""

    class OfMesh:
        def __init__(self):
            self.mesh = SimpleNamespace(cache={})

    made = []

    @cached_on_mesh(2)
    def made_for(box, number):
        made.append((box, number))
        return len(made)

    shared, alone = OfMesh(), OfMesh()
    first = made_for(shared, 0)
    for number in range(5):
        made_for(alone, number)
    assert made_for(shared, 0) == first and len(made) == 6
    made_for(shared, 1)
    made_for(shared, 2)
    assert made_for(shared, 0) != first
