"""All that a run leaves: the snapshot, the power spectrum, the figures, the timings."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.config.simulation import RunConfig
from flowpm_dist.io.files import SNAPSHOT, WriteError
from flowpm_dist.io.snapshot import mark_complete, snapshot_bytes, write_snapshot
from flowpm_dist.jobs.folder import OutputFolder

if TYPE_CHECKING:
    from flowpm_dist.cosmology.power import LinearPower
    from flowpm_dist.simulation.simulation import State
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


def results_bytes(config: RunConfig) -> int:
    """Size of all results of a run, about and at most [bytes]."""
    return snapshot_bytes(config.box.grid, itemsize(config)) + FIGURES_AND_TABLES


def itemsize(config: RunConfig) -> int:
    """Of one value in the run's precision [bytes]."""
    return np.dtype(config.run.precision).itemsize


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


def write_results(
    folder: OutputFolder, config: RunConfig, state: State, linear: LinearPower, *, threads: int
) -> Summary | None:
    """Write everything and move it into place. On all ranks.

    Args:
        folder: begun on rank 0.
        config: with the mesh that was used.
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

    density = state.density()
    mesh = density.mesh
    snapshot = folder.partial / SNAPSHOT
    fields = {
        "white_noise": state.white_noise,
        "linear_delta": state.linear_delta,
        "displacement": state.displacement,
        "velocity": state.velocity,
        "density": density,
    }
    write_snapshot(snapshot, fields, snapshot_header(config, state.a))
    spectrum = power_spectrum(density, window="cic")
    axis, poles = config.results.multipoles, None
    if axis is not None:
        poles = multipoles(state.density(redshift_space=axis), axis=axis, window="cic")
    cells = max(1, config.box.grid[2] // 8)
    slab = project(density, cells)
    memory = mesh.gather_to_root(np.array([peak_memory()]))
    summary = None
    if slab is not None and memory is not None:
        peaks = [int(m[0]) for m in memory]
        try:
            theory = np.asarray(linear(spectrum.k, state.a))
            write_power_spectrum(folder.partial / "power_spectrum.csv", spectrum, theory, poles)
            summary = _write_texts(folder.partial, config, state, spectrum, theory, peaks, threads)
            _draw(folder.partial, config, state.a, spectrum, linear, slab, cells)
        except OSError as error:
            raise WriteError.of(Path(error.filename or folder.partial), error) from error
        mark_complete(snapshot)
        folder.publish()
    mesh.barrier()
    return summary


def snapshot_header(config: RunConfig, a: float) -> dict[str, Any]:
    """Attributes of a snapshot: what was computed, in which units."""
    return {
        "a": a,
        "box_size": list(config.box.size),
        "box_size_units": "Mpc/h",
        "grid": list(config.box.grid),
        "cosmology": config.cosmology.model_dump(exclude_none=True),
        "seed": config.initial.seed,
        "config": config.resolved(),
        "versions": versions(),
    }


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
    config: RunConfig,
    state: State,
    spectrum: PowerSpectrum,
    theory: np.ndarray,
    peaks: list[int],
    threads: int,
) -> Summary:
    (folder / "run.toml").write_text(f"# As run by flowpm-dist.\n{config.resolved()}")
    timings = {
        **state.timings,
        "particles": int(np.prod(config.box.grid)),
        "ranks": len(peaks),
        "mesh": config.mesh.shape,
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
    config: RunConfig,
    a: float,
    spectrum: PowerSpectrum,
    linear: LinearPower,
    slab: np.ndarray,
    cells: int,
) -> None:
    from flowpm_dist.io.figure_style import save_figure
    from flowpm_dist.io.pictures import density_figure, power_spectrum_figure

    grid, size = config.box.grid, config.box.size
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
