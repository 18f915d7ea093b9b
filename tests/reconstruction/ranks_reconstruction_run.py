"""A reconstruction from its run file to its results, on any mesh; mocks and their noise."""

import csv
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, by_rank_zero, process_mesh, shared_folder, solo
from run_files import ROUND_NUMBERS

from flowpm_dist.grid.box import Box
from flowpm_dist.io.files import snapshot_attributes
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.observables.observations import ObservedBlock
from flowpm_dist.observables.tracers import ObservationError
from flowpm_dist.reconstruction import EXACT, Gaussian, Poisson
from flowpm_dist.reconstruction.folder import ReconstructionFolder, outcome_of
from flowpm_dist.reconstruction.observed import likelihood_of, observed_kind
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.sampling_session import SamplingSession
from flowpm_dist.reconstruction.search_session import SearchSession

RUN = (
    ROUND_NUMBERS
    + """[box]
grid = 16
size = 64.0
[evolution]
a_stop = 0.8
steps = 2
[observation]
structure = "1lpt"
{data}
[data]
mock_seed = 1
[search]
evaluations = 12
checkpoint_every = 4
[run]
precision = "float64"
"""
)
DENSITY = 'kind = "density"\nsigma = 0.4'
COUNTS = 'kind = "counts"\nmean_count = 3.0'
KINDS = {"density": DENSITY, "counts": COUNTS}


def config_of(folder, data, *changes):
    path = folder / f"run-{process_mesh(f'row:{SIZE}').rank}.toml"
    text = RUN.format(data=data)
    for change in changes:
        text = text.replace(*change)
    path.write_text(text)
    return ReconstructionOptions.load(path)


@dataclass(frozen=True)
class Searched:
    """A session that has ended, and what it left."""

    session: SearchSession
    path: Path
    rows: list
    facts: dict

    def mock(self, data, folder):
        """Data of the kind asked for, of the universe that was searched for."""
        if data is DENSITY:
            return self.session.observed.data
        options = config_of(folder, data)
        return observed_kind(options)(options, self.session.model).data

    def found(self):
        """Losses, and the last line of results."""
        table = np.loadtxt(self.path / "metrics.csv", delimiter=",", skiprows=1)
        columns = ("loss", "data", "prior", "gradient_norm")
        losses = {name: [float(row[name]) for row in self.rows] for name in columns}
        return losses | {"table": table, "final": self.facts["loss"]}


@pytest.mark.ranks(1)
def test_a_likelihood_of_ones_own_has_the_amplitude_that_is_fitted(tmp_path):
    own = '[likelihood]\nname = "flowpm_dist.reconstruction:Poisson"\n'
    fitted = f"{own}[priors]\nnoise_amplitude = [0.5, 2.0]\n"
    unit = np.ones([16] * 3)
    box, block = Box(unit.shape, (64.0,) * 3, solo(), tf.float64), ObservedBlock(unit, unit, unit)
    options = config_of(tmp_path, DENSITY, ("[search]", f"{own}[search]"))
    assert isinstance(likelihood_of(options, box, block, unit), Poisson)
    options = config_of(tmp_path, DENSITY, ("[search]", f"{fitted}[search]"))
    with pytest.raises(ObservationError, match="Poisson' has no parameter noise_amplitude"):
        likelihood_of(options, box, block, unit)


class Louder(Gaussian):
    """The likelihood of a density whose noise amplitude has another name."""

    parameters = ("loudness",)

    def parts(self, density, annealing=EXACT, loudness=None):
        given = {} if loudness is None else {"noise_amplitude": loudness}
        return super().parts(density, annealing, **given)


LOUDER = f'[likelihood]\nname = "{__name__}:Louder"\n[priors]\n'


