"""Multipoles of the power of a survey: Yamamoto's estimator with randoms and FKP weights.

With F = n_g - alpha n_r, both weighted,

    P_l(k) = (2 l + 1) / A <F_0*(k) F_l(k)> - N delta_l0,
    F_l(k) = 4 pi / (2 l + 1) sum_m Y_lm(k) FFT[F(x) Y_lm(x)].

alpha, A and the shot noise N are as in cosmodesi's pypower: alpha = sum w_g / sum w_r; A = sum n_g
alpha n_r V over cells of 10 Mpc/h, painted by cloud-in-cell; N = (sum w_g^2 + alpha^2 sum w_r^2) /
A.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.catalogues.surveys import SurveyCatalogue
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.options import Scheme
from flowpm_dist.io.drawing import Axes, draw_curves
from flowpm_dist.io.labelled import Labelled, LabelledArray
from flowpm_dist.io.labels import WAVENUMBER
from flowpm_dist.options import in_unit
from flowpm_dist.particle_mesh.scattered import paint_points
from flowpm_dist.statistics.bins import BinChoice, bin_contents, binning
from flowpm_dist.statistics.power import checked_orders
from flowpm_dist.statistics.yamamoto import local_multipoles
from meshimpl.process_mesh import ProcessMesh

NORM_CELL = 10.0
"""The cell in which densities are multiplied for the normalisation [Mpc/h], pypower's default."""
NORM_PADDING = 1.1
"""How much longer the sides of these cells' box are than the catalogues, pypower's default."""
ROUNDING = 1e-14
"""How far objects may be outside the box, relative to their coordinates and its sides."""
SHELLS = 50
"""The number of shells of distance in which a density is estimated from the randoms."""


