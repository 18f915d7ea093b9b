"""Estimates are shown before a job starts, and jobs that cannot fit are refused in time."""

import json
import os
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from commands import flowpm, flowpm_and_loaded, flowpm_here, folder_with, plain
from run_files import RUN

from flowpm_dist.cosmoflow.training.job import TrainingJob
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.emulate.job import EmulationJob
from flowpm_dist.evolution.adjoints import ReversibleAdjoint
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.decomposition import (
    LARGEST_DISPLACEMENT,
    default_mesh,
    suggested_halo,
    usual_halo,
)
from flowpm_dist.initial.conditions import linear_amplitude
from flowpm_dist.initial.options import CHUNK
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES
from flowpm_dist.jobs.job import Request
from flowpm_dist.jobs.run_file import parse_settings
from flowpm_dist.reconstruction.work import ReconstructionJob
from flowpm_dist.simulate.job import SimulationJob
from flowpm_dist.simulation import simulation, state
from flowpm_dist.simulation.cost import (
    gradient_bytes,
    power_bytes,
    process_bytes,
    simulation_bytes,
    writing_bytes,
)
from flowpm_dist.simulation.demand import Demand, Estimate, TooLargeError
from flowpm_dist.simulation.options import SolverOptions
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.speeds import Pieces, kind_of, measured_rate, record_rate
from meshimpl import launch, process_mesh
from meshimpl.launch import HostMemory

GIB = 2**30
HOST = HostMemory(limit=16 * GIB, free=16 * GIB, is_container=False)

here = folder_with(RUN)


def memory_at(grid, axes):
    """A rank of 1 GiB and 64 bytes a cell."""
    x, y, z = grid
    return GIB + 64 * x * y * z // (axes.get("row", 1) * axes.get("col", 1))


def refusal(grid, mesh="row:1", together=1, host=HOST, others=lambda fits: (), **options):
    demand = Demand(
        "the job", grid, mesh, memory_at, lambda ranks: default_mesh(ranks, grid), others, **options
    )
    with pytest.raises(TooLargeError) as raised:
        demand.check(Estimate(together, together, demand.estimate().memory), host)
    return str(raised.value)


def test_what_does_not_fit_is_refused_with_a_grid_and_ranks_that_do():
    message = refusal((1024,) * 3)
    assert "the job needs about 65.0 GiB, and this host has 16.0 GiB" in message
    # 15 GiB are 631^3 cells; 5 hosts would do, but no mesh of 5, 6 or 7 ranks divides the grid.
    assert "a grid of 624, or 8 ranks on 8 hosts like this would fit" in message
    assert "--ignore-memory" in message


def test_ranks_of_one_host_share_its_memory():
    message = refusal((1024,) * 3, "row:2", 2)
    # The libraries, 0.35 GiB, are there once.
    assert "33.0 GiB on each of 2 ranks, 65.6 GiB together" in message
    assert "a grid of 608, or 16 ranks on 8 hosts" in message


def test_a_grid_that_data_have_is_not_to_be_changed():
    message = refusal((1024,) * 3, grid_is_free=False)
    assert "has 16.0 GiB; 8 ranks on 8 hosts like this would fit" in message
    message = refusal((2**20,) * 3, grid_is_free=False)
    assert "has 16.0 GiB. Use --ignore-memory" in message


def test_a_grid_keeps_its_proportions_and_other_changes_come_first():
    container = HostMemory(limit=4 * GIB, free=GIB, is_container=True)

    def others(fits):
        return (f"batch = {size}" for size in (2, 1) if fits(size * 3 * GIB))

    message = refusal((512, 512, 1024), host=container, others=others)
    assert "the container or batch job here has 4.0 GiB" in message
    assert "; batch = 1, or a grid of [288, 288, 576], or" in message
    assert "batch = 2" not in message


