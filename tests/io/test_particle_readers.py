"""Particles of other codes, against what was written: to the last digit, or refused by name."""

from __future__ import annotations

import os
import re
import resource
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from foreign_snapshots import (
    BOX,
    KMS,
    KPC,
    MPC,
    PARTS,
    UNITS,
    A,
    H,
    big,
    check,
    gadget_binary,
    gadget_hdf5,
    particles,
    split,
)

from flowpm_dist.io import SnapshotError
from flowpm_dist.io.particle_readers import open_particles


@pytest.mark.parametrize("ids", ["u4", "u8"])
@pytest.mark.parametrize("real", ["f4", "f8"])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("order", "<>")
def test_gadget_binary(tmp_path, order, named, real, ids):
    """13 files of gas with masses and of dark matter whose mass is in the header."""
    written = {kind: particles(30, real, ids, kind) for kind in (0, 1, 4)}
    parts, table = split(written, PARTS), {1: 7.25}
    stem = gadget_binary(tmp_path / "snap_004", parts, order=order, named=named, table=table)
    for path in (stem, tmp_path, tmp_path / "snap_004.5"):
        found = open_particles(path, units=UNITS)
        assert (found.a, found.box_size, found.dtype) == (A, (BOX,) * 3, np.dtype(real))
        assert found.cosmology_facts == {"Omega_m": 0.3, "h": H}
    check(found, written, speed=np.sqrt(A), table=table)
    in_kpc = open_particles(stem, units={**UNITS, "UnitLength_in_cm": KPC})
    np.testing.assert_allclose(in_kpc.box_size, BOX / 1e3, rtol=1e-15)
    check(in_kpc, written, length=1e-3, speed=np.sqrt(A), table=table, exact=False)


def test_the_header_of_n_genic_has_no_high_words(tmp_path):
    """There may be anything in their place."""
    written = {1: particles(9)}
    found = open_particles(gadget_binary(tmp_path / "ics", [written], high=77), units=UNITS)
    check(found, written, speed=np.sqrt(A))


@pytest.mark.parametrize(
    "unit, words",
    [
        ("UnitLength_in_cm", "which is 3.085678e21 for kpc/h and 3.085678e24 for Mpc/h"),
        ("UnitVelocity_in_cm_per_s", "which is 1e5 for km/s"),
        ("UnitMass_in_g", "which is 1.989e43 for 1e10 solar masses/h"),
    ],
)
def test_a_unit_that_is_needed_is_asked_for(tmp_path, unit, words):
    path = gadget_binary(tmp_path / "ics", [{1: particles(4)}])
    units = {name: value for name, value in UNITS.items() if name != unit}
    message = rf'{path} has no attribute {unit}, .* give units={{"{unit}": ...}}, .*, {words}'
    with pytest.raises(SnapshotError, match=message):
        open_particles(path, units=units).read(1, 0, 4)
    if unit == "UnitMass_in_g":
        found = open_particles(path, units=units)
        assert set(found.read(1, 0, 4, ["position", "velocity"])) == {"position", "velocity"}


