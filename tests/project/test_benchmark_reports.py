"""What benchmarks of chains report of made-up draws; what benchmarks say without their data."""

import argparse
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.signal import lfilter

from flowpm_dist.posteriors.calibration import uniform_p


@pytest.fixture
def benchmark(monkeypatch):
    """A benchmark by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


def test_missing_treepm_runs_are_named(benchmark, tmp_path, monkeypatch):
    runs, names = benchmark("common").treepm_runs, ["treepm_P1.npz", "treepm_P2.npz"]
    monkeypatch.delenv("FLOWPM_REFERENCE", raising=False)
    with pytest.raises(SystemExit, match="^FLOWPM_REFERENCE is not set: .*tests/data/README.md"):
        runs()
    monkeypatch.setenv("FLOWPM_REFERENCE", str(tmp_path))
    for name in names:
        with pytest.raises(SystemExit, match=f"{name}: no such file, .*tests/data/README.md"):
            runs()
        (tmp_path / name).touch()
    assert runs() == [tmp_path / name for name in names]


def test_a_gpu_is_compared_with_its_own_copies(benchmark):
    """1,000 particles: a kernel at half the copy's speed, and a run of 3 forces."""
    rows = [
        {"name": "copy", "seconds": 1e-6, "bytes": 4000},
        {"name": "kick", "seconds": 2e-6, "bytes": 4000},
        {"name": "run", "seconds": 6e-6, "bytes": 0, "peak": 3 * 2**29},
        {"name": "pmwd", "missing": "not in python: pip install pmwd"},
    ]
    gpu = benchmark("gpu")
    _, titles, *lines = [line.split() for line in gpu.lines_of(10, 3, rows)]
    assert titles == ["10^3", "ms", "ns/particle", "a", "force", "GB/s", "of", "copy", "GiB"]
    assert lines[:2] == [
        ["copy", "0.001", "4.0", "1.00"],
        ["kick", "0.002", "2.000", "2.0", "0.50"],
    ]
    assert lines[2] == ["run", "0.006", "6.000", "2.000", "1.50"]
    assert " ".join(lines[3]) == "pmwd not in python: pip install pmwd"
    assert gpu.sides_of("16,256") == [16, 256]
    with pytest.raises(argparse.ArgumentTypeError, match="above 128, sides are multiples"):
        gpu.sides_of("16,200")


def test_a_width_is_known_by_the_effective_number_of_the_squares(benchmark):
    """Draws that swing from side to side: their squares are correlated by the square of that."""
    swing, shape = -0.8, (1000, 4, 1)
    noise = np.random.default_rng(0).standard_normal(shape)
    drawn = 3 * np.sqrt(1 - swing**2) * lfilter([1], [1, -swing], noise, axis=0)
    found = benchmark("agreement_report").errors_of(drawn, ["x"])["x"]
    count, width = 4000, drawn.std(ddof=1)
    assert found["ess"] > 2 * count
    assert found["error of the mean"] == pytest.approx(width / np.sqrt(count))
    known = 3 / np.sqrt(2 * count) * np.sqrt((1 + swing**2) / (1 - swing**2))
    assert found["error of the width"] == pytest.approx(known, rel=0.1)


def test_gains_on_the_same_universes_are_compared_in_pairs(benchmark, tmp_path, capsys):
    rng = np.random.default_rng(1)
    common, samples = rng.normal(size=100), rng.normal(size=(50, 2))
    for kind, less in (("flow", 0.0), ("sbi", 0.25)):
        np.savez(tmp_path / f"{kind}_0.npz", samples=samples, gain=common - less)
    benchmark("agreement_report").report(tmp_path, ["a", "b"], ["P(k)"], None)
    message = capsys.readouterr().out
    _, end = json.JSONDecoder().raw_decode(message)
    pairs = json.loads(message[end:])["ln(q / prior) of test"]
    np.testing.assert_allclose(pairs["P(k), sbi less P(k), flow"], [-0.25, 0], atol=1e-12)


def test_draws_of_each_mock_are_thinned_by_their_own_effective_number(benchmark):
    """Chains of half the mocks stay where they are for 25 moves."""
    rng, draws, mocks = np.random.default_rng(2), 100, 1000
    drawn, truth = rng.normal(size=(draws, 1, mocks, 2)), rng.normal(size=(mocks, 1))
    slow = np.arange(mocks) % 2 == 1
    drawn[:, :, slow] = np.repeat(drawn[::25, :, slow], 25, axis=0)
    ess = np.where(slow, 8.0, 200.0)[np.newaxis]
    ranks, kept = benchmark("chains_calibration").ranks_of(drawn, truth, ess)
    np.testing.assert_array_equal(kept[:, 0], ess[0])
    assert uniform_p(ranks[slow, 0], int(slow.sum())) > 0.01
    assert uniform_p(ranks[~slow, 0], int((~slow).sum())) > 0.01


def test_runs_of_the_same_universes_are_compared_mock_by_mock(benchmark, tmp_path, capsys):
    """The second run is as the first, but shifted by a fifth of each mock's width."""
    calibration, mocks, draws = benchmark("chains_calibration"), 6, 8
    rng = np.random.default_rng(3)
    width, mean = rng.uniform(0.01, 0.03, mocks), rng.uniform(0.7, 0.9, mocks)
    drawn = mean + width * rng.normal(size=(draws, 2, mocks))
    modes = rng.normal(size=(draws, 2 * mocks))
    names = [f"{what} {chain}" for what in ("sigma8", "mode") for chain in range(2 * mocks)]
    facts = ["drawn", "step", "acceptance", "evaluations"]
    for name, shift in (("first", 0.0), ("second", 0.2)):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"mocks": mocks, "grid": 8, "structure": "linear", "method": "microcanonical"}
        (folder / "settings.json").write_text(json.dumps(settings))
        known = {"exact_mean": mean, "exact_width": width}
        np.savez(folder / "truth.npz", sigma8=mean, mode=np.zeros(mocks), **known)
        sigma8 = np.moveaxis(drawn + shift * width, 1, 2).reshape(draws, -1)
        rows = np.concatenate([np.ones((draws, 4)), sigma8, modes], axis=1)
        lines = [",".join([*facts, *names])]
        lines += [",".join(["1", *map(repr, map(float, row[1:]))]) for row in rows]
        (folder / "draws.csv").write_text("\n".join(lines) + "\n")
    calibration.report([tmp_path / "first", tmp_path / "second"], None)
    first, second = json.loads("[" + capsys.readouterr().out.replace("}\n{", "},{") + "]")
    assert "less first" not in first
    message = second["less first"]
    np.testing.assert_allclose(
        message["mean less the exact one, in widths"], [0.2, 0], rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(message["variance over the exact one"], [0, 0], atol=1e-9)
