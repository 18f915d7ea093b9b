"""Observers that correct the states of a run before they measure them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.growth import Growth
from flowpm_dist.cosmology.steps import SAME
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.evolution.corrections import force_cell
from flowpm_dist.evolution.integrators import Integrator
from flowpm_dist.evolution.integrators.base import momentum_factor
from flowpm_dist.evolution.observers import (
    Measured,
    Measurement,
    Moment,
    Observer,
    Observers,
    add_to,
)
from flowpm_dist.evolution.operations import broadcast_per_universe, combine
from flowpm_dist.evolution.plan import Particles
from flowpm_dist.grid.field import Field
from flowpm_dist.simulation.run import Inputs
from flowpm_dist.simulation.state import State
from meshimpl.mesh_function import replicated

ROUNDING = 1e-9
"""Relative error of the times of kicks."""
OnOutput = Callable[[State], Any]
"""Makes from a state what is kept of it."""


def check_outputs(outputs: Sequence[float] | np.ndarray, edges: np.ndarray) -> list[float]:
    """Returns the scale factors of outputs as numbers.

    Args:
        outputs: scale factors, in any order; those beyond the steps by rounding are taken there.
        edges: the scale factors at which steps begin and end.

    Raises:
        ValueError: there are none, or one lies outside the steps or occurs twice.
    """
    times = np.atleast_1d(np.asarray(outputs, dtype=np.float64))
    if times.ndim != 1 or not times.size:
        raise ValueError(f"outputs {outputs!r}: a list of scale factors is needed")
    first, last = edges[0] * (1 - SAME), edges[-1] * (1 + SAME)
    outside = times[~((times >= first) & (times <= last))]
    if outside.size:
        raise ValueError(
            f"outputs: a = {outside[0]:.10g} is not between the first and the last of the steps, "
            f"{edges[0]:.10g} and {edges[-1]:.10g}"
        )
    times = np.clip(times, edges[0], edges[-1])
    if len(set(times.tolist())) < times.size:
        raise ValueError(f"outputs {outputs!r}: a scale factor is there twice")
    return times.tolist()


def holds_tensors(value: Any) -> bool:
    """Returns whether an object, not itself a tensor, has floating tensors as its attributes."""
    held = tf.nest.flatten(list(getattr(value, "__dict__", {}).values()))
    return any(
        isinstance(each, Field) or (isinstance(each, tf.Tensor) and each.dtype.is_floating)
        for each in held
    )


class Outputs(Observer):
    """Makes a state for each of several scale factors, or calls a function with it.

    Args:
        inputs: the run's inputs.
        times: scale factors, as `check_outputs` returns them.
        on_output: makes of each state what is kept of it; by default the state itself. It is called
            in the order of time, on every rank, and once more for its gradient.
    """

    in_graphs = True

    def __init__(self, inputs: Inputs, times: Sequence[float], on_output: OnOutput | None) -> None:
        self._inputs, self._times, self._on_output = inputs, times, on_output
        local, edges = inputs.cosmologies, inputs.edges.tolist()
        integrator = inputs.options.integrator
        interpolations = local.of_growths(
            lambda theory: integrator.interpolation(theory.growth, edges, times)
        )
        self._at = interpolations[0].kicks
        self.kicks = frozenset(self._at)
        factors = local.stack([interpolation.factors for interpolation in interpolations])
        self._parameters = local.tensors() if on_output else ()
        noise = inputs.source.white_noise if on_output else None
        correction = inputs.options.state_correction if on_output else None
        theta = [] if correction is None else [as_float64(correction.theta)]
        self._has_theta = len(theta)
        self.inputs = (factors, *theta, *self._parameters, *([] if noise is None else [noise]))
        self._made: dict[int, Any] = {}
        self._read_last: tuple[Any, Inputs] = (self.inputs, inputs)

    def measurements(self, kick: int) -> list[Measurement]:
        """Returns one measurement for each state at a kick, in the order of time."""
        numbers = [i for i, at in enumerate(self._at) if at == kick]
        return [
            functools.partial(self._measure, i)
            for i in sorted(numbers, key=lambda number: self._times[number])
        ]

    def _measure(self, i: int, moment: Moment, inputs: Sequence[tf.Tensor]) -> Measured:
        rows = tf.cast(inputs[0][..., i, :, :], self._inputs.box.dtype)
        fields = moment.tensors
        places = tf.concat([tf.ones_like(rows[..., 0, :1]), rows[..., 0, :]], axis=-1)
        x, v = combine(fields, places), combine(fields[1:], rows[..., 1, :])
        if self._on_output is None:
            return {(i, 0): x, (i, 1): v}
        made = self._on_output(self._state(i, Particles(x, v), self._inputs_from(inputs)))
        measured: Measured = {}
        leaves = []
        for j, leaf in enumerate(tf.nest.flatten(made)):
            if isinstance(leaf, State):
                raise TypeError("on_output returned a State: call run without on_output for states")
            tensor = leaf.block if isinstance(leaf, Field) else leaf
            if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating:
                measured[i, j] = tensor
                if isinstance(leaf, Field):
                    leaf = functools.partial(Field, box=leaf.box, window=leaf.window)
                else:
                    leaf = None
            elif holds_tensors(leaf):
                warnings.warn(
                    f"on_output returned a {type(leaf).__name__}, which holds tensors: no gradient "
                    "flows through it; return its tensors, in lists, tuples or dictionaries",
                    stacklevel=2,
                )
            leaves.append(leaf)
        self._made.setdefault(i, tf.nest.pack_sequence_as(made, leaves))
        return measured

    def results(self, measured: Measured) -> list[Any]:
        """Returns the states, or the results of `on_output`, in the order of the requested times.

        If the run was continued, outputs that it had passed before are None.

        Args:
            measured: the measurements of this observer.
        """
        return [self._result(i, measured) for i in range(len(self._times))]

    def _result(self, i: int, measured: Measured) -> Any:
        if self._on_output is None:
            if (i, 0) not in measured:
                return None
            return self._state(i, Particles(measured[i, 0], measured[i, 1]), self._inputs)
        if i not in self._made:
            return None
        filled = []
        for j, leaf in enumerate(tf.nest.flatten(self._made[i])):
            if (i, j) in measured:
                leaf = measured[i, j] if leaf is None else leaf(measured[i, j])
            filled.append(leaf)
        return tf.nest.pack_sequence_as(self._made[i], filled)

    def _state(self, i: int, particles: Particles, inputs: Inputs) -> State:
        return State.leaving(particles, inputs, self._times[i])

    def _inputs_from(self, tensors: Sequence[tf.Tensor]) -> Inputs:
        """Returns the inputs of the run with these tensors for `self.inputs`."""
        if tensors is self._read_last[0]:
            return self._read_last[1]
        options, begin = self._inputs.options, 1 + self._has_theta
        count = begin + len(self._parameters)
        local = self._inputs.cosmologies.with_tensors(tensors[begin:count])
        source = self._inputs.source
        if self._has_theta:
            assert options.correction is not None
            correction = options.correction.with_theta(tensors[1])
            options = options.model_copy(update={"correction": correction})
        if tensors[count:]:
            source = replace(source, white_noise=tensors[count])
        read = replace(self._inputs, cosmologies=local, source=source, options=options)
        self._read_last = tensors, read
        return self._read_last[1]


ObserverOf = Callable[[Inputs], Observer]
"""What makes an observer from the inputs of a run."""


def observers_of(inputs: Inputs, makers: Sequence[ObserverOf]) -> Observers:
    """Returns the observers of a run side by side, in order."""
    made = [make(inputs) for make in makers]
    corrected = inputs.options.state_correction is not None
    return _CorrectedObservers(inputs, made) if corrected else Observers(made)


class _CorrectedObservers(Observers):
    """Observers that see corrected particles, but for `Outputs`, whose states are corrected."""

    def __init__(self, inputs: Inputs, made: Sequence[Observer]) -> None:
        self._plain = [isinstance(each, Outputs) for each in made]
        parts: list[Observer] = [each for each in made if isinstance(each, Outputs)]
        if not all(self._plain):
            seeing = [each for each in made if not isinstance(each, Outputs)]
            parts = [Corrected(inputs, Observers(seeing)), *parts]
        super().__init__(parts)

    def results(self, measured: Measured) -> list[Any]:
        """Returns the observers' results, in the order in which the observers were given."""
        results = super().results(measured)
        corrected = iter([] if all(self._plain) else results.pop(0))
        plain = iter(results)
        return [next(plain if is_plain else corrected) for is_plain in self._plain]


