"""A reconstruction from its run file to its results, on any mesh; mocks and their noise."""

import csv
import json

import numpy as np
import pytest
from conftest import SIZE, process_mesh, shared_folder

from flowpm_dist.config.reconstruction import load_reconstruction
from flowpm_dist.io.files import snapshot_attributes
from flowpm_dist.jobs.progress import WorkProgress
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.parts import model_of, observed_of
from flowpm_dist.reconstruction.search_session import SearchSession

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
    progress, text = WorkProgress(rank=1), config.resolved()
    outcome = SearchSession(config.plan, mesh, folder, progress, text).run(resume=resume)
    mesh.barrier()
    with (path / "iterations.csv").open() as file:
        rows = list(csv.DictReader(file))
    return outcome, rows, json.loads((path / "result.json").read_text())


@pytest.mark.parametrize("data", [DENSITY, COUNTS], ids=["density", "counts"])
def test_a_mock_is_the_same_on_any_mesh(mesh, tmp_path, data):
    plan = config_of(tmp_path, data).plan
    solo = process_mesh(f"row:{SIZE}").without("row")
    blocks = []
    for ranks in (mesh, solo):
        model = model_of(plan, ranks)
        blocks.append((model.box, observed_of(plan, model).data))
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
