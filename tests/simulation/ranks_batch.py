"""Batches of universes: each is what it is alone, to the bit or to rounding; and complaints."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, by_rank_zero, process_mesh
from reference import relative_rms

import flowpm_dist as fpm

PLANCK = fpm.Cosmology.planck18()
SEEDS = [3, 1, 4, 15]
COSMOLOGIES = [
    PLANCK.replace(sigma8=0.7, n_s=0.95),
    PLANCK.replace(sigma8=0.7),
    PLANCK.replace(sigma8=0.9, Omega_m=0.35),
    PLANCK.replace(sigma8=0.8, w0=-0.8, wa=0.1),
]
SPREAD, TOGETHER = {
    1: ("replica:1,row:1,col:1", "row:1"),
    2: ("replica:2,row:1,col:1", "row:1,col:2"),
    4: ("replica:2,row:2", "row:2,col:2"),
}[SIZE]
"""Meshes whose ranks share the universes out, and whose ranks have a part of each."""

EDGES = [0.1, 0.4, 1.0]
CASES = [(SPREAD, "cola"), (TOGETHER, "bullfrog")]


@functools.cache
def simulation(mesh, integrator):
    options = {"precision": "float64", "halo": 6, "integrator": integrator}
    return fpm.Simulation(PLANCK, 8, 32.0, EDGES, mesh=mesh, **options)


def batch_of(shape, integrator):
    return simulation(process_mesh(shape), integrator)


def alone(name, integrator, **inputs):
    """One universe that rank 0 computes alone."""
    names = FIELDS[2:] if "particles" in inputs else FIELDS

    def found():
        state = simulation(process_mesh(f"row:{SIZE}").without("row"), integrator).run(**inputs)
        fields = {name: getattr(state, name).numpy() for name in names}
        return fields | {"density": state.density().numpy()}

    return by_rank_zero(f"alone-{name}", found)


FIELDS = ("white_noise", "linear_delta", "displacement", "velocity")


def check(batch, i, single):
    """Universe i of a batch against one alone: rounding differs, as ranks add in another order."""
    np.testing.assert_array_equal(batch.white_noise.numpy()[i], single["white_noise"])
    for name in FIELDS[1:]:
        assert relative_rms(getattr(batch, name).numpy()[i], single[name]) < 1e-11, name
    assert relative_rms(batch.density().numpy()[i], single["density"]) < 1e-11


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("shape, integrator", CASES if SIZE < 4 else CASES[:1])
def test_a_batch_is_its_universes(shape, integrator):
    """With a seed and a cosmology of its own for each."""
    batch = batch_of(shape, integrator).run(seed=SEEDS, cosmology=COSMOLOGIES)
    assert batch.displacement.grid == (4, 8, 8, 8, 3)
    for i, (seed, cosmology) in enumerate(zip(SEEDS, COSMOLOGIES, strict=True)):
        single = alone(f"{integrator}-{i}", integrator, seed=seed, cosmology=cosmology)
        check(batch, i, single)


@pytest.mark.ranks(1, 2)
def test_what_is_given_once_goes_for_all():
    """One seed for several cosmologies; one cosmology, or the simulation's own, for all seeds."""
    batch = batch_of(SPREAD, "cola")
    single = alone("seed-9", "cola", seed=9, cosmology=COSMOLOGIES[2])
    check(batch.run(seed=9, cosmology=COSMOLOGIES), 2, single)
    check(batch.run(seed=SEEDS), 1, alone("planck-1", "cola", seed=SEEDS[1]))
    shared = batch.run(seed=SEEDS, cosmology=COSMOLOGIES[3])
    check(shared, 3, alone("cola-3", "cola", seed=SEEDS[3], cosmology=COSMOLOGIES[3]))


def test_given_noise_and_pairs():
    """As a field or as the whole array; all phases of a paired batch are turned."""
    batch = batch_of(SPREAD, "cola")
    seeded = batch.run(seed=SEEDS, cosmology=COSMOLOGIES)
    noise = seeded.white_noise
    for given in (noise, noise.numpy()):
        again = batch.run(white_noise=given, cosmology=COSMOLOGIES)
        np.testing.assert_array_equal(again.velocity.block, seeded.velocity.block)
    if SIZE == 2:  # replicas that are not split: a block looks like a whole batch
        with pytest.raises(ValueError, match="all of a batch or this rank's; give a Field"):
            batch.run(white_noise=noise.block)
    pair = batch.run(seed=SEEDS, paired=True)
    np.testing.assert_array_equal(pair.white_noise.block, -noise.block)