class Corrected(Observer):
    """Shows another observer the particles as the run's correction of states moves them.

    For each kick that is observed the particles are corrected once: midway to the next kick, or at
    the kick for an observer that needs the velocity before it. From there they move in a straight
    line with their corrected velocity.

    Args:
        inputs: the run's inputs, with a correction of states.
        observer: the other observer. All its measurements at a kick are differentiated together.
    """

    def __init__(self, inputs: Inputs, observer: Observer) -> None:
        correction = inputs.options.state_correction
        assert correction is not None
        self._box, self._correction, self._observer = inputs.box, correction, observer
        self.kicks, self.needs_before = observer.kicks, observer.needs_before
        local, edges = inputs.cosmologies, inputs.edges.tolist()
        integrator = inputs.options.integrator
        numbers = sorted(self.kicks)
        self._rows = {kick: row for row, kick in enumerate(numbers)}
        operations = integrator.schedule(local.theories[0].growth, edges).operations
        kicks = np.array([each.a for each in operations if each.kind == "kick"])
        # Rounding must not put a time before its kick.
        times = np.minimum(kicks[numbers] * (1.0 + ROUNDING), edges[-1])
        if not self.needs_before:
            times = 0.5 * (times + np.append(kicks[1:], edges[-1])[numbers])
        cell = force_cell(self._box.size, self._box.grid)

        def style(theory: Theory) -> tf.Tensor:
            return tf.stack([correction.style(theory.power, cell, a) for a in times.tolist()])

        def motion(theory: Theory) -> tf.Tensor:
            return _motion(integrator, theory.growth, edges, numbers, times)

        self.inputs = (
            replicated(self._box.mesh, as_float64(correction.theta)),
            local.stack(local.of_powers(style)),
            local.stack(local.of_growths(motion)),
            *observer.inputs,
        )

    def measurements(self, kick: int) -> list[Measurement]:
        """Returns one measurement at a kick, which makes all measurements of the other observer."""
        return [functools.partial(self._measure, kick)] if kick in self.kicks else []

    def _measure(self, kick: int, moment: Moment, inputs: Sequence[tf.Tensor]) -> Measured:
        (theta, styles, motions, *others), row = inputs, self._rows[kick]
        motion = tf.cast(motions[..., row, :, :], self._box.dtype)
        moved, rates = tf.unstack(motion[..., : len(moment.moving) - 1], axis=-2)
        x = combine(moment.moving, tf.concat([tf.ones_like(moved[..., :1]), moved], axis=-1))
        v = combine(moment.moving[1:], rates)
        there, velocity = self._correction.moved(theta, styles[..., row, :], [x, v], self._box)
        added = (velocity - v) / broadcast_per_universe(rates[..., 0])  # to the scheme's velocity
        since = broadcast_per_universe(moved[..., 0]) * added
        displacement = moment.displacement + (there - x - since)
        corrected = Moment(displacement, moment.before + added, moment.after + added, moment.lpt)
        measured: Measured = {}
        for measurement in self._observer.measurements(kick):
            add_to(measured, measurement(corrected, others))
        return measured

    def results(self, measured: Measured) -> Any:
        """Returns the results of the other observer."""
        return self._observer.results(measured)

    @property
    @override
    def in_graphs(self) -> bool:
        return self._observer.in_graphs

    @override
    def pack(self, measured: Measured) -> dict[str, tf.Tensor]:
        return self._observer.pack(measured)

    @override
    def unpack(self, packed: Mapping[str, tf.Tensor]) -> Measured:
        return self._observer.unpack(packed)


def _motion(
    integrator: Integrator,
    growth: Growth,
    edges: Sequence[float],
    kicks: Sequence[int],
    times: np.ndarray,
) -> tf.Tensor:
    """Returns the factors of the fields in the particles' motion since kicks and in their velocity.

    Args:
        integrator, growth, edges: see `Integrator.since_kick`.
        kicks: their numbers [n].
        times: a scale factor for each, before the next kick [n].

    Returns:
        Factors of the velocity after the kick, psi1 and psi2, for both, float64 [n, 2, 3]. At a
        kick itself nothing has moved.
    """
    t = tf.constant(times)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(t)
        last, factors = integrator.since_kick(growth, edges, t)
        columns = tf.unstack(factors, axis=-1)[1:]
    slopes = [tape.gradient(each, t, unconnected_gradients="zero") for each in columns]
    is_last = tf.cast(tf.equal(tf.cast(last, tf.int32), kicks), t.dtype)
    to_canonical = times * momentum_factor(growth, times)  # a^2 dx/dt = a^3 E dx/da
    moved, rates = [is_last * each for each in columns], [to_canonical * slope for slope in slopes]
    return tf.stack([tf.stack(moved, axis=-1), tf.stack(rates, axis=-1)], axis=-2)
