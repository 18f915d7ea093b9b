"""The examples run, smaller than they are: scripts in process, run files by the command."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import zarr
from commands import flowpm_here

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.network.keras_network import made_model
from flowpm_dist.evolution.corrections import load_correction
from tests.project.test_docs import LOADERS

EXAMPLES = Path(__file__).parents[2] / "examples"
BENCHMARKS = EXAMPLES.with_name("benchmarks")
TUTORIALS = EXAMPLES.parent / "docs" / "tutorials"
pytestmark = pytest.mark.timeout(300)

# Words of a script that are replaced, so that it is soon done.
SMALLER = {
    "simulate": {"grid=64": "grid=16"},
    "gradients": {"grid=32": "grid=8", "1.0, 5)": "1.0, 2)"},
    "reconstruct": {"grid=32": "grid=8", "box_size=64.0": "box_size=32.0", "evaluations=60": "8"},
    "lensing": {"grid=64": "grid=16", "1.0, 10)": "1.0, 3)", "pixels=64": "pixels=16"},
}


def run_script(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a script as `python NAME.py ARGUMENTS` does; its names."""
    path = EXAMPLES / f"{name}.py"
    code = path.read_text()
    for old, new in SMALLER.get(name, {}).items():
        assert old in code, f"{path.name}: nothing to replace: {old}"
        code = code.replace(old, new)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(code, str(path), "exec"), names)
    return names


def flowpm(*words: object) -> None:
    """Run the command; it must succeed."""
    done = flowpm_here(*map(str, words))
    assert done.returncode == 0, done.stderr


