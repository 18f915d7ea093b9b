"""Particles of SWIFT, against what was written: to the last digit, or refused by name."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from foreign_snapshots import MASS, PARTS, A, H, check, particles, split, swift

from flowpm_dist.io import SnapshotError
from flowpm_dist.io.particle_readers import open_particles


@pytest.mark.parametrize("files", [1, 13])
def test_swift(tmp_path, files):
    """Lengths without h in kpc; gas, dark matter and black holes."""
    written = {kind: particles(30, "f8", "u8", kind) for kind in (0, 1, 5, 6)}
    parts = split(written, PARTS if files > 1 else [30])
    swift(tmp_path / "flamingo_0077", parts, length=3.08567758149e21)
    found = open_particles(tmp_path)
    assert found.a == A and found.dtype == np.float64
    np.testing.assert_allclose(found.box_size, 0.999 * H, rtol=1e-15)
    facts = {"Omega_m": 0.3, "Omega_b": 0.05, "h": H, "w0": -1.0}
    assert found.cosmology_facts == facts
    check(found, written, length=1e-3 * H, mass=H, exact=False)


def test_powers_of_a_and_h_of_swift(tmp_path):
    """Physical positions, velocities and masses that are not as SWIFT writes them by default."""
    written = {1: particles(9, "f8")}
    about = {
        "position": {"a-scale exponent": 1.0, "h-scale exponent": -1.0,
                     "Value stored as physical": 1},
        "velocity": {"a-scale exponent": 0.5, "h-scale exponent": 0.0},
        "mass": {"a-scale exponent": 0.0, "h-scale exponent": -1.0},
    }  # fmt: skip
    path = swift(tmp_path / "snap", [written], about=about)
    check(open_particles(path), written, length=1 / A, speed=np.sqrt(A), mass=1.0, exact=False)
    conversion = "Conversion factor to {}CGS ({}including cosmological corrections)"
    with h5py.File(path, "r+") as file:  # as swiftsimio 12.4 writes masses
        file["PartType1/Masses"].attrs.update({
            "a-scale exponent": 1.0, conversion.format("", "not "): [MASS],
            conversion.format("physical ", ""): [MASS],
        })  # fmt: skip
        file["Header"].attrs["NumPart_Total_HighWord"] = np.zeros(6, "u4")
    check(open_particles(path), written, length=1 / A, speed=np.sqrt(A), mass=1.0, exact=False)
    with h5py.File(path, "r+") as file:
        file["PartType1/Coordinates"].attrs["a-scale exponent"] = np.nan
    with pytest.raises(SnapshotError, match="attribute a-scale exponent must be finite"):
        open_particles(path)


def test_types_of_swift_have_the_same_powers(tmp_path):
    path = swift(tmp_path / "snap", [{0: particles(9), 1: particles(9)}])
    with h5py.File(path, "r+") as file:
        file["PartType1/Velocities"].attrs["a-scale exponent"] = 0.5
    with pytest.raises(SnapshotError, match="types of particles have their velocity times differ"):
        open_particles(path)


def test_neutrinos_of_swift(tmp_path):
    """Its Omega_m is cold dark matter and baryons; there is a mass of each species."""
    path = swift(tmp_path / "snap", [{6: particles(9)}])
    with h5py.File(path, "r+") as file:
        neutrinos = {"Omega_nu_0": [0.002], "M_nu_eV": [0.01, 0.05], "deg_nu": [2.0, 1.0]}
        file["Cosmology"].attrs.update(neutrinos)
    facts = open_particles(path).cosmology_facts
    assert facts["m_nu"] == pytest.approx(0.07) and facts["Omega_m"] == pytest.approx(0.302)


def test_initial_conditions_of_swift_have_no_h(tmp_path):
    path = swift(tmp_path / "ics", [{1: particles(9)}], h=None)
    with pytest.raises(SnapshotError, match='no attribute HubbleParam, .*units={"HubbleParam"'):
        open_particles(path)
    assert open_particles(path, units={"HubbleParam": 0.5}).box_size == (999 * 0.5,) * 3
    with pytest.raises(SnapshotError, match="'UnitMass_in_g' must be one of HubbleParam"):
        open_particles(path, units={"UnitMass_in_g": MASS})


def test_a_virtual_file_of_swift_is_read_or_its_parts(tmp_path):
    """It presents the other files as one."""
    written = {1: particles(30, "f8", "u8")}
    swift(tmp_path / "snap", split(written, [10, 20]))
    whole = swift(tmp_path / "snap", [written])
    with h5py.File(whole, "r+") as file:
        group = file["PartType1"]
        for name in list(group):
            shape = group[name].shape
            layout = h5py.VirtualLayout(shape, group[name].dtype)
            for number, (low, high) in enumerate([(0, 10), (10, 30)]):
                source = f"snap.{number}.hdf5"
                layout[low:high] = h5py.VirtualSource(
                    source, f"PartType1/{name}", (high - low, *shape[1:])
                )
            del group[name]
            group.create_virtual_dataset(name, layout)
    assert len(open_particles(whole).parts) == 1
    for path in (whole, tmp_path / "snap.1.hdf5", tmp_path):
        check(open_particles(path), written, length=H, mass=H, exact=False)


def test_files_of_swift_have_the_same_header(tmp_path):
    for group, name, value, message in [
        (
            "Header",
            "Scale-factor",
            0.5,
            "snap.1.hdf5 has Scale-factor = 0.5, and .*0.hdf5 0.25: mu",
        ),
        ("Header", "BoxSize", None, "snap.1.hdf5 has BoxSize = no value, and .* 999.0, 999.0, 99"),
        ("Cosmology", "h", [0.5], "snap.1.hdf5 has h = 0.5, and .*snap.0.hdf5 0.7: must be files"),
    ]:
        swift(tmp_path / "snap", split({1: particles(8)}, [4, 4]))
        with h5py.File(tmp_path / "snap.1.hdf5", "r+") as file:
            del file[group].attrs[name]
            if value is not None:
                file[group].attrs[name] = value
        with pytest.raises(SnapshotError, match=message):
            open_particles(tmp_path)


@pytest.mark.parametrize("name", ["U_L", "U_M", "U_t"])
def test_a_unit_of_swift_is_above_zero(tmp_path, name):
    path = swift(tmp_path / "snap", [{1: particles(4)}])
    with h5py.File(path, "r+") as file:
        key = next(key for key in file["Units"].attrs if name in key)
        file["Units"].attrs[key] = 0.0
    with pytest.raises(SnapshotError, match=rf"snap.hdf5 has Unit .*{name}\) = 0; must be above 0"):
        open_particles(path).read(1, 0, 4)
