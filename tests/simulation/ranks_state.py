"""The state of a universe: densities by hand, redshift space, noise, interlacing; going on."""

import functools
import pickle

import numpy as np
import pytest
import tensorflow as tf
from numpy_modes import check_slope, painted
from ranks import RANK, SHAPES, SIZE, process_mesh, shared_folder
from reference import relative_rms

import flowpm_dist as fpm
from flowpm_dist.initial.conditions import noise_function
from flowpm_dist.particle_mesh import ParticleMesh, paint

PLANCK = fpm.Cosmology.planck18()
N, LENGTH = 8, 32.0
CELL = LENGTH / N


def simulation_of(steps, **options):
    options = {"mesh": process_mesh(SHAPES[SIZE][-1]), "precision": "float64"} | options
    return fpm.Simulation(PLANCK, N, LENGTH, steps, **options)


@functools.cache
def simulation(integrator="fastpm"):
    return simulation_of([0.1, 0.3, 0.5, 0.8, 1.0], integrator=integrator, halo=6)


@functools.cache
def state():
    return simulation().run(seed=6)


SITES = np.stack(np.meshgrid(*[np.arange(N)] * 3, indexing="ij"), axis=-1)


def painted_of(displacement, mesh_factor=1, shift=0.0):
    """Cloud-in-cell density by numpy, on a mesh `mesh_factor` times as fine; shift in its cells."""
    positions = (SITES + displacement / CELL) * mesh_factor + shift
    return painted(positions.reshape(-1, 3), round(mesh_factor * N))