def damaged(path: Path, place: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(raw)


FIRST, COUNT = 4 + 256 + 4, 100
POSITIONS = COUNT * 12
DAMAGE = {
    "cut in the positions": (lambda p: os.truncate(p, 900), "has 900 bytes; must have 1472 or mo"),
    "cut in the header": (lambda p: os.truncate(p, 100), "has 100 bytes; must have 264 or more"),
    "cut in the ids": (lambda p: os.truncate(p, 3000), "has 3000 bytes; must have 3088 or more"),
    "length before": (
        lambda p: damaged(p, FIRST, b"\x07\0\0\0"),
        f"the record of its position has 7 bytes; must have {POSITIONS} or {2 * POSITIONS}",
    ),
    "length after": (
        lambda p: damaged(p, FIRST + 4 + POSITIONS, b"\x07\0\0\0"),
        f"the record of its position must begin and end with {POSITIONS}",
    ),
    "header's length": (lambda p: damaged(p, 260, b"\x07\0\0\0"), "of its header must begin and"),
    "many particles": (lambda p: damaged(p, 8, b"\xff" * 4), "record of its position has 1200 byt"),
    "time": (lambda p: damaged(p, 76, b"\xff" * 8), "attribute Time must be finite numbers"),
    "files": (lambda p: damaged(p, 4 + 124, b"\x02"), "1 files, and the snapshot has 2"),
    "box": (lambda p: damaged(p, 4 + 128, b"\0" * 8), "BoxSize must be above 0"),
    "total": (lambda p: damaged(p, 4 + 100, b"\x65"), "100 of 101 particles of type 1: files are"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_binary_file_is_named(tmp_path, name):
    damage, message = DAMAGE[name]
    path = gadget_binary(tmp_path / "snap", [{1: particles(COUNT)}], table={1: 1.0})
    damage(path)
    with pytest.raises(SnapshotError, match=message) as caught:
        open_particles(path, units=UNITS)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path):
    path = gadget_binary(tmp_path / "snap", [{1: particles(9)}], table={1: 1.0})
    found = open_particles(path, units=UNITS)
    os.truncate(path, 300)
    with pytest.raises(SnapshotError, match="snap is cut short: copy it again"):
        found.read(1, 0, 9)


def test_only_the_range_is_read(tmp_path):
    """A file of 3 GB with holes, with less memory than that."""
    count, path = 10**8, tmp_path / "snap"
    gadget_binary(path, [{1: particles(1)}], table={1: 1.0}, npart=np.array([0, count, 0, 0, 0, 0]),
                  total=np.array([0, count, 0, 0, 0, 0]))  # fmt: skip
    with path.open("r+b") as file:
        offset = FIRST
        for size in (12 * count, 12 * count, 4 * count):
            for place in (offset, offset + 4 + size):
                file.seek(place)
                file.write(np.array(size, "<u4").tobytes())
            offset += size + 8
        file.truncate(offset)
        file.seek(FIRST + 4 + 12 * (count - 2))
        file.write(np.arange(6, dtype="<f4").tobytes())
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, before[1]))
    try:
        found = open_particles(path, units=UNITS)
        read = found.read(1, count - 2, count)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    np.testing.assert_array_equal(read["position"], np.arange(6).reshape(2, 3))
    assert found.counts == {1: count}


GZIP = {"compression": "gzip", "chunks": True}


@pytest.mark.parametrize(("real", "storage"), [("f4", {}), ("f8", GZIP), (">f4", GZIP)])
def test_gadget_hdf5(tmp_path, real, storage):
    """13 files in kpc/h, as IllustrisTNG and CAMELS have, with all types; some files are empty."""
    written = {kind: particles(30, real, "u8", kind) for kind in (0, 1, 4, 5)}
    table = {1: 0.0625}
    units = {"UnitLength_in_cm": KPC, "BoxSize": BOX * 1e3}
    parts = split(written, PARTS)
    gadget_hdf5(tmp_path / "snap_033", parts, table=table, storage=storage, **units)
    for path in (tmp_path, tmp_path / "snap_033.0.hdf5", tmp_path / "snap_033"):
        found = open_particles(path)
        assert (found.a, found.dtype) == (A, np.dtype(real).newbyteorder("="))
        np.testing.assert_allclose(found.box_size, BOX, rtol=1e-15)
        assert found.cosmology_facts == {"Omega_m": 0.3, "Omega_b": 0.05, "h": H}
        assert found.header["OmegaLambda"] == 0.7
    check(found, written, length=1e-3, speed=np.sqrt(A), table=table, exact=False)


def test_attributes_may_be_arrays_of_one(tmp_path):
    """As monofonIC writes them, without units."""
    written = {1: particles(8)}
    one = {"Time": [A], "Redshift": [1 / A - 1], "BoxSize": [BOX], "NumFilesPerSnapshot": [1]}
    path = gadget_hdf5(tmp_path / "ics", [written], **one)
    with h5py.File(path, "r+") as file:
        for name in UNITS:
            del file["Header"].attrs[name]
    with pytest.raises(SnapshotError, match="has no attribute UnitLength_in_cm"):
        open_particles(path)
    check(open_particles(path, units=UNITS), written, speed=np.sqrt(A))


def test_values_that_are_missing_in_hdf5_are_named(tmp_path):
    """HDF5 would read zeros in their place."""
    path = gadget_hdf5(tmp_path / "snap", [{1: particles(100)}])
    with h5py.File(path, "r+") as file:
        del file["PartType1/Velocities"]
        file.create_dataset("PartType1/Velocities", (100, 3), "f4", chunks=(10, 3))[:60] = 1.0
    message = "PartType1/Velocities has 6 of 10 chunks: copy it again"
    with pytest.raises(SnapshotError, match=message):
        open_particles(path)


