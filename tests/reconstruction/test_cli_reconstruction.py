"""The command `reconstruct`: mistakes are reported before any work, and leave nothing behind."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from commands import flowpm_here, folder_with, plain
from run_files import with_keys

from flowpm_dist.evolution.corrections import PotentialFilter
from flowpm_dist.jobs.folder import OF_EVERY_JOB, OutputError
from flowpm_dist.jobs.job import Request
from flowpm_dist.jobs.results import Table, read_rows
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.reconstruction.diagnostics import (
    mode_names,
    sampling_facts,
    usual_energy_error,
)
from flowpm_dist.reconstruction.folder import MARK, ReconstructionFolder
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.sampler_options import SamplerOptions
from flowpm_dist.reconstruction.search_session import COLUMNS
from flowpm_dist.reconstruction.work import ReconstructionJob
from tests.reconstruction.test_config_reconstruction import GOOD

RUN = GOOD.replace("seed = 0", "checkpoint_every = 2")
here = folder_with(RUN)


def plan(folder: Path, ranks: int = 1, **options) -> ReconstructionJob:
    output = options.pop("output", folder / "found")
    return ReconstructionJob.plan(Request(folder / "run.toml", ranks, output, **options))


def begun(folder: Path, iterations: int = 0) -> ReconstructionFolder:
    """The folder of a reconstruction that was stopped."""
    found = ReconstructionFolder(folder / "found")
    found.begin(resume=False)
    config = ReconstructionOptions.load(folder / "run.toml")
    found.run_file.write_text(config.with_mesh("row:1,col:1").resolved())
    table = Table(found.iterations, (*COLUMNS, "sigma8"), 1)
    for number in range(1, iterations + 1):
        table.add({"iteration": number, "loss": 1 / number})
    table.close()
    return found


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        (("sigma = 0.2", "sigma = 0.0"), [], "observation.sigma = 0.0: must be the standard"),
        (("", ""), ["--resume", "--overwrite"], "--overwrite replaces it: give one"),
        (("", ""), ["--output", "."], "holds run.toml from elsewhere"),
    ],
)
def test_mistakes_have_status_2_and_leave_nothing(here, change, words, said):
    (here / "run.toml").write_text(RUN.replace(*change))
    done = flowpm_here("reconstruct", "run.toml", *words)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert said in plain(done.stderr)
    assert [path.name for path in here.iterdir()] == ["run.toml"]


def test_a_plan(here):
    found = plan(here, ranks=2)
    assert (found.mesh, found.is_complete) == ("row:2,col:1", False)
    assert not (here / "found").exists()
    with pytest.raises(ConfigError, match="3 places"):
        plan(here, mesh="row:3")
    with pytest.raises(OutputError, match="holds no reconstruction to resume"):
        plan(here, resume=True)


def test_bad_values_of_the_data_are_told(here):
    np.save(here / "data.npy", np.full((8, 8, 8), np.nan))
    np.save(here / "mask.npy", np.full((8, 8, 8), 2.0))
    text = RUN.replace("mock_seed = 1", 'file = "data.npy"')
    text = text.replace("sigma = 0.2", 'sigma = 0.2\nmask = "mask.npy"')
    (here / "run.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        plan(here)
    message = sorted(str(problem) for problem in caught.value.problems)
    assert re.match(r"data.file = .*data.npy is nan at \[0, 0, 0\]; must be finite", message[0])
    assert re.match(
        r"observation.mask = .*mask.npy is 2 at \[0, 0, 0\]; must be from 0 to 1", message[1]
    )


def test_a_folder_is_owned_by_one_reconstruction(here):
    begun(here)
    with pytest.raises(OutputError, match="add --resume to go on with it"):
        plan(here)
    assert not plan(here, resume=True).is_complete
    with pytest.raises(OutputError, match="another reconstruction is writing.*process .* on host"):
        folder = ReconstructionFolder(here / "found")
        folder.begin(resume=True)
        ReconstructionFolder(here / "found").begin(resume=True)


def test_overwriting_clears_what_was_there_and_nothing_else(here):
    folder = begun(here, 3)
    (folder.path / "notes.txt").touch()
    for name in OF_EVERY_JOB:
        (folder.path / name).touch()
    again = ReconstructionFolder(here / "found")
    del folder  # and its lock
    again.begin(resume=False, overwrite=True)
    assert {path.name for path in again.path.iterdir()} - {"notes.txt", ".lock"} == {MARK}
    assert {"run.toml", "iterations.csv", "checkpoints"} <= set(ReconstructionFolder.contents)


def test_a_complete_one_is_not_done_again(here):
    folder = begun(here)
    folder.write_mark(complete=True, iteration=3)
    assert json.loads((folder.path / MARK).read_text())["iteration"] == 3
    assert plan(here, resume=True).is_complete


def test_results_of_an_older_version_are_reported(here):
    facts = {"evaluations": 9, "seconds": 1.0, "parameters": {}, "data_per_observed_cell": 0.5}
    facts["prior_per_cell"] = 0.5
    assert "why it stopped was not written" in plan(here).report(facts)


def test_a_single_move_does_not_spoil_the_energy_error():
    names = ("loss", "acceptance", "step", "seconds", *mode_names())
    errors = [1e-4, 1e-4, 3e-4, 1.1e-2, math.inf]
    rows = [dict.fromkeys(names, "1") | {"drawn": "1", "energy_error": str(e)} for e in errors]
    sampler = SamplerOptions(chains=1, draws=5)
    assert sampling_facts(rows, sampler, (), None)["energy_error"] == pytest.approx(2e-4)
    assert math.isnan(usual_energy_error([math.inf]))


def test_a_resumed_run_must_ask_for_the_same(here):
    begun(here)
    other = RUN.replace("sigma = 0.2", "sigma = 0.3").replace("every = 2", "every = 5")
    (here / "run.toml").write_text(other)
    with pytest.raises(ConfigError) as caught:
        plan(here, resume=True)
    (problem,) = caught.value.problems
    assert "observation.sigma = 0.3: the reconstruction in" in str(problem)
    assert "has 0.2; to resume it, give that" in str(problem)


def test_files_of_a_resumed_run_must_not_have_changed(here):
    noise = np.random.default_rng(0).normal(1.0, 0.1, (8, 8, 8))
    np.save(here / "data.npy", noise)
    np.save(here / "mask.npy", np.ones((8, 8, 8)))
    text = RUN.replace("mock_seed = 1", 'file = "data.npy"')
    text = text.replace("sigma = 0.2", 'sigma = 0.2\nmask = "mask.npy"')
    begin = PotentialFilter.begun()
    begin.save(here / "c.json")
    (here / "run.toml").write_text(with_keys(text, 'evolution.correction = "c.json"'))
    folder = begun(here)
    found = plan(here, resume=True).options.checksums()
    assert found.keys() == {"data.file", "observation.mask", "evolution.correction"}
    folder.keep_checksums(found)
    np.save(here / "mask.npy", np.ones((8, 8, 8), np.float32))
    plan(here, resume=True)
    noise[3, 2, 1] += 1e-6
    np.save(here / "data.npy", noise)
    begin.with_theta(begin.theta + 1e-12).save(here / "c.json")
    with pytest.raises(ConfigError) as caught:
        plan(here, resume=True)
    said = "it has other values than when the reconstruction in .* was begun"
    problems = sorted(map(str, caught.value.problems))
    for key, problem in zip(("data.file", "evolution.correction"), problems, strict=True):
        assert re.match(f"{key} = .*: {said}", problem)


def test_the_time_of_a_search_and_of_chains(here, monkeypatch):
    """A move of the chains has a gradient for each leap, of all their cells together."""
    monkeypatch.setenv("FLOWPM_CACHE", str(here / "cache"))
    (here / "run.toml").write_text(f"{RUN}[sampler]\ndraws = 5\nwarm_up = 3\nleaps = 4\n")
    job = plan(here)
    search, chains = job.costs.pieces
    cells = search.cells
    assert (chains.cells, chains.left) == (2 * cells, (3 + 5) * 4)
    assert job.costs.estimate.seconds is None
    job.costs.remember({search.name: 0.5})  # of a gradient of one universe
    alone = search.left * 0.5
    assert job.costs.estimate.seconds == pytest.approx(alone + chains.left * 2 * 0.5)
    job.costs.remember({chains.name: 0.6})
    assert job.costs.estimate.seconds == pytest.approx(alone + chains.left * 0.6)
    facts = {"seconds_per_evaluation": 0.5, "sampling": {"seconds_per_evaluation": 0.6}}
    assert job.speeds(facts) == {search.name: 0.5, chains.name: 0.6}
    for method, mean in (("hmc", 3), ("adjusted-microcanonical", 8 / 3)):
        (here / "run.toml").write_text(f"{RUN}[sampler]\ndraws = 8\nwarm_up = 4\nleaps = 4\n"
                                       f'method = "{method}"\n')  # fmt: skip
        assert plan(here).costs.pieces[1].left == 12 * mean


def test_what_is_kept_of_one_that_was_stopped(here):
    folder = begun(here, 3)
    requested = Request(here / "run.toml", 1, folder.path, resume=True)
    job = ReconstructionJob(None, "row:1,col:1", requested)
    assert job.folder.saved() == "there is no checkpoint yet"
    with pytest.raises(OutputError, match="3 iterations, but .*checkpoints holds no checkpoint"):
        plan(here, resume=True)
    for name in ("iteration-000002.zarr", ".iteration-4.partial/iteration-000004.zarr"):
        (folder.checkpoints.path / name).mkdir(parents=True)
    assert "the last after iteration 2: go on with --resume" in job.folder.saved()
    plan(here, resume=True)


def test_rows_after_the_resumed_iteration_are_dropped(here):
    folder = begun(here, 5)
    with folder.iterations.open("a") as file:
        file.write("6,1")  # half a row of a process that was killed
    Table(folder.iterations, (*COLUMNS, "sigma8"), 4).close()
    assert [row["iteration"] for row in read_rows(folder.iterations)] == ["1", "2", "3"]


def test_the_size_of_what_is_written_grows_with_the_history(here):
    config = ReconstructionOptions.load(here / "run.toml")
    longer = config.model_copy(update={"search": config.search.model_copy(update={"history": 20})})
    assert longer.disk - config.disk == 3 * 20 * 8**3 * 4
