"""Halos of dark matter on a light cone, from the files of its particles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.constants import speed_of_light

from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.finder import Particles, find_halos
from flowpm_dist.catalogues.options import FinderOptions
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.grid.space import Space
from flowpm_dist.io.light_cone import read_light_cone
from flowpm_dist.io.particles import Header
from flowpm_dist.options import constructed
from meshimpl.process_mesh import MeshShape, ProcessMesh

ROOM = 1e-6
"""How much wider than the particles a space is, relative to its sides."""


def light_cone_halos(
    folder: str | Path, *, mesh: MeshShape | ProcessMesh = "", whole: bool = False, **options: Any
) -> Catalogue:
    """Returns the halos of the particles on a light cone. On all ranks together.

    Particles are linked where they cross the light cone; their numbers are their rows in
    `read_light_cone(folder)`. The catalogue has the columns of `halos`. Positions are x, y and the
    distance on the flat sky, x, y and z from the observer on the full sky. It has also
    `scale_factor`, at which the halo crosses, `redshift` and, on the flat sky, `angle` [n, 2]
    [deg], on the full sky `direction`. `edge` says whether a member is within a link of the field's
    edge, of z_max or of a seam between two boxes, where a part of the halo may be missing.

    Args:
        folder: see `read_light_cone`.
        mesh: the ranks. Each reads some of the files; `row` cuts x and `col` cuts y.
        whole: give each rank all halos.
        **options: see `halos`; without `overdensities`.

    Raises:
        UserError, UnreadableError: see `read_light_cone`.
        ValueError, TypeError: see `halos`; or spherical masses, for which there is no one time.
    """
    chosen = constructed(FinderOptions, options)
    if chosen.overdensities:
        raise ValueError("overdensities: a light cone has no one time: leave them out")
    ranks = mesh if isinstance(mesh, ProcessMesh) else ProcessMesh(mesh)
    particles, about = read_light_cone(folder, part=(ranks.rank, ranks.size))
    about = {**about, "a": 1.0}  # of each halo in `scale_factor`
    cone = _Cone(about, chosen.longest)
    positions = np.asarray(particles["Coordinates"], np.float64)
    counts = ranks.world.allgather(tf.constant([len(positions)], tf.int64)).numpy()
    numbers = np.arange(len(positions)) + counts[: ranks.rank].sum()
    velocities = np.asarray(particles["Velocities"], np.float64)
    in_view = Particles(
        _space_about(positions, ranks), positions, velocities, numbers, cone.near_edge(positions)
    )
    halos = cone.observed(find_halos(in_view, about, chosen))
    return halos.whole() if whole else halos


def _space_about(positions: np.ndarray, ranks: ProcessMesh) -> Space:
    """Returns the smallest space that holds the particles of all ranks."""
    low = ranks.world.allreduce(tf.constant(positions.min(axis=0, initial=np.inf)), "min").numpy()
    high = ranks.world.allreduce(tf.constant(positions.max(axis=0, initial=-np.inf)), "max").numpy()
    if not (low <= high).all():
        raise ValueError("the light cone has no particles")
    sides = np.maximum(high - low, 1e-3) * (1 + ROOM)
    size, origin = tuple(sides.tolist()), tuple(low.tolist())
    return Space(size, ranks, periodic=False, origin=origin)


class _Cone:
    """What a light cone shows, and where it ends.

    Args:
        about: attributes of its particles.
        link: longest linking length [mean distance of particles].
    """

    def __init__(self, about: Mapping[str, Any], link: float) -> None:
        self.is_full = "nside" in about
        theory = Theory(Cosmology(**about["cosmology"]))
        self.distances = theory.distances
        self.end = float(self.distances.comoving(1 / (1 + about["z_max"])))
        header = Header.of(about)
        self.link = link * header.spacing
        self.fov = 0.0 if self.is_full else float(np.deg2rad(about["field_of_view"]))
        # Boxes one behind the other, whose sides along the line of sight are the same if cubic.
        self.depth = header.box_size[2]

    def _across(self, distance: np.ndarray) -> np.ndarray:
        """Returns the transverse distances f_K over the radial ones."""
        safe = np.maximum(distance, 1e-9)
        return np.asarray(self.distances.transverse(safe)) / safe

    def near_edge(self, x: np.ndarray) -> np.ndarray:
        """Returns whether particles are within a link of an edge or a seam."""
        distance = self.distance(x)
        near = distance > self.end - self.link
        if self.is_full:
            return near
        half = self.fov / 2 * distance * self._across(distance)
        near |= np.abs(x[:, :2]).max(axis=1, initial=0) > half - self.link
        to_seam = np.abs(distance - self.depth * np.round(distance / self.depth))
        return near | ((to_seam < self.link) & (distance > self.link))

    def distance(self, x: np.ndarray) -> np.ndarray:
        """Returns comoving distances from the observer [Mpc/h]."""
        return np.sqrt((x**2).sum(axis=1)) if self.is_full else x[:, 2]

    def observed(self, halos: Catalogue) -> Catalogue:
        """Returns the halos with what an observer sees of them."""
        x, distance = halos["position"], self.distance(halos["position"])
        a = np.asarray(self.distances.scale_factor(np.clip(distance, 0, self.end)))
        if self.is_full:
            towards = x / np.maximum(distance, 1e-9)[:, np.newaxis]
            along, place = (halos["velocity"] * towards).sum(axis=1), {"direction": towards}
        else:
            along = halos["velocity"][:, 2]
            transverse = (distance * self._across(distance))[:, np.newaxis]
            place = {"angle": np.rad2deg(x[:, :2] / np.maximum(transverse, 1e-9))}
        redshift = (1 + along * 1e3 / speed_of_light) / a - 1
        return halos.with_columns(
            {**halos.columns, "scale_factor": a, "redshift": redshift, **place},
            halos.kind,
            halos.members,
        )