def test_given_blocks_and_particles():
    """Canonical velocities, which each universe turns into BullFrog's with its own growth."""
    batch = batch_of(TOGETHER, "bullfrog")
    seeded = batch.run(seed=SEEDS)
    again = batch.run(white_noise=seeded.white_noise.block)
    np.testing.assert_array_equal(again.velocity.block, seeded.velocity.block)
    rng = np.random.default_rng(1)
    particles = [0.3 * rng.normal(size=(4, 8, 8, 8, 3)) for _ in range(2)]
    end = batch.run(particles=particles, cosmology=COSMOLOGIES)
    of_one = [x[2] for x in particles]
    single = alone("particles", "bullfrog", particles=of_one, cosmology=COSMOLOGIES[2])
    for name in ("displacement", "velocity"):
        assert relative_rms(getattr(end, name).numpy()[2], single[name]) < 1e-11


def test_redshift_space_has_the_rate_of_each_universe():
    state = batch_of(SPREAD, "cola").run(seed=SEEDS, cosmology=COSMOLOGIES)
    shift = (state.redshift_space("y") - state.displacement).block
    local, first = state.box.local_batch[0], state.box.batch_offset
    for i, cosmology in enumerate(COSMOLOGIES[first : first + local]):
        rate = float(fpm.Growth(cosmology).background.e(state.a))
        expected = state.velocity.block[i, ..., 1] / (state.a**2 * rate)
        np.testing.assert_allclose(shift[i, ..., 1], expected, rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(shift[i, ..., ::2], 0.0)


def test_universes_of_a_batch_are_states():
    """With fields, cosmology, seed and gradient of their own."""
    batch = batch_of(SPREAD, "cola").run(seed=SEEDS, cosmology=COSMOLOGIES)
    universes, first = [*batch.universes()], batch.box.batch_offset
    assert len(universes) == batch.box.local_batch[0]
    white, density = batch.white_noise.block, batch.density(redshift_space="x").block
    with tf.GradientTape() as tape:
        tape.watch(batch.displacement.block)
        last = [*batch.universes()][-1].density().block
        total = tf.reduce_sum(last**2)
    gradient = tape.gradient(total, batch.displacement.block).numpy()
    assert np.abs(gradient[-1]).max() > 0 and not gradient[:-1].any()
    for i, each in enumerate(universes):
        assert each.box.batch is None and each.header()["seed"] == SEEDS[first + i]
        assert each.cosmology.numbers() == COSMOLOGIES[first + i].numbers()
        np.testing.assert_array_equal(each.white_noise.block, white[i])
        seen = each.density(redshift_space="x").block
        np.testing.assert_allclose(seen, density[i], rtol=0, atol=1e-12)
    (same,) = universes[0].universes()
    assert same is universes[0]


def test_sizes_that_do_not_agree():
    sim = batch_of(SPREAD, "cola")
    with pytest.raises(ValueError, match="Given are 2 seeds, 4 cosmologies"):
        sim.run(seed=[1, 2], cosmology=COSMOLOGIES)
    with pytest.raises(ValueError, match="Given are 4 cosmologies, 2 fields"):
        sim.run(white_noise=np.zeros((2, 8, 8, 8)), cosmology=COSMOLOGIES)
    with pytest.raises(ValueError, match="all cosmologies of a batch must give A_s, or all"):
        sim.run(seed=1, cosmology=[COSMOLOGIES[0], PLANCK.replace(A_s=2e-9)])


@pytest.mark.ranks(2)
def test_what_a_replica_axis_cannot_take():
    sim = batch_of(SPREAD, "cola")
    with pytest.raises(ValueError, match="batch=3 does not divide by the mesh axis replica:2"):
        sim.run(seed=[1, 2, 3])
    with pytest.raises(ValueError, match="axis 'replica' must have size 1"):
        sim.run(seed=1)


def test_noise_of_another_shape():
    sim = batch_of(TOGETHER, "bullfrog")
    with pytest.raises(ValueError, match=r"white_noise has shape \(4, 8, 8, 6\)"):
        sim.run(white_noise=np.zeros((4, 8, 8, 6)))
    with pytest.raises(ValueError, match="exactly one of them"):
        sim.run(seed=SEEDS, white_noise=tf.zeros((4, 8, 8, 8)))
