"""The job of `flowpm-dist simulate`: snapshot, power spectrum, figures and timings of a run."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flowpm_dist.cosmology.camb_spline import camb_beside
from flowpm_dist.grid.decomposition import default_mesh
from flowpm_dist.io.errors import WorkError
from flowpm_dist.io.files import SNAPSHOT, WriteError
from flowpm_dist.io.snapshot import mark_complete, snapshot_bytes, write_snapshot
from flowpm_dist.io.white_noise_file import open_white_noise
from flowpm_dist.jobs.estimate import Demand, process_bytes
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES, write_run_file
from flowpm_dist.jobs.output_folder import OutputFolder
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.rates import kind_of, measured_rate, record_rate
from flowpm_dist.simulation.memory import simulation_bytes, writing_bytes
from flowpm_dist.simulation.plan import SimulationPlan
from meshimpl.quiet import import_tensorflow

if TYPE_CHECKING:
    from flowpm_dist.cosmology.power import LinearPower
    from flowpm_dist.simulation.state import State
    from flowpm_dist.statistics import Multipoles, PowerSpectrum

PACKAGES = (
    "flowpm-dist", "tensorflow", "tensorflow-cpu", "mesh-tensorflow", "horovod", "mpi4py",
    "numpy", "zarr", "camb",
)  # fmt: skip
WORK = "simulate"


@dataclass(frozen=True)
class Summary:
    """The numbers that a user wants to see first.

    Attributes:
        seconds: duration of all steps of the evolution [s].
        compile_seconds: duration of the compilation before the first step [s].
        ns_per_particle_per_step: duration of the evolution over the number of steps and of
            particles of all ranks [ns].
        peak_memory: greatest memory that each rank has held [bytes].
        k: the wave number nearest to 0.1 h/Mpc [h/Mpc].
        ratio: measured power at `k` over that of linear theory.
    """

    seconds: float
    compile_seconds: float
    ns_per_particle_per_step: float
    peak_memory: list[int]
    k: float
    ratio: float


@dataclass(frozen=True)
class SimulationWork:
    """What to simulate, and what to write.

    Attributes:
        plan: how it is simulated.
        cosmology: parameters by name, as `Cosmology` takes them.
        seed: of the white noise; None if the noise is read from a file.
        white_noise: .npy file of the white noise; None if it comes from a seed.
        paired: whether the paired universe of the seed is simulated.
        multipoles: line of sight of the multipoles in redshift space; None leaves them out.
        run_text: the resolved run file, kept with the results.
    """

    plan: SimulationPlan
    cosmology: Mapping[str, Any]
    seed: int | None
    white_noise: Path | None
    paired: bool
    multipoles: Literal["x", "y", "z"] | None
    run_text: str


def results_bytes(plan: SimulationPlan) -> int:
    """Returns an upper estimate of the size of all results of a run [bytes]."""
    itemsize = np.dtype(plan.run.precision).itemsize
    return snapshot_bytes(plan.box.grid, itemsize) + FIGURES_AND_TABLES


def demand_of(work: SimulationWork, mesh: str) -> Demand:
    """Returns the memory that a run takes.

    Args:
        work: to be done.
        mesh: shape of the mesh of ranks.
    """
    plan, grid = work.plan, work.plan.box.grid
    return Demand(
        "the simulation",
        grid,
        mesh,
        lambda grid, axes: (
            process_bytes(axes)
            + simulation_bytes(plan, grid, axes)
            + writing_bytes(plan, grid, axes)
        ),
        lambda ranks: default_mesh(ranks, grid),
        grid_is_free=work.white_noise is None,
    )


def usual_seconds(work: SimulationWork, ranks: int) -> float | None:
    """Returns the duration of the steps [s] if the like was measured here before, else None."""
    cells = math.prod(work.plan.box.grid)
    rate = measured_rate(kind_of(WORK, ranks), cells)
    return None if rate is None else rate * cells * work.plan.steps.step_count


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def peak_memory() -> int:
    """Returns the greatest memory that this process has held so far [bytes]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def simulate_and_write(
    work: SimulationWork, mesh: str, folder: OutputFolder, progress: Progress, *, threads: int
) -> Summary | None:
    """Simulate a universe and write its results. On all ranks.

    Args:
        work: what to simulate.
        mesh: shape of the mesh of this job's ranks.
        folder: of the results; `begin` has been called on rank 0.
        progress: display of this rank.
        threads: number of threads of this rank.

    Returns:
        A summary on rank 0; None on the others.

    Raises:
        WorkError: the simulation failed, or its results cannot be written.
    """
    progress.note("loading TensorFlow")
    with camb_beside(work.cosmology):
        import_tensorflow()
    from flowpm_dist.cosmology.parameters import Cosmology
    from flowpm_dist.evolution.halo import HaloError

    simulation = work.plan.simulation(Cosmology(**work.cosmology), mesh=mesh)
    progress.note("initial conditions")
    noise = None if work.white_noise is None else open_white_noise(work.white_noise)
    try:
        state = simulation.run(
            seed=work.seed, white_noise=noise, paired=work.paired, progress=progress.step
        )
    except (HaloError, FloatingPointError) as error:
        raise WorkError(str(error)) from error
    progress.note("writing")
    return write_results(folder, work, mesh, state, simulation.power, threads=threads)


