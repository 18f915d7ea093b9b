"""Catalogues in files: what is written is read back, on other ranks, and other files are named."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from ranks import RANK, SIZE, process_mesh, shared_folder

from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import UnreadableError, WriteError
from meshimpl.process_mesh import ProcessMesh

pytestmark = pytest.mark.ranks(1, 2)

BOX, COUNT = 20.0, 37


def catalogue(mesh: ProcessMesh) -> Catalogue:
    """A catalogue of which each rank has the objects in its slab."""
    rng = np.random.default_rng(1)
    number = rng.integers(2, 9, COUNT)
    columns = {
        "id": rng.permutation(COUNT) + 2**40,
        "number": number,
        "mass": number * 1e12,
        "position": rng.random((COUNT, 3)) * BOX,
        "velocity": rng.normal(size=(COUNT, 3)).astype(np.float32),
        "axis_directions": rng.normal(size=(COUNT, 3, 3)),
        "edge": rng.random(COUNT) < 0.5,
    }
    cosmology = {"Omega_m": 0.3, "Omega_b": 0.05, "h": 0.7, "n_s": 0.96, "sigma8": 0.8}
    about = {"a": 0.5, "grid": [8] * 3, "box_size": [BOX] * 3, "cosmology": cosmology}
    members = np.arange(number.sum())
    whole = Catalogue("halos", columns, {**about, "seed": None}, mesh, COUNT, True, members)
    mine = whole.of((columns["position"][:, 0] * SIZE / BOX).astype(int) == RANK)
    parted = Catalogue("halos", mine.columns, whole.about, mesh, COUNT, False, mine.members)
    return parted.sorted()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shared_folder(tmp_path_factory)


def assert_same(found: Catalogue, expected: Catalogue) -> None:
    assert (found.kind, found.total, found.about) == ("halos", COUNT, expected.about)
    for name, values in expected.columns.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
        assert found[name].dtype == values.dtype or name == "edge"
    np.testing.assert_array_equal(found.members, expected.members)


@pytest.mark.parametrize("format", ["hdf5", "bigfile"])
def test_a_catalogue_is_read_back(folder, format):
    mesh = process_mesh(f"row:{SIZE}")
    halos = catalogue(mesh)
    path = halos.write(folder / f"halos.{format}", format)
    assert_same(Catalogue.read(path, mesh=mesh).sorted(), halos)
    with pytest.raises(FileExistsError, match="give overwrite=True"):
        halos.write(path, format)
    halos.whole().write(path, format, overwrite=True)
    assert_same(Catalogue.read(path, mesh=mesh).whole(), halos.whole())
    if RANK == 0 and format == "hdf5":
        with h5py.File(path) as file:
            assert {"ID", "Length", "Mass", "Position", "Velocity"} < {*file}


@pytest.mark.ranks(1)
def test_files_that_are_not_whole_catalogues_are_named(tmp_path):
    halos = catalogue(process_mesh("row:1"))
    with pytest.raises(UserError, match="there is no such catalogue"):
        Catalogue.read(tmp_path / "none")
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["Position"] = np.zeros((3, 3))
    with pytest.raises(UserError, match="is not a catalogue of this package"):
        Catalogue.read(tmp_path / "other.hdf5")
    path = halos.write(tmp_path / "short.hdf5")
    with h5py.File(path, "r+") as file:
        del file["Mass"]
        file["Mass"] = np.zeros(COUNT - 1)
    with pytest.raises(UnreadableError, match=r"short.hdf5:Mass: shape \[36\]; must be \[37\]"):
        Catalogue.read(path)
    big = halos.write(tmp_path / "big", "bigfile")
    data = big / "Mass" / "000000"
    data.write_bytes(data.read_bytes()[:-8])
    with pytest.raises(UnreadableError, match="Mass/000000 has 288 bytes; must have 296"):
        Catalogue.read(big)
    about = json.loads((big / "catalogue.json").read_text())
    (big / "catalogue.json").write_text(json.dumps({**about, "rows": -1}))
    with pytest.raises(UnreadableError, match="the attributes are damaged: key rows"):
        Catalogue.read(big)
    (big / "catalogue.json").unlink()
    with pytest.raises(UserError, match="is not a complete catalogue"):
        Catalogue.read(big)


@pytest.mark.ranks(1)
def test_a_full_disk_is_named(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1))
    with pytest.raises(WriteError, match="the disk is full"):
        catalogue(process_mesh("row:1")).write(tmp_path / "halos.hdf5")


@pytest.mark.ranks(1)
def test_columns_and_members_of_a_catalogue():
    halos = catalogue(process_mesh("row:1"))
    assert halos.mass is halos["mass"]
    with pytest.raises(KeyError, match="the halos have no 'host'; they have id, number"):
        halos["host"]
    with pytest.raises(AttributeError, match="has no 'host'"):
        halos.host  # noqa: B018
    some = halos.of(halos.number > 4)
    assert some.total == len(some) == (halos.number > 4).sum()
    for row, name in enumerate(some.id):
        other = int(np.flatnonzero(halos.id == name)[0])
        np.testing.assert_array_equal(some.members_of(row), halos.members_of(other))
    with pytest.raises(ValueError, match="find its halos with members=True"):
        some.with_columns(some.columns).members_of(0)
    data = halos.labelled()
    assert data["position"].dimensions == ("halo", "axis")
    assert data["mass"].units == "Msun/h"
