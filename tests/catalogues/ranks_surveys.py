"""Multipoles of surveys on any number of ranks, against sums over cells and modes one by one."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from astropy.coordinates import SkyCoord
from numpy_modes import GRID, SIZE, Modes
from ranks import shared_folder

import flowpm_dist as fpm
from flowpm_dist import SurveyCatalogue, survey_multipoles
from flowpm_dist.io.errors import UserError
from flowpm_dist.particle_mesh.scattered import paint_points
from meshimpl.engine import CollectiveError

pytestmark = pytest.mark.ranks(1, 2, 4)
ORDERS = (0, 2, 4)
CORNER = np.array([70.0, -20.0, 15.0])
CENTER = CORNER + np.array(SIZE) / 2


def points(seed, count, size=SIZE, corner=CORNER):
    """Places in a box, with weights and densities."""
    rng = np.random.default_rng(seed)
    places = rng.uniform(0, 1, (count, 3)) * size + corner
    return places, rng.uniform(0.5, 1.5, count), rng.uniform(1e-4, 1e-3, count)


def dealt(mesh, places, weights=None, density=None):
    """The catalogue of points, some on each rank."""
    mine = slice(mesh.rank, None, mesh.size)
    others = (None if x is None else x[mine] for x in (weights, density))
    return SurveyCatalogue(places[mine], *others, mesh)


def cic(cells, grid, weights):
    """Cloud-in-cell sums of weights at places in units of cells."""
    sums, low = np.zeros(grid), np.floor(cells).astype(int)
    for corner in np.ndindex(2, 2, 2):
        share = np.prod(1 - np.abs(cells - low - corner), axis=1) * weights
        np.add.at(sums, tuple(((low + corner) % grid).T), share)
    return sums


def means_of_sums(field, spectrum, modes, corner):
    """(2 l + 1) Re F_0* F_l, with F_l(k) = sum_x F(x) L_l(k.x) exp(-i k x), in bins [l, bin]."""
    x, y, z = GRID
    n = np.meshgrid(
        np.fft.fftfreq(x, 1 / x), np.fft.fftfreq(y, 1 / y), np.arange(z // 2 + 1), indexing="ij"
    )
    k = np.stack([2 * np.pi / s * m.ravel() for s, m in zip(SIZE, n, strict=True)], axis=1)
    sites = np.stack([i.ravel() for i in np.indices(GRID)], axis=1) * np.array(SIZE) / GRID
    wave = np.exp(-1j * k @ sites.T) * field.ravel()
    length = np.linalg.norm(k, axis=1)
    direction = k / np.where(length > 0, length, 1)[:, None]
    sight = (sites + corner) / np.linalg.norm(sites + corner, axis=1)[:, None]
    mu = direction @ sight.T
    rows = []
    for order in ORDERS:
        poles = (wave * np.polynomial.legendre.Legendre.basis(order)(mu)).sum(axis=1)
        first = spectrum if order == 0 else poles.reshape(modes.k.shape)
        rows.append((2 * order + 1) * modes.means((spectrum.conj() * first).real / modes.window**2))
    return np.array(rows)


def expected(data, randoms, weights):
    """Multipoles, normalisation, shot noise and alpha by numpy."""
    modes, cell = Modes(), np.array(SIZE) / GRID
    alpha = weights[0].sum() / weights[1].sum()
    fields = [
        cic((data - CORNER) / cell + shift, GRID, weights[0])
        - alpha * cic((randoms - CORNER) / cell + shift, GRID, weights[1])
        for shift in (0.0, 0.5)
    ]
    spectrum = modes.spectrum(*fields)
    field = np.fft.irfftn(spectrum, GRID, axes=(0, 1, 2))
    both = np.concatenate([data, randoms])
    middle = (both.min(axis=0) + both.max(axis=0)) / 2
    cells = [(x - middle) / 10 + 16 for x in (data, randoms)]
    n = [cic(c, (32, 32, 32), w) for c, w in zip(cells, weights, strict=True)]
    normalisation = alpha * (n[0] * n[1]).sum() / 10**3
    noise = ((weights[0] ** 2).sum() + alpha**2 * (weights[1] ** 2).sum()) / normalisation
    power = means_of_sums(field, spectrum, modes, CORNER) / normalisation
    power[0] -= noise
    return power, normalisation, noise, alpha


@pytest.mark.every_split
def test_sums_over_cells_and_modes(mesh):
    (data, w, n), (randoms, v, m) = points(1, 300), points(2, 2000)
    found = survey_multipoles(
        dealt(mesh, data, w, n),
        dealt(mesh, randoms, v, m),
        GRID,
        P0=2000.0,
        box_size=SIZE,
        center=CENTER,
    )
    weights = w / (1 + 2000 * n), v / (1 + 2000 * m)
    power, normalisation, noise, alpha = expected(data, randoms, weights)
    np.testing.assert_allclose(found.power, power, rtol=0, atol=1e-10 * np.abs(power).max())
    np.testing.assert_allclose(
        [found.normalisation, found.shot_noise, found.alpha],
        [normalisation, noise, alpha],
        rtol=1e-12,
    )
    modes = Modes()
    np.testing.assert_allclose(found.k, modes.means(modes.k), rtol=1e-12)
    assert found.orders == ORDERS and found.box_size == SIZE
    np.testing.assert_allclose(found.center, CENTER, rtol=1e-12)


@pytest.mark.parametrize("scheme", ["cic", "pcs"])
def test_far_away_the_line_of_sight_is_an_axis(mesh, scheme):
    """With randoms on a lattice the estimator measures a periodic box along z."""
    corner = np.array([0.0, 0.0, 1e8])
    data, _, _ = points(3, 400, corner=corner)
    lattice = np.stack(np.indices(GRID), axis=-1).reshape(-1, 3) * np.array(SIZE) / GRID + corner
    bins = [0.1, 0.3, 0.5, 0.7]
    found = survey_multipoles(
        dealt(mesh, data),
        dealt(mesh, lattice),
        GRID,
        box_size=SIZE,
        center=corner + np.array(SIZE) / 2,
        bins=bins,
        scheme=scheme,
        interlaced=False,
    )
    box = fpm.Box(GRID, SIZE, mesh, tf.float64)
    painted = paint_points(box, dealt(mesh, data).positions - corner, scheme=scheme)
    density = fpm.Field(tf.constant(painted), box, scheme)
    plain = fpm.multipoles(density.delta(), axis="z", bins=bins)
    whole = found.power + np.array([[found.shot_noise], [0], [0]])
    power = whole * found.normalisation * box.volume / 400**2
    # Angles differ from the axis by 1e-6.
    np.testing.assert_allclose(power, plain.power, rtol=0, atol=1e-5 * plain.power[0].max())
    np.testing.assert_array_equal(found.modes, plain.modes)


def test_densities_by_area_are_those_of_shells(mesh):
    (data, w, _), (randoms, v, _) = points(1, 300), points(2, 2000)
    box = dict(grid=GRID, P0=2000.0, box_size=SIZE, center=CENTER, orders=[0])
    found = survey_multipoles(dealt(mesh, data, w), dealt(mesh, randoms, v), area=500.0, **box)
    distances = [np.linalg.norm(x, axis=1) for x in (data, randoms)]
    counts, edges = np.histogram(distances[1], 50, weights=v)
    volumes = 500 * np.radians(1) ** 2 / 3 * np.diff(edges**3)
    shells = (edges[1:] + edges[:-1]) / 2, w.sum() / v.sum() * counts / volumes
    n, m = (np.interp(distance, *shells) for distance in distances)
    known = survey_multipoles(dealt(mesh, data, w, n), dealt(mesh, randoms, v, m), **box)
    np.testing.assert_allclose(found.power, known.power, rtol=1e-9)
    assert found.shot_noise == pytest.approx(known.shot_noise, rel=1e-12)


def test_a_box_without_padding_is_that_of_the_objects(mesh):
    """Those that rounding leaves outside are at the opposite face, as in a periodic box."""
    (data, w, _), (randoms, v, _) = points(2, 300), points(52, 2000)
    both = np.concatenate([data, randoms])
    data, randoms = dealt(mesh, data, w), dealt(mesh, randoms, v)
    found = survey_multipoles(data, randoms, GRID, padding=0)
    size = np.ptp(both, axis=0) * (1 + 1e-12)
    wider = survey_multipoles(data, randoms, GRID, box_size=size, bins=[0.1, 0.3, 0.5])
    same = survey_multipoles(data, randoms, GRID, padding=0, bins=[0.1, 0.3, 0.5])
    np.testing.assert_allclose(same.power, wider.power, rtol=0, atol=1e-7 * wider.power[0].max())
    np.testing.assert_array_equal(found.box_size, np.ptp(both, axis=0))


def test_a_file_of_any_kind_on_any_ranks(mesh, tmp_path_factory):
    """All rows are read once, and give what arrays give."""
    cosmology = fpm.Cosmology(Omega_m=0.3, Omega_b=0.05, h=0.7, n_s=0.96, sigma8=0.8)
    rng = np.random.default_rng(5)
    table = np.stack(
        [rng.uniform(0, 360, 101), rng.uniform(-90, 90, 101), *rng.uniform(0.1, 0.9, (3, 101))], 1
    )
    path = shared_folder(tmp_path_factory) / "galaxies.csv"
    if mesh.rank == 0:
        np.savetxt(path, table, "%.17g", ",", header="RA,DEC,Z,WEIGHT,W2", comments="")
    mesh.barrier()
    found = fpm.read_galaxies(path, cosmology, mesh, weights=["WEIGHT", "W2"])
    assert found.total == 101
    ra, dec, z, w, w2 = table.T
    distance = np.asarray(fpm.Theory(cosmology).distances.comoving(1 / (1 + z)))
    sky = SkyCoord(ra, dec, distance, unit=("deg", "deg", "Mpc"))
    whole = np.stack([*sky.cartesian.xyz.value, w * w2], axis=1)
    mine = np.concatenate([found.positions, found.weights[:, None]], axis=1)
    parts = mesh.gather_to_root(mine)
    if mesh.rank == 0:
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-12, atol=1e-9)
    if mesh.rank == 0:
        table[99, 1] = np.nan
        np.savetxt(path, table, "%.17g", ",", header="RA,DEC,Z,WEIGHT,W2", comments="")
    mesh.barrier()
    with pytest.raises(UserError, match=r"galaxies.csv.*: DEC nan of row .* is not finite"):
        fpm.read_galaxies(path, cosmology, mesh)


def test_arrays_that_are_wrong_on_one_rank_are_refused_on_all(mesh):
    places, weights, _ = points(1, 40)
    weights[3] = -1.0
    with pytest.raises(ValueError, match=r"weights -1 of row \d+ must be at least 0"):
        dealt(mesh, places, weights)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["weights", "density"])
def test_arrays_of_some_ranks_alone_are_refused_on_all(mesh, name):
    places, weights, _ = points(1, 40)
    given = {name: weights[mesh.rank :: mesh.size]} if mesh.rank == 0 else {}
    with pytest.raises(ValueError, match=f"{name} is given on some ranks alone: give it on all"):
        SurveyCatalogue(places[mesh.rank :: mesh.size], **given, mesh=mesh)


@pytest.mark.ranks(2, 4)
def test_options_that_differ_between_ranks_are_named(mesh):
    (data, w, n), (randoms, v, m) = points(1, 300), points(2, 2000)
    catalogues = dealt(mesh, data, w, n), dealt(mesh, randoms, v, m)
    for given in (dict(P0=2000.0 * mesh.rank), dict(area=None if mesh.rank else 500.0)):
        (name,) = given
        with pytest.raises(CollectiveError, match=f"{name} differs between ranks"):
            survey_multipoles(*catalogues, GRID, **given)
