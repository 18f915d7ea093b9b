"""Collective operations on one group of ranks, for tensors of any dtype.

A `Communicator` is an ordered group of ranks (a line or a plane of the process mesh). It offers
allreduce, allgather, alltoall, permute, shift and broadcast on TensorFlow tensors, eagerly and in
graphs. On a group of one rank every collective is the identity. On more, `meshimpl.engine` moves
the data, and `meshimpl.graph_guards` keeps TensorFlow from pruning or merging the collectives.

dtypes: float16/32/64 and most integers travel unchanged; complex as pairs of reals, bfloat16 as
16-bit integers (reduced in float32), bool as 8-bit integers. uint32 and uint64 travel as signed
integers of their width, and are reduced, as int16 and uint16, in 64 bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl import engine, traffic
from meshimpl.engine import Rows
from meshimpl.graph_guards import fence, guarded, own
from meshimpl.rendezvous import eager_collective
from meshimpl.traffic import Tally

REDUCTIONS = ("sum", "max", "min", "mean")

LARGEST = 2.0**15
"""The largest number of a piece is scaled to this; float16 ends at 65504."""
SMALLEST = 1e-30
"""A piece with only smaller numbers is scaled as if this were its largest number."""
SCALE = 2
"""Numbers of float16 that hold a scale, a float32."""


def halved(pieces: tf.Tensor) -> tf.Tensor:
    """Returns pieces in half precision, each with its scale.

    Args:
        pieces: float32 or complex64, [n, ...].

    Returns:
        float16 [n, m + SCALE], where a piece has m real numbers. One that is not finite stays so.

    Raises:
        TypeError: another dtype.
    """
    if pieces.dtype not in (tf.float32, tf.complex64):
        raise TypeError(
            f"messages in half precision need float32 or complex64, not {pieces.dtype.name}"
        )
    numbers = tf.reshape(tf.bitcast(pieces, tf.float32), [pieces.shape[0], -1])
    # Less than half the time of the maximum of |x|, which TensorFlow does not vectorise.
    highest, lowest = (f(numbers, axis=1, keepdims=True) for f in (tf.reduce_max, tf.reduce_min))
    largest = tf.maximum(highest, -lowest)
    scale = tf.maximum(largest, SMALLEST) / LARGEST
    carried = tf.cast(numbers * (1.0 / scale), tf.float16)
    return tf.concat([carried, tf.reshape(tf.bitcast(scale, tf.float16), [-1, SCALE])], axis=1)


def restored(carried: tf.Tensor, shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """Returns the pieces that `halved` has packed, rounded to float16.

    Args:
        carried: result of `halved`.
        shape: shape of the pieces.
        dtype: dtype of the pieces, float32 or complex64.
    """
    scale = tf.bitcast(carried[:, -SCALE:], tf.float32)[:, tf.newaxis]
    numbers = tf.cast(carried[:, :-SCALE], tf.float32) * scale
    if dtype.is_complex:
        numbers = tf.reshape(numbers, [*shape, 2])
    return tf.reshape(tf.bitcast(numbers, dtype), shape)


def _as_carried(
    x: tf.Tensor, *, half: bool = False
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns `x` as the engine carries it, and the function that undoes this; for moves, not sums.

    With `half`, rows of `x` are pieces that travel in half precision, [rows, length].
    """
    dtype = x.dtype
    if half:
        return halved(x), lambda y: restored(y, x.shape, dtype)
    if dtype.is_complex:
        return tf.bitcast(x, dtype.real_dtype), lambda y: tf.bitcast(y, dtype)
    if dtype == tf.bfloat16:
        return tf.bitcast(x, tf.uint16), lambda y: tf.bitcast(y, dtype)
    if dtype == tf.bool:
        return tf.cast(x, tf.uint8), lambda y: tf.cast(y, dtype)
    if dtype in (tf.uint32, tf.uint64):
        signed = tf.int32 if dtype == tf.uint32 else tf.int64
        return tf.bitcast(x, signed), lambda y: tf.bitcast(y, dtype)
    return x, lambda y: y


