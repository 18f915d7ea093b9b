"""Light cones of the whole sky: mass, mean, crossing times, gradients; the same on any mesh."""

import dataclasses
import functools
import types

import healpy
import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, process_mesh, shared_folder
from scipy.ndimage import map_coordinates
from scipy.spatial import cKDTree
from sky_runs import GRID, SIDE, SkyRuns, cosmology_of, linear_response, matter, solo

from flowpm_dist import Cosmology, scale_factor_steps
from flowpm_dist.cosmology import Theory
from flowpm_dist.cosmology.background import HUBBLE_DISTANCE, Distances
from flowpm_dist.cosmology.line_of_sight import lensing_weight, limber_power
from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.io import read_light_cone
from flowpm_dist.io.light_cone import LightConeFiles
from flowpm_dist.observables.lensing import (
    IntrinsicAlignment,
    LensPlanes,
    SmailDistribution,
    SourcePlane,
    born,
    plane_weights,
)
from flowpm_dist.observables.light_cone import FullSky, LightCone, geometry
from flowpm_dist.observables.light_cone.all_matter import multiply_multipoles
from flowpm_dist.statistics import spherical_power
from flowpm_dist.statistics.angular_spectra import painting_window

pytestmark = pytest.mark.ranks(1)

SKY = LightCone(FullSky(nside=4, z_max=0.05))
EDGES = (0.2, 0.5, 0.75, 0.97, 1.0)
DEAR = [pytest.mark.long] if SIZE == 4 else []
# Maps are whole when neutrinos are added to them; ranks_light_cone.py does that on two ranks.
ON_ONE = [pytest.param(0.6, marks=[pytest.mark.long] if SIZE == 2 else [])]
RUNS = SkyRuns(SKY, EDGES, plane=0.045, smail=(0.02, 0.045), shift=0.002)
sources_of = RUNS.sources


def simulation(mesh, integrator="fastpm", **options):
    """With BullFrog, of a curved universe."""
    if integrator == "bullfrog":
        options["cosmology"] = cosmology_of(0.3, 0.8, Omega_k=0.5)
    return RUNS.simulation(mesh, integrator, **options)


@pytest.mark.parametrize(
    "integrator",
    [
        pytest.param("fastpm", marks=[pytest.mark.ranks(1, 2, 4), *DEAR]),
        "cola",
    ],
)
def test_maps_and_gradients(mesh, integrator):
    """By the adjoint as by differences; the same on any mesh."""
    runs = dataclasses.replace(RUNS, curvature={"fastpm": -0.2, "cola": 0.0}[integrator])
    runs.check_gradients(
        mesh, integrator, lambda name: integrator == "fastpm" or name in ("Omega_m", "along")
    )


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("mass", ON_ONE)
def test_gradients_of_maps_with_massive_neutrinos(mesh, mass):
    runs = dataclasses.replace(RUNS, mass=mass)
    runs.check_gradients(mesh, "fastpm", lambda name: name in ("m_nu", "along"))


def test_lensing_is_by_all_matter(mesh):
    """Massive neutrinos change the power as in Limber's integral over linear theory.

    The particles' own power is higher by 2.5 to 5 % of itself.
    """
    grid, edges = 32, [300.0, 360.0, 420.0, 480.0, 570.0]
    sky, source = LightCone(FullSky(nside=16, z_max=0.2)), SourcePlane(0.2)
    steps = scale_factor_steps(0.1, 1.0, 6)
    light = Cosmology.planck18().replace(A_s=1e-10, radiation=True)

    def spectra(cosmology):
        """Of a map, without its lattice, and in theory."""
        options = dict(grid=grid, box_size=400.0, mesh_factor=1, lpt_order=1, cosmology=cosmology)
        sim = RUNS.simulation(mesh, "bullfrog", steps=steps, **options)
        plus, minus = (sky.planes(sim, edges, seed=3, paired=each) for each in (False, True))
        delta, planes = 0.5 * (plus.delta - minus.delta), plus.planes
        kappa = born(delta, planes, [source], cosmology)[0]
        ell, power = spherical_power(kappa, [8, 12, 18, 26])
        kernels = plane_weights(planes, [source], cosmology) / planes.widths
        theory = Theory(cosmology)
        a = planes.scale_factor(theory.distances)
        limber = limber_power(ell, planes.chi, a, planes.widths, kernels, theory.power)
        return power, limber[0, 0].numpy()

    massive, massless = spectra(light.replace(m_nu=0.6)), spectra(light)
    ratio, expected = (x / y for x, y in zip(massive, massless, strict=True))
    np.testing.assert_allclose(ratio, expected, rtol=0.012)
    assert np.mean(ratio / expected) == pytest.approx(1.0, rel=0.006)


