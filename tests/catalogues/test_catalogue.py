"""Catalogues in one process: their files, tables and order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from astropy.cosmology.units import littleh
from astropy.table import Table
from astropy.units import kg, kpc
from catalogues import SIZE, assert_same, made

from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.io.errors import UserError


@pytest.mark.parametrize("count", [50, 0])
@pytest.mark.parametrize("members", [True, False])
@pytest.mark.parametrize("format", ["hdf5", "bigfile"])
def test_files_return_what_was_written(tmp_path, format, members, count):
    halos = made(count, members, own=np.arange(count, dtype=np.float32))
    halos.write(tmp_path / "halos", format)
    assert_same(halos, Catalogue.read(tmp_path / "halos"))
    assert [path.name for path in tmp_path.iterdir()] == ["halos"]


@pytest.mark.parametrize("format", ["hdf5", "bigfile"])
def test_a_catalogue_is_replaced_only_on_request(tmp_path, format):
    path = tmp_path / "halos"
    made().write(path, format)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        made(7).write(path, format)
    made(7).write(path, format, overwrite=True)
    assert Catalogue.read(path).total == 7
    (tmp_path / "other").mkdir()
    (tmp_path / "notes").write_text("notes")
    for name in ("other", "notes"):
        with pytest.raises(UserError, match=f"{name} (is no catalogue|cannot be read)"):
            made().write(tmp_path / name, format, overwrite=True)
    other = {"hdf5": "bigfile", "bigfile": "hdf5"}[format]
    made(5).write(path, other, overwrite=True)
    assert Catalogue.read(path).total == 5 and (tmp_path / "notes").read_text() == "notes"


def test_names_that_other_codes_read(tmp_path):
    halos = made()
    halos.write(tmp_path / "halos.hdf5")
    table = Table.read(tmp_path / "halos.hdf5", path="data")
    np.testing.assert_array_equal(table["halo_id"], halos.id)
    np.testing.assert_array_equal(table["halo_y"], halos.position[:, 1])
    np.testing.assert_array_equal(table["halo_vz"], halos.velocity[:, 2])
    np.testing.assert_array_equal(table["halo_mass"], halos.mass)
    np.testing.assert_array_equal(table["halo_r200m"], halos.radius_200m)
    with h5py.File(tmp_path / "halos.hdf5") as file:
        assert file.attrs["redshift"] == 1 and (file.attrs["Lbox"] == SIZE).all()
        assert file.attrs["particle_mass"] == halos.header.mass * 1e10
    halos.write(tmp_path / "halos.bigfile", "bigfile")
    group = tmp_path / "halos.bigfile/LL-0.200"
    for name, column in {"MinID": "id", "Length": "number", "Position": "position"}.items():
        values = np.fromfile(group / name / "000000", halos[column].dtype)
        np.testing.assert_array_equal(values, halos[column].ravel())
    assert "ScalingFactor" in (tmp_path / "halos.bigfile/Header/attr-v2").read_text()


def test_tables_have_units_and_components(monkeypatch):
    halos = made()
    table = halos.to_table()
    np.testing.assert_allclose(table["position"].to_value(kpc / littleh), 1e3 * halos.position)
    np.testing.assert_allclose(table["mass"].to_value(kg / littleh), 1.98841e30 * halos.mass, 1e-5)
    assert (table["velocity"].to_value("km/s") == halos.velocity).all()
    assert (table["id"] == halos.id).all() and table.meta["a"] == 0.5
    stand_in = SimpleNamespace(DataFrame=lambda x: SimpleNamespace(columns=x, attrs={}))
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    frame = halos.to_pandas()
    assert (frame.columns["velocity_z"] == halos.velocity[:, 2]).all()
    assert (frame.columns["axis_directions_2_x"] == halos.axis_directions[:, 1, 0]).all()
    assert frame.attrs["units"]["velocity_z"] == "km/s"


def _without(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file.attrs["flowpm-dist"]


def _shorter(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        rows = file["data"][:-1]
        del file["data"]
        file["data"] = rows


def _outside(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        facts = json.loads(file.attrs["flowpm-dist"])
        facts["columns"]["mass"]["names"] = ["../mass"]
        file.attrs["flowpm-dist"] = json.dumps(facts)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without, "is no catalogue of flowpm-dist"),
        (_shorter, "data is damaged: must have 50 rows"),
        (_outside, r"columns.mass.names.0: String should match"),
        (lambda path: path.write_text("no HDF5"), "cannot be read"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_what_is_no_catalogue_is_named(tmp_path, damage, message):
    made().write(tmp_path / "halos.hdf5")
    damage(tmp_path / "halos.hdf5")
    with pytest.raises(UserError, match=f"halos.hdf5.*{message}"):
        Catalogue.read(tmp_path / "halos.hdf5")


@pytest.mark.parametrize(
    "column", [{"a/b": np.zeros(50)}, {"mass_": np.zeros(50) * 1j}, {"MinID": np.zeros(50)}]
)
def test_columns_that_files_cannot_have_are_named(tmp_path, column):
    with pytest.raises(ValueError, match="cannot be written: columns must hold real numbers"):
        made(**column).write(tmp_path / "halos", "bigfile")
