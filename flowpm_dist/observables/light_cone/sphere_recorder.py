"""Writes the particles of the whole sky to files when their light leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.io.light_cone_file import LightConeFiles
from flowpm_dist.io.particles import HUBBLE
from flowpm_dist.observables.light_cone.crossings import reaching
from flowpm_dist.observables.light_cone.options import FullSkyOptions
from flowpm_dist.observables.light_cone.recorder import Particles, Recorder, pieces, placed
from flowpm_dist.observables.light_cone.segments import polynomials
from flowpm_dist.observables.light_cone.sphere import copies_between
from flowpm_dist.particle_mesh.kernels import Ball
from flowpm_dist.particle_mesh.kernels.ball import DEGREE
from flowpm_dist.simulation.inputs import Inputs

_OF_FIELDS = 4  # before and after the kick, psi1 and psi2


@dataclass(frozen=True)
class SphereLook:
    """What is seen by one kick.

    Attributes:
        ball: of this rank's particles, with the copies and the edges of the segments.
        coefficients: [segments, functions, 4]: of the factors of places and of velocities, each of
            four fields, and of the scale factor.
    """

    ball: Ball
    coefficients: np.ndarray


class SphereRecorder(Recorder):
    """Writes each copy of each particle where it crosses the light cone.

    Args:
        inputs: of the run, of one universe.
        cone: that is seen.
        ball: without copies and segments: where the observer is.
        end: distance up to which undisplaced places are seen [Mpc/h].
        files: of this rank.

    Raises:
        ValueError: a batch of universes.
    """

    def __init__(
        self,
        inputs: Inputs,
        cone: FullSkyOptions,
        ball: Ball,
        end: float,
        files: LightConeFiles,
    ) -> None:
        integrator, edges = inputs.options.integrator, inputs.edges.tolist()
        growth = inputs.cosmologies.growths[0]

        def states(a: tf.Tensor) -> tuple[np.ndarray, tf.Tensor]:
            """Places are smooth between these kicks, and between those that change velocities."""
            with reaching(tf.reduce_min(a)):
                found = integrator.interpolation(growth, edges, a.numpy().tolist())
                since, _ = integrator.since_kick(growth, edges, a)
            columns = tf.reshape(found.factors, [len(found.kicks), -1])
            numbers = np.array(found.kicks) + np.array(since)
            kicks = tf.constant(found.kicks, tf.float64)
            return numbers, tf.concat([columns, a[:, tf.newaxis], kicks[:, tf.newaxis]], axis=1)

        distances = Distances(growth.background.cosmology)
        reach = np.array([0.0, end])
        bounds, _, found = polynomials(states, distances, reach, 1.0 / (1.0 + cone.z_max))
        coefficients = found.numpy()
        kicks = np.rint(coefficients[:, -1, 0]).astype(int)
        looks = {}
        for kick in sorted(set(kicks.tolist())):
            of_kick = np.flatnonzero(kicks == kick)
            own = bounds[of_kick[0] : of_kick[-1] + 2]
            copies = copies_between(inputs.box, ball, own[0], own[-1])
            seen = replace(ball, copies=copies, edges=own)
            looks[kick] = [SphereLook(seen, coefficients[of_kick, :-1])]
        super().__init__(inputs, cone, looks, looks, files)

    def seen_of(
        self, look: SphereLook, displacement: np.ndarray, fields: list[np.ndarray]
    ) -> Iterator[Particles]:
        """See `Recorder.seen_of`."""
        ball, shape = look.ball, displacement.shape[:3]
        for copy in ball.copies:
            x, y, z = (
                (first + np.arange(n)) * spacing + boxes * length - observer
                for first, n, spacing, boxes, length, observer in zip(
                    ball.first, shape, ball.spacing, copy, ball.lengths, ball.observer, strict=True
                )
            )
            for rows, columns in pieces(shape):
                own, other = x[rows], y[columns]
                across = np.square(own)[:, np.newaxis] + np.square(other)
                squares = across[..., np.newaxis] + np.square(z)
                inside = (squares >= ball.edges[0] ** 2) & (squares < ball.edges[-1] ** 2)
                i, j, k = np.nonzero(inside)
                if len(i):
                    lattice = np.stack([own[i], other[j], z[k]], axis=-1)
                    seen = [f[rows, columns][i, j, k] for f in (displacement, *fields)]
                    yield self._chosen(look, lattice, np.sqrt(squares[inside]), seen)

    def _chosen(
        self, look: SphereLook, lattice: np.ndarray, chi: np.ndarray, fields: list[np.ndarray]
    ) -> Particles:
        """Returns the particles of undisplaced places [n, 3] at distances [n], of fields [n, 3]."""
        edges = look.ball.edges
        segment = np.clip(np.searchsorted(edges, chi, side="right") - 1, 0, len(edges) - 2)
        lower, upper = edges[segment], edges[segment + 1]
        u = (2 * chi - lower - upper) / (upper - lower)
        values = np.zeros((look.coefficients.shape[1], len(u)))
        for power in range(DEGREE, -1, -1):
            values = values * u + look.coefficients[:, :, power].T[:, segment]
        own, *others = fields
        moved, speed = (
            sum(c[:, np.newaxis] * field for c, field in zip(values[begin:], others, strict=False))
            for begin in (0, _OF_FIELDS)
        )
        a = values[-1]
        # a dx/dt is the canonical velocity over a.
        return (
            lattice + placed(own + moved, look.ball.lengths),
            speed * (HUBBLE / a)[:, np.newaxis],
            a,
        )