def parts_of_a_whole(folder: Path) -> Path:
    """A file whose positions are in others: 40 in chunks, 60 in one piece; a third has none."""
    whole = gadget_hdf5(folder / "whole", [{1: particles(100)}])
    layout = h5py.VirtualLayout((100, 3), "f4")
    for number, (low, high) in enumerate([(0, 40), (40, 100)]):
        with h5py.File(folder / f"part{number}.h5", "w") as file:
            chunks = (10, 3) if number == 0 else None
            file.create_dataset("x", data=np.ones((high - low, 3), "f4"), chunks=chunks)
        layout[low:high] = h5py.VirtualSource(f"part{number}.h5", "x", (high - low, 3))
    layout[100:100] = h5py.VirtualSource("part2.h5", "x", (0, 3))
    with h5py.File(whole, "r+") as file:
        del file["PartType1/Coordinates"]
        file.create_virtual_dataset("PartType1/Coordinates", layout)
    return whole


def rewritten(path: Path, name: str = "x", count: int = 40, filled: int = 40) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset(name, (count, 3), "f4", chunks=(10, 3))[:filled] = 1.0


def made_of_itself(path: Path) -> None:
    layout = h5py.VirtualLayout((40, 3), "f4")
    layout[:] = h5py.VirtualSource(path.name, "x", (40, 3))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)


@pytest.mark.parametrize(
    "damage, message",
    [
        (Path.unlink, "Coordinates has values in the file part0.h5, which is missing: copy it"),
        (lambda p: rewritten(p, "y"), "Coordinates has values in .*part0.h5:x, which is missing"),
        (lambda p: rewritten(p, filled=20), "part0.h5:x has 2 of 4 chunks: copy it again"),
        (lambda p: rewritten(p, count=30), "part0.h5:x, whose shape .30, 3. does not have them"),
        (made_of_itself, "part0.h5:x is virtual as all it is made of, 4 times or more"),
    ],
)
def test_parts_that_are_missing_of_a_virtual_file_are_named(tmp_path, damage, message):
    """HDF5 would read zeros in their place, and end the process for a set made of itself."""
    whole = parts_of_a_whole(tmp_path)
    np.testing.assert_array_equal(open_particles(whole).read(1, 0, 100)["position"], 1.0)
    damage(tmp_path / "part0.h5")
    with pytest.raises(SnapshotError, match=message):
        open_particles(whole)


def test_a_part_that_goes_after_its_file_was_opened_is_named(tmp_path):
    whole = parts_of_a_whole(tmp_path)
    found = open_particles(whole)
    (tmp_path / "part1.h5").unlink()
    with pytest.raises(SnapshotError, match="has values in the file part1.h5, which is missing"):
        found.read(1, 0, 100, ["position"])


def test_a_virtual_file_without_some_values_is_named(tmp_path):
    whole = parts_of_a_whole(tmp_path)
    with h5py.File(whole, "r+") as file:
        layout = h5py.VirtualLayout((100, 3), "f4")
        layout[:40] = h5py.VirtualSource("part0.h5", "x", (40, 3))
        del file["PartType1/Coordinates"]
        file.create_virtual_dataset("PartType1/Coordinates", layout)
    with pytest.raises(SnapshotError, match="Coordinates is virtual and has 120 of 300 values"):
        open_particles(whole)


def test_a_file_of_raw_values_that_is_cut_or_missing_is_named(tmp_path, monkeypatch):
    """HDF5 looks for it in the current folder."""
    monkeypatch.chdir(tmp_path)
    whole = gadget_hdf5(tmp_path / "whole", [{1: particles(100)}])
    with h5py.File(whole, "r+") as file:
        del file["PartType1/Coordinates"]
        pieces = [("raw", 100, 700), ("raw", 0, 500)]
        file.create_dataset("PartType1/Coordinates", (100, 3), "f4", external=pieces)[:] = 1.0
    assert open_particles(whole).counts == {1: 100}
    os.truncate("raw", 750)
    message = "Coordinates has values in the file raw of 750 bytes; it must have 800: copy it"
    with pytest.raises(SnapshotError, match=message):
        open_particles(whole)
    Path("raw").unlink()
    with pytest.raises(SnapshotError, match="values in the file raw, which is missing: copy"):
        open_particles(whole)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("Time", 0.5, "snap.1.hdf5 has Time = 0.5, and .*snap.0.hdf5 0.25: must be files of one"),
        ("BoxSize", 99.0, "snap.1.hdf5 has BoxSize = 99.0, and .*snap.0.hdf5 50.0: must be"),
        ("BoxSize", None, "snap.1.hdf5 has BoxSize = no value, and .*snap.0.hdf5 50.0: must be"),
        ("UnitLength_in_cm", KPC, "snap.1.hdf5 has UnitLength_in_cm = 3.085678e.21, and"),
        ("NumPart_ThisFile", None, "snap.1.hdf5 cannot be read: .*NumPart_ThisFile"),
    ],
)
def test_files_in_hdf5_have_the_same_header(tmp_path, name, value, message):
    gadget_hdf5(tmp_path / "snap", split({1: particles(8)}, [4, 4]))
    with h5py.File(tmp_path / "snap.1.hdf5", "r+") as file:
        file["Header"].attrs.pop(name) if value is None else file["Header"].attrs.modify(
            name, value
        )
    with pytest.raises(SnapshotError, match=message):
        open_particles(tmp_path)


