"""The results of a simulation: snapshot, power spectrum, figures and timings."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flowpm_dist.grid.options import BoxOptions
from flowpm_dist.io.files import WriteError
from flowpm_dist.io.snapshot import VECTORS, save_fields
from flowpm_dist.jobs.results import versions, write_run_file
from flowpm_dist.simulate.folder import SimulationFolder
from flowpm_dist.simulate.options import SimulationOptions
from meshimpl import launch

if TYPE_CHECKING:
    from flowpm_dist.cosmology.power import LinearPower
    from flowpm_dist.grid.field import Field
    from flowpm_dist.simulation.state import State
    from flowpm_dist.statistics import Multipoles, PowerSpectrum


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
        ratio: measured power at `k` divided by linear theory's.
    """

    seconds: float
    compile_seconds: float
    ns_per_particle_per_step: float
    peak_memory: list[int]
    k: float
    ratio: float


def peak_memory() -> int:
    """Returns the greatest memory that this process has held so far [bytes]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def write_results(
    folder: SimulationFolder,
    options: SimulationOptions,
    state: State,
    linear: LinearPower,
) -> Summary | None:
    """Write all results and move them into place. On all ranks.

    Args:
        folder: folder of the results; `begin` has been called on rank 0.
        options: the run file.
        state: at the end of the run.
        linear: power spectrum of linear theory.

    Returns:
        A summary on rank 0; None on the others.

    Raises:
        WriteError: this rank cannot write. Only this rank raises it, and the job must end.
    """
    from flowpm_dist.io.figures import project

    mesh = state.box.mesh
    density, spectrum, theory = write_state(folder.partial, options, state, linear)
    cells = max(1, options.box.grid[2] // 8)
    slab = project(density, cells)
    memory = mesh.gather_to_root(np.array([peak_memory()]))
    summary = None
    if slab is not None and memory is not None:
        peaks = [int(m[0]) for m in memory]
        try:
            summary = _write_texts(folder.partial, options, state, spectrum, theory, peaks)
            _draw(folder.partial, options.box, state.a, spectrum, linear, slab, cells)
        except OSError as error:
            raise WriteError.of(Path(error.filename or folder.partial), error) from error
        folder.publish()
    mesh.barrier()
    return summary


def write_state(
    folder: Path, options: SimulationOptions, state: State, linear: LinearPower
) -> tuple[Field, PowerSpectrum, np.ndarray]:
    """Write the snapshot of a state and the table of its power spectrum. On all ranks.

    Args:
        folder: to write into.
        options: the run file.
        state: state of one universe.
        linear: power spectrum of linear theory.

    Returns:
        The density, its power spectrum, and linear theory at the same wave numbers [(Mpc/h)^3].

    Raises:
        WriteError: see `write_results`.
    """
    from flowpm_dist.statistics import multipoles, power_spectrum

    density, output = state.density(), options.output
    names = output.fields if output.format == "zarr" else VECTORS
    others = state.fields([name for name in names if name != "density"])
    fields = {str(n): density if n == "density" else others[n] for n in names}
    about = {**state.header(), "config": options.resolved(), "versions": versions()}
    save_fields(folder, fields, about, output.format)
    spectrum = power_spectrum(density, window="cic")
    axis, poles = options.results.multipoles, None
    if axis is not None:
        poles = multipoles(state.density(redshift_space=axis), axis=axis, window="cic")
    theory = np.asarray(linear(spectrum.k, state.a))
    if state.box.mesh.rank == 0:
        path = folder / "power_spectrum.csv"
        try:
            write_power_spectrum(path, spectrum, theory, poles)
        except OSError as error:
            raise WriteError.of(path, error) from error
    return density, spectrum, theory


def write_power_spectrum(
    path: Path, spectrum: PowerSpectrum, linear: np.ndarray, poles: Multipoles | None = None
) -> None:
    """Write a table of comma-separated values, with one line of names and units at the top.

    Args:
        path: path of the table.
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
    options: SimulationOptions,
    state: State,
    spectrum: PowerSpectrum,
    theory: np.ndarray,
    peaks: list[int],
) -> Summary:
    write_run_file(folder / "run.toml", options.resolved())
    timings = {
        **state.timings,
        "halo": state.halo,
        "particles": int(np.prod(options.box.grid)),
        "ranks": len(peaks),
        "mesh": options.mesh.shape,
        "threads_per_rank": launch.threads_per_rank(),
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
    box: BoxOptions,
    a: float,
    spectrum: PowerSpectrum,
    linear: LinearPower,
    slab: np.ndarray,
    cells: int,
) -> None:
    from flowpm_dist.io.figures import density_figure, power_spectrum_figure, save_figure

    grid, size = box.grid, box.size
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
