"""The results of a search: fields, tables and figures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from flowpm_dist.grid.field import Field
from flowpm_dist.io.figures import power_spectrum_figure, save_figure
from flowpm_dist.io.files import WriteError, write_text, written_whole
from flowpm_dist.io.snapshot import FIELDS, mark_complete, write_snapshot
from flowpm_dist.jobs.results import read_rows, versions
from flowpm_dist.observables.forward_model import AMPLITUDE
from flowpm_dist.observables.universe_model import UniverseModel
from flowpm_dist.reconstruction.figures import correlation_figure, loss_figure
from flowpm_dist.reconstruction.observed import Observed, Universe
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.unknowns import Unknowns
from flowpm_dist.reconstruction.work import ReconstructionFolder
from flowpm_dist.statistics import Comparison, compare, power_spectrum

LARGE, SMALL = 0.1, 0.3
"""Wavenumbers near which the correlation with the truth is reported [h/Mpc]."""

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


def write_results(
    posterior: Posterior,
    observed: Observed,
    folder: ReconstructionFolder,
    point: Unknowns,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Writes what was found; the fields are moved into place last. On all ranks together.

    Args:
        posterior: the posterior that was searched.
        observed: the data.
        folder: the folder of the reconstruction.
        point: the point that was found.
        facts: numbers of the search for result.json.

    Returns:
        The contents of result.json.

    Raises:
        WriteError: on a rank that cannot write; the job must end then.
    """
    options, model, truth = observed.options, posterior.model, observed.truth
    parameters = posterior.parameters(point)
    found = Universe.of(model, point.field, parameters)
    values = {name: float(value) for name, value in parameters.items()}
    fields = _fields_of(model, found)
    fields |= observed.fields(found, fits_amplitude=AMPLITUDE in posterior.priors)
    if truth is not None:
        fields |= {f"truth_{name}": field for name, field in _fields_of(model, truth).items()}
    spectra, maps = Spectra.of(model, fields, options.evolution.last), observed.maps(found)
    facts = {**_facts(posterior, observed, point, values), **spectra.correlations(), **facts}
    facts |= {**observed.facts(maps), "versions": versions()}
    cosmology = options.cosmology.model_dump(exclude_none=True)
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
    mesh, final = model.box.mesh, folder.fields
    aside = final.with_name(f".{final.name}.partial")
    if mesh.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
    meanings = MEANINGS | ({"data": COUNTS} if options.observation.kind == "counts" else {})
    write_snapshot(aside, fields, header, meanings)
    if mesh.rank == 0:
        _write_tables(folder, spectra, facts)
        _draw(folder, posterior, spectra, options.evolution.last)
        observed.write(folder.path, maps, header)
        mark_complete(aside)
        try:
            shutil.rmtree(final, ignore_errors=True)  # of a session that was stopped here
            aside.rename(final)
        except OSError as error:
            raise WriteError.of(final, error) from error
    mesh.barrier()
    return facts


def _fields_of(model: UniverseModel, universe: Universe) -> dict[str, Field]:
    state = universe.state
    density = Field(model.matter(state), state.box)
    white_noise, linear_delta = state.white_noise, state.linear_delta
    return {"white_noise": white_noise, "linear_delta": linear_delta, "density": density}


