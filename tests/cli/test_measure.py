"""Snapshots of other codes from the command line: measured, and made into volumes to train on."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
import tensorflow as tf
from commands import flowpm, flowpm_and_loaded, flowpm_here
from snapshots import SIDE, TIME, joined, points, write_snapshot

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.training.snapshot_volumes import RECORD as OF_VOLUMES
from flowpm_dist.cosmoflow.volumes.arrays import read_table
from meshimpl.process_mesh import ProcessMesh


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def density(field):\n    return field\n")
    for name, seed in (("one", 1), ("two", 2)):
        write_snapshot(tmp_path / f"{name}.hdf5", points(seed))
    return tmp_path


def density(types, shift=0.0, seen=False, cells=16):
    x = joined(types, "position").copy()
    if seen:
        x[:, 2] += joined(types, "velocity")[:, 2] / (100 * TIME * np.sqrt(0.3 / TIME**3 + 0.7))
    box = fpm.Box((cells,) * 3, (SIDE,) * 3, ProcessMesh(""), tf.float64)
    return fpm.paint(x, box, joined(types, "mass"), scheme="tsc", shift=shift)


def column(path, name):
    table = np.genfromtxt(path, delimiter=",", names=True, deletechars="")
    return table[next(each for each in table.dtype.names if each.startswith(name))]


def test_spectra_of_snapshots(here):
    done = flowpm_here(
        "measure", "one.hdf5", "two.hdf5", "--grid", "16", "--density", "--subtract-shot-noise",
        "--statistic", "power", "--statistic", "multipoles",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, seed in (("one", 1), ("two", 2)):
        types, folder = points(seed), here / "measured" / name
        plain, moved = density(types), density(types, 0.5)
        np.testing.assert_allclose(np.load(folder / "density.npy"), plain.numpy(), rtol=1e-5)
        mass = joined(types, "mass")
        noise = SIDE**3 * np.sum(mass**2) / np.sum(mass) ** 2
        expected = fpm.power_spectrum(plain, interlaced=moved, shot_noise=noise)
        np.testing.assert_allclose(column(folder / "power.csv", "power"), expected.power, rtol=1e-6)
        seen = [density(types, shift, seen=True) for shift in (0, 0.5)]
        poles = fpm.multipoles(seen[0], interlaced=seen[1], shot_noise=noise)
        found = column(folder / "multipoles.csv", "power").reshape(3, -1)
        np.testing.assert_allclose(found, poles.power, rtol=1e-5, atol=1e-5)
        record = json.loads((folder / "measured.json").read_text())
        np.testing.assert_allclose(record["shot_noise"], noise)
        assert record["asked"]["cosmology"]["Omega_m"] == 0.3
        assert {"power.png", "multipoles.png", "density.png"} <= {p.name for p in folder.iterdir()}


def test_what_is_measured_is_kept_unless_other_things_are_asked(here):
    words = ["measure", "one.hdf5", "--grid", "16"]
    assert flowpm_here(*words).returncode == 0
    table = here / "measured" / "one" / "power.csv"
    before = table.stat().st_mtime_ns
    again = flowpm_here(*words)
    assert again.returncode == 0 and "1 from before" in again.stdout
    assert table.stat().st_mtime_ns == before
    other = flowpm_here(*words, "--type", "1")
    assert other.returncode == 2 and "has results of other options" in other.stderr
    assert flowpm_here(*words, "--type", "1", "--overwrite").returncode == 0
    assert table.stat().st_mtime_ns > before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.hdf5"], "nothing.hdf5"),
        (["one.hdf5", "--type", "5"], "one.hdf5 has no particles of type 5; it has 700 of type 0"),
        (["one.hdf5", "--grid", "15"], "--grid 15: must be an even number"),
        (["one.hdf5", "--statistic", "pwer"], "--statistic: "),
        (["one.hdf5", "--unit", "UnitLength_in_cm"], "must be a name and a number"),
        (["one.hdf5", "--type", "1", "--type", "1"], "give each type once"),
        (["one.hdf5", "--statistic", "mine:density"], "density: two results would share a file"),
        (["one.hdf5", "--mesh", "row:3"], "mesh row:3"),
    ],
)
def test_mistakes_are_named_before_the_work(here, words, message):
    done = flowpm_here("measure", *words)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (here / "measured").exists()


def test_the_plan_is_shown_without_tensorflow(here):
    done, loaded = flowpm_and_loaded("measure", "one.hdf5", "--check")
    assert done.returncode == 0, done.stderr
    assert "700 of type 0, 1,000 of type 1; 16 x 16 x 16 cells" in done.stdout
    assert "memory: about" in done.stdout and "tensorflow" not in loaded
    assert not (here / "measured").exists()


def test_snapshots_of_one_name_have_the_folders_of_their_simulations(here):
    for run in ("a", "b"):
        write_snapshot(here / run / "snapdir_004" / "snap_004.0.hdf5", points(1))
    paths = ["a/snapdir_004", "b/snapdir_004", "one.hdf5"]
    assert flowpm_here("measure", *paths, "--grid", "16").returncode == 0
    found = {str(path.parent) for path in here.glob("measured/**/power.csv")}
    folders = (f"{here}/measured/{name}" for name in ("a/snapdir_004", "b/snapdir_004"))
    assert found == {*folders, f"{here}/measured/{here.name}/one"}


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_files_from_elsewhere_are_kept(here, more):
    (here / "measured" / "one").mkdir(parents=True)
    (here / "measured" / "one" / "power.csv").write_text("mine")
    done = flowpm_here("measure", "one.hdf5", "--grid", "16", *more)
    assert done.returncode == 2 and "holds power.csv from elsewhere" in done.stderr
    assert (here / "measured" / "one" / "power.csv").read_text() == "mine"
    (here / "measured" / "one" / "power.csv").unlink()
    (here / "measured" / "one").rmdir()
    (here / "measured" / "one").symlink_to(here)
    done = flowpm_here("measure", "one.hdf5", "--grid", "16", *more)
    assert done.returncode == 2 and "is a symbolic link" in done.stderr


def test_a_snapshot_that_was_replaced_is_no_longer_measured(here):
    words = ["measure", "one.hdf5", "--grid", "16"]
    assert flowpm_here(*words).returncode == 0
    write_snapshot(here / "one.hdf5", points(7))
    done = flowpm_here(*words)
    assert done.returncode == 2 and "or the snapshot has changed since" in done.stderr


def test_results_may_lie_below_the_snapshot(here):
    words = ["measure", "s", "--grid", "16", "--output", "s/measured"]
    write_snapshot(here / "s" / "snap.hdf5", points(1))
    assert flowpm_here(*words).returncode == 0
    again = flowpm_here(*words)
    assert again.returncode == 0 and "1 from before" in again.stdout, again.stderr


def test_old_results_do_not_stay_beside_new_ones(here):
    """Of other options, or of work that was interrupted, with its temporary files."""
    words, folder = ["measure", "one.hdf5", "--grid", "16"], here / "measured" / "one"
    assert flowpm_here(*words, "--density", "--statistic", "histograms").returncode == 0
    (folder / "notes.txt").write_text("mine")
    assert flowpm_here(*words, "--overwrite").returncode == 0
    ours = {"measured.json", "power.csv", "power.png", "density.png"}
    assert {path.name for path in folder.iterdir()} == {*ours, "notes.txt"}
    record = json.loads((folder / "measured.json").read_text())
    (folder / "measured.json").write_text(json.dumps({**record, "complete": False}))
    (folder / ".density.npy.0123abcd.partial").write_text("")
    again = flowpm_here(*words, "--statistic", "histograms")
    assert again.returncode == 0, again.stderr
    ours = {"measured.json", "histograms.csv", "histograms.png", "density.png"}
    assert {path.name for path in folder.iterdir()} == {*ours, "notes.txt"}


def test_several_files_are_one_snapshot(here):
    half = {kind: {n: x[::2] for n, x in columns.items()} for kind, columns in points().items()}
    for number in range(2):
        write_snapshot(here / "s" / f"snap.{number}.hdf5", half, NumFilesPerSnapshot=2)
    totals = np.array([700, 1000, 0, 0, 0, 0])
    for path in (here / "s").iterdir():
        with h5py.File(path, "r+") as file:
            file["Header"].attrs["NumPart_Total"] = totals
    done = flowpm_here("measure", "s/snap.0.hdf5", "s/snap.1.hdf5", "--grid", "16")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (here / "measured").iterdir()] == ["snap"]


def test_statistics_that_keep_their_shot_noise_say_so(here):
    words = ["measure", "one.hdf5", "--grid", "16", "--subtract-shot-noise"]
    done = flowpm_here(*words, "--statistic", "histograms", "--statistic", "power")
    assert done.returncode == 0 and "histograms of one.hdf5 keeps its shot noise" in done.stderr
    assert "power of one.hdf5" not in done.stderr


@pytest.fixture
def simulations(here):
    for number in range(12):
        matter = dict(Omega0=0.25 + 0.01 * number, OmegaLambda=0.75 - 0.01 * number)
        write_snapshot(
            here / "runs" / str(number) / "snap.hdf5", points(number, 300, 900), **matter
        )
    rows = [f"{0.25 + 0.01 * n} {0.7 + 0.02 * n}" for n in range(12)]
    (here / "parameters.txt").write_text("\n".join(["Omega_m sigma8", *rows]))
    (here / "bare.txt").write_text("\n".join(rows))
    return here


DATASET = ["dataset", "--from", "runs", "--table", "parameters.txt", "--output", "volumes"]


def test_volumes_to_train_on(simulations):
    """In the order of numbers, not of letters; their run file is a training's."""
    done = flowpm_here(*DATASET, "--grid", "32")
    assert done.returncode == 0, done.stderr
    for number in (2, 10):
        found = np.load(simulations / "volumes" / "volumes" / f"{number}.npy")
        own = fpm.read_particles(f"runs/{number}").density(32).numpy()
        np.testing.assert_allclose(found, own, rtol=1e-5)
        other = density(points(number, 300, 900), cells=32).numpy()
        assert np.corrcoef(found.ravel(), other.ravel())[0, 1] > 0.8
    names, table = read_table(simulations / "volumes" / "parameters.csv")
    assert names == ("Omega_m", "sigma8")
    np.testing.assert_allclose(table[10], [0.35, 0.9])
    rows = (simulations / "volumes" / "parameters.csv").read_text().splitlines()
    assert rows[11].startswith(f"{simulations}/runs/10,0.35,")
    check = flowpm_here("train", "volumes/run.toml", "--check")
    assert check.returncode == 0 and '"sigma8"' in check.stdout, check.stderr