@dataclass(frozen=True)
class SurveyMultipoles(Labelled):
    """Measured multipoles of the power of a survey, convolved with its window; `k, power`.

    Attributes:
        k: the mean wavenumber of the modes of each bin, [bin] [h/Mpc].
        power: the multipoles without shot noise, [order, bin] [(Mpc/h)^3].
        modes: the number of modes of the box in each bin; k and -k are both counted.
        orders: the orders l.
        shot_noise: the shot noise, which was subtracted from the monopole [(Mpc/h)^3].
        normalisation: the integral of the squared weighted density [(h/Mpc)^3], by which the power
            was divided.
        alpha: the sum of the weights of the data divided by the sum of the weights of the randoms.
        box_size: the sides of the box [Mpc/h].
        center: the middle of the box, from the observer [Mpc/h].
    """

    k: np.ndarray
    power: np.ndarray
    modes: np.ndarray
    orders: tuple[int, ...]
    shot_noise: float
    normalisation: float
    alpha: float
    box_size: tuple[float, float, float]
    center: tuple[float, float, float]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.k, self.power))

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws k P_l(k), a curve for each order, without error bars, which need mocks.

        Args:
            axes: what to draw on; by default a new figure of pyplot.
            label: the label of the curves.
        """
        names = WAVENUMBER, r"$k\,P_l(k)$  [(Mpc/$h$)$^2$]"
        labels = [f"{label}  $l = {order}$".strip() for order in self.orders]
        return draw_curves(axes, self.k, self.k * self.power, names, labels=labels)

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        return {
            "k": LabelledArray(self.k, ("k",), "h/Mpc", "mean wavenumber"),
            "order": LabelledArray(np.array(self.orders), ("order",), "1", "order"),
            "modes": LabelledArray(self.modes, ("k",), "1", "number of modes"),
            "power": LabelledArray(
                self.power, ("order", "k"), "(Mpc/h)^3", "multipoles of the power, with the window"
            ),
        }


def survey_multipoles(
    data: SurveyCatalogue,
    randoms: SurveyCatalogue,
    grid: int | Sequence[int],
    *,
    P0: float = 0.0,
    area: float | None = None,
    box_size: float | Sequence[float] | None = None,
    center: Sequence[float] | None = None,
    padding: float = 0.1,
    orders: Sequence[int] = (0, 2, 4),
    bins: BinChoice = None,
    scheme: Scheme = "cic",
    interlaced: bool = True,
) -> SurveyMultipoles:
    """Returns the multipoles of the power of galaxies about the line of sight to each of them.

    Yamamoto's estimator by FFTs (Hand, Li, Slepian and Seljak 2017, arXiv:1704.02357), with the
    conventions of pypower. The window of painting is divided out. The window of the survey is not:
    compare the result with a theory that is convolved with it. On all ranks together.

    Args:
        data, randoms: galaxies and randoms on the same mesh of ranks.
        grid: cells along each side of the box, or along x, y and z.
        P0: the power for which FKP weights 1 / (1 + n P0) are optimal [(Mpc/h)^3], such as 1e4;
            0 leaves the weights of the catalogues.
        area: area of the survey [deg^2]. If P0 is given and the catalogues have no density, it
            follows from the area and the weights of the randoms in 50 shells of distance.
        box_size: the sides of the box [Mpc/h], one number or three.
        center: the middle of the box from the observer [Mpc/h]; by default of the catalogues.
        padding: how much longer than the catalogues the sides are if no size is given, relative to
            the longest side of the catalogues. A larger box has finer modes.
        orders: l, even.
        bins: see `power_spectrum`.
        scheme: how objects are painted, see `flowpm_dist.paint`.
        interlaced: whether objects are painted twice, which cancels the leading aliases.

    Returns:
        The multipoles, the same on every rank.

    Raises:
        ValueError: catalogues on different meshes, a catalogue without objects or weights, FKP
            weights without a density or an area, or a box that does not hold all objects.
    """
    orders, grid, mesh = checked_orders(orders), in_unit("grid", grid), _shared_mesh(data, randoms)
    settings = {"P0": P0, "area": area, "box_size": box_size, "center": center, "padding": padding}
    mesh.check_equal("survey multipoles", **settings, interlaced=interlaced)
    data, randoms = _with_fkp_weights(data, randoms, P0, area)
    (sum_d, squares_d), (sum_r, squares_r) = (_total(mesh, c.weights) for c in (data, randoms))
    alpha = sum_d / sum_r
    low, high = _extent(data, randoms)
    box, corner = _box(mesh, grid, low, high, box_size, center, padding)
    normalisation = _normalisation(data, randoms, alpha, low, high)
    shot_noise = (squares_d + alpha**2 * squares_r) / normalisation
    shifts = (0.0, 0.5) if interlaced else (0.0,)
    fields = [_painted(data, randoms, alpha, box, corner, scheme, shift) for shift in shifts]
    shared = binning(bins, box)
    power = local_multipoles(box, corner, fields, orders, shared, scheme) / normalisation
    noise = np.array([shot_noise if order == 0 else 0.0 for order in orders])
    k, modes = bin_contents(box, shared)
    x, y, z = (corner + np.array(box.size) / 2).tolist()
    facts = {"shot_noise": shot_noise, "normalisation": normalisation, "alpha": alpha}
    power -= noise[:, np.newaxis]
    return SurveyMultipoles(k, power, modes, orders, **facts, box_size=box.size, center=(x, y, z))


def _shared_mesh(data: SurveyCatalogue, randoms: SurveyCatalogue) -> ProcessMesh:
    """Returns the mesh of two catalogues.

    Raises:
        ValueError: it is not the same, or one has no objects with weights.
    """
    mesh = data.mesh
    assert isinstance(mesh, ProcessMesh)
    if mesh != randoms.mesh:
        raise ValueError(f"data on the mesh {mesh}, but randoms on {randoms.mesh}")
    for name, catalogue in {"data": data, "randoms": randoms}.items():
        if not _total(mesh, catalogue.weights)[0] > 0:
            raise ValueError(f"the weights of the {catalogue.total} {name} must have a sum above 0")
    return mesh


def _total(mesh: ProcessMesh, weights: Any) -> tuple[float, float]:
    """Returns the sums of the weights of all ranks, and of their squares."""
    sums = tf.constant([np.sum(weights), np.sum(np.square(weights))], tf.float64)
    first, second = mesh.world.allreduce(sums).numpy().tolist()
    return first, second


def _with_fkp_weights(
    data: SurveyCatalogue, randoms: SurveyCatalogue, P0: float, area: float | None
) -> list[SurveyCatalogue]:
    """Returns the catalogues with FKP weights (Feldman, Kaiser and Peacock 1994), if P0 is not 0.

    Raises:
        ValueError: P0 is below 0; or see `_with_density`.
    """
    P0 = in_unit("P0", P0, "(Mpc/h)^3")
    if not 0 <= P0 < math.inf:
        raise ValueError(f"P0 = {P0}: must be at least 0")
    if P0 == 0:
        return [data, randoms]
    weighted = []
    for catalogue in _with_density(data, randoms, in_unit("area", area, "deg^2")):
        assert catalogue.density is not None and catalogue.weights is not None
        weights = catalogue.weights / (1 + catalogue.density * P0)
        weighted.append(replace(catalogue, weights=weights))
    return weighted


def _with_density(
    data: SurveyCatalogue, randoms: SurveyCatalogue, area: float | None
) -> list[SurveyCatalogue]:
    """Returns the catalogues with their densities, from the randoms if they have none.

    Raises:
        ValueError: one of them has no density, and there is no area, or the randoms are all at one
            distance.
    """
    if data.density is not None and randoms.density is not None:
        return [data, randoms]
    if area is None or not 0 < area < math.inf:
        raise ValueError(
            "FKP weights need the number density of galaxies: give `density` of both catalogues, "
            "the area of the survey [deg^2], or P0 = 0"
        )
    mesh = randoms.mesh
    assert isinstance(mesh, ProcessMesh)
    near = np.array([np.inf, -np.inf])
    distances = [np.linalg.norm(c.positions, axis=1) for c in (data, randoms)]
    if len(distances[1]):
        near = np.array([distances[1].min(), -distances[1].max()])
    low, high = mesh.world.allreduce(tf.constant(near), "min").numpy() * [1, -1]
    edges = np.linspace(low, high, SHELLS + 1)
    if not (np.diff(edges**3) > 0).all():
        raise ValueError(
            f"all randoms are at {low:g} Mpc/h, from which no number density follows: give "
            "`density` of both catalogues, or P0 = 0"
        )
    counts, _ = np.histogram(distances[1], edges, weights=randoms.weights)
    counts = mesh.world.allreduce(tf.constant(counts, tf.float64)).numpy()
    alpha = _total(mesh, data.weights)[0] / counts.sum()
    volumes = area * (math.pi / 180) ** 2 / 3 * np.diff(edges**3)
    middles = (edges[:-1] + edges[1:]) / 2
    return [
        replace(c, density=np.interp(distance, middles, alpha * counts / volumes))
        for c, distance in zip((data, randoms), distances, strict=True)
    ]


def _extent(*catalogues: SurveyCatalogue) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lowest and the highest coordinates of all objects [Mpc/h]."""
    positions = np.concatenate([c.positions for c in catalogues])
    ends = np.full((2, 3), np.inf)
    if len(positions):
        ends = np.stack([positions.min(axis=0), -positions.max(axis=0)])
    mesh = catalogues[0].mesh
    assert isinstance(mesh, ProcessMesh)
    low, high = mesh.world.allreduce(tf.constant(ends), "min").numpy()
    return low, -high