@pytest.mark.parametrize("mesh_factor, shift", [(1, 0.0), (2, 0.5), (3, 0.0), (1.5, 0.5)])
def test_density(mesh_factor, shift):
    """numpy's cloud-in-cell, whose mean is 1; the shift is one of mesh cells."""
    density = state().density(mesh_factor, shift=shift)
    assert density.grid == (round(mesh_factor * N),) * 3
    whole = density.numpy()
    assert whole.mean() == pytest.approx(1.0, abs=1e-13)
    expected = painted_of(state().displacement.numpy(), mesh_factor, shift)
    np.testing.assert_allclose(whole, expected, atol=1e-12 * mesh_factor**3)


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("axis", ["x", "y", "z"])
def test_redshift_space(axis):
    """s = x + p / (a^2 E) along the line of sight, at a = 0.5; E of a flat universe by hand."""
    end = simulation().with_steps([0.1, 0.3, 0.5]).run(seed=6)
    displacement = end.displacement.numpy()
    omega = float(PLANCK.Omega_m)
    rate = np.sqrt(omega / 0.5**3 + 1 - omega)
    along = "xyz".index(axis)
    displacement[..., along] += end.velocity.numpy()[..., along] / (0.5**2 * rate)
    found = end.redshift_space(axis).numpy()
    np.testing.assert_allclose(found, displacement, rtol=1e-12, atol=1e-13)
    density = end.density(redshift_space=axis, shift=0.5).numpy()
    np.testing.assert_allclose(density, painted_of(displacement, shift=0.5), atol=1e-11)
    found = end.positions(redshift_space=axis).numpy()
    np.testing.assert_allclose(found, (CELL * SITES + displacement) % LENGTH, atol=1e-12)


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
def test_positions():
    """Lattice and displacement, in the box or not; painted where they are, they are the density."""
    free = CELL * SITES + state().displacement.numpy()
    assert (free < 0).any() or (free >= LENGTH).any()
    np.testing.assert_allclose(state().positions(wrap=False), free, atol=1e-12)
    wrapped = state().positions().numpy()
    np.testing.assert_allclose(wrapped, free % LENGTH, atol=1e-12)
    np.testing.assert_allclose(painted_of(wrapped - CELL * SITES), state().density(), atol=1e-11)


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
def test_peculiar_velocity_of_linear_theory():
    """v = a H f psi, with H = 100 E km/s/(Mpc/h) of a flat universe; f by differences of D1."""
    first_order = simulation_of([0.1, 1.0], lpt_order=1)
    a, omega = 0.4, float(PLANCK.Omega_m)
    rate = 100.0 * np.sqrt(omega / a**3 + 1 - omega)
    d1 = fpm.Growth(PLANCK).d1(a * np.exp([-1e-4, 1e-4])).numpy()
    growth = np.log(d1[1] / d1[0]) / 2e-4
    early = first_order.lpt(seed=6, a=a)
    velocity, psi = early.peculiar_velocity().numpy(), early.displacement.numpy()
    np.testing.assert_allclose(velocity, a * rate * growth * psi, rtol=1e-7)
    assert 50 < np.sqrt((velocity**2).sum(-1).mean()) < 1000


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
def test_gradients_of_positions_velocities_and_overdensities():
    """To the white noise, against a central difference."""
    sim = simulation_of([0.1, 1.0])
    rng = np.random.default_rng(3)
    noise, direction, *weights = (
        rng.normal(size=(N, N, N, *more))[sim.box.place] for more in ((), (), (), (3,), (3,))
    )

    def loss(noise):
        end = sim.lpt(white_noise=noise)
        weighted = 1.0 + 0.1 * end.linear_delta  # a field of weights
        delta = end.density(weights=weighted * weighted).delta()
        moving = end.peculiar_velocity() / 100.0
        made = zip((delta, end.positions(), moving), weights, strict=True)
        return sum(tf.reduce_sum(field.block * weight) for field, weight in made)

    check_slope(loss, [noise], [direction], sim.box, 1e-6, rtol=1e-6)


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("batch", [None, 2])
def test_overdensities_and_arrays_on_every_mesh(batch):
    """Each universe has its own mean; a whole array takes part block by block."""
    shape = f"replica:{min(SIZE, 2)},row:{SIZE // 2}" if batch else SHAPES[SIZE][-1]
    box = fpm.Box((N,) * 3, (LENGTH,) * 3, process_mesh(shape), tf.float64, batch)
    whole = (
        np.random.default_rng(4)
        .uniform(0, 3, (batch or 1, N, N, N))
        .reshape((*((batch,) if batch else ()), N, N, N))
    )
    counts = fpm.Field(tf.constant(whole[box.place]), box)
    mean = whole.mean(axis=(-3, -2, -1), keepdims=True)
    np.testing.assert_allclose(counts.delta(), whole / mean - 1, atol=1e-13)
    np.testing.assert_allclose(np.asarray(2.0 / (counts + whole)), 1 / whole, rtol=1e-13)
    with pytest.raises(ValueError, match="whose mean is"):
        counts.delta().delta()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="mesh_factor = 0: must be at least 1"):
        state().density(0)
    with pytest.raises(ValueError, match="mesh_factor = 1.6: .*12.8 x .* nearest .* 1.5 and"):
        state().density(1.6)
    with pytest.raises(ValueError, match="redshift_space 'r' is not one of x, y, z"):
        state().density(redshift_space="r")
    with pytest.raises(ValueError, match="the particles and their weights are not on the same box"):
        state().density(weights=state().density(2))


def test_white_noise_is_drawn_again():
    """The seed's, to the bit; a paired universe has the negative, and so the opposite modes."""
    sim = simulation()
    noise = state().white_noise
    np.testing.assert_array_equal(noise.block, noise_function(sim.box)(6))
    pair = sim.run(seed=6, paired=True)
    np.testing.assert_array_equal(pair.white_noise.block, -noise.block)
    np.testing.assert_allclose(pair.linear_delta.block, -state().linear_delta.block, atol=1e-14)
    assert not np.allclose(pair.displacement.block, -state().displacement.block)
    given = sim.run(white_noise=noise)
    np.testing.assert_array_equal(given.white_noise.block, noise.block)
    np.testing.assert_array_equal(given.displacement.block, state().displacement.block)
    with pytest.raises(ValueError, match="paired goes with a seed"):
        sim.run(white_noise=noise, paired=True)