def test_volumes_that_are_there_are_kept(simulations):
    assert flowpm_here(*DATASET, "--grid", "16").returncode == 0
    folder = simulations / "volumes" / "volumes"
    before = (folder / "3.npy").stat().st_mtime_ns
    (folder / "4.npy").unlink()
    assert flowpm_here(*DATASET, "--grid", "16").returncode == 0
    assert (folder / "4.npy").exists() and (folder / "3.npy").stat().st_mtime_ns == before
    other = flowpm_here(*DATASET, "--grid", "20")
    assert other.returncode == 2 and "other snapshots or options: add --overwrite" in other.stderr
    assert flowpm_here(*DATASET, "--grid", "20", "--overwrite").returncode == 0
    assert np.load(folder / "3.npy").shape == (20, 20, 20)
    assert "grid = 20" in (simulations / "volumes" / "run.toml").read_text()
    assert (simulations / "volumes" / OF_VOLUMES).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "runs"], "--from FOLDER needs --table FILE"),
        ([], "give a RUN.TOML to simulate, or --from FOLDER"),
        (["--table", "parameters.txt", "run.toml"], "--table goes with --from FOLDER"),
        (["--scheme", "pcs", "run.toml"], "--scheme goes with --from FOLDER"),
        (["--from", "runs", "run.toml"], "a run file does not go with --from FOLDER"),
        (["--from", "runs", "--dtype", "int16"], "--dtype does not go with --from FOLDER"),
        (["--from", "runs", "--table", "none.txt"], "error: cannot read the table none.txt"),
        (["--from", "runs", "--table", "bare.txt"], "does not name its 2 columns: give --columns"),
        (["--from", "none", "--table", "parameters.txt"], "none is no folder"),
        (["--from", "runs/{}/snap_9", "--table", "parameters.txt"], "snap_9"),
    ],
)
def test_mistakes_of_a_dataset(simulations, words, message):
    done = flowpm_here("dataset", "--output", "volumes", *words)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_a_row_for_each_snapshot_and_boxes_alike(simulations):
    write_snapshot(simulations / "runs" / "12" / "snap.hdf5", points(1))
    done = flowpm_here(*DATASET)
    assert "runs holds 13 snapshots, and parameters.txt has 12 rows" in done.stderr
    own = dict(Omega0=0.36, OmegaLambda=0.64)
    write_snapshot(simulations / "runs" / "11" / "snap.hdf5", points(1), BoxSize=3e4, **own)
    (simulations / "runs" / "12" / "snap.hdf5").unlink()
    (simulations / "runs" / "12").rmdir()
    done = flowpm_here(*DATASET)
    assert "all must be alike" in done.stderr
    write_snapshot(simulations / "runs" / "11" / "snap.hdf5", points(1))
    done = flowpm_here(*DATASET)
    assert "row 12 has Omega_m = 0.36, and its snapshot" in done.stderr
    write_snapshot(simulations / "runs" / "11" / "snap.hdf5", points(1), **own)
    template = ["--from", "runs/{}/snap.hdf5", "--table", "parameters.txt"]
    assert flowpm_here("dataset", *template, "--output", "v", "--grid", "16").returncode == 0


