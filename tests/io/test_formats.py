"""Snapshots for other codes: particles as h5py and the package bigfile find them, and convert."""

import functools
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import tensorflow as tf
import zarr
from astropy import units as u
from commands import COMMAND, ROOT, flowpm, flowpm_here, plain
from full_disk import run_on_disk_of
from reading import attributes_of, block_of
from run_files import RUN

import flowpm_dist as fpm
from flowpm_dist.io import SnapshotError, bigfile, load_snapshot, other_codes, particles
from flowpm_dist.io.conversion import check_conversion, convert_snapshot
from flowpm_dist.io.files import snapshot_attributes
from flowpm_dist.io.particle_formats import PARTICLE_FORMATS
from flowpm_dist.io.particles import Header, ParticleBlock
from flowpm_dist.io.snapshot import Snapshot

GRID, SIZE, A = (4, 6, 8), (16.0, 24.0, 40.0), 0.5
OMEGA, HUBBLE = 0.3, 0.7
COSMOLOGY = fpm.Cosmology(Omega_m=OMEGA, Omega_b=0.05, h=HUBBLE, n_s=0.96, sigma8=0.8)


def universe():
    """A state of given particles, some of which have crossed a face of the box."""
    rng, sides = np.random.default_rng(0), (*GRID, 3)
    sim = fpm.Simulation(COSMOLOGY, GRID, SIZE, [A, 1.0], precision="float64")
    state = sim.lpt(seed=1, a=A)
    fields = (fpm.Field(tf.constant(rng.normal(scale=s, size=sides)), state.box) for s in (3, 0.2))
    displacement, velocity = fields
    return replace(state, displacement=displacement, velocity=velocity)


@pytest.fixture(scope="module")
def state():
    return universe()


@pytest.fixture(scope="module")
def expected(state):
    """Positions in the box [Mpc/h] and peculiar velocities [km/s], by the number of the site."""
    sites = np.stack(np.meshgrid(*map(np.arange, GRID), indexing="ij"), axis=-1).reshape(-1, 3)
    cells = np.array(SIZE) / GRID
    positions = (sites * cells + state.displacement.numpy().reshape(-1, 3)) % np.array(SIZE)
    assert (np.floor(sites * cells + state.displacement.numpy().reshape(-1, 3)) < 0).any()
    # p = a^2 dx/dt in Mpc/h H0 is a times the peculiar velocity, and H0 is 100 km/s h/Mpc.
    return positions, 100.0 * state.velocity.numpy().reshape(-1, 3) / A


def gadget(folder):
    """Positions [Mpc/h], peculiar velocities [km/s] and headers of all files, in order of ids."""
    parts, headers = [], []
    for path in sorted(folder.glob("snapshot*.hdf5")):
        with h5py.File(path) as file:
            headers.append(dict(file["Header"].attrs))
            group = file["PartType1"]
            names = ("ParticleIDs", "Coordinates", "Velocities")
            parts.append([group[name][...] for name in names])
            assert len(parts[-1][0]) == headers[-1]["NumPart_ThisFile"][1]
    ids, positions, velocities = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(ids)
    np.testing.assert_array_equal(ids[order], np.arange(np.prod(GRID)))
    return positions[order], velocities[order] * np.sqrt(A), headers


def big(folder):
    """As `gadget`."""
    ids = block_of(folder / "1/ID")[:, 0]
    order = np.argsort(ids)
    np.testing.assert_array_equal(ids[order], np.arange(np.prod(GRID)))
    positions, velocities = (block_of(folder / "1" / n)[order] for n in ("Position", "Velocity"))
    return positions, velocities, attributes_of(folder / "Header")


READ = {"gadget-hdf5": gadget, "bigfile": big}
# Gadget's constants in cgs units: H0 / h, G, and the units of its files.
DENSITY = 3 * 3.2407789e-18**2 / (8 * np.pi * 6.672e-8) * 3.085678e24**3 / 1.989e43
MASS = DENSITY * OMEGA * np.prod(SIZE) / np.prod(GRID)


