"""A session of a search: iterations.csv, checkpoints, and the results."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.grid.field import Field
from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.files import WriteError, remove, versions, write_json
from flowpm_dist.io.snapshot import FIELDS, mark_complete, write_snapshot
from flowpm_dist.jobs.job import StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import Table, read_rows
from flowpm_dist.jobs.run_file import write_run_file
from flowpm_dist.jobs.session import StopRequest
from flowpm_dist.observables.forward_model import AMPLITUDE
from flowpm_dist.reconstruction.checkpoints import PointCheckpoints
from flowpm_dist.reconstruction.folder import ReconstructionFolder, outcome_of
from flowpm_dist.reconstruction.lbfgs import LBFGS
from flowpm_dist.reconstruction.likelihoods.base import Annealing
from flowpm_dist.reconstruction.observed import model_of, observed_kind, write_spectra
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.search import Row, Search, Stage, default_stages
from flowpm_dist.reconstruction.universe import Universe
from flowpm_dist.reconstruction.unknowns import Unknowns
from flowpm_dist.statistics import Comparison, compare, power_spectrum
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = tuple[dict[str, np.ndarray], dict[str, Comparison], dict[str, np.ndarray]]
"""Columns of metrics.csv, comparisons with the truth where it is known, and maps of the data."""

LARGE, SMALL = 0.1, 0.3
"""Wavenumbers near which the correlation with the truth is reported [h/Mpc]."""

K, FINAL_POWER = "k [h/Mpc]", "P final [(Mpc/h)^3]"
"""Names of columns of metrics.csv."""

MEANINGS = {
    **FIELDS,
    "density": ("mean density", "matter density at the scale factor of the data"),
    "expected": ("mean density", "density that the model expects to be observed"),
    "data": ("mean density", "what was observed; 1 where nothing was"),
    "mask": ("1", "share of each cell that is observed"),
    "truth_white_noise": ("1", "white noise of the mock universe"),
    "truth_linear_delta": ("1", "linear overdensity of the mock universe, extrapolated to a = 1"),
    "truth_density": ("mean density", "matter density of the mock universe"),
}
COUNTS = ("1", "what was counted in each cell; 0 where nothing is observed")

COMPARE_EVERY = 5
"""Iterations between comparisons with the truth."""

ROW = tuple(column.name for column in dataclasses.fields(Row))
COLUMNS = (*ROW, "seconds", f"r({LARGE})", f"r({SMALL})")
"""The columns of iterations.csv; parameters follow them."""


class SearchSession:
    """A session of a search for the most probable point, which begins or resumes it.

    Args:
        options: the checked run file, with the mesh of the search.
        mesh: the ranks, of axes row and col.
        folder: the folder, begun on rank 0.
        progress: the progress of this rank.

    Raises:
        VolumeError: a file that cannot be read.
        HaloError: a particle of the mock universe left the halo that was asked for.
    """

    def __init__(
        self,
        options: ReconstructionOptions,
        mesh: ProcessMesh,
        folder: ReconstructionFolder,
        progress: Progress,
    ) -> None:
        self.options, self.mesh, self.folder, self.progress = options, mesh, folder, progress
        progress.note("making the mock universe" if options.is_mock else "reading the data")
        self.model = model_of(options, mesh)
        self.observed = observed_kind(options)(options, self.model)
        self.posterior = Posterior(self.model, self.observed.likelihood, options.priors.ranges)
        settings = options.search
        if settings.stages is None:
            stages = default_stages(self.posterior, settings.evaluations)
        else:
            stages = [Stage(Annealing(*annealing), count) for *annealing, count in settings.stages]
        self.search = Search(
            self.posterior,
            LBFGS(settings.history),
            stages,
            seed=settings.seed,
            tolerance=settings.tolerance,
            checkpoints=PointCheckpoints(
                folder.checkpoints.path, self.posterior.space, settings.keep
            ),
            every=settings.checkpoint_every,
        )
        self._stop = StopRequest(mesh, folder, "iteration", progress.say)
        self._table: Table | None = None
        self._correlation = ""

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Searches to the end, or until a signal comes, and writes the results.

        Must be called on all ranks together.

        Args:
            resume: whether to go on from the latest checkpoint, if there is one.

        Returns:
            The contents of result.json.

        Raises:
            StopError: a signal came; a checkpoint was written.
            NoProgressError, HaloError, CheckpointError, WriteError: the checkpoints are as they
                were.
        """
        options, search = self.options, self.search
        if self.mesh.rank == 0:
            write_run_file(self.folder.run_file, options.resolved())
        self.progress.note(f"searching, {options.search.total} gradients; compiling")
        with ExitStack() as opened:
            # Until here nothing is lost by ending at once.
            opened.enter_context(self._stop.heard())
            self._opened = opened
            begin = self._lap = time.perf_counter()
            point = search.run(self._after_iteration, resume=resume)
            if search.progress.iteration % options.search.checkpoint_every:
                search.save()
        seconds = time.perf_counter() - begin
        self.progress.note("writing the results")
        facts = {
            "iterations": search.progress.iteration,
            "evaluations": search.progress.evaluations,
            "converged": search.outcome == "converged",
            "stopped": search.outcome,
            "left": search.progress.left,
            "seconds": seconds,
            "mesh": str(self.mesh),
            "ranks": self.mesh.size,
            "threads_per_rank": launch.threads_per_rank(),
        }
        if self.mesh.rank == 0 and (rows := read_rows(self.folder.iterations)):
            ends = np.array([0, *(int(row["evaluations"]) for row in rows)])
            laps = np.array([float(row["seconds"]) for row in rows])
            # The median, so that compilation does not count.
            median = np.median(laps / np.maximum(1, np.diff(ends)))
            facts["seconds_per_evaluation"] = float(median)
        facts, results = self._write_results(point, facts)
        if self.mesh.rank == 0:
            self.folder.write_mark(complete=options.sampler is None, searched=True)
            self._draw(*results)
        return facts

    def _after_iteration(self, row: Row, point: Unknowns) -> None:
        """Adds a line and a row for an iteration, on every rank, and ends if a signal came."""
        seconds = time.perf_counter() - self._lap
        values = {name: float(x) for name, x in self.posterior.parameters(point).items()}
        values |= self._compared(row, point)
        data = row.data / max(1, self.posterior.likelihood.count)
        state = (
            f"loss {row.loss:.6g}  data {data:.4f}  "
            f"prior {row.prior / self.model.simulation.box.cells:.4f}  "
            f"|gradient| {row.gradient_norm:.3g}  left {row.left:.3g}{self._correlation}"
        )
        total = self.options.search.total
        stage = f"stage {row.stage}/{len(self.search.stages)}"
        self.progress(stage, min(row.evaluations, total), total, state)
        if self.mesh.rank == 0:
            if self._table is None:
                columns = (*COLUMNS, *self.posterior.space.names)
                self._table = Table(self.folder.iterations, columns, row.iteration)
                self._opened.callback(self._table.close)
            self._table.add({**dataclasses.asdict(row), "seconds": seconds, **values})
        if (signal := self._stop.name()) is not None:
            self.search.save()
            now = self.search.progress
            at = f"after iteration {now.iteration}, {now.evaluations} of {total} gradients"
            raise StopError(signal, at)
        self._lap = time.perf_counter()

    def _compared(self, row: Row, point: Unknowns) -> dict[str, float]:
        """Returns the initial field's correlation with the truth, in iterations that compare."""
        truth = self.observed.truth
        if truth is None or (row.iteration % COMPARE_EVERY and row.iteration > 1):
            return {}
        comparison = compare(Field(point.field, self.model.simulation.box), truth.state.white_noise)
        places = [_nearest_bin(comparison.k, wanted) for wanted in (LARGE, SMALL)]
        shown = [f"r({comparison.k[i]:.2f}) {comparison.correlation[i]:.3f}" for i in places]
        self._correlation = "  " + "  ".join(dict.fromkeys(shown))
        names = (f"r({LARGE})", f"r({SMALL})")
        return {n: float(comparison.correlation[i]) for n, i in zip(names, places, strict=True)}

    def _write_results(
        self, point: Unknowns, facts: dict[str, Any]
    ) -> tuple[dict[str, Any], Results]:
        """Writes what was found; the fields are moved into place last. On all ranks together.

        Args:
            point: the point that was found.
            facts: numbers of the search for result.json.

        Returns:
            The contents of result.json, and the arguments of `_draw`.

        Raises:
            WriteError: on a rank that cannot write; the job must end then.
        """
        options, observed, truth = self.options, self.observed, self.observed.truth
        parameters = self.posterior.parameters(point)
        universe = Universe.of(self.model, point.field, parameters)
        values = {name: float(value) for name, value in parameters.items()}
        fields = self._fields_of(universe)
        fields |= observed.fields(universe, fits_amplitude=AMPLITUDE in self.posterior.priors)
        if truth is not None:
            fields |= {f"truth_{name}": field for name, field in self._fields_of(truth).items()}
        (spectra, compared), maps = self._spectra_of(fields), observed.maps(universe)
        rows, k = {}, spectra[K]
        for i in [_nearest_bin(k, wanted) for wanted in (LARGE, SMALL)] if compared else ():
            of_fields = {f"r {name}": float(c.correlation[i]) for name, c in compared.items()}
            rows[i] = {K: float(k[i]), **of_fields}
        correlations = {"correlations": list(rows.values())} if rows else {}
        facts = {**self._facts_of(point, values), **correlations, **facts}
        facts |= {**observed.facts(maps), "versions": versions()}
        cosmology = Cosmology(**options.cosmology.arguments()).numbers()
        header = {
            "a": options.evolution.last,
            "box_size": list(options.box.size),
            "box_size_units": "Mpc/h",
            "grid": list(options.box.grid),
            "cosmology": cosmology | {name: x for name, x in values.items() if name in cosmology},
            "observation": {"structure": options.observation.structure},  # of the density
            "config": options.resolved(),
            "versions": facts["versions"],
        }
        folder, final = self.folder, self.folder.fields
        aside = final.with_name(f".{final.name}.partial")
        if self.mesh.rank == 0:
            remove(aside, ignore_errors=True)
        meanings = MEANINGS | ({"data": COUNTS} if options.observation.kind == "counts" else {})
        write_snapshot(aside, fields, header, meanings)
        if self.mesh.rank == 0:
            write_spectra(folder.path / "metrics.csv", spectra)
            write_json(folder.result, facts)
            observed.write(folder.path, maps, header)
            mark_complete(aside)
            try:
                remove(final, ignore_errors=True)  # of a session that was stopped here
                aside.rename(final)
            except OSError as error:
                raise WriteError.of(final, error) from error
        self.mesh.barrier()
        return facts, (spectra, compared, maps)

    def _fields_of(self, universe: Universe) -> dict[str, Field]:
        state = universe.state
        density = Field(self.model.formation.density(state), state.box)
        return {**state.fields(("white_noise", "linear_delta")), "density": density}

    def _facts_of(self, point: Unknowns, values: Mapping[str, float]) -> dict[str, Any]:
        """Returns the losses and the parameters at the point that was found."""
        posterior, at = self.posterior, self.search.evaluate(point)
        count, cells = posterior.likelihood.count, posterior.space.box.cells
        truths = {} if self.observed.truth is None else self.options.own_values
        parameters: dict[str, Any] = {}
        for name, value in values.items():
            parameters[name] = {"value": value, "prior": list(posterior.priors[name])}
            if name in truths:
                parameters[name]["truth"] = truths[name]
        return {
            "parameters": parameters,
            **{name: float(getattr(at, name)) for name in ("loss", "data", "prior")},
            "data_per_observed_cell": float(at.data) / max(1, count),
            "prior_per_cell": float(at.prior) / cells,
            "observed_cells": count,
            "cells": cells,
        }

    def _spectra_of(
        self, fields: Mapping[str, Field]
    ) -> tuple[dict[str, np.ndarray], dict[str, Comparison]]:
        """Returns the columns of metrics.csv, and comparisons with the truth where it is known.

        On all ranks together.

        Args:
            fields: the linear and the matter density that were found, and the truth; see
                `MEANINGS`.
        """
        window: Any = "cic" if self.model.formation.has_particles else None
        if "truth_density" in fields:
            initial = compare(fields["linear_delta"], fields["truth_linear_delta"])
            final = compare(fields["density"], fields["truth_density"], window=window)
            columns = {
                K: initial.k,
                "modes": initial.modes,
                "r initial": initial.correlation,
                "T initial": initial.transfer,
                "r final": final.correlation,
                "T final": final.transfer,
            }
            return columns, {"initial field": initial, "final field": final}
        initial_power = power_spectrum(fields["linear_delta"])
        final_power = power_spectrum(fields["density"], window=window)
        k, theory = initial_power.k, self.model.simulation.theory.power.cb
        columns = {
            K: k,
            "modes": initial_power.modes,
            "P initial at a = 1 [(Mpc/h)^3]": initial_power.power,
            "linear at a = 1 [(Mpc/h)^3]": np.asarray(theory(k, 1.0)),
            FINAL_POWER: final_power.power,
            "linear [(Mpc/h)^3]": np.asarray(theory(k, self.options.evolution.last)),
        }
        return columns, {}

    def _draw(
        self,
        spectra: dict[str, np.ndarray],
        compared: dict[str, Comparison],
        maps: dict[str, np.ndarray],
    ) -> None:
        """Draws the results, which are complete. On rank 0."""
        box, path, warn = self.posterior.space.box, self.folder.path, self.progress.warn
        name = "correlation.png" if compared else "power_spectrum.png"
        with drawing(path / name, warn) as save:
            save(self._spectra_figure(spectra, compared))
        with drawing(path / "loss.png", warn) as save:
            from flowpm_dist.reconstruction.figures import loss_figure

            if rows := read_rows(self.folder.iterations):
                count = max(1, self.posterior.likelihood.count)
                outcome = outcome_of(self.search.outcome, self.search.progress.left)
                save(loss_figure(rows, count, box.cells, outcome))
        with drawing(path / self.observed.picture, warn) as save:
            save(self.observed.figure(maps))

    def _spectra_figure(
        self, spectra: dict[str, np.ndarray], compared: dict[str, Comparison]
    ) -> Figure:
        from flowpm_dist.io.figures import power_spectrum_figure
        from flowpm_dist.reconstruction.figures import correlation_figure

        a, power = self.options.evolution.last, self.model.simulation.theory.power.cb
        k, nyquist = spectra[K], min(np.pi / cell for cell in self.posterior.space.box.cell)
        if compared:
            fields = {name: (c.correlation, c.transfer) for name, c in compared.items()}
            return correlation_figure(k, fields, nyquist)
        return power_spectrum_figure(
            k,
            spectra[FINAL_POWER],
            spectra["modes"],
            lambda k: np.asarray(power(k, a)),
            nyquist=nyquist,
            a=a,
        )


def _nearest_bin(k: np.ndarray, wanted: float) -> int:
    return int(np.argmin(np.abs(np.log(k / wanted))))