@dataclass(frozen=True)
class Communicator:
    """An ordered group of ranks; `index` is this rank's place in it.

    Ranks must increase, as they do along the lines and planes of a row-major mesh: an engine may
    know no other order within a group.
    """

    ranks: tuple[int, ...]
    rank: int
    index: int = field(init=False)

    def __post_init__(self) -> None:
        if list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"ranks of a group must increase, got {self.ranks}")
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not in the group {self.ranks}")
        object.__setattr__(self, "index", self.ranks.index(self.rank))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def meetings(self) -> tuple[tuple[int, ...], ...]:
        """The groups in which these ranks meet, one after the other (`meshimpl.rendezvous`)."""
        return (self.ranks,) if self.size > 1 else ()

    def allreduce(self, x: tf.Tensor, reduction: str = "sum") -> tf.Tensor:
        """Returns the element-wise reduction over the group, on every rank of it.

        Args:
            x: tensor of any dtype of the table above.
            reduction: "sum", "max", "min" or "mean". For bool, sum and max mean "any" and min means
                "all"; complex tensors have sum and mean only.

        Raises:
            ValueError: there is no such reduction.
            TypeError: the reduction has no meaning for the dtype.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction {reduction!r} is not one of {', '.join(REDUCTIONS)}")
        x = tf.convert_to_tensor(x)
        if self.size == 1:
            return x
        dtype = x.dtype
        if dtype.is_complex:
            if reduction in ("max", "min"):
                raise TypeError(f"allreduce({reduction}) has no meaning for {dtype.name}")
            return tf.bitcast(self.allreduce(tf.bitcast(x, dtype.real_dtype), reduction), dtype)
        if dtype == tf.bfloat16:
            return tf.cast(self.allreduce(tf.cast(x, tf.float32), reduction), dtype)
        if dtype == tf.bool:
            if reduction == "mean":
                raise TypeError("allreduce(mean) has no meaning for bool")
            among = "min" if reduction == "min" else "max"
            return tf.cast(self.allreduce(tf.cast(x, tf.int32), among), dtype)
        if dtype == tf.uint64 and reduction != "sum":
            raise TypeError(f"allreduce({reduction}) is not available for uint64")
        if dtype in (tf.int16, tf.uint16, tf.uint32, tf.uint64):
            return tf.cast(self.allreduce(tf.cast(x, tf.int64), reduction), dtype)
        if reduction == "mean" and not dtype.is_floating:
            raise TypeError(f"allreduce(mean) would round {dtype.name}; cast it first")
        kind = "sum" if reduction == "mean" else reduction

        def reduce(y: tf.Tensor, name: str) -> tf.Tensor:
            return engine.current().reduce(y, kind, self.ranks, name)

        def combine(parts: np.ndarray) -> np.ndarray:
            if kind == "sum":
                return np.add.reduce(parts, dtype=parts.dtype)
            return (np.maximum if kind == "max" else np.minimum).reduce(parts)

        sent = {"allreduce": traffic.allreduce(_bytes(x), self.size)}
        result = self._make(reduce, x, "allreduce", f"{x.shape}, {reduction}", sent, combine)
        return result / self.size if reduction == "mean" else result

    def _make(
        self,
        collective: Callable[[tf.Tensor, str], tf.Tensor],
        x: tf.Tensor,
        kind: str,
        detail: str,
        sent: Tally,
        combine: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> tf.Tensor:
        """Makes a collective: in a graph behind its guards, eagerly after all ranks have met.

        Args:
            collective: makes one operation of the engine.
            x: its input.
            kind: such as "allreduce".
            detail: text on which all ranks must agree, as on the kind and the dtype.
            sent: this rank's traffic.
            combine: see `eager_collective`.
        """
        description = f"{kind} of {x.dtype.name} {detail}".rstrip()
        if not tf.executing_eagerly():
            return guarded(collective, x, kind, self.ranks, description, sent)

        def run(y: tf.Tensor) -> tf.Tensor:
            traffic.count(sent)
            return collective(y, kind)

        return eager_collective(run, x, description, self.ranks, combine)

    def allgather(self, x: tf.Tensor, axis: int = 0, *, stack: bool = False) -> tf.Tensor:
        """Returns the group's tensors, joined in group order.

        Args:
            x: tensor of the same static shape on each rank.
            axis: axis of the input along which to join, or the position of the new axis.
            stack: join along a new axis of length `size`.
        """
        x = tf.convert_to_tensor(x)
        if self.size == 1:
            return tf.expand_dims(x, axis) if stack else x
        carried, back = _as_carried(x)
        row = carried[tf.newaxis]

        def gather(y: tf.Tensor, name: str) -> tf.Tensor:
            return engine.current().gather(y, self.ranks, name)

        sent = {"allgather": traffic.allgather(_bytes(row), self.size)}
        gathered = self._make(gather, row, "allgather", f"{row.shape}", sent, lambda x: x[:, 0])
        pieces = back(tf.ensure_shape(gathered, [self.size, *carried.shape]))
        if axis == 0:
            shape = x.shape.as_list()
            return pieces if stack else tf.reshape(pieces, [self.size * shape[0], *shape[1:]])
        join = tf.stack if stack else tf.concat
        return join(tf.unstack(pieces), axis=axis)

    def alltoall(self, x: tf.Tensor, *, half: bool = False) -> tf.Tensor:
        """Sends piece j of dim 0 to rank j of the group; returns the pieces that arrive, in order.

        Args:
            x: shape [size * m, ...].
            half: send float16 (see `halved`), with a scale for each row of dim 0. What
                stays on this rank is rounded too; a group of one rank rounds nothing.

        Returns:
            The same shape, rows i*m..(i+1)*m from the group's rank i.

        Raises:
            ValueError: dim 0 does not divide by the number of ranks.
            TypeError: `half`, and neither float32 nor complex64.
        """
        x = tf.convert_to_tensor(x)
        if x.shape[0] % self.size:
            raise ValueError(f"dim 0 of {x.shape} does not divide by the group's {self.size} ranks")
        if self.size == 1:
            return x
        carried, back = _as_carried(x, half=half)
        moved = self._exchange_pieces(tf.reshape(carried, [self.size, -1]), None, self.size)
        return back(tf.reshape(moved, carried.shape))

    def alltoallv(self, x: tf.Tensor, counts: Any) -> tf.Tensor:
        """Sends `counts[j]` rows of dim 0 to rank j of the group; returns the rows that arrive.

        Args:
            x: the rows for each rank, one after the other.
            counts: number of rows for each rank; it may differ between ranks.

        Returns:
            The rows that arrive, in group order; dim 0 is not known statically.

        Raises:
            ValueError: this rank sends more elements than the engine can count.
        """
        if self.size == 1:
            return tf.convert_to_tensor(x)
        carried, back = _as_carried(tf.convert_to_tensor(x))
        if (carried.shape.num_elements() or 0) > engine.MAX_ELEMENTS:
            raise ValueError(
                f"an exchange of {x.shape} has more than {engine.MAX_ELEMENTS} elements, MPI's "
                "limit; use more ranks"
            )
        splits = tf.cast(counts, tf.int32)
        if not tf.executing_eagerly():
            splits = fence(splits)
        return back(self._exchange(carried, splits))

    def _exchange_pieces(self, pieces: tf.Tensor, counts: Rows | None, most: int) -> tf.Tensor:
        """Exchanges pieces, in several messages where one has more elements than the engine counts.

        Args:
            pieces: [n, length], of the same length on each rank.
            counts: numbers of pieces; None sends one to each rank.
            most: largest number of pieces that any rank sends or receives.

        Returns:
            The pieces that arrive, in group order. Their number is not known statically.
        """
        length, longest = pieces.shape[1], engine.MAX_ELEMENTS // most
        if length <= longest:
            return self._exchange(pieces, counts)
        begins = range(0, length, longest)
        parts = [self._exchange(pieces[:, begin : begin + longest], counts) for begin in begins]
        return tf.concat(parts, axis=1)

    def _exchange(self, x: tf.Tensor, counts: Rows | tf.Tensor | None) -> tf.Tensor:
        """Exchanges rows; known numbers of rows are this rank's own, and mostly 0."""
        if isinstance(counts, Rows):
            row = x.dtype.size * math.prod(x.shape[1:])
            sent = {"neighbours": traffic.to_each(row * counts.sent.astype(np.int64), self.index)}
        else:
            sent = {"alltoall": traffic.alltoall(_bytes(x), self.size)}

        def exchange(y: tf.Tensor, name: str) -> tf.Tensor:
            return engine.current().exchange(y, counts, self.ranks, name)

        # With counts, each rank may have a shape of its own.
        detail = f"{x.shape}" if counts is None else ""
        return self._make(exchange, x, "alltoall", detail, sent)

    def permute(self, x: tf.Tensor, sources: Sequence[int | None]) -> tf.Tensor:
        """Returns the tensor of rank `sources[index]` of the group, or zeros if that is None.

        Args:
            x: tensor of the same static shape on each rank.
            sources: for each rank of the group, the place in the group of the one it receives from.
                Several ranks may have the same source; only the tensors of sources move.

        Raises:
            ValueError: `sources` has another length, or a place that is not in the group.
        """
        if len(sources) != self.size:
            raise ValueError(f"{self.size} sources are needed, got {len(sources)}")
        bad = [s for s in sources if s is not None and not 0 <= s < self.size]
        if bad:
            raise ValueError(f"sources {bad} are not in the group of {self.size} ranks")
        x = tf.convert_to_tensor(x)
        if all(s is None for s in sources):
            return tf.zeros_like(x)
        if all(s is None or s == k for k, s in enumerate(sources)):
            mine = self.per_rank([float(s is not None) for s in sources])
            return tf.where(mine > 0, x, tf.zeros_like(x))
        carried, back = _as_carried(x)
        piece = tf.reshape(carried, [1, -1])
        sends = np.array([s == self.index for s in sources], np.int32)
        arrives = np.array([k == sources[self.index] for k in range(self.size)], np.int32)
        copies = tf.tile(piece, own(np.array([sends.sum(), 1], np.int32)))
        most = max(Counter(s for s in sources if s is not None).values())
        copies = tf.ensure_shape(copies, [None, piece.shape[1]])
        moved = self._exchange_pieces(copies, Rows(sends, arrives), most)
        whole = tf.concat([moved, tf.zeros_like(piece)], axis=0)[0]
        return back(tf.reshape(whole, carried.shape))

    def shift(self, x: tf.Tensor, offset: int, *, wrap: bool = True) -> tf.Tensor:
        """Returns the tensor of the rank `offset` places before; `wrap` makes the line periodic.

        Beyond an edge that is not periodic there are zeros.
        """
        if self.size == 1 and (wrap or offset == 0):
            return tf.convert_to_tensor(x)
        sources = [k - offset for k in range(self.size)]
        return self.permute(
            x, [s % self.size if wrap else s if 0 <= s < self.size else None for s in sources]
        )

    def exchange_neighbours(
        self,
        to_previous: tf.Tensor,
        to_next: tf.Tensor,
        distance: int = 1,
        *,
        half: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Exchange tensors with the ranks `distance` before and after, in one periodic message.

        Args:
            to_previous, to_next: two tensors of one shape and dtype.
            distance: number of places in the group.
            half: send float16, as in `alltoall`, with a scale for each of the two.

        Returns:
            The tensors that the previous and the next rank sent here.
        """
        n, d = self.size, distance % self.size
        if d == 0:
            return to_next, to_previous
        carried, back = _as_carried(tf.stack([to_previous, to_next]), half=half)
        pieces = tf.reshape(carried, [2, -1])
        previous, following = (self.index - d) % n, (self.index + d) % n
        numbers = np.zeros(n, np.int32)
        np.add.at(numbers, [previous, following], 1)
        counts = Rows(numbers, numbers)
        if previous == following:
            # So it is on every rank. The two arrive as they were stacked: what the neighbour sent
            # to its previous rank comes here from our next.
            both = self._exchange_pieces(pieces, counts, 2)
            both = back(tf.reshape(both, carried.shape))
            return both[1], both[0]
        order = own(np.array([0, 1] if previous < following else [1, 0], np.int32))
        moved = self._exchange_pieces(tf.gather(pieces, order), counts, 2)
        both = tf.gather(back(tf.reshape(moved, carried.shape)), order)
        return both[0], both[1]

    def broadcast(self, x: tf.Tensor, root: int = 0) -> tf.Tensor:
        """Returns the tensor of the group's rank number `root` on every rank of the group."""
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is not in the group of {self.size} ranks")
        x = tf.convert_to_tensor(x)
        if self.size == 1:
            return x
        carried, back = _as_carried(x)

        def broadcast(y: tf.Tensor, name: str) -> tf.Tensor:
            return engine.current().broadcast(y, self.ranks[root], self.ranks, name)

        detail, all_from = f"{carried.shape}, from {root}", lambda parts: parts[root]
        sent = {"broadcast": traffic.broadcast(_bytes(carried), self.size)}
        return back(self._make(broadcast, carried, "broadcast", detail, sent, all_from))

    def per_rank(self, values: Any) -> tf.Tensor:
        """Returns `values[index]` as a tensor that enters the same graph on every rank."""
        return own(np.asarray(values)[self.index])


def _bytes(x: tf.Tensor) -> int:
    """Returns the size of a tensor [bytes]; 0 if the graph does not know it."""
    return (x.shape.num_elements() or 0) * x.dtype.size
