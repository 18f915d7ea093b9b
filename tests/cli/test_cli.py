"""The command as a new user meets it: mistakes told early and once, results whole or absent."""

import fcntl
import io
import json
import os
import re
import select
import signal
import subprocess
import termios
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from commands import COMMAND, ROOT, flowpm, flowpm_and_loaded, flowpm_here, folder_with, plain
from full_disk import run_on_disk_of
from run_files import RUN

import flowpm_dist as fpm
from flowpm_dist.io import SnapshotError, load_light_cone, load_snapshot
from flowpm_dist.io.files import SNAPSHOT
from flowpm_dist.io.snapshot import DEFAULT_FIELDS, FIELDS
from flowpm_dist.jobs.folder import OF_EVERY_JOB
from flowpm_dist.simulate.folder import FILES, OF_LIGHT_CONE, PARTIAL, SimulationFolder
from meshimpl import launch

here = folder_with(RUN)
CONE = """
[lightcone]
field_of_view = 1.5
pixels = 12
z_max = 1.0
sources = [{ redshift = 0.5 }, { redshift = 1.0 }]
"""
SOURCES = "lightcone.sources"


def mpirun(ranks: int, *words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command, env = launch.mpirun_command(ranks, [*COMMAND, *words])
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("simulate", ["--ranks", "--output", "--overwrite", "--mesh"]),
        ("reconstruct", ["--ranks", "--mesh", "--output", "--resume", "--overwrite"]),
        ("train", ["--ranks", "--mesh", "--output", "--resume", "--overwrite"]),
        ("dataset", ["--output", "--split", "--dtype", "--compressed", "--samples-per-file"]),
        ("evaluate", ["--ranks", "--mesh", "--output", "--split", "--fresh", "--checkpoint"]),
        ("predict", ["--ranks", "--mesh", "--box-size", "--checkpoint"]),
        ("export", ["--output", "--checkpoint", "--overwrite"]),
        ("doctor", []),
    ],
)
def test_help_names_each_option_and_an_example(command, options):
    page = plain(flowpm_here(command, "--help").stdout)
    for word in (*options, f"Example: flowpm-dist {command}"):
        assert word in page


def test_help_and_version_import_nothing_heavy():
    for option, words in (("--help", ["simulate", "evaluate"]), ("--version", ["flowpm-dist "])):
        done, loaded = flowpm_and_loaded(option)
        assert done.returncode == 0 and all(word in done.stdout for word in words)
        assert loaded <= {"rich"}


def test_mistakes_are_reported_before_anything_heavy_is_imported(here):
    (here / "run.toml").write_text(RUN.replace("grid", "gird"))
    done, loaded = flowpm_and_loaded("simulate", "run.toml")
    assert (done.returncode, loaded) == (2, set())


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (("grid = 16", "gird = 16"), [], "box.gird is not a key; did you mean grid?"),
        (("grid = 16", "grid = 15"), [], "box.grid = 15: must be an even whole number"),
        (("seed = 1", 'white_noise = "w.npy"'), [], 'w.npy": there is no such file'),
        (("", ""), ["--mesh", "row:3"], "row:3': 3 places, but the job has 1 rank"),
        (("", ""), ["--ranks", "3"], "no mesh of 3 ranks divides the grid [16, 16, 16]"),
        (("", ""), ["--ranks", "0"], "Invalid value for '--ranks'"),
        (("", ""), ["--output", "run.toml/out"], "run.toml is not a folder"),
        (("", ""), ["--output", "."], "holds run.toml from elsewhere"),
    ],
)
def test_mistakes_have_status_2_and_leave_nothing(here, change, words, message):
    (here / "run.toml").write_text(RUN.replace(*change))
    done = flowpm_here("simulate", "run.toml", *words)
    assert done.returncode == 2, done
    assert message in plain(done.stderr)
    assert "Traceback" not in done.stderr
    assert [p.name for p in here.iterdir()] == ["run.toml"]


