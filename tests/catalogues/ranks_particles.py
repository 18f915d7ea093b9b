"""Particles of other codes' snapshots, read by any number of ranks."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import tensorflow as tf
from ranks import shared_folder
from snapshots import OMEGA_M, SIDE, TIME, H, joined, points, write_snapshot

import flowpm_dist as fpm
from flowpm_dist.catalogues import particles as module
from flowpm_dist.io.snapshot import SnapshotError
from flowpm_dist.simulate.snapshot_results import write_volume

pytestmark = pytest.mark.ranks(1, 2, 4)


@pytest.fixture
def path(mesh, tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    if mesh.rank == 0:
        write_snapshot(folder / "snap.hdf5", points())
    mesh.barrier()
    return folder / "snap.hdf5"


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "SLAB", 64)


def painted(mesh, positions: np.ndarray, weights: np.ndarray | None, **options) -> np.ndarray:
    ours = slice(mesh.rank, None, mesh.size)
    box = fpm.Box((8, 8, 8), (SIDE,) * 3, mesh, tf.float64)
    weights = None if weights is None else weights[ours]
    return fpm.paint(positions[ours], box, weights, **options).numpy()


def test_density_by_mass_and_by_number(mesh, path, small_pieces):
    found, types = fpm.read_particles(path, mesh=mesh), points()
    assert (len(found), found.a) == (1700, TIME)
    np.testing.assert_allclose(found.box_size, [SIDE] * 3)
    x, mass = joined(types, "position"), joined(types, "mass")
    for scheme in ("cic", "pcs"):
        density = found.density(8, scheme=scheme, shift=0.5)
        expected = painted(mesh, x, mass, scheme=scheme, shift=0.5)
        np.testing.assert_allclose(density.numpy(), expected, atol=1e-12)
        assert density.window == scheme
    by_number = found.density(8, weights="number").numpy()
    np.testing.assert_allclose(by_number, painted(mesh, x, None), atol=1e-12)
    gas = fpm.read_particles(path, mesh=mesh, types=0).density(8).numpy()
    expected = painted(mesh, types[0]["position"], types[0]["mass"])
    np.testing.assert_allclose(gas, expected, atol=1e-12)
    noise = SIDE**3 * np.sum(mass**2) / np.sum(mass) ** 2
    np.testing.assert_allclose(found.shot_noise(), noise, rtol=1e-12)
    np.testing.assert_allclose(found.shot_noise("number"), SIDE**3 / 1700, rtol=1e-12)


@pytest.mark.parametrize("axis", ["x", "z"])
def test_redshift_space(mesh, path, small_pieces, axis):
    found, types = fpm.read_particles(path, mesh=mesh), points()
    expansion = np.sqrt(OMEGA_M / TIME**3 + 1 - OMEGA_M)
    seen = joined(types, "position").copy()
    number = "xyz".index(axis)
    seen[:, number] += joined(types, "velocity")[:, number] / (100 * TIME * expansion)
    density = found.density(8, redshift_space=axis).numpy()
    expected = painted(mesh, seen, joined(types, "mass"))
    np.testing.assert_allclose(density, expected, atol=1e-10)
    assert np.abs(density - found.density(8).numpy()).max() > 0.1


def test_each_particle_is_read_once(mesh, path, small_pieces):
    found, types = fpm.read_particles(path, mesh=mesh, types=[1]), points()
    ours = found.read("position", "velocity", "mass", "id")
    counts = mesh.gather_to_root(np.array([len(ours["id"])]))
    parts = {name: mesh.gather_to_root(values) for name, values in ours.items()}
    if counts is not None:
        assert max(counts) - min(counts) <= 1
        whole = {name: np.concatenate(part) for name, part in parts.items()}
        np.testing.assert_array_equal(whole["id"], np.arange(1000))
        for name in ("position", "velocity", "mass"):
            np.testing.assert_allclose(whole[name], types[1][name], rtol=1e-12)


def test_a_particle_nowhere_ends_the_work_on_all_ranks(mesh, path, tmp_path_factory):
    types = points()
    types[1]["position"][999, 2] = np.nan  # of the last rank
    if mesh.rank == 0:
        write_snapshot(path, types)
    mesh.barrier()
    found = fpm.read_particles(path, mesh=mesh)
    with pytest.raises(SnapshotError, match="position of particle 999 of type 1 is nan"):
        found.density(8)


def test_what_is_asked_for_must_be_there(mesh, path):
    with pytest.raises(SnapshotError, match="no particles of type 4; it has 700 of type 0"):
        fpm.read_particles(path, mesh=mesh, types=4)
    for types in ([1, 1], [], 1.0):
        with pytest.raises(ValueError, match="must be different whole numbers"):
            fpm.read_particles(path, mesh=mesh, types=types)
    found = fpm.read_particles(path, mesh=mesh)
    with pytest.raises(ValueError, match="weights 'volume': must be 'mass' or 'number'"):
        found.density(8, weights="volume")
    assert "700 of type 0, 1,000 of type 1" in repr(found)


def test_volumes_of_all_ranks(mesh, path):
    density = fpm.read_particles(path, mesh=mesh).density((8, 8, 4))
    write_volume(path.with_name("density.npy"), density)
    mesh.barrier()
    written = np.load(path.with_name("density.npy"))
    np.testing.assert_array_equal(written, density.numpy().astype(np.float32))
    assert written.dtype == np.float32
    assert [p.name for p in path.parent.iterdir() if p.name.endswith("partial")] == []


@pytest.mark.ranks(1)
def test_redshift_space_needs_omega_m(mesh, tmp_path):
    types = points()
    path = tmp_path / "snap.hdf5"
    write_snapshot(path, types)
    with h5py.File(path, "r+") as file:
        del file["Header"].attrs["Omega0"]
    found = fpm.read_particles(path)
    with pytest.raises(
        SnapshotError, match="no Omega_m, which redshift space needs: give .*cosmol"
    ):
        found.density(8, redshift_space="z")
    universe = fpm.Cosmology(Omega_m=OMEGA_M, Omega_b=0.05, h=H, n_s=0.96, sigma8=0.8)
    given = fpm.read_particles(path, cosmology=universe).density(8, redshift_space="z")
    write_snapshot(path, types)
    same = fpm.read_particles(path).density(8, redshift_space="z")
    np.testing.assert_allclose(given.numpy(), same.numpy(), atol=1e-12)


@pytest.mark.ranks(1)
def test_a_density_needs_no_unit_of_mass(mesh, tmp_path):
    path = tmp_path / "snap.hdf5"
    write_snapshot(path, points())
    expected = fpm.read_particles(path)
    with h5py.File(path, "r+") as file:
        del file["Header"].attrs["UnitMass_in_g"]
    found = fpm.read_particles(path)
    np.testing.assert_array_equal(found.density(8).numpy(), expected.density(8).numpy())
    assert found.shot_noise() == pytest.approx(expected.shot_noise())
    with pytest.raises(SnapshotError, match="no attribute UnitMass_in_g"):
        found.read("mass")


@pytest.mark.ranks(1)
def test_a_box_beyond_the_horizon_is_doubted(mesh, tmp_path):
    write_snapshot(tmp_path / "snap.hdf5", points(), UnitLength_in_cm=3.085678e24)
    with pytest.warns(UserWarning, match="box of 20000 Mpc/h, .*: are its lengths in kpc/h"):
        fpm.read_particles(tmp_path / "snap.hdf5")


@pytest.mark.ranks(1)
def test_redshift_space_of_a_curved_universe(mesh, tmp_path):
    write_snapshot(tmp_path / "snap.hdf5", points(), OmegaLambda=0.0)
    found = fpm.read_particles(tmp_path / "snap.hdf5", types=1)
    own = points()[1]
    seen = own["position"].copy()
    seen[:, 2] += own["velocity"][:, 2] / (100 * TIME * np.sqrt(0.3 / TIME**3 + 0.7 / TIME**2))
    expected = painted(mesh, seen, own["mass"])
    np.testing.assert_allclose(found.density(8, redshift_space="z").numpy(), expected, atol=1e-10)


@pytest.mark.ranks(1)
def test_particles_without_masses_count_as_one(mesh, tmp_path):
    types = {1: points()[1]}
    write_snapshot(tmp_path / "snap.hdf5", types)
    with h5py.File(tmp_path / "snap.hdf5", "r+") as file:
        del file["PartType1/Masses"]
    found = fpm.read_particles(tmp_path / "snap.hdf5")
    expected = painted(mesh, types[1]["position"], None)
    np.testing.assert_allclose(found.density(8).numpy(), expected, atol=1e-12)
    assert found.shot_noise() == pytest.approx(SIDE**3 / 1000)


@pytest.mark.ranks(1)
def test_tracers_without_positions_are_left_out(mesh, tmp_path):
    path = tmp_path / "snap.hdf5"
    write_snapshot(path, {**points(), 3: points(2)[1]})
    with h5py.File(path, "r+") as file:
        for name in ("Coordinates", "Velocities", "Masses"):
            del file[f"PartType3/{name}"]
    found = fpm.read_particles(path)
    assert found.types == (0, 1)
    write_snapshot(tmp_path / "same.hdf5", points())
    same = fpm.read_particles(tmp_path / "same.hdf5")
    np.testing.assert_array_equal(found.density(8).numpy(), same.density(8).numpy())
    with h5py.File(path, "r+") as file:
        del file["PartType1"]
    with pytest.raises(SnapshotError, match="PartType1 is missing; must hold 1000 particles"):
        fpm.read_particles(path)
