"""Modes of a box, and the bins of wavenumber and wedges of direction that they are in.

A mode's wavenumber, multiplicity and window follow from three short vectors, one for each axis, so
that nothing of the size of a spectrum is stored.

By default the bins are one fundamental mode wide, up to the smallest Nyquist wavenumber. Bin number
i then holds the modes with i + 1/2 <= k / k_f < i + 3/2, where k_f = 2 pi / (longest side). Bins
with given edges hold the modes with low <= k < high. The mode k = 0 is in no bin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_on_mesh
from flowpm_dist.options import in_unit, keep_in_units
from meshimpl.graph_guards import check_eager
from meshimpl.mesh_graph import check_place
from meshimpl.process_mesh import ProcessMesh

Axes = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""Vectors along x, y and z: [1, 1, kx], [1, ky, 1], [kz, 1, 1]; or of one plane of kz."""

_TIE = 1e-9
"""Added before a comparison, so that rounding errors do not affect modes on an edge of a bin."""


@dataclass(frozen=True)
class Bins:
    """Bins of wavenumber of equal width, in k or in log k.

    Attributes:
        number: the number of bins; or
        width: the width of each bin [h/Mpc], or [dex] with spacing "log". Bins fill the range from
            below. What is left at the upper end, less than one width, is in no bin.
        spacing: "linear" for bins of equal width in k, "log" in log k.
        k_min, k_max: the ends of the range [h/Mpc]; by default the fundamental wavenumber of the
            longest side, 2 pi / L, and the smallest Nyquist wavenumber of the box.

    Raises:
        ValueError: not exactly one of number and width, or a value out of its range.
    """

    number: int | None = None
    width: float | None = None
    spacing: Literal["linear", "log"] = "linear"
    k_min: float | None = None
    k_max: float | None = None

    def __post_init__(self) -> None:
        width = "h/Mpc" if self.spacing == "linear" else ""
        keep_in_units(self, number="", width=width, k_min="h/Mpc", k_max="h/Mpc")
        if (self.number is None) == (self.width is None):
            raise ValueError("bins need either a number or a width: exactly one of them")
        if self.number is not None and not (isinstance(self.number, Integral) and self.number >= 1):
            raise ValueError(f"{self.number} bins: a whole number of at least 1 is needed")
        if self.width is not None and not 0 < self.width < np.inf:
            raise ValueError(f"bins of width {self.width}: a number above 0 is needed")
        if self.spacing not in ("linear", "log"):
            raise ValueError(f"spacing {self.spacing!r}: must be 'linear' or 'log'")

    def edges(self, box: Box) -> np.ndarray:
        """Returns the edges of the bins for fields of a box [h/Mpc], float64 [bins + 1].

        Raises:
            ValueError: the range is empty, too narrow for one bin, or begins at 0 with "log".
        """
        low = 2 * np.pi / max(box.size) if self.k_min is None else float(self.k_min)
        high = np.pi / max(box.cell) if self.k_max is None else float(self.k_max)
        log = self.spacing == "log"
        if not low < high < np.inf or low < 0 or (log and low == 0):
            least = "above 0" if log else "from 0 on"
            raise ValueError(f"bins from k = {low:g} to {high:g} h/Mpc: must increase, {least}")
        if log:
            low, high = np.log10(low), np.log10(high)
        if self.width is None:
            number = int(self.number or 0)
            width = (high - low) / number
        else:
            width = self.width
            number = int((high - low) / width * (1 + _TIE))
            if number < 1:
                raise ValueError(f"{self} has no bin: the range is {high - low:g} wide")
        edges = low + width * np.arange(number + 1)
        return 10**edges if log else edges


BinChoice = Bins | int | Sequence[float] | np.ndarray | None
"""`Bins`, a number of linear bins, edges [h/Mpc], or None for the default bins."""


