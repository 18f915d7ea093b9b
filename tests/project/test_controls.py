"""The controls: several workers train like one, and each learns, reads and refuses what it should.

Each number of workers is a process of its own: MirroredStrategy wants devices of its own making.
"""

from __future__ import annotations

import csv
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_jobs import needs_horovod

from flowpm_dist.io.errors import UserError
from meshimpl import launch

ROOT = Path(__file__).parents[2]
CONTROLS = str(ROOT / "examples" / "controls")
sys.path.insert(0, CONTROLS)

import harness  # noqa: E402
import nt3  # noqa: E402
import resnet  # noqa: E402
import samples  # noqa: E402
from workers import Ranks  # noqa: E402

PROGRAM = """
import importlib, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from meshimpl import launch
rank = launch.detect().rank
model = importlib.import_module(sys.argv[2]).main(sys.argv[4:])
np.savez(f"{sys.argv[3]}/rank-{rank}.npz", *[w.numpy() for w in model.trainable_weights])
print("loaded", *({"horovod", "mpi4py", "tensorflow"} & set(sys.modules)))
"""
TINY = ["--features", "64", "--samples", "64", "--epochs", "2", "--dropout", "0", "--rate", "0.05"]
ROUNDING = 2e-6  # of weights and losses of about 1 in float32, after eight steps


