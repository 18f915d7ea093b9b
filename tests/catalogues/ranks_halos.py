"""Halos on any number of ranks: the groups of MP-Gadget and of scipy, and their properties."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
from ranks import by_rank_zero, solo
from reference import reference
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

import flowpm_dist as fpm
from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.finder import Particles, find_halos
from flowpm_dist.catalogues.friends import friends_of_friends
from flowpm_dist.catalogues.options import FinderOptions
from flowpm_dist.grid.space import Space
from meshimpl.process_mesh import ProcessMesh

pytestmark = pytest.mark.ranks(1, 2, 4)

SIZE = (12.0, 16.0, 10.0)
LINK = 0.7
UNIVERSE = {"Omega_m": 0.31, "Omega_b": 0.049, "h": 0.677, "n_s": 0.965, "sigma8": 0.81}


def about(grid: tuple[int, int, int], size: tuple[float, float, float], a: float = 1.0) -> dict:
    """The attributes of a snapshot."""
    numbers = fpm.Cosmology(**UNIVERSE).numbers()
    return {"a": a, "grid": list(grid), "box_size": list(size), "cosmology": numbers}


def chain() -> np.ndarray:
    """Points along a line that winds through all blocks and over all faces."""
    t = np.arange(0, 1, 1 / 60)
    return np.stack([t * SIZE[0], 2 * t * SIZE[1], 3 * t * SIZE[2]], axis=1) % SIZE


@functools.cache
def made(name: str) -> np.ndarray:
    """Positions [n, 3] of all ranks."""
    rng = np.random.default_rng(5)
    size = np.array(SIZE)
    match name:
        case "random":
            return rng.random((3000, 3)) * size
        case "clumps":
            centres = rng.random((40, 3)) * size
            return rng.normal(centres[:, np.newaxis], 0.2, (40, 60, 3)).reshape(-1, 3)
        case "on the edges of blocks":
            return rng.integers(0, 8, (1500, 3)) * size / 8
        case "a chain through all blocks":
            return np.concatenate([chain() + shift for shift in rng.normal(0, 0.01, (40, 3))])
        case "one group":
            return np.stack(np.meshgrid(*[np.arange(0, s, 0.5) for s in SIZE]), -1).reshape(-1, 3)
    return rng.random((30, 3)) * size


SETS = (
    *("random", "clumps", "on the edges of blocks", "a chain through all blocks"),
    *("one group", "no group"),
)


def groups_of(positions: np.ndarray, link: float) -> list[np.ndarray]:
    """The numbers of the members of all groups of at least 2, by scipy."""
    wrapped = positions % SIZE
    wrapped[wrapped == SIZE] = 0
    pairs = cKDTree(wrapped, boxsize=SIZE).query_pairs(link, output_type="ndarray")
    graph = coo_array((np.ones(len(pairs)), pairs.T), (len(wrapped),) * 2)
    _, label = connected_components(graph, directed=False)
    order = np.argsort(label, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(label[order])) + 1)
    return [group for group in groups if len(group) > 1]


def found(
    mesh: ProcessMesh,
    positions: np.ndarray,
    size: tuple[float, float, float] = SIZE,
    velocities: np.ndarray | None = None,
    a: float = 1.0,
    **options: object,
) -> Catalogue:
    """All halos of particles that are dealt to the ranks."""
    numbers = np.arange(mesh.rank, len(positions), mesh.size)
    v = np.zeros_like(positions) if velocities is None else velocities
    particles = Particles(Space(size, mesh), positions[numbers], v[numbers], numbers)
    # A linking length of one spacing: the header's grid makes the spacing.
    return find_halos(particles, about((10, 10, 10), size, a), FinderOptions(**options)).whole()


def spacing(size: tuple[float, float, float] = SIZE) -> float:
    return float(np.prod(size) / 1000) ** (1 / 3)


@pytest.mark.every_split
@pytest.mark.parametrize("name", SETS)
def test_the_groups_of_scipy(mesh, name):
    positions = made(name)
    expected = groups_of(positions, LINK if name != "no group" else 0.1)
    link = (LINK if name != "no group" else 0.1) / spacing()
    halos = found(mesh, positions, linking_length=link, minimum=2, members=True)
    members = [halos.members_of(row) for row in range(len(halos))]
    assert {tuple(m) for m in members} == {tuple(m) for m in expected}
    assert (halos.id == [m[0] for m in members]).all() if members else not len(halos)
    assert (halos.number == [len(m) for m in members]).all()


def periodic_mean(x: np.ndarray) -> np.ndarray:
    apart = x - x[0]
    apart -= np.round(apart / SIZE) * SIZE
    return x[0] + apart.mean(axis=0)


@pytest.mark.every_split
def test_properties_of_members(mesh):
    positions = made("clumps")
    velocities = np.random.default_rng(6).normal(size=positions.shape)
    halos = found(
        mesh, positions, velocities=velocities, linking_length=LINK / spacing(), members=True
    )
    assert len(halos) > 20
    for row in range(len(halos)):
        m = halos.members_of(row)
        centre = periodic_mean(positions[m])
        apart = positions[m] - centre
        apart -= np.round(apart / SIZE) * SIZE
        np.testing.assert_allclose(halos.position[row], centre % SIZE, atol=1e-12)
        mean = velocities[m].mean(axis=0)
        np.testing.assert_allclose(halos.velocity[row], mean, atol=1e-13)
        dispersion = np.sqrt(((velocities[m] - mean) ** 2).mean())
        np.testing.assert_allclose(halos.velocity_dispersion[row], dispersion, rtol=1e-12)
        axes = halos.axis_directions[row] * halos.axis_lengths[row][:, np.newaxis]
        np.testing.assert_allclose(axes.T @ axes, apart.T @ apart / len(m), atol=1e-12)
        assert (np.diff(halos.axis_lengths[row]) <= 0).all()
    assert (np.diff(halos.mass) <= 0).all()


@pytest.mark.parametrize("a", [0.5, 1.0])
def test_the_spheres_are_those_of_all_particles(mesh, a):
    positions = made("clumps")
    options = {"linking_length": 0.35 / spacing(), "minimum": 10}
    halos = found(mesh, positions, overdensities=("200m", "200c"), members=True, a=a, **options)
    tree = cKDTree(positions % SIZE, boxsize=SIZE)
    particle = halos.header.mass * 1e10
    mean = 0.31 * 2.77549975e11
    critical = 2.77549975e11 * (0.31 + 0.69 * a**3)  # comoving, without radiation
    resolved = np.isfinite(halos.mass_200m)
    assert resolved.sum() > 5 and np.isfinite(halos.mass_200c).sum() > 3
    for row in np.flatnonzero(resolved):
        m = halos.members_of(row)
        near = tree.query(positions[m] % SIZE, k=17)[0][:, -1]
        centre = positions[m[near.argmin()]] % SIZE
        np.testing.assert_allclose(halos.centre[row], centre, atol=1e-12)
        for name, density in (("200m", 200 * mean), ("200c", 200 * critical)):
            radius, mass = halos[f"radius_{name}"][row], halos[f"mass_{name}"][row]
            if not np.isfinite(mass):
                continue
            np.testing.assert_allclose(mass / (4 / 3 * np.pi * radius**3), density, rtol=1e-4)
            # Particles within this radius, but for the one at which the density crosses.
            inside = len(tree.query_ball_point(centre, radius))
            assert abs(inside - round(mass / particle)) <= 1


def test_relaxed_linking_lengths(mesh):
    """Groups of the longer length are halos if they are small; others are linked again."""
    positions, longer = made("random"), 0.9
    options = {"linking_length": LINK / spacing(), "minimum": 3, "members": True}
    halos = found(mesh, positions, relaxed=((12, longer / spacing()),), **options)
    members = {tuple(halos.members_of(row)) for row in range(len(halos))}
    groups = groups_of(positions, longer)
    small = {tuple(group) for group in groups if 3 <= len(group) < 12}
    left = np.sort(np.concatenate([group for group in groups if len(group) >= 12]))
    again = groups_of(positions[left], LINK)
    assert members == small | {tuple(left[group]) for group in again if len(group) >= 3}
    assert small and len(members) > len(small)


@pytest.mark.every_split
def test_the_halos_of_mp_gadget(mesh):
    """The same members, centres, velocities and shapes as the halo finder of a tree code."""
    data = reference("mpgadget_halos")
    side, sites = float(data["side"]), data["site"].astype(np.int64)
    lattice = np.stack(np.unravel_index(sites, (64, 64, 64)), axis=1) * 2.0
    positions = (lattice + data["displacement"] - data["origin"]) % data["box_size"]
    mine = slice(mesh.rank, None, mesh.size)
    space = Space((side,) * 3, mesh, periodic=False)
    velocities = data["velocity"].astype(np.float64) * 100
    particles = Particles(space, positions[mine], velocities[mine], sites[mine])
    options = FinderOptions(members=True)
    halos = find_halos(particles, about((64,) * 3, (128.0,) * 3), options).whole()
    rows = {int(halos.members_of(row)[0]): row for row in range(len(halos))}
    group = np.full(64**3, -1)
    group[sites] = data["group"]
    for n, first in enumerate(data["lowest_site"]):
        row = rows[int(first)]
        assert set(halos.members_of(row)) == set(np.flatnonzero(group == n))
        centre = (data["centre"][n] - data["origin"]) % data["box_size"]
        np.testing.assert_allclose(halos.position[row], centre, atol=1e-11)
        # Stored in float32.
        np.testing.assert_allclose(halos.velocity[row], data["peculiar_velocity"][n], atol=1e-3)
        axes = halos.axis_directions[row] * halos.axis_lengths[row][:, np.newaxis]
        moment = data["second_moment"][n] / data["mass"][n]
        np.testing.assert_allclose(axes.T @ axes, moment, rtol=1e-5, atol=1e-5)
        # The two codes have other constants of gravity.
        np.testing.assert_allclose(halos.mass[row], data["mass"][n] * 1e10, rtol=1e-6)


def final_state(mesh: ProcessMesh) -> fpm.State:
    steps = fpm.scale_factor_steps(0.2, 1.0, 4)
    cosmology = fpm.Cosmology(**UNIVERSE)
    sim = fpm.Simulation(cosmology, 16, 24.0, steps, mesh=mesh, precision="float64")
    return sim.run(seed=3)


@pytest.mark.every_split
def test_a_run_has_the_same_halos_on_any_mesh(mesh):
    state = final_state(mesh)
    halos = fpm.halos(state, minimum=8, whole=True)

    def alone() -> dict[str, np.ndarray]:
        catalogue = fpm.halos(final_state(solo()), minimum=8)
        density = catalogue.density(16, redshift_space="y", shift=0.5).block.numpy()
        return {**catalogue.columns, "density": density}

    expected = by_rank_zero("halos_of_a_run", alone)
    assert len(halos) > 10
    for name, values in halos.columns.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-8, atol=1e-8, err_msg=name)
    part = fpm.halos(state, minimum=8)
    assert part.total == len(halos)
    density = part.density(16, redshift_space="y", shift=0.5)
    np.testing.assert_allclose(density.numpy(), expected["density"], rtol=1e-8, atol=1e-8)
    box, rows, cols = 24.0, *Space((24.0,) * 3, mesh).parts[:2]
    blocks = (part.position[:, :2] * [rows, cols] / box).astype(int)
    assert (blocks == Space((24.0,) * 3, mesh).block[:2]).all()


@pytest.mark.every_split
def test_points_are_painted_as_on_a_whole_grid(mesh):
    """Cloud in cell by its definition, over every face and every border of blocks."""
    rng = np.random.default_rng(4)
    positions, weights = rng.random((200, 3)) * 8, rng.random(200)
    positions[:3] = [[0, 0, 0], [7.999999, 4, 4], [4, 4, 4]]
    whole = np.zeros((8, 8, 8))
    for x, w in zip(positions, weights, strict=True):
        along = [np.maximum(1 - np.abs((np.arange(8) - c + 4) % 8 - 4), 0) for c in x]
        whole += w * np.einsum("i,j,k->ijk", *along)
    header = about((8, 8, 8), (8.0,) * 3)
    mine = slice(mesh.rank, None, mesh.size)
    columns = {"position": positions[mine], "id": np.arange(200)[mine]}
    objects = Catalogue("halos", columns, header, mesh, 200, False)
    density = objects.density(8, weights=weights[mine]).numpy()
    np.testing.assert_allclose(density, whole / whole.mean(), rtol=1e-12, atol=1e-12)
    total = float(mesh.world.allreduce(tf.constant(weights[mine].sum())))
    noise = 512 * (weights**2).sum() / total**2
    np.testing.assert_allclose(objects.shot_noise(weights[mine]), noise, rtol=1e-13)


def test_spheres_that_a_block_does_not_hold_are_left_out(mesh):
    halos = found(mesh, made("one group"), linking_length=LINK / spacing(), overdensities=["200m"])
    assert halos.total == 1 and np.isnan(halos.mass_200m).all() and np.isfinite(halos.centre).all()
    small = found(mesh, made("random"), linking_length=LINK / spacing(), overdensities=["200m"],
                  minimum=3)  # fmt: skip
    assert (np.isnan(small.centre).all(axis=1) == (small.number <= 16)).all()


def test_a_link_that_is_too_short(mesh):
    space = Space((1e4,) * 3, mesh)
    with pytest.raises(ValueError, match="0.01 Mpc/h is too short for a box"):
        friends_of_friends(space, np.zeros((0, 3)), np.zeros(0, np.int64), 0.01)


def test_a_link_that_spans_a_block(mesh):
    positions = made("random")[:100]
    with pytest.raises(ValueError, match="a linking length of 1.* spans a rank's block.*it needs"):
        found(mesh, positions, (1.0, 1.0, 1000.0), linking_length=1.0)
