"""Trainings' universes on one rank, by one graph where there are many small ones."""

import numpy as np
import pytest
from run_files import PRIORS

from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.volumes import universes
from flowpm_dist.cosmoflow.volumes.draws import Lanes
from flowpm_dist.observables.bias import EulerianBias
from flowpm_dist.observables.forward_model import ForwardModel
from flowpm_dist.observables.universe_model import MANY
from flowpm_dist.simulation.simulation import Simulation
from meshimpl.process_mesh import ProcessMesh

DENSITIES = """b1 = [0.5, 1.5]
[box]
grid = 8
size = 64.0
[evolution]
steps = 2
[observation]
bias = { b1 = 1.0, b2 = 0.3 }
redshift_space = "z"
sigma = 0.2
"""
MAPS = """noise_amplitude = [0.5, 1.5]
[box]
grid = 8
size = 160.0
[evolution]
a_start = 0.4
steps = 2
[observation]
kind = "convergence"
[lightcone]
field_of_view = 10.0
pixels = 8
z_max = 0.25
sources = [{ redshift = 0.2 }]
shape_noise = { sigma_e = 0.26, n_eff = 10.0 }
"""
REST = """[network]
precision = "float64"
name = "{name}"
[training]
batch = 2
[data]
simulations = 8
validation = 2
test = 2
"""
VOLUMES = "keras_models:small"
OF_MAPS = "flowpm_dist.cosmoflow.network.keras_network:map_convolutions"


def maker_of(folder, text, universes_made, lanes=1):
    path = folder / "run.toml"
    path.write_text(PRIORS + text + REST.format(name=OF_MAPS if text == MAPS else VOLUMES))
    plan, mesh = TrainingPlan.load(path), ProcessMesh("row:1,col:1")
    return universes.maker_of(plan, mesh, Lanes(2, 0, lanes), universes_made)


DRAWN = DENSITIES.replace("steps = 2", "drawn = [{ steps = 2 }, { steps = 3 }]")


@pytest.mark.parametrize(
    ("text", "lanes"), [(DRAWN, 2), (MAPS, 2)], ids=["densities, drawn", "maps"]
)
def test_they_are_the_same_and_python_is_not_asked(text, lanes, tmp_path, monkeypatch, recwarn):
    few, many = (maker_of(tmp_path, text, count, lanes) for count in (8, 2 * MANY))
    calls = []
    evolved = Simulation._evolved
    counted = lambda *a, **k: calls.append(1) or evolved(*a, **k)  # noqa: E731
    monkeypatch.setattr(Simulation, "_evolved", counted)
    for generation in range(3):
        calls.clear()
        found = many.make("train", generation)
        traced = len(calls)
        calls.clear()
        expected = few.make("train", generation)
        assert calls
        assert np.std(found.volumes) > 1e-3 and np.std(found.volumes, axis=0).min() > 0
        for part in ("volumes", "power", "histogram"):
            one, other = (getattr(each, part) for each in (found, expected))
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-11, err_msg=part)
        for part in ("parameters", "index", "seeds"):
            np.testing.assert_array_equal(getattr(found, part), getattr(expected, part))
    assert traced == 0
    assert not [each for each in recwarn if "step by step" in str(each.message)]


class Own(EulerianBias):
    """A user's scheme, which may draw random numbers."""


def test_which_universes_are_worth_a_graph(tmp_path):
    """Small ones of which each model makes many, at one redshift, without code of a user."""

    def is_whole(text=DENSITIES, made=MANY, lanes=1):
        maker = maker_of(tmp_path, text, made, lanes)
        return maker.is_whole(maker.model)

    assert is_whole() and is_whole(MAPS, lanes=2)
    assert not is_whole(made=MANY - 1) and not is_whole(lanes=2)
    assert not is_whole(DRAWN, MANY, 2) and is_whole(DRAWN, 2 * MANY, 2)
    assert is_whole(DENSITIES.replace("grid = 8", "grid = 80"))
    assert not is_whole(DENSITIES.replace("grid = 8", "grid = 82"))
    assert not is_whole(DENSITIES.replace("sigma", "redshifts = [0.5, 0.0]\nsigma"))
    maker = maker_of(tmp_path, DENSITIES, MANY)
    own = ForwardModel(maker.simulation, bias={"b": 1.0}, bias_scheme=Own)
    assert not maker.is_whole(own)
