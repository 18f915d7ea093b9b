"""The response of a particle lattice to its force: formulas, default forces, instability."""

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from ranks import process_mesh

import flowpm_dist as fpm
from flowpm_dist.grid.box import Box
from flowpm_dist.particle_mesh.cloud_in_cell import ParticleMesh
from flowpm_dist.particle_mesh.gravity import Gravity
from flowpm_dist.particle_mesh.lattice import (
    LatticeWarning,
    lattice_gravity,
    mean_response,
    rest_growth,
    rest_response,
)
from flowpm_dist.particle_mesh.options import ForceOptions
from flowpm_dist.simulate.options import SimulationOptions

pytestmark = pytest.mark.ranks(1)

GRID = (8, 4, 4)
WAVES = [(1, 0, 0), (2, 1, 0), (3, 1, -1)]
NYQUIST = np.pi
SMALL = 1e-6
"""Displacement of a wave. Forces have terms s |s|, so that errors are of this order."""


def waves_forces(force, mode, shifts, cell=(1.0, 1.0, 1.0)):
    """Returns the force of three waves, along x, y and z, each over its displacement [3, 3].

    Args:
        force: the options of the force.
        mode: the number of waves along each side.
        shifts: displacements of the whole lattice, over which forces are averaged.
        cell: sides of a cell of the lattice [Mpc/h].
    """
    box = Box(GRID, tuple(np.multiply(GRID, cell)), process_mesh("row:1,col:1"), tf.float64)
    gravity = Gravity(ParticleMesh(box, force.mesh_factor, 2), force)
    phase = np.tensordot(2 * np.pi * np.divide(mode, GRID), np.indices(GRID), 1)[..., np.newaxis]

    def at(displacement):
        given = tf.constant(displacement)
        return gravity.force(gravity.field(gravity.paint(given)[0]), given).numpy()

    found = np.zeros((3, 3), complex)
    for axis, shift in itertools.product(range(3), shifts):
        for wave, part in ((np.cos(phase), 1), (np.sin(phase), 1j)):
            s = SMALL * wave * np.eye(3)[axis]
            odd = (at(shift + s) - at(shift - s)) / (2 * SMALL)
            found[:, axis] += part * (odd * np.exp(-1j * phase)).mean(axis=(0, 1, 2))
    return found.real / len(shifts)


@pytest.mark.parametrize("mode", WAVES)
@pytest.mark.parametrize("gradient", ["finite-difference", "spectral"])
@pytest.mark.parametrize("factor, deconvolve", [(1, False), (1, True), (2, True)])
def test_response_at_rest(gradient, factor, deconvolve, mode):
    """The forces of waves of displacements that are small against a cell, in uneven cells, too."""
    force = ForceOptions(force_gradient=gradient, mesh_factor=factor, deconvolve=deconvolve)
    cell = (1.0, 1.5, 2.0) if mode == WAVES[-1] else (1.0, 1.0, 1.0)
    expected = rest_response(2 * np.pi * np.divide(mode, GRID), force, cell)
    found = waves_forces(force, mode, [np.zeros(3)], cell)
    np.testing.assert_allclose(found, expected, atol=10 * SMALL)


@pytest.mark.parametrize(
    "factor, gradient, deconvolve",
    [
        (1, "finite-difference", True),
        (1, "spectral", True),
        (2, "finite-difference", False),
        (2, "finite-difference", True),
        (1.5, "spectral", False),
    ],
)
def test_response_at_all_positions(factor, gradient, deconvolve):
    """The mean over places in a mesh cell, where forces are pieces of polynomials of degree 2.

    Two Gaussian points are exact there. The formula's sum over harmonics is cut.
    """
    pieces = 1 if factor == int(factor) else 2  # where particles lie between mesh points
    points = (0.5 + np.array([-1, 1]) / np.sqrt(12) + np.arange(pieces)[:, None]).ravel()
    shifts = [np.array(s) for s in itertools.product(points / (pieces * factor), repeat=3)]
    force = ForceOptions(mesh_factor=factor, force_gradient=gradient, deconvolve=deconvolve)
    for mode in WAVES[2:]:
        expected = mean_response(2 * np.pi * np.divide(mode, GRID), force)
        np.testing.assert_allclose(waves_forces(force, mode, shifts), expected, atol=1e-3)