@pytest.mark.parametrize("format", READ)
def test_other_readers_find_the_particles(state, expected, tmp_path, format):
    folder = state.save(tmp_path, format=format)
    positions, velocities, _ = READ[format](folder)
    np.testing.assert_allclose(positions, expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(velocities, expected[1], rtol=1e-14)
    assert positions.dtype == np.float64 and (positions >= 0).all() and (positions < SIZE).all()
    assert snapshot_attributes(folder)["complete"]
    assert state.header().items() <= snapshot_attributes(folder).items()
    with pytest.raises(FileExistsError, match=f"{folder.name} exists"):
        state.save(tmp_path, format=format)
    with pytest.raises(SnapshotError, match=f"holds {folder.name}, which is for other codes"):
        load_snapshot(tmp_path)
    again = fpm.State.from_snapshot(tmp_path)
    assert again.header() == state.header() and again.displacement.dtype == tf.float64
    apart = again.positions().numpy() - state.positions().numpy()
    apart -= np.array(SIZE) * np.rint(apart / SIZE)
    np.testing.assert_allclose(apart, 0, atol=1e-12)
    np.testing.assert_allclose(again.velocity.numpy(), state.velocity.numpy(), rtol=1e-13)
    np.testing.assert_array_equal(again.white_noise.numpy(), state.white_noise.numpy())
    with pytest.raises(SnapshotError, match="holds its cosmology: leave cosmology out"):
        fpm.State.from_snapshot(folder, cosmology=COSMOLOGY)
    state.save(tmp_path / "zarr")
    with pytest.raises(SnapshotError, match="is in units of its own: leave units out"):
        fpm.State.from_snapshot(tmp_path / "zarr", units={"UnitLength_in_cm": 1.0})
    with pytest.raises(SnapshotError, match="nowhere: there is no such file or folder"):
        fpm.State.from_snapshot(tmp_path / "nowhere")


CUBIC = (16.0, 24.0, 32.0)
KPC = 3.085678e21


def of_another_code(folder, change=lambda parts: None, **header):
    """Two files of Gadget-4 in kpc/h with ids from 1, in any order; returns their particles."""
    rng, count = np.random.default_rng(3), int(np.prod(GRID))
    sites = np.stack(np.meshgrid(*map(np.arange, GRID), indexing="ij"), axis=-1).reshape(-1, 3)
    moved = rng.normal(size=(count, 3)).astype(np.float32)
    slow = rng.normal(scale=100, size=(count, 3)).astype(np.float32)
    x = np.mod(sites * 4.0 + moved, CUBIC) * 1e3
    order = rng.permutation(count)
    ids = order.astype(np.uint32) + 1
    parts = [
        [ids[:50], x[order][:50], slow[order][:50]],
        [ids[50:], x[order][50:], slow[order][50:]],
    ]
    change(parts)
    about = {"Time": A, "BoxSize": np.array(CUBIC) * 1e3, "NumFilesPerSnapshot": 2}
    about["NumPart_Total"] = np.array([0, count, 0], np.uint32)
    units = {"UnitLength_in_cm": KPC, "UnitVelocity_in_cm_per_s": 1e5}
    folder.mkdir()
    for number, part in enumerate(parts):
        with h5py.File(folder / f"snapshot_003.{number}.hdf5", "w") as file:
            own = {"NumPart_ThisFile": np.array([0, len(part[0]), 0], np.uint32)}
            file.create_group("Header").attrs.update(about | own | header)
            cosmology = {"Omega0": OMEGA, "OmegaBaryon": 0.05, "HubbleParam": HUBBLE}
            file.create_group("Parameters").attrs.update(units | cosmology | header)
            names = ("ParticleIDs", "Coordinates", "Velocities")
            for name, values in zip(names, part, strict=True):
                file[f"PartType1/{name}"] = values.astype("f4") if name != names[0] else values
    return moved.reshape(*GRID, 3), (slow * np.sqrt(A) * A / 100).reshape(*GRID, 3)


def by_columns(parts):
    """x varies fastest."""
    for part in parts:
        site = np.unravel_index(part[0] - 1, GRID)
        part[0][:] = np.ravel_multi_index(site[::-1], GRID[::-1]) + 1


def in_tiles(parts):
    """As N-GenIC repeats a glass of 2^3 particles."""
    for part in parts:
        x, y, z = np.unravel_index(part[0] - 1, GRID)
        tile = np.ravel_multi_index((x // 2, y // 2, z // 2), [n // 2 for n in GRID])
        part[0][:] = 8 * tile + 4 * (x % 2) + 2 * (y % 2) + z % 2 + 1


def by_the_order_of_files(parts):
    """With ids that number nothing; z varies slowest."""
    ids, *values = (np.concatenate(each) for each in zip(*parts, strict=True))
    site = np.unravel_index(ids - 1, GRID)
    order = np.argsort(np.ravel_multi_index(site[::-1], GRID[::-1]))
    for part, low, high in zip(parts, (0, 50), (50, 192), strict=True):
        part[0][:] = 7
        part[1][:], part[2][:] = (value[order][low:high] for value in values)


def by_the_order_and_not_the_ids(parts):
    """With ids that do number the lattice, but in no order."""
    by_the_order_of_files(parts)
    ids = np.random.default_rng(6).permutation(192) + 1
    for part, low, high in zip(parts, (0, 50), (50, 192), strict=True):
        part[0][:] = ids[low:high]


@pytest.mark.parametrize(
    "change", [None, by_columns, in_tiles, by_the_order_of_files, by_the_order_and_not_the_ids]
)
def test_particles_of_another_code_are_read_by_number(tmp_path, monkeypatch, change):
    """To the precision of positions in float32, from a folder or from one of its files.

    Pieces of 30 particles begin in one file and end in the other.
    """
    monkeypatch.setattr(other_codes, "SLAB", 30)
    moved, velocity = of_another_code(tmp_path / "s", *([change] if change else []))
    for path in (tmp_path / "s", tmp_path / "s" / "snapshot_003.1.hdf5"):
        state = fpm.State.from_snapshot(path, cosmology=COSMOLOGY)
        assert (state.a, state.box.grid, state.box.size) == (A, GRID, CUBIC)
        assert state.displacement.dtype == tf.float32
        np.testing.assert_allclose(state.displacement.numpy(), moved, atol=32 * 2**-23)
        np.testing.assert_allclose(state.velocity.numpy(), velocity, rtol=1e-6)
    sim = fpm.Simulation(COSMOLOGY, GRID, CUBIC, [A, 1.0])
    assert sim.run(particles=state).a == 1.0


def twice(parts):
    parts[0][0][0] = parts[1][0][0]


def from_two(parts):
    for part in parts:
        part[0] += 1


def in_no_order(parts):
    numbers = np.random.default_rng(4).permutation(192)
    for part in parts:
        part[0][:] = numbers[part[0] - 1] + 1


def not_finite(parts):
    parts[1][2][5, 1] = np.inf


def a_file_less(parts):
    del parts[1]


@pytest.mark.parametrize(
    "change, header, message",
    [
        (twice, {}, "ids are missing and others occur twice|ids from"),
        (from_two, {}, "ids from 2 to 193 of 192 particles"),
        (
            in_no_order,
            {},
            "number no lattice: it has ids from 1 to 192 of 192 particles, and",
        ),
        (a_file_less, {}, "1 files, and the snapshot has 2"),
        (not_finite, {}, r"velocity of the particle of lattice site \[.*\] is not finite"),
        (None, {"Time": np.nan}, "attribute Time must be finite numbers"),
        (None, {"BoxSize": np.array([16e3, np.inf, 32e3])}, "attribute BoxSize must be finite"),
        (None, {"Omega0": 0.31}, "has Omega0 = 0.31, and the cosmology has Omega_m = 0.3"),
        (None, {"BoxSize": 16e3}, "192 particles do not fill a lattice of cubic cells"),
        (
            None,
            {"NumPart_Total": np.array([9, 192, 0])},
            "0 of 9 particles of type 0: files",
        ),
        (None, {"NumPart_Total": np.array([0, 193, 0])}, "192 of 193 particles of type 1: files"),
    ],
)
def test_files_of_another_code_that_cannot_be_read(tmp_path, change, header, message):
    of_another_code(tmp_path / "s", *([change] if change else []), **header)
    with pytest.raises(SnapshotError, match=message):
        fpm.State.from_snapshot(tmp_path / "s", cosmology=COSMOLOGY)


@pytest.mark.parametrize(
    "name, ours, there, here",
    [
        ("wa", "wa", 0.0, 0.5),
        ("w0", "w0", -1.0, -0.9),
        ("CMBTemperature", "T_cmb", 2.7255, 2.7),
        ("m_nu", "m_nu", 0.0, 0.1),
    ],
)
def test_the_parameters_of_another_code_are_compared(tmp_path, name, ours, there, here):
    of_another_code(tmp_path / "s", **{name: there})
    other = COSMOLOGY.replace(**{ours: here}, radiation=ours == "m_nu")
    with pytest.raises(SnapshotError, match=f"has {name} = .*, and the cosmology has {ours} = "):
        fpm.State.from_snapshot(tmp_path / "s", cosmology=other)
    assert fpm.State.from_snapshot(tmp_path / "s", cosmology=COSMOLOGY).a == A


def test_another_code_does_not_know_the_whole_cosmology(tmp_path):
    of_another_code(tmp_path / "s")
    with pytest.raises(SnapshotError, match=r"lacks n_s and the amplitude .*: give cosmology="):
        fpm.State.from_snapshot(tmp_path / "s")


@pytest.mark.parametrize("name", ["UnitLength_in_cm", "UnitVelocity_in_cm_per_s"])
def test_units_that_files_do_not_name_are_given(tmp_path, name):
    """As files of Gadget-2, Gadget-3 and monofonIC do not."""
    folder = tmp_path / "s"
    of_another_code(folder)
    expected = fpm.State.from_snapshot(folder, cosmology=COSMOLOGY)
    value = {"UnitLength_in_cm": KPC, "UnitVelocity_in_cm_per_s": 1e5}[name]
    with pytest.raises(SnapshotError, match=rf"has {name} = \S+, not {10 * value:g}"[:-4]):
        fpm.State.from_snapshot(folder, cosmology=COSMOLOGY, units={name: 10 * value})
    for path in folder.iterdir():
        with h5py.File(path, "r+") as file:
            del file["Parameters"].attrs[name]
    with pytest.raises(SnapshotError, match=f"no attribute {name}, .* give units={{.{name}"):
        fpm.State.from_snapshot(folder, cosmology=COSMOLOGY)
    found = fpm.State.from_snapshot(folder, cosmology=COSMOLOGY, units={name: value})
    for field in ("displacement", "velocity"):
        blocks = (getattr(state, field).numpy() for state in (found, expected))
        np.testing.assert_array_equal(*blocks)
    given = {name: np.float32(value)}
    assert fpm.State.from_snapshot(folder, cosmology=COSMOLOGY, units=given).a == A
    with pytest.raises(ValueError, match=f"{name} = .* must be a number without a unit"):
        fpm.State.from_snapshot(folder, cosmology=COSMOLOGY, units={name: value * u.cm})
    for wrong, message in (({"UnitMass": 1.0}, "must be one of"), ({name: 0}, "above 0")):
        with pytest.raises(SnapshotError, match=message):
            fpm.State.from_snapshot(folder, cosmology=COSMOLOGY, units=wrong)


def test_the_header_of_gadget(state, tmp_path):
    *_, (header,) = gadget(state.save(tmp_path, format="gadget-hdf5"))
    assert header["Time"] == A and header["Redshift"] == 1.0
    np.testing.assert_array_equal(header["BoxSize"], SIZE)
    np.testing.assert_allclose(header["MassTable"], [0, MASS, 0, 0, 0, 0], rtol=1e-8)
    np.testing.assert_array_equal(header["NumPart_Total"], [0, np.prod(GRID), 0, 0, 0, 0])
    assert header["NumFilesPerSnapshot"] == 1
    assert (header["Omega0"], header["OmegaLambda"], header["HubbleParam"]) == (0.3, 0.7, 0.7)
    assert (header["w0"], header["wa"]) == (COSMOLOGY.w0, COSMOLOGY.wa)
    with h5py.File(tmp_path / "snapshot.gadget/snapshot.hdf5") as file:
        assert file["Parameters"].attrs["UnitLength_in_cm"] == 3.085678e24  # Mpc
        assert file["PartType1/Velocities"].attrs["a_scaling"] == 0.5


def test_the_header_of_bigfile(state, tmp_path):
    folder = state.save(tmp_path, format="bigfile")
    header = attributes_of(folder / "Header")
    assert header["Time"] == header["ScalingFactor"] == A
    np.testing.assert_array_equal(header["BoxSize"], SIZE)
    np.testing.assert_array_equal(header["NC"], GRID)
    np.testing.assert_allclose(header["MassTable"], [0, MASS, 0, 0, 0, 0], rtol=1e-8)
    assert header["UsePeculiarVelocity"].dtype == np.int32
    assert (folder / "Header/header").read_text() == "DTYPE: <i8\nNMEMB: 0\nNFILE: 0\n"


@pytest.mark.parametrize("format", ["bigfile", "gadget-hdf5"])
def test_headers_have_the_neutrinos(tmp_path, format):
    """By MP-Gadget's names where it has some, and read back with all else."""
    massive = COSMOLOGY.replace(radiation=True, m_nu=0.3, N_eff=3.1, T_cmb=2.7)
    state = fpm.Simulation(massive, 4, 32.0, [A, 1.0]).lpt(seed=1, a=A)
    folder = state.save(tmp_path, format=format)
    if format == "bigfile":
        header = attributes_of(folder / "Header")
        assert header["class_radiation_convention"] == np.int32(1)
        assert header["class_radiation_convention"].dtype == np.int32
    else:
        with h5py.File(folder / "snapshot.hdf5") as file:
            header = dict(file["Header"].attrs)
    names = ("m_nu", "N_eff", "CMBTemperature", "Omega0")
    assert [header[name].item() for name in names] == [0.3, 3.1, 2.7, massive.Omega_m]
    assert fpm.State.from_snapshot(folder).header() == state.header()


def test_a_block_is_as_the_package_bigfile_writes_it(tmp_path):
    """Lines that version 0.1.52 wrote of these values."""
    values = np.arange(30, dtype="<f4").reshape(10, 3)
    totals = [int(np.frombuffer(part.tobytes(), np.uint8).sum()) for part in np.split(values, 2)]
    numbers = {"BoxSize": np.array([64.0]), "TotNumPart": np.zeros(6, "i8")}
    bigfile.write_block(tmp_path, "<f4", 3, [(5, total) for total in totals], numbers)
    assert (tmp_path / "header").read_text() == (
        "DTYPE: <f4\nNMEMB: 3\nNFILE: 2\n000000: 5 : 2134 : 2134\n000001: 5 : 3607 : 3607\n"
    )
    assert (tmp_path / "attr-v2").read_text() == (
        "BoxSize <f8 1 0000000000005040 #HUMANE [ 64 ]\n"
        f"TotNumPart <i8 6 {'0' * 96} #HUMANE [ 0 0 0 0 0 0 ]\n"
    )


def test_the_package_bigfile_reads_it(state, expected, tmp_path):
    reader = pytest.importorskip("bigfile", reason="the package bigfile is not installed")
    with reader.File(str(state.save(tmp_path, format="bigfile"))) as file:
        assert sorted(file["1/"].blocks) == ["ID", "Position", "Velocity"]
        np.testing.assert_allclose(file["1/Position"][:], expected[0], atol=1e-12)
        np.testing.assert_allclose(file["1/Velocity"][:], expected[1], rtol=1e-14)
        np.testing.assert_array_equal(file["1/ID"][:], np.arange(np.prod(GRID)))
        assert file["Header"].attrs["HubbleParam"][0] == HUBBLE


def test_no_particle_lies_on_the_far_face():
    """In float32 a position just below 0 is rounded to the size of the box."""
    displacement = np.full((4, 4, 4, 3), -1e-9, np.float32)
    header = Header(1.0, (4, 4, 4), (64.0,) * 3, {}, 0.7)
    ((_, positions, _),) = ParticleBlock(displacement, displacement, (0, 0, 0), 0, 4).particles(
        header
    )
    assert positions.dtype == np.float32
    assert (positions >= 0).all() and (positions < 64).all()
    assert positions[0].tolist() == [0, 0, 0]


def test_fields_that_are_asked_for(state, tmp_path):
    """Noise that is left out comes again from the seed; without particles there is no state."""
    drawn = fpm.Simulation(COSMOLOGY, 8, 32.0, [0.5, 1.0]).lpt(seed=3, paired=True)
    read = fpm.State.from_snapshot(drawn.save(tmp_path / "default"))
    assert set(load_snapshot(tmp_path / "default").arrays) == {
        "displacement", "velocity", "density",
    }  # fmt: skip
    np.testing.assert_array_equal(read.white_noise.block, drawn.white_noise.block)
    assert read.header() == drawn.header()
    path = drawn.save(tmp_path / "two", fields=["white_noise", "density", "velocity"])
    assert set(load_snapshot(path).arrays) == {"white_noise", "density", "velocity"}
    with pytest.raises(SnapshotError, match="has no displacement, which is needed here; it has"):
        fpm.State.from_snapshot(path)
    with pytest.raises(ValueError, match="field 'noise': must be one of 'white_noise'"):
        drawn.save(tmp_path / "three", fields=["noise"])
    with pytest.raises(ValueError, match="fields: bigfile holds the particles alone"):
        drawn.save(tmp_path / "three", format="bigfile", fields=["density"])
    with pytest.raises(ValueError, match="format 'hdf5': must be one of 'zarr', 'gadget-hdf5'"):
        drawn.save(tmp_path / "three", format="hdf5")
    given = fpm.Simulation(COSMOLOGY, 8, 32.0, [0.5, 1.0]).lpt(white_noise=np.ones((8, 8, 8)))
    unknown = fpm.State.from_snapshot(given.save(tmp_path / "given"))
    with pytest.raises(ValueError, match="a snapshot without white_noise and without a seed"):
        _ = unknown.white_noise


@pytest.fixture
def run(state, tmp_path, monkeypatch):
    """A folder with a snapshot that eight ranks might have written, in chunks."""
    monkeypatch.chdir(tmp_path)
    state.save("run")
    for name in ("displacement", "velocity"):
        values = load_snapshot("run")[name]
        path = f"run/snapshot.zarr/{name}"
        shutil.rmtree(path)
        zarr.create_array(path, data=values, chunks=(2, 3, 8, 3))
    return Path("run")


@pytest.mark.parametrize(("format", "files"), [("gadget-hdf5", 3), ("bigfile", 99)])
def test_a_run_is_converted(run, expected, monkeypatch, format, files):
    monkeypatch.setattr(particles, "SLAB", 50)  # a row of the grid has 48
    words = ["convert", str(run), "--format", format]
    done = flowpm_here(*words, "--files", str(files))
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in run.iterdir() if path.name != "snapshot.zarr")
    assert f"192 particles in {folder}" in done.stdout
    positions, velocities, headers = READ[format](folder)
    np.testing.assert_allclose(positions, expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(velocities, expected[1], rtol=1e-14)
    if format == "gadget-hdf5":
        assert [h["NumPart_ThisFile"][1] for h in headers] == [48, 48, 96]
        assert {h["NumPart_Total"][1] for h in headers} == {192}
        assert {h["NumFilesPerSnapshot"] for h in headers} == {3}
    again = flowpm_here(*words)
    assert again.returncode == 2
    assert f"{folder} exists: add --overwrite to replace it" in plain(again.stderr)
    assert flowpm_here(*words, "--overwrite", "--output", str(run)).returncode == 0
    np.testing.assert_allclose(READ[format](folder)[0], expected[0], rtol=0, atol=1e-12)
    assert len(list(run.iterdir())) == 2


def test_what_cannot_be_converted(run):
    words = ["convert", "run", "--format", "bigfile"]
    assert "none is not a snapshot" in flowpm_here("convert", "none", *words[2:]).stderr
    Path("run/snapshot.bigfile").mkdir()
    done = flowpm_here(*words, "--overwrite")
    assert done.returncode == 2
    assert "run/snapshot.bigfile is from elsewhere: move it away, or give" in plain(done.stderr)
    done = flowpm_here(*words, "--output", "run/snapshot.zarr/zarr.json")
    assert "zarr.json is not a folder" in plain(done.stderr)
    about = Path("run/snapshot.zarr/zarr.json")
    held = json.loads(about.read_text())
    wrong = {
        "grid": ("evil", [4, 4, -4], None, [4, 8, 8], [1e9] * 3),
        "a": (float("nan"), -1, "today", None),
        "box_size": ([32.0, 32.0], [32.0, 0.0, 32.0], [1e999] * 3),
        "cosmology": ({}, [], {"Omega_m": float("nan")}, None),
    }
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        attributes = {**held["attributes"], name: value}
        about.write_text(json.dumps({**held, "attributes": attributes}))
        message = rf"is damaged: (attribute {name}|\w+ has \S+ \[.*, its attributes do not match)"
        with pytest.raises(SnapshotError, match=message):
            fpm.State.from_snapshot("run")
        with pytest.raises(SnapshotError, match=message):
            check_conversion(Path("run"), Path("other"), "bigfile", overwrite=False)
    done = flowpm_here(*words, "--output", "other")
    assert done.returncode == 2 and "is damaged: attribute cosmology" in plain(done.stderr)
    about.write_text(json.dumps(held))
    snapshot = check_conversion(Path("run"), Path("other"), "bigfile", overwrite=False)
    values = snapshot["velocity"]
    values[1, 2, 3, 1] = np.nan
    damaged = Snapshot({**snapshot.arrays, "velocity": values}, snapshot.attributes)
    with pytest.raises(SnapshotError, match=r"velocity of .* site \[1, 2, 3\] is nan along y"):
        convert_snapshot(damaged, Path("other"), "bigfile")
    assert not list(Path("other").glob("*"))
    velocity = Path("run/snapshot.zarr/velocity")
    (velocity / "c/0/0/0/0").write_bytes(b"nothing")
    done = flowpm_here(*words, "--output", "other")
    assert done.returncode == 2
    assert "the snapshot is damaged" in done.stderr and "Traceback" not in done.stderr
    assert os.listdir("other") == []
    shutil.rmtree(velocity)
    done = flowpm_here(*words, "--output", "other")
    assert "run has no velocity, which is needed here; it has" in plain(done.stderr)


def test_a_format_is_a_module_and_a_line(tmp_path, monkeypatch):
    """Run files, `convert`, its help and folders that are replaced know it."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    path = os.pathsep.join([ROOT, str(Path(ROOT) / "tests" / "jobs")])
    program = functools.partial(flowpm, program=[sys.executable, "-m", "counting"], path=path)
    assert "text: lines" in plain(program("convert", "--help").stdout)
    words = ("simulate", "run.toml", "--output")
    refused = program(*words, "run", "--set", "output.format=test")
    expected = 'output.format = "test": must be "zarr", "text", "gadget-hdf5" or "bigfile"'
    assert expected in plain(refused.stderr).replace("'", '"')
    assert program(*words, "run").returncode == 0
    converted = program("convert", "run", "--format", "text", "--files", "2")
    assert converted.returncode == 0, converted.stderr
    parts = [np.loadtxt(f"run/snapshot.text/{number}.txt") for number in range(2)]
    text = (*words, "run", "--overwrite", "--set", "output.format=text")
    assert program(*text).returncode == 0
    assert Path("run/snapshot.text/about.txt").read_text() == "4096 particles at a = 1.0\n"
    (file,) = Path("run/snapshot.text").glob("[0-9].txt")  # of the older one none stays
    rows = np.loadtxt(file)
    np.testing.assert_array_equal(rows, np.concatenate(parts))
    assert rows.shape == (4096, 7) and not Path("run/snapshot.zarr").exists()


@pytest.mark.parametrize("limit", [1000, 70_000])
@pytest.mark.parametrize("format", READ)
def test_a_disk_that_fills_costs_nothing_that_was_there(run, limit, format):
    """In a process of its own, which HDF5 might end as a whole."""
    words = ["convert", "run", "--format", format, "--overwrite"]
    assert flowpm_here(*words).returncode == 0
    if format == "bigfile":
        limit //= 20  # the rest of the file is smaller
    done = run_on_disk_of(limit, [*COMMAND, *words], PYTHONPATH=ROOT)
    assert done.returncode == 1, done.stderr
    folder = PARTICLE_FORMATS[format].folder
    assert f"cannot write run/{folder}: File too large" in plain(done.stderr)
    assert sorted(os.listdir("run")) == [folder, "snapshot.zarr"]
    about = json.loads(Path(f"run/{folder}/flowpm-dist.json").read_text())
    assert about["complete"] and about["grid"] == list(GRID)
