"""examples/brain_imaging in one process: anatomy, masks, maps, the command and its refusals."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshimpl import launch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "brain_imaging"))

import adam
import anatomy
import brain
import classical
import sampling

TINY = (
    "train --anatomy made-up --side 8 --voxel 24 --volumes 2 --coils 2 --acceleration 2 --steps 4 "
    "--iterations 1 --consistency 1 --features 2 --convolutions 2 --seed 3 --every 2 --output"
).split()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "configure_threads", lambda: 1)  # TensorFlow has begun already
    monkeypatch.chdir(tmp_path)
    return tmp_path


def brightness(anatomy_: Any, number: int, side: int = 16, voxel: float = 12.0) -> np.ndarray:
    return np.abs(anatomy.head(anatomy_, [0, number], side, voxel))


def test_volumes_follow_from_the_seed():
    first, again, other = (brightness(anatomy.made_up(), n) for n in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert 0.05 < np.mean(first > 0) < 0.6
    assert np.percentile(first[first > 0], 99) == pytest.approx(1, rel=1e-5)
    assert np.corrcoef(first.ravel(), other.ravel())[0, 1] < 0.99
    phases = np.angle(anatomy.head(anatomy.made_up(), [0, 1], 16, 12.0))[first > 0]
    assert phases.std() > 0.1


def test_template_is_in_the_package_nilearn(monkeypatch):
    pytest.importorskip("nilearn")
    import socket

    def refused(*_: Any) -> None:
        raise AssertionError("nothing may be fetched")

    monkeypatch.setattr(socket.socket, "connect", refused)
    found = anatomy.template()
    assert found.tissues.shape[1:] == (197, 233, 189)
    total = found.tissues.sum(axis=0)
    # A brain of 1.9 litres with its fluid; each cell of it is one tissue or a mixture.
    assert 1.8e6 < np.sum(total > 0.5) < 2.0e6
    np.testing.assert_allclose(total[total > 0], 1, atol=1e-5)
    assert 0.2 < np.mean(brightness(found, 1) > 0) < 0.5


def test_sensitivities():
    whole = sampling.coil_maps((6, 8, 10), 4, [5])
    np.testing.assert_allclose(np.sum(np.abs(whole) ** 2, axis=0), 1, rtol=1e-6)
    block = slice(2, 5), slice(4, 8), slice(0, 10)
    np.testing.assert_allclose(sampling.coil_maps((6, 8, 10), 4, [5], block), whole[:, 2:5, 4:8])
    steps = np.abs(np.diff(whole, axis=1)).max()
    assert 0 < steps < 0.5 and np.abs(whole[0] - whole[1]).max() > 0.5


@pytest.mark.parametrize("acceleration", [1, 4, 8])
def test_masks(acceleration):
    """The exact number of lines, a complete middle, and fewer lines further out."""
    masks = [sampling.random_mask((60, 48), acceleration, [n]) for n in range(40)]
    assert {mask.sum() for mask in masks} == {60 * 48 // acceleration}
    assert all(mask[28:33, 23:26].all() for mask in masks)
    if acceleration > 1:
        assert np.any(masks[0] != masks[1])
        mean = np.mean(masks, axis=0)
        radius = np.hypot((np.arange(60) - 30)[:, None] / 30, (np.arange(48) - 24) / 24)
        edges = [0.15, 0.4, 0.7, 1.0, 1.5]
        rings = [mean[(radius >= a) & (radius < b)].mean() for a, b in itertools.pairwise(edges)]
        assert rings == sorted(rings, reverse=True) and rings[0] > 3 * rings[2]


def test_orders_of_modes():
    """A mask on the mesh, and spectra for sigpy, against numpy's centred transform."""
    rng = np.random.default_rng(1)
    image = rng.normal(size=(2, 4, 6, 5)) + 1j * rng.normal(size=(2, 4, 6, 5))
    axes = (1, 2, 3)
    on_mesh = np.fft.fftn(image, axes=axes, norm="ortho").transpose(0, 3, 2, 1)
    found = sampling.centred(np.stack([on_mesh.real, on_mesh.imag], axis=-1))
    right = np.fft.fftn(np.fft.ifftshift(image, axes=axes), axes=axes, norm="ortho")
    np.testing.assert_allclose(found, np.fft.fftshift(right, axes=axes), atol=1e-6)
    mask = np.zeros((6, 5))
    mask[3 + 2, 2 - 1] = 1  # ky = 2, kz = -1
    order = sampling.mesh_order(mask, 4, (6, 8, 4))
    assert np.argwhere(order).tolist() == [[4, 2, kx] for kx in range(4)]


