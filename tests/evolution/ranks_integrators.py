"""Integrators on the mesh: order of convergence, reversal, momentum, and a lattice at rest.

That their factors are exact where theory is, without a mesh, is in tests/evolution/test_steps.py.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from ranks import SHAPES, SIZE, process_mesh
from reference import relative_rms

import flowpm_dist as fpm
from flowpm_dist.cosmology import Growth
from flowpm_dist.evolution.integrators import COLA, BullFrog, FastPM, Schedule
from flowpm_dist.evolution.nbody import NBody
from flowpm_dist.evolution.plan import Clock, EvolutionPlan, Particles
from flowpm_dist.grid.box import Box
from flowpm_dist.particle_mesh.cloud_in_cell import ParticleMesh
from flowpm_dist.particle_mesh.gravity import Gravity
from flowpm_dist.particle_mesh.options import ForceOptions

N = 16
CELL = 2.0
HALO = 3
COUNTS = (4, 8, 16) if SIZE == 1 else (4, 8)
INTEGRATORS = {
    "fastpm": FastPM(),
    "fastpm, geometric": FastPM(half_step="geometric"),
    "bullfrog": BullFrog(),
    "cola": COLA(),
}


@functools.cache
def growth():
    return Growth(fpm.Cosmology.planck18())


@functools.cache
def solver(gradient="finite-difference", mesh_factor=1, deconvolve=False):
    """On slabs of both kinds or on pencils; one for all tests, since lowering takes a second."""
    mesh = process_mesh(SHAPES[SIZE][-1])
    box = Box((N,) * 3, (N * CELL,) * 3, mesh, tf.float64)
    force = ForceOptions(force_gradient=gradient, deconvolve=deconvolve)
    return NBody(Gravity(ParticleMesh(box, mesh_factor, HALO), force))


@functools.cache
def psi(seed=1):
    """A smooth displacement without curl, of modes up to 2, rms 0.4 cells along each axis."""
    n = np.fft.fftfreq(N, 1 / N)
    k = np.stack(np.meshgrid(n, n, n, indexing="ij"), axis=-1)
    modes = np.fft.fftn(np.random.default_rng(seed).normal(size=(N,) * 3))
    modes[(np.abs(k) > 2).any(axis=-1) | (k == 0).all(axis=-1)] = 0
    spectrum = 1j * k * (modes / np.maximum((k**2).sum(axis=-1), 1))[..., None]
    field = np.fft.ifftn(spectrum, axes=(0, 1, 2)).real
    return field * (0.4 * CELL / field.std())


def block_of(box, whole):
    begin, shape = box.offset, box.block
    return tf.constant(whole[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))])


def start(integrator, nbody, a):
    """First-order LPT at a, with the integrator's velocity."""
    x, v = integrator.initial(growth(), a, 1).numpy()[:, 0]
    first = block_of(nbody.box, psi())
    return Particles(x * first, v * first)


def carried(nbody, schedule, particles, lpt=()):
    course = EvolutionPlan(schedule.operations, schedule.factors, lpt)
    return nbody.evolve([particles], course, Clock()).particles


def run(integrator, nbody, edges):
    """COLA around first-order LPT, in which all schemes start alike."""
    begin = start(integrator, nbody, edges[0])
    first = block_of(nbody.box, psi())
    lpt = (first, tf.zeros_like(first)) if integrator.uses_lpt else ()
    return carried(nbody, integrator.schedule(growth(), edges), begin, lpt)


def whole(nbody, block):
    return nbody.box.whole(block, nbody.box.vector_shape)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("integrator", ["bullfrog", "fastpm"])
def test_error_falls_with_the_square_of_the_step(integrator):
    """Of displacement and velocity, against 4 times as many steps as the most that are judged."""
    nbody, scheme = solver(), INTEGRATORS[integrator]
    results = []
    for steps in (4 * COUNTS[-1], *COUNTS):
        state = run(scheme, nbody, fpm.logarithmic_steps(0.2, 1.0, steps))
        results.append([whole(nbody, x) for x in (state.displacement, state.velocity)])
    fine, *others = results
    for i in range(2):
        errors = [relative_rms(coarse[i], fine[i]) for coarse in others]
        order = np.log2(np.divide(errors[:-1], errors[1:]))
        assert ((order > 1.85) & (order < 2.15)).all(), errors


