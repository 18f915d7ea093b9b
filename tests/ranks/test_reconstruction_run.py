"""A reconstruction from its run file to its results, on any mesh; mocks and their noise."""

import csv
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import SIZE, process_mesh, shared_folder

from flowpm_dist.config.reconstruction import load_reconstruction
from flowpm_dist.io.files import snapshot_attributes
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.parts import observed_of
from flowpm_dist.reconstruction.search_session import Outcome, SearchSession

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


def config_of(folder, data, *changes):
    path = folder / f"run-{process_mesh(f'row:{SIZE}').rank}.toml"
    text = RUN.format(data=data)
    for change in changes:
        text = text.replace(*change)
    path.write_text(text)
    return load_reconstruction(path)


def solo():
    """A mesh of this rank alone."""
    return process_mesh(f"row:{SIZE}").without("row")


@dataclass(frozen=True)
class Searched:
    """A session that has ended, and what it left."""

    session: SearchSession
    outcome: Outcome
    path: Path
    rows: list
    facts: dict


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Searches on a mesh, one for all tests of it."""
    return functools.cache(lambda mesh: search_in(tmp_path_factory, mesh))


def search_in(tmp_path_factory, mesh):
    alone = mesh.size == 1
    path = tmp_path_factory.mktemp("alone") if alone else shared_folder(tmp_path_factory)
    config = config_of(path, DENSITY)
    folder = ReconstructionFolder(path / "found")
    if mesh.rank == 0:
        folder.begin(resume=False)
    mesh.barrier()
    progress, text = Progress(rank=1), config.resolved()
    session = SearchSession(config.plan, mesh, folder, progress, text)
    outcome = session.run(resume=False)
    mesh.barrier()
    with folder.iterations.open() as file:
        rows = list(csv.DictReader(file))
    return Searched(session, outcome, folder.path, rows, json.loads(folder.result.read_text()))


@pytest.mark.parametrize("data", [DENSITY, COUNTS], ids=["density", "counts"])
def test_a_mock_is_the_same_on_any_mesh(mesh, searched, tmp_path, data):
    plan = config_of(tmp_path, data).plan
    blocks = []
    for ranks in (mesh, solo()):
        session = searched(ranks).session
        known = session.observed if data is DENSITY else observed_of(plan, session.model)
        blocks.append((session.model.box, known.data))
    (box, block), (_, whole) = blocks
    place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.block, strict=True))
    np.testing.assert_allclose(block, whole[place], atol=1e-10)
    if data is COUNTS:
        assert (whole == np.round(whole)).all()
        assert whole.mean() == pytest.approx(3.0, abs=6 * np.sqrt(3 / 16**3) + 0.03)
    else:
        assert 0.4 < whole.std() < 2.0


def test_a_reconstruction_and_its_results(mesh, searched):
    found, alone = (searched(ranks) for ranks in (mesh, solo()))
    assert found.outcome.stopped_by is None
    assert len(found.rows) == len(alone.rows) > 5
    for column in ("loss", "data", "prior", "gradient_norm"):
        ours, theirs = ([float(row[column]) for row in some.rows] for some in (found, alone))
        np.testing.assert_allclose(ours, theirs, rtol=1e-8)
    assert found.facts["loss"] == pytest.approx(alone.facts["loss"], rel=1e-9)
    assert snapshot_attributes(found.path / "reconstruction.zarr")["complete"]
    tables = [np.loadtxt(x.path / "metrics.csv", delimiter=",", skiprows=1) for x in (found, alone)]
    np.testing.assert_allclose(*tables, rtol=1e-6)
    for name in ("slabs.png", "correlation.png", "loss.png", "run.toml"):
        assert (found.path / name).stat().st_size > 500