@dataclass(frozen=True)
class Binning:
    """The bin of each mode of one box, and the wedge within the bin.

    Attributes:
        bins: the number of bins.
        edges: edges of the bins, k / k_f; empty for bins one fundamental mode wide.
        wedges: edges of the wedges in |mu|, the cosine between k and the line of sight; empty
            without wedges.
        axis: the axis of the line of sight, 0, 1 or 2.
    """

    bins: int
    edges: tuple[float, ...] = ()
    wedges: tuple[float, ...] = ()
    axis: int = 2

    @property
    def size(self) -> int:
        """The number of all bins, wedge by wedge."""
        return self.bins * max(1, len(self.wedges) - 1)

    def number(self, along: Axes, k: tf.Tensor) -> tf.Tensor:
        """Returns the bin (int32) of each mode; `size` for a mode that is in no bin.

        Args:
            along: k / k_f along each axis.
            k: |k| / k_f.
        """
        if self.edges:
            number = _interval(k, self.edges)
        else:
            number = tf.cast(tf.floor(k + (0.5 + _TIE)), tf.int32) - 1
        inside = (number >= 0) & (number < self.bins) & (k > _TIE)
        if self.wedges:
            mu = self.mu(along, k)
            last = np.inf if self.wedges[-1] == 1 else self.wedges[-1]
            wedge = _interval(mu, (*self.wedges[:-1], last))
            inside &= (wedge >= 0) & (wedge < len(self.wedges) - 1)
            number += self.bins * wedge
        return tf.where(inside, number, self.size)

    def mu(self, along: Axes, k: tf.Tensor) -> tf.Tensor:
        """Returns |mu| of each mode; see `number` for the arguments."""
        return tf.math.divide_no_nan(tf.abs(along[self.axis]), k)


def _interval(values: tf.Tensor, edges: tuple[float, ...]) -> tf.Tensor:
    """Returns the interval between edges that each value is in, int32; -1 below the first edge."""
    number = tf.fill(values.shape, -1)
    for edge in edges:  # vectorised passes, faster than a search
        number += tf.cast(values + _TIE >= edge, tf.int32)
    return number


def bin_count(box: Box) -> int:
    """Returns the number of the default bins: up to the smallest Nyquist wavenumber."""
    return int(np.floor(max(box.size) / (2 * max(box.cell)) + 1e-6))


def binning(
    choice: BinChoice | Binning,
    box: Box,
    wedges: int | Sequence[float] | None = None,
    axis: int = 2,
) -> Binning:
    """Returns the chosen bins on a box.

    Args:
        choice: the bins of wavenumber.
        box: the box of the modes.
        wedges: a number of equal wedges, or their edges in |mu| from 0 to 1.
        axis: the axis of the line of sight.

    Raises:
        ValueError: edges that do not increase or are out of their range, or no wedges.
    """
    if isinstance(choice, Binning):
        return choice
    mu = () if wedges is None else _wedge_edges(wedges)
    if choice is None:
        return Binning(bin_count(box), (), mu, axis)
    edges = bin_edges(choice, box)
    relative = edges * (max(box.size) / (2 * np.pi))
    return Binning(edges.size - 1, tuple(relative.tolist()), mu, axis)


def bin_edges(choice: BinChoice, box: Box) -> np.ndarray:
    """Returns the edges of bins on a box [h/Mpc], float64 [bins + 1]; see `BinChoice`.

    Raises:
        ValueError: edges that do not increase from 0 or more, or see `Bins`.
    """
    choice = in_unit("bins", choice, "h/Mpc")
    if choice is None:
        return 2 * np.pi / max(box.size) * (np.arange(bin_count(box) + 1) + 0.5)
    if isinstance(choice, Integral):
        choice = Bins(int(choice))
    if isinstance(choice, Bins):
        return choice.edges(box)
    return _increasing(choice, "bins", np.inf, "edges from 0 on [h/Mpc]")


def _wedge_edges(wedges: int | Sequence[float]) -> tuple[float, ...]:
    wedges = in_unit("wedges", wedges)
    if isinstance(wedges, Integral):
        if wedges < 1:
            raise ValueError(f"{wedges} wedges: at least 1 is needed")
        return tuple((np.arange(int(wedges) + 1) / int(wedges)).tolist())
    return tuple(_increasing(wedges, "wedges", 1.0, "edges of |mu| from 0 to 1").tolist())


def _increasing(values: object, name: str, most: float, kind: str) -> np.ndarray:
    """Returns increasing edges from 0 to `most`, float64."""
    edges = np.asarray(values, dtype=np.float64)
    if (
        edges.ndim != 1
        or edges.size < 2
        or not np.isfinite(edges).all()
        or not (np.diff(edges) > 0).all()
        or not (edges[0] >= 0 and edges[-1] <= most)
    ):
        raise ValueError(f"{name} {values!r}: increasing {kind} are needed, or a whole number")
    return edges


@contextmanager
def outside_graphs(what: str, mesh: ProcessMesh) -> Iterator[None]:
    """Evaluates what is inside at once, on one rank also while TensorFlow traces a function.

    Args:
        what: what is evaluated, for the message.
        mesh: the ranks.

    Raises:
        RuntimeError: TensorFlow builds another graph, or there are several ranks.
    """
    check_place(what, mesh)
    if mesh.size > 1:
        check_eager(what)
    with tf.init_scope():
        yield