def test_what_fits_is_told_with_what_is_free(monkeypatch):
    estimate = Estimate(4, 2, 5 * GIB, disk=3 * GIB, seconds=300)
    memory, disk, time = estimate.lines(HostMemory(16 * GIB, 4 * GIB, False))
    assert memory == (
        "memory: about 5.0 GiB on each of 4 ranks, 9.6 GiB on this host; there are 16.0 GiB, of "
        "which only 4.0 GiB are free now"
    )
    assert (disk, time) == (
        "disk: at most 3.0 GiB",
        "time: about 5 min, as measured here before",
    )
    monkeypatch.setattr(launch, "gpus_in_sight", lambda: 1)
    with_gpus = estimate.lines(HostMemory(16 * GIB, 4 * GIB, False))
    assert with_gpus == [f"{memory}. The estimate is for a host and its GPUs together", disk, time]


def test_a_simulation_is_refused_before_anything_heavy_is_imported(here):
    (here / "large.toml").write_text(RUN.replace("grid = 16", "grid = 100000"))
    endless = "import shutil; shutil.disk_usage = lambda _: shutil._ntuple_diskusage(*[2**70] * 3)"
    for before, words, status, message in (
        (endless, ["large.toml", "--ranks", "2"], 2, "the simulation needs about"),
        ("", ["large.toml", "--ignore-memory"], 2, "the run needs about"),
        ("", ["run.toml", "--check"], 0, ""),
    ):
        done, loaded = flowpm_and_loaded("simulate", *words, before=before)
        assert done.returncode == status, done.stderr
        assert not loaded
        assert message in done.stderr


def test_check_shows_a_run_file_and_does_nothing(here, monkeypatch):
    monkeypatch.setenv("FLOWPM_CACHE", str(here.with_name("cache")))  # no speed was recorded
    done = flowpm_here("simulate", "run.toml", "--ranks", "2", "--check")
    assert done.returncode == 0, done.stderr
    assert (
        "# mesh: row:2,col:1, 2 ranks\n# that mesh because 2 meshes divide the grid" in done.stdout
    )
    assert "# memory: about" in done.stdout
    assert "# disk: at most" in done.stdout
    assert "# time: no estimate yet. Each complete job records its speed" in done.stdout
    assert os.listdir(here) == ["run.toml"]
    (here / "again.toml").write_text(done.stdout)
    again = flowpm_here("simulate", "again.toml", "--ranks", "2", "--check")
    assert again.stdout.replace("again-output", "run-output") == done.stdout
    full = shutil._ntuple_diskusage(2**40, 2**40, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    refused = flowpm_here("simulate", "run.toml", "--ranks", "2", "--check")
    assert refused.returncode == 2 and "has 0 bytes free, the run needs about" in refused.stderr
    assert "# results: in run-output, where 0 bytes are free" in refused.stdout


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("command", "example", "words"),
    [
        ("train", "demo_training.toml", []),
        ("dataset", "demo_training.toml", ["--output", "volumes"]),
        ("reconstruct", "reconstruct.toml", []),
        ("reconstruct", "sample.toml", ["--mesh", "replica:2"]),
    ],
)
def test_every_job_is_checked_and_refused(tmp_path, monkeypatch, command, example, words):
    monkeypatch.chdir(tmp_path)
    words = [command, str(EXAMPLES / example), "--ranks", "2", *words]
    done = flowpm_here(*words, "--check")
    assert done.returncode == 0, done.stderr
    assert re.search(r"# memory: about .* on each of 2 ranks", done.stdout)
    assert re.search(r"# disk: at most ", done.stdout)
    assert tomllib.loads(done.stdout)["box"]["grid"]
    tight = HostMemory(limit=GIB, free=GIB, is_container=True)
    monkeypatch.setattr(launch, "host_memory", lambda: tight)
    done = flowpm_here(*words, "--check")
    assert done.returncode == 2
    assert "together, and the container or batch job here has 1.0 GiB" in plain(done.stderr)
    assert flowpm_here(*words, "--check", "--ignore-memory").returncode == 0
    assert not any(tmp_path.iterdir())


def test_memory_of_a_small_container_counts(here, monkeypatch):
    tight = HostMemory(limit=GIB, free=GIB, is_container=True)
    monkeypatch.setattr(launch, "host_memory", lambda: tight)
    done = flowpm_here("simulate", "run.toml", "--ranks", "2", "--check")
    assert done.returncode == 2
    assert "2 ranks, 1.1 GiB together, and the container" in plain(done.stderr)
    assert "# memory: about" in done.stdout
    assert flowpm_here("simulate", "run.toml", "--check").returncode == 0