CAMELS = [
    ("LH_2", 0.35, 1.0, 7),
    ("LH_0", 0.25, 1.0, 8),
    ("LH_3", 0.4, 1.0, 9),
    ("LH_1", 0.3, 1.0, 5),
]


@pytest.fixture
def named(here):
    for name, matter, *_ in CAMELS:
        own = dict(Omega0=matter, OmegaLambda=1 - matter)
        write_snapshot(here / "sims" / name / "snap.hdf5", points(int(name[-1]), 100, 300), **own)
    table(here, CAMELS)
    return here


def table(here, rows):
    lines = [" ".join(map(str, row)) for row in rows]
    (here / "camels.txt").write_text("\n".join(["#Name Omega_m A_SN1 seed", *lines]))


@pytest.mark.parametrize("snapshots", ["sims", "sims/{Name}/snap.hdf5", "sims/LH_{}/snap.hdf5"])
def test_rows_that_name_their_snapshots(named, snapshots):
    words = ["dataset", "--from", snapshots, "--table", "camels.txt", "--grid", "16"]
    done = flowpm_here(*words, "--output", "v", "--parameters", "Omega_m")
    if "{}" in snapshots:
        message = "camels.txt: Name has LH_2, which must be the name of one snapshot"
        assert done.returncode == 2 and message in done.stderr
        return
    assert done.returncode == 0, done.stderr
    names, values = read_table(named / "v" / "parameters.csv")
    assert names == ("Omega_m",)
    np.testing.assert_array_equal(values[:, 0], [0.35, 0.25, 0.4, 0.3])
    for row, (name, *_) in enumerate(CAMELS):
        found = np.load(named / "v" / "volumes" / f"{row}.npy")
        own = fpm.read_particles(f"sims/{name}/snap.hdf5").density(16).numpy()
        np.testing.assert_allclose(found, own, rtol=1e-5)


