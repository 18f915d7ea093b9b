"""Light cones: mass, mean, crossing times, gradients; the same maps on any mesh."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, by_rank_zero, shared_folder
from scipy.ndimage import map_coordinates
from sky_runs import (
    GRID,
    SIDE,
    SkyRuns,
    cosmology_of,
    linear_response,
    matter,
    solo,
    weights_of,
)

from flowpm_dist.cosmology import Growth, Theory
from flowpm_dist.cosmology.background import HUBBLE_DISTANCE, Distances
from flowpm_dist.cosmology.line_of_sight import lensing_weight
from flowpm_dist.evolution.adjoints import DirectAdjoint
from flowpm_dist.evolution.corrections import ResidualNetwork
from flowpm_dist.evolution.integrators import FastPM
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.flat_sky import FlatSky
from flowpm_dist.io.files import WriteError
from flowpm_dist.io.light_cone import read_light_cone
from flowpm_dist.io.particles import HUBBLE
from flowpm_dist.observables.lensing import (
    IntrinsicAlignment,
    SourcePlane,
    born,
)
from flowpm_dist.observables.light_cone import FlatField, FullSky, LightCone, geometry, observers
from flowpm_dist.observables.light_cone.geometry import farthest
from flowpm_dist.observables.light_cone.layers import Layers, tiles
from flowpm_dist.simulation import outputs
from flowpm_dist.statistics import angular_power, compare
from meshimpl.compat import mtf
from meshimpl.mesh_function import mesh_function

pytestmark = pytest.mark.ranks(1)

CONE = LightCone(FlatField(field_of_view=12.0, pixels=8, z_max=0.25, tiles=3))
EDGES = (0.2, 0.5, 0.75, 0.9, 1.0)
NETWORK = ResidualNetwork.begun(1)
CHANGE = 0.03 * np.random.default_rng(4).normal(size=NETWORK.theta.size)
MOVING = NETWORK.with_theta(NETWORK.theta + CHANGE)
RUNS = SkyRuns(CONE, EDGES, plane=0.2, smail=(0.1, 0.23), shift=0.01)
simulation, sources_of, kappa_of = RUNS.simulation, RUNS.sources, RUNS.kappa


@pytest.mark.parametrize(
    "integrator",
    [
        "fastpm",
        "bullfrog",
        pytest.param("cola", marks=pytest.mark.ranks(1, 4)),
    ],
)
def test_maps_and_gradients(mesh, integrator):
    """By the adjoint as by plain differentiation and by differences; the same on any mesh."""
    runs = replace(RUNS, curvature={"fastpm": 0.0, "bullfrog": -0.3, "cola": 0.3}[integrator])
    kappa, to_noise, to_numbers = runs.check_gradients(mesh, integrator, lambda name: True)
    if SIZE == 1:
        sim = simulation(mesh, integrator, adjoint=DirectAdjoint())
        direct = runs.with_gradients(sim, sim.lpt(seed=3).white_noise.block)
        np.testing.assert_allclose(direct[0], kappa, atol=1e-15)
        np.testing.assert_allclose(direct[1], to_noise, atol=1e-9 * np.abs(to_noise).max())
        assert direct[2] == pytest.approx(to_numbers, rel=1e-9)


@pytest.mark.ranks(1, 2)
def test_gradients_of_maps_with_massive_neutrinos(mesh):
    runs = replace(RUNS, mass=0.6)
    runs.check_gradients(mesh, "fastpm", lambda name: name in ("m_nu", "along"))


def test_maps_are_of_all_matter(mesh, monkeypatch):
    """Planes by their factor in numpy; maps as the sum of thin planes, which have no parts."""
    massive = cosmology_of(0.31, 0.8, m_nu=0.6, radiation=True)
    sim, theory, sources = simulation(mesh, grid=16), Theory(massive), [SourcePlane(0.2)]

    def measured():
        run = dict(seed=5, cosmology=massive)
        planes = CONE.planes(sim, SIDE / 16, **run)
        return planes, CONE.convergence(sim, sources, **run).kappa.numpy()

    planes, kappa = measured()
    monkeypatch.setattr(observers, "all_matter", lambda maps, *_: tf.reduce_sum(maps, -3))
    of_cb, kappa_of_cb = measured()
    chi = planes.planes.chi.numpy()[:, np.newaxis, np.newaxis]
    x, y = FlatSky((8, 8), (CONE.sky.fov, CONE.sky.fov)).wavenumbers()
    factors = theory.background.neutrinos.matter(
        np.sqrt(x**2 + y**2) / chi, theory.distances.scale_factor(chi).numpy()
    )
    expected = np.fft.irfft2(factors * np.fft.rfft2(of_cb.delta), (8, 8))
    np.testing.assert_allclose(planes.delta, expected, atol=1e-12 * np.abs(expected).max())
    thin, thin_of_cb = (
        born(each.delta, each.planes, sources, massive).numpy() for each in (planes, of_cb)
    )
    added = kappa - kappa_of_cb
    assert np.std(added) > 0.01 * np.std(kappa)
    assert np.std(added - (thin - thin_of_cb)) < 0.05 * np.std(added)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("seed", [pytest.param(1, marks=[pytest.mark.long] if SIZE == 2 else [])])
def test_maps_of_corrected_particles_and_their_gradients(mesh, seed):
    """A network that moves states moves what is observed; its numbers have gradients, too."""
    network = ResidualNetwork.begun(seed)
    begun = simulation(mesh, "bullfrog", correction=network)
    noise = begun.lpt(seed=3).white_noise.block
    plain = kappa_of(simulation(mesh, "bullfrog"), noise).numpy()
    np.testing.assert_allclose(kappa_of(begun, noise), plain, atol=1e-13 * np.std(plain))
    change = 0.03 * np.random.default_rng(4).normal(size=network.theta.size)

    def moving(size):
        theta = tf.constant(network.theta + size * change)
        return simulation(mesh, "bullfrog", correction=network.with_theta(theta)), theta

    def loss_of(sim):
        kappa = kappa_of(sim, noise)
        return tf.reduce_sum(weights_of(kappa) * (kappa + 20 * kappa**2)) / mesh.size

    sim, theta = moving(1.0)
    kappa, *_ = RUNS.check_gradients(
        mesh, "bullfrog", lambda name: True, correction=sim.options.correction
    )
    assert np.std(kappa - plain) > 0.05 * np.std(plain)
    with tf.GradientTape() as tape:
        tape.watch(theta)
        loss = loss_of(sim)
    slope = np.sum(tape.gradient(loss, theta) * change)
    above, below = (float(loss_of(moving(1.0 + h)[0])) for h in (1e-6, -1e-6))
    assert slope == pytest.approx(mesh.size * (above - below) / 2e-6, rel=1e-6)


@pytest.mark.ranks(4)
def test_maps_are_mesh_tensors(mesh):
    """A mesh function takes its block of a whole map, and gradients come back as of one rank."""
    sim = simulation(mesh, "cola")
    noise = sim.lpt(seed=3).white_noise.block
    shape = [("source", 2), ("map_x", 8), ("map_y", 8)]

    layout = ";".join(
        f"{d}:{axis}" for d, axis in zip(("map_x", "map_y"), mesh.names, strict=False)
    )

    @mesh_function(mesh, layout, kappa=(shape, tf.float64))
    def power(_, kappa):
        return mtf.reduce_sum(mtf.square(kappa))

    def gradient(of, sim, noise):
        with tf.GradientTape() as tape:
            tape.watch(noise)
            kappa = kappa_of(sim, noise)
            loss = of(kappa)
            share = loss / sim.box.mesh.size  # every rank has the loss
        return loss.numpy(), tape.gradient(share, noise).numpy()

    def alone():
        line = simulation(solo(), "cola")
        field = line.lpt(seed=3).white_noise.block
        loss, found = gradient(lambda kappa: tf.reduce_sum(kappa**2), line, field)
        return {"loss": loss, "gradient": found}

    known = by_rank_zero("cone-mesh", alone)
    loss, found = gradient(power, sim, noise)
    assert loss == pytest.approx(known["loss"], rel=1e-12)
    expected = known["gradient"][sim.box.place]
    np.testing.assert_allclose(found, expected, atol=1e-10 * np.abs(expected).max())


def test_convergence_is_that_of_thin_planes(mesh):
    """Where planes are as thin as layers of particles, the weights of planes are those of them."""
    sim = simulation(mesh, grid=16)
    sources = [SourcePlane(0.2)]
    kappa = CONE.convergence(sim, sources, seed=5).kappa.numpy()
    planes = CONE.planes(sim, SIDE / 16, seed=5)
    thin = born(planes.delta, planes.planes, sources, sim.cosmology).numpy()
    assert np.std(kappa - thin) < 0.05 * np.std(kappa)


def test_planes_have_the_power_of_the_matter_in_them(mesh):
    """The linear response of planes to matter is its mean in them, where copies end, too."""
    grid, side, pixels = 48, 480.0, 48
    sim = simulation(mesh, grid=grid, box_size=side, mesh_factor=1)
    delta = matter(grid, side, seed=4)
    field = FlatField(field_of_view=38.0, pixels=pixels, z_max=0.25, tiles=3)
    planes, edges = linear_response(LightCone(field), sim, delta, 70.0)
    theta = ((np.arange(pixels) + 0.5) / pixels - 0.5) * field.fov
    taper = np.outer(np.hanning(pixels), np.hanning(pixels))
    copies = list(tiles(sim.box, edges[-1], field.tiles))
    assert len(copies) == 2 and side not in edges
    for plane, low, high in zip(planes, edges[:-1], edges[1:], strict=True):
        if low < 300.0:
            continue
        truth = np.zeros((pixels, pixels))
        steps = 2.5 * (np.arange((high - low) / 2.5) + 0.5)
        for chi in low + steps:
            tile = copies[int(chi // side)]
            places = np.zeros((3, pixels, pixels))
            for axis, sense, shift, x in zip(
                tile.axes, tile.senses, tile.shifts, (theta[:, None], theta), strict=False
            ):
                places[axis] = sense * (x * chi - shift)
            along = (chi - tile.begin) * grid / side - 0.5
            places *= grid / side
            places[tile.axes[2]] = tile.first_layer + tile.senses[2] * along
            truth += map_coordinates(delta, places, order=3, mode="grid-wrap") / len(steps)
        # The window of painting is that of two pixels.
        bands = 0.5 * (low + high) * np.array([0.01, 0.05, 0.09])
        given = dict(fov=field.fov, bins=bands)
        cross = angular_power(plane * taper, other=truth * taper, window="pixel", **given).power
        response = cross / angular_power(truth * taper, **given).power
        # The lattice's own structure, which folds to any multipole, is noise at larger ones.
        assert np.abs(response - 1.0)[0] < 0.02 and np.abs(response - 1.0).max() < 0.06


def test_the_mean_of_the_universe_is_taken_off(mesh):
    """A universe at rest has a convergence of 0, but for its lattice, which averages out."""
    sim = simulation(mesh, grid=32)
    maps = [
        LightCone(FlatField(field_of_view=12.0, pixels=4, z_max=0.25, tiles=t))
        .convergence(sim, [SourcePlane(0.25)], white_noise=tf.zeros([32] * 3, tf.float64))
        .kappa.numpy()
        for t in range(6)
    ]
    total = 1.5 * 0.31 / 2997.92458**2 * 700.0**2 / 6  # of a full column, about
    assert np.abs(np.mean(maps)) < 0.01 * total
    assert np.std(maps) < 0.1 * total


def at_their_crossing(sim, cone=CONE):
    """Returns the displacements of all particles when each layer crosses, and those times."""
    found, times = {}, []

    class Places:
        needs_before = False

        def __init__(self, inputs):
            self.inputs = ()
            layers = cone.geometry(inputs).layers
            distances = Distances(inputs.cosmologies.cosmologies[0])
            a = distances.scale_factor(layers.distances)
            growth = inputs.cosmologies.theories[0].growth
            self.at, self.factors = sim.options.integrator.since_kick(
                growth, inputs.edges.tolist(), a
            )
            self.kicks = frozenset(self.at)
            times.extend(a.numpy())

        def measurements(self, kick):
            return [functools.partial(self.measure, kick)]

        def measure(self, kick, moment, inputs):
            fields = [moment.after, *moment.lpt]
            for m, at in enumerate(self.at):
                if at == kick:
                    moved = sum(
                        f * c for f, c in zip(fields, self.factors[m, 1:].numpy(), strict=False)
                    )
                    found[m] = (moment.displacement + moved).numpy()
            return {}

        def results(self, measured):
            return None

    sim.run(seed=3, observe=Places)
    return found, times


@pytest.mark.parametrize("correction", [None, MOVING])
@pytest.mark.parametrize("integrator", ["fastpm", "bullfrog", "cola"])
def test_particles_are_where_they_are_at_their_crossing(mesh, integrator, correction):
    """Each layer shows the particles of a state at the time of its distance.

    A network corrects them once for two kicks. What it adds then is the corrected state's to a
    fifth.
    """
    sim = simulation(mesh, integrator, correction=correction)
    found, times = at_their_crossing(sim)
    chosen = sorted(found)[:: max(1, len(found) // 5)]
    states = sim.run(seed=3, outputs=[times[m] for m in chosen])
    plain = simulation(mesh, integrator).run(seed=3, outputs=[state.a for state in states])
    for m, state, before in zip(chosen, states, plain, strict=True):
        there = state.displacement.block.numpy()
        added = np.std(there - before.displacement.block)
        tolerance = 1e-10 if correction is None else 0.2 * added
        assert (added > 0.01) == (correction is not None)
        assert np.std(found[m] - there) < tolerance


def test_light_cones_of_corrected_particles_are_as_sharp_as_states(mesh):
    """Added velocities are motions inside of halos, which would smear halos out."""
    run = dict(grid=16, box_size=32.0, steps=np.linspace(0.1, 1.0, 11))
    sim = simulation(mesh, "bullfrog", **run, correction="network")
    cone = LightCone(FlatField(field_of_view=1.0, pixels=8, z_max=0.7))
    found, times = at_their_crossing(sim, cone)
    chosen = sorted(found)[:: max(1, len(found) // 12)]
    states = sim.run(seed=3, outputs=[times[m] for m in chosen])
    for m, state in zip(chosen, states, strict=True):
        shown = replace(state, displacement=Field(tf.constant(found[m]), state.box))
        both = compare(shown.density(2), state.density(2))
        assert np.abs(both.transfer**2 - 1)[:11].max() < 0.025
        assert (1 - both.correlation)[:11].max() < 1e-3


@pytest.mark.parametrize(
    ("integrator", "edges", "z_max"),
    [
        ("bullfrog", (0.1, 0.2, 0.25, 0.5, 1.0), 4.0),
        ("bullfrog", (0.1, 1.0), 0.5),
        ("fastpm", (0.1, 0.2, 0.25, 0.5, 1.0), 4.0),
        (FastPM(half_step="geometric"), (0.02, 0.05, 0.5, 1.0), 15.0),
        ("cola", (0.1, 0.4, 0.7, 0.8, 0.9, 1.0), 1.0),
    ],
)
def test_a_network_sees_states_of_the_run(mesh, integrator, edges, z_max, monkeypatch):
    """Also where steps differ much in length, and where there is a single one."""
    fields, times = [], []

    class Seeing(ResidualNetwork):
        def moved(self, theta, style, both, box):
            fields.append(both)
            return both

    def remembered(*arguments):
        times.extend(acting_times(*arguments))
        return times

    acting_times = outputs._acting_times
    monkeypatch.setattr(outputs, "_acting_times", remembered)
    sim = simulation(mesh, integrator, steps=edges, correction=Seeing(NETWORK.theta))
    cone = LightCone(FlatField(field_of_view=0.8, pixels=4, z_max=z_max, tiles=9))
    cone.convergence(sim, [SourcePlane(z_max)], seed=3)
    states = sim.with_correction(None).run(seed=3, outputs=times)
    assert len(fields) == len(states) > 0
    for both, state in zip(fields, states, strict=True):
        for one, other in zip(both, (state.displacement, state.velocity), strict=True):
            np.testing.assert_allclose(one, other.block, atol=1e-12 * np.abs(other.block).max())


class Boosting(ResidualNetwork):
    """Adds a velocity and moves nothing."""

    def moved(self, theta, style, fields, box):
        return [fields[0], fields[1] + tf.constant([0.1, 0.2, -0.4], fields[1].dtype)]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "sky",
    [
        CONE.sky,
        FlatField(field_of_view=1.5, pixels=8, z_max=3.5, tiles=30),
        FullSky(nside=4, z_max=0.05, observer=(20.0, 0.0, 140.0)),
    ],
    ids=["flat", "from the first kick", "full"],
)
def test_corrected_velocities_of_particles_in_files(mesh, sky, tmp_path_factory):
    """The correction adds to velocities alone: with what it adds particles move nowhere."""
    folder, cone = shared_folder(tmp_path_factory), LightCone(sky)
    boosted, plain = (
        read_light_cone(cone.particles(simulation(mesh, **more), folder / name, seed=3))[0]
        for name, more in (("boosted", {"correction": Boosting(NETWORK.theta)}), ("plain", {}))
    )
    np.testing.assert_allclose(boosted["Coordinates"], plain["Coordinates"], atol=1e-11)
    added = boosted["Velocities"] - plain["Velocities"]
    added *= plain["ScaleFactor"][:, np.newaxis] / HUBBLE
    if isinstance(sky, FlatField):  # axes of the box are turned in the copies
        added = np.sort(np.abs(added), axis=1) * np.array([1, 1, -1])
    assert len(added) > 100
    np.testing.assert_allclose(added, np.tile([0.1, 0.2, -0.4], (len(added), 1)), atol=1e-9)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("integrator", ["cola"])
def test_particles_in_files(mesh, integrator, tmp_path_factory, monkeypatch):
    """Those in a field of a curved universe, f_K wide; velocities are those of states."""
    monkeypatch.setattr(geometry, "AT_ONCE", 20)  # parts of a plane
    sim = simulation(mesh, integrator, cosmology=cosmology_of(0.3, 0.8, Omega_k=0.5))
    folder = CONE.particles(sim, shared_folder(tmp_path_factory) / "cone", seed=3)
    found, about = read_light_cone(folder)
    assert about["z_max"] == CONE.sky.z_max and about["seed"] == 3
    places, distance, _, ends = crossing_particles(sim, CONE)
    inside = (distance > 0) & (distance >= ends[0]) & (distance < ends[1])
    length = distance * widening(sim.cosmology, distance)
    inside &= (np.abs(places) <= 0.5 * CONE.sky.fov * length).all(axis=0)
    known = np.stack([*places[:, inside], distance[inside]])
    assert known[2].max() < farthest(CONE.sky, sim.cosmology) and known.shape[1] > 100
    ours = found["Coordinates"].T
    for one, other in zip(
        ours[:, np.argsort(ours[2])], known[:, np.argsort(known[2])], strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-9)
    a = np.unique(found["ScaleFactor"])
    assert (a < 1).all() and (a >= 1 / (1 + CONE.sky.z_max)).all()
    for at in a[:: len(a) // 4]:
        some = found["ScaleFactor"] == at
        state = sim.run(seed=3, outputs=[at])[0]
        # Axes are in another order and may be flipped: the triple of sizes tells a particle.
        known = np.sort(np.abs(state.peculiar_velocity().numpy().reshape(-1, 3)), axis=1)
        ours = np.sort(np.abs(found["Velocities"][some]), axis=1)
        nearest = np.abs(ours[:, None] - known).max(axis=-1).min(axis=1)
        assert nearest.max() < 1e-9 * known.max()
    with pytest.raises(FileExistsError, match="holds a light cone"):
        CONE.particles(sim, folder, seed=3)
    if SIZE == 1:
        monkeypatch.setattr("flowpm_dist.io.light_cone.SPARE", 2**62)
        with pytest.raises(WriteError, match=r"particles to .*full: the disk is full"):
            CONE.particles(sim, folder / "full", seed=3)
        assert not any((folder / "full").iterdir())


def painted(cone, x, y, chi, amounts):
    """Particles added bilinearly to the pixels [x, y] of a light cone, in numpy."""
    n, pixel = cone.sky.pixels, cone.sky.fov / cone.sky.pixels
    found = np.zeros((n, n))
    places = [c / chi / pixel + 0.5 * n - 0.5 for c in (x, y)]
    for i, j in itertools.product((0, 1), (0, 1)):
        cells = [np.floor(p) + d for p, d in zip(places, (i, j), strict=True)]
        share = np.prod([1 - np.abs(p - c) for p, c in zip(places, cells, strict=True)], axis=0)
        inside = np.all([(c >= 0) & (c < n) for c in cells], axis=0)
        at = tuple(c[inside].astype(int) for c in cells)
        np.add.at(found, at, (share * amounts)[inside])
    return found


@pytest.mark.parametrize(
    ("options", "cone"),
    [
        (dict(), dict(tiles=3)),
        (dict(), dict(tiles=5, field_of_view=40.0, repeat=True)),
        (dict(cosmology=cosmology_of(0.3, 0.8, Omega_k=0.5)), dict(tiles=3)),
        (dict(cosmology=cosmology_of(0.5, 0.8, Omega_k=-0.5)), dict(tiles=1, field_of_view=11.0)),
        (
            dict(grid=(6, 12, 8), box_size=(120.0, 180.0, 200.0), integrator="bullfrog"),
            dict(tiles=2, field_of_view=9.0),
        ),
        (
            dict(grid=(12, 8, 12), box_size=(120.0, 180.0, 120.0), integrator="cola"),
            dict(tiles=4, field_of_view=9.0),
        ),
    ],
)
def test_maps_are_those_of_states_seen_layer_by_layer(mesh, options, cone):
    """Each layer of each copy, shifted, flipped and turned in numpy, from a state at its time.

    In curved space f_K is exact here. In the maps it is linear between nodes 20 Mpc/h apart, of
    which (20 Mpc/h H0/c)^2 Omega_k / 24 = 1e-6 of the mean convergence is the error.
    """
    sim = simulation(mesh, **options)
    cone = LightCone(FlatField(**{**CONE.sky.model_dump(), "pixels": 7, **cone}))
    nodes, weights = weights_at_nodes(sim, cone, SourcePlane(0.2))
    expected = map_in_numpy(sim, cone, nodes, weights)
    kappa = cone.convergence(sim, [SourcePlane(0.2)], seed=3).kappa[0].numpy()
    tolerance = 1e-12 if sim.cosmology.Omega_k == 0 else 3e-5
    np.testing.assert_allclose(kappa, expected, atol=tolerance * np.abs(expected).max())


def widening(cosmology, chi):
    """f_K / chi in numpy."""
    if cosmology.Omega_k == 0:
        return np.ones_like(chi)
    x = chi / HUBBLE_DISTANCE * np.sqrt(np.abs(cosmology.Omega_k))
    return (np.sinh(x) if cosmology.Omega_k > 0 else np.sin(x)) / x


def weights_at_nodes(sim, cone, source):
    """Distances at whole layers, up to beyond z_max, and lensing weights there."""
    step, distances = sim.box.size[2] / sim.box.grid[2], Distances(sim.cosmology)
    nodes = step * np.arange(2 + np.ceil(farthest(cone.sky, sim.cosmology) / step))
    nodes[0] = 1e-9 * step
    return nodes, (
        lensing_weight(sim.cosmology, nodes) * source.efficiency(nodes, distances)
    ).numpy()


def crossing_particles(sim, cone, far=None):
    """All that crosses the light cone, in numpy, from states at the times of undisplaced layers.

    Each copy of the box has the periodic box's particles between its ends, whose undisplaced
    places lie up to five layers beyond these.

    Returns:
        Places [x and y, n] in the middle of the periodic box, distances [n], sides of the box along
        x and y [2, n], and the ends of the copies [2, n].
    """
    box, end = sim.box, farthest(cone.sky, sim.cosmology)
    layers = Layers.of(box, end, cone.sky.tiles)
    times = Distances(sim.cosmology).scale_factor([*layers.distances, end]).numpy()
    states = [state.displacement.numpy() for state in sim.run(seed=3, outputs=times)]
    lattice = np.stack(np.meshgrid(*map(np.arange, box.grid), indexing="ij"), axis=-1)
    found = []
    for tile in tiles(box, far or end, cone.sky.tiles):
        (ax, ay, az), (sx, sy, sz) = tile.axes, tile.senses
        depth, n = box.cell[az], box.grid[az]
        for layer in range(-5, n + 5):
            number = layer + round(tile.begin / depth)
            if number > len(states) + 5:
                break
            chosen = lattice[..., az] == (tile.first_layer + sz * layer) % n
            moved = states[np.clip(number, 0, len(states) - 1)][chosen]
            assert np.abs(moved).max() < 2.5 * depth
            places = lattice[chosen] * np.array(box.cell) + moved
            x = tile.shifts[0] + sx * places[:, ax]
            y = tile.shifts[1] + sy * places[:, ay]
            x, y = (v - np.rint(v / box.size[a]) * box.size[a] for v, a in ((x, ax), (y, ay)))
            chi = (number + 0.5) * depth + sz * moved[:, az]
            ends = tile.begin or -np.inf, min(tile.begin + box.size[az], far or end)
            of_all = [np.full(len(chi), v) for v in (box.size[ax], box.size[ay], *ends)]
            found.append(np.stack([x, y, chi, *of_all]))
    found = np.concatenate(found, axis=1)
    return found[:2], found[2], found[3:5], found[5:]


def map_in_numpy(sim, cone, nodes, weights):
    """Maps of particles, each with a weight that is linear over its distance, less the mean."""
    depth, n = nodes[2] - nodes[1], cone.sky.pixels
    places, chi, sides, ends = crossing_particles(sim, cone, nodes[-1] + 0.5 * depth)
    part = np.minimum(chi + depth / 2, ends[1]) - np.maximum(chi - depth / 2, ends[0])
    part = np.where(chi > 0, np.clip(part, 0, depth) / depth, 0.0)
    chosen = chi > 0
    places, chi, sides, part = places[:, chosen], chi[chosen], sides[:, chosen], part[chosen]
    wide = functools.partial(widening, sim.cosmology)
    at_nodes = weights / (nodes * wide(nodes) ** 2)
    amounts = part * np.interp(chi, nodes, at_nodes) / chi
    expected = np.zeros((n, n))
    for i, j in itertools.product(range(-2, 3), range(-2, 3)):
        image = (c + m * side for c, m, side in zip(places, (i, j), sides, strict=True))
        expected += painted(cone, *image, chi * wide(chi), amounts)
    expected /= sim.box.cells / sim.box.volume * (cone.sky.fov / n) ** 2
    fine = np.linspace(nodes[0], nodes[-1], 40 * (len(nodes) - 1) + 1)  # quadratic between nodes
    middle = 0.5 * (fine[1:] + fine[:-1])
    ends, inner = (np.interp(x, nodes, at_nodes) * x * wide(x) ** 2 for x in (fine, middle))
    return expected - np.sum((ends[1:] + ends[:-1] + 4 * inner) / 6 * np.diff(fine))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tiles", range(4))
def test_a_rank_without_a_layer_takes_part_in_the_gradient(mesh, tiles):
    """Of a cone that is less deep than the box; its gradient is that of one rank alone."""
    cone = LightCone(FlatField(field_of_view=12.0, pixels=4, z_max=0.02, tiles=tiles))

    def gradients(mesh):
        sim = simulation(mesh)
        noise = sim.lpt(seed=3).white_noise.block
        matter = tf.constant(0.31, tf.float64)
        with tf.GradientTape() as tape:
            tape.watch([noise, matter])
            run = dict(white_noise=noise, cosmology=cosmology_of(matter, 0.8))
            kappa = cone.convergence(sim, [SourcePlane(0.02)], **run).kappa
            loss = tf.reduce_sum(kappa * weights_of(kappa)) / sim.box.mesh.size
        to_noise, to_matter = tape.gradient(loss, [noise, matter])
        return {"noise": to_noise.numpy(), "matter": to_matter.numpy(), "kappa": kappa.numpy()}

    known = by_rank_zero(f"shallow-{tiles}", lambda: gradients(solo()))
    found = gradients(mesh)
    np.testing.assert_allclose(found["kappa"], known["kappa"], atol=1e-15)
    place = simulation(mesh).box.place
    size = np.abs(known["noise"]).max()
    np.testing.assert_allclose(found["noise"], known["noise"][place], atol=1e-10 * size)
    assert found["matter"] == pytest.approx(known["matter"], rel=1e-9)


def test_all_sources_have_their_share_of_alignments(mesh):
    """A plane of sources aligns with the displaced matter around it, wherever layers end.

    Alignments add F(a) n(chi) delta, with n(chi) that is linear between whole layers.
    """
    sim, growth = simulation(mesh), Growth(cosmology := simulation(mesh).cosmology)
    for z in (0.2, 0.203, 0.206, 0.209, 0.212):
        cone = LightCone(FlatField(field_of_view=12.0, pixels=4, z_max=z))
        plain, aligned = (
            cone.convergence(sim, [SourcePlane(z)], seed=3, alignment=alignment).kappa.numpy()
            for alignment in (None, IntrinsicAlignment(5.0))
        )
        nodes, _ = weights_at_nodes(sim, cone, SourcePlane(z))
        node, step = np.abs(nodes - farthest(cone.sky, cosmology)).argmin(), nodes[2] - nodes[1]
        a = Distances(cosmology).scale_factor(nodes[node])
        response = -5.0 * 0.0134 * float(cosmology.Omega_m) * growth.d1(1.0) / growth.d1(a)
        weights = np.where(np.arange(len(nodes)) == node, response / step, 0.0)
        expected = map_in_numpy(sim, cone, nodes, weights)
        np.testing.assert_allclose((aligned - plain)[0], expected, atol=1e-9)
        assert np.abs(expected).max() > 1e-3


def test_tiles_are_turned_anew_and_hold_each_layer_once(mesh):
    box = simulation(mesh).box
    layers = Layers.of(box, 5 * SIDE, seed=1)
    assert len(layers.tiles) == 5
    assert len(layers.distances) == 5 * GRID
    for number in range(5):
        assert sorted(layers.index[layers.tile == number]) == list(range(GRID))
    assert len({(t.axes, t.senses, t.first_layer) for t in layers.tiles}) > 2
    np.testing.assert_allclose(np.diff(layers.distances), SIDE / GRID)
    again = Layers.of(box, 3 * SIDE, seed=1)
    assert again.tiles == layers.tiles[:3]
    other = Layers.of(box, 3 * SIDE, seed=2)
    assert other.tiles != again.tiles
    flat = Layers.of(simulation(mesh, box_size=(80.0, 80.0, 160.0)).box, 800.0, seed=1)
    assert {tile.axes[2] for tile in flat.tiles} == {2}


def test_a_batch_has_its_maps(mesh):
    """Of universes whose light crosses after the same kicks, or after others; sources at z_max."""
    sim = simulation(mesh)
    cosmologies = [cosmology_of(0.2, 0.8), cosmology_of(0.4, 0.7), cosmology_of(0.31, 0.9)]
    cone = LightCone(FlatField(field_of_view=10.0, pixels=8, z_max=0.25))
    options = {"sources": [SourcePlane(0.15), SourcePlane(0.25)]}
    options |= {"alignment": IntrinsicAlignment(2.0)}
    both = cone.convergence(sim, seed=[1, 2, 3], cosmology=cosmologies, **options).kappa.numpy()
    assert both.shape == (3, 2, 8, 8)
    for kappa, seed, cosmology in zip(both, [1, 2, 3], cosmologies, strict=True):
        one = cone.convergence(sim, seed=seed, cosmology=cosmology, **options).kappa.numpy()
        np.testing.assert_allclose(kappa, one, atol=1e-12)


def test_light_cones_that_cannot_be_are_refused(mesh):
    sim = simulation(mesh)
    late = functools.partial(simulation, mesh)
    for cone, of, sources, message in (
        (
            dict(field_of_view=20.0),
            sim,
            [0.2],
            r"wide at z = 0.25, and the box 160: at most 13 degrees",
        ),
        (dict(z_max=5.0), sim, [0.2], "z_max = 5: the run begins at z = 4"),
        (dict(), late(steps=EDGES[:-1]), [0.2], "ends at a = 0.9: a light cone to an observer"),
        (dict(), sim, [0.3], r"sources\[0\] reach to z = 0.3, beyond z_max = 0.25"),
        (dict(), sim, [], "at least one source"),
        (dict(z_max=0.001), sim, [0.001], r"and the nearest particles at 10: increase z_max"),
        (
            dict(z_max=1.5, repeat=True),
            late("bullfrog", steps=[0.3, 0.7, 1.0]),
            [0.2],
            "to z = 1.5: a time",
        ),
    ):
        requested = LightCone(FlatField(**{**CONE.sky.model_dump(), **cone}))
        with pytest.raises(ValueError, match=message):
            requested.convergence(of, [SourcePlane(z) for z in sources], seed=1)
    with pytest.raises(ValueError, match="a width above 0"):
        CONE.planes(sim, 0.0, seed=1)
    wide = LightCone(FlatField(field_of_view=20.0, pixels=8, z_max=0.25, repeat=True))
    assert np.isfinite(wide.convergence(sim, [SourcePlane(0.2)], seed=1).kappa).all()