def test_strength_of_the_regularisation():
    tried: list[float] = []

    def score(strength: float) -> float:
        tried.append(strength)
        return -abs(np.log2(strength / 0.016))

    assert classical.tuned(score, start=0.002) == 0.016
    assert sorted(tried) == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032]


def rows_of(folder: Path) -> list[dict[str, float]]:
    with (folder / "losses.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.mark.budget(30)
def test_training_resumes_and_is_evaluated(monkeypatch, capsys):
    """A training that goes on from a checkpoint ends like one that was not interrupted."""
    original = adam.Adam.save

    def kept(self: adam.Adam, path: Path) -> None:
        original(self, path)
        shutil.copytree(path.parent, f"at-{self.step}", dirs_exist_ok=True)

    monkeypatch.setattr(adam.Adam, "save", kept)
    assert brain.main([*TINY, "whole"]) == 0
    rows = rows_of(Path("whole"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert ["validation_loss" in row for row in rows] == [False, True, False, True]
    assert (Path("whole") / "losses.png").stat().st_size > 1000
    assert "step 4/4" in capsys.readouterr().err
    shutil.copy("whole/settings.json", "at-2/settings.json")
    assert brain.main(["train", "--resume", "--every", "2", "--output", "at-2"]) == 0
    assert rows_of(Path("at-2")) == rows
    with np.load("whole/checkpoint.npz") as right, np.load("at-2/checkpoint.npz") as found:
        assert int(found["step"]) == 4 and set(right) == set(found)
        for name in right:
            np.testing.assert_array_equal(found[name], right[name])

    pytest.importorskip("skimage")
    pytest.importorskip("sigpy")
    words = (
        "evaluate whole --side 8 --voxel 24 --volumes 2 --classical-iterations 3 --output scores"
    )
    assert brain.main(words.split()) == 0
    assert "| network - tv |" in capsys.readouterr().out
    with Path("scores/scores.csv").open() as file:
        scores = list(csv.DictReader(file))
    assert [row["method"] for row in scores] == ["zero-filled", "tv", "network"] * 2
    assert Path("scores/slices-2x.png").stat().st_size > 1000
    assert json.loads(Path("whole/settings.json").read_text())["steps"] == 4
    assert brain.main(words.split()) == 2 and "--overwrite" in capsys.readouterr().err
    before = Path("scores/scores.csv").read_text()
    np.save("half.npy", np.arange(64).reshape(8, 8) % 2)
    masked = words.replace("--output scores", "--mask half.npy --classical none --output masked")
    assert brain.main(masked.split()) == 0  # one mask, one acceleration
    with Path("masked/scores.csv").open() as file:
        assert [row["acceleration"] for row in csv.DictReader(file)] == ["2.0"] * 4
    import evaluation

    judged = []
    monkeypatch.setattr(evaluation, "tuned", lambda score: judged.append(score(0.01)) or 0.01)
    tuned = [words.replace("scores", where) + f" --tune-in {where}" for where in evaluation.REGIONS]
    assert [brain.main(each.split()) for each in tuned] == [0, 0]
    assert judged[0] > 0 and judged[0] != judged[1]  # PSNR in the brain, and of the volume
    assert "best in the volume of" in Path("volume/summary.md").read_text()
    monkeypatch.setattr(evaluation, "classical", None)  # the images are there already
    monkeypatch.undo()
    assert brain.main([*words.split(), "--resume"]) == 0
    assert Path("scores/scores.csv").read_text() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--side 4", "--side 4: must be at least 8"),
        ("--noise nan", "--noise nan: must be at least 0"),
        ("--noise inf", "--noise inf: must be at least 0"),
        ("--seed 9999999", "--seed 9999999: must be at most 1048576"),
        ("--acceleration 0", "acceleration 0: must be at least 1"),
        ("--acceleration nan", "acceleration nan: must be at least 1"),
        ("--mask empty.npy", "--mask empty.npy: no array can be read from it"),
        ("--mask two.npz", "--mask two.npz: no array can be read from it"),
        ("--start-from damaged", "checkpoint.npz: no trained network can be read"),
        ("--rate nan", "--rate nan: must be above 0, and finite"),
        ("--voxel 2 nan", "must be one size [mm], or the least and largest"),
        ("--mesh row:3 --ranks 3", "--mesh row:3: --side 8 must be a multiple of 3"),
        ("--mesh replica:2", "--batch 1 must be a multiple of 2"),
        ("--mesh line:2", "'line' is not one of replica, row, col"),
        ("--acceleration 0.5", "acceleration 0.5: must be at least 1"),
        ("--rate 0", "--rate 0.0: must be above 0"),
        ("--voxel 3 2", "--voxel [3.0, 2.0]: must be one size"),
        ("--mask mask.npy", "--mask mask.npy has shape (8, 9); volumes of (8, 8, 8) need (8, 8)"),
        ("--mask none.npy", "--mask none.npy: no array can be read from it"),
        ("--mask twos.npy", "--mask twos.npy: must have zeros and ones"),
        ("--start-from nowhere", "nowhere/checkpoint.npz: no trained network can be read"),
        ("--resume", "folder: not the folder of a training"),
    ],
)
def test_mistakes_are_refused(folder, capsys, words, message):
    np.save("mask.npy", np.ones((8, 9)))
    np.save("twos.npy", np.full((8, 8), 2))
    np.savez("two.npz", np.ones((8, 8)))
    Path("empty.npy").touch()
    Path("damaged").mkdir()
    Path("damaged/checkpoint.npz").write_bytes(b"PK\x03\x04 and no more")
    assert brain.main([*TINY, "folder", *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not Path("folder").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --resume --output old --steps 7", "--steps 7: the training that is resumed has 4"),
        ("train --resume --output old --overwrite", "leave --start-from and --overwrite out"),
        ("evaluate old --output new --side 8", "the training has --mask m.npy: give a --mask for"),
        ("evaluate old --output new --mask m.npy --acceleration 2", "leave --acceleration out"),
    ],
)
def test_options_that_contradict_a_training(folder, capsys, words, message):
    Path("old").mkdir()
    held = {"anatomy": "made-up", "side": 8, "steps": 4, "mask": "m.npy"}
    Path("old/settings.json").write_text(json.dumps({"settings": held}))
    np.save("m.npy", np.ones((8, 8)))
    assert brain.main(words.split()) == 2
    assert message in capsys.readouterr().err
    assert not Path("new").exists()


def test_results_are_not_overwritten(folder, capsys):
    Path("old").mkdir()
    assert brain.main([*TINY, "old"]) == 2
    assert "--output old exists" in capsys.readouterr().err


def test_missing_package_is_named(monkeypatch, capsys):
    anatomy.template.cache_clear()
    monkeypatch.setitem(sys.modules, "nilearn", None)
    assert brain.main([*TINY, "folder", "--anatomy", "mni152"]) == 2
    assert "pip install nilearn" in capsys.readouterr().err
    monkeypatch.setattr(classical.importlib.util, "find_spec", lambda name: name != "sigpy" or None)
    classical.check_packages("none")
    with pytest.raises(anatomy.InputError, match="pip install sigpy"):
        classical.check_packages("tv")
