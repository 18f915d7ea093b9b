"""The data of a reconstruction: messages name the place of a fault, a rank reads its block."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from flowpm_dist.io.volume import VolumeError
from flowpm_dist.observables import observations
from flowpm_dist.observables.observations import Observations, file_problems
from flowpm_dist.observables.options import DensityOptions, observation_of

GRID = (4, 6, 8)


def misfits(path, *box):
    return [problem.what for problem in file_problems({"file": path}, *box)]


def a_density(seed: int = 0) -> np.ndarray:
    density = np.random.default_rng(seed).gamma(4, 0.25, GRID)
    return density / density.mean()


def observed(folder: Path, **keys) -> Observations:
    """Observations; arrays become files of their key's name."""
    given = {"kind": "density", "sigma": 0.5} | keys
    if given["kind"] == "counts":
        given.pop("sigma")
    for key, value in given.items():
        if isinstance(value, np.ndarray):
            np.save(folder / f"{key}.npy", value)
            given[key] = folder / f"{key}.npy"
    file, priors = given.pop("file", None), given.pop("priors", None)
    return Observations(observation_of(given), GRID, file, priors)


def problems(folder: Path, **keys) -> dict[str, str]:
    return observed(folder, **keys).problems()


def with_value(array: np.ndarray, place: tuple[int, ...], value: float) -> np.ndarray:
    array = array.copy()
    array[place] = value
    return array


def a_mask() -> np.ndarray:
    mask = np.ones(GRID)
    mask[0], mask[1] = 0, 0.5
    return mask


OF_COUNTS = {"kind": "counts", "mean_count": 4.0}


@pytest.mark.parametrize("planes", [1, 100])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"file": with_value(a_density(), (2, 1, 3), np.nan)}, "nan at [2, 1, 3]; must be"),
        ({"file": with_value(a_density(), (3, 0, 0), np.inf)}, "inf at [3, 0, 0]"),
        ({"file": a_density() - 1}, "over the observed cells; must be a density of mean"),
        ({"file": a_density() - 1}, "if it is an overdensity, add 1"),
        ({"file": 5 * a_density()}, "has mean 5 over"),
        ({"mask": with_value(a_mask(), (2, 0, 7), 1.5)}, "1.5 at [2, 0, 7]; must be from 0 to 1"),
        ({"mask": with_value(a_mask(), (0, 0, 0), np.nan)}, "nan at"),
        ({"mask": np.zeros(GRID)}, "0 everywhere: nothing is observed"),
        ({"sigma": with_value(np.ones(GRID), (1, 2, 3), 0)}, "0 at [1, 2, 3]; must be above 0"),
        (
            OF_COUNTS | {"file": with_value(np.full(GRID, 4), (1, 1, 1), -2)},
            "-2 at [1, 1, 1]; counts must be at least 0",
        ),
        (
            OF_COUNTS | {"file": with_value(np.full(GRID, 4.0), (3, 2, 1), 4.5)},
            "4.5 at [3, 2, 1]; counts must be whole numbers",
        ),
        (
            {"sigma": 0.1, "file": with_value(a_density(), (1, 2, 3), -2)},
            "-2 at [1, 2, 3]; a density is at least 0, up to noise",
        ),
        (
            {"kind": "counts", "file": np.full(GRID, 3), "mean_count": 9.0},
            "has a mean of 3 per observed cell; must be about that",
        ),
    ],
)
def test_what_is_wrong_is_reported_with_its_place(tmp_path, monkeypatch, planes, keys, message):
    """Of the last of these keys."""
    monkeypatch.setattr(observations, "CHUNK_BYTES", planes * 8 * GRID[1] * GRID[2])
    ((where, what),) = problems(tmp_path, **keys).items()
    key = list(keys)[-1]
    assert where == ("data.file" if key == "file" else f"observation.{key}")
    assert message in what
    assert key == "mean_count" or f"{key}.npy" in what


def test_all_files_are_told_of_at_once(tmp_path):
    bad = {"file": np.full(GRID, np.nan), "mask": np.full(GRID, 2.0), "sigma": -np.ones(GRID)}
    assert set(problems(tmp_path, **bad)) == {
        "data.file", "observation.mask", "observation.sigma",
    }  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"mask": a_mask(), "sigma": np.ones(GRID)},
        {"mask": a_mask() > 0.6},
        {"file": a_density()},
        {"file": with_value(a_density(), (1, 1, 1), -0.3)},  # of noise
        {"file": with_value(a_density(), (0, 1, 1), np.nan), "mask": a_mask()},
        {"sigma": with_value(np.ones(GRID), (0, 1, 1), 0.0), "mask": a_mask()},
        OF_COUNTS | {"file": np.round(4 * a_mask() * a_density()), "mask": a_mask()},
    ],
)
def test_what_is_right_is_not_told_of(tmp_path, keys):
    assert problems(tmp_path, **keys) == {}