def _box(
    mesh: ProcessMesh,
    grid: Any,
    low: np.ndarray,
    high: np.ndarray,
    box_size: Any,
    center: Any,
    padding: float,
) -> tuple[Box, np.ndarray]:
    """Returns the box of the objects and its lowest corner [Mpc/h].

    Raises:
        ValueError: it does not hold them all.
    """
    size, padding = in_unit("box_size", box_size, "Mpc/h"), in_unit("padding", padding)
    if not 0 <= padding < math.inf:
        raise ValueError(f"padding = {padding}: must be at least 0")
    if size is None:
        size = (high - low) + padding * np.max(high - low)
    sides = np.broadcast_to(np.asarray(size, np.float64), 3)
    middle = in_unit("center", center, "Mpc/h")
    middle = (low + high) / 2 if middle is None else np.asarray(middle, np.float64)
    corner = middle - sides / 2
    rounding = ROUNDING * (np.maximum(np.abs(low), np.abs(high)) + sides)
    if (low < corner - rounding).any() or (high > corner + sides + rounding).any():
        raise ValueError(
            f"the objects lie between {low.round(3).tolist()} and {high.round(3).tolist()} Mpc/h, "
            f"the box between {corner.round(3).tolist()} and {(corner + sides).round(3).tolist()}: "
            "give a larger box_size, or another center"
        )
    x, y, z = np.broadcast_to(grid, 3).tolist()
    sx, sy, sz = sides.tolist()
    return Box((x, y, z), (sx, sy, sz), mesh, tf.float64), corner


def _painted(
    data: SurveyCatalogue,
    randoms: SurveyCatalogue,
    alpha: float,
    box: Box,
    corner: np.ndarray,
    scheme: Scheme,
    shift: float,
) -> np.ndarray:
    """Returns this rank's block of the weights of the data minus alpha times the randoms'."""
    painted, randoms_painted = (
        paint_points(box, c.positions - corner, c.weights, scheme=scheme, shift=shift)
        for c in (data, randoms)
    )
    return painted - alpha * randoms_painted


def _normalisation(
    data: SurveyCatalogue,
    randoms: SurveyCatalogue,
    alpha: float,
    low: np.ndarray,
    high: np.ndarray,
) -> float:
    """Returns the integral of the squared weighted density [(h/Mpc)^3].

    Cells lie as in pypower. Empty ones are added at the upper ends, up to a number that divides by
    the mesh of ranks.

    Raises:
        ValueError: no cell has both data and randoms.
    """
    mesh = data.mesh
    assert isinstance(mesh, ProcessMesh)
    halves = np.ceil((high - low) * NORM_PADDING / (2 * NORM_CELL)).astype(int) + 1
    corner = (low + high) / 2 - halves * NORM_CELL
    each = [math.lcm(2, mesh.axis_size("row")), math.lcm(2, mesh.axis_size("col")), 2]
    x, y, z = (max(4, -(-2 * n // step) * step) for n, step in zip(halves, each, strict=True))
    grid = int(x), int(y), int(z)
    sx, sy, sz = (NORM_CELL * n for n in grid)
    box = Box(grid, (sx, sy, sz), mesh, tf.float64)
    one, other = (paint_points(box, c.positions - corner, c.weights) for c in (data, randoms))
    products = mesh.world.allreduce(tf.constant(np.sum(one * other), tf.float64))
    if not float(products) > 0:
        raise ValueError("no cell of 10 Mpc/h has both data and randoms: are they one survey's?")
    return alpha * float(products) / NORM_CELL**3