@cached_on_mesh(16)
def contents(box: Box, bins: Binning) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the mean wavenumber [h/Mpc], the mean |mu| and the number of modes of each bin.

    k and -k are both counted. The means of a bin without modes are NaN. All ranks call it together,
    on several ranks not while TensorFlow builds a graph.

    Returns:
        Three float64 arrays [size], the same on every rank.

    Raises:
        ValueError: no mode is in any of the bins.
    """
    with outside_graphs("a statistic of modes", box.mesh):
        modes, k_sum, mu_sum = sum_over_universe(box.mesh, _local_contents(box, bins))
    fundamental = 2 * np.pi / max(box.size)
    if not modes.any():
        raise ValueError(
            "no mode of the box is in any of the bins: its wavenumbers begin at "
            f"{fundamental:.4g} h/Mpc, and its Nyquist wavenumber is {np.pi / max(box.cell):.4g}"
        )
    with np.errstate(invalid="ignore"):
        return fundamental * k_sum / modes, mu_sum / modes, modes


def _local_contents(box: Box, bins: Binning) -> np.ndarray:
    """Returns sums over this rank's modes in each bin, of 1, k / k_f, |mu| [3, size]."""
    x, y, z = relative_wavenumbers(box)
    _, weight_y, weight_z = multiplicities(box)
    sums = np.zeros((3, bins.size + 1))
    for along_z, weight in zip(z[:, 0, 0], weight_z[:, 0, 0], strict=True):
        along = x[0], y[0], along_z
        k = relative_wavenumber(*along)
        number = bins.number(along, k).numpy().ravel()
        weights = np.broadcast_to(weight * weight_y[0], k.shape)
        values = weights, weights * k.numpy(), weights * bins.mu(along, k).numpy()
        for row, value in zip(sums, values, strict=True):
            row += np.bincount(number, value.ravel(), bins.size + 1)
    return sums[:, :-1]


def bin_contents(box: Box, bins: BinChoice | Binning = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean wavenumber [h/Mpc] and the number of modes of each bin.

    k and -k are both counted. The mean of a bin without modes is NaN. All ranks call it together.

    Args:
        box: the box of the modes.
        bins: see `power_spectrum`.

    Returns:
        Two float64 arrays [bins], the same on every rank.

    Raises:
        ValueError: see `power_spectrum`.
    """
    k, _, modes = contents(box, binning(bins, box))
    return k, modes


def sum_over_universe(mesh: ProcessMesh, values: np.ndarray | tf.Tensor) -> np.ndarray:
    """Returns the sum over the ranks that share a universe, computed eagerly.

    Args:
        mesh: the ranks; those that differ only in `replica` have other universes.
        values: this rank's part, of any shape.
    """
    axes = [name for name in mesh.names if name != "replica"]
    partial = tf.constant(in_unit("values", values))
    return mesh.communicator(*axes).allreduce(partial).numpy()


def relative_wavenumbers(box: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns k / k_f of this rank's modes along x, y and z.

    Returns:
        Three float64 arrays: [1, 1, kx], [1, ky, 1], [kz, 1, 1].
    """
    numbers = box.pencils.mode_numbers()
    x, y, z = (n * (max(box.size) / size) for n, size in zip(numbers, box.size, strict=True))
    return x, y, z


def multiplicities(box: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the factors along x, y, z of each mode's multiplicity.

    Their product is 2 for a mode that also represents its conjugate, 1 for any other mode, and 0
    for padding. The shapes are the same as for `relative_wavenumbers`.
    """
    x, y, z = box.pencils.mode_numbers()
    twice = box.pencils.multiplicity()
    real_z = np.where(z <= box.grid[2] // 2, twice, 0.0)
    return np.ones(x.shape), np.where(y < box.grid[1] // 2, 1.0, 0.0), real_z


def inverse_windows(box: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the factors along x, y, z of 1 / sinc(k cell / 2), see `SCHEMES`.

    They are 0 for padding, where the window may be 0.
    """
    result = []
    real = multiplicities(box)
    for numbers, cells, used in zip(box.pencils.mode_numbers(), box.grid, real, strict=True):
        window = np.sinc(numbers / cells)
        result.append(np.divide(1.0, window, out=np.zeros_like(window), where=used > 0))
    x, y, z = result
    return x, y, z


def relative_wavenumber(x: tf.Tensor, y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """Returns |k| / k_f from its components."""
    return tf.sqrt(x**2 + y**2 + z**2)
