"""Light cones: mass, mean, crossing times, gradients; the same maps on any mesh."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from conftest import SIZE, by_rank_zero, process_mesh, shared_folder

import flowpm_dist as fpm
from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.evolution.adjoints import DirectAdjoint
from flowpm_dist.io import light_cone_file
from flowpm_dist.io.files import WriteError
from flowpm_dist.io.light_cone_file import read_light_cone
from flowpm_dist.observables.lensing import SmailDistribution, SourcePlane, born
from flowpm_dist.observables.light_cone import LightCone
from flowpm_dist.observables.light_cone.tiles import Layers

pytestmark = pytest.mark.ranks(1)

GRID, SIDE = 8, 160.0  # [Mpc/h]
CONE = LightCone(field_of_view=12.0, pixels=8, z_max=0.25, tiles=3)
EDGES = np.array([0.2, 0.5, 0.75, 0.9, 1.0])
NUMBERS = {"Omega_m": 0.31, "sigma8": 0.8, "shift": 0.01}


def solo():
    """A mesh of this rank alone."""
    return process_mesh(f"row:{SIZE}").without("row")


def simulation(mesh, integrator="fastpm", **options):
    given = dict(grid=GRID, box_size=SIDE, steps=EDGES, precision="float64", halo=3)
    given |= {"mesh": mesh, "integrator": integrator, **options}
    return fpm.Simulation(fpm.Cosmology.planck18(), **given)


def sources_of(shift=0.01):
    return [SourcePlane(0.2), SmailDistribution(0.1, shift=shift, z_max=0.23)]


def cosmology_of(Omega_m, sigma8):
    return fpm.Cosmology(
        Omega_m=Omega_m, sigma8=sigma8, Omega_b=0.049, h=0.68, n_s=0.965, w0=-0.9, wa=0.1
    )


def seen(sim, noise, Omega_m=0.31, sigma8=0.8, shift=0.01):
    run = dict(white_noise=noise, cosmology=cosmology_of(Omega_m, sigma8))
    return CONE.convergence(sim, sources_of(shift), **run).kappa


def weights_of(kappa):
    return tf.constant(np.cos(np.arange(tf.size(kappa).numpy()).reshape(kappa.shape)))


def with_gradients(sim, noise):
    tensors = {name: tf.constant(value, tf.float64) for name, value in NUMBERS.items()}
    with tf.GradientTape() as tape:
        tape.watch([noise, *tensors.values()])
        kappa = seen(sim, noise, **tensors)
        # Every rank has the whole map, and counts a share of the loss.
        loss = tf.reduce_sum(weights_of(kappa) * (kappa + 20 * kappa**2)) / sim.box.mesh.size
    to_noise, to_numbers = tape.gradient(loss, [noise, tensors])
    return kappa.numpy(), to_noise.numpy(), {name: float(g) for name, g in to_numbers.items()}


@pytest.mark.parametrize(
    "integrator",
    [
        "fastpm",
        pytest.param("bullfrog", marks=pytest.mark.ranks(1, 2)),
        pytest.param("cola", marks=pytest.mark.ranks(1, 4)),
    ],
)
def test_maps_and_gradients(mesh, integrator):
    """By the adjoint as by plain differentiation and by differences; the same on any mesh."""
    sim = simulation(mesh, integrator)
    noise = sim.lpt(seed=3).white_noise.block
    kappa, to_noise, to_numbers = with_gradients(sim, noise)
    if SIZE == 1:
        direct = with_gradients(simulation(mesh, integrator, adjoint=DirectAdjoint()), noise)
        np.testing.assert_allclose(direct[0], kappa, atol=1e-15)
        np.testing.assert_allclose(direct[1], to_noise, atol=1e-9 * np.abs(to_noise).max())
        assert direct[2] == pytest.approx(to_numbers, rel=1e-9)

    def alone():
        line = simulation(solo(), integrator)
        field = line.lpt(seed=3).white_noise.block
        maps, gradient, numbers = with_gradients(line, field)
        w, h = weights_of(maps), 1e-6

        def slope(direction=0.0, **steps):
            def at(h):
                moved = {k: v + h * steps.get(k, 0.0) for k, v in NUMBERS.items()}
                map_ = seen(line, field + h * direction * tf.sin(5 * field), **moved)
                return float(tf.reduce_sum(w * (map_ + 20 * map_**2)))

            return (at(h) - at(-h)) / (2 * h)

        along = float(tf.reduce_sum(gradient * tf.sin(5 * field)))
        pairs = {name: [numbers[name], slope(**{name: 1.0})] for name in NUMBERS}
        return pairs | {"kappa": maps, "gradient": gradient, "along": [along, slope(1.0)]}

    known = by_rank_zero(f"cone-{integrator}", alone)
    for name in ("along", *NUMBERS):
        gradient, slope = known[name]
        assert gradient == pytest.approx(slope, rel=1e-6), name
    np.testing.assert_allclose(kappa, known["kappa"], atol=1e-12 * np.abs(known["kappa"]).max())
    size = np.abs(known["gradient"]).max()
    np.testing.assert_allclose(to_noise, known["gradient"][sim.box.place], atol=1e-10 * size)
    for name, slope in to_numbers.items():
        assert slope == pytest.approx(float(known[name][0]), rel=1e-9)


def test_convergence_is_that_of_thin_planes(mesh):
    """Where planes are as thin as layers of particles, the weights of planes are those of them."""
    sim = simulation(mesh, grid=16)
    sources = [SourcePlane(0.2)]
    kappa = CONE.convergence(sim, sources, seed=5).kappa.numpy()
    planes = CONE.planes(sim, SIDE / 16, seed=5)
    thin = born(planes.delta, planes.planes, sources, sim.cosmology).numpy()
    assert np.std(kappa - thin) < 0.05 * np.std(kappa)


def test_the_mean_of_the_universe_is_taken_off(mesh):
    """A universe at rest has a convergence of 0, but for its lattice, which averages out."""
    sim = simulation(mesh, grid=32)
    maps = [
        LightCone(field_of_view=12.0, pixels=4, z_max=0.25, tiles=t)
        .convergence(sim, [SourcePlane(0.25)], white_noise=tf.zeros([32] * 3, tf.float64))
        .kappa.numpy()
        for t in range(6)
    ]
    total = 1.5 * 0.31 / 2997.92458**2 * 700.0**2 / 6  # of a full column, about
    assert np.abs(np.mean(maps)) < 0.01 * total
    assert np.std(maps) < 0.1 * total


@pytest.mark.parametrize("integrator", ["fastpm", "bullfrog", "cola"])
def test_particles_are_where_they_are_at_their_crossing(mesh, integrator):
    """Each layer's places are those of a state at the time of its distance."""
    sim = simulation(mesh, integrator)
    cone, found = CONE, {}
    inputs_of = {}

    class Places:
        kicks, needs_before = frozenset(range(len(EDGES))), False

        def __init__(self, inputs):
            self.inputs = ()
            layers = cone.layers(inputs)
            distances = Distances(inputs.cosmologies.cosmologies[0])
            self.a = distances.scale_factor(layers.distances)
            growth = inputs.cosmologies.growths[0]
            edges = inputs.edges.tolist()
            self.at, self.factors = sim.options.integrator.since_kick(growth, edges, self.a)

        def look(self, kick, moment, inputs):
            fields = [moment.after, *moment.lpt]
            for m, at in enumerate(self.at):
                if at == kick:
                    moved = sum(
                        f * c for f, c in zip(fields, self.factors[m, 1:].numpy(), strict=False)
                    )
                    found[m] = (moment.displacement + moved).numpy()
            return {}

        def results(self, seen):
            inputs_of["a"] = self.a.numpy()

    sim.observe(lambda inputs, halo: Places(inputs), seed=3)
    chosen = sorted(found)[:: max(1, len(found) // 5)]
    states = sim.run(seed=3, outputs=[inputs_of["a"][m] for m in chosen])
    for m, state in zip(chosen, states, strict=True):
        np.testing.assert_allclose(found[m], state.displacement.block, atol=1e-10)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("integrator", ["cola"])
def test_particles_in_files(mesh, integrator, tmp_path_factory, monkeypatch):
    """Painted with the weights of maps they give the maps; velocities are those of states."""
    sim = simulation(mesh, integrator)
    folder = CONE.particles(sim, shared_folder(tmp_path_factory) / "cone", seed=3)
    found, about = read_light_cone(folder)
    assert about["z_max"] == CONE.z_max and about["seed"] == 3
    x, y, chi = found["Coordinates"].T
    assert (np.abs(x) <= 0.5 * CONE.fov * chi).all() and (np.abs(y) <= 0.5 * CONE.fov * chi).all()
    # A map of one pixel that weighs each by distance^-2: the mean of planes.
    planes = CONE.planes(sim, 20.0, seed=3)
    column = float(tf.reduce_sum((planes.delta[:, 1:-1, 1:-1] + 1) * 20.0, axis=(0, 1, 2)))
    inner = np.maximum(np.abs(x), np.abs(y)) / chi < 0.5 * CONE.fov * 5 / 8
    assert inner.any()
    number = sim.box.cells / sim.box.volume * (CONE.fov / 8) ** 2
    assert (chi**-2)[inner].sum() / number < column < (chi**-2).sum() / number * 1.001
    a = np.unique(found["ScaleFactor"])
    assert (a < 1).all() and (a > 1 / (1 + CONE.z_max)).all()
    some = found["ScaleFactor"] == a[len(a) // 2]
    state = sim.run(seed=3, outputs=[a[len(a) // 2]])[0]
    speeds = state.peculiar_velocity().numpy().reshape(-1, 3)
    ours = np.sort(np.abs(found["Velocities"][some]).max(axis=1))
    nearest = np.abs(np.abs(speeds).max(axis=1)[:, None] - ours).min(axis=0)
    assert nearest.max() < 0.05 * speeds.std()
    with pytest.raises(FileExistsError, match="holds a light cone"):
        CONE.particles(sim, folder, seed=3)
    if SIZE == 1:
        monkeypatch.setattr(light_cone_file, "SPARE", 2**62)
        with pytest.raises(WriteError, match=r"light_cone.hdf5: the disk is full"):
            CONE.particles(sim, folder / "full", seed=3)
        assert not any((folder / "full").iterdir())


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
    """Of universes whose light crosses after the same kicks, or after others."""
    sim = simulation(mesh)
    cosmologies = [cosmology_of(0.2, 0.8), cosmology_of(0.31, 0.7), cosmology_of(0.31, 0.9)]
    source = [SourcePlane(0.15)]
    cone = LightCone(field_of_view=12.0, pixels=8, z_max=0.16)
    both = cone.convergence(sim, source, seed=[1, 2, 3], cosmology=cosmologies).kappa.numpy()
    assert both.shape == (3, 1, 8, 8)
    for kappa, seed, cosmology in zip(both, [1, 2, 3], cosmologies, strict=True):
        one = cone.convergence(sim, source, seed=seed, cosmology=cosmology).kappa.numpy()
        # The cone of a batch reaches as far as the farthest of z_max.
        np.testing.assert_allclose(kappa, one, atol=1e-12)


def test_light_cones_that_cannot_be_are_refused(mesh):
    sim = simulation(mesh)
    late = functools.partial(simulation, mesh)
    for cone, of, sources, told in (
        (
            dict(field_of_view=20.0),
            sim,
            [0.2],
            r"wide at z = 0.25, and the box 160: at most 13 degrees",
        ),
        (dict(z_max=5.0), sim, [0.2], "z_max = 5: the run begins at z = 4"),
        (dict(), late(steps=EDGES[:-1]), [0.2], "ends at a = 0.9: a light cone to an observer"),
        (dict(), sim, [0.3], r"sources\[0\] reach to z = 0.3, behind z_max = 0.25"),
        (dict(), sim, [], "at least one source"),
    ):
        asked = LightCone(**{**CONE.model_dump(), **cone})
        with pytest.raises(ValueError, match=told):
            asked.convergence(of, [SourcePlane(z) for z in sources], seed=1)
    with pytest.raises(ValueError, match="a width above 0"):
        CONE.planes(sim, 0.0, seed=1)
    wide = LightCone(field_of_view=20.0, pixels=8, z_max=0.25, repeat=True)
    assert np.isfinite(wide.convergence(sim, [SourcePlane(0.2)], seed=1).kappa).all()
