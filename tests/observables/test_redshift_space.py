"""Redshift space: linear theory's answer for a plane wave, and gradients by hand."""

import numpy as np
import pytest
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.observables import ForwardModel, StructureFormation, local_values
from flowpm_dist.observables.bias import Bias
from flowpm_dist.particle_mesh.positions import redshift_space


@pytest.mark.parametrize("axis", ["x", "y", "z"])
def test_redshift_space_of_a_plane_wave(axis):
    """Linear growth, dx/dt = f H psi: along the line of sight the wave is 1 + f times as high."""
    a, E, f = 0.6, 1.4, 0.8
    wave = np.sin(2 * np.pi * np.arange(8) / 8)
    displacement = np.broadcast_to(wave[:, None, None, None], (8, 4, 4, 3)).copy()
    velocity = a**2 * E * f * displacement
    seen = redshift_space(tf.constant(displacement), tf.constant(velocity), a, E, axis).numpy()
    along = "xyz".index(axis)
    for component in range(3):
        factor = 1 + f if component == along else 1
        np.testing.assert_allclose(seen[..., component], factor * displacement[..., component])


def test_redshift_space_of_a_batch_and_its_gradient():
    rng = np.random.default_rng(1)
    displacement, velocity = (tf.constant(rng.normal(size=(2, 4, 4, 4, 3))) for _ in range(2))
    scale, expansion = tf.constant([0.5, 1.0], tf.float64), tf.constant([1.8, 1.0], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch([velocity, expansion])
        seen = redshift_space(displacement, velocity, scale, expansion)
        loss = tf.reduce_sum(seen)
    shift = velocity[..., 2].numpy() / np.array([0.25 * 1.8, 1.0])[:, None, None, None]
    np.testing.assert_allclose(seen[..., 2] - displacement[..., 2], shift, rtol=1e-13)
    to_velocity, to_expansion = tape.gradient(loss, [velocity, expansion])
    np.testing.assert_allclose(to_velocity[0, 0, 0, 0], [0, 0, 1 / (0.25 * 1.8)])
    np.testing.assert_allclose(to_expansion, -shift.sum(axis=(1, 2, 3)) / [1.8, 1.0], rtol=1e-12)


def test_unknown_axis():
    with pytest.raises(ValueError, match="axis 'w'"):
        redshift_space(tf.zeros([4, 4, 4, 3]), tf.zeros([4, 4, 4, 3]), 1.0, 1.0, "w")


def test_tracers_share_the_velocities_of_matter():
    """Modes of tracers with bias b are b + f mu^2 times the modes of matter: beta = f / b."""
    sim = fpm.Simulation(
        fpm.Cosmology.planck18(), 32, 640.0, [0.1, 1.0], lpt_order=1, precision="float64"
    )
    model = ForwardModel(sim, "1lpt", redshift_space="z", bias={"b1": 1.0})
    state = sim.lpt(seed=5)
    real, seen = (
        np.fft.fftn(x) for x in (model.formation.density(state), model.observe(state, {}))
    )
    n = np.stack(np.meshgrid(*[np.fft.fftfreq(32, 1 / 32)] * 3, indexing="ij"))
    n2 = (n**2).sum(axis=0)
    large = (n2 > 0) & (n2 <= 9)
    weight = np.abs(real[large])
    powers = np.stack([np.ones(large.sum()), n[2, large] ** 2 / n2[large]], axis=1)
    ratio = (seen[large] * real[large].conj()).real / weight
    (b, f), *_ = np.linalg.lstsq(powers * weight[:, None], ratio)
    assert b == pytest.approx(2, rel=0.05)
    assert f == pytest.approx(float(sim.theory.growth.f1(1.0)), rel=0.1)
    with pytest.raises(ValueError, match="distortions by velocities.*b1 = b - 1 = 1 "):
        ForwardModel(sim, "1lpt", redshift_space="z", bias={"b": 2.0})


class Squared(Bias):
    parameters = ("q",)

    def contrast(self, contrast, values, box):
        return local_values(values["q"], box) * contrast**2

    def linear_response(self, factor):
        return factor


def test_structure_and_bias_that_no_module_has():
    """Those of a script or a notebook: Python callers give the objects."""
    sim = fpm.Simulation(fpm.Cosmology.planck18(), 8, 32.0, [0.1, 1.0], lpt_order=1)
    state, own = sim.lpt(seed=5), StructureFormation(lpt_order=1)
    contrast = ForwardModel(sim, "1lpt").observe(state, {}) - 1
    for scheme in (Squared, Squared()):
        model = ForwardModel(sim, own, bias={"q": 0.5}, bias_scheme=scheme)
        np.testing.assert_allclose(model.observe(state, {}), 1 + 0.5 * contrast**2, rtol=1e-6)
    for scheme, message in ((3, "bias_scheme = 3: .*module:object"), ("__main__:S", "a notebook")):
        with pytest.raises(ValueError, match=message):
            ForwardModel(sim, "1lpt", bias={"q": 0.5}, bias_scheme=scheme)
    with pytest.raises(ValueError, match="structure = 3: no structure 3.*must be"):
        ForwardModel(sim, 3)


def test_kaiser_limit_of_a_simulated_density():
    """On large scales the modes are 1 + f mu^2 times as high (Kaiser 1987)."""
    cosmology, grid, a = fpm.Cosmology.planck18(), 32, 0.5
    sim = fpm.Simulation(cosmology, grid, 30.0 * grid, [0.1, 0.3, a], precision="float64")
    state = sim.run(seed=5)
    real, seen = (
        np.fft.fftn(state.density(shift=0.5, redshift_space=axis).numpy()) for axis in (None, "z")
    )
    n = np.stack(np.meshgrid(*[np.fft.fftfreq(grid, 1 / grid)] * 3, indexing="ij"))
    n2 = (n**2).sum(axis=0)
    large = (n2 > 0) & (n2 <= 9)
    mu2 = n[2, large] ** 2 / n2[large]
    change = ((seen - real) * real.conj()).real[large]
    f = (mu2 * change).sum() / (mu2**2 * np.abs(real[large]) ** 2).sum()
    # Of second order: k times the displacements, squared, is 0.01 on these scales.
    assert f == pytest.approx(float(sim.theory.growth.f1(a)), rel=0.03)
