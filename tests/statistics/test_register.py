"""The register of statistics: in run files, posteriors and studies, by name and by users' own."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from commands import flowpm_here
from run_files import ROUND_NUMBERS

import flowpm_dist as fpm
from flowpm_dist.posteriors import measured
from flowpm_dist.simulate.options import ResultsOptions
from flowpm_dist.statistics import STATISTICS
from flowpm_dist.studies.measures import measured as measured_run

RUN = f"""
[box]
grid = 8
size = 16.0
{ROUND_NUMBERS}
[initial]
seed = 3
[evolution]
steps = 3
[output]
a = [0.5]
[results]
"""
MINE = """
def kurtosis(density):
    d = density.numpy() - 1
    return (d**4).mean(axis=(-3, -2, -1)) / (d**2).mean(axis=(-3, -2, -1)) ** 2
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a user's module; the current one."""
    monkeypatch.chdir(tmp_path)
    Path("own_statistics.py").write_text(MINE)
    return tmp_path


def run(results: str, *words: str) -> Path:
    """The folder of a run with these results."""
    Path("run.toml").write_text(RUN + results)
    done = flowpm_here("simulate", "run.toml", "--output", "out", *words)
    assert done.returncode == 0, done.stderr
    return Path("out")


def table(path: Path) -> np.ndarray:
    return np.genfromtxt(path, delimiter=",", names=True)


def test_a_registered_statistic_is_known_to_all(here, monkeypatch):
    """By a name in the register, and as a user's own without one."""
    monkeypatch.setitem(STATISTICS, "peakedness", "own_statistics:kurtosis")
    out = run('statistics = ["peakedness", "own_statistics:kurtosis"]')
    density = fpm.State.from_snapshot(out).density()
    d = density.numpy().astype(float) - 1
    expected = (d**4).mean() / (d**2).mean() ** 2
    of_posterior = measured(["peakedness", "own_statistics:kurtosis"], density)
    features = json.loads((out / "statistics" / "features.json").read_text())
    of_study = measured_run(out, skip=0)
    for full, name in (("peakedness", "peakedness"), ("own_statistics:kurtosis", "kurtosis")):
        values = [
            table(out / "statistics" / f"{name}.csv")["value"],
            of_posterior[full][0, 0],
            features[name][0],
            of_study[f"mean feature of {name}"],
        ]
        np.testing.assert_allclose(values, expected, rtol=1e-5)
        assert (out / "statistics" / f"{name}.png").is_file()
    early = fpm.State.from_snapshot(out / "a_0.5000").density()
    [[at_half]] = measured(["peakedness"], early)["peakedness"]
    values = table(out / "a_0.5000" / "statistics" / "peakedness.csv")["value"]
    np.testing.assert_allclose(values, at_half, rtol=1e-5)
    assert abs(at_half - expected) > 0.1


def test_all_statistics_of_a_run(here):
    """Those of redshift space along the line of sight; the table has units and no pandas."""
    names = ", ".join(f'"{name}"' for name in STATISTICS)
    out = run(f'statistics = [{names}]\nline_of_sight = "x"\nmultipoles = "x"')
    folder = out / "statistics"
    assert sorted(path.stem for path in folder.glob("*.csv")) == sorted(STATISTICS)
    power = table(out / "power_spectrum.csv")
    np.testing.assert_allclose(table(folder / "power.csv")["power_Mpch3"], power["P_Mpch3"])
    assert (folder / "power.csv").read_text().startswith("k [h/Mpc],modes,power [(Mpc/h)^3]\n")
    poles = np.loadtxt(folder / "multipoles.csv", delimiter=",", skiprows=1)
    of_order = [poles[poles[:, 0] == order, -1] for order in (0, 2, 4)]
    columns = [power[f"P{order}_in_redshift_space_Mpch3"] for order in (0, 2, 4)]
    np.testing.assert_allclose(of_order, columns, rtol=1e-7)
    density = fpm.State.from_snapshot(out).density()
    features = json.loads((folder / "features.json").read_text())
    for name, [vector] in measured(["power", "histograms", "bispectrum"], density).items():
        np.testing.assert_allclose(features[name], vector, rtol=1e-5, atol=1e-5)
    assert not (run("", "--overwrite") / "statistics").exists()


def test_interlaced_spectra_of_a_run(here):
    """The power and the multipoles, against the same from Python."""
    state = fpm.State.from_snapshot(run('interlaced = true\nmultipoles = "z"'))
    power = fpm.power_spectrum(state.density(), interlaced=state.density(shift=0.5))
    found = table(Path("out/power_spectrum.csv"))
    np.testing.assert_allclose(found["P_Mpch3"], power.power, rtol=1e-5)
    assert abs(found["P_Mpch3"] / fpm.power_spectrum(state.density()).power - 1).max() > 0.01
    seen, shifted = (state.density(redshift_space="z", shift=shift) for shift in (0.0, 0.5))
    poles = fpm.multipoles(seen, interlaced=shifted).power
    np.testing.assert_allclose(found["P0_in_redshift_space_Mpch3"], poles[0], rtol=1e-5)


