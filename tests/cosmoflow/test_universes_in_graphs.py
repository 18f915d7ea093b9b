"""Trainings' universes on one rank, by one graph where there are many small ones."""

import numpy as np
import pytest
from run_files import PRIORS

from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.volumes import universes
from flowpm_dist.cosmoflow.volumes.draws import Lanes
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
{name}
[training]
batch = 2
[data]
simulations = {simulations}
validation = 2
test = 2
"""


def maker_of(folder, text, name, simulations):
    path = folder / f"{simulations}.toml"
    path.write_text(PRIORS + text + REST.format(name=name, simulations=simulations))
    plan = TrainingPlan.load(path)
    return universes.maker_of(plan, ProcessMesh("row:1,col:1"), Lanes(2, 0, 2))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (DENSITIES, 'name = "keras_models:small"'),
        (MAPS, 'name = "flowpm_dist.cosmoflow.network.keras_network:map_convolutions"'),
    ],
    ids=["densities", "maps"],
)
def test_they_are_the_same_and_python_is_not_asked(text, name, tmp_path, monkeypatch, recwarn):
    few, many = (maker_of(tmp_path, text, name, count) for count in (8, universes.MANY))
    assert not few.many and many.many
    calls = []
    run = Simulation.run
    monkeypatch.setattr(Simulation, "run", lambda *a, **k: calls.append(1) or run(*a, **k))
    for generation in range(2):
        calls.clear()
        found = many.make("train", generation)
        assert bool(calls) == (generation == 0)
        calls.clear()
        expected = few.make("train", generation)
        assert calls
        assert np.std(found.volumes) > 1e-3 and np.std(found.volumes, axis=0).min() > 0
        for part in ("volumes", "power", "histogram"):
            one, other = (getattr(each, part) for each in (found, expected))
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-11, err_msg=part)
        for part in ("parameters", "index", "seeds"):
            np.testing.assert_array_equal(getattr(found, part), getattr(expected, part))
    assert not [each for each in recwarn if "step by step" in str(each.message)]
    large = maker_of(tmp_path, text.replace("grid = 8", "grid = 96"), name, 2048)
    assert many.is_whole(many.model) and not large.is_whole(large.model)
