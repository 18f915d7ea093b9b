"""Halos of the particles on a light cone, flat and full, against scipy on all particles."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import shared_folder
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

import flowpm_dist as fpm
from flowpm_dist.catalogues.light_cone import light_cone_halos
from flowpm_dist.io import read_light_cone
from flowpm_dist.observables.light_cone import FlatField, FullSky, LightCone

pytestmark = pytest.mark.ranks(1, 4)

COSMOLOGY = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.677, n_s=0.965, sigma8=0.81)
SKIES = {
    "flat": FlatField(z_max=0.1, field_of_view=8.0, pixels=8),
    "full": FullSky(z_max=0.02, nside=8, observer=(30.0, 30.0, 30.0)),
}
LINK, MINIMUM = 0.6, 5


@pytest.fixture(scope="module", params=SKIES)
def cone(request, tmp_path_factory):
    """The kind of sky, and the folder of its particles."""
    folder = shared_folder(tmp_path_factory) / request.param
    steps = fpm.scale_factor_steps(0.2, 1.0, 4)
    from ranks import SHAPES, SIZE, process_mesh

    mesh = process_mesh(SHAPES[SIZE][0])
    sim = fpm.Simulation(COSMOLOGY, 16, 64.0, steps, mesh=mesh, precision="float64")
    LightCone(SKIES[request.param]).particles(sim, folder, seed=3)
    return request.param, folder


def groups_of(positions: np.ndarray, link: float) -> list[np.ndarray]:
    pairs = cKDTree(positions).query_pairs(link, output_type="ndarray")
    graph = coo_array((np.ones(len(pairs)), pairs.T), (len(positions),) * 2)
    _, label = connected_components(graph, directed=False)
    return [np.flatnonzero(label == n) for n in np.flatnonzero(np.bincount(label) >= MINIMUM)]


def expected_edge(kind: str, x: np.ndarray, link: float) -> bool:
    """Whether a member of a halo is within a link of where particles end, by geometry."""
    theory = fpm.Theory(COSMOLOGY)
    end = float(theory.distances.comoving(1 / (1 + SKIES[kind].z_max)))
    if kind == "full":
        return bool((np.linalg.norm(x, axis=1) > end - link).any())
    half = np.deg2rad(4.0) * x[:, 2:]
    seams = [np.abs(x[:, 2] - 64.0 * n) < link for n in range(1, 8)]
    sides = (np.abs(x[:, :2]) > half - link).any(axis=1)
    return bool((sides | (x[:, 2] > end - link) | np.any(seams, axis=0)).any())


@pytest.mark.every_split
def test_halos_on_the_sky(cone, mesh):
    kind, folder = cone
    halos = light_cone_halos(folder, mesh=mesh, linking_length=LINK, minimum=MINIMUM, whole=True)
    particles, _ = read_light_cone(folder)
    x, v = particles["Coordinates"], particles["Velocities"]
    groups = groups_of(x, LINK * 4.0)
    assert len(groups) > 5
    centres = np.array([x[group].mean(axis=0) for group in groups])
    at = [int(np.linalg.norm(halos.position - centre, axis=1).argmin()) for centre in centres]
    assert sorted(at) == list(range(len(halos)))
    np.testing.assert_allclose(halos.position[at], centres, atol=1e-9)
    assert (halos.number[at] == [len(group) for group in groups]).all()
    assert (halos.id[at] == [group[0] for group in groups]).all()  # rows of the files
    parts = [read_light_cone(folder, part=(n, 2))[0]["Coordinates"] for n in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts), x)
    edges = [expected_edge(kind, x[group], LINK * 4.0) for group in groups]
    assert (halos.edge[at] == edges).all()
    assert 0 < sum(edges) < len(edges)
    velocity = np.array([v[group].mean(axis=0) for group in groups])
    np.testing.assert_allclose(halos.velocity[at], velocity, atol=1e-9)
    distance = np.linalg.norm(centres, axis=1) if kind == "full" else centres[:, 2]
    towards = centres / distance[:, np.newaxis] if kind == "full" else np.array([[0.0, 0.0, 1.0]])
    a = fpm.Theory(COSMOLOGY).distances.scale_factor(distance).numpy()
    redshift = (1 + (velocity * towards).sum(axis=1) / 299792.458) / a - 1
    np.testing.assert_allclose(halos.redshift[at], redshift, atol=1e-12)
    if kind == "full":
        np.testing.assert_allclose(halos.direction[at], towards, atol=1e-12)
    else:
        angle = np.rad2deg(centres[:, :2] / distance[:, np.newaxis])
        np.testing.assert_allclose(halos.angle[at], angle, atol=1e-9)


def test_what_a_light_cone_has_not(cone, mesh):
    with pytest.raises(ValueError, match="a light cone has no one time"):
        light_cone_halos(cone[1], mesh=mesh, overdensities=["200m"])
