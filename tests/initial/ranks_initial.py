"""Initial conditions on every mesh: exact solutions, the equation of motion, another code's run."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from pmwd_tables import InterpolatedGrowth, PmwdPower
from ranks import SHAPES, SIZE, process_mesh
from reference import pmwd_parameters, reference

from flowpm_dist.cosmology import Cosmology, Growth, LinearPower
from flowpm_dist.grid.box import Box
from flowpm_dist.initial import conditions, transforms
from flowpm_dist.initial.conditions import linear_amplitude, noise_function
from flowpm_dist.initial.lpt import growth_terms, growth_terms_by_d1, lpt_function
from meshimpl import philox
from meshimpl.operations.noise import MODES

N = 16
UNIVERSE = Cosmology.planck18()
EDS = {1: 1.0, 2: 3 / 7, "3a": 1 / 3, "3b": 10 / 21, "3c": 1 / 7}
ORDER_OF = [1, 2, 3, 3, 3]


def cube(mesh, n=N, size=2 * np.pi, **kwargs):
    """A box of which the fundamental mode is 1 h/Mpc."""
    return Box((n,) * 3, (size,) * 3, mesh, tf.float64, **kwargs)


@functools.cache
def third_order(box):
    return lpt_function(box, 3)


def lpt_terms(box, delta):
    """psi_n of all five terms, whole arrays, from a linear overdensity."""
    function = third_order(box)
    amplitude = tf.ones(box.pencils.spectral_block, tf.float64)
    terms = []
    for first, second in ((0, 1), (2, 3), (4, 4)):
        factors = np.eye(5)[[first, second]]
        linear, *psi = function(delta, amplitude, factors)
        np.testing.assert_allclose(box.whole(linear, box.shape), delta, atol=1e-13)
        terms += [box.whole(p, box.vector_shape) for p in psi]
    return terms[:5]


def lattice(n=N):
    return np.meshgrid(*[2 * np.pi / n * np.arange(n)] * 3, indexing="ij", sparse=True)


def band_limited(n=N, highest=2, seed=0):
    """A smooth field, unit rms, of modes to `highest`: third-order products do not alias."""
    spectrum = np.fft.fftn(np.random.default_rng(seed).standard_normal((n,) * 3))
    m = np.abs(np.fft.fftfreq(n, 1 / n))
    for axis in range(3):
        spectrum *= (m <= highest).reshape([-1 if i == axis else 1 for i in range(3)])
    spectrum[0, 0, 0] = 0
    field = np.fft.ifftn(spectrum).real
    return field / field.std()


def test_a_plane_wave_has_no_higher_orders(mesh):
    x, _, _ = lattice()
    first, *others = lpt_terms(cube(mesh), np.cos(2 * x) + np.zeros((N,) * 3))
    expected = -np.sin(2 * x) / 2
    np.testing.assert_allclose(first[..., 0], expected + np.zeros((N,) * 3), atol=1e-13)
    assert max(np.abs(psi).max() for psi in [first[..., 1:], *others]) < 1e-13


@pytest.mark.ranks(1)
def test_derivatives_along_all_axes_are_compiled_once(mesh):
    kernels = transforms._first, transforms._second
    before = [kernel.experimental_get_tracing_count() for kernel in kernels]
    lpt_function(cube(mesh, n=4), 2)(np.zeros((4, 4, 4)), np.ones((3, 4, 4)), np.ones((2, 2)))
    assert [kernel.experimental_get_tracing_count() for kernel in kernels] == [
        count + 1 for count in before
    ]


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
def test_crossed_plane_waves(mesh):
    """delta = a cos x + b cos y, in closed form to third order."""
    a, b = 0.7, -1.3
    x, y, z = lattice()
    cx, cy, sx, sy = np.cos(x), np.cos(y), np.sin(x), np.sin(y)
    c2x, c2y, s2x, s2y = np.cos(2 * x), np.cos(2 * y), np.sin(2 * x), np.sin(2 * y)
    aab, abb = a * a * b / 8, a * b * b / 8
    expected = [
        (-a * sx, -b * sy),
        (-a * b / 2 * sx * cy, -a * b / 2 * cx * sy),
        (0.0, 0.0),
        (
            -aab * 0.4 * s2x * cy - abb * (sx + sx * c2y / 5),
            -aab * (sy + c2x * sy / 5) - abb * 0.4 * cx * s2y,
        ),
        # the curl of (0, 0, G), with -laplacian G = (a cos x - b cos y) (-a b / 2 sin x sin y)
        (
            -0.4 * aab * s2x * cy + 0.8 * abb * sx * c2y,
            0.8 * aab * c2x * sy - 0.4 * abb * cx * s2y,
        ),
    ]
    found = lpt_terms(cube(mesh), a * cx + b * cy + 0 * z)
    for psi, (along_x, along_y) in zip(found, expected, strict=True):
        np.testing.assert_allclose(psi[..., 0], along_x + 0 * (x + y + z), atol=1e-13)
        np.testing.assert_allclose(psi[..., 1], along_y + 0 * (x + y + z), atol=1e-13)
        assert np.abs(psi[..., 2]).max() < 1e-13


def gradient(vector):
    """d v_i / d x_j, [x, y, z, i, j]."""
    n = np.fft.fftfreq(N, 1 / N)
    n[N // 2] = 0
    k = np.stack(np.meshgrid(n, n, n, indexing="ij"), axis=-1)
    spectrum = np.fft.fftn(vector, axes=(0, 1, 2))
    return np.fft.ifftn(1j * spectrum[..., :, None] * k[..., None, :], axes=(0, 1, 2)).real


def residual(gradients, order, a):
    """Of the exact Lagrangian equation of motion in an Einstein-de Sitter universe.

    J div_x A - 1.5 (J - 1) and the curl of A, A = x'' + x'/2 with ' = d/dlna.
    """
    S, A = 0.0, 0.0
    for g, c, n in zip(gradients, EDS.values(), ORDER_OF, strict=True):
        if n <= order:
            S = S + c * a**n * g
            A = A + c * a**n * (n * n + n / 2) * g
    deformation = np.eye(3) + S
    determinant = np.linalg.det(deformation)
    in_x = np.linalg.solve(deformation.swapaxes(-1, -2), A.swapaxes(-1, -2))  # dA_j / dx_i
    divergence = determinant * np.trace(in_x, axis1=-2, axis2=-1) - 1.5 * (determinant - 1)
    return np.abs(divergence).max(), np.abs(in_x - in_x.swapaxes(-1, -2)).max()


def test_order_of_the_error_of_the_equation_of_motion(mesh):
    gradients = [gradient(psi) for psi in lpt_terms(cube(mesh), band_limited())]
    for order in (1, 2, 3):
        coarse, fine = (residual(gradients, order, a) for a in (2e-3, 1e-3))
        divergence, curl = np.log2(np.divide(coarse, np.maximum(fine, 1e-300)))
        assert divergence == pytest.approx(order + 1, abs=0.05)
        if order > 1:  # at first order there is no curl but rounding
            assert curl == pytest.approx(order + 1, abs=0.05)


@pytest.mark.parametrize("name", ["pmwd_lcdm_32", "pmwd_w0wa_32"])
def test_second_order_is_pmwds(line, name):
    data = reference(name)
    cosmology = Cosmology(**pmwd_parameters(data))
    box = Box((32,) * 3, (float(data["box_size"]),) * 3, line, tf.float64)
    power = PmwdPower(cosmology)
    growth = InterpolatedGrowth(Growth(cosmology), data["a_nbody"])
    a = float(data["a_nbody"][0])
    momentum = a**2 * growth.background.e(a)
    factors = growth_terms(growth, a, 2) * tf.stack([tf.ones_like(momentum), momentum])[:, None]
    amplitude = linear_amplitude(box, power)
    delta, *state = lpt_function(box, 2)(data["white_noise"], amplitude, factors)
    found = [box.whole(delta, box.shape), *(box.whole(x, box.vector_shape) for x in state)]
    for value, key in zip(found, ("linear_delta", "lpt_disp", "lpt_vel"), strict=True):
        part, scale = value[tuple(data["sites"])], np.abs(data[key]).max()
        np.testing.assert_allclose(part / scale, data[key] / scale, atol=1e-7, err_msg=key)


def test_gradients_are_those_of_differences():
    """The loss is a cubic polynomial of noise and amplitude: a five-point difference is exact."""
    mesh = process_mesh(SHAPES[SIZE][-1])
    box, world = cube(mesh, size=30.0), mesh.world
    function = third_order(box)
    rng = np.random.default_rng(mesh.rank)
    block, modes = box.block, box.pencils.spectral_block
    amplitude = 0.1 * rng.uniform(0.5, 1.5, modes)
    factors = np.random.default_rng(5).uniform(0.5, 1.5, (2, 5))
    point = [rng.standard_normal(block), amplitude, factors]
    weights = [rng.standard_normal(block), *rng.standard_normal((2, *block, 3))]
    shared = np.random.default_rng(6)
    directions = [rng.standard_normal(block), amplitude * rng.uniform(-1, 1, modes)]
    directions.append(shared.standard_normal((2, 5)))

    def loss(inputs):
        outputs = function(*inputs)
        return sum(tf.reduce_sum(w * x) for w, x in zip(weights, outputs, strict=True))

    inputs = [tf.constant(x) for x in point]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        value = loss(inputs)
    gradients = tape.gradient(value, inputs)
    for i, direction in enumerate(directions):

        def moved(h, i=i, direction=direction):
            return loss([x + h * direction if j == i else x for j, x in enumerate(inputs)])

        h = 0.1
        slope = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)
        total = float(world.allreduce(slope))
        by_tape = float(world.allreduce(tf.reduce_sum(gradients[i] * direction)))
        assert by_tape == pytest.approx(total, rel=1e-9), ("noise", "amplitude", "factors")[i]


def test_a_batch_is_its_universes(line):
    """On a mesh with a replica axis, each universe with noise, power and growth of its own."""
    shape = {1: "replica:1,row:1,col:1", 2: "replica:2,row:1,col:1", 4: "replica:2,row:2,col:1"}
    mesh = process_mesh(shape[SIZE])
    single, batch = cube(line, 8, 40.0), cube(mesh, 8, 40.0, batch=4)
    seeds, d1 = np.arange(4), np.array([1.0, 0.8, 1.2, 0.5])
    factors = np.stack([[[d, d**2], [2 * d, 3 * d**2]] for d in d1])
    cosmologies = [UNIVERSE.replace(n_s=n_s) for n_s in (0.9, 0.95, 1.0, 1.05)]
    powers = [LinearPower(c) for c in cosmologies]
    mine = slice(batch.batch_offset, batch.batch_offset + batch.local_batch[0])
    amplitude = tf.stack([linear_amplitude(batch, p) for p in powers[mine]])
    draws = [noise_function(box, "nested", fixed=True) for box in (single, batch)]
    noise = batch.whole(draws[1](seeds), batch.shape)
    for i in range(4):
        alone = single.whole(draws[0](seeds[i]), single.shape)
        np.testing.assert_allclose(noise[i], alone, atol=1e-12)
    results = lpt_function(batch, 2, fields=True)(noise, amplitude, factors)
    shapes = [batch.shape] + [batch.vector_shape] * 4
    whole = [batch.whole(x, s) for x, s in zip(results, shapes, strict=True)]
    alone = lpt_function(single, 2, fields=True)
    for i in range(4):
        outputs = alone(noise[i], linear_amplitude(single, powers[i]), factors[i])
        for together, output in zip(whole, outputs, strict=True):
            shape = single.vector_shape if output.shape.rank == 4 else single.shape
            expected = single.whole(output, shape)
            np.testing.assert_allclose(together[i], expected, atol=1e-12 * np.abs(expected).max())
    np.testing.assert_allclose(
        whole[1],
        np.einsum("b,bxyzi->bxyzi", factors[:, 0, 0], whole[3])
        + np.einsum("b,bxyzi->bxyzi", factors[:, 0, 1], whole[4]),
        atol=1e-12 * np.abs(whole[1]).max(),
    )


def test_growth_of_each_term():
    growth = Growth(UNIVERSE)
    for order, count in ((1, 1), (2, 2), (3, 5)):
        terms, by_d1 = growth_terms(growth, 0.3, order), growth_terms_by_d1(growth, 0.3, order)
        assert terms.shape == by_d1.shape == (2, count)
        np.testing.assert_array_equal(terms[0], by_d1[0])
        np.testing.assert_allclose(by_d1[1] * terms[1, 0], terms[1], rtol=1e-13)
        at_zero = growth_terms_by_d1(growth, 0.0, order)
        np.testing.assert_allclose(at_zero, [[0.0] * count, np.eye(count)[0]], atol=1e-14)


def modes_of(field):
    """w(n), whole: the orthonormal transform."""
    return np.fft.fftn(field, norm="ortho")


def test_nested_noise_keeps_the_modes_of_a_coarser_grid(mesh):
    fields = []
    for n in (8, 16):
        box = cube(mesh, n)
        fields.append(box.whole(noise_function(box, "nested")(3), box.shape))
    for field in fields:
        assert abs(field.mean()) < 5 / field.size**0.5
        assert abs(field.var() - 1) < 5 * (2 / field.size) ** 0.5
    coarse, fine = (modes_of(f) for f in fields)
    for n in np.ndindex(7, 7, 7):
        n = np.array(n) - 3
        assert coarse[tuple(n)] == pytest.approx(fine[tuple(n)], abs=1e-12)


def test_linear_field_on_a_finer_grid_has_the_same_large_scales(mesh):
    """With power below the coarse Nyquist frequency only, they agree where both have a cell."""

    class Cut:
        def without_growth(self, k):
            return tf.where((k > 0) & (k < 3.9), 1 / (1 + k), tf.zeros_like(k))

    fields = []
    for n in (8, 16):
        box = cube(mesh, n)
        noise = noise_function(box, "nested")(5)
        factors = tf.zeros([2, 1], tf.float64)
        delta = lpt_function(box, 1)(noise, linear_amplitude(box, Cut()), factors)[0]
        fields.append(box.whole(delta, box.shape))
    np.testing.assert_allclose(fields[1][::2, ::2, ::2], fields[0], atol=1e-13)


def expected_mode(seed, grid, n):
    """w(n) as the documentation of `mode_noise` has it, n whole wavenumbers (x, y, z)."""
    n = [(m + g // 2) % g - g // 2 for m, g in zip(n, grid, strict=True)]
    own = [m == 0 or 2 * abs(m) == g for m, g in zip(n, grid, strict=True)]
    leading = next((m for m, o in zip(n[::-1], own[::-1], strict=True) if not o), 0)
    if leading < 0:
        n = [m if 2 * abs(m) == g else -m for m, g in zip(n, grid, strict=True)]
    key = 0
    for m in n[::-1]:
        key = key * 2**21 + m + 2**20
    real, imaginary = (float(x) for x in philox.normal_pair(tf.constant(key), MODES, seed))
    if leading == 0:
        return real
    return (real + np.sign(leading) * 1j * imaginary) / np.sqrt(2)


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
def test_nested_noise_has_the_modes_that_its_documentation_names(mesh):
    """On any layout; self-conjugate modes, the planes of conjugate pairs, and ordinary modes."""
    grid = (8, 4, 12)
    box = Box(grid, (1.0, 1.0, 1.0), mesh, tf.float64)
    modes = modes_of(box.whole(noise_function(box, "nested")(-9), box.shape))
    chosen = [(0, 0, 0), (4, 0, 0), (4, 2, 6), (1, 0, 0), (-1, 0, 0), (3, -1, 0), (-3, 1, 0)]
    chosen += [(4, 1, 0), (4, -1, 0), (-3, 2, 6), (3, 2, 6), (1, -1, 3), (-2, 1, -5), (4, 2, 3)]
    for n in chosen:
        m = n if n[2] >= 0 else tuple(-i for i in n)
        expected = expected_mode(-9, grid, m)
        found = modes[n] if n == m else np.conj(modes[n])
        assert found == pytest.approx(expected, abs=1e-12), n


@pytest.mark.parametrize("kind", conditions.NOISES)
def test_fixed_and_paired(mesh, kind):
    box = cube(mesh, 8)

    def draw(**options):
        return box.whole(noise_function(box, kind, **options)(11), box.shape)

    plain, phases = draw(), draw(fixed=True)
    np.testing.assert_allclose(np.abs(modes_of(phases)), 1.0, rtol=1e-12)
    unit = modes_of(plain) / np.abs(modes_of(plain))
    np.testing.assert_allclose(modes_of(phases), unit, atol=1e-11)
    np.testing.assert_array_equal(draw(paired=True), -plain)
    np.testing.assert_array_equal(draw(fixed=True, paired=True), -phases)


def test_fixed_amplitude_of_nothing_is_nothing(mesh, monkeypatch):
    drawn = conditions.white_noise
    monkeypatch.setattr(conditions, "white_noise", lambda *args: 0.0 * drawn(*args))
    assert not np.any(noise_function(cube(mesh, 8), fixed=True)(11))


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "grid, size, table, chunk",
    [
        ((8, 16, 12), (50.0, 50.0, 50.0), True, conditions.CHUNK),
        ((8, 16, 12), (50.0, 50.0, 50.0), True, 20),
        ((16, 8, 12), (100.0, 50.0, 50.0), True, 7),
        ((8, 16, 12), (50.0, 61.3, 70.7), False, conditions.CHUNK),
    ],
)
def test_amplitude(monkeypatch, mesh, grid, size, table, chunk):
    """Of every mode what its own wavenumber says, and so its derivatives; nothing for the mean."""
    monkeypatch.setattr(conditions, "CHUNK", chunk)
    box = Box(grid, size, mesh, tf.float64)
    assert (conditions._squares(box) is not None) == table
    n_s = tf.Variable(0.96, dtype=tf.float64)
    weights = np.random.default_rng(mesh.rank).standard_normal(box.pencils.spectral_block)
    kx, ky, kz = box.wavenumbers()
    x, y, z = box.pencils.mode_numbers()
    real = (np.abs(z) <= grid[2] // 2) & (np.abs(y) <= grid[1] // 2) & (x == x)  # not padding
    results = []
    with tf.GradientTape(persistent=True) as tape:
        power = LinearPower(UNIVERSE.replace(n_s=n_s))
        amplitude = linear_amplitude(box, power)
        k = tf.constant(np.sqrt(kx**2 + ky**2 + kz**2))
        spectrum = power.without_growth(k) * (box.cells / box.volume)
        safe = tf.where(k > 0, spectrum, tf.ones_like(k))
        direct = tf.where(k > 0, tf.sqrt(safe), tf.zeros_like(k))
        results = [tf.reduce_sum((weights * real) * value) for value in (amplitude, direct)]
    np.testing.assert_allclose(amplitude * real, direct * real, rtol=1e-11)
    found, expected = (float(tape.gradient(r, n_s)) for r in results)
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_arguments_out_of_range(mesh):
    with pytest.raises(ValueError, match="noise 'pink' is not one of 'cells', 'nested'"):
        noise_function(cube(mesh, 8), "pink")
    with pytest.raises(ValueError, match="lpt_order 4 is not one of 1, 2, 3"):
        lpt_function(cube(mesh, 8), 4)
