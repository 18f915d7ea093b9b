"""The pyramid force against the force of the whole mesh, its adjoint, and its messages."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, by_rank_zero, solo
from reference import relative_rms

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.decomposition import StepTraffic
from flowpm_dist.grid.field import Field
from flowpm_dist.particle_mesh.cloud_in_cell import ParticleMesh
from flowpm_dist.particle_mesh.gravity import Gravity
from flowpm_dist.particle_mesh.options import ForceOptions
from flowpm_dist.particle_mesh.response import NeutrinoResponse
from meshimpl import ProcessMesh
from meshimpl.traffic import added, so_far

pytestmark = pytest.mark.ranks(1, 2, 4)

GRID, CELL = (32, 16, 16), 2.0
HALOS = {"1%": 8, "0.1%": 2}
"""As wide as in a run, and so narrow that the reach of the short-range force decides."""
CHOICES = {1: ["1%"], 2: ["0.1%", "1%"], 4: ["0.1%"]}.get(SIZE, [])
COSTLY = [pytest.param(choice, marks=[pytest.mark.long] if SIZE == 4 else []) for choice in CHOICES]
TAILS = {"1%": 2e-2, "0.1%": 1e-3}
"""The short-range force from beyond the density of a block, at most [rms of the force]."""


@functools.cache
def gravity(mesh: ProcessMesh, choice: str) -> Gravity:
    """The gravity of the particles of a small box, float64."""
    box = Box(GRID, tuple(CELL * n for n in GRID), mesh, tf.float64)
    pm = ParticleMesh(box, 1, HALOS[choice])
    return Gravity(pm, ForceOptions(pyramid=choice, deconvolve=False))


def wavenumbers() -> list[np.ndarray]:
    """kx, ky and kz of the modes of `numpy.fft.fftn` [h/Mpc]."""
    return np.meshgrid(*(2 * np.pi * np.fft.fftfreq(n, CELL) for n in GRID), indexing="ij")


def spectrum() -> np.ndarray:
    """The modes of a density with P proportional to k^-2, as that of matter near k = 1 h/Mpc."""
    k = np.sqrt(sum(k**2 for k in wavenumbers()))
    noise = np.fft.fftn(np.random.default_rng(1).normal(size=GRID))
    return noise * np.divide(1, k, out=np.zeros(GRID), where=k > 0)


@pytest.mark.parametrize("choice", CHOICES)
def test_force(mesh: ProcessMesh, choice: str) -> None:
    """That of the whole mesh, by numpy, within twice the error of its name, and of one rank.

    The error is relative to the force of matter, of which this box lacks the large scales.
    Particles that strayed by whole cells, as far as the halo allows, feel the force of a cell.
    """
    modes, ks = spectrum(), wavenumbers()
    k2 = sum(k**2 for k in ks)
    potential = -np.divide(modes, k2, out=np.zeros_like(modes), where=k2 > 0)
    along = ((8 * np.sin(k * CELL) - np.sin(2 * k * CELL)) / (6 * CELL) for k in ks)
    at_cells = np.stack([np.fft.ifftn(-1j * k * potential).real for k in along], axis=-1)
    halo = HALOS[choice]
    strayed = np.random.default_rng(2).integers(1 - halo, halo, (*GRID, 3))
    cells = (np.moveaxis(np.indices(GRID), 0, -1) + strayed) % GRID
    expected = at_cells[cells[..., 0], cells[..., 1], cells[..., 2]]

    def force_on(ranks: ProcessMesh) -> np.ndarray:
        solver = gravity(ranks, choice)
        field = solver.field(tf.constant(np.fft.ifftn(modes).real[solver.pm.box.place]))
        moved = tf.constant(CELL * strayed[solver.pm.box.place])
        return Field(solver.force(field, moved), solver.pm.box).numpy()

    found = force_on(mesh)
    assert relative_rms(found, expected) < 2 * float(choice.strip("%")) / 100
    if mesh.size == 2:
        alone = by_rank_zero(f"pyramid {choice}", lambda: {"force": force_on(solo())})["force"]
        assert relative_rms(found, alone) < TAILS[choice]


NEUTRINOS = [0.05, 0.1]
"""A fraction of matter, and a free-streaming wavenumber over the Nyquist wavenumber."""


@pytest.mark.dealt
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("choice", ["0.1%"])
def test_massive_neutrinos_add_to_the_potential(mesh: ProcessMesh, choice: str) -> None:
    """As on the whole mesh; with the adjoint, and derivatives by the coefficients."""
    plain = gravity(mesh, choice)
    solver = dataclasses.replace(plain, response=NeutrinoResponse())
    box, modes, ks = solver.pm.box, spectrum(), wavenumbers()
    k2 = sum(k**2 for k in ks)
    wavenumber = np.sqrt(k2) * CELL / np.pi
    fraction, scale = NEUTRINOS
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = (1 - fraction) / (1 - fraction * (scale / (scale + wavenumber)) ** 2)
        potential = np.where(k2 > 0, -modes * (factor - 1) / k2, 0.0)
    along = ((8 * np.sin(k * CELL) - np.sin(2 * k * CELL)) / (6 * CELL) for k in ks)
    expected = np.stack([np.fft.ifftn(-1j * k * potential).real for k in along], axis=-1)
    density = tf.constant(np.fft.ifftn(modes).real[box.place])
    c = tf.constant(NEUTRINOS, tf.float64)
    still = tf.zeros([*box.block, 3], tf.float64)
    massive, light = solver.field(density, c), plain.field(density)
    added = Field(solver.force(massive, still) - plain.force(light, still), box).numpy()
    # Of 5 % of the force, without the modes that the coarse mesh does not hold.
    assert relative_rms(added, expected) < 0.03

    v = tf.constant(np.random.default_rng([3, mesh.rank]).normal(size=massive.shape))
    back, slopes = solver.field_adjoint(v, c, density)
    with tf.GradientTape() as tape:
        tape.watch([density, c])
        product = tf.reduce_sum(solver.field(density, c) * v)
    to_density, to_c = tape.gradient(product, [density, c])
    np.testing.assert_allclose(to_density, back, atol=1e-12 * np.abs(back).max())
    np.testing.assert_allclose(mesh.size * to_c, mesh.world.allreduce(slopes), rtol=1e-10)
    step = tf.constant([1e-6, -2e-6], tf.float64)
    change = (solver.field(density, c + step) - solver.field(density, c - step)) / 2
    parts = [massive * v, back * density, change * v, slopes * step]
    left, right, change, along_c = mesh.world.allreduce(
        tf.stack([*map(tf.reduce_sum, parts)])
    ).numpy()
    assert left == pytest.approx(right, rel=1e-10)
    assert change == pytest.approx(along_c, rel=1e-7)


@pytest.mark.parametrize("choice", COSTLY)
def test_adjoint(mesh: ProcessMesh, choice: str) -> None:
    """<v, F u> = <F^T v, u> for any fields, and the messages are as the formulas have them.

    A tape gives the adjoint, too, on one rank.
    """
    solver = gravity(mesh, choice)
    random = np.random.default_rng([3, mesh.rank])
    u = tf.constant(random.normal(size=solver.pm.box.block))
    found = solver.field(u)
    v = tf.constant(random.normal(size=found.shape))
    adjoint = solver.field_adjoint(v)
    products = [found * v, adjoint * u, abs(found * v)]
    left, right, scale = mesh.world.allreduce(tf.stack([*map(tf.reduce_sum, products)])).numpy()
    assert abs(left - right) < 1e-12 * scale
    if mesh.size == 1:
        with tf.GradientTape() as tape:
            tape.watch(u)
            found = solver.field(u)
        size = np.abs(adjoint).max()
        np.testing.assert_allclose(tape.gradient(found, u, v), adjoint, rtol=0, atol=1e-12 * size)

    axes = mesh.axis_size("row"), mesh.axis_size("col")
    halo = HALOS[choice]
    step = StepTraffic(GRID, *axes, halo, itemsize=8, pyramid=choice)
    expected = added(step.tally, step.halos(halo, 1), -1)
    expected.pop("allreduce", None)
    for function, argument in ((solver.field, u), (solver.field_adjoint, v)):
        before = so_far()
        function(argument)
        assert added(so_far(), before, -1) == expected