def write_results(
    folder: OutputFolder,
    work: SimulationWork,
    mesh_shape: str,
    state: State,
    linear: LinearPower,
    *,
    threads: int,
) -> Summary | None:
    """Write all results and move them into place. On all ranks.

    Args:
        folder: of the results; `begin` has been called on rank 0.
        work: the work that led to the state.
        mesh_shape: shape of the mesh of the run.
        state: at the end of the run.
        linear: power spectrum of linear theory.
        threads: number of threads of this rank.

    Returns:
        A summary on rank 0; None on the others.

    Raises:
        WriteError: this rank cannot write. Only this rank raises it, and the job must end.
    """
    from flowpm_dist.io.pictures import project
    from flowpm_dist.statistics import multipoles, power_spectrum

    fields = state.fields()
    density, mesh = fields["density"], state.box.mesh
    snapshot = folder.partial / SNAPSHOT
    about = {**state.header(), "config": work.run_text, "versions": versions()}
    write_snapshot(snapshot, fields, about)
    spectrum = power_spectrum(density, window="cic")
    axis, poles = work.multipoles, None
    if axis is not None:
        poles = multipoles(state.density(redshift_space=axis), axis=axis, window="cic")
    cells = max(1, work.plan.box.grid[2] // 8)
    slab = project(density, cells)
    memory = mesh.gather_to_root(np.array([peak_memory()]))
    summary = None
    if slab is not None and memory is not None:
        peaks = [int(m[0]) for m in memory]
        try:
            theory = np.asarray(linear(spectrum.k, state.a))
            write_power_spectrum(folder.partial / "power_spectrum.csv", spectrum, theory, poles)
            summary = _write_texts(
                folder.partial, work, mesh_shape, state, spectrum, theory, peaks, threads
            )
            _draw(folder.partial, work.plan, state.a, spectrum, linear, slab, cells)
        except OSError as error:
            raise WriteError.of(Path(error.filename or folder.partial), error) from error
        mark_complete(snapshot)
        folder.publish()
        cells = math.prod(work.plan.box.grid)
        record_rate(kind_of(WORK, len(peaks)), cells, 1e-9 * summary.ns_per_particle_per_step)
    mesh.barrier()
    return summary


def write_power_spectrum(
    path: Path, spectrum: PowerSpectrum, linear: np.ndarray, poles: Multipoles | None = None
) -> None:
    """Write a table of comma-separated values, with one line of names and units at the top.

    Args:
        path: of the table.
        spectrum: measured power spectrum.
        linear: power of linear theory at the same k [(Mpc/h)^3].
        poles: multipoles in redshift space, which become further columns.
    """
    columns = [spectrum.k, spectrum.power, spectrum.modes, linear]
    names = ["k [h/Mpc]", "P [(Mpc/h)^3]", "modes", "linear [(Mpc/h)^3]"]
    if poles is not None:
        columns += list(poles.power)
        names += [f"P{order} in redshift space [(Mpc/h)^3]" for order in poles.orders]
    formats = ["%d" if name == "modes" else "%.8e" for name in names]
    table, header = np.column_stack(columns), ",".join(names)
    np.savetxt(path, table, fmt=formats, delimiter=",", header=header, comments="")


def _write_texts(
    folder: Path,
    work: SimulationWork,
    mesh_shape: str,
    state: State,
    spectrum: PowerSpectrum,
    theory: np.ndarray,
    peaks: list[int],
    threads: int,
) -> Summary:
    write_run_file(folder / "run.toml", work.run_text)
    timings = {
        **state.timings,
        "halo": state.halo,
        "particles": int(np.prod(work.plan.box.grid)),
        "ranks": len(peaks),
        "mesh": mesh_shape,
        "threads_per_rank": threads,
        "peak_memory_bytes": peaks,
        "units": {"phases": "s, for each step", "steps": "s", "compile": "s", "initial": "s"},
        "versions": versions(),
    }
    (folder / "timings.json").write_text(json.dumps(timings, indent=1, default=float) + "\n")
    at = int(np.argmin(np.abs(np.log(spectrum.k / 0.1))))
    return Summary(
        seconds=float(np.sum(state.timings["steps"])),
        compile_seconds=float(state.timings["compile"]),
        ns_per_particle_per_step=float(state.timings["ns_per_particle_per_step"]),
        peak_memory=peaks,
        k=float(spectrum.k[at]),
        ratio=float(spectrum.power[at] / theory[at]),
    )


def _draw(
    folder: Path,
    plan: SimulationPlan,
    a: float,
    spectrum: PowerSpectrum,
    linear: LinearPower,
    slab: np.ndarray,
    cells: int,
) -> None:
    from flowpm_dist.io.figure_style import save_figure
    from flowpm_dist.io.pictures import density_figure, power_spectrum_figure

    grid, size = plan.box.grid, plan.box.size
    thickness = cells * size[2] / grid[2]
    save_figure(density_figure(slab, size, thickness, a), folder / "density.png")
    nyquist = min(np.pi * n / length for n, length in zip(grid, size, strict=True))
    figure = power_spectrum_figure(
        spectrum.k,
        spectrum.power,
        spectrum.modes,
        lambda k: np.asarray(linear(k, a)),
        nyquist=nyquist,
        a=a,
    )
    save_figure(figure, folder / "power_spectrum.png")
