"""Halos of a run by the command, at its end and at its outputs."""

from pathlib import Path

import numpy as np
import pytest
from commands import flowpm_here, folder_with, plain
from run_files import RUN

import flowpm_dist as fpm
from flowpm_dist.catalogues.abundance import mass_function
from flowpm_dist.catalogues.clustering import tracer_power
from flowpm_dist.catalogues.occupation import populate
from flowpm_dist.catalogues.options import HOD
from flowpm_dist.io.files import SNAPSHOT
from flowpm_dist.jobs.folder import OF_EVERY_JOB
from flowpm_dist.simulate.folder import FILES

HALOS = """
[halos]
minimum = 4
members = true
galaxies = { log_M_min = 12.0, log_M_0 = 11.5, log_M_1 = 12.5, seed = 7 }
[output]
redshifts = [0.5]
"""
TEXT = (RUN + HALOS).replace("size = 64.0", "size = 16.0").replace("steps = 2", "steps = 4")
here = folder_with(TEXT)
LEFT = {"halos.hdf5", "halo_mass_function.csv", "halo_power.csv"}
LEFT |= {"galaxies.hdf5", "galaxy_power.csv", "galaxy_multipoles.csv"}
DRAWN = {"halos.png", "halo_mass_function.png", "halo_power.png", "galaxy_power.png"}
HOD_OF_RUN = HOD(log_M_min=12.0, log_M_0=11.5, log_M_1=12.5, seed=7)


def table(path: str) -> np.ndarray:
    return np.loadtxt(path, delimiter=",", skiprows=1)


def test_halos_of_a_run(here):
    done = flowpm_here("simulate", "run.toml", "--output", "out")
    assert done.returncode == 0, done.stderr
    left = {*FILES, *OF_EVERY_JOB, SNAPSHOT, "a_0.6667", *LEFT, *DRAWN}
    assert {path.name for path in Path("out").iterdir()} == left
    for folder in ("out", "out/a_0.6667"):
        state = fpm.State.from_snapshot(folder)
        expected = fpm.halos(state, minimum=4)
        found = fpm.Catalogue.read(f"{folder}/halos.hdf5")
        assert found.total == expected.total > 10
        assert (found.a, found.about["minimum"]) == (state.a, 4)
        np.testing.assert_array_equal(found.id, expected.id)
        np.testing.assert_allclose(found.velocity, expected.velocity, rtol=1e-4, atol=1e-3)
        assert len(found.members) == found.number.sum()
        counts = mass_function(found)
        np.testing.assert_allclose(table(f"{folder}/halo_mass_function.csv")[:, 4], counts.count)
        power = tracer_power(found, state.density())
        np.testing.assert_allclose(table(f"{folder}/halo_power.csv")[:, 4], power.bias, rtol=1e-4)
        galaxies = fpm.Catalogue.read(f"{folder}/galaxies.hdf5")
        drawn = populate(found, HOD_OF_RUN)
        np.testing.assert_array_equal(galaxies.position, drawn.position)
        assert galaxies.about["hod"]["seed"] == 7 and galaxies.total == drawn.total > 10
        seen = drawn.density(state.box, redshift_space="z")
        poles = fpm.multipoles(seen, shot_noise=drawn.shot_noise())
        rows = table(f"{folder}/galaxy_multipoles.csv")
        np.testing.assert_allclose(rows[:, 3], poles.power.ravel(), rtol=1e-4, atol=1e-2)
    last = fpm.Catalogue.read("out/halos.hdf5").total
    assert f"halos.hdf5 {last:,} halos; in Python" in " ".join(plain(done.stdout).split())


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("minimum", "5000", "halos.minimum = 5000: there are 4096 particles"),
        (
            "linking_length",
            "2.0",
            "linking_length = 2.0: must be a number from 0.01 to 1",
        ),
        ("relaxed", "[[40, 0.1]]", "must have falling linking lengths, above linking_length = 0.2"),
        ("relaxed", "[[3, 0.3]]", "must have rising numbers, above minimum = 4"),
        ("galaxies", "{ sigma_log_M = 0.0 }", "sigma_log_M = 0.0: must be a number above 0"),
        ("overdensities", '["500c"]', "must be a list of some of 200m, 200c"),
    ],
)
def test_mistakes_are_named_before_the_run(here, key, value, message):
    done = flowpm_here("simulate", "run.toml", "--set", f"halos.{key}={value}", "--check")
    assert done.returncode == 2
    assert message in " ".join(plain(done.stderr).split())


def test_an_occupation_that_is_not_there_ends_the_run_before_its_steps(here):
    galaxies = 'halos.galaxies={ occupation = "math:mine" }'
    done = flowpm_here("simulate", "run.toml", "--output", "own", "--set", galaxies)
    assert done.returncode == 2 and "initial conditions" not in done.stderr
    message = "halos.galaxies.occupation: the module 'math' has no 'mine'"
    assert message in " ".join(plain(done.stderr).split())


def test_a_link_longer_than_a_block_is_named_before_the_run(here):
    words = ["--ranks", "16", "--set", "halos.linking_length=1.0", "--check"]
    done = flowpm_here("simulate", "run.toml", *words, "--set", "mesh.shape=row:16,col:1")
    assert done.returncode == 2
    message = "halos.linking_length a link of 1 Mpc/h spans a rank's block of the box"
    assert message in " ".join(plain(done.stderr).split())
