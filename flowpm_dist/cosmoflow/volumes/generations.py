"""Generations of simulated universes, and the file of their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flowpm_dist.grid.field import Field
from flowpm_dist.io.files import read_arrays, save_arrays
from flowpm_dist.statistics import power_spectrum
from flowpm_dist.statistics.histogram import DENSITIES, CellValues
from meshimpl.process_mesh import ProcessMesh

HISTOGRAM_EDGES = np.linspace(-4.0, 5.0, 28)
"""Bin edges of the histogram that baselines are fitted to, see `CellValues.histogram`."""

Measured = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""k, power, histogram and edges, see `Generation`."""


@dataclass(frozen=True)
class Generation:
    """One universe for each of this replica's lanes.

    Attributes:
        volumes: the observed universes, such as densities of mean 1 or counts: blocks
            [lane, x/row, y/col, z], or with a channel for each redshift, in the simulation's dtype.
        parameters: [lane, parameter] [physical units].
        index: the number of each simulation in its stream, int64 [lane].
        seeds: the seeds of the white noise, int64 [lane].
        k: the wavenumbers of the power [bin] [h/Mpc], or multipoles of maps.
        power: P(k) [lane, bin] [(Mpc/h)^3], or C_l [sr], of one channel after another.
        histogram: the share of the cells in each bin [lane, bin], see `CellValues.histogram`, of
            one channel after another.
        edges: the edges of the histogram's bins [bin + 1], in ln(density) or in the values.
    """

    volumes: np.ndarray
    parameters: np.ndarray
    index: np.ndarray
    seeds: np.ndarray
    k: np.ndarray
    power: np.ndarray
    histogram: np.ndarray
    edges: np.ndarray = field(default_factory=HISTOGRAM_EDGES.copy)


def measured(channels: Sequence[Field], values: CellValues = DENSITIES) -> Measured:
    """Returns k, power, histogram and edges of volumes, see `Generation`.

    All ranks that share the volumes must call it together.

    Args:
        channels: densities or counts of a batch of universes.
        values: the kind of the values.
    """
    spectra = [power_spectrum(field, window="cic") for field in channels]
    histograms = [values.histogram(field, HISTOGRAM_EDGES) for field in channels]
    power = np.concatenate([spectrum.power for spectrum in spectra], axis=-1)
    shares = np.concatenate([each.counts / each.cells for each in histograms], axis=-1)
    return spectra[0].k, power, shares, histograms[0].edges


class Statistics:
    """Parameters, power spectrum and one-point distribution of simulations, by their number.

    Each rank adds the simulations of its replica, the same number of generations on all ranks. Rank
    0 gathers and writes them.

    Args:
        path: the .npz file.
        mesh: all ranks.
        names: names of the parameters.
    """

    def __init__(self, path: Path, mesh: ProcessMesh, names: tuple[str, ...]) -> None:
        self.path, self._mesh, self._names = path, mesh, names
        self._tables: list[np.ndarray] = []  # [simulation, its number and its statistics]
        self._sizes: tuple[int, ...] = (0, 0, 0)
        self._k = np.empty(0)
        self._edges = HISTOGRAM_EDGES

    def add(self, generation: Generation) -> None:
        """Adds the simulations of a generation."""
        self._k, self._edges = generation.k, generation.edges
        parts = generation.parameters, generation.power, generation.histogram
        self._sizes = tuple(part.shape[1] for part in parts)
        self._tables.append(np.column_stack([generation.index, *parts]))

    def write(self) -> None:
        """Adds the statistics to those in the file. On all ranks together.

        If there are no new statistics, an existing file stays unchanged.

        Raises:
            WriteError: on rank 0, where it cannot be written.
        """
        first = self._mesh.without("replica").rank == 0  # of the ranks of a replica
        none = np.empty((0, 1 + sum(self._sizes)))
        gathered = self._mesh.gather_to_root(np.concatenate([none, *self._tables * first]))
        if gathered is None or not self._tables:
            return
        columns = ("index", "parameters", "power", "histogram")
        if self.path.exists():
            written = read_arrays(self.path)
            gathered = [*gathered, np.column_stack([written[name] for name in columns])]
        everything = np.concatenate(gathered)
        everything = everything[np.unique(everything[:, 0], return_index=True)[1]]
        parts = np.split(everything[:, 1:], np.cumsum(self._sizes)[:-1], axis=1)
        arrays = dict(zip(columns, [everything[:, 0].astype(np.int64), *parts], strict=True))
        arrays |= {"k": self._k, "edges": self._edges, "names": np.array(self._names)}
        save_arrays(self.path, arrays)
