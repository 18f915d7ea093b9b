"""Corrections of the force: zeros change nothing; their gradients, on any mesh."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from conftest import SIZE, by_rank_zero, shared_folder, solo

import flowpm_dist as fpm
from flowpm_dist.emulate.job import EmulationFolder
from flowpm_dist.emulate.options import EmulationOptions
from flowpm_dist.emulate.session import EmulationSession
from flowpm_dist.evolution.adjoints import DirectAdjoint
from flowpm_dist.evolution.corrections import PotentialFilter, load_correction
from flowpm_dist.jobs.progress import Progress

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.timeout(240, method="thread")]

GRID, STEPS = 8, [0.1, 0.5, 1.0]
BEGUN = PotentialFilter.begun(1)
THETA = BEGUN.theta + 0.02 * np.random.default_rng(1).normal(size=BEGUN.theta.size)
NOISE, WEIGHTS, DIRECTION = np.random.default_rng(2).normal(size=(3, GRID, GRID, GRID))
ALONG = np.random.default_rng(3).normal(size=THETA.size)


def simulation(mesh, correction=None, **options):
    options = {"integrator": "bullfrog", "precision": "float64", "halo": 4} | options
    cosmology = fpm.Cosmology.planck18()
    return fpm.Simulation(cosmology, GRID, 24.0, STEPS, mesh=mesh, correction=correction, **options)


def block_of(box, whole):
    return tf.constant(whole[box.place])


@pytest.mark.parametrize("precision", ["float32", "float64"] if SIZE == 1 else ["float32"])
def test_zeros_change_no_bit(mesh, precision):
    plain, begun, other = (
        simulation(mesh, c, precision=precision).run(seed=1).displacement.block.numpy()
        for c in (None, BEGUN, BEGUN.with_theta(THETA))
    )
    np.testing.assert_array_equal(begun, plain)
    assert np.abs(other - plain).max() > 1e-3


def loss_of(mesh, noise, theta, omega, **options):
    sim = simulation(mesh, PotentialFilter(theta), **options)
    cosmology = fpm.Cosmology(Omega_b=0.05, h=0.7, n_s=0.96, sigma8=0.8, Omega_m=omega)
    state = sim.run(white_noise=noise, cosmology=cosmology)
    weights = block_of(sim.box, WEIGHTS)[..., tf.newaxis]
    return tf.reduce_sum((state.displacement.block + 0.1 * state.velocity.block) * weights)


def slopes(mesh, **options):
    """The loss and its slopes: by theta and Omega_m, and the block of the one by the noise."""
    noise, theta = block_of(simulation(mesh).box, NOISE), tf.constant(THETA)
    omega = tf.constant(0.3, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch([noise, theta, omega])
        part = loss_of(mesh, noise, theta, omega, **options)
    found = tape.gradient(part, [noise, theta, omega])
    return {
        "loss": mesh.world.allreduce(part).numpy(),
        "noise": found[0],
        "theta": found[1].numpy(),
        "Omega_m": found[2].numpy(),
    }


CASES = {
    "bullfrog": {},
    "cola, spectral": {"integrator": "cola", "force_gradient": "spectral", "deconvolve": True},
}
HERE = list(CASES) if SIZE == 1 else ["bullfrog"]


@pytest.mark.parametrize("case", HERE)
def test_gradients(mesh, case):
    """Of the noise, of the learned numbers and of the cosmology; those of one rank on any mesh."""
    found = slopes(mesh, **CASES[case])
    box = simulation(mesh).box
    alone = by_rank_zero(f"corrected-{case}", lambda: slopes(solo(), **CASES[case]))
    np.testing.assert_allclose(found["loss"], alone["loss"], rtol=1e-11)
    np.testing.assert_allclose(found["theta"], alone["theta"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found["Omega_m"], alone["Omega_m"], rtol=1e-9)
    np.testing.assert_allclose(found["noise"], np.asarray(alone["noise"])[box.place], atol=1e-9)
    if mesh.size == 1:
        plain = slopes(mesh, **CASES[case], adjoint=DirectAdjoint())
        for name, value in found.items():
            np.testing.assert_allclose(value, plain[name], rtol=1e-8, atol=1e-9, err_msg=name)
    along = {
        "noise": float(mesh.world.allreduce(tf.reduce_sum(found["noise"] * NOISE[box.place]))),
        "theta": float(found["theta"] @ ALONG),
        "Omega_m": float(found["Omega_m"]),
    }
    changes = {"noise": (1e-8, NOISE[box.place]), "theta": (1e-7, ALONG), "Omega_m": (1e-7, 1.0)}
    for name, (step, direction) in changes.items():
        point = {"noise": NOISE[box.place], "theta": THETA, "omega": np.float64(0.3)}
        key = "omega" if name == "Omega_m" else name
        values = []
        for sign in (1, -1):
            moved = {**point, key: point[key] + sign * step * direction}
            inputs = {key: tf.constant(value) for key, value in moved.items()}
            part = loss_of(mesh, **inputs, **CASES[case])
            values.append(float(mesh.world.allreduce(part)))
        difference = (values[0] - values[1]) / (2 * step)
        rounding = 1e-13 * abs(values[0]) / step
        assert along[name] == pytest.approx(difference, rel=1e-6, abs=10 * rounding), name


def test_each_universe_of_a_batch_has_its_coefficients(mesh):
    """Two cosmologies at once are the two alone."""
    sim = simulation(mesh, BEGUN.with_theta(THETA))
    base = fpm.Cosmology.planck18()
    several = [base.replace(sigma8=s) for s in (0.7, 0.9)]
    both = sim.run(seed=[1, 2], cosmology=several).displacement.block.numpy()
    for n, cosmology in enumerate(several):
        one = sim.run(seed=n + 1, cosmology=cosmology).displacement.block.numpy()
        np.testing.assert_allclose(both[n], one, atol=1e-10)


EMULATION = {
    "box": {"grid": GRID, "size": 16.0},
    "cosmology": {"Omega_b": 0.049, "h": 0.677, "n_s": 0.965, "sigma8": 0.81},
    "priors": {"Omega_m": [0.25, 0.35]},
    "evolution": {"integrator": "bullfrog", "steps": 2},
    "run": {"precision": "float64"},
    "truth": {"universes": 1, "mesh_factor": 2, "steps": 2},
    "emulate": {"iterations": 2, "validation": 1},
}


def learned(mesh, folder):
    """What an emulation learns in a folder."""
    options = EmulationOptions.check(EMULATION, Path("run.toml"))
    owner = EmulationFolder(folder)
    if mesh.rank == 0:
        owner.begin()
    mesh.barrier()
    EmulationSession(options, mesh, owner, Progress(mesh.rank)).run(resume=False)
    owner.release()
    return {"theta": load_correction(owner.correction).theta}


def test_an_emulation_learns_the_same_on_any_mesh(mesh, tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    found = learned(mesh, folder / "here")["theta"]
    assert np.abs(found - BEGUN.begun(0).theta).max() > 1e-3
    alone = by_rank_zero("emulation", lambda: learned(solo(), folder / "alone"))["theta"]
    np.testing.assert_allclose(found, alone, atol=1e-6)