def mock(density: np.ndarray, sigma: float, mask: np.ndarray | float = 1.0) -> np.ndarray:
    """What the forward model makes of a density, see `flowpm_dist.observables.noise`."""
    return density + sigma / np.sqrt(mask) * np.random.default_rng(3).normal(size=GRID)


@pytest.mark.parametrize(
    "keys",
    [
        {"file": mock(a_density(), 1.0, 0.01), "sigma": 1.0, "mask": np.full(GRID, 0.01)},
        {"file": mock(2 * a_density() - 1, 0.05), "sigma": 0.05, "bias": {"b": 2.0}},
        {"file": mock(1.5 * a_density() - 0.5, 0.01), "sigma": 0.01, "structure": "linear"},
        {"file": mock(8 * a_density(), 0.5), "priors": {"amplitude": (0.01, 100.0)}},
        OF_COUNTS | {"file": np.round(16 * a_density()), "priors": {"amplitude": (0.5, 5.0)}},
        {
            "file": mock(0.1 * a_density() + 0.9, 1.0),
            "sigma": 0.05,
            "priors": {"noise_amplitude": (1.0, 20.0)},
        },
    ],
)
def test_what_the_forward_model_makes_is_taken(tmp_path, keys):
    """Noise of cells that are seen in part, bias, amplitudes that are fitted along."""
    assert problems(tmp_path, **keys) == {}
    if "priors" in keys:
        assert problems(tmp_path, **{**keys, "priors": {}}) != {}
    if "mask" in keys:
        assert "is -" in problems(tmp_path, **{**keys, "mask": np.ones(GRID)})["data.file"]


def test_without_files_nothing_of_the_size_of_the_grid_is_made():
    mock = DensityOptions(sigma=0.5)
    assert Observations(mock, (100_000,) * 3).problems() == {}


@pytest.mark.parametrize("kind", ["npy", "zarr", "hdf5"])
def test_a_rank_reads_its_block(tmp_path, kind):
    density = a_density().astype(np.float32)
    if kind == "npy":
        np.save(tmp_path / "density.npy", density)
        path = tmp_path / "density.npy"
    elif kind == "zarr":
        path = tmp_path / "density.zarr"
        zarr.open_group(path, mode="w").create_array("density", data=density)
    else:
        path = tmp_path / "data.h5:tracers/density"
        with h5py.File(tmp_path / "data.h5", "w") as file:
            file["tracers/density"] = density[..., np.newaxis]
            file["tracers/other"] = density
    assert misfits(path, GRID, None, None) == []
    block = observed(tmp_path, file=path, mask=a_mask()).block((0, 2, 0), (2, 3, 8))
    assert block.data.dtype == np.float64
    np.testing.assert_array_equal(block.mask, a_mask()[:2, 2:5])
    np.testing.assert_array_equal(block.data[1], density[1, 2:5])
    np.testing.assert_array_equal(block.data[0], 1.0)  # nothing is observed there
    np.testing.assert_array_equal(block.sigma[1], 0.5)


def test_blocks_of_counts_and_mocks(tmp_path):
    keys = OF_COUNTS | {"file": 4 * a_density(), "mask": a_mask()}
    block = observed(tmp_path, **keys).block((0, 0, 0), GRID)
    assert block.sigma is None
    np.testing.assert_array_equal(block.data[0], 0.0)
    sigma = with_value(np.full(GRID, 0.3), (0, 0, 0), np.nan)
    block = observed(tmp_path, sigma=sigma, mask=a_mask()).block((0, 0, 0), GRID)
    assert block.data is None
    np.testing.assert_array_equal(block.sigma[0], 1.0)
    np.testing.assert_array_equal(block.sigma[1:], 0.3)


def test_misfits_of_what_a_file_tells(tmp_path):
    group = zarr.open_group(tmp_path / "d.zarr", mode="w", attributes={"box_size": 100.0})
    group.create_array("density", data=a_density())
    assert misfits(tmp_path / "d.zarr", GRID, (100.0,) * 3, 1.0) == []
    (text,) = misfits(tmp_path / "d.zarr", GRID, (50.0,) * 3, None)
    assert "its box has [100.0, 100.0, 100.0] Mpc/h" in text
    (text,) = misfits(tmp_path / "d.zarr", (8, 8, 8), (100.0,) * 3)
    assert "shape (4, 6, 8); must be box.grid = (8, 8, 8)" in text
    (text,) = misfits(tmp_path / "none.npy", GRID, (100.0,) * 3)
    assert "there is no such file" in text


def test_a_file_that_has_gone(tmp_path):
    with pytest.raises(VolumeError, match="no such file"):
        observed(tmp_path, file=tmp_path / "file.npy")