def longitudinal(response, fraction):
    """Returns k D(k) k / k^2, averaged over directions: Lebedev's rule of 26, of degree 7.

    D(-k) = D(k), as displacements are real: one direction of each pair counts twice.
    """
    total = 0.0
    for weight, parts in ((1 / 21, 1), (4 / 105, 2), (9 / 280, 3)):
        signs = [s for s in itertools.product((-1, 0, 1), repeat=3) if np.abs(s).sum() == parts]
        unit = np.array(sorted(signs)[: len(signs) // 2]) / np.sqrt(parts)
        found = response(fraction * NYQUIST * unit)
        total += 2 * weight * np.einsum("ni,nij,nj->", unit, found, unit)
    return total


@functools.cache
def exact_gravity(fraction):
    """The longitudinal response of exact gravity between the particles of a lattice."""
    return longitudinal(lattice_gravity, fraction)


def test_exact_gravity_of_a_lattice():
    """The three responses to a wave have the sum 1 (Poisson), and long waves behave as a fluid."""
    k = np.array([[1.0, 2.0, 0.5], [3.0, 3.0, 1.0]])
    np.testing.assert_allclose(np.trace(lattice_gravity(k), axis1=1, axis2=2), 1, atol=1e-5)
    assert exact_gravity(0.02) == pytest.approx(1, abs=1e-3)


RIGHT_TO = {1: 0.32, 1.25: 0.16, 1.5: 0.32, 1.75: 0.64, 2: 0.64, 3: 0.64, 4: 0.64}
"""Up to which part of the Nyquist wavenumber the default force of a mesh is right: meshes of fewer
cells do not resolve more. docs/measurements/force_mesh.md has the figures."""


@pytest.mark.parametrize("factor", RIGHT_TO)
def test_default_forces_are_right_on_a_lattice(factor):
    """Within 5 % of a fluid's or of exact gravity between the particles, or between them.

    With mesh_factor = 2 within 5 % of the fluid's.
    """
    force = ForceOptions(mesh_factor=factor)
    for fraction in (0.16, 0.32, 0.64):
        if fraction > RIGHT_TO[factor]:
            break
        found = longitudinal(lambda k: mean_response(k, force), fraction)
        least = 1.0 if factor == 2 else exact_gravity(fraction)
        assert least - 0.05 < found < 1.05, (fraction, found, least)


def test_growth_at_rest():
    """Only a force that is deconvolved, or on a finer mesh, lets short waves grow too fast."""
    assert rest_growth(ForceOptions(deconvolve=False)) == pytest.approx(1, abs=1e-12)
    assert rest_growth(ForceOptions(force_gradient="spectral")) == pytest.approx(1, abs=1e-12)
    assert rest_growth(ForceOptions()) == pytest.approx(2.15, abs=0.01)
    unstable = ForceOptions(force_gradient="spectral", deconvolve=True)
    assert rest_growth(unstable) == pytest.approx(3.24, abs=0.02)


def test_an_early_start_keeps_linear_theory(recwarn):
    """The longest waves of 16^3 particles after 33 steps from a = 1/64, by the spectral force.

    Particles at rest lie on the kinks of their clouds, which costs up to a fifth of a wave.
    Deconvolved, this force multiplies them by 5.
    """
    cosmology = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.97, sigma8=0.001)
    steps, mesh = fpm.scale_factor_steps(1 / 64, 1.0, 33), process_mesh("row:1,col:1")
    sim = fpm.Simulation(cosmology, 16, 128.0, steps, mesh=mesh, force_gradient="spectral")
    assert not [w for w in recwarn if "shortest waves" in str(w.message)]
    state = sim.run(seed=3)
    longest = [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    waves = [np.fft.fftn(f.numpy()) for f in (state.density(), state.linear_delta)]
    found, linear = (np.array([wave[n] for n in longest]) for wave in waves)
    lengths = np.linalg.norm(found), np.linalg.norm(linear)
    assert 0.75 < lengths[0] / lengths[1] < 1.05
    assert np.vdot(linear, found).real > 0.95 * lengths[0] * lengths[1]


def test_an_unstable_force_warns(recwarn):
    """Where runs were seen to be spoiled, and not where they were not; run files warn as well."""
    parameters = {"Omega_m": 0.31, "Omega_b": 0.049, "h": 0.68, "n_s": 0.97}
    mesh, spectral = process_mesh("row:1,col:1"), {"force_gradient": "spectral", "deconvolve": True}

    def is_warned(sigma8, first, grid=(32, 32, 32), **options):
        recwarn.clear()
        steps, cosmology = fpm.scale_factor_steps(first, 1.0, 5), {**parameters, "sigma8": sigma8}
        universe = fpm.Cosmology(**cosmology)
        fpm.Simulation(universe, grid, 256.0, steps, mesh=mesh, **options)
        found = [w for w in recwarn if issubclass(w.category, LatticeWarning)]
        assert all(w.filename == __file__ for w in found)
        sections = {
            "box": {"grid": list(grid), "size": 256.0},
            "cosmology": cosmology,
            "evolution": {"a_start": first, "steps": 5, **options},
            "initial": {"seed": 1},
        }
        planned = SimulationOptions.check(sections, Path("run.toml"))
        assert [text.partition(": ")[2] for text in planned.warnings] == [
            str(w.message) for w in found
        ]
        recwarn.clear()
        planned.simulation(universe, mesh=mesh)  # the job prints the plan's warnings, once
        assert not recwarn.list
        return bool(found)

    assert is_warned(0.8, 1 / 64, **spectral) and is_warned(0.001, 0.1, **spectral)
    assert is_warned(0.001, 1 / 64) and is_warned(0.001, 1 / 64, mesh_factor=2, deconvolve=True)
    assert is_warned(0.8, 0.1, grid=(64, 16, 16))  # cells of 4 x 16 x 16 Mpc/h
    assert not is_warned(0.8, 1 / 64) and not is_warned(0.8, 0.15, **spectral)
    assert not is_warned(0.001, 1 / 64, deconvolve=False)
    assert not is_warned(0.001, 1 / 64, mesh_factor=2)
