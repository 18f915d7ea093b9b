"""One session of a simulation: how it begins or resumes, its checkpoints, and its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.catalogues.occupation import check_occupation
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.evolution.plan import MidRun, Particles
from flowpm_dist.grid.field import Field, project
from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.files import WriteError, remove, versions, write_json
from flowpm_dist.io.light_cone import LightConeFiles
from flowpm_dist.io.snapshot import VECTORS, save_attributes, save_fields
from flowpm_dist.io.white_noise import open_white_noise
from flowpm_dist.jobs.job import StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.run_file import write_run_file
from flowpm_dist.jobs.session import CheckpointError, FieldCheckpoints, StopRequest
from flowpm_dist.jobs.usage import peak_memory
from flowpm_dist.observables.light_cone.results import (
    ShownLightCone,
    draw_light_cone,
    observers_of,
    write_light_cone_results,
)
from flowpm_dist.simulate.folder import SimulationFolder
from flowpm_dist.simulate.halos import FoundHalos, draw_halos, write_halos
from flowpm_dist.simulate.measured import (
    check_statistics,
    measured,
    particle_noise,
    write_statistics,
)
from flowpm_dist.simulate.options import KEEP, SimulationOptions, output_name
from flowpm_dist.simulation.state import State
from flowpm_dist.statistics.power import MULTIPOLES, POWER, Multipoles, PowerSpectrum
from flowpm_dist.statistics.register import Statistic
from meshimpl import launch


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
        halos, galaxies: their numbers; 0 where none were looked for.
    """

    seconds: float
    compile_seconds: float
    ns_per_particle_per_step: float
    peak_memory: list[int]
    k: float
    ratio: float
    halos: int
    galaxies: int


