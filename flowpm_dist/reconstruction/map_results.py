"""The maps of a reconstruction from convergence: files, figures and correlations."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.io.figure_style import save_figure
from flowpm_dist.io.files import written_whole
from flowpm_dist.io.light_cone_maps import MapArray, write_light_cone
from flowpm_dist.jobs.light_cone import ConvergenceOptions
from flowpm_dist.jobs.light_cone_results import bin_edges
from flowpm_dist.reconstruction.figures import maps_figure
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.observed_maps import ObservedMaps
from flowpm_dist.statistics.angular_power import angular_power

MEANINGS = {
    "data": "convergence that was observed, with its noise",
    "kappa": "convergence of the universe that was found",
    "truth": "convergence of the mock universe",
}


class MapResults:
    """The maps of what was observed, found, and true.

    Args:
        cone: the light cone.
        observed: the data.
        found: the maps of the universe that was found [source, x, y].
    """

    def __init__(self, cone: ConvergenceOptions, observed: ObservedMaps, found: tf.Tensor) -> None:
        self._cone = cone
        self._maps = {"data": observed.data, "kappa": np.asarray(found, np.float64)}
        if observed.mock is not None:
            self._maps["truth"] = np.asarray(observed.mock.seen, np.float64)

    def facts(self) -> dict[str, Any]:
        """Returns how far the maps agree with the truth, where it is known, for result.json."""
        if "truth" not in self._maps:
            return {}
        rows = [
            {
                "source": source.name,
                "r found": _correlation(self._maps["kappa"][n], self._maps["truth"][n]),
                "r data": _correlation(self._maps["data"][n], self._maps["truth"][n]),
            }
            for n, source in enumerate(self._cone.sources)
        ]
        return {"convergence": rows}

    def write(self, folder: ReconstructionFolder, attributes: dict[str, Any]) -> None:
        """Writes convergence.zarr, convergence.csv and convergence.png. On rank 0.

        Args:
            folder: of the reconstruction.
            attributes: of the maps.

        Raises:
            WriteError: they cannot be written.
        """
        shutil.rmtree(folder.maps, ignore_errors=True)  # of a session that was stopped here
        arrays = {
            name: MapArray(np.swapaxes(maps, -1, -2), ("source", "y", "x"), "1", MEANINGS[name])
            for name, maps in self._maps.items()
        }
        told = {"axes": "a map is [y, x], as pictures are; maps in Python are [x, y]"}
        write_light_cone(folder.maps, arrays, attributes, told)
        columns = self._columns()
        formats = ["%d", "%.8e", "%d", *["%.8e"] * (len(columns) - 3)]
        with written_whole(folder.path / "convergence.csv") as aside:
            table = np.column_stack(list(columns.values()))
            header = ",".join(columns)
            np.savetxt(aside, table, fmt=formats, delimiter=",", header=header, comments="")
        shown = {name: maps[-1] for name, maps in self._maps.items()}
        name = self._cone.sources[-1].name
        with written_whole(folder.path / "convergence.png") as aside:
            save_figure(maps_figure(shown, self._cone.field_of_view, name), aside)

    def _columns(self) -> dict[str, np.ndarray]:
        """Returns spectra, and where there is a truth r(l) and T(l), of each source and bin."""
        edges, fov = bin_edges(self._cone.fov, self._cone.pixels), self._cone.fov
        found = angular_power(self._maps["kappa"], fov, edges)
        sources, bins = found.power.shape
        columns = {
            "source": np.repeat(np.arange(sources), bins),
            "ell": np.tile(found.ell, sources),
            "modes": np.tile(found.modes, sources),
            "C_ell found": found.power.ravel(),
            "C_ell data": angular_power(self._maps["data"], fov, edges).power.ravel(),
        }
        if "truth" in self._maps:
            truth = self._maps["truth"]
            true = angular_power(truth, fov, edges).power
            cross = angular_power(self._maps["kappa"], fov, edges, other=truth).power
            columns["C_ell truth"] = true.ravel()
            columns["r"] = (cross / np.sqrt(found.power * true)).ravel()
            columns["T"] = np.sqrt(found.power / true).ravel()
        return columns


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the correlation coefficient of the pixels of two maps."""
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])
