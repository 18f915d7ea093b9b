"""A reconstruction from its run file to its results, on any mesh; mocks and their noise."""

import csv
import json
import os
import signal

import numpy as np
import pytest
import zarr
from conftest import SIZE, process_mesh, shared_folder

from flowpm_dist.config_reconstruction import load_reconstruction
from flowpm_dist.io.folder import snapshot_attributes
from flowpm_dist.io.progress import WorkProgress
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.parts import model_of, observed_of
from flowpm_dist.reconstruction.run import Reconstruction, reconstruct

RUN = """
[box]
grid = 16
size = 64.0
[cosmology]
Omega_m = 0.3
Omega_b = 0.05
h = 0.7
n_s = 0.96
sigma8 = 0.8
[evolution]
a_stop = 0.8
steps = 2
[model]
structure = "1lpt"
[data]
mock_seed = 1
{data}
[search]
evaluations = 12
checkpoint_every = 4
[run]
precision = "float64"
"""
DENSITY = 'kind = "density"\nsigma = 0.4\nadd_noise = true'
COUNTS = 'kind = "counts"\nmean_count = 3.0'


def config_of(folder, data, change=("", "")):
    path = folder / f"run-{process_mesh(f'row:{SIZE}').rank}.toml"
    path.write_text(RUN.format(data=data).replace(*change))
    return load_reconstruction(path)


def found_in(path, config, mesh, resume=False):
    """The outcome of a session, its rows and its figures."""
    folder = ReconstructionFolder(path)
    if mesh.rank == 0:
        folder.begin(resume=resume)
    mesh.barrier()
    outcome = Reconstruction(config, mesh, folder, WorkProgress(rank=1)).run(resume=resume)
    mesh.barrier()
    with (path / "iterations.csv").open() as file:
        rows = list(csv.DictReader(file))
    return outcome, rows, json.loads((path / "result.json").read_text())


@pytest.mark.parametrize("data", [DENSITY, COUNTS], ids=["density", "counts"])
def test_a_mock_is_the_same_on_any_mesh(mesh, tmp_path, data):
    config = config_of(tmp_path, data)
    solo = process_mesh(f"row:{SIZE}").without("row")
    blocks = []
    for ranks in (mesh, solo):
        model = model_of(config, ranks)
        blocks.append((model.box, observed_of(config, model).data))
    (box, block), (_, whole) = blocks
    place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.block, strict=True))
    np.testing.assert_allclose(block, whole[place], atol=1e-10)
    if data is COUNTS:
        assert (whole == np.round(whole)).all()
        assert whole.mean() == pytest.approx(3.0, abs=6 * np.sqrt(3 / 16**3) + 0.03)
    else:
        assert 0.4 < whole.std() < 2.0


def test_a_reconstruction_and_its_results(mesh, tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    config = config_of(folder, DENSITY)
    outcome, rows, facts = found_in(folder / "found", config, mesh)
    solo = process_mesh(f"row:{SIZE}").without("row")
    own = folder / f"alone-{mesh.rank}"
    _, known, alone = found_in(own, config, solo)
    assert outcome.stopped_by is None
    assert len(rows) == len(known) > 5
    for column in ("loss", "data", "prior", "gradient_norm"):
        ours, theirs = ([float(row[column]) for row in some] for some in (rows, known))
        np.testing.assert_allclose(ours, theirs, rtol=1e-8)
    assert facts["loss"] == pytest.approx(alone["loss"], rel=1e-9)
    assert snapshot_attributes(folder / "found" / "reconstruction.zarr")["complete"]
    table = np.loadtxt(folder / "found" / "metrics.csv", delimiter=",", skiprows=1)
    np.testing.assert_allclose(
        table, np.loadtxt(own / "metrics.csv", delimiter=",", skiprows=1), rtol=1e-6
    )
    for name in ("slabs.png", "correlation.png", "loss.png", "run.toml"):
        assert (folder / "found" / name).stat().st_size > 500


CHAINS = """
[priors]
sigma8 = [0.6, 1.0]
[sampler]
draws = 6
chains = 2
warm_up = 6
leaps = 2
start = "{start}"
keep_every = 3
checkpoint_every = 2
"""
CHAIN_MESH = {1: "row:1,col:1", 2: "replica:2,row:1,col:1", 4: "replica:2,row:2"}


class Interrupted(WorkProgress):
    """A signal comes after this move."""

    def __init__(self, move):
        super().__init__(rank=1)
        self._move = move

    def __call__(self, what, done, total, state=""):
        if what in ("warm-up", "draws") and done == self._move:
            os.kill(os.getpid(), signal.SIGUSR1)


def sampled(path, config, progress=None, resume=False):
    """The outcome of all that the run file asks for, and the moves."""
    folder = ReconstructionFolder(path)
    ranks = process_mesh(f"row:{SIZE}")
    if ranks.rank == 0:
        folder.begin(resume=resume)
    ranks.barrier()
    progress = progress or WorkProgress(rank=1)
    outcome = reconstruct(config, CHAIN_MESH[SIZE], folder, progress, resume=resume)
    folder.release()
    with folder.draws.open() as file:
        return outcome, list(csv.DictReader(file))


@pytest.mark.parametrize("start", ["prior", "found"])
def test_chains_after_the_search(start, tmp_path_factory):
    """Interrupted and resumed they make the same moves."""
    folder = shared_folder(tmp_path_factory)
    change = ("[search]", CHAINS.format(start=start) + "[search]")
    config = config_of(folder, DENSITY, change)
    _, known = sampled(folder / "known", config)
    stopped, _ = sampled(folder / "found", config, Interrupted(5))
    assert (stopped.stopped_by, stopped.stopped_at) == ("SIGUSR1", "after move 5 of 12")
    outcome, rows = sampled(folder / "found", config, resume=True)
    assert outcome.stopped_by is None
    assert len(rows) == 2 * 12
    for column in ("loss", "sigma8", "step", "re(0 0 1)", "drawn"):
        assert [row[column] for row in rows] == [row[column] for row in known]
    facts = json.loads((folder / "found" / "result.json").read_text())
    of_chains = facts["sampling"]
    assert facts["iterations"] > 0
    assert of_chains["modes"]["rhat_max"] > 0.9
    drawn = [float(row["sigma8"]) for row in rows if int(row["drawn"])]
    assert of_chains["parameters"]["sigma8"]["mean"] == pytest.approx(np.mean(drawn), rel=1e-6)
    assert of_chains["parameters"]["sigma8"]["truth"] == 0.8
    group = zarr.open_group(folder / "found" / "reconstruction.zarr" / "samples", mode="r")
    samples = group["white_noise"][...]
    assert samples.shape == (2, 2, 16, 16, 16)
    assert np.isfinite(samples).all() and np.isfinite(group["standard_deviation"][...]).all()
    last = np.fft.fftn(samples[1, 1])[0, 0, 1].real * np.sqrt(2 / 16**3)
    assert float(rows[-1]["re(0 0 1)"]) == pytest.approx(last, abs=1e-6)
    assert (folder / "found" / "chains.png").stat().st_size > 500
    assert ReconstructionFolder(folder / "found").mark()["complete"]
