"""Snapshots of other codes from the command line: measured, and made into volumes to train on."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from commands import flowpm, flowpm_and_loaded, flowpm_here
from snapshots import SIDE, TIME, joined, points, write_snapshot

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.training.snapshot_volumes import RECORD as OF_VOLUMES
from meshimpl.process_mesh import ProcessMesh


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
        assert record["cosmology"]["Omega_m"] == 0.3
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
        (["one.hdf5", "./one.hdf5"], "/one is given twice"),
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


def test_files_from_elsewhere_are_kept(here):
    (here / "measured" / "one").mkdir(parents=True)
    (here / "measured" / "one" / "thesis.tex").write_text("")
    done = flowpm_here("measure", "one.hdf5", "--grid", "16")
    assert done.returncode == 2 and "holds thesis.tex from elsewhere" in done.stderr


@pytest.fixture
def simulations(here):
    for number in range(12):
        write_snapshot(here / "runs" / str(number) / "snap.hdf5", points(number, 300, 900))
    rows = [f"{0.25 + 0.01 * n} {0.7 + 0.02 * n}" for n in range(12)]
    (here / "parameters.txt").write_text("\n".join(["Omega_m sigma8", *rows]))
    return here


DATASET = ["dataset", "--from", "runs", "--table", "parameters.txt", "--output", "volumes"]


def test_volumes_to_train_on(simulations):
    """In the order of numbers, not of letters; a training begins on them as they are."""
    done = flowpm_here(*DATASET, "--grid", "32")
    assert done.returncode == 0, done.stderr
    for number in (2, 10):
        found = np.load(simulations / "volumes" / "volumes" / f"{number}.npy")
        own = fpm.read_particles(f"runs/{number}").density(32).numpy()
        np.testing.assert_allclose(found, own, rtol=1e-5)
        other = density(points(number, 300, 900), cells=32).numpy()
        assert np.corrcoef(found.ravel(), other.ravel())[0, 1] > 0.8
    table = np.loadtxt(simulations / "volumes" / "parameters.txt")
    np.testing.assert_allclose(table[10], [0.35, 0.9])
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
        (["--table", "parameters.txt", "run.toml"], "go with --from FOLDER"),
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
    write_snapshot(simulations / "runs" / "11" / "snap.hdf5", points(1), BoxSize=3e4)
    (simulations / "runs" / "12" / "snap.hdf5").unlink()
    (simulations / "runs" / "12").rmdir()
    done = flowpm_here(*DATASET)
    assert "all must be alike" in done.stderr
    write_snapshot(simulations / "runs" / "11" / "snap.hdf5", points(1))
    template = ["--from", "runs/{}/snap.hdf5", "--table", "parameters.txt"]
    assert flowpm_here("dataset", *template, "--output", "v", "--grid", "16").returncode == 0


@pytest.mark.parametrize("ranks", ["2"])
def test_on_several_ranks(here, ranks):
    words = ["measure", "one.hdf5", "--grid", "16", "--density"]
    assert flowpm(*words, "--output", "alone").returncode == 0
    done = flowpm(*words, "--ranks", ranks)
    assert done.returncode == 0, done.stderr
    alone, together = (here / name / "one" / "density.npy" for name in ("alone", "measured"))
    np.testing.assert_allclose(np.load(alone), np.load(together), rtol=1e-6)
