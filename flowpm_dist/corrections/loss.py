"""The loss of a correction: how far cheap universes are from true states."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.corrections.options import FINER, LearningOptions
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.evolution.corrections import LPT_ONLY, Correction, StateCorrection, force_cell
from flowpm_dist.grid.box import Box, check_same_box
from flowpm_dist.grid.field import Field
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import Axis, State
from flowpm_dist.statistics import Bins, bin_contents, soft_histogram
from flowpm_dist.statistics.comparison import binned_compare
from meshimpl.compat import mtf

BINS = 16
"""Bins of wavenumber up to the particles' Nyquist wavenumber."""
LINE_OF_SIGHT: Literal["z"] = "z"
"""Where redshift space is compared: the axis that no ranks split."""
SPACES = ("", "redshift space ", "velocity ")
"""Beginnings of the names of scores: densities in both spaces, velocities on the lattice."""
DENSITY_EDGES = np.log(np.geomspace(0.2, 10.0, 10))
"""Edges of bins of ln(density). The outermost bins have all cells beyond, too."""
FEWEST_CELLS = 1e-3
"""Added to the share of cells in each bin, so that bins with fewer cells hardly count."""
TERMS = (
    *("loss", "ln P squared", "1 - r squared", "distance squared"),
    *("ln histogram squared", "of velocities"),
)
"""The loss, and the terms whose weighted sum it is."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A cheap run, and the true states to which a correction should bring it.

    Attributes:
        simulation: the cheap run, without the correction that is learned.
        start: where the cheap run begins: the seed of its white noise, or a `State` at the first
            edge of its steps.
        truth: the true states on the same lattice of particles, at different scale factors.
        cosmology: replaces the simulation's own.
        name: for tables and messages.

    Raises:
        ValueError: there is no true state, or one has another box than the simulation.
    """

    simulation: Simulation
    start: int | State
    truth: Sequence[State]
    cosmology: Cosmology | None = None
    name: str = "universe"

    def __post_init__(self) -> None:
        if not self.truth:
            raise ValueError(f"{self.name}: there must be at least one true state")
        for state in self.truth:
            check_same_box(self.simulation.box, state.box, "the cheap run and the truth")
        object.__setattr__(self, "truth", tuple(sorted(self.truth, key=lambda state: state.a)))

    @property
    def times(self) -> list[float]:
        """The scale factors of the true states, increasing."""
        return [state.a for state in self.truth]


@dataclass(frozen=True)
class Compared:
    """A universe at some times, compared with the truth.

    Attributes:
        k: the mean wavenumber of each bin, float64 [bin] [h/Mpc].
        power: P divided by the truth's, float64 [time, space, bin]. The first space is the density.
            If velocities are learned, the density in redshift space and the velocities on the
            lattice follow.
        correlation: r with the truth, likewise.
        distance: the mean squared distance of particles from the truth's, float64 [time]
            [spacing^2].
        histogram: the share of the cells of the particles' lattice in each bin of `DENSITY_EDGES`,
            with `FEWEST_CELLS` added, divided by the truth's, float64 [time, bin of density]; None
            if it is not learned.
    """

    k: np.ndarray
    power: tf.Tensor
    correlation: tf.Tensor
    distance: tf.Tensor
    histogram: tf.Tensor | None = None


class BoxComparison:
    """Compares the density and the particles of a box with the truth's.

    Args:
        box: the box.

    Attributes:
        k: the mean wavenumber of each bin, float64 [bin] [h/Mpc].
    """

    def __init__(self, box: Box) -> None:
        self._spacing = force_cell(box.size, box.grid)
        nyquist = np.pi * min(n / length for n, length in zip(box.grid, box.size, strict=True))
        lowest = 2 * np.pi / max(box.size)
        self._bins = Bins(min(BINS, int(nyquist / lowest) - 1), k_max=float(nyquist))
        self.k = bin_contents(box.finer(FINER), self._bins)[0]
        self._distance = box.function(
            lambda _, a, b: mtf.reduce_mean(mtf.square(a - b)),
            ours=box.vector_shape,
            theirs=box.vector_shape,
        )

    def spectra(self, ours: Sequence[Field], truth: Sequence[Field]) -> list[tf.Tensor]:
        """Returns P over the truth's and r for each bin; fields of a list are components."""
        each = [binned_compare(a, b, bins=self._bins) for a, b in zip(ours, truth, strict=True)]
        power, power_of_truth, cross = (
            tf.add_n([getattr(one, name) for one in each])
            for name in ("power_a", "power_b", "cross")
        )
        return [power / power_of_truth, cross / tf.sqrt(power * power_of_truth)]

    def distance(self, ours: tf.Tensor, truth: tf.Tensor) -> tf.Tensor:
        """Returns the mean squared distance of particles [spacing^2], from displacements."""
        return 3.0 * self._distance(ours, truth) / self._spacing**2