def test_multipoles_are_multiplied_by_factors():
    """Of a sum of harmonics, whose maps healpy makes; the gradient is the adjoint."""
    rng, nside = np.random.default_rng(2), 8
    modes = healpy.synalm(np.ones(9), lmax=8)
    parts = tf.constant([healpy.alm2map(modes, nside), healpy.alm2map(2j * modes, nside)])
    factors = tf.constant(rng.uniform(0.5, 1.5, (2, 3 * nside)))
    expected = sum(
        healpy.alm2map(healpy.almxfl(size * modes, factor), nside)
        for size, factor in zip((1, 2j), factors.numpy(), strict=True)
    )
    found = multiply_multipoles(parts, factors)
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
    cotangent = tf.constant(rng.normal(size=found.shape))
    with tf.GradientTape() as tape:
        tape.watch([parts, factors])
        found = multiply_multipoles(parts, factors)
    for slope, of in zip(
        tape.gradient(found, [parts, factors], cotangent), (parts, factors), strict=True
    ):
        inner = float(tf.reduce_sum(found * cotangent))  # linear in both
        assert float(tf.reduce_sum(slope * of)) == pytest.approx(inner, rel=1e-9)


@functools.cache
def crossing_particles(integrator, observer):
    """Places, velocities and times of copies, from states at the times of undisplaced places.

    All copies that may come as near as z_max are included. Copies from farther away are observed at
    the time of z_max.
    """
    sim = simulation(solo(), integrator)
    end = float(Distances(sim.cosmology).comoving(1 / (1 + SKY.sky.z_max)))
    lattice = np.stack(np.meshgrid(*[np.arange(-12, 20)] * 3, indexing="ij"), -1).reshape(-1, 3)
    q = lattice * SIDE / GRID - observer
    chi = np.linalg.norm(q, axis=-1)
    lattice, q, chi = (x[chi < end + 60.0] for x in (lattice, q, chi))
    distances, which = np.unique(np.round(np.minimum(chi, end), 9), return_inverse=True)
    a = Distances(sim.cosmology).scale_factor(distances).numpy()
    states = sim.run(seed=3, outputs=a)
    moved, velocity = (
        np.stack([of(state).numpy() for state in states])[(which, *(lattice % GRID).T)]
        for of in (lambda state: state.displacement, lambda state: state.peculiar_velocity())
    )
    assert np.abs(moved).max() < 30.0
    return q + moved, velocity, a[which]


def share_in(distance, low, high):
    """What is between two distances of clouds as deep as the spacing of the lattice."""
    half = 0.5 * SIDE / GRID
    low = low or -np.inf  # all that is about the observer is in the first shell
    part = np.minimum(distance + half, high) - np.maximum(distance - half, low)
    return np.clip(part, 0.0, 2 * half) / (2 * half)


@pytest.mark.parametrize(
    ("integrator", "observer"),
    [("bullfrog", (80.0, 80.0, 80.0)), ("cola", (20.0, 0.0, 140.0))],
)
def test_maps_are_those_of_states_at_the_crossings(mesh, integrator, observer):
    """Shells and convergence, from each state painted with healpy's weights."""
    sim = simulation(mesh, integrator)
    sky = LightCone(FullSky(**SKY.sky.model_dump(exclude={"observer"}), observer=observer))
    end = float(Distances(sim.cosmology).comoving(1 / 1.05))
    places, *_ = crossing_particles(integrator, observer)
    distance = np.linalg.norm(places, axis=-1)
    theta, phi = np.arccos(places[:, 2] / distance), np.arctan2(places[:, 1], places[:, 0])
    pixels, shares = healpy.get_interp_weights(4, theta, phi)
    areas, number = Healpix(4).painted_areas, sim.box.cells / sim.box.volume

    edges = [0.0, 50.0, 111.0, end]
    shells = sky.planes(sim, edges, seed=3)
    for i, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        found = np.zeros(192)
        np.add.at(found, pixels, shares * share_in(distance, low, high))
        expected = found / areas / (number * (high**3 - low**3) / 3) - 1
        np.testing.assert_allclose(shells.delta[i], expected, atol=1e-9 * np.abs(expected).max())

    source = 118.0  # where weights, which are linear between nodes, have one

    def weight(chi: np.ndarray) -> np.ndarray:
        root = np.sqrt(max(sim.cosmology.Omega_k, 1e-12)) / HUBBLE_DISTANCE
        ratio = np.sinh(root * (source - chi)) / np.sinh(root * source)
        return lensing_weight(sim.cosmology, chi).numpy() * np.maximum(ratio, 0)

    found = np.zeros(192)
    np.add.at(found, pixels, shares * weight(distance) / distance**2)
    fine = np.linspace(0, end, 100_001)
    mean = np.trapezoid(weight(fine), fine)
    kappa = sky.convergence(sim, [SourcePlane(distance=source)], seed=3).kappa[0].numpy()
    expected = found / areas / number - mean
    np.testing.assert_allclose(kappa, expected, atol=1e-7 * np.abs(expected).max())


