"""Observers that correct the states of a run before they measure them."""

from __future__ import annotations

import functools
import itertools
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
from flowpm_dist.evolution.observers import (
    Measured,
    Measurement,
    Moment,
    Observer,
    Observers,
    add_to,
)
from flowpm_dist.evolution.operations import combine
from flowpm_dist.evolution.plan import Particles
from flowpm_dist.grid.field import Field
from flowpm_dist.simulation.run import Inputs
from flowpm_dist.simulation.state import State
from meshimpl.mesh_function import replicated

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
        x, v = _moved(fields, rows[..., 0, :]), combine(fields[1:], rows[..., 1, :])
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
        # Outputs are the last: a resumed run may have fewer, and the same names of measurements.
        plain = [number for number, each in enumerate(made) if isinstance(each, Outputs)]
        parts: list[Observer] = []
        self._order: list[int] = []
        for needs_before in (False, True):  # maps do not depend on what else is observed
            numbers = [
                number
                for number, each in enumerate(made)
                if number not in plain and each.needs_before == needs_before
            ]
            if numbers:
                parts.append(Corrected(inputs, Observers([made[number] for number in numbers])))
                self._order += numbers
        self._corrected = len(parts)
        self._order += plain
        super().__init__([*parts, *(made[number] for number in plain)])

    def results(self, measured: Measured) -> list[Any]:
        """Returns the observers' results, in the order in which the observers were given."""
        results = super().results(measured)
        parts, outputs = results[: self._corrected], results[self._corrected :]
        each = dict(zip(self._order, [*itertools.chain(*parts), *outputs], strict=True))
        return [each[number] for number in sorted(each)]