def run(folder: Path, control: str, ranks: int, *words: str) -> str:
    """Runs a control on a number of ranks; what it printed. Its results are in the folder."""
    needs_horovod(ranks)
    folder.mkdir()
    command = [sys.executable, "-c", PROGRAM, CONTROLS, control, str(folder), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if ranks > 1:
        command, prepared = launch.mpirun_command(ranks, command)
        environment |= prepared
    done = subprocess.run(
        [*command, "--output", str(folder)],
        env=environment,
        timeout=200,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(folder: Path) -> list[dict[str, Any]]:
    with (folder / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def weights(folder: Path, rank: int = 0) -> list[np.ndarray]:
    with np.load(folder / f"rank-{rank}.npz") as held:
        return [held[name] for name in held.files]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """NT3 on one rank with batches of 16."""
    folder = tmp_path_factory.mktemp("controls") / "alone"
    loaded = run(folder, "nt3", 1, *TINY, "--batch", "16").rpartition("loaded")[2].split()
    assert loaded == ["tensorflow"]  # neither Horovod nor MPI
    return folder


def check_equal(folder: Path, alone: Path) -> None:
    """A training on two workers with half batches has the losses and weights of one."""
    rows, expected = metrics(folder), metrics(alone)
    assert len(rows) == len(expected) == 8
    for row, right in zip(rows, expected, strict=True):
        for key in right.keys() & {"step", "samples", "rate", "accuracy", "validation_accuracy"}:
            assert row[key] == pytest.approx(right[key], abs=1e-6), key
        for key in right.keys() & {"loss", "validation_loss"}:
            assert row[key] == pytest.approx(right[key], abs=ROUNDING), key
    assert "validation_loss" in rows[3] and "validation_loss" not in rows[2]
    first = first_weights()
    for found, right, before in zip(weights(folder), weights(alone), first, strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=ROUNDING)
        assert np.abs(right - before).max() > 100 * ROUNDING


def first_weights() -> list[np.ndarray]:
    import keras

    keras.utils.set_random_seed(0)
    return [weight.numpy() for weight in nt3.network(64, 0.0).trainable_weights]


@pytest.mark.budget(40)
@pytest.mark.timeout(240)
def test_two_ranks_train_like_one(tmp_path, alone):
    folder = tmp_path / "two"
    words = ["--reading", "files", "--staging", str(tmp_path / "staging")]
    run(folder, "nt3", 2, *TINY, "--batch", "8", "--scaling", "none", *words)
    check_equal(folder, alone)
    for one, other in zip(weights(folder, 0), weights(folder, 1), strict=True):
        np.testing.assert_array_equal(one, other)
    assert min(row["read_seconds"] for row in metrics(folder)) > 0
    about = json.loads((folder / "provenance.json").read_text())
    assert (about["ranks"], about["workers"]) == (2, 2)
    assert about["peak memory of a rank [bytes]"] > 1e8


@pytest.mark.timeout(240)
def test_two_replicas_train_like_one(tmp_path, alone):
    folder = tmp_path / "mirrored"
    words = ["--scaling", "none", "--strategy", "mirrored", "--replicas", "2"]
    run(folder, "nt3", 1, *TINY, "--batch", "8", *words)
    check_equal(folder, alone)
    assert json.loads((folder / "provenance.json").read_text())["workers"] == 2


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Controls run in this process, which has TensorFlow already, into this folder."""
    monkeypatch.setattr(launch, "configure_threads", lambda: 1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nt3_learns_its_made_data(here):
    """It classifies held-out samples, which are other draws, after a few epochs."""
    words = "--features 256 --samples 160 --batch 7 --epochs 6 --rate 0.02".split()
    model = nt3.main(words)
    rows = metrics(here / "control")
    found = [row["validation_accuracy"] for row in rows if "validation_accuracy" in row]
    assert len(found) == 6 and max(found[-2:]) > 0.9
    x, y = nt3.load(options(*words)).held_out
    probabilities = model(x[..., np.newaxis]).numpy()
    right = np.mean(probabilities.argmax(axis=1) == y)
    assert rows[-1]["validation_accuracy"] == pytest.approx(right)
    loss = -np.log(probabilities[np.arange(len(y)), y]).mean()
    assert rows[-1]["validation_loss"] == pytest.approx(loss, rel=1e-5)
    for phase in ("read", "compute"):
        assert all(row[f"{phase}_seconds"] > 0 for row in rows)
    row = rows[5]
    seconds = row["read_seconds"] + row["compute_seconds"]
    assert row["samples_per_second"] == pytest.approx(7 / seconds, rel=1e-6)


def test_made_samples_follow_from_the_seed():
    """More samples begin with the same ones; the held-out ones are other draws."""
    for made, size in ((nt3.made_data, 64), (resnet.made_data, 32)):
        few, many, other = made(size, 20, 3), made(size, 40, 3), made(size, 20, 4)
        np.testing.assert_array_equal(many.training.x[:20], few.training.x)
        assert np.any(few.training.x != other.training.x)
        assert len(few.held_out.y) == 5 and np.any(few.held_out.x != few.training.x[:5])
        assert set(few.training.y) == set(range(2 if made is nt3.made_data else 10))


def test_made_images_tell_their_class():
    """Held-out images have the power spectrum of their class, whatever their phase and colours."""

    def spectra(images: np.ndarray) -> np.ndarray:
        grey = images.mean(axis=3)
        power = np.abs(np.fft.rfft2(grey - grey.mean(axis=(1, 2), keepdims=True)))
        return power.reshape(len(images), -1) / np.linalg.norm(power, axis=(1, 2))[:, None]

    training, held_out = resnet.made_data(64, 40, 0)
    known = [spectra(training.x[training.y == label]).mean(axis=0) for label in range(10)]
    nearest = np.argmax(spectra(held_out.x) @ np.transpose(known), axis=1)
    np.testing.assert_array_equal(nearest, held_out.y)


def test_nt3_has_the_weights_of_the_benchmark():
    """128 filters of 20 and of 10 genes, means over none and ten, dense layers of 200, 20 and 2."""
    features = 256
    flat = (features - 19 - 9) // 10 * 128
    layers = [(20, 128), (10 * 128, 128), (flat, 200), (200, 20), (20, 2)]
    assert nt3.network(features, 0.1).count_params() == sum((n + 1) * m for n, m in layers)


def options(*words: str) -> Any:
    return nt3.parser().parse_args(words)


def test_the_rate_grows_in_the_warm_up():
    """As in Horovod's LearningRateWarmupCallback: rate / N (epoch (N - 1) / warmup + 1)."""
    ranks, warmup = 8, 4
    given = options("--rate", "0.001", "--warmup", str(warmup))
    for epoch in (0, 1.5, 4, 9):
        part = min(epoch, warmup)
        expected = 0.001 * ranks / ranks * (part * (ranks - 1) / warmup + 1)
        assert harness.learning_rate(given, ranks, epoch) == pytest.approx(expected)
    for scaling, factor in (("sqrt", math.sqrt(8)), ("none", 1)):
        given = options("--scaling", scaling, "--warmup", "0")
        assert harness.learning_rate(given, ranks, 0) == pytest.approx(0.001 * factor)


def test_workers_share_one_shuffle():
    two, one = (harness.shuffled(33, 0, 1, *size) for size in ((4, 2), (8, 1)))
    assert two.shape == (4, 2, 4)
    np.testing.assert_array_equal(two.ravel(), one.ravel())
    assert len(set(two.ravel())) == 32
    assert np.any(two != harness.shuffled(33, 0, 2, 4, 2))


def test_staged_samples_are_written_once(tmp_path):
    made = []

    def load():
        made.append(nt3.made_data(64, 8, 0))
        return made[-1]

    for _ in range(2):
        found = samples.staged(tmp_path, "nt3", load, Ranks())
    assert len(made) == 1
    for split, right in zip(found, made[0], strict=True):
        np.testing.assert_array_equal(split.x[np.arange(len(right.y))[::-1]], right.x[::-1])
        np.testing.assert_array_equal(split.y, right.y)
    path = tmp_path / "nt3-training-x.npy"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(OSError, match="ends early"):
        found.training.x[np.array([7])]


def test_nt3_reads_the_files_of_the_benchmark(tmp_path):
    table = np.array([[1, 2, -4, 0], [0, 1, 2, 0]], np.float32)
    for name, rows in zip(nt3.FILES, (table, table[:1] * 2), strict=True):
        np.savetxt(tmp_path / name, rows, delimiter=",")
    given = options("--data", str(tmp_path))
    given.features = 3
    data = nt3.load(given)
    # Divided by the largest values of the genes in both files, 4 and 8; the third gene is 0.
    np.testing.assert_array_equal(data.training.x, [[0.5, -0.5, 0], [0.25, 0.25, 0]])
    np.testing.assert_array_equal(data.held_out.x, [[1, -1, 0]])
    assert [*data.training.y] == [1, 0]
    with pytest.raises(UserError, match="has a label and 3 features"):
        nt3.read_data(tmp_path, 4, None)


def test_resnet_reads_cifar(tmp_path):
    planes = np.arange(2 * 3072, dtype=np.uint32).reshape(2, 3072) % 251
    for name in (*resnet.TRAINING_FILES, *resnet.TEST_FILES):
        batch = {b"data": planes.astype(np.uint8), b"labels": [7, 3]}
        (tmp_path / name).write_bytes(pickle.dumps(batch))
    data = resnet.read_data(tmp_path, None)
    assert [*data.training.y] == [7, 3] * 5 and data.held_out.x.shape == (2, 32, 32, 3)
    # A file has planes of red, green and blue, each row by row.
    assert data.training.x[1, 4, 5, 2] == planes[1, 2 * 1024 + 4 * 32 + 5]
    assert len(resnet.read_data(tmp_path, 4).training.y) == 4
    for value, expected in ((255, 1), (0, -1)):
        image = resnet.prepared(np.full((1, 32, 32, 3), value, np.uint8), 128)
        assert image.shape == (1, 128, 128, 3)
        np.testing.assert_allclose(image, expected, rtol=1e-6)
    (tmp_path / "data_batch_2").write_bytes(b"nothing")
    with pytest.raises(UserError, match="data_batch_2 is no file of CIFAR-10"):
        resnet.read_data(tmp_path, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch 65", "a step needs 1 x 65 samples, but there are 64"),
        ("--reading files", "--reading files needs --staging"),
        ("--reading files --staging /dev/null/x", "--staging /dev/null/x: cannot be written"),
        ("--data nowhere", "--data nowhere: there is no such folder"),
        ("--data .", "nt_train2.csv cannot be read"),
        ("--rate 0", "--rate 0.0: must be above 0"),
        ("--features 37", "37 must be a whole number above 37"),
        ("--dropout 1", "--dropout 1.0: must be from 0 to below 1"),
    ],
)
def test_mistakes_are_refused(here, capsys, words, message):
    with pytest.raises(SystemExit) as end:
        nt3.main([*TINY, *words.split()])
    assert end.value.code == 2 and message in capsys.readouterr().err
    assert not (here / "control").exists()


@pytest.mark.budget(90)
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_resnet(tmp_path, ranks):
    """The first loss is near ln 10, the loss of a guess; all ranks have equal weights."""
    folder = tmp_path / "resnet"
    words = "--image-size 32 --batch 8 --samples 32 --epochs 1 --steps 2"
    run(folder, "resnet", ranks, *words.split())
    rows = metrics(folder)
    assert [row["samples"] for row in rows] == [8 * ranks, 16 * ranks]
    assert abs(rows[0]["loss"] - math.log(10)) < 1.5
    for one, other in zip(weights(folder), weights(folder, ranks - 1), strict=True):
        np.testing.assert_array_equal(one, other)
