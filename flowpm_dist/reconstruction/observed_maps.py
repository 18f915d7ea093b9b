"""Observed maps of the convergence."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.io.figures import save_figure
from flowpm_dist.io.files import written_whole
from flowpm_dist.io.light_cone import MapArray, write_light_cone
from flowpm_dist.io.snapshot import load_snapshot
from flowpm_dist.observables.light_cone.section import ConvergenceOptions
from flowpm_dist.observables.universe_model import UniverseModel
from flowpm_dist.reconstruction.figures import maps_figure
from flowpm_dist.reconstruction.likelihoods import GaussianMaps, Likelihood
from flowpm_dist.reconstruction.observed import Observed, Universe
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.work import MAPS
from flowpm_dist.statistics.angular_power import angular_power, octave_edges

MEANINGS = {
    "data": "convergence that was observed, with its noise",
    "kappa": "convergence of the universe that was found",
    "truth": "convergence of the mock universe",
}


class ObservedMaps(Observed):
    """Observed maps of the convergence [source, x, y] [1], float64, whole on every rank."""

    @classmethod
    def of(cls, options: ReconstructionOptions, model: UniverseModel) -> Self:
        """See `Observed.of`."""
        cone, asked = _cone_of(options), options.data
        if asked.mock_seed is None:
            truth = None
            data = options.read_maps()
        else:
            truth = Universe.mock(model, asked.mock_seed)
            data = np.asarray(truth.expected, np.float64)
            if asked.add_noise:
                assert cone.shape_noise is not None
                data = data + cone.noise(cone.shape_noise.seed)
        return cls(options, data, _likelihood_of(cone, model.simulation.box, data), truth)

    @staticmethod
    def kept_likelihood(options: ReconstructionOptions, box: Box, folder: Path) -> Likelihood:
        """See `Observed.kept_likelihood`."""
        maps = load_snapshot(folder / MAPS[0])["data"]
        return _likelihood_of(_cone_of(options), box, np.swapaxes(maps, -1, -2))

    def facts(self, maps: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns how far the maps agree with the truth, where it is known. See `Observed`."""
        if "truth" not in maps:
            return {}
        rows = [
            {
                "source": source.name,
                "r found": _correlation(maps["kappa"][n], maps["truth"][n]),
                "r data": _correlation(maps["data"][n], maps["truth"][n]),
            }
            for n, source in enumerate(_cone_of(self.options).sources)
        ]
        return {"convergence": rows}

    def maps(self, found: Universe) -> dict[str, np.ndarray]:
        """Returns the maps [source, x, y] of data, reconstruction and truth. See `Observed`."""
        maps = {"data": self.data, "kappa": np.asarray(found.expected, np.float64)}
        if self.truth is not None:
            maps["truth"] = np.asarray(self.truth.expected, np.float64)
        return maps

    def write(self, folder: Path, maps: dict[str, np.ndarray], attributes: dict[str, Any]) -> None:
        """Writes convergence.zarr, convergence.csv and convergence.png. See `Observed.write`."""
        cone = _cone_of(self.options)
        group, table, picture = (folder / name for name in MAPS)
        shutil.rmtree(group, ignore_errors=True)  # of a session that was stopped here
        arrays = {
            name: MapArray(np.swapaxes(each, -1, -2), ("source", "y", "x"), "1", MEANINGS[name])
            for name, each in maps.items()
        }
        axes = {"axes": "a map is [y, x], as pictures are; maps in Python are [x, y]"}
        write_light_cone(group, arrays, attributes, axes)
        columns = _spectra(cone, maps)
        formats = ["%d", "%.8e", "%d", *["%.8e"] * (len(columns) - 3)]
        with written_whole(table) as aside:
            rows = np.column_stack(list(columns.values()))
            header = ",".join(columns)
            np.savetxt(aside, rows, fmt=formats, delimiter=",", header=header, comments="")
        last = {name: each[-1] for name, each in maps.items()}
        save_figure(maps_figure(last, cone.field_of_view, cone.sources[-1].name), picture)


def _cone_of(options: ReconstructionOptions) -> ConvergenceOptions:
    assert options.lightcone is not None
    return options.lightcone


def _likelihood_of(cone: ConvergenceOptions, box: Box, data: np.ndarray) -> GaussianMaps:
    """Returns the likelihood of maps [source, x, y] with the noise of the shapes of galaxies."""
    return GaussianMaps(box, tf.constant(data, box.dtype), cone.pixel_sigma())


def _spectra(cone: ConvergenceOptions, maps: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns spectra of each source and bin, and r(l) and T(l) where the truth is known."""
    edges, fov = octave_edges(cone.fov, cone.pixels), cone.fov
    found = angular_power(maps["kappa"], fov, edges)
    sources, bins = found.power.shape
    columns = {
        "source": np.repeat(np.arange(sources), bins),
        "ell": np.tile(found.ell, sources),
        "modes": np.tile(found.modes, sources),
        "C_ell found": found.power.ravel(),
        "C_ell data": angular_power(maps["data"], fov, edges).power.ravel(),
    }
    if "truth" in maps:
        true = angular_power(maps["truth"], fov, edges).power
        cross = angular_power(maps["kappa"], fov, edges, other=maps["truth"]).power
        columns["C_ell truth"] = true.ravel()
        columns["r"] = (cross / np.sqrt(found.power * true)).ravel()
        columns["T"] = np.sqrt(found.power / true).ravel()
    return columns


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the correlation coefficient of the pixels of two maps."""
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])