class Corrected(Observer):
    """Shows another observer the particles as the run's correction of states moves them.

    The correction acts once for two kicks, after the second one, whose number is odd. It acts a
    quarter of the way to the next kick in a, or at the kick itself where the scheme's state later
    on follows from another kick. What it adds to displacements is added to the particles in both
    intervals that follow these kicks, times the growth of D1^2 until their middle. Particles move
    with the run's velocity: added velocities are motions inside of halos, and going straight on
    with them would smear halos out. A last kick of even number has the correction for itself. For
    an observer that needs the velocity before the kick the correction acts at each kick.

    Args:
        inputs: the run's inputs, with a correction of states.
        observer: the other observer. All its measurements at a kick are differentiated together.

    Raises:
        ValueError: the scheme gives no states between its kicks, or gives a state at a kick's time
            from another kick.
    """

    def __init__(self, inputs: Inputs, observer: Observer) -> None:
        correction = inputs.options.state_correction
        assert correction is not None
        self._box, self._correction, self._observer = inputs.box, correction, observer
        local, edges = inputs.cosmologies, inputs.edges.tolist()
        integrator, growth = inputs.options.integrator, local.theories[0].growth
        operations = integrator.schedule(growth, edges).operations
        kicks = [number for number, each in enumerate(operations) if each.kind == "kick"]
        self._shown: dict[int, list[int]] = {}
        for kick in sorted(observer.kicks):
            waits = not observer.needs_before and kick % 2 == 0 and kick + 1 < len(kicks)
            self._shown.setdefault(kick + waits, []).append(kick)
        self.kicks, self.needs_before = frozenset(self._shown), True
        acting = list(self._shown)
        self._rows = {kick: row for row, kick in enumerate(acting)}
        begins = np.array([operations[kick].a for kick in kicks])
        widths = np.append(begins[1:], edges[-1]) - begins
        middles = begins + 0.5 * widths
        late = 0.0 if observer.needs_before else 0.25
        at, later = begins[acting], (begins + late * widths)[acting]
        times = _acting_times(acting, at, later, integrator, growth, edges)
        drifts = [np.arange(kicks[n - 1] + 1, kicks[n]) if n else np.arange(0) for n in acting]
        cell = force_cell(self._box.size, self._box.grid)

        def style(theory: Theory) -> tf.Tensor:
            return tf.stack([correction.style(theory.power, cell, a) for a in times])

        def state(theory: Theory) -> tf.Tensor:
            return integrator.interpolation(theory.growth, edges, times).factors

        def grown(theory: Theory) -> tf.Tensor:
            """D1^2 in the middle after each kick, over that where it acts [rows, kicks]."""
            since = theory.growth.d1(middles) / theory.growth.d1(np.array(times))[:, np.newaxis]
            return tf.ones_like(since) if observer.needs_before else since**2

        def drifted(theory: Theory) -> tf.Tensor:
            """The factors of all drifts since the kick before, float64 [rows, 4]."""
            factors = integrator.schedule(theory.growth, edges).factors
            return tf.stack([tf.reduce_sum(tf.gather(factors, each), axis=0) for each in drifts])

        self.inputs = (
            replicated(self._box.mesh, as_float64(correction.theta)),
            local.stack(local.of_powers(style)),
            local.stack(local.of_growths(state)),
            local.stack(local.of_growths(drifted)),
            local.stack(local.of_growths(grown)),
            *observer.inputs,
        )

    def measurements(self, kick: int) -> list[Measurement]:
        """Returns one measurement at a kick, which makes all measurements of the other observer."""
        return [functools.partial(self._measure, kick)] if kick in self.kicks else []

    def _measure(self, kick: int, moment: Moment, inputs: Sequence[tf.Tensor]) -> Measured:
        theta, styles, states, drifts, growths, *others = inputs
        row, fields = self._rows[kick], moment.tensors
        state = tf.cast(states[..., row, :, :], self._box.dtype)
        x, v = _moved(fields, state[..., 0, :]), combine(fields[1:], state[..., 1, :])
        there, velocity = self._correction.moved(theta, styles[..., row, :], [x, v], self._box)
        added, boost = there - x, velocity - v
        del x, v, there, velocity
        measured: Measured = {}
        for shown in self._shown[kick]:
            now = moment if shown == kick else self._at_kick_before(moment, drifts[..., row, :])
            grown = tf.cast(growths[..., row, shown, tf.newaxis], self._box.dtype)
            place = _moved([now.displacement, added], grown)
            now = replace(now, displacement=place, boost=boost)
            for measurement in self._observer.measurements(shown):
                add_to(measured, measurement(now, others))
        return measured

    def _at_kick_before(self, moment: Moment, drift: tf.Tensor) -> Moment:
        """Returns the particles at the kick before a moment's, by the drifts between [..., 4]."""
        back = -tf.cast(drift[..., 1:], self._box.dtype)
        fields = [moment.displacement, moment.before, *moment.lpt]
        return Moment(_moved(fields, back), moment.before, moment.before, moment.lpt)

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


def _moved(fields: Sequence[tf.Tensor], factors: tf.Tensor) -> tf.Tensor:
    """Returns the first field plus the others times their factors [..., n], in one pass."""
    return combine(fields, tf.concat([tf.ones_like(factors[..., :1]), factors], axis=-1))


def _acting_times(
    kicks: Sequence[int],
    at: np.ndarray,
    later: np.ndarray,
    integrator: Integrator,
    growth: Growth,
    edges: Sequence[float],
) -> list[float]:
    """Returns the scale factors at which a correction acts after kicks, or at them.

    Args:
        kicks: their numbers.
        at, later: the scale factor of each, and the later one at which it may act.
        integrator, growth, edges: see `Integrator.interpolation`.

    Raises:
        ValueError: the scheme gives no states between kicks, or one at a kick from another kick.
    """

    def follow(times: np.ndarray) -> np.ndarray:
        try:
            states = integrator.interpolation(growth, edges, times.tolist())
        except ValueError as error:
            raise ValueError(f"{error}: observers of corrected particles need it") from error
        return np.equal(states.kicks, kicks)

    times = np.where(follow(later), later, at)
    if not (from_kicks := follow(times)).all():
        raise ValueError(
            f"{type(integrator).__name__}.interpolation: the state at the kick of a = "
            f"{at[from_kicks.argmin()]:.6g} follows from another kick, which observers of "
            "corrected particles do not see"
        )
    return times.tolist()