@pytest.mark.long
@pytest.mark.ranks(2)
def test_a_parameter_of_an_own_likelihood_is_found_and_drawn(mesh, tmp_path_factory):
    """As the noise amplitude is, which it multiplies sigma by, too: with the same prior."""
    keys = 'stages = [[0, 1, 8]]\n[sampler]\ndraws = 3\nwarm_up = 1\nleaps = 2\nstart = "found"\n'
    tiny = [("grid = 16", "grid = 8"), ('"1lpt"', '"linear"'), ("evaluations = 12\n", "")]
    found = {}
    for name, head in {"noise_amplitude": "[priors]\n", "loudness": LOUDER}.items():
        requested = (
            *tiny,
            ("[search]", f"{head}{name} = [0.5, 4.0]\n[search]\n{keys}"),
        )
        ended = search_in(mesh, shared_folder(tmp_path_factory), *requested)
        session = ended.session
        SamplingSession(session.options, mesh, session.folder, session.progress).run()
        draws = json.loads(session.folder.result.read_text())["sampling"]  # on every rank
        assert ended.facts["parameters"][name]["prior"] == [0.5, 4.0]
        moments = [draws["parameters"][name][key] for key in ("mean", "standard_deviation")]
        found[name] = [ended.facts["parameters"][name]["value"], *moments]
    assert found["loudness"][0] != pytest.approx(2.25, abs=0.01)  # where the search begins
    assert found["loudness"] == pytest.approx(found["noise_amplitude"], rel=1e-9)


@pytest.mark.ranks(1)
def test_a_prior_needs_a_parameter_of_the_likelihood(tmp_path):
    unit = np.ones([16] * 3)
    box, block = Box(unit.shape, (64.0,) * 3, solo(), tf.float64), ObservedBlock(unit, unit, unit)
    requested = ("[search]", f"{LOUDER}loudnes = [1.0, 30.0]\n[search]")
    message = (
        r"no parameter loudnes; did you mean loudness\? \(it has loudness\): leave priors.loudnes"
    )
    with pytest.raises(ObservationError, match=message):
        likelihood_of(config_of(tmp_path, DENSITY, requested), box, block, unit)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Searches on a mesh, one for all tests of it."""
    return functools.cache(lambda mesh: search_in(mesh, shared_folder(tmp_path_factory)))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What rank 0 finds without the others."""

    def rank_zeros():
        folder = tmp_path_factory.mktemp("alone")
        ended = search_in(solo(), folder)
        mocks = {name: ended.mock(data, folder) for name, data in KINDS.items()}
        return ended.found() | mocks

    return by_rank_zero("search", rank_zeros)


def search_in(mesh, path, *changes):
    config = config_of(path, DENSITY, *changes)
    folder = ReconstructionFolder(path / "found")
    if mesh.rank == 0:
        folder.begin(resume=False)
    mesh.barrier()
    session = SearchSession(config, mesh, folder, Progress(rank=1))
    session.run(resume=False)
    mesh.barrier()
    with folder.iterations.open() as file:
        rows = list(csv.DictReader(file))
    return Searched(session, folder.path, rows, json.loads(folder.result.read_text()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mock_is_the_same_on_any_mesh(mesh, searched, alone, tmp_path, kind):
    box, whole = searched(mesh).session.model.box, alone[kind]
    place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.block, strict=True))
    block = searched(mesh).mock(KINDS[kind], tmp_path)
    np.testing.assert_allclose(block, whole[place], atol=1e-10)
    if kind == "counts":
        assert (whole == np.round(whole)).all()
        assert whole.mean() == pytest.approx(3.0, abs=6 * np.sqrt(3 / 16**3) + 0.03)
    else:
        assert 0.4 < whole.std() < 2.0


def test_a_reconstruction_and_its_results(mesh, searched, alone):
    ended = searched(mesh)
    found = ended.found()
    assert len(found["loss"]) == len(alone["loss"]) > 5
    for column in ("loss", "data", "prior", "gradient_norm"):
        np.testing.assert_allclose(found[column], alone[column], rtol=1e-8)
    np.testing.assert_allclose(found["final"], alone["final"], rtol=1e-9)
    np.testing.assert_allclose(found["table"], alone["table"], rtol=1e-6)
    facts, last = ended.facts, ended.rows[-1]
    assert (facts["stopped"], facts["converged"]) == ("evaluations", False)
    assert facts["left"] == pytest.approx(float(last["left"]), rel=1e-6)
    assert facts["left"] > 0.5
    assert float(facts["loss"]) == pytest.approx(float(last["loss"]), rel=1e-9)
    assert "has not converged" in outcome_of(facts["stopped"], facts["left"])
    assert snapshot_attributes(ended.path / "reconstruction.zarr")["complete"]
    for name in ("slabs.png", "correlation.png", "loss.png", "run.toml"):
        assert (ended.path / name).stat().st_size > 500