def test_a_mass_is_of_the_file_that_gives_it(tmp_path):
    gadget_hdf5(tmp_path / "snap", split({1: particles(8)}, [4, 4]), table={1: 2.0})
    with h5py.File(tmp_path / "snap.1.hdf5", "r+") as file:
        del file["Header"].attrs["MassTable"]
    found = open_particles(tmp_path)
    np.testing.assert_array_equal(found.read(1, 0, 4, ["mass"])["mass"], 2.0)
    with pytest.raises(SnapshotError, match="snap.1.hdf5:PartType1 has no Masses; it has Coord"):
        found.read(1, 0, 5, ["mass"])


@pytest.mark.parametrize("write", [gadget_binary, gadget_hdf5])
def test_a_decimal_in_a_name_is_no_number_of_a_file(tmp_path, write):
    """If the file itself says that it is the only one."""
    end = ".hdf5" * (write is gadget_hdf5)
    written = {z: {1: particles(8, seed=z)} for z in (0, 25, 5)}
    for z, each in written.items():
        write(tmp_path / f"z0.{z}", [each])
    for z, each in written.items():
        check(open_particles(tmp_path / f"z0.{z}{end}", UNITS), each, speed=np.sqrt(A))
    for path in (tmp_path, tmp_path / "z0"):
        message = f"holds z0.0{end} and z0.25{end} and z0.5{end}: give the path of one"
        with pytest.raises(SnapshotError, match=message):
            open_particles(path, UNITS)
    (tmp_path / f"z0.25{end}").unlink()
    (tmp_path / f"z0.5{end}").rename(tmp_path / f"z0{end}")
    with pytest.raises(SnapshotError, match=f"holds z0 and z0.0{end}: give the path of one"):
        open_particles(tmp_path, UNITS)
    check(open_particles(tmp_path / f"z0{end}", UNITS), written[5], speed=np.sqrt(A))


def test_two_files_of_one_number_are_named(tmp_path):
    """Of three parts, the second one twice, instead of the third."""
    gadget_binary(tmp_path / "snap", split({1: particles(9)}, [3, 3, 3]))
    shutil.copy(tmp_path / "snap.1", tmp_path / "snap.01")
    (tmp_path / "snap.2").unlink()
    with pytest.raises(SnapshotError, match="snap.01 and .*snap.1 have the same number"):
        open_particles(tmp_path, UNITS)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"NumPart_Total": np.array([0, 2**31, 0, 0, 0, 0])}, "holds 4 of 2147483648 particles"),
        ({"NumPart_Total_HighWord": np.array([0, 9, 0, 0, 0, 0])}, "holds 4 of 38654705668 part"),
        ({"Redshift": 0.5}, "has Time = 0.25 and Redshift = 0.5; must have Time = 1 /"),
        ({"ComovingIntegrationOn": 0}, "has ComovingIntegrationOn = 0; must be comoving"),
    ],
)
def test_a_header_of_hdf5_that_does_not_fit_is_named(tmp_path, changed, message):
    with pytest.raises(SnapshotError, match=message):
        open_particles(gadget_hdf5(tmp_path / "snap", [{1: particles(4)}], **changed))


def test_a_quantity_that_is_missing_is_named(tmp_path):
    written = {1: particles(4)}
    del written[1]["mass"]
    found = open_particles(gadget_hdf5(tmp_path / "snap", [written]))
    with pytest.raises(SnapshotError, match="PartType1 has no Masses; it has Coordinates, Part"):
        found.read(1, 0, 4)
    assert len(found.read(1, 0, 4, ["position", "id"])["id"]) == 4
    with pytest.raises(SnapshotError, match="has 4 particles of type 1, none from 3 to 5"):
        found.read(1, 3, 5)
    with pytest.raises(SnapshotError, match="has 0 particles of type 2, none from 0 to 0"):
        found.read(2, 0, 0)
    with pytest.raises(ValueError, match="'density' is not one of 'position', 'velocity'"):
        found.read(1, 0, 4, ["density"])


