"""The results of a reconstruction: fields, tables and figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.field import Field
from flowpm_dist.io.figure_style import save_figure
from flowpm_dist.io.files import WriteError, write_text, written_whole
from flowpm_dist.io.pictures import power_spectrum_figure
from flowpm_dist.io.snapshot import FIELDS, mark_complete, write_snapshot
from flowpm_dist.jobs.tables import read_rows
from flowpm_dist.jobs.versions import versions
from flowpm_dist.observables.forward_model import AMPLITUDE
from flowpm_dist.reconstruction.figures import (
    Slab,
    correlation_figure,
    loss_figure,
    slabs_figure,
)
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.map_results import MapResults
from flowpm_dist.reconstruction.observed_maps import ObservedMaps
from flowpm_dist.reconstruction.parts import Observed
from flowpm_dist.reconstruction.plan import ReconstructionPlan
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.slabs import slab_maps
from flowpm_dist.reconstruction.spectra import Spectra
from flowpm_dist.reconstruction.universe import Universe
from flowpm_dist.reconstruction.unknowns import Unknowns

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


class Results:
    """Writes what was found. On all ranks together.

    Args:
        plan: of the reconstruction.
        folder: begun on rank 0.
        posterior: that was searched.
        observed: the data.
        run_text: the run file with all defaults, which the fields keep.
    """

    def __init__(
        self,
        plan: ReconstructionPlan,
        folder: ReconstructionFolder,
        posterior: Posterior,
        observed: Observed | ObservedMaps,
        run_text: str,
    ) -> None:
        self._plan, self._folder, self._run_text = plan, folder, run_text
        self._posterior, self._observed = posterior, observed
        self._model = posterior.model
        self._box = self._model.simulation.box

    def write(self, point: Unknowns, facts: dict[str, Any]) -> dict[str, Any]:
        """Writes everything; the fields are moved into place last.

        Args:
            point: that was found.
            facts: of the search, for result.json.

        Returns:
            What result.json holds.

        Raises:
            WriteError: on a rank that cannot write; the job must end then.
        """
        parameters = self._posterior.parameters(point)
        model, mock = self._model, self._observed.mock
        look = model.with_room(lambda: model.look(point.field, parameters))
        found = Universe.of(model, *look)
        truth = None if mock is None else Universe.of(model, mock.state, mock.seen)
        values = {name: float(value) for name, value in parameters.items()}
        spectra = Spectra.of(model, found, truth, self._plan.a)
        slabs = maps = None
        if isinstance(self._observed, ObservedMaps):
            assert self._plan.lightcone is not None
            maps = MapResults(self._plan.lightcone, self._observed, found.seen)
        else:
            slabs = slab_maps(self._observed, found, truth, self._layers)
        facts = {**self._facts(point, values), **spectra.correlations(), **facts}
        facts |= {} if maps is None else maps.facts()
        facts["versions"] = versions()
        aside = self._folder.fields.with_name(f".{self._folder.fields.name}.partial")
        if self._box.mesh.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        meanings = MEANINGS | ({"data": COUNTS} if self._plan.observation.kind == "counts" else {})
        write_snapshot(aside, self._fields(found, truth), self._header(values), meanings)
        if self._box.mesh.rank == 0:
            self._write_tables(spectra, facts)
            self._draw(spectra, slabs)
            if maps is not None:
                maps.write(self._folder, self._header(values))
            mark_complete(aside)
            self._publish(aside)
        self._box.mesh.barrier()
        return facts

    def _fields(self, found: Universe, truth: Universe | None) -> dict[str, Field]:
        fields = {
            "white_noise": found.state.white_noise,
            "linear_delta": found.state.linear_delta,
            "density": found.matter,
        }
        if isinstance(self._observed, Observed):
            fields |= self._of_cells(self._observed, found)
        if truth is not None:
            fields["truth_white_noise"] = truth.state.white_noise
            fields["truth_linear_delta"] = truth.state.linear_delta
            fields["truth_density"] = truth.matter
        return fields

    def _of_cells(self, observed: Observed, found: Universe) -> dict[str, Field]:
        """Returns the fields of an observed density, or of counts."""
        box, asked = self._box, self._plan.observation
        fields = {"data": Field(tf.constant(observed.data, box.dtype), box)}
        if asked.bias or asked.redshift_space or AMPLITUDE in self._posterior.priors:
            fields["expected"] = found.expected
        if asked.mask is not None:
            fields["mask"] = Field(tf.constant(observed.mask, box.dtype), box)
        return fields

    def _header(self, values: dict[str, float]) -> dict[str, Any]:
        box = self._plan.simulation.box
        cosmology = self._plan.cosmology.model_dump(exclude_none=True)
        fitted = {name: value for name, value in values.items() if name in cosmology}
        return {
            "a": self._plan.a,
            "box_size": list(box.size),
            "box_size_units": "Mpc/h",
            "grid": list(box.grid),
            "cosmology": {**cosmology, **fitted},
            "observation": {"structure": self._plan.observation.structure},  # of the density
            "config": self._run_text,
            "versions": versions(),
        }

    def _facts(self, point: Unknowns, values: dict[str, float]) -> dict[str, Any]:
        """Returns what is known of the point itself."""
        posterior, at = self._posterior, self._posterior.evaluate(point)
        own = {} if self._observed.mock is None else self._plan.own_values
        parameters: dict[str, Any] = {}
        for name, value in values.items():
            parameters[name] = {"value": value, "prior": list(posterior.priors[name])}
            if name in own:
                parameters[name]["truth"] = own[name]
        observed = posterior.likelihood.count
        return {
            "parameters": parameters,
            "loss": float(at.loss),
            "data": float(at.data),
            "prior": float(at.prior),
            "data_per_observed_cell": float(at.data) / max(1, observed),
            "prior_per_cell": float(at.prior) / self._box.cells,
            "observed_cells": observed,
            "cells": self._box.cells,
        }

    @property
    def _layers(self) -> int:
        """The cells along z that a slab is a mean over."""
        return max(1, self._box.grid[2] // 8)

    def _write_tables(self, spectra: Spectra, facts: dict[str, Any]) -> None:
        table = np.column_stack([spectra.k, spectra.modes, *spectra.columns.values()])
        header = ",".join(["k [h/Mpc]", "modes", *spectra.columns])
        formats = ["%.8e", "%d", *["%.8e"] * len(spectra.columns)]
        with written_whole(self._folder.path / "metrics.csv") as aside:
            np.savetxt(aside, table, fmt=formats, delimiter=",", header=header, comments="")
        text = json.dumps(facts, indent=1, default=float) + "\n"
        write_text(self._folder.path / "result.json", text)

    def _draw(self, spectra: Spectra, slabs: dict[str, np.ndarray] | None) -> None:
        path, box = self._folder.path, self._box
        nyquist = min(np.pi / cell for cell in box.cell)
        figures = {}
        if slabs is not None:
            residual = slabs.pop("residual")
            slab = Slab(self._layers * box.cell[2], box.size[:2], self._plan.a)
            figures["slabs.png"] = slabs_figure(slabs, residual, slab)
        if spectra.compared:
            fields = {n: (c.correlation, c.transfer) for n, c in spectra.compared.items()}
            figures["correlation.png"] = correlation_figure(spectra.k, fields, nyquist)
        else:
            power, a = self._model.simulation.power, self._plan.a
            figures["power_spectrum.png"] = power_spectrum_figure(
                spectra.k,
                spectra.columns["P final [(Mpc/h)^3]"],
                spectra.modes,
                lambda k: np.asarray(power(k, a)),
                nyquist=nyquist,
                a=a,
            )
        rows = read_rows(self._folder.iterations)
        if rows:
            figures["loss.png"] = self._loss(rows)
        for name, figure in figures.items():
            with written_whole(path / name) as aside:
                save_figure(figure, aside)

    def _loss(self, rows: list[dict[str, str]]) -> Any:
        stages, before, stage = [], 0, ""
        for row in rows:
            if row["stage"] != stage:
                stages.append((before, float(row["radius"]), float(row["inflation"])))
            before, stage = int(row["evaluations"]), row["stage"]
        count = max(1, self._posterior.likelihood.count)
        return loss_figure(
            [int(row["evaluations"]) for row in rows],
            [float(row["data"]) / count for row in rows],
            [float(row["prior"]) / self._box.cells for row in rows],
            stages,
        )

    def _publish(self, aside: Path) -> None:
        final = self._folder.fields
        try:
            shutil.rmtree(final, ignore_errors=True)  # of a session that was stopped here
            aside.rename(final)
        except OSError as error:
            raise WriteError.of(final, error) from error