def _facts(
    posterior: Posterior, observed: Observed, point: Unknowns, values: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the losses and the parameters at the point that was found."""
    at, count, cells = (
        posterior.evaluate(point),
        posterior.likelihood.count,
        posterior.space.box.cells,
    )
    own = {} if observed.truth is None else observed.options.own_values
    parameters: dict[str, Any] = {}
    for name, value in values.items():
        parameters[name] = {"value": value, "prior": list(posterior.priors[name])}
        if name in own:
            parameters[name]["truth"] = own[name]
    return {
        "parameters": parameters,
        "loss": float(at.loss),
        "data": float(at.data),
        "prior": float(at.prior),
        "data_per_observed_cell": float(at.data) / max(1, count),
        "prior_per_cell": float(at.prior) / cells,
        "observed_cells": count,
        "cells": cells,
    }


def _write_tables(folder: ReconstructionFolder, spectra: Spectra, facts: dict[str, Any]) -> None:
    table = np.column_stack([spectra.k, spectra.modes, *spectra.columns.values()])
    header = ",".join(["k [h/Mpc]", "modes", *spectra.columns])
    formats = ["%.8e", "%d", *["%.8e"] * len(spectra.columns)]
    with written_whole(folder.path / "metrics.csv") as aside:
        np.savetxt(aside, table, fmt=formats, delimiter=",", header=header, comments="")
    write_text(folder.result, json.dumps(facts, indent=1, default=float) + "\n")


def _draw(folder: ReconstructionFolder, posterior: Posterior, spectra: Spectra, a: float) -> None:
    nyquist = min(np.pi / cell for cell in posterior.space.box.cell)
    figures = {}
    if spectra.compared:
        fields = {n: (c.correlation, c.transfer) for n, c in spectra.compared.items()}
        figures["correlation.png"] = correlation_figure(spectra.k, fields, nyquist)
    else:
        power = posterior.model.simulation.power
        figures["power_spectrum.png"] = power_spectrum_figure(
            spectra.k,
            spectra.columns["P final [(Mpc/h)^3]"],
            spectra.modes,
            lambda k: np.asarray(power(k, a)),
            nyquist=nyquist,
            a=a,
        )
    if rows := read_rows(folder.iterations):
        count, cells = max(1, posterior.likelihood.count), posterior.space.box.cells
        figures["loss.png"] = loss_figure(rows, count, cells)
    for name, figure in figures.items():
        save_figure(figure, folder.path / name)


@dataclass(frozen=True)
class Spectra:
    """Two-point statistics of what was found.

    Attributes:
        k, modes: mean wavenumber [h/Mpc] and number of modes of the bins.
        columns: power, or correlation and transfer function, by the column of metrics.csv.
        compared: initial and final field compared with the truth, where it is known.
    """

    k: np.ndarray
    modes: np.ndarray
    columns: dict[str, np.ndarray]
    compared: dict[str, Comparison]

    @classmethod
    def of(cls, model: UniverseModel, fields: Mapping[str, Field], a: float) -> Self:
        """Returns the spectra of a universe, or its comparison with the truth.

        On all ranks together.

        Args:
            model: the model from white noise to what is observed.
            fields: the linear and the matter density that were found, and the truth where it is
                known; see `MEANINGS`.
            a: the scale factor of the data.
        """
        window: Any = "cic" if model.formation.has_particles else None
        if "truth_density" in fields:
            initial = compare(fields["linear_delta"], fields["truth_linear_delta"])
            final = compare(fields["density"], fields["truth_density"], window=window)
            columns = {
                "r initial": initial.correlation,
                "T initial": initial.transfer,
                "r final": final.correlation,
                "T final": final.transfer,
            }
            compared = {"initial field": initial, "final field": final}
            return cls(initial.k, initial.modes, columns, compared)
        initial_power = power_spectrum(fields["linear_delta"])
        final_power = power_spectrum(fields["density"], window=window)
        k, theory = initial_power.k, model.simulation.power
        columns = {
            "P initial at a = 1 [(Mpc/h)^3]": initial_power.power,
            "linear at a = 1 [(Mpc/h)^3]": np.asarray(theory(k, 1.0)),
            "P final [(Mpc/h)^3]": final_power.power,
            "linear [(Mpc/h)^3]": np.asarray(theory(k, a)),
        }
        return cls(k, initial_power.modes, columns, {})

    def correlations(self) -> dict[str, Any]:
        """Returns the correlations with the truth at a few wavenumbers, for result.json."""
        rows = {}
        for wanted in (LARGE, SMALL) if self.compared else ():
            i = int(np.argmin(np.abs(np.log(self.k / wanted))))
            of_fields = {f"r {n}": float(c.correlation[i]) for n, c in self.compared.items()}
            rows[i] = {"k [h/Mpc]": float(self.k[i]), **of_fields}
        return {"correlations": list(rows.values())} if rows else {}
