"""Particle kernels as operations of a library compiled for this TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.particle_mesh.kernels import library
from flowpm_dist.particle_mesh.kernels.base import Ball, Kernels, Lattice, Slabs


def _attributes(geometry: Lattice | Slabs | Ball | None) -> dict[str, Any]:
    """Returns the geometry as arguments of an operation."""
    match geometry:
        case Lattice():
            return {
                "per_cell": tf.constant(geometry.per_cell, tf.float64),
                "particles": geometry.particles,
                "mesh_factor": geometry.mesh_factor,
                "halo": geometry.halo,
            }
        case Slabs():
            scales = [*geometry.spacing, *geometry.lengths, geometry.pixel]
            return {
                "places": tf.constant(geometry.places, tf.int32),
                "directions": tf.constant(geometry.directions, tf.float64),
                "distances": tf.constant(geometry.distances, tf.float64),
                "first_map": tf.constant(geometry.first_map, tf.int32),
                "scales": tf.constant(scales, tf.float64),
                "maps": geometry.maps,
                "pixels": geometry.pixels,
            }
        case Ball():
            return {
                "copies": tf.constant(geometry.copies, tf.int32),
                "edges": tf.constant(geometry.edges, tf.float64),
                "first_map": tf.constant(geometry.first_map, tf.int32),
                "numbers": tf.constant(geometry.numbers),
                "rings": tf.constant(Healpix(geometry.nside).theta),
                "maps": geometry.maps,
                "nside": geometry.nside,
                "first": geometry.first,
                "per_distance": geometry.per_distance,
            }
    return {}


class Compiled(Kernels):
    """The kernels on CPUs, in C++.

    Every result has the same bits on any number of threads.

    Raises:
        RuntimeError: if the library does not exist or does not load.
    """

    name = "compiled"

    def __init__(self) -> None:
        self._ops, reason = library.load()
        if reason is not None:
            raise RuntimeError(reason)

    def _call(
        self, kernel: str, geometry: Lattice | Slabs | Ball | None = None, **arguments: Any
    ) -> Any:
        for name in ("weights", "add"):
            # The operations take what may be left out as a list of one tensor or of none.
            if name in arguments:
                arguments[name] = [] if arguments[name] is None else [arguments[name]]
        operation = getattr(self._ops, f"flowpm_{kernel}")
        found = operation(**arguments, **_attributes(geometry))
        if kernel == "paint_vjp":
            return found.ds, found.dweights[0] if found.dweights else None
        return tuple(found) if isinstance(found, tuple) else found