def _npy_with(shape: str) -> bytes:
    """A .npy file of zeros whose header says another shape of as many characters."""
    file = io.BytesIO()
    np.save(file, np.zeros((16, 16, 16), np.float32))
    return file.getvalue().replace(b"(16, 16, 16)", shape.encode())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "box.grid=1000000000",
            "box.grid = 1000000000: must be an even whole number from 4 to 2^20",
        ),
        ("evolution.steps=1000000000", "evolution.steps = 1000000000: must be at most 100000"),
        (f"initial.seed={'1' * 6000}", "must be a whole number from 0"),
        (f"initial.seed={'[' * 5000}", "the value must be as in a run file"),
        ('initial.white_noise="pipe.npy"', "initial.white_noise = 'pipe.npy': a device or a pipe"),
        (f"initial.white_noise={'a' * 9000}", "File name too long; must be a .npy file"),
        ("initial.white_noise=negative.npy", "not a readable .npy file (its shape is not valid)"),
        (f"{SOURCES}=[{{ file = '/dev/zero' }}]", "file = '/dev/zero': a device or a pipe"),
        (f"{SOURCES}=[{{ file = 'large.txt' }}]", "no n(z) of sources: must have at most 16.0 MiB"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_inputs_without_an_end_or_a_meaning(here, setting, message):
    os.mkfifo("pipe.npy")
    Path("negative.npy").write_bytes(_npy_with("(-16,16, 16)"))
    with Path("large.txt").open("wb") as file:
        file.truncate(2**24 + 1)
    words = ["--set", setting] + (["--set", "initial.seed="] if "white_noise" in setting else [])
    (here / "run.toml").write_text(RUN + CONE * setting.startswith(SOURCES))
    done = flowpm_here("simulate", "run.toml", "--check", *words)
    assert done.returncode == 2, done
    assert message in plain(done.stderr)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: must be a regular file"),
        ("#" * (2**24 + 1), "cannot be read: must have at most 16.0 MiB"),
        (f"a = {'1' * 6000}", "not TOML: a whole number has too many digits"),
        (f"a = {'[' * 5000}", "not TOML: lists or tables are nested too deep"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_run_files_without_an_end_or_a_meaning(here, text, message):
    other = here / "other.toml"
    os.mkfifo(other) if text is None else other.write_text(text)
    done = flowpm_here("simulate", "other.toml", "--check")
    assert done.returncode == 2 and message in plain(done.stderr)


@pytest.mark.parametrize(
    ("variable", "output", "status", "message"),
    [
        ("0", "/dev/full", 1, "error: cannot write to the standard output: No space left"),
        ("2", "/dev/null", 2, "error: OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=1 in the env"),
    ],
)
def test_an_output_or_a_place_that_is_none(here, variable, output, status, message):
    variables = {"OMPI_COMM_WORLD_RANK": variable, "OMPI_COMM_WORLD_SIZE": "1"}
    with open(output, "w") as full:
        done = subprocess.run(
            [*COMMAND, "simulate", "run.toml", "--check"],
            env={**os.environ, **variables}, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == status
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_a_missing_run_file(here):
    done = flowpm_here("simulate", "none.toml", "--ranks", "2")
    assert done.returncode == 2
    assert "none.toml: 1 problem cannot be read: No such file" in plain(done.stderr)


def test_under_mpirun_rank_0_alone_tells_a_mistake(here):
    (here / "run.toml").write_text(RUN.replace("grid = 16", "grid = 15"))
    started = time.monotonic()
    done = mpirun(3, "simulate", "run.toml", timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("must be an even whole number") == 1
    assert time.monotonic() - started < 30


def test_under_mpirun_wrong_usage_is_told_once(here):
    done = mpirun(2, "simulate", "--rancs", "2", timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("No such option") == 1


ALL = ("--set", f"output.fields={json.dumps(list(FIELDS))}", "--set", "output.a=[0.5]")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The same universe on one rank and on two, the latter with a backend that is not installed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.toml").write_text(RUN + CONE)
    done = {}
    for ranks in (1, 2):
        words = ["simulate", "run.toml", "--ranks", str(ranks), "--output", f"out{ranks}", *ALL]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("PYTHONPATH", ROOT)
            patch.setenv("MPLBACKEND", ["agg", "Qt4Agg"][ranks - 1])
            done[ranks] = flowpm_here(*words) if ranks == 1 else flowpm(*words, timeout=300)
        assert done[ranks].returncode == 0, done[ranks].stderr
    return folder, done


@pytest.mark.budget(60)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_leaves_all_its_results(two_runs, ranks):
    folder, done = two_runs
    out = folder / f"out{ranks}"
    left = {*FILES, *OF_LIGHT_CONE, *OF_EVERY_JOB, SNAPSHOT, "a_0.5000"}
    assert {p.name for p in out.iterdir()} == left
    assert re.findall(r"step (\d)/2", done[ranks].stderr) == ["1", "2"]
    for word in (f"out{ranks}", "ns per particle", "density.png", "linear theory"):
        assert word in done[ranks].stdout
    assert done[ranks].stdout.count("Results in") == 1
    timings = json.loads((out / "timings.json").read_text())
    assert timings["ranks"] == len(timings["peak_memory_bytes"]) == ranks
    assert timings["ns_per_particle_per_step"] > 0
    assert len(timings["steps"]) == 2
    table = np.loadtxt(out / "power_spectrum.csv", delimiter=",", skiprows=1)
    assert table.shape[1] == 5
    assert np.isfinite(table).all()
    resolved = tomllib.loads((out / "run.toml").read_text())
    assert resolved["mesh"]["shape"] == f"row:{ranks},col:1"


def test_one_rank_and_two_write_the_same_universe(two_runs):
    early = [load_snapshot(two_runs[0] / f"out{ranks}/a_0.5000") for ranks in (1, 2)]
    for name in ("displacement", "velocity", "density"):
        scale = early[0][name].std()
        np.testing.assert_allclose(early[1][name], early[0][name], rtol=0, atol=2e-5 * scale)
    one, two = (load_snapshot(two_runs[0] / f"out{ranks}") for ranks in (1, 2))
    np.testing.assert_array_equal(one["white_noise"], two["white_noise"])
    for name in ("linear_delta", "displacement", "velocity", "density"):
        scale = one[name].std()
        np.testing.assert_allclose(two[name], one[name], rtol=0, atol=2e-5 * scale, err_msg=name)
    assert one["density"].mean() == pytest.approx(1, abs=1e-6)
    first, second = (load_light_cone(two_runs[0] / f"out{ranks}") for ranks in (1, 2))
    for name in ("kappa", "gamma1", "gamma2"):
        scale = first[name].std()
        np.testing.assert_allclose(second[name], first[name], rtol=0, atol=5e-5 * scale)
    assert one.attributes["cosmology"]["Omega_m"] == 0.30966
    assert one.attributes["box_size"] == [64.0] * 3


def test_a_state_is_read_from_what_a_run_wrote(here):
    assert flowpm_here("simulate", "run.toml").returncode == 0
    written, read = load_snapshot("run-output"), fpm.State.from_snapshot("run-output")
    assert set(written.arrays) == set(DEFAULT_FIELDS)
    for name, field in read.fields().items():
        scale = written[name].std()
        np.testing.assert_allclose(field.numpy(), written[name], rtol=0, atol=2e-5 * scale)
    assert read.header().items() <= dict(written.attributes).items()
    assert written.attributes["seed"] == 1
    resolved = (here / "run-output" / "run.toml").read_text()
    assert resolved.endswith(written.attributes["config"])
    assert "numpy" in written.attributes["versions"]


OTHER_SCHEMES = {
    "bullfrog": (
        'edges = [0, 0.3, 1]\nmesh_factor = 2\ndeconvolve = true\n[results]\nmultipoles = "z"',
        'lpt_order = 3\nnoise = "nested"\nfixed_amplitude = true\npaired = true',
    ),
    "cola": ('a_start = 0.05\nsteps = 2\nspacing = "D"\nhalf_step = "geometric"', ""),
}


@pytest.mark.parametrize("integrator", OTHER_SCHEMES)
def test_a_run_by_another_scheme_is_what_python_gives(here, integrator):
    """Every option of the file arrives at the simulation, and in the resolved run file."""
    evolution, initial = OTHER_SCHEMES[integrator]
    text = RUN.replace("seed = 1", f"seed = 1\n{initial}").replace("steps = 2", evolution)
    text = text.replace("[evolution]", f'[evolution]\nintegrator = "{integrator}"')
    (here / "run.toml").write_text(text)
    done = flowpm_here("simulate", "run.toml")
    assert done.returncode == 0, done.stderr
    resolved = tomllib.loads((here / "run-output" / "run.toml").read_text())
    for section, keys in tomllib.loads(text).items():
        if section != "box":
            assert keys.items() <= resolved[section].items()
    cosmology = fpm.Cosmology(**tomllib.loads(RUN)["cosmology"])
    if integrator == "bullfrog":
        options = {"noise": "nested", "fixed_amplitude": True, "lpt_order": 3, "mesh_factor": 2}
        sim = fpm.Simulation(
            cosmology, 16, 64.0, [0, 0.3, 1], integrator="bullfrog", deconvolve=True, **options
        )
    else:
        steps = fpm.growth_steps(cosmology, 0.05, 1.0, 2)
        scheme = fpm.COLA(half_step="geometric")
        sim = fpm.Simulation(cosmology, 16, 64.0, steps, integrator=scheme)
    state = sim.run(seed=1, paired=integrator == "bullfrog")
    found = load_snapshot("run-output")["displacement"]
    np.testing.assert_allclose(found, state.displacement.numpy(), atol=1e-4)
    table = np.loadtxt("run-output/power_spectrum.csv", delimiter=",", skiprows=1)
    assert np.isfinite(table).all()
    assert table.shape[1] == (8 if integrator == "bullfrog" else 5)
    if integrator == "bullfrog":
        seen = state.density(redshift_space="z")
        poles = fpm.multipoles(seen, axis="z", window="cic")
        np.testing.assert_allclose(table[:, 4:-1].T, poles.power, rtol=1e-3, atol=1)


def test_a_finished_run_is_not_overwritten_unless_asked(two_runs):
    folder, _ = two_runs
    words = ["simulate", str(folder / "run.toml"), "--output", str(folder / "out1")]
    for more in ([], ["--ranks", "2"]):
        done = flowpm(*words, *more)
        assert done.returncode == 2
        assert "holds a finished run: add --overwrite" in done.stderr


def test_the_resolved_run_file_with_given_white_noise_gives_the_same_again(two_runs):
    folder, _ = two_runs
    first = load_snapshot(folder / "out1")
    np.save(folder / "noise.npy", first["white_noise"])
    text = (folder / "out1" / "run.toml").read_text()
    again = text.replace("seed = 1", f'white_noise = "{folder / "noise.npy"}"')
    (folder / "again.toml").write_text(again)
    out = folder / "again"
    done = flowpm_here("simulate", str(folder / "again.toml"), "--output", str(out))
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(load_snapshot(out)["displacement"], first["displacement"])


def test_a_halo_too_small_stops_the_run_with_the_one_that_would_do(here):
    (here / "run.toml").write_text(RUN + "[run]\nhalo = 1\n")
    done = flowpm("simulate", "run.toml", "--ranks", "2")
    assert done.returncode == 1
    assert len(re.findall(r"error: .*beyond the halo of 1; halo = \d+ would do", done.stderr)) == 1
    assert "Traceback" not in done.stderr
    assert os.listdir("run-output") == []


def test_a_disk_that_takes_no_more_ends_the_run_with_the_cause(here):
    words = [*COMMAND, "simulate", "run.toml"]
    done = run_on_disk_of(12_000, words)
    assert done.returncode == 1
    assert "error: cannot write" in done.stderr
    assert "snapshot.zarr/displacement: File too large" in done.stderr
    assert os.listdir("run-output") == []


def start_long_run(ranks: int) -> subprocess.Popen[str]:
    """A run that has done its first step, with many before it."""
    text = RUN.replace("steps = 2", "steps = 60").replace("grid = 16", "grid = 32")
    Path("long.toml").write_text(text)
    process = subprocess.Popen(
        [*COMMAND, "simulate", "long.toml", "--ranks", str(ranks), "--output", "long"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("step"):
            return process
    raise AssertionError("".join(seen))


@pytest.mark.budget(30)
@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGUSR1), (2, signal.SIGTERM)])
def test_a_run_that_a_signal_stops_leaves_a_checkpoint_and_no_results(here, ranks, number):
    process = start_long_run(ranks)
    process.send_signal(number)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    with pytest.raises(SnapshotError):
        load_snapshot("long")
    assert os.listdir("long") == [PARTIAL]
    last = SimulationFolder(Path("long")).checkpoints.last
    assert last is not None
    assert f"after step {last} of 60; go on with --resume" in plain(message)
    if ranks == 2:
        done = flowpm_here("simulate", "long.toml", "--output", "long", "--resume")
        assert f"going on after step {last}" in done.stderr
        assert len(json.loads(Path("long/timings.json").read_text())["steps"]) == 60


@pytest.mark.budget(30)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminal_that_closes_stops_a_run_with_a_checkpoint(here, ranks):
    text = RUN.replace("steps = 2", "steps = 2000")
    Path("long.toml").write_text(f"{text}[output]\ncheckpoint_every = 2\n")
    terminal, inside = os.openpty()
    termios.tcsetwinsize(inside, (24, 100))
    process = subprocess.Popen(
        [*COMMAND, "simulate", "long.toml", "--ranks", str(ranks), "--output", "long"],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(inside)
    while SimulationFolder(Path("long")).checkpoints.last is None:
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 2**16)
    os.close(terminal)
    assert process.wait(60) == 128 + signal.SIGHUP
    assert SimulationFolder(Path("long")).checkpoints.last is not None
    assert os.listdir("long") == [PARTIAL]


def test_one_rank_killed_ends_all_and_leaves_no_results(here):
    process = start_long_run(2)
    ranks = [pid for pid in descendants(process.pid) if is_rank(pid, "1")]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    _, message = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "error" in message
    with pytest.raises(SnapshotError):
        load_snapshot("long")
    done = flowpm_here("simulate", "run.toml", "--output", "long")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in Path("long").iterdir()} == {*FILES, *OF_EVERY_JOB, SNAPSHOT}


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def is_rank(pid: int, number: str) -> bool:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return f"OMPI_COMM_WORLD_RANK={number}".encode() in variables