@pytest.mark.ranks(1)
def test_all_schemes_meet_at_many_steps():
    """Each follows the same equations of motion: COLA and BullFrog with their steps, to FastPM."""
    nbody = solver()
    fine = run(INTEGRATORS["fastpm"], nbody, fpm.logarithmic_steps(0.2, 1.0, 64))
    for name in ("cola", "bullfrog"):
        ends = [run(INTEGRATORS[name], nbody, fpm.logarithmic_steps(0.2, 1.0, n)) for n in (8, 32)]
        for quantity in ("displacement", "velocity"):
            expected = whole(nbody, getattr(fine, quantity))
            coarse, close = (
                relative_rms(whole(nbody, getattr(end, quantity)), expected) for end in ends
            )
            assert close < 2e-3
            assert close < 0.2 * coarse


@pytest.mark.ranks(1)
def test_a_last_drift_to_nowhere_is_found():
    """No paint follows it that would."""
    nbody, scheme = solver(), INTEGRATORS["bullfrog"]
    schedule = scheme.schedule(growth(), [0.2, 1.0])
    factors = schedule.factors.numpy()
    assert schedule.operations[-2].kind == "drift"
    factors[-2, 1] = np.inf
    broken = Schedule(schedule.operations, tf.constant(factors))
    message = "step 1 of 1, a = 1: the displacement has values that are not finite"
    with pytest.raises(FloatingPointError, match=message):
        carried(nbody, broken, start(scheme, nbody, 0.2))


def undone(schedule):
    """The schedule that leads back, operation by operation."""
    rows = []
    for operation, c in zip(schedule.operations, schedule.factors.numpy(), strict=True):
        decay = 1.0 if operation.kind == "drift" else c[0]
        rows.append([1.0 / decay, *(-c[1:] / decay)])
    return Schedule(schedule.operations[::-1], tf.constant(rows[::-1], tf.float64))


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_forward_and_back(integrator):
    """Each operation has an inverse: the start returns, but for rounding and its growth."""
    nbody, scheme = solver(), INTEGRATORS[integrator]
    lpt = tuple(block_of(nbody.box, x) for x in (psi(), 0.3 * psi(2))) if scheme.uses_lpt else ()
    begin = start(scheme, nbody, 0.2)
    schedule = scheme.schedule(growth(), fpm.scale_factor_steps(0.2, 1.0, 10))
    end = carried(nbody, schedule, begin, lpt)
    back = carried(nbody, undone(schedule), end, lpt)
    scale = [whole(nbody, x) for x in (begin.displacement, end.velocity)]
    for found, given, size in zip(vars(back).values(), vars(begin).values(), scale, strict=True):
        error = whole(nbody, found) - whole(nbody, given)
        assert np.sqrt((error**2).mean() / (size**2).mean()) < 1e-10
    assert relative_rms(whole(nbody, end.displacement), scale[0]) > 0.5  # it did go somewhere


FORCES = [
    ("finite-difference", 1, False),
    ("spectral", 2, False),
    ("finite-difference", 2, True),
    ("finite-difference", 3, False),
    ("spectral", 1, False),
]


@pytest.mark.parametrize(
    "gradient, mesh_factor, deconvolve", [*FORCES, ("finite-difference", 1.5, True)]
)
def test_momentum_is_conserved(gradient, mesh_factor, deconvolve):
    """Paint and read have the same weights, and the force between two cells is odd."""
    nbody = solver(gradient, mesh_factor, deconvolve)
    state = run(INTEGRATORS["fastpm"], nbody, [0.2, 0.5, 1.0])
    velocity = whole(nbody, state.velocity)
    assert np.abs(velocity.sum(axis=(0, 1, 2))).max() < 1e-13 * np.abs(velocity).sum()


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize("force", FORCES)
def test_a_lattice_at_rest_stays_at_rest(force, shift):
    """Also one between the cells: all its particles feel the same, and together nothing."""
    nbody = solver(*force)
    given = np.broadcast_to(shift * CELL * np.array([1.0, -0.5, 0.7]), (N, N, N, 3))
    x = block_of(nbody.box, given)
    schedule = INTEGRATORS["fastpm"].schedule(growth(), [0.2, 0.5, 1.0])
    end = carried(nbody, schedule, Particles(x, tf.zeros_like(x)))
    np.testing.assert_allclose(end.displacement, x, rtol=0, atol=1e-13 * CELL)
    np.testing.assert_allclose(end.velocity, 0.0, rtol=0, atol=1e-13 * CELL)