@pytest.mark.ranks(1, 2, 4)
def test_particles_in_files(mesh, tmp_path_factory, monkeypatch):
    """Each copy once, at its crossing: painted they give a shell, and states their columns."""
    monkeypatch.setattr(geometry, "AT_ONCE", 40)  # parts of a plane, on one rank
    observer = (20.0, 0.0, 140.0)
    sim = simulation(mesh, "cola" if SIZE == 1 else "fastpm")
    sky = LightCone(FullSky(nside=4, z_max=0.05, observer=observer))
    folder = sky.particles(sim, shared_folder(tmp_path_factory) / "cone", seed=3)
    found, about = read_light_cone(folder)
    assert about["nside"] == 4 and about["seed"] == 3
    place = found["Coordinates"]
    end = float(Distances(sim.cosmology).comoving(1 / 1.05))
    theta, phi = np.arccos(place[:, 2] / np.linalg.norm(place, axis=1)), np.arctan2(*place.T[1::-1])
    pixels, shares = healpy.get_interp_weights(4, theta, phi)
    counts, edges = np.zeros(192), [40.0, 130.0]
    distance = np.linalg.norm(place, axis=1)
    assert distance.max() < end
    np.add.at(counts, pixels, shares * share_in(distance, *edges))
    delta = sky.planes(sim, edges, seed=3).delta[0].numpy()
    number = sim.box.cells / sim.box.volume * (edges[1] ** 3 - edges[0] ** 3) / 3
    np.testing.assert_allclose(
        counts / Healpix(4).painted_areas / number - 1, delta, atol=1e-8 * np.abs(delta).max()
    )
    if SIZE == 1:
        known = crossing_particles("cola", observer)
        near = np.linalg.norm(known[0], axis=1) < end
        known = [column[near] for column in known]
        assert len(place) == len(known[0])
        apart, same = cKDTree(known[0]).query(place)
        assert apart.max() < 1e-7 * end and len(set(same)) == len(same)
        columns = found["Velocities"], found["ScaleFactor"]
        for ours, theirs in zip(columns, known[1:], strict=True):
            np.testing.assert_allclose(ours, theirs[same], atol=1e-7 * np.abs(theirs).max())


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("kind", "added"), [("maps", 1e20), ("particles", np.nan)])
def test_a_particle_without_a_place_ends_the_run_on_all_ranks(mesh, kind, added, tmp_path_factory):
    """The particle is on one rank only."""
    sim, folder = simulation(mesh), shared_folder(tmp_path_factory)

    def observer_of(inputs):
        of = SKY.convergence_observer(sources_of())
        observer = (of if kind == "maps" else SKY.particles_observer(files))(inputs)
        measure = observer.measure

        def lost(crossing, moment, given):
            if mesh.rank == SIZE - 1:
                moment = dataclasses.replace(moment, after=moment.after + added)
            return measure(crossing, moment, given)

        observer.measure = lost
        return observer

    message = pytest.raises(
        FloatingPointError, match="light cone: a particle that crosses it has a"
    )
    with message, LightConeFiles(folder, mesh) as files:
        sim.run(seed=3, observe=observer_of)
    mesh.barrier()
    assert not any(folder.iterdir())


