"""The gradient of an evolution, computed back in time: states are undone, not kept.

The backward pass starts from the final state and undoes kicks and drifts one by one, and updates
the cotangents of positions, velocities and factors. The forward pass keeps its final state and a
few states before, not the first. The backward pass restarts from such a state where rounding errors
would have grown too far. It needs the field of each force. The forward pass keeps the fields where
they take little memory; otherwise the particles are painted and the field is computed again.
The adjoint method of Li, Modi, Jamieson and others 2022 (arXiv:2211.09815), for any schedule of
kicks and drifts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from flowpm_dist.evolution.adjoints.base import Adjoint

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.evolution.nbody import NBody
    from flowpm_dist.evolution.pairs import Kept
    from flowpm_dist.evolution.plan import Clock, EvolutionPlan, Evolved, Particles
    from flowpm_dist.grid.box import Box


LITTLE = 16
"""Most values of a particle for fields that are kept."""
SMALL = 256 * 2**20
"""Memory on a rank that the fields of a run may always take [bytes]."""


class ReversibleAdjoint(Adjoint):
    """Undoes the operations from the final state.

    Rounding errors grow in the backward pass, because the decaying mode of linear theory grows
    backwards in time. Where they would grow too far, the forward pass keeps the state before a kick
    and the backward pass restarts from it. The number of kept states depends on the range of scale
    factors, not on the number of steps.

    Attributes:
        max_error_growth: the factor by which the rounding error of the positions may grow between
            two kept states. The error is taken relative to the displacements at the same time.
        keep_fields: whether the forward pass keeps the field of each force for the backward pass.
            "auto" keeps them if the fields of a run take at most 16 values a particle, or 256 MiB
            on a rank.
    """

    max_error_growth: float = Field(default=32.0, ge=1, description="a number of at least 1")
    keep_fields: Literal["auto"] | bool = Field(default="auto", description='"auto", true or false')

    @override
    def kept_bytes(self, kicks: int, field: int, particles: int) -> int:
        total = kicks * field
        little = total <= max(LITTLE * particles, SMALL)
        return total if self.keep_fields is True or (self.keep_fields and little) else 0

    @override
    def evolve(
        self, nbody: NBody, particles: list[Particles], plan: EvolutionPlan, clock: Clock
    ) -> Evolved:
        import tensorflow as tf

        from flowpm_dist.evolution.adjoints.backward_pass import BackwardPass
        from flowpm_dist.evolution.operations import Backward
        from flowpm_dist.evolution.plan import Evolved, Particles
        from meshimpl.tapes import InTwoParts, loses_gradients, not_recorded

        start = particles.pop()
        inputs = [start.displacement, start.velocity, plan.factors, *plan.lpt, *plan.observed]
        terms = len(plan.lpt)
        x, v, factors, *more = (tf.stop_gradient(t) for t in inputs)
        lpt, observed = tuple(more[:terms]), tuple(more[terms:])
        on_tapes = InTwoParts("an evolution by the adjoint method", *inputs)
        del start, inputs
        numbers = on_all_replicas(plan.known_factors, nbody.box)
        here = replace(plan, factors=factors, lpt=lpt, observed=observed, numbers=numbers)
        chosen = kicks_to_keep(here, self.max_error_growth)
        values, size = sum(map(math.prod, nbody.pairs_of(here).kept_shapes)), x.dtype.size
        number = math.prod(x.shape[:-1])
        keeps = self.kept_bytes(len(here.kick_numbers), values * size, number * size)
        recorded: dict[int, Particles] = {}
        fields: Kept = {}

        keep = {n: functools.partial(recorded.__setitem__, n) for n in chosen}
        first = [Particles(x, v)]
        ends = [] if tf.executing_eagerly() else [x, v, factors, *lpt, *observed]
        del x, v
        # The observer's operations are recorded, to find out what else its results depend on.
        with not_recorded() if plan.observer is None else nullcontext():
            done = nbody.evolve(first, here, clock, keep=keep, kept=fields if keeps else None)
        final, names = done.particles, list(done.measured)
        if loses_gradients(list(done.measured.values()), ends):
            raise ValueError(
                "what the observer returns depends on watched tensors besides the particles and "
                "the cosmology: gradients to those would be lost; use them on what run "
                "returns, or tf.stop_gradient"
            )

        def begin(dx: tf.Tensor, dv: tf.Tensor, *rest: tf.Tensor) -> Callable[[], list[tf.Tensor]]:
            zeros = [tf.zeros_like(psi) for psi in lpt]
            state = Backward(final.displacement, final.velocity, dx, dv, zeros)
            dmeasured = dict(zip(names, rest, strict=True))
            return BackwardPass(nbody, here, state, dmeasured, dict(recorded), fields).carry

        results = [final.displacement, final.velocity, *done.measured.values()]
        x, v, *measured = on_tapes.outputs(results, begin)
        return Evolved(Particles(x, v), dict(zip(names, measured, strict=True)))


def on_all_replicas(factors: np.ndarray, box: Box) -> np.ndarray:
    """Returns the factors of the universes of all replicas, so that all ranks choose alike.

    Args:
        factors: of this rank's universes [universe, operations, n]; of one, if there are no
            replicas.
        box: the universes.
    """
    import tensorflow as tf

    if box.mesh.axis_size("replica") == 1:
        return factors
    everywhere: np.ndarray = box.mesh.world.allgather(tf.constant(factors)).numpy()
    return everywhere


def kicks_to_keep(plan: EvolutionPlan, max_error_growth: float) -> list[int]:
    """Returns the indices of the kicks before which the state is recorded, the last kick first.

    The errors are followed back from the end in linear theory. There the force is the displacement,
    so drifts and kicks are linear in position and velocity. Positions are rounded in proportion to
    the displacement at the time, 1 / `plan.growth`. The rounding of velocities adds nothing larger,
    because velocities are sums of kicks.

    Args:
        plan: the plan of the evolution; its factors (of all universes of this rank) and its growth
            are used.
        max_error_growth: see `ReversibleAdjoint`.
    """
    numbers = np.abs(plan.known_factors)
    factors = numbers.reshape(-1, *numbers.shape[-2:])
    kicks = [n for n, operation in enumerate(plan.operations) if operation.kind == "kick"]
    scales = [1.0 / plan.growth(plan.operations[n].a) for n in kicks]

    def undone(x: np.ndarray, v: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the errors before operations `begin` to `end`, from the errors after them."""
        for number in reversed(range(begin, end)):
            c0, c1 = factors[:, number, 0], factors[:, number, 1]
            kind = plan.operations[number].kind
            if kind == "drift":
                x = x + c1 * v
            else:
                v = (v + (c1 * x if kind == "kick" else 0.0)) / c0
        return x, v

    recorded: list[int] = []
    if not kicks:
        return recorded
    zero = np.zeros(len(factors))
    with np.errstate(divide="ignore", invalid="ignore"):
        x, v = undone(zero + 1.0, zero, kicks[-1] + 1, len(plan.operations))
        for i in reversed(range(len(kicks))):
            earlier = max(i - 1, 0)
            before = undone(x, v, kicks[i - 1] + 1 if i else 0, kicks[i] + 1)
            small = (x <= max_error_growth * scales[i]).all()
            stays_small = (before[0] <= max_error_growth * scales[earlier]).all()
            if not (small and stays_small):
                recorded.append(kicks[i])
                before = zero + scales[i], zero
            x, v = before
    return recorded