class Loss:
    """How far corrected universes are from the truth. Must be called on all ranks together.

    True densities, and the states that a correction of states moves, are made once.

    Args:
        options: the options, with all weights.
        correction: the correction that is learned, with any numbers.
        pairs: the universes.
    """

    def __init__(
        self, options: LearningOptions, correction: Correction, pairs: Sequence[Pair]
    ) -> None:
        self._options, self._of_states = options, isinstance(correction, StateCorrection)
        self._corrected = (
            {}
            if self._of_states
            else {pair: pair.simulation.with_correction(correction) for pair in pairs}
        )
        self._axes: list[Axis | None] = [None, LINE_OF_SIGHT] if options.redshift_space else [None]
        self._comparisons: dict[Box, BoxComparison] = {}
        self._cheap: dict[Pair, list[State]] = {}
        self._painted: dict[tuple[Pair, float, Axis | None], Field] = {}
        self._shares: dict[tuple[Pair, float], tf.Tensor] = {}

    def compare(self, pair: Pair, correction: Correction | None) -> Compared:
        """Returns a cheap universe compared with the truth; without a correction the plain run."""
        simulation, structure = pair.simulation, self._options.structure
        if self._of_states:
            if pair not in self._cheap:
                self._cheap[pair] = _cheap(pair, simulation, structure)
            states = self._cheap[pair]
            if isinstance(correction, StateCorrection):
                states = [state.corrected(correction) for state in states]
            compared = [self._compare_state(pair, state) for state in states]
        else:
            if correction is not None:
                simulation = self._corrected[pair].with_correction(correction)
            compare = functools.partial(self._compare_state, pair)
            compared = _cheap(pair, simulation, structure, on_output=compare)
        stacked = (tf.stack(each) for each in zip(*compared, strict=True))
        return Compared(self.comparison(pair).k, *stacked)

    def _compare_state(self, pair: Pair, state: State) -> list[tf.Tensor]:
        """Returns the values of `Compared` at the time of a state."""
        comparison = self.comparison(pair)
        true = min(pair.truth, key=lambda each: abs(each.a - state.a))
        of_truth = dataclasses.replace(
            state, displacement=true.displacement, velocity=true.velocity
        )
        spectra = []
        for axis in self._axes:
            key = pair, true.a, axis
            if key not in self._painted:
                self._painted[key] = of_truth.density(FINER, redshift_space=axis)
            ours = state.density(FINER, redshift_space=axis)
            spectra.append(comparison.spectra([ours], [self._painted[key]]))
        if len(self._axes) > 1:
            both = (
                [Field(part, state.box) for part in tf.unstack(each.velocity.block, axis=-1)]
                for each in (state, true)
            )
            spectra.append(comparison.spectra(*both))
        power, correlation = (tf.stack(each) for each in zip(*spectra, strict=True))
        distance = comparison.distance(state.displacement.block, true.displacement.block)
        values = [power, correlation, distance]
        if self._options.histogram:
            if (pair, true.a) not in self._shares:
                self._shares[pair, true.a] = _shares(of_truth)
            values.append(_shares(state) / self._shares[pair, true.a])
        return [tf.cast(x, tf.float64) for x in values]

    def comparison(self, pair: Pair) -> BoxComparison:
        """Returns the comparison in the box of a pair."""
        box = pair.simulation.box
        if box not in self._comparisons:
            self._comparisons[box] = BoxComparison(box)
        return self._comparisons[box]

    def terms(self, compared: Compared) -> dict[str, tf.Tensor]:
        """Returns the loss, and its terms by name, see `TERMS`: means over times and bins.

        Bins of wavenumber have the weight k^-2.5, because errors of P matter more at large scales.
        The last two terms are missing where they have no weight.
        """
        per_bin = compared.k**-2.5
        per_bin /= per_bin.sum() * compared.power.shape[0]
        power = tf.einsum("tsk,k->s", tf.math.log(compared.power) ** 2, per_bin)
        phases = tf.einsum("tsk,k->s", 1.0 - compared.correlation**2, per_bin)
        options = self._options
        parts = {
            "ln P squared": (1.0, power[0]),
            "1 - r squared": (options.correlation, phases[0]),
            "distance squared": (options.displacement, tf.reduce_mean(compared.distance)),
        }
        if compared.histogram is not None:
            squared = tf.reduce_mean(tf.math.log(compared.histogram) ** 2)
            parts["ln histogram squared"] = options.histogram, squared
        if len(self._axes) > 1:
            moving = tf.reduce_sum(power[1:] + options.correlation * phases[1:])
            parts["of velocities"] = options.redshift_space, moving
        # a term without weight has no gradient to be computed
        total = sum(weight * term for weight, term in parts.values() if weight)
        terms = {name: term for name, (_, term) in parts.items()}
        return {"loss": tf.convert_to_tensor(total), **terms}

    def mean(self, compared: Sequence[Compared]) -> float:
        """Returns the mean loss of universes."""
        return float(np.mean([self.terms(each)["loss"].numpy() for each in compared]))


def _shares(state: State) -> tf.Tensor:
    """Returns the share of cells in each bin of `DENSITY_EDGES`, more by `FEWEST_CELLS` [bin]."""
    density = state.density()
    counts = soft_histogram(density, None, DENSITY_EDGES, log=True)
    return tf.cast(counts, tf.float64) / density.box.cells + FEWEST_CELLS


def _cheap(pair: Pair, simulation: Simulation, structure: str, **outputs: Any) -> list[Any]:
    """Returns the cheap universe of a pair at the times of the truth.

    Args:
        pair: the pair.
        simulation: its simulation, with or without a correction.
        structure: see `LearningOptions`.
        **outputs: further arguments of `Simulation.run`.
    """
    start = pair.start
    begin: dict[str, Any] = (
        {"seed": start}
        if isinstance(start, int | np.integer)
        else {"particles": (start.displacement, start.velocity)}
    )
    begin["cosmology"] = pair.cosmology
    if structure == LPT_ONLY:
        return [simulation.lpt(a=a, **begin) for a in pair.times]
    return simulation.run(outputs=pair.times, **begin, **outputs)