def write_results(
    folder: SimulationFolder,
    options: SimulationOptions,
    state: State,
    theory: Theory,
    warn: Callable[[str], None],
) -> Summary | None:
    """Write all results, move them into place, and draw them there. On all ranks.

    Args:
        folder: folder of the results; `begin` has been called on rank 0.
        options: the run file.
        state: at the end of the run.
        theory: of its universe.
        warn: shows a warning, about a figure that cannot be drawn.

    Returns:
        A summary on rank 0; None on the others.

    Raises:
        WriteError: this rank cannot write. Only this rank raises it, and the job must end.
    """
    mesh = state.box.mesh
    written = write_state(folder.partial, options, state, theory.power, warn)
    spectrum = written.spectrum
    memory = mesh.gather_to_root(np.array([peak_memory()]))
    summary = None
    if memory is not None:
        peaks = [int(m[0]) for m in memory]
        try:
            _write_texts(folder.partial, options, state, peaks)
        except OSError as error:
            raise WriteError.of(Path(error.filename or folder.partial), error) from error
        folder.publish()
        at = int(np.argmin(np.abs(np.log(spectrum.k / 0.1))))
        summary = Summary(
            seconds=float(np.sum(state.timings["steps"])),
            compile_seconds=float(state.timings["compile"]),
            ns_per_particle_per_step=float(state.timings["ns_per_particle_per_step"]),
            peak_memory=peaks,
            k=float(spectrum.k[at]),
            ratio=float(spectrum.power[at] / written.linear[at]),
            halos=0 if written.halos is None else written.halos.catalogue.total,
            galaxies=0 if written.halos is None else written.halos.galaxies,
        )
    # All ranks meet here, and rank 0 only once the results are in place.
    if options.output.figures:
        layers = max(1, options.box.grid[2] // 8)
        slab = project(written.density, layers)
        if slab is not None:
            _draw(folder.path, options, slab, layers, spectrum, state, theory.power, warn)
        if written.halos is not None:
            thickness = layers * state.box.cell[2]
            draw_halos(folder.path, written.halos, slab, thickness, theory, warn)
    mesh.barrier()
    return summary


def _draw(
    folder: Path,
    options: SimulationOptions,
    slab: np.ndarray,
    layers: int,
    spectrum: PowerSpectrum,
    state: State,
    linear: LinearPower,
    warn: Callable[[str], None],
) -> None:
    """Draws a slab [x, y], a mean over some layers of cells, and the power spectrum. On rank 0."""
    grid, size, a = options.box.grid, options.box.size, state.a
    with drawing(folder / "density.png", warn) as save:
        from flowpm_dist.io.figures import density_figure

        thickness = layers * size[2] / grid[2]
        save(density_figure(slab, size, thickness, a))
    with drawing(folder / "power_spectrum.png", warn) as save:
        from flowpm_dist.io.figures import power_spectrum_figure

        figure = power_spectrum_figure(
            spectrum.k,
            spectrum.power,
            spectrum.modes,
            lambda k: np.asarray(linear.cb(k, a)),
            nyquist=min(np.pi * n / length for n, length in zip(grid, size, strict=True)),
            a=a,
            noise=_flat_noise(options, state),
        )
        save(figure)


def _flat_noise(options: SimulationOptions, state: State) -> float | None:
    """Returns the power of particles at random; None where spectra keep the window, as it does."""
    return particle_noise(state.box) if options.results.window == "cic" else None


@dataclass(frozen=True)
class WrittenState:
    """What was measured of a state that is on disk.

    Attributes:
        density: of the particles.
        spectrum: its power.
        linear: linear theory at the same wavenumbers [(Mpc/h)^3].
        halos: None where none were looked for.
    """

    density: Field
    spectrum: PowerSpectrum
    linear: np.ndarray
    halos: FoundHalos | None


def write_state(
    folder: Path,
    options: SimulationOptions,
    state: State,
    linear: LinearPower,
    warn: Callable[[str], None],
) -> WrittenState:
    """Write the snapshot of a state, the tables of its statistics and its halos. On all ranks.

    Args:
        folder: to write into.
        options: the run file.
        state: state of one universe.
        linear: power spectrum of linear theory.
        warn: shows a warning, about what cannot be made of a statistic.

    Raises:
        WriteError: see `write_results`.
    """
    density, output = state.density(), options.output
    names = output.fields if output.format == "zarr" else VECTORS
    others = state.fields([name for name in names if name != "density"])
    fields = {str(n): density if n == "density" else others[n] for n in names}
    about = {**state.header(), "config": options.resolved(), "versions": versions()}
    if fields:
        save_fields(folder, fields, about, output.format)
    elif state.box.mesh.rank == 0:
        save_attributes(folder, about)
    results, poles = options.results, None
    spectrum: PowerSpectrum = measured(POWER, state, density, results)
    known: dict[Statistic, Any] = {POWER: spectrum}
    if results.multipoles is not None:
        poles = measured(MULTIPOLES, state, density, results, axis=results.multipoles)
        if results.multipoles == results.line_of_sight:
            known[MULTIPOLES] = poles
    theory = np.asarray(linear.cb(spectrum.k, state.a))
    if state.box.mesh.rank == 0:
        path = folder / "power_spectrum.csv"
        try:
            write_power_spectrum(path, spectrum, theory, _flat_noise(options, state), poles)
        except OSError as error:
            raise WriteError.of(path, error) from error
    write_statistics(folder, options, state, density, known, warn)
    section, halos = options.halos, None
    if section is not None:
        halos = write_halos(folder, section, state, density, warn)
    return WrittenState(density, spectrum, theory, halos)


def write_power_spectrum(
    path: Path,
    spectrum: PowerSpectrum,
    linear: np.ndarray,
    noise: float | None,
    poles: Multipoles | None = None,
) -> None:
    """Write a table of comma-separated values, with one line of names and units at the top.

    Args:
        path: path of the table.
        spectrum: measured power spectrum.
        linear: power of linear theory at the same k [(Mpc/h)^3].
        noise: power of particles at random [(Mpc/h)^3], the last column; None without one.
        poles: multipoles in redshift space, which become further columns.
    """
    columns = [spectrum.k, spectrum.power, spectrum.modes, linear]
    names = ["k [h/Mpc]", "P [(Mpc/h)^3]", "modes", "linear [(Mpc/h)^3]"]
    if poles is not None:
        columns += list(poles.power)
        names += [f"P{order} in redshift space [(Mpc/h)^3]" for order in poles.orders]
    if noise is not None:
        columns.append(np.full(len(spectrum.k), noise))
        names.append("particle noise [(Mpc/h)^3]")
    formats = ["%d" if name == "modes" else "%.8e" for name in names]
    table, header = np.column_stack(columns), ",".join(names)
    np.savetxt(path, table, fmt=formats, delimiter=",", header=header, comments="")


def _write_texts(folder: Path, options: SimulationOptions, state: State, peaks: list[int]) -> None:
    write_run_file(folder / "run.toml", options.resolved())
    timings = {
        **state.timings,
        "halo": state.halo,
        "particles": int(np.prod(options.box.grid)),
        "ranks": len(peaks),
        "mesh": options.mesh.shape,
        "threads_per_rank": launch.threads_per_rank(),
        "peak_memory_bytes": peaks,
        "units": {
            "phases": "s, for each step",
            **dict.fromkeys(("steps", "compile", "initial", "evolution", "total"), "s"),
        },
        "versions": versions(),
    }
    write_json(folder / "timings.json", timings)


SHORT = 2**24
"""Particles of a rank times steps of a run that takes about a second."""


class SimulationSession:
    """One session of a simulation.

    Args:
        options: the run file, with the mesh of this job's ranks.
        folder: folder of the results; `begin` has been called on rank 0.
        progress: this rank's display.
    """

    def __init__(
        self, options: SimulationOptions, folder: SimulationFolder, progress: Progress
    ) -> None:
        self.options, self.folder, self.progress = options, folder, progress
        assert options.mesh.shape is not None
        cosmology = Cosmology(**options.cosmology.arguments())
        self.simulation = options.simulation(cosmology, mesh=options.mesh.shape)
        box = self.simulation.box
        self.checkpoints = FieldCheckpoints(folder.checkpoints, box, KEEP)
        self._stop = StopRequest(box.mesh, folder, "step", progress.say)
        self._written: list[float] = []
        self._particles: LightConeFiles | None = None
        self._checksums: dict[str, str] = {}
        self.stopped_by: str | None = None
        self._ours = {
            "seed": options.initial.seed,
            "steps": options.evolution.step_count,
            "precision": options.run.precision,
            "integrator": type(options.evolution.integrator).__name__,
        }

    def run(self, *, resume: bool, is_row: bool = False) -> Summary | None:
        """Simulates and writes the results, or stops after a step. On all ranks together.

        Args:
            resume: whether to continue from the latest checkpoint, if there is one.
            is_row: whether nobody follows the steps: a short run without checkpoints then makes
                them without calls between them, see `SHORT`, and a signal comes after it.

        Returns:
            The summary of the complete run, on rank 0.

        Raises:
            StopError: a signal stopped the run; a checkpoint was written.
            HaloError, FloatingPointError, CheckpointError, WriteError: the run cannot continue. Its
                checkpoints are kept; a run without checkpoints leaves no files.
        """
        options, mesh = self.options, self.simulation.box.mesh
        check_statistics(options.results.statistics)
        if options.halos is not None:
            check_occupation(options.halos.galaxies, "halos.galaxies")
        if mesh.rank == 0:
            write_run_file(self.folder.run_file, options.resolved())
            self._checksums = options.checksums()
        mesh.barrier()  # rank 0 has the folder
        checkpoint = self.checkpoints.latest(**self._ours) if resume else None
        last = 0 if checkpoint is None else int(checkpoint[1]["step"])
        self._written = [] if checkpoint is None else list(checkpoint[1]["outputs"])
        if options.lightcone is not None and options.lightcone.particles:
            sealed = 0 if checkpoint is None else checkpoint[1].get("particle_files", 0)
            self._particles = LightConeFiles(self.folder.cone_particles, mesh, sealed)
        times = [a for a in options.output_times if a not in self._written]
        self.progress.note(f"going on after step {last}" if last else "initial conditions")
        initial, cone = options.initial, options.light_cone
        noise = None if initial.white_noise is None else open_white_noise(initial.white_noise)
        with self._stop.heard(), self._particles or nullcontext():
            views = [] if cone is None else observers_of(cone.options, self._particles)
            states = [self.simulation.states_at(times, self._output)] if times else []
            short = is_row and self._is_short and self.progress.on_count is None
            state, results = self.simulation.run(
                seed=initial.seed,
                white_noise=noise,
                paired=initial.paired,
                progress=None if short else self.progress.step,
                observe=[*views, *states],
                after_step=None if short else self._after_step,
                resume=None if checkpoint is None else lambda _: self._restored(*checkpoint),
            )
            # A signal that comes now lets the results be written.
            self.progress.note("writing")
            if self._particles is not None:
                self._particles.complete()
            shown = self._write_light_cone(state, results)
            del results
            theory, warn = self.simulation.theory, self.progress.warn
            summary = write_results(self.folder, options, state, theory, warn)
            if shown is not None and options.output.figures:
                draw_light_cone(self.folder.path, shown, warn)
            self.stopped_by = self._stop.name()
            return summary

    @property
    def _is_short(self) -> bool:
        options, box = self.options, self.simulation.box
        work = math.prod(box.block) * options.evolution.step_count
        return not options.output.checkpoint_every and work <= SHORT

    def _write_light_cone(self, state: State, results: list[Any]) -> ShownLightCone | None:
        """Writes the maps of the light cone into the partial folder. On rank 0.

        Args:
            state: the last state.
            results: what the observers of the run have measured.

        Returns:
            What the figures show; None without a light cone, and on the other ranks.
        """
        options, cone = self.options, self.options.light_cone
        if cone is None or state.box.mesh.rank > 0:
            return None
        about = {
            **state.header(),
            "config": options.resolved(),
            "checksums": self._checksums,
            "versions": versions(),
        }
        place, cosmology = self.folder.partial, self.simulation.cosmology
        subtract = options.results.subtract_shot_noise
        return write_light_cone_results(place, cone, results, cosmology, about, subtract=subtract)

    def _output(self, state: State) -> None:
        """Writes a state before the last one, in a folder of its own. On every rank."""
        folder, mesh = self.folder.partial / output_name(state.a), state.box.mesh
        if mesh.rank == 0:  # one that came after the checkpoint is made again
            remove(folder, ignore_errors=True)
            folder.mkdir()
        mesh.barrier()
        write_state(folder, self.options, state, self.simulation.theory.power, self.progress.warn)
        self._written.append(state.a)

    def _after_step(self, here: MidRun) -> None:
        """Writes a checkpoint where one is due, and ends if a signal came. On every rank."""
        every, steps = self.options.output.checkpoint_every, self.options.evolution.step_count
        stopped = self._stop.name()
        if stopped or (every and here.step % every == 0 and here.step < steps):
            self._save(here)
        if stopped:
            raise StopError(stopped, f"after step {here.step} of {steps}")

    def _save(self, here: MidRun) -> None:
        box, particles, files = self.simulation.box, here.particles, self._particles
        if files is not None:  # completes those written so far
            files.seal()
        blocks = (particles.displacement, particles.velocity)
        fields = {str(n): Field(block, box) for n, block in zip(VECTORS, blocks, strict=True)}
        packed = {f"measured_{name}": maps.numpy() for name, maps in here.measured().items()}
        attributes = {
            **self._ours,
            "done": here.done,
            "step": here.step,
            "a": here.a,
            "halo": here.halo,
            "timings": here.timings,
            "outputs": self._written,
            "checksums": self._checksums,
            "particle_files": 0 if files is None else files.sealed,
            "measured": list(packed),
        }
        self.checkpoints.save(here.step, fields, attributes, maps=packed)

    def _restored(self, path: Path, about: Mapping[str, Any]) -> MidRun:
        if "measured" not in about:
            raise CheckpointError(
                f"{path} was written by a development version of flowpm_dist; begin the run again "
                "with --overwrite"
            )
        particles = Particles(*(self.checkpoints.block(path, name) for name in VECTORS))
        rest = {name: about[name] for name in ("done", "step", "a", "halo", "timings")}
        maps = {
            name.removeprefix("measured_"): self.checkpoints.whole(path, name)
            for name in about["measured"]
        }
        return MidRun(particles=particles, measured=lambda: maps, **rest)