# Convolutions take most of the time: two steps, and few volumes besides theirs.
FEW_VOLUMES: dict[str, dict[str, Any]] = {
    "training": {"batch": 4, "calibrate": 4, "validate_every": 2, "checkpoint_every": 2},
    "data": {"simulations": 8, "reuse": 1, "fill": 4, "validation": 4, "test": 4},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(name: str, changes: dict[str, dict[str, Any]]) -> Path:
    """The run file of an example with other values."""
    run_file = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    for section, keys in changes.items():
        for key in keys.keys() - {"calibrate"}:
            assert key in run_file[section], f"{section}.{key}"
        run_file[section] |= keys
    path = Path(f"{name}.toml")
    path.write_text(tomli_w.dumps(run_file))
    return path


def test_every_example_is_tested():
    text = Path(__file__).read_text().partition("\n}\n")[2]  # without SMALLER
    text += '"mesh_model"'  # ranks_mesh_model.py
    assert not [p.name for p in EXAMPLES.glob("*.*") if f'"{p.stem}"' not in text]


def test_simulate(monkeypatch, capsys):
    names = run_script("simulate", [], monkeypatch)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(names["k"])
    # A universe of few modes follows linear theory on the largest scales to their scatter.
    assert 0.3 < names["power"][0] / names["linear"][0] < 3


def test_gradients(monkeypatch, capsys):
    names = run_script("gradients", [], monkeypatch)
    for name, slope in names["found"].items():
        assert slope == pytest.approx(names["differences"][name], rel=1e-4), name


def test_reconstruct(monkeypatch, capsys):
    names = run_script("reconstruct", [], monkeypatch)
    assert names["r_final"][0] > 0.85


def test_lensing(monkeypatch, capsys):
    """The run's derivative agrees with theory, within the scatter of few particles and modes."""
    names = run_script("lensing", [], monkeypatch)
    assert 0.2 < names["slope"] / names["theory"] < 2
    assert names["maps"].kappa.shape == names["gamma2"].shape == (2, 16, 16)
    assert capsys.readouterr().out.count("e-") >= 6


SMALL_CONE = {"box": {"grid": 16}, "evolution": {"steps": 3}, "lightcone": {"pixels": 16}}
FEW_CELLS = {"box": {"grid": 8}, "evolution": {"steps": 2, "a_start": 0.4}}
MAPS, ZARR = "convergence.png", "convergence.zarr/zarr.json"
FEW_CELLS |= {"lightcone": {"pixels": 4}, "search": {"evaluations": 3}}


@pytest.mark.parametrize(
    ("command", "name", "changes", "results"),
    [
        ("simulate", "demo", {"box": {"grid": 16, "size": 32.0}}, "power_spectrum.png"),
        ("simulate", "lensing", SMALL_CONE, f"{MAPS} convergence_power.png convergence_power.csv"),
        ("reconstruct", "lensing_reconstruct", FEW_CELLS, f"{MAPS} convergence.csv {ZARR}"),
    ],
)
def test_run_files(folder, command, name, changes, results):
    flowpm(command, small(name, changes), "--output", "found")
    for result in results.split():
        assert (folder / "found" / result).stat().st_size > 200


@pytest.mark.parametrize("name", ["reconstruct", "sample", "sigma8"])
def test_reconstruct_run_files(name, folder):
    changes: dict[str, dict[str, Any]] = {
        "box": {"grid": 16, "size": 64.0},
        "search": {"evaluations": 5},
    }
    own: list[str] = []
    if name != "reconstruct":
        changes["sampler"] = {"draws": 2, "warm_up": 2, "leaps": 2}
    else:
        np.save(folder / "sigma.npy", np.full((16, 16, 16), 0.1))
        changes["observation"] = {"sigma": "sigma.npy"}
        k = np.geomspace(1e-3, 20.0, 100)
        np.savetxt(folder / "pk.txt", np.transpose([k, 2e4 * k / (1 + (k / 0.02) ** 2) ** 1.3]))
        own = ["--set", f"cosmology.power={folder / 'pk.txt'}"]
    flowpm("reconstruct", small(name, changes), "--output", "found", *own)
    assert (folder / "found" / "slabs.png").stat().st_size > 500
    assert (folder / "found" / "chains.png").exists() == (name != "reconstruct")
    kept = folder / "found" / "checksums.json"
    of_files = json.loads(kept.read_text()) if kept.exists() else {}
    assert list(of_files) == (["cosmology.power", "observation.sigma"] * (name == "reconstruct"))
    fields = next((folder / "found").glob("*.zarr"))
    universe = fpm.Cosmology(**zarr.open(fields).attrs["cosmology"])
    assert (universe.power is not None) == (name == "reconstruct")


def test_demo_training(folder):
    """What is asked of a network afterwards is in test_cli_training.py."""
    changes = FEW_VOLUMES | {"evolution": {"steps": 2}}
    changes["training"] = FEW_VOLUMES["training"] | {"warmup": 1}
    flowpm("train", small("demo_training", changes), "--output", "trained")
    assert (folder / "trained" / "training.png").stat().st_size > 500


def test_survey_training():
    """Its universes are tested in tests/cosmoflow/ranks_observation.py."""
    plan = LOADERS["network"]((EXAMPLES / "survey_training").with_suffix(".toml"))
    assert plan.parameters == ("Omega_m", "sigma8") and plan.network.input == "asinh"
    assert set(plan.record.nuisances) == {"b1", "noise_amplitude"}


def test_galaxy_training():
    """Its universes are tested in tests/observables/ranks_galaxies.py."""
    plan = LOADERS["network"]((EXAMPLES / "galaxy_training").with_suffix(".toml"))
    assert plan.parameters == ("Omega_m", "sigma8") and plan.network.input == "log1p-counts"
    assert set(plan.record.nuisances) == {"log_M_min", "alpha"}


def test_neutrino_training():
    """Trainings whose universes differ in m_nu are tested in tests/cosmoflow."""
    plan = LOADERS["network"]((EXAMPLES / "neutrino_training").with_suffix(".toml"))
    assert plan.parameters == ("Omega_m", "sigma8", "m_nu") and plan.record.nuisances == {}


def test_lensing_train():
    """Its universes and its training are tested in tests/cosmoflow/ranks_map_training.py."""
    path = (EXAMPLES / "lensing_train").with_suffix(".toml")
    plan = LOADERS["network"](path)
    assert (plan.input_shape, plan.channels) == ((12, 12, 1), 2)
    assert plan.parameters == ("Omega_m", "sigma8")
    name, outputs = plan.network.name, plan.outputs
    model = made_model(name, (12, 12, 2), outputs, "float32", 0)
    assert model.output_shape == (None, outputs) and model.count_params() > 1e5
    assert plan.warnings == ()


@pytest.mark.budget(40)
@pytest.mark.long
def test_cosmoflow(monkeypatch, folder):
    """The commands are run in this process."""
    message = []

    def run(words, check):
        message.append(words[3])
        options = words[4:]
        if "--ranks" in options:
            at = options.index("--ranks")
            options = [*options[:at], *options[at + 2 :]]
        flowpm(words[3], *options)

    monkeypatch.setattr(subprocess, "run", run)
    run_file = small("cosmoflow", FEW_VOLUMES | {"box": {"grid": 32}, "evolution": {"steps": 1}})
    arguments = ["--run-file", run_file, "--ranks", "1", "--seeds", "0", "--simulations", "8"]
    run_script("cosmoflow", [str(a) for a in [*arguments, "--fewer"]], monkeypatch)
    assert message == ["train", "evaluate"]
    assert (folder / "cosmoflow-output" / "evaluation").is_dir()


def test_emulate(folder):
    changes = {
        "box": {"grid": 8, "size": 16.0},
        "evolution": {"steps": 2},
        "truth": {"universes": 2, "mesh_factor": 2, "steps": 2},
        "emulate": {"iterations": 2, "validation": 1, "validate_every": 2},
    }
    flowpm("emulate", small("emulate", changes))
    found = load_correction(folder / "emulate-emulation" / "correction.json")
    assert found.trained.a == (0.1, 1.0) and len(found.scores["shown"]) > 0


def test_study_and_tune():
    """Their work is tested in test_study.py and test_tune.py; these are the numbers of runs."""
    study = LOADERS["study"]((EXAMPLES / "study").with_suffix(".toml"))
    assert len(study.points()) == 18
    subject = LOADERS["box"]((EXAMPLES / "study_simulation").with_suffix(".toml"))
    assert subject.evolution.step_count == 10 and not subject.output.figures
    assert LOADERS["tune"]((EXAMPLES / "tune").with_suffix(".toml")).tune.trials == 32


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_run_files_are_right(path):
    """With all their keys; "train" is the one that has every key of a training."""
    sections = tomllib.loads(path.read_text())
    kind = next(name for name in LOADERS if name in sections)
    LOADERS[kind](path)


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_find_what_they_import(path, monkeypatch):
    """They are run by hand: a name that has moved would not be missed before."""
    monkeypatch.syspath_prepend(str(path.parent))
    names = runpy.run_path(str(path), run_name="benchmark")
    assert path.stem in ("common", "agreement_report") or callable(names["main"])


def test_first_tutorial(monkeypatch):
    """The site runs all tutorials; this is the one to begin with, smaller."""
    code = (TUTORIALS / "first_universe.py").read_text()
    for old, new in {"grid=64": "grid=16", "1.0, 10)": "1.0, 3)"}.items():
        assert old in code
        code = code.replace(old, new)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    exec(compile(code, "first_universe", "exec"), names)
    assert 0.3 < names["spectrum"].power[0] / float(names["linear"](names["k"][0])) < 3
    # Velocities along the line of sight raise the power of the largest scales.
    assert names["monopole"][0] > names["spectrum"].power[0]
    np.testing.assert_array_equal(names["same"].density().numpy(), names["density"].numpy())