def test_born_of_shells_is_a_direct_sum(mesh):
    """Of given shells by its formula in numpy, and of thin ones the convergence of particles."""
    sim = simulation(mesh, grid=16)
    sources = [SourcePlane(0.045)]
    shells = SKY.planes(sim, 5.0, seed=5)
    kappa = born(shells.delta, shells.planes, sources, sim.cosmology)[0].numpy()
    edges = np.asarray(shells.planes.edges)
    r1, r2 = edges[:-1], edges[1:]
    chi = 0.75 * (r2**4 - r1**4) / (r2**3 - r1**3)
    a = Distances(sim.cosmology).scale_factor(chi).numpy()
    source = float(Distances(sim.cosmology).comoving(1 / 1.045))
    strength = 1.5 * float(sim.cosmology.Omega_m) / 2997.92458**2
    weights = strength * chi / a * np.maximum(0, 1 - chi / source) * (r2 - r1)
    expected = np.sum(weights[:, None] * shells.delta.numpy(), axis=0)
    np.testing.assert_allclose(kappa, expected, atol=1e-10 * np.abs(expected).max())
    painted = SKY.convergence(sim, sources, seed=5).kappa[0].numpy()
    assert np.corrcoef(painted, kappa)[0, 1] > 0.95
    own = LensPlanes.of_shells(edges)
    np.testing.assert_array_equal(own.chi, shells.planes.chi)


def test_shells_have_the_power_of_the_matter_in_them(mesh):
    """The linear response of shells to matter is its mean in them, at low multipoles, too.

    The mean is that of splines of the same matter along the lines of sight.
    """
    grid, side, nside = 48, 480.0, 64
    sim = simulation(mesh, grid=grid, box_size=side, mesh_factor=1)
    edges, bands = [500.0, 550.0, 640.0], [4, 8, 16, 24, 32, 48]
    delta = matter(grid, side, seed=4)
    sky = LightCone(FullSky(nside=nside, z_max=0.25, observer=(235.0, 245.0, 245.0)))
    shells, _ = linear_response(sky, sim, delta, edges)
    towards = np.stack(healpy.pix2vec(nside, np.arange(12 * nside**2)))[..., np.newaxis]
    for shell, low, high in zip(shells, edges[:-1], edges[1:], strict=True):
        chi = low + 5.0 * (np.arange((high - low) / 5) + 0.5)
        places = towards * chi + np.array(sky.sky.observer)[:, np.newaxis, np.newaxis]
        on_rays = map_coordinates(delta, places * grid / side, order=3, mode="grid-wrap")
        truth = np.average(on_rays, axis=-1, weights=chi**2)
        cross = spherical_power(shell, bands, other=truth)
        window = painting_window(cross.ell, nside)
        response = cross.power / spherical_power(truth, bands).power / window
        np.testing.assert_allclose(response, 1.0, atol=0.02)


class MatterOfShells:
    """In the place of a light cone's convergence."""

    def convergence(self, sim, sources, **run):
        delta = SKY.planes(sim, [20.0, 70.0, 130.0], **run).delta
        return types.SimpleNamespace(kappa=delta)


@pytest.mark.ranks(1, 2)
def test_gradients_of_shells(mesh):
    runs = dataclasses.replace(RUNS, cone=MatterOfShells())
    runs.check_gradients(mesh, "fastpm", lambda name: name in ("Omega_m", "along"))


def test_the_mean_of_the_universe_is_taken_off(mesh):
    """A universe at rest has a convergence of 0, but for its lattice."""
    sim = simulation(mesh, grid=16)
    sky = LightCone(FullSky(nside=2, z_max=0.1, observer=(81.1, 83.7, 78.3)))
    noise = tf.zeros([16] * 3, tf.float64)
    kappa = sky.convergence(sim, [SourcePlane(0.1)], white_noise=noise).kappa[0].numpy()
    total = 1.5 * 0.31 / 2997.92458**2 * 300.0**2 / 6  # of all the matter, about
    assert abs(np.average(kappa, weights=Healpix(2).painted_areas)) < 0.01 * total
    assert np.std(kappa) < 0.02 * total


def test_alignments_are_those_of_thin_shells(mesh):
    """Proportional to their amplitude, and of the matter where the sources are."""
    sim = simulation(mesh, grid=16)
    sources = [SmailDistribution(0.02, z_max=0.045)]

    def aligned(amplitude):
        alignment = IntrinsicAlignment(amplitude)
        return SKY.convergence(sim, sources, seed=5, alignment=alignment).kappa[0].numpy()

    plain = SKY.convergence(sim, sources, seed=5).kappa[0].numpy()
    one, two = aligned(5.0) - plain, aligned(10.0) - plain
    np.testing.assert_allclose(two, 2 * one, atol=1e-12 * np.abs(one).max())
    shells = SKY.planes(sim, 5.0, seed=5)
    direct, without = (
        born(shells.delta, shells.planes, sources, sim.cosmology, alignment=alignment)[0].numpy()
        for alignment in (IntrinsicAlignment(5.0), None)
    )
    thin = direct - without
    assert np.corrcoef(one, thin)[0, 1] > 0.95
    assert np.std(one) == pytest.approx(np.std(thin), rel=0.1)


