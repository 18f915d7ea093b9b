"""Integrators and adjoints of users' modules, named in run files as "package.module:object"."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
from commands import flowpm_here
from run_files import ROUND_NUMBERS

import flowpm_dist as fpm
from flowpm_dist.evolution.adjoints import ADJOINTS
from flowpm_dist.evolution.integrators import INTEGRATORS
from flowpm_dist.io.snapshot import load_snapshot
from flowpm_dist.simulation.options import DynamicsOptions

MODULE = """
import tensorflow as tf
from pydantic import Field
from flowpm_dist.evolution.adjoints import DirectAdjoint
from flowpm_dist.evolution.integrators import FastPM, Integrator

class Slowed(FastPM):
    share: float = Field(default=1.0, gt=0, description="a number above 0")

    def schedule(self, growth, edges):
        whole = super().schedule(growth, edges)
        kicks = [[1, self.share if o.kind == "kick" else 1, 1, 1] for o in whole.operations]
        return type(whole)(whole.operations, whole.factors * tf.constant(kicks, tf.float64))

class Twin(DirectAdjoint):
    pass

class Clash(FastPM):
    steps: int = 7
"""
RUN = f"""
[box]
grid = 8
size = 16.0
{ROUND_NUMBERS}
[initial]
seed = 3
[evolution]
steps = 3
integrator = "own_schemes:Slowed"
share = 0.5
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a user's module and a run file; the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_schemes.py").write_text(MODULE)
    Path("leaves.py").write_text("import sys\nsys.exit(0)\n")
    Path("breaks.py").write_text("1 / 0\n")
    Path("run.toml").write_text(RUN)
    yield tmp_path
    for names in (INTEGRATORS, ADJOINTS):
        for name in [name for name in names if ":" in name]:
            del names[name]


def check(*settings: str) -> str:
    words = [word for text in settings for word in ("--set", text)]
    done = flowpm_here("simulate", "run.toml", "--check", *words)
    return "" if done.returncode == 0 else done.stderr


def test_a_run_with_an_integrator_of_a_users_module(here):
    done = flowpm_here("simulate", "run.toml", "--output", "out")
    assert done.returncode == 0, done.stderr
    evolution = tomllib.loads(Path("out/run.toml").read_text())["evolution"]
    assert (evolution["integrator"], evolution["share"]) == ("own_schemes:Slowed", 0.5)
    assert "half_step" in evolution
    cosmology = fpm.Cosmology(0.3, 0.05, 0.7, 0.96, sigma8=0.8)
    steps = fpm.scale_factor_steps(0.1, 1.0, 3)
    found = load_snapshot("out")["displacement"]
    from own_schemes import Slowed

    for scheme, is_same in ((Slowed(share=0.5), True), (Slowed(), False)):
        sim = fpm.Simulation(cosmology, 8, 16.0, steps, integrator=scheme)
        displacement = sim.run(seed=3).displacement.numpy()
        assert np.allclose(found, displacement, atol=1e-4) == is_same
    again = flowpm_here("simulate", "out/run.toml", "--check")
    assert again.returncode == 0 and 'integrator = "own_schemes:Slowed"' in again.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (['evolution.integrator="own_schemes:Slow"'], "'own_schemes' has no 'Slow'"),
        (['evolution.integrator="no_schemes:Slow"'], "there is no module 'no_schemes'"),
        (
            ['evolution.integrator="own_schemes:Twin"'],
            "no complete class that derives",
        ),
        (['evolution.integrator="own_schemes:Clash"'], "its field 'steps' is a key of the section"),
        (['evolution.integrator="leaves:X"'], "its module raises SystemExit: 0"),
        (['evolution.integrator="breaks:X"'], "its module raises ZeroDivisionError: division by"),
        (['evolution.integrator="own_schemes:Integrator"'], "no complete class that derives"),
        (["evolution.share=-1.0"], "evolution.share = -1.0: must be a number above 0"),
        (['evolution.integrator="cola"'], 'goes with integrator = "own_schemes:Slowed", not'),
        (['evolution.integrator="slow"'], 'or "package.module:object"'),
    ],
)
def test_mistakes_are_found_by_check(here, settings, message):
    assert check() == ""
    assert message in check(*settings)


def test_schemes_are_named_in_python_as_in_run_files(here):
    options = DynamicsOptions(
        integrator="own_schemes:Slowed", share=0.5, adjoint="own_schemes:Twin"
    )
    assert options.integrator.share == 0.5
    table = options.to_table()
    assert (table["integrator"], table["adjoint"]) == ("own_schemes:Slowed", "own_schemes:Twin")
