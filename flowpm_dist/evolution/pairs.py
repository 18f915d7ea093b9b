"""Pairs of a kick and a drift, many of them in one graph: small runs without Python between steps.

A graph loops over pairs. Their factors are its data, so that one graph suits all runs of a box,
whatever their steps and cosmologies. The reach of the particles at each kick leaves the graph with
the last state, and is checked there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import tensorflow as tf

from flowpm_dist.evolution.operations import Backward, drifted, kicked, undo_drift, undo_kick
from flowpm_dist.grid.box import Box, cached_on_mesh
from flowpm_dist.particle_mesh.gravity import Gravity
from meshimpl.graph_guards import in_order
from meshimpl.mesh_graph import MeshProgram

Kept = dict[tuple[int, int], list[tf.Tensor]]
"""What kicks keep for their adjoint, by the first of some operations and the one after the last:
of a single kick what `operations.kicked` keeps, of pairs in one call what `Pairs.forward` does.
"""
Kinds = tuple[Literal["kick", "drift"], Literal["kick", "drift"]]

LONGEST = 64
"""Most pairs of one call."""
LARGEST, LARGEST_ON_GPUS = 2**22, 2**24
"""Most particles of a rank, above which Python's share is small. A graph holds a copy of the state
more than single operations do.
"""
OF_LARGEST = 8
"""Most pairs of one call with so many particles, which take about two seconds on two cores."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of operations on the particles of a box.

    Attributes:
        gravity: makes the force.
        kinds: the two operations of a pair in order.
        terms: the number of LPT fields that operations use.
    """

    gravity: Gravity
    kinds: Kinds
    terms: int

    @property
    def most(self) -> int:
        """The largest number of pairs for one call; below 2, single operations do."""
        box = self.gravity.pm.box
        largest = LARGEST_ON_GPUS if tf.config.get_visible_devices("GPU") else LARGEST
        particles = math.prod((*box.local_batch, *box.block))
        return min(LONGEST, OF_LARGEST * largest // particles) if particles <= largest else 0

    def forward(
        self,
        x: tf.Tensor,
        v: tf.Tensor,
        factors: tf.Tensor,
        lpt: Sequence[tf.Tensor],
        kept: list[tf.Tensor] | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns displacement and velocity after pairs, and the reach at each of their kicks.

        Args:
            x, v: displacement and the integrator's velocity, blocks [..., x, y, z, 3].
            factors: the factors of the operations, in order, [..., 2 pairs, 4 or more]; or one
                row less, if there is no drift before the first kick.
            lpt: psi1 and psi2, blocks [..., x, y, z, 3], where operations use them.
            kept: gets what the kicks keep for `backward`, see `operations.kicked`; None if they
                keep nothing.
        """
        box = self.gravity.pm.box
        program = _forward(box.of_any_size, self._of_any_size, kept is not None)
        count, rows = _in_rows(factors)
        x, v, reaches, *lists = program(box.size_tensor, count, rows, x, v, *lpt)
        if kept is not None:
            kept.extend(lists)
        return x, v, reaches

    def backward(
        self,
        state: Backward,
        factors: tf.Tensor,
        lpt: Sequence[tf.Tensor],
        *,
        decays: bool,
        kept: Sequence[tf.Tensor] = (),
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Undoes pairs; returns the cotangents of their factors, and the reach at each kick.

        Args:
            state: after the pairs; changed.
            factors, lpt: as for `forward`.
            decays: see `undo_kick`.
            kept: what `forward` kept; without it the reach is 0, as nothing is painted.
        """
        box = self.gravity.pm.box
        program = _backward(box.of_any_size, self._of_any_size, decays, bool(kept))
        count, rows = _in_rows(factors)
        moving = state.x, state.v, state.dx, state.dv
        results = program(box.size_tensor, count, rows, *moving, *state.dlpt, *lpt, *kept)
        state.x, state.v, state.dx, state.dv, *state.dlpt, slopes, reaches = results
        slopes = tf.reshape(slopes, [*slopes.shape[:-3], 2 * LONGEST, slopes.shape[-1]])
        operations = factors.shape[-2]
        missing = operations % 2
        return slopes[..., missing : missing + operations, :], reaches

    def lists(self, kept: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns what single kicks kept as `forward` keeps it."""
        lists: list[tf.Tensor] = []
        for shape, items in zip(self.kept_shapes, zip(*kept, strict=True), strict=True):
            each = _new_list(tf.constant(len(items)), shape, items[0].dtype)
            for number, item in enumerate(items):
                each = _with_item(each, tf.constant(number), item)
            lists.append(each)
        return lists

    @property
    def kept_shapes(self) -> list[list[int]]:
        """The shapes of this rank's blocks of what a kick keeps."""
        gravity = self.gravity
        return [gravity.pm.box.impl.slice_shape(shape) for shape in gravity.kept_shapes]

    @property
    def _of_any_size(self) -> Pairs:
        pm = self.gravity.pm
        gravity = replace(self.gravity, pm=replace(pm, box=pm.box.of_any_size))
        return replace(self, gravity=gravity)


def _in_rows(factors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the number of pairs, and their factors as [..., LONGEST, 2, 4 or more].

    A first drift that is not there is one by factors of 0.
    """
    *batch, operations, columns = factors.shape
    missing = operations % 2
    pairs = (operations + missing) // 2
    padding = [[0, 0]] * len(batch) + [[missing, 2 * (LONGEST - pairs)], [0, 0]]
    return tf.constant(pairs), tf.reshape(tf.pad(factors, padding), [*batch, LONGEST, 2, columns])


def _new_list(size: tf.Tensor, shape: list[int], dtype: tf.DType) -> tf.Tensor:
    return tf.raw_ops.TensorListReserve(element_shape=shape, num_elements=size, element_dtype=dtype)


def _with_item(items: tf.Tensor, number: tf.Tensor, item: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.TensorListSetItem(input_handle=items, index=number, item=item)


def _item(items: tf.Tensor, number: tf.Tensor, shape: list[int], dtype: tf.DType) -> tf.Tensor:
    return tf.raw_ops.TensorListGetItem(
        input_handle=items, index=number, element_shape=shape, element_dtype=dtype
    )


def _loop(
    box: Box,
    count: tf.Tensor,
    step: Callable[..., tuple[list[tf.Tensor], tf.Tensor]],
    state: list[tf.Tensor],
    *,
    back: bool = False,
) -> list[tf.Tensor]:
    """Returns a state after all pairs, and the reach that each of them returned, in their order.

    Args:
        box: the box.
        count: the number of pairs.
        step: returns state and reach after a pair, from its number and the state before.
        state: the state before all pairs.
        back: whether to begin with the last pair.
    """

    def body(i: tf.Tensor, reaches: tf.Tensor, *state: tf.Tensor) -> list[tf.Tensor]:
        number = count - 1 - i if back else i
        after, reach = step(number, *state)
        return [i + 1, tf.tensor_scatter_nd_update(reaches, [[number]], [reach]), *after]

    first = [tf.constant(0), tf.zeros([LONGEST, 3], box.dtype), *state]
    # one at a time: a collective may be in flight only once
    loop = functools.partial(tf.while_loop, lambda i, *_: i < count, body, first)
    _, reaches, *last = in_order(functools.partial(loop, parallel_iterations=1))
    return [*last, reaches]


@cached_on_mesh(64)
def _forward(box: Box, pairs: Pairs, keeps: bool) -> MeshProgram:
    """Returns `f(size of the box, count, rows, x, v, *lpt)`, see `Pairs.forward`."""
    shapes = pairs.kept_shapes if keeps else []

    def run(
        size: tf.Tensor, count: tf.Tensor, rows: tf.Tensor, *blocks: tf.Tensor
    ) -> list[tf.Tensor]:
        x, v, *lpt = blocks
        lists = [_new_list(count, shape, x.dtype) for shape in shapes]

        def step(
            number: tf.Tensor, x: tf.Tensor, v: tf.Tensor, *lists: tf.Tensor
        ) -> tuple[list[tf.Tensor], tf.Tensor]:
            box.set_size(size)
            row = tf.gather(rows, number, axis=-3)
            fields: list[tf.Tensor] | None = [] if keeps else None
            for place, kind in enumerate(pairs.kinds):
                c = row[..., place, :]
                if kind == "drift":
                    x = drifted(x, v, c, lpt)
                else:
                    v, reach = kicked(pairs.gravity, x, v, c, lpt, kept=fields)
            added = [
                _with_item(items, number, item)
                for items, item in zip(lists, fields or [], strict=True)
            ]
            return [x, v, *added], reach

        x, v, *lists, reaches = _loop(box, count, step, [x, v, *lists])
        return [x, v, reaches, *lists]

    return MeshProgram(run, box.mesh, "steps")


@cached_on_mesh(64)
def _backward(box: Box, pairs: Pairs, decays: bool, kept: bool) -> MeshProgram:
    """Returns `f(size, count, rows, x, v, dx, dv, *dlpt, *lpt, *kept)`, see `Pairs.backward`."""
    shapes = pairs.kept_shapes if kept else []

    def run(
        size: tf.Tensor, count: tf.Tensor, rows: tf.Tensor, *blocks: tf.Tensor
    ) -> list[tf.Tensor]:
        moving, rest = blocks[: 4 + pairs.terms], blocks[4 + pairs.terms :]
        lpt, lists = rest[: pairs.terms], rest[pairs.terms :]
        slopes = tf.zeros_like(rows, tf.float64)
        axis_of_pairs = rows.shape.rank - 3

        def step(
            number: tf.Tensor, slopes: tf.Tensor, *moving: tf.Tensor
        ) -> tuple[list[tf.Tensor], tf.Tensor]:
            box.set_size(size)
            row = tf.gather(rows, number, axis=-3)
            x, v, dx, dv, *dlpt = moving
            state = Backward(x, v, dx, dv, list(dlpt))
            reached: list[tf.Tensor] = []
            of_pair: list[tf.Tensor] = []
            for place, kind in reversed([*enumerate(pairs.kinds)]):
                c = row[..., place, :]
                if kind == "drift":
                    of_pair.insert(0, undo_drift(state, c, lpt))
                else:
                    kick = undo_kick(
                        pairs.gravity,
                        state,
                        c,
                        lpt,
                        decays=decays,
                        check=reached.append,
                        kept=[
                            _item(each, number, shape, x.dtype)
                            for each, shape in zip(lists, shapes, strict=True)
                        ],
                    )
                    of_pair.insert(0, kick)
            here = tf.reshape(tf.one_hot(number, LONGEST, dtype=tf.float64), [-1, 1, 1])
            slopes = slopes + tf.expand_dims(tf.stack(of_pair, axis=-2), axis_of_pairs) * here
            reach = reached[0] if reached else tf.zeros([3], box.dtype)
            return [slopes, state.x, state.v, state.dx, state.dv, *state.dlpt], reach

        slopes, *last, reaches = _loop(box, count, step, [slopes, *moving], back=True)
        return [*last, slopes, reaches]

    return MeshProgram(run, box.mesh, "gradient of steps")
