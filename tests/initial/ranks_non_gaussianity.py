"""Local f_NL: the linear field and LPT against formulas in numpy, its gradients, on any mesh."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from ranks import by_rank_zero, solo

import flowpm_dist as fpm
from flowpm_dist.cosmology import LinearPower
from flowpm_dist.statistics import bispectrum

GRID, SIDE = 12, 150.0  # [Mpc/h]
PLANCK = fpm.Cosmology.planck18()
NOISE = np.random.default_rng(6).normal(size=(GRID,) * 3)
F_NL = 500.0


def simulation(mesh, cosmology=PLANCK, **options):
    steps = fpm.scale_factor_steps(0.1, 1.0, 2)
    return fpm.Simulation(cosmology, GRID, SIDE, steps, mesh=mesh, precision="float64", **options)


def wavenumbers():
    """The wavenumbers of a real field's modes, 1 in place of 0 [h/Mpc]."""
    along = 2 * np.pi * np.fft.fftfreq(GRID, SIDE / GRID)
    k = np.sqrt(sum(x**2 for x in np.meshgrid(along, along, along[: GRID // 2 + 1], indexing="ij")))
    k[0, 0, 0] = 1.0
    return k


def field_of(modes):
    return np.fft.irfftn(modes, (GRID,) * 3, (0, 1, 2))


@functools.cache
def potential_amplitude():
    """sqrt(P_phi / V_cell), where P_phi = 9/25 of the curvature's power; 0 for the mean."""
    k, A_s = wavenumbers(), float(LinearPower(PLANCK).A_s)
    tilted = (k * PLANCK.h / 0.05) ** (PLANCK.n_s - 1)
    amplitude = np.sqrt(9 / 25 * 2 * np.pi**2 / k**3 * A_s * tilted * (GRID / SIDE) ** 3)
    amplitude[0, 0, 0] = 0.0
    return amplitude


def of_potential():
    """From phi to the linear overdensity today: M = 2/3 k^2 T D c^2 / (Omega_m H0^2)."""
    power, k = LinearPower(PLANCK), wavenumbers()
    transfer = power.without_growth(k) / k**PLANCK.n_s  # T^2, up to its value at k = 0
    transfer /= power.without_growth(1e-7) / 1e-7**PLANCK.n_s
    growth = float(power.growth.d1(1.0))
    m = 2 / 3 * k**2 * np.sqrt(transfer) * growth * 2997.92458**2 / PLANCK.Omega_m
    m[0, 0, 0] = 0.0
    return m


def noise_in_numpy(f_NL):
    amplitude = potential_amplitude()
    phi = field_of(np.fft.rfftn(NOISE) * amplitude)
    added = np.fft.rfftn(phi**2) / np.where(amplitude > 0, amplitude, np.inf)
    return NOISE + f_NL * field_of(added)


@pytest.mark.dealt(4)
@pytest.mark.ranks(1, 2, 4)
def test_the_linear_field(mesh):
    """Phi = phi + f_NL phi^2, and delta = M Phi; the sign: f_NL > 0 gives positive skewness."""

    def delta(f_NL):
        cosmology = PLANCK.replace(f_NL=f_NL)
        return simulation(mesh, cosmology).lpt(white_noise=NOISE).linear_delta.numpy()

    above, gaussian, below = (delta(f_NL) for f_NL in (F_NL, 0.0, -F_NL))
    size = np.abs(gaussian).max()
    np.testing.assert_allclose((above + below) / 2, gaussian, rtol=0, atol=1e-13 * size)
    m = of_potential()
    phi = field_of(np.fft.rfftn(gaussian) / np.where(m > 0, m, np.inf))
    expected = F_NL * field_of(m * np.fft.rfftn(phi**2))
    assert np.abs(expected).max() > 0.01 * size
    np.testing.assert_allclose((above - below) / 2, expected, rtol=0, atol=1e-11 * size)


@functools.cache
def many_universes(f_NL):
    """The linear fields of 48 universes; the same noise for each f_NL."""
    sim = simulation(solo(), PLANCK.replace(f_NL=f_NL))
    return sim.lpt(seed=list(range(48))).linear_delta


@pytest.mark.ranks(1)
def test_skewness():
    """The mean <delta^3> of 48 universes against its formula, a sum over pairs of modes.

    6 f_NL sum_k1 sum_k2 (M W P_phi)(k1) (M W P_phi)(k2) (M W)(k1 + k2): the bispectrum
    2 f_NL (P P + ...) M M M summed, with a Gaussian W of 20 Mpc/h.
    """
    smooth = of_potential() * np.exp(-0.5 * (20.0 * wavenumbers()) ** 2)
    product = field_of(smooth * potential_amplitude() ** 2)  # <delta(x) phi(0)>
    of_square = field_of(smooth * np.fft.rfftn(product**2))
    expected = 6 * F_NL * of_square[0, 0, 0]
    assert expected > 0
    window = np.exp(-0.5 * (20.0 * wavenumbers()) ** 2)

    def skewness(f_NL):
        modes = np.fft.rfftn(many_universes(f_NL).numpy(), axes=(1, 2, 3)) * window
        return (np.fft.irfftn(modes, (GRID,) * 3, (1, 2, 3)) ** 3).mean((1, 2, 3))

    measured = (skewness(F_NL) - skewness(-F_NL)) / 2
    error = measured.std() / np.sqrt(len(measured))
    assert error < 0.2 * expected
    assert abs(measured.mean() - expected) < 4 * error


@pytest.mark.ranks(1)
def test_the_bispectrum():
    """The mean of 48 pairs, f_NL less -f_NL, against 2 f_NL (P_phi P_phi + 2 perm.) M M M.

    The formula is averaged over the triangles of modes of each bin, as the estimator does.
    """
    edges = (np.arange(4) + 1 - 1e-6) * 2 * np.pi / SIDE
    above, below = (bispectrum(many_universes(f_NL), bins=edges) for f_NL in (F_NL, -F_NL))
    shell, m = np.digitize(wavenumbers(), edges) - 1, of_potential()
    shell[0, 0, 0] = -1
    m_power = m * potential_amplitude() ** 2 * (SIDE / GRID) ** 3
    ones, ms, m_powers = (
        [field_of(np.where(shell == number, factor, 0.0)) for number in range(3)]
        for factor in (np.ones_like(m), m, m_power)
    )

    def formula(i, j, n):
        sides = (i, j, n), (j, n, i), (n, i, j)
        total = sum(np.sum(m_powers[a] * m_powers[b] * ms[c]) for a, b, c in sides)
        return 2 * F_NL * total / np.sum(ones[i] * ones[j] * ones[n])

    expected = np.array([formula(*shells) for shells in above.shells])
    assert (expected > 0).all()
    pairs = (above.bispectrum - below.bispectrum) / 2
    mean, error = pairs.mean(axis=0), pairs.std(axis=0) / np.sqrt(len(pairs))
    assert (np.abs(mean - expected) < 4 * error).all()
    fitted = pairs @ (expected / error**2) / np.sum((expected / error) ** 2)  # in units of expected
    error = fitted.std() / np.sqrt(len(fitted))
    assert error < 0.1
    assert abs(fitted.mean() - 1) < 4 * error


@pytest.mark.ranks(1)
def test_the_spectrum_has_no_part_of_first_order(mesh):
    """The mean spectrum of noise and its opposite is even in f_NL."""

    def spectrum(f_NL):
        sim, total = simulation(mesh, PLANCK.replace(f_NL=f_NL)), 0.0
        for paired in (False, True):
            delta = sim.lpt(seed=1, paired=paired).linear_delta.numpy()
            total = total + np.abs(np.fft.rfftn(delta)) ** 2 / 2
        return total

    above, gaussian, below = (spectrum(f_NL) for f_NL in (F_NL, 0.0, -F_NL))
    np.testing.assert_allclose(above, below, rtol=0, atol=1e-12 * gaussian.max())
    second = np.abs(spectrum(2 * F_NL) - gaussian).max()
    assert second == pytest.approx(4 * np.abs(above - gaussian).max(), rel=1e-9)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_every_order_of_lpt_follows(mesh, order):
    """From noise that numpy made non-Gaussian, a Gaussian universe has the same particles."""
    sims = [simulation(mesh, PLANCK.replace(f_NL=f), lpt_order=order) for f in (F_NL, 0.0)]
    ours = sims[0].lpt(white_noise=NOISE)
    known = sims[1].lpt(white_noise=noise_in_numpy(F_NL))
    np.testing.assert_array_equal(ours.white_noise.numpy(), NOISE)
    for name in ("displacement", "velocity"):
        value, expected = (getattr(state, name).numpy() for state in (ours, known))
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


@pytest.mark.ranks(1, 2, 4)
def test_gradients_on_any_mesh(mesh):
    """By f_NL, sigma8, n_s and the noise: against differences on one rank, and equal on all."""
    values = {"f_NL": 300.0, "sigma8": 0.8, "n_s": 0.96}
    weights = np.random.default_rng(7).normal(size=(GRID,) * 3)
    direction = np.random.default_rng(8).normal(size=(GRID,) * 3)

    def loss(sim, noise, parameters):
        cosmology = PLANCK.replace(**parameters)
        linear = sim.lpt(white_noise=noise, cosmology=cosmology).linear_delta.block
        return tf.reduce_sum(linear**3 * tf.constant(weights)[sim.box.place])

    def slopes(mesh):
        sim = simulation(mesh)
        noise = tf.constant(NOISE)[sim.box.place]
        tensors = {name: tf.constant(value, tf.float64) for name, value in values.items()}
        with tf.GradientTape() as tape:
            tape.watch([noise, tensors])
            part = loss(sim, noise, tensors)
        to_noise, to_parameters = tape.gradient(part, [noise, tensors])
        along = tf.reduce_sum(to_noise * tf.constant(direction)[sim.box.place])
        found = {name: float(slope) for name, slope in to_parameters.items()}
        return found | {"noise": float(sim.box.mesh.world.allreduce(along))}

    def on_one_rank():
        sim = simulation(solo())
        found = slopes(solo())
        for name, slope in found.items():
            step = {"f_NL": 1e-2, "noise": 1e-6}.get(name, 1e-6)
            up, down = (
                float(
                    loss(sim, NOISE + sign * step * direction * (name == "noise"), values | moved)
                )
                for sign in (1, -1)
                for moved in [{name: values[name] + sign * step} if name in values else {}]
            )
            assert slope == pytest.approx((up - down) / (2 * step), rel=1e-6), name
        return found

    known = by_rank_zero("f_NL-gradients", on_one_rank)
    assert slopes(mesh) == pytest.approx({k: float(v) for k, v in known.items()}, rel=1e-10)


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
def test_batches_of_different_universes(any_mesh):
    """A Gaussian universe beside another, on replicas, too."""
    sim = simulation(any_mesh)
    cosmologies = [PLANCK, PLANCK.replace(f_NL=F_NL)]
    state = sim.lpt(seed=[1, 2], cosmology=cosmologies)
    found = state.linear_delta.numpy()
    known = by_rank_zero(
        f"f_NL-batch-{any_mesh}",
        lambda: {
            f"u{n}": simulation(solo(), cosmology).lpt(seed=n + 1).linear_delta.numpy()
            for n, cosmology in enumerate(cosmologies)
        },
    )
    for n in range(2):
        np.testing.assert_allclose(found[n], known[f"u{n}"], rtol=0, atol=1e-12)


def test_particles_that_are_given_do_not_get_it(mesh):
    sim = simulation(mesh, PLANCK.replace(f_NL=20.0))
    state = sim.lpt(seed=1, a=0.1)
    arrays = state.displacement.numpy(), state.velocity.numpy()
    with pytest.raises(ValueError, match="f_NL = 20 is for initial conditions that the run makes"):
        sim.run(particles=arrays)
    gaussian = sim.run(particles=arrays, cosmology=PLANCK)
    continued = sim.run(particles=state)  # which has this f_NL already
    np.testing.assert_array_equal(gaussian.displacement.numpy(), continued.displacement.numpy())