def test_a_row_whose_snapshot_is_not_there(named):
    table(named, [*CAMELS[:3], ("LH_99", 0.3, 1.0, 5)])
    done = flowpm_here("dataset", "--from", "sims", "--table", "camels.txt", "--output", "v")
    assert done.returncode == 2
    assert "Name has LH_99, which must be the name of one snapshot: 0 have it" in done.stderr


def test_names_with_decimals_and_folders_that_end_in_digits(here):
    values = ["0.1", "0.25", "0.3", "0.35"]
    for number, value in enumerate(values):
        write_snapshot(here / "om" / f"om_{value}" / "snap.hdf5", points(number, 100, 300))
    (here / "t.csv").write_text("Name,om\n" + "\n".join(f"LH_{v},{v}" for v in values))
    words = ["dataset", "--from", "om", "--table", "t.csv", "--output", "v", "--grid", "16"]
    done = flowpm_here(*words)
    assert done.returncode == 0, done.stderr
    rows = (here / "v" / "parameters.csv").read_text().splitlines()
    assert rows == ["# snapshot,om", *(f"{here}/om/om_{value},{value}" for value in values)]
    assert "nothing is left of a volume of 16 cells" in done.stdout


@pytest.mark.parametrize("ranks", ["1", "2", "4"])
def test_power_is_the_direct_sum_over_the_particles(here, ranks):
    done = flowpm(
        *("measure", "one.hdf5", "--grid", "64", "--scheme", "pcs", "--density"), "--ranks", ranks
    )
    assert done.returncode == 0, done.stderr
    types = points(1)
    x, mass = joined(types, "position"), joined(types, "mass")
    n = np.arange(-5, 6)
    modes = np.stack(np.meshgrid(n, n, n, indexing="ij"), axis=-1).reshape(-1, 3)
    sums = np.exp(-2j * np.pi / SIDE * modes @ x.T) @ mass / mass.sum()
    length = np.sqrt((modes**2).sum(axis=1))
    inside = [(length >= i + 0.5) & (length < i + 1.5) for i in range(4)]
    expected = [SIDE**3 * np.mean(np.abs(sums[i]) ** 2) for i in inside]
    power = column(here / "measured" / "one" / "power.csv", "power")
    np.testing.assert_allclose(power[:4], expected, rtol=1e-5)
    assert np.load(here / "measured" / "one" / "density.npy").shape == (64, 64, 64)