def test_a_batch_has_its_maps(mesh):
    """Of universes whose light crosses after the same kicks at other distances."""
    sim = simulation(mesh)
    cosmologies = [cosmology_of(0.2, 0.8), cosmology_of(0.31, 0.7), cosmology_of(0.2, 0.8)]
    source = [SourcePlane(0.03)]
    both = SKY.convergence(sim, source, seed=[1, 2, 3], cosmology=cosmologies).kappa.numpy()
    assert both.shape == (3, 1, 192)
    for kappa, seed, cosmology in zip(both, [1, 2, 3], cosmologies, strict=True):
        one = SKY.convergence(sim, source, seed=seed, cosmology=cosmology).kappa.numpy()
        # The cone of a batch reaches as far as the farthest of z_max.
        np.testing.assert_allclose(kappa, one, atol=1e-12)
    Omega_m, slopes = tf.Variable(0.2, dtype=tf.float64), []
    for seed in ([1, 2], 1):
        with tf.GradientTape() as tape:
            universe = cosmology_of(Omega_m, 0.8)
            several = [universe, cosmologies[1].replace(Omega_m=tf.constant(0.31, tf.float64))]
            given = several if seed == [1, 2] else universe
            kappa = SKY.convergence(sim, source, seed=seed, cosmology=given).kappa
            loss = tf.reduce_sum((kappa if seed == 1 else kappa[0]) ** 2)
        slopes.append(float(tape.gradient(loss, Omega_m)))
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-9)


@pytest.mark.ranks(2)
def test_universes_over_replicas_in_float32(mesh):
    """Each replica has the map of its universe and its gradient, as one universe has them."""
    of_two = process_mesh("replica:2")
    several, alone = (
        simulation(of, precision="float32") for of in (of_two, of_two.without("replica"))
    )

    def with_gradient(sim, seed):
        noise = sim.lpt(seed=seed).white_noise
        with tf.GradientTape() as tape:
            tape.watch(noise.block)
            kappa = SKY.convergence(sim, sources_of(), white_noise=noise).kappa
            loss = tf.reduce_sum(kappa**2) / alone.box.mesh.size
        return kappa.numpy(), tape.gradient(loss, noise.block).numpy()

    kappa, slope = with_gradient(several, [1, 2])
    assert kappa.dtype == np.float32 and kappa.shape == (1, 2, 192)
    known, its_slope = with_gradient(alone, 1 + of_two.coordinate("replica"))
    np.testing.assert_allclose(kappa[0], known, atol=1e-5 * np.abs(known).max())
    np.testing.assert_allclose(slope[0], its_slope, atol=1e-4 * np.abs(its_slope).max())
    with pytest.raises(ValueError, match="the particles of one universe are written"):
        several.run(seed=[1, 2], observe=SKY.particles_observer(None))


def test_light_cones_that_cannot_be_are_refused(mesh):
    sim = simulation(mesh)
    with pytest.raises(ValueError, match="a power of two up to 8192 is needed"):
        LightCone(FullSky(nside=12, z_max=0.05))
    for sky, of, sources, message in (
        (dict(observer=(0.0, 161.0, 0.0)), sim, [0.04], "must be in the box of 160 x 160 x 160"),
        (dict(z_max=5.0), sim, [0.04], "z_max = 5: the run begins at z = 4"),
        (dict(), simulation(mesh, steps=EDGES[:-1]), [0.04], "the run ends at a = 0.97: a light"),
        (dict(), sim, [0.06], r"sources\[0\] reach to z = 0.06, beyond z_max = 0.05"),
        (dict(), sim, [], "at least one source"),
    ):
        requested = LightCone(FullSky(**{**SKY.sky.model_dump(), **sky}))
        with pytest.raises(ValueError, match=message):
            requested.convergence(of, [SourcePlane(z) for z in sources], seed=1)
    for edges, message in (
        (0.0, "a width above 0"),
        ([0.0, 50.0, 40.0], "must increase from 0 or more"),
        ([0.0, 500.0], "shells up to 500 Mpc/h: must end at z_max = 0.05 or before, at most 14"),
    ):
        with pytest.raises(ValueError, match=message):
            SKY.planes(sim, edges, seed=1)
