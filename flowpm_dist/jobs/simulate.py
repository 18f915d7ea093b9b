"""A simulation and all that it leaves: snapshot, power spectrum, figures, timings."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flowpm_dist.io.errors import WorkError
from flowpm_dist.io.files import SNAPSHOT, WriteError
from flowpm_dist.io.snapshot import mark_complete, snapshot_bytes, write_snapshot
from flowpm_dist.io.white_noise_file import open_white_noise
from flowpm_dist.jobs.output_folder import OutputFolder
from flowpm_dist.jobs.progress import Progress
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
FIGURES_AND_TABLES = 16 * 2**20  # [bytes], generous


@dataclass(frozen=True)
class Summary:
    """The figures a user wants to see first.

    Attributes:
        seconds: of the evolution, all steps.
        compile_seconds: before the first step.
        ns_per_particle_per_step: of the evolution, over all particles of all ranks.
        peak_memory: of each rank [bytes].
        k: a wave number near 0.1 [h/Mpc], with
        ratio: the measured power there over the linear theory's.
    """

    seconds: float
    compile_seconds: float
    ns_per_particle_per_step: float
    peak_memory: list[int]
    k: float
    ratio: float


@dataclass(frozen=True)
class SimulationWork:
    """A universe to simulate, and what is written of it.

    Attributes:
        plan: how it is simulated.
        cosmology: parameters by name, as `Cosmology` takes them.
        steps: number of time steps.
        seed: of the white noise; None if that is given.
        white_noise: .npy file with the white noise.
        paired: whether the paired universe of the seed is simulated.
        multipoles: line of sight of the redshift-space multipoles; None for none.
        run_text: the resolved run file, kept with the results.
    """

    plan: SimulationPlan
    cosmology: Mapping[str, Any]
    steps: int
    seed: int | None
    white_noise: Path | None
    paired: bool
    multipoles: Literal["x", "y", "z"] | None
    run_text: str


def results_bytes(plan: SimulationPlan) -> int:
    """Returns the size of all results of a run, about and at most [bytes]."""
    itemsize = np.dtype(plan.run.precision).itemsize
    return snapshot_bytes(plan.box.grid, itemsize) + FIGURES_AND_TABLES


def versions() -> dict[str, str]:
    """What computed: Python, and the installed packages that matter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def peak_memory() -> int:
    """The most memory this process has held so far [bytes]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def simulate_and_write(
    work: SimulationWork, mesh: str, folder: OutputFolder, progress: Progress, *, threads: int
) -> Summary | None:
    """Simulate a universe and write its results. On all ranks.

    Args:
        work: what to simulate.
        mesh: shape of the mesh of this job's ranks.
        folder: begun on rank 0.
        progress: of this rank.
        threads: of this rank.

    Returns:
        A summary on rank 0; None on the others.

    Raises:
        WorkError: the simulation failed, or its results cannot be written.
    """
    progress.note("loading TensorFlow")
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
    """Write everything and move it into place. On all ranks.

    Args:
        folder: begun on rank 0.
        work: that led to the state.
        mesh_shape: of the mesh that was used.
        state: the end of the run.
        linear: linear theory.
        threads: of this rank.

    Returns:
        A summary on rank 0; None on the others.

    Raises:
        WriteError: on a rank that cannot write; the job must end then.
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
    mesh.barrier()
    return summary


def write_power_spectrum(
    path: Path, spectrum: PowerSpectrum, linear: np.ndarray, poles: Multipoles | None = None
) -> None:
    """A table of comma-separated values under one line of names with units.

    Args:
        path: to write to.
        spectrum: measured.
        linear: theory at the same k [(Mpc/h)^3].
        poles: in redshift space, as further columns.
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
    (folder / "run.toml").write_text(f"# As run by flowpm-dist.\n{work.run_text}")
    timings = {
        **state.timings,
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