def test_spectra_of_a_run_with_the_window_of_painting(here):
    """The power against NumPy's, and the bispectrum against the same from Python."""
    out = run('statistics = ["bispectrum"]\nwindow = "none"')
    density = fpm.State.from_snapshot(out).density()
    n = np.fft.fftfreq(8, 1 / 8)
    bins = np.rint(np.sqrt(n[:, None, None] ** 2 + n[:, None] ** 2 + n**2))
    power = 16.0**3 / 8**6 * np.abs(np.fft.fftn(density.numpy().astype(float))) ** 2
    expected = [power[bins == number].mean() for number in range(1, 5)]
    np.testing.assert_allclose(table(out / "power_spectrum.csv")["P_Mpch3"], expected, rtol=1e-5)
    triangles = table(out / "statistics" / "bispectrum.csv")["bispectrum_Mpch6"]
    expected = fpm.statistics.bispectrum(density, window=None).bispectrum
    np.testing.assert_allclose(triangles, expected, rtol=1e-5)


def test_a_statistic_gets_what_it_needs_everywhere(here):
    """What is not known of the data is that of a density in real space, without shot noise."""
    Path("needy_statistics.py").write_text(
        "def all(density, values, axis, interlaced, shot_noise, window, power=2):\n"
        "    assert axis in (None, 'x') and (interlaced, shot_noise, power) == (None, 0.0, 2)\n"
        "    assert window == 'cic'\n"
        "    return [float(values.mean_count or 1.0)]\n"
        "def other(density, seed): ...\n"
    )
    out = run('statistics = ["needy_statistics:all"]\nline_of_sight = "x"')
    assert table(out / "statistics" / "all.csv")["value"] == 1.0
    density = fpm.State.from_snapshot(out).density()
    assert measured(["needy_statistics:all"], density)["needy_statistics:all"].shape == (1, 1)
    refused = flowpm_here(
        "simulate", "run.toml", "--output", "out", "--overwrite",
        "--set", 'results.statistics=["needy_statistics:other"]',
    )  # fmt: skip
    assert refused.returncode == 2 and "needy_statistics:other needs seed" in refused.stderr


def test_a_folder_named_statistics_that_is_not_ours_stays(here):
    out = run('statistics = ["power"]')
    (out / "statistics" / "mine.npy").write_bytes(b"1")
    again = ("simulate", "run.toml", "--output", "out", "--overwrite")
    refused = flowpm_here(*again)
    assert refused.returncode == 2 and "holds statistics from elsewhere" in refused.stderr
    assert (out / "statistics" / "mine.npy").exists()
    (out / "statistics" / "mine.npy").unlink()
    assert flowpm_here(*again).returncode == 0


def test_wrong_statistics_are_refused(here):
    """Before the work; a module's missing object when the work begins, but not by --check."""
    for results, message in (
        ('statistics = ["powr"]', "no statistic 'powr'; did you mean power?"),
        ('statistics = ["nowhere:kurtosis"]', "there is no module 'nowhere'"),
        ('line_of_sight = "x"', "goes with statistics"),
        ('statistics = ["own_statistics:skewness"]', "has no 'skewness'"),
    ):
        Path("run.toml").write_text(RUN + results)
        done = flowpm_here("simulate", "run.toml", "--output", "out")
        assert done.returncode == 2 and message in done.stderr.replace("\n", " "), done.stderr
    with pytest.raises(ValueError, match="several named power"):
        ResultsOptions(statistics=["power", "own_statistics:power"])


def test_counts_and_whole_numbers_are_measured_with_a_warning():
    """The power of counts of mean 5 is 25 times that of their overdensity, which is said."""
    counts = np.random.default_rng(2).poisson(5.0, (8, 8, 8))
    overdensity = counts / counts.mean() - 1
    expected = fpm.power_spectrum(overdensity, 100.0).power
    with pytest.warns(UserWarning, match=r"its mean is (4|5)\.\d+: the power of its overdensity"):
        of_counts = fpm.power_spectrum(counts, 100.0).power
    np.testing.assert_allclose(of_counts, expected * counts.mean() ** 2, rtol=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fpm.power_spectrum(overdensity, 100.0)
        of_density = fpm.power_spectrum(overdensity + 1, 100.0).power
    np.testing.assert_allclose(of_density, expected, rtol=1e-9)
