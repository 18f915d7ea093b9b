"""States at several times from a run file: each in a folder of its own, also of a resumed run."""

import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
from commands import flowpm_here, folder_with, plain

import flowpm_dist as fpm
from flowpm_dist.io import load_snapshot
from flowpm_dist.io.files import SNAPSHOT
from flowpm_dist.jobs.folder import OF_EVERY_JOB
from flowpm_dist.simulate import session as simulation_session
from flowpm_dist.simulate.folder import FILES, PARTIAL
from flowpm_dist.simulation.outputs import check_outputs
from tests.simulate.test_light_cone_run import COSMOLOGY
from tests.simulate.test_resume import STEPS, stopped

TIMES = STEPS + '[output]\nredshifts = [0, 3, 1]\nfields = ["displacement", "velocity"]\n'
here = folder_with(TIMES)
FOLDERS = ["a_0.2500", "a_0.5000"]


def by_python(times):
    steps = fpm.scale_factor_steps(0.1, 1.0, 4)
    return fpm.Simulation(COSMOLOGY, 8, 32.0, steps).run(seed=1, outputs=times)


def test_each_state_has_a_folder_with_its_spectrum(here):
    done = flowpm_here("simulate", "run.toml", "--output", "out")
    assert done.returncode == 0, done.stderr
    assert "a_0.2500, a_0.5000: the same at earlier times" in done.stdout
    left = {*FILES, *OF_EVERY_JOB, SNAPSHOT, *FOLDERS}
    assert {path.name for path in Path("out").iterdir()} == left
    for name, expected in zip((*FOLDERS, "."), by_python([0.25, 0.5, 1.0]), strict=True):
        found = load_snapshot(Path("out") / name)
        assert found.attributes["a"] == expected.a
        for field in ("displacement", "velocity"):
            np.testing.assert_allclose(found[field], getattr(expected, field).numpy(), atol=2e-5)
        table = np.loadtxt(f"out/{name}/power_spectrum.csv", delimiter=",", skiprows=1)
        spectrum = fpm.power_spectrum(expected.density(), window="cic")
        np.testing.assert_allclose(table[:, 1], spectrum.power, rtol=1e-3)
    growth = [np.loadtxt(f"out/{n}/power_spectrum.csv", delimiter=",", skiprows=1)[0, 3]
              for n in (*FOLDERS, ".")]  # fmt: skip
    assert growth[0] < 0.4 * growth[1] < 0.4 * growth[2]
    # A run without them that replaces this one takes them away, and nothing else.
    Path("out/a_0.7000").mkdir()
    words = ["--overwrite", "--set", "output.redshifts="]
    assert flowpm_here("simulate", "run.toml", "--output", "out", *words).returncode == 0
    left = {*FILES, *OF_EVERY_JOB, SNAPSHOT, "a_0.7000"}
    assert {path.name for path in Path("out").iterdir()} == left
    words = ["--overwrite", "--set", "output.redshifts=", "--set", "output.a=[0.7]"]
    done = flowpm_here("simulate", "run.toml", "--output", "out", *words)
    assert "holds a_0.7000 from elsewhere" in plain(done.stderr)


def test_a_resumed_run_makes_each_state_once(here, monkeypatch):
    """Stopped when the first is written and the second is not, for other codes."""
    words = ["--set", "output.format=gadget-hdf5", "--set", "output.fields="]
    made, real = [], simulation_session.write_state

    def write(folder, work, state, *rest):
        made.append(round(state.a, 4))
        return real(folder, work, state, *rest)

    monkeypatch.setattr(simulation_session, "write_state", write)
    stopped(monkeypatch, 1, *words)  # at a = 0.325
    assert made == [0.25]
    assert Path("out", PARTIAL, "a_0.2500", "snapshot.gadget").is_dir()
    done = flowpm_here("simulate", "run.toml", "--output", "out", "--resume", *words)
    assert done.returncode == 0, done.stderr
    assert made == [0.25, 0.5, 1.0]
    for name, expected in zip(FOLDERS, by_python([0.25, 0.5]), strict=True):
        with h5py.File(f"out/{name}/snapshot.gadget/snapshot.hdf5") as file:
            assert file["Header"].attrs["Time"] == expected.a
            order = np.argsort(file["PartType1/ParticleIDs"][...])
            velocities = file["PartType1/Velocities"][...][order] * np.sqrt(expected.a)
        peculiar = 100 * expected.velocity.numpy().reshape(-1, 3) / expected.a
        np.testing.assert_allclose(velocities, peculiar, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["a=[0.5]"], "output.redshifts and a are both given: give one of them"),
        (["redshifts=[9.5]"], "output.redshifts has z = 9.5: must be from 0 to 9, within the"),
        (["redshifts=[]"], "output.redshifts = []: must be a list of redshifts, of at least 0"),
        (["redshifts=[-0.5]"], "output.redshifts = [-0.5]: must be a list of redshifts"),
        (["redshifts=", "a=[0.5, 1.5]"], "output.a has a = 1.5: must be from 0.1 to 1, within the"),
        (["redshifts=", "a=[0.5, 0.50001]"], "output.a has two times for the folder a_0.5000:"),
        (["redshifts=", "a=0.5"], "output.a = 0.5: must be a list of scale factors above 0"),
    ],
)
def test_times_that_do_not_fit_are_told(here, settings, message):
    words = itertools.chain.from_iterable(("--set", f"output.{text}") for text in settings)
    done = flowpm_here("simulate", "run.toml", *words)
    assert done.returncode == 2
    assert message in plain(done.stderr)


def test_rounding_leads_no_time_beyond_the_steps():
    """As in a run file."""
    edges = np.array([0.1, 0.5, 1.0])
    assert check_outputs([1 + 1e-7, 0.1 - 1e-13, 0.5], edges) == [1.0, 0.1, 0.5]
    for a in (1 + 1e-5, 0.0999, np.nan):
        with pytest.raises(ValueError, match="not between the first and the last of the steps"):
            check_outputs([a], edges)


def test_times_may_be_rounded():
    """To float32, as files have them, or to eight digits, as people write them."""
    cosmology = fpm.Cosmology.planck18()
    third = float(np.float32(1 / 3))
    assert third != 1 / 3
    state = fpm.Simulation(cosmology, 4, 32.0, [0.1, third]).run(seed=1)
    on = fpm.Simulation(cosmology, 4, 32.0, [1 / 3, 1.0])
    assert on.run(particles=state).a == 1.0
    with pytest.raises(ValueError, match=r"are at a = 0\.3333333433, the first"):
        fpm.Simulation(cosmology, 4, 32.0, [0.34, 1.0]).run(particles=state)
    early = fpm.Simulation(cosmology, 4, 32.0, [0.016393443, 0.5, 1.0])
    first, last = early.run(seed=1, outputs=[1 / 61, 1.0000001])
    assert (first.a, last.a) == (0.016393443, 1.0)
    with pytest.raises(ValueError, match=r"a = 1\.00001 is not between the first and the last"):
        early.run(seed=1, outputs=[1.00001])


def test_white_noise_may_be_a_list():
    noise = np.random.default_rng(1).standard_normal((4, 4, 4))
    sim = fpm.Simulation(fpm.Cosmology.planck18(), 4, 32.0, [0.1, 1.0], precision="float64")
    states = [sim.run(white_noise=each).displacement.numpy() for each in (noise, noise.tolist())]
    np.testing.assert_array_equal(*states)