def test_a_speed_is_known_once_it_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWPM_CACHE", str(tmp_path / "cache"))
    kind = kind_of("simulate", 2)
    assert measured_rate(kind, 32**3) is None
    record_rate(kind, 16**3, 3.0)
    record_rate(kind, 64**3, 2.0)
    assert measured_rate(kind, 128**3) == 2.0
    assert measured_rate(kind, 20**3) == 3.0
    assert measured_rate(kind, 1024**3) is None
    assert measured_rate(kind_of("simulate", 1), 64**3) is None
    (tmp_path / "cache" / "rates.json").write_text("{")
    assert measured_rate(kind, 64**3) is None
    # A cache that cannot be written is no error.
    monkeypatch.setenv("FLOWPM_CACHE", str(tmp_path / "cache" / "rates.json" / "below"))
    record_rate(kind, 64**3, 2.0)


def test_speeds_of_hosts_with_gpus_are_apart(here, monkeypatch):
    monkeypatch.setenv("FLOWPM_CACHE", str(here / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(launch, "gpus_in_sight", lambda: 2)
        record_rate(kind_of("simulate", 1), 16**3, 1.0)
        assert measured_rate(kind_of("simulate", 1), 16**3) == 1.0
    assert measured_rate(kind_of("simulate", 1), 16**3) is None
    assert Pieces("simulate", 16**3, 1).scaled_seconds(8) is None


def test_a_simulation_in_python_is_estimated_as_the_command_does(here, monkeypatch):
    monkeypatch.setenv("FLOWPM_CACHE", str(here / "cache"))
    job = SimulationJob.plan(Request(here / "run.toml", 1, here / "out"))
    cosmology = Cosmology(**job.options.cosmology.model_dump(exclude_none=True))
    sim = job.options.simulation(cosmology, mesh=job.mesh)
    writing = writing_bytes(job.options.solver, job.options.box.grid, {})
    assert sim.estimate().memory == job.costs.estimate.memory - writing
    assert sim.estimate(outputs=True).memory > sim.estimate().memory
    assert sim.estimate().seconds is None and "time" not in str(sim.estimate())
    record_rate(kind_of("simulate", 1), 16**3, 1.0)
    assert sim.estimate().seconds == job.costs.estimate.seconds == 2 * 16**3
    assert str(sim.estimate()).splitlines()[-1] == "time: about 2.3 hours, as measured here before"


def test_a_simulation_takes_the_memory_that_was_told(here):
    """Its measured peak is at most 5 % above the estimate, and the estimate 30 % above the peak."""
    told = SimulationJob.plan(Request(here / "run.toml", 1, here / "out")).costs.estimate.memory
    done = flowpm("simulate", "run.toml", "--ranks", "1", "--output", "out")
    assert done.returncode == 0, done.stderr
    (peak,) = json.loads(Path("out/timings.json").read_text())["peak_memory_bytes"]
    assert 0.95 * peak < told < 1.3 * peak


def test_the_disk_of_a_simulation_counts_all_that_lies_there_at_once(here):
    """16^3 particles in float32: results, states at other times, and at most three checkpoints."""

    def values(*settings):
        keys = parse_settings(settings)
        planned = SimulationJob.plan(Request(here / "run.toml", 1, here / "out", settings=keys))
        return (planned.costs.estimate.disk - FIGURES_AND_TABLES) / 16**3 / 4

    assert values() == 3 + 3 + 1
    assert values('output.fields=["density"]') == 6  # a checkpoint, should a signal come
    assert values("output.format=bigfile") == 3 + 3 + 2
    assert values("output.redshifts=[0, 1, 3]") == 3 * 7
    assert values("output.checkpoint_every=1") == 7 + 6  # of two steps
    many = ("evolution.steps=20", "output.checkpoint_every=1")
    assert values(*many) == 7 + 3 * 6


def test_one_rank_of_8192_evaluates_the_power_in_chunks(monkeypatch):
    """At the k^2 of its own modes, so that its memory does not grow with the whole grid's."""
    here = launch.RankEnvironment(rank=5000, size=8192, local_size=1)
    monkeypatch.setattr(launch, "detect", lambda: here)
    monkeypatch.setattr(process_mesh, "initialise", lambda shapes: None)
    grid, axes, sizes = (2048,) * 3, {"row": 128, "col": 64}, []

    class Power:
        def without_growth(self, k):
            sizes.append(tf.size(k).numpy())
            return tf.where(k > 0, tf.constant(k) ** 3, 0.0)

    mesh = process_mesh.ProcessMesh("row:128,col:64")
    box = Box(grid, (4000.0,) * 3, mesh)
    amplitude = linear_amplitude(box, Power())
    squares = sum(k**2 for k in box.wavenumbers())
    expected = squares**0.75 / np.sqrt(box.volume / box.cells)
    np.testing.assert_allclose(amplitude, expected, rtol=1e-6)
    table = 3 * 1024**2
    assert max(sizes) <= CHUNK < sum(sizes) < table / 2
    assert power_bytes(grid, 4) < 2**27 < simulation_bytes(SolverOptions(halo=8), (4096,) * 3, axes)


@pytest.mark.parametrize(("gradient", "values"), [("finite-difference", 12), ("spectral", 19)])
def test_a_wide_halo_takes_the_memory_of_its_planes(gradient, values):
    """On 2 ranks, twice in a gradient, which sends both ways; a single rank has no halo."""
    grid, axes = (256,) * 3, {"row": 2}
    wide, wider = (SolverOptions(halo=n, force_gradient=gradient) for n in (96, 120))
    planes = 2 * (120 - 96) * 256**2 * 4 * values
    assert simulation_bytes(wider, grid, axes) - simulation_bytes(wide, grid, axes) == planes
    for structure in ("2lpt", "pm"):
        less, more = (
            gradient_bytes(structure, each, grid, axes, steps=5) for each in (wide, wider)
        )
        assert more - less == 2 * planes
    assert simulation_bytes(wider, grid, {}) == simulation_bytes(wide, grid, {})


@pytest.mark.parametrize(("grid", "size"), [(32, 32.0), (48, 96.0), (32, 128.0)])
def test_the_usual_halo_is_what_runs_suggest(grid, size):
    """The largest displacement differs from seed to seed; early, 2LPT adds less to it."""
    sim = Simulation(Cosmology.planck18(), grid, size, [0.5, 1.0])
    for a, tolerance in ((0.5, 1 / 3), (1.0, 1 / 6)):
        displacements = [sim.lpt(seed=seed, a=a).displacement.block for seed in range(2)]
        reach = np.mean([np.abs(x).max() for x in displacements]) * grid / size
        expected = pytest.approx(suggested_halo(reach), rel=tolerance, abs=1)
        assert usual_halo((grid,) * 3, (size,) * 3, a) == expected


def test_the_usual_halo_of_large_boxes_is_six_times_the_rms():
    """Of linear theory's displacement along an axis, by the waves that fit into the box."""
    power = LinearPower(Cosmology.planck18())
    for size, largest in list(LARGEST_DISPLACEMENT.items())[4:]:
        k = np.geomspace(2 * np.pi / size, 20.0, 2000)
        rms = np.sqrt(np.trapezoid(power(k).numpy(), k) / (6 * np.pi**2))
        assert largest == pytest.approx(6 * rms, rel=0.05), size
    fine, coarse = usual_halo((64, 64, 64), (64.0,) * 3), usual_halo((64, 64, 512), (64.0,) * 3)
    assert fine == coarse == 26  # ranks do not split z
    assert usual_halo((64, 128, 64), (64.0,) * 3) == 50
    assert usual_halo((16, 16, 16), (16.0,) * 3) < usual_halo((32, 32, 32), (32.0,) * 3)


JOBS = {
    "simulate": (SimulationJob, "demo.toml"),
    "reconstruct": (ReconstructionJob, "reconstruct.toml"),
    "emulate": (EmulationJob, "emulate.toml"),
    "train": (TrainingJob, "train.toml"),
}


@pytest.mark.parametrize("command", JOBS)
def test_an_automatic_halo_counts_as_the_usual_one(command, tmp_path):
    """In the memory of two ranks and in what is said of the mesh, by the end of the run.

    A training's network takes more memory than its universes.
    """
    kind, example = JOBS[command]
    run_file = Path(__file__).parents[2] / "examples" / example

    def planned(*settings):
        both = ["box.grid = 64", "box.size = 64.0", 'mesh.shape = "row:2,col:1"', *settings]
        request = Request(run_file, 2, tmp_path / "out", settings=parse_settings(both))
        return kind.plan(request).costs

    automatic, usual, less = planned(), planned("run.halo = 26"), planned("run.halo = 8")
    assert automatic.demand.halo == 26
    assert automatic.estimate.memory == usual.estimate.memory
    assert command == "train" or automatic.estimate.memory > less.estimate.memory
    early = planned("evolution.a_stop = 0.5", *["truth.a = [0.5]"] * (command == "emulate"))
    assert early.demand.halo == usual_halo((64,) * 3, (64.0,) * 3, 0.5) < 26


def test_python_and_snapshots_take_the_mesh_of_the_command(tmp_path, monkeypatch):
    """All choose it for the same halo."""
    halos = []

    def chosen(ranks, grid, *force, halo=None):
        halos.append(force[2] if len(force) > 2 else halo)
        return "row:1,col:1"

    for module in (simulation, state):
        monkeypatch.setattr(module, "default_mesh", chosen)
    sim = Simulation(Cosmology.planck18(), 16, 16.0, [0.5, 1.0])
    path = sim.lpt(seed=1).save(tmp_path / "snapshot.zarr")
    state.State.from_snapshot(path)
    assert halos == [usual_halo((16,) * 3, (16.0,) * 3)] * 2 == [11] * 2


def test_estimates_need_a_number_in_place_of_an_automatic_halo():
    """Cells of 1 Mpc/h have a wide one: pencils on 16 ranks, not slabs."""
    grid, size = (512,) * 3, (512.0,) * 3
    usual, options = usual_halo(grid, size), SolverOptions()
    assert default_mesh(16, grid, halo=usual) == "row:4,col:4" != default_mesh(16, grid)
    counted = options.with_usual_halo(grid, size)
    assert (usual, counted.halo) == (40, 40)
    assert SolverOptions(halo=5).with_usual_halo(grid, size) == SolverOptions(halo=5)
    with pytest.raises(AssertionError, match="with_usual_halo"):
        simulation_bytes(options, grid, {"row": 2})


def test_a_gradient_counts_the_fields_that_it_keeps():
    """As many as the integrator has kicks, one more than steps at most; none if they are many."""
    grid, value = (256,) * 3, 4 * 256**3

    def kept(steps, structure="pm", **options):
        whole, again = (
            gradient_bytes(
                structure, SolverOptions(**options, **keys, halo=1), grid, {}, steps=steps
            )
            for keys in ({}, {"adjoint": ReversibleAdjoint(keep_fields=False)})
        )
        return (whole - again) / value

    assert [kept(10), kept(16), kept(17)] == [11, 16, 0]
    assert kept(10, "2lpt") == 0
    assert kept(4, force_gradient="spectral") == 15
    assert kept(5, correction="default") == 12


@pytest.mark.parametrize(("halo", "peak"), [(16, 1479), (64, 1617), (120, 1949)])
def test_a_wide_halo_takes_the_memory_that_was_measured(halo, peak):
    """A run of 256^3 on 2 ranks, to 5 % [MiB]; see docs/measurements/memory.md."""
    solver, grid, axes = SolverOptions(halo=halo), (256,) * 3, {"row": 2}
    fields = simulation_bytes(solver, grid, axes) + writing_bytes(solver, grid, axes)
    estimate = process_bytes(axes, "simulate") + fields
    assert estimate / 2**20 == pytest.approx(peak, rel=0.05)


def test_a_run_whose_power_takes_most_is_told_so():
    """A thin block of a large grid: its fields are small beside the table."""
    axes = {"row": 2048, "col": 2048}
    message = simulation_bytes(SolverOptions(halo=8), (4096,) * 3, axes)
    assert message > power_bytes((4096,) * 3, 4) > 2**26