def test_interlacing_removes_aliases():
    """Against a mesh three times as fine, whose own aliases are far beyond these wavenumbers."""
    density, shifted = state().density(), state().density(shift=0.5)
    truth = fpm.power_spectrum(state().density(3), window="cic").power[: N // 2]
    plain = fpm.power_spectrum(density, window="cic").power
    interlaced = fpm.power_spectrum(density, window="cic", interlaced=shifted).power
    errors = [np.abs(power / truth - 1)[1:].sum() for power in (plain, interlaced)]
    assert errors[1] < 0.25 * errors[0]


@pytest.mark.dealt
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("integrator", ["fastpm", "bullfrog"])
def test_a_run_goes_on_from_its_particles(integrator):
    """To a = 0.5 and on from there, as in one run: a kick or drift in two parts is the whole."""
    sim = simulation(integrator)
    whole = sim.run(seed=6)
    first = sim.with_steps(sim.edges[:3]).run(seed=6)
    assert first.a == 0.5
    second = sim.with_steps(sim.edges[2:]).run(particles=(first.displacement, first.velocity))
    for name in ("displacement", "velocity"):
        found, expected = (getattr(s, name).numpy() for s in (second, whole))
        assert relative_rms(found, expected) < 1e-12


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("mesh_factor, halo", [(1.5, 1), (1.25, 3)])
@pytest.mark.parametrize("side", [-1, 1])
def test_no_mass_is_lost_at_the_edge_of_the_halo(mesh_factor, halo, side):
    """All particles moved as far as the halo allows, where it is no whole number of mesh cells."""
    pm = ParticleMesh(simulation().box, mesh_factor, halo)
    painting = pm.box.function(lambda _, s: paint(s, pm), displacement=pm.box.vector_shape)
    moved = tf.ones([*pm.box.block, 3], tf.float64) * (side * 0.999 * halo * CELL)
    painted, reach = painting(moved)
    assert float(pm.box.mesh.world.allreduce(tf.reduce_sum(painted))) == pytest.approx(N**3, 1e-13)
    np.testing.assert_allclose(reach, 0.999 * halo, rtol=1e-13)
    assert pm.mean == pytest.approx(N**3 / pm.mesh.cells, 1e-15)


@pytest.mark.ranks(2)
def test_one_particle_beyond_the_halo_stops_all_ranks():
    """In particle spacings, however fine the mesh; the rank that has it is not the only one."""
    slabs = process_mesh(SHAPES[SIZE][0])
    sim = simulation_of([0.5, 1.0], mesh=slabs, mesh_factor=2, halo=2)
    displacement = np.zeros((N, N, N, 3))
    displacement[0, 0, 0, 0] = -2.25 * CELL  # of rank 0, along the axis that is split
    block = displacement[RANK * N // SIZE :][: N // SIZE]
    assert block.any() == (RANK == 0)
    at_rest = np.zeros_like(displacement)
    message = r"a particle is 2\.25 cells from its lattice site, beyond the halo of 2; halo = 3 "
    with pytest.raises(fpm.HaloError, match=message):
        sim.run(particles=(displacement, at_rest))
    displacement[0, 0, 0, 0] = 0.0
    displacement[0, 0, 0, 2] = -2.25 * CELL  # along z, which has no halo, it may
    assert sim.run(particles=(displacement, at_rest)).a == 1.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of the snapshot of `state()`."""
    folder = shared_folder(tmp_path_factory)
    state().save(folder)
    return folder


@pytest.fixture(params=["pickled", "from a snapshot", "on another mesh", "a pickled snapshot"])
def copy(request, saved):
    if request.param == "pickled":
        return pickle.loads(pickle.dumps(state()))
    mesh = SHAPES[SIZE][-1] if request.param == "from a snapshot" else f"row:1,col:{SIZE}"
    read = fpm.State.from_snapshot(saved, mesh=process_mesh(mesh))
    return pickle.loads(pickle.dumps(read)) if request.param == "a pickled snapshot" else read


@pytest.mark.dealt
@pytest.mark.ranks(1, 2)
def test_a_copy_measures_as_the_state_that_a_run_left(copy):
    fresh = state()
    assert copy.a == fresh.a and copy.box.size == fresh.box.size
    assert copy.header() == fresh.header() and copy.halo == fresh.halo
    assert copy.cosmology.numbers() == fresh.cosmology.numbers()
    for name in ("white_noise", "linear_delta", "displacement", "velocity"):
        expected, found = getattr(fresh, name).numpy(), getattr(copy, name).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12, err_msg=name)
    for options in ({}, {"mesh_factor": 2}, {"redshift_space": "z"}):
        found, expected = copy.density(**options), fresh.density(**options)
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-11)
    power = [fpm.power_spectrum(s.density(), LENGTH).power for s in (copy, fresh)]
    np.testing.assert_allclose(*power, rtol=1e-11)
    np.testing.assert_allclose(copy.linear_growth, fresh.linear_growth, rtol=1e-14)


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
def test_a_run_starts_from_a_snapshot(tmp_path_factory):
    first = simulation().with_steps(simulation().edges[:3]).run(seed=6)
    folder = shared_folder(tmp_path_factory)
    first.save(folder)
    rest = simulation().with_steps(simulation().edges[2:])
    read = fpm.State.from_snapshot(folder, mesh=simulation().box.mesh)
    end = rest.run(particles=read)
    expected = rest.run(particles=first).displacement.numpy()
    np.testing.assert_array_equal(end.displacement.numpy(), expected)
    np.testing.assert_allclose(expected, state().displacement.numpy(), atol=1e-12)


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
def test_fields_of_another_mesh_go_to_the_ranks_that_hold_their_cells():
    """On four ranks blocks of the two meshes have the same shape, but other cells."""
    sim, other = simulation(), {2: "row:1,col:2", 4: "col:2,row:2"}[SIZE]
    elsewhere = fpm.Box((N,) * 3, sim.box.size, process_mesh(other), sim.box.dtype)
    assert elsewhere.place != sim.box.place or RANK in (0, SIZE - 1)
    moved = state().white_noise.on(elsewhere)
    np.testing.assert_array_equal(moved.block, state().white_noise.numpy()[elsewhere.place])
    there = tuple(f.on(elsewhere) for f in (state().displacement, state().velocity))
    on = sim.with_steps([1.0, 1.1])
    found, expected = on.run(particles=there), on.run(particles=state())
    np.testing.assert_array_equal(found.displacement.block, expected.displacement.block)
    again = sim.with_steps([0.1, 0.3]).run(white_noise=moved)
    np.testing.assert_array_equal(again.white_noise.block, state().white_noise.block)
    with tf.GradientTape() as tape:
        tape.watch(moved.block)
        loss = tf.reduce_sum(moved.on(sim.box).block * state().linear_delta.block)
    slope = tape.gradient(loss, moved.block)
    np.testing.assert_array_equal(slope, state().linear_delta.numpy()[elsewhere.place])


@pytest.mark.dealt
@pytest.mark.ranks(1, 2)
def test_fields_in_another_precision_are_rounded_as_arrays_are():
    """What a file holds in double precision starts a run in single precision."""
    particles = tuple(field.numpy() for field in (state().displacement, state().velocity))
    single = simulation_of([1.0, 1.1], precision="float32", halo=6)
    found, expected = single.run(particles=state()), single.run(particles=particles)
    assert found.displacement.dtype == tf.float32
    np.testing.assert_array_equal(found.displacement.block, expected.displacement.block)
    early, noise = single.with_steps([0.1, 0.3]), state().white_noise
    found, expected = early.run(white_noise=noise), early.run(white_noise=noise.numpy())
    np.testing.assert_array_equal(found.displacement.block, expected.displacement.block)
    with tf.GradientTape() as tape:
        tape.watch(noise.block)
        loss = tf.reduce_sum(noise.on(single.box).block)
    slope = tape.gradient(loss, noise.block)
    assert slope.dtype == tf.float64
    np.testing.assert_array_equal(slope, tf.ones_like(noise.block))


@pytest.mark.dealt(2)
@pytest.mark.ranks(1, 2, 4)
def test_particles_that_do_not_fit_are_refused(saved):
    with pytest.raises(ValueError, match="are at a = 1, the first step begins at 0.1"):
        simulation().run(particles=state())
    other = fpm.Simulation(PLANCK, N, 2 * LENGTH, [1.0, 1.1], mesh=state().box.mesh)
    with pytest.raises(ValueError, match="in a box of .*32.0.* Mpc/h, the simulation is of grid"):
        other.run(particles=state())
    early = simulation().lpt(seed=6, a=0.1, cosmology=PLANCK.replace(Omega_m=0.3))
    with pytest.raises(ValueError, match="the particles are of .*0.3.*the simulation is of"):
        simulation().run(particles=early)
    with pytest.raises(FileExistsError, match="give another folder"):
        state().save(saved)
    given = simulation().run(particles=simulation().lpt(seed=6, a=0.1))
    again = pickle.loads(pickle.dumps(given))
    with pytest.raises(ValueError, match="the white noise is not known"):
        again.white_noise  # noqa: B018