def test_values_that_are_not_finite_are_as_in_the_file(tmp_path):
    """One rank alone must not raise an error for what it has read."""
    written = {1: particles(4)}
    written[1]["position"][2, 1] = np.nan
    found = open_particles(gadget_hdf5(tmp_path / "snap", [written]))
    np.testing.assert_array_equal(found.read(1, 0, 4)["position"], written[1]["position"])


@pytest.mark.parametrize("real", ["<f4", "<f8", ">f8"])
def test_bigfile(tmp_path, real):
    """All types, and blocks that are divided otherwise than each other, as by MP-Gadget."""
    written = {kind: particles(30, real, "u8", kind) for kind in (0, 1, 5)}
    files = {"position": 13, "velocity": 4, "mass": 2, "id": 40}
    found = open_particles(big(tmp_path / "PART_005", written, files))
    assert (found.a, found.box_size) == (A, (BOX,) * 3)
    assert found.cosmology_facts == {"Omega_m": 0.3, "h": H}
    check(found, written)
    del written[1]["mass"]
    table = [0, 2.5, 0, 0, 0, 0]
    one = open_particles(big(tmp_path / "fastpm", {1: written[1]}, files, MassTable=table))
    np.testing.assert_array_equal(one.read(1, 0, 3, ["mass"])["mass"], 2.5)


def test_blocks_of_bigfile_of_other_lengths_are_named(tmp_path):
    written = {1: particles(30, "<f4", "u8")}
    written[1]["velocity"] = written[1]["velocity"][:29]
    with pytest.raises(SnapshotError, match="different numbers of particles: .*Velocity 29"):
        open_particles(big(tmp_path / "s", written, dict.fromkeys(written[1], 1)))


def test_particles_of_bigfile_are_there_once(tmp_path):
    written = {1: particles(30, "<f4", "u8")}
    path = big(tmp_path / "s", written, dict.fromkeys(written[1], 2), TotNumPart=[0, 60, 0, 0, 0])
    shutil.copytree(path / "1", path / "01")
    with pytest.raises(SnapshotError, match="s cannot be read: folders 01 and 1 are both of type"):
        open_particles(path)
    shutil.rmtree(path / "01")
    for block in ("Position", "Velocity", "Mass", "ID"):
        header = path / "1" / block / "header"
        header.write_text(header.read_text().replace("000001:", "000000:"))
    with pytest.raises(SnapshotError, match="Position/header names the data file 000000 twice"):
        open_particles(path)


def test_a_path_has_one_snapshot(tmp_path):
    with pytest.raises(SnapshotError, match="nothing: there is no such file or folder"):
        open_particles(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("256 particles")
    with pytest.raises(SnapshotError, match="must be bigfile, HDF5 of SWIFT, HDF5 of Gadget or"):
        open_particles(tmp_path)
    written = {1: particles(8)}
    gadget_binary(tmp_path / "snap_003", split(written, [5, 3]))
    check(open_particles(tmp_path, units=UNITS), written, speed=np.sqrt(A))
    gadget_hdf5(tmp_path / "snap_004", [written])
    with pytest.raises(SnapshotError, match="holds snap_003 and snap_004: give the path of one"):
        open_particles(tmp_path)
    check(open_particles(tmp_path / "snap_004.hdf5"), written, speed=np.sqrt(A))
    check(open_particles(tmp_path / "snap_003", UNITS), written, speed=np.sqrt(A))
    (tmp_path / "snap_003.1").unlink()
    with pytest.raises(SnapshotError, match="1 files, and the snapshot has 2"):
        open_particles(tmp_path / "snap_003", UNITS)


def test_files_of_two_snapshots_are_named(tmp_path):
    written = {1: particles(8)}
    gadget_binary(tmp_path / "snap", split(written, [5, 3]))
    gadget_binary(tmp_path / "other", split(written, [5, 3]), time=0.5, redshift=1.0)
    shutil.move(tmp_path / "other.1", tmp_path / "snap.1")
    (tmp_path / "other.0").unlink()
    with pytest.raises(SnapshotError, match="snap.1 has Time = 0.5, and .*snap.0 0.25: must be"):
        open_particles(tmp_path, UNITS)


def test_ten_files_and_more_are_in_the_order_of_their_numbers(tmp_path):
    """And not in the order of their names."""
    written = {1: particles(30)}
    gadget_binary(tmp_path / "snap", split(written, PARTS))
    found = open_particles(tmp_path, {**UNITS, "UnitVelocity_in_cm_per_s": KMS / 2})
    np.testing.assert_array_equal(found.read(1, 0, 30, ["id"])["id"], written[1]["id"])
    assert MPC == UNITS["UnitLength_in_cm"]
