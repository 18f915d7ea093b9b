"""Masses of halos within spheres of an overdensity about their densest members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from scipy.spatial import cKDTree

from flowpm_dist.catalogues.friends import keepers
from flowpm_dist.catalogues.options import Overdensity
from flowpm_dist.cosmology.background import Background
from flowpm_dist.grid.space import Space
from flowpm_dist.io.particles import CRITICAL_DENSITY, Header

NEIGHBOURS = 16
"""The density at a particle is taken from the distance of so many others."""
FIRST, MOST = 1.5, 3.0
"""How far spheres are looked for, at first and at most, in radii of spheres of the halo's mass."""


def thresholds(header: Header, names: Sequence[Overdensity]) -> dict[str, float]:
    """Returns the comoving densities of overdensities [particles / (Mpc/h)^3]."""
    background = Background(header.cosmology)
    matter = float(header.cosmology["Omega_m"])
    critical = float(background.e(header.a)) ** 2 * header.a**3
    density = {"200m": 200 * matter, "200c": 200 * critical}
    return {name: density[name] * CRITICAL_DENSITY / header.mass for name in names}


@dataclass(frozen=True)
class Members:
    """Particles of this rank that are members of halos.

    Attributes:
        place: [n, 3], in this rank's block.
        number: numbers of the particles, int64 [n].
        label: ids of their halos, int64 [n].
    """

    place: np.ndarray
    number: np.ndarray
    label: np.ndarray


def spherical_masses(
    space: Space,
    places: np.ndarray,
    members: Members,
    halo: np.ndarray,
    count: np.ndarray,
    header: Header,
    names: Sequence[Overdensity],
    minimum: int,
) -> dict[str, np.ndarray]:
    """Returns centres, masses and radii of halos. On all ranks together.

    The centre is the densest member. The sphere ends where the mean density within it first falls
    below the threshold, going outwards from the nearest `NEIGHBOURS` particles. Masses and radii
    are NaN where it has fewer particles than those or than a halo, or does not end within `MOST`
    radii or within the width of a rank's block. A halo of `NEIGHBOURS` members or fewer has no
    centre.

    Args:
        space: space and ranks.
        places: places of all particles in this rank's block [n, 3].
        members: those that are in halos.
        halo: ids of the halos that this rank keeps, increasing, int64 [halos].
        count: their members.
        header: facts about the universe.
        names: the overdensities.
        minimum: the number of particles that make a halo.

    Returns:
        Columns of the halos that this rank keeps, see `COLUMNS`.
    """
    limits = thresholds(header, names)
    radius = np.cbrt(3 * count / (4 * np.pi * min(limits.values())))
    largest = float(space.mesh.world.allreduce(tf.constant(radius.max(initial=0.0)), "max"))
    farthest = min(MOST * largest, space.reach)
    around = np.concatenate([places, space.margins(places, farthest).places])
    tree = cKDTree(around * space.size)
    centre = _densest(space, tree, members, farthest)
    exchange = space.to_owners(centre)
    there = exchange.send(centre).numpy() * space.size
    reach = exchange.send(radius).numpy()
    spheres = np.full((len(there), len(limits), 2), np.nan)
    for row, (middle, about) in enumerate(zip(there, reach, strict=True)):
        reach_of = [min(factor * about, farthest) for factor in (FIRST, MOST)]
        spheres[row] = _spheres(tree, middle, reach_of, list(limits.values()), minimum)
    back = exchange.give_back(spheres).numpy()
    known = (count > NEIGHBOURS)[:, np.newaxis]
    columns = {"centre": np.where(known, space.positions(centre), np.nan)}
    for n, name in enumerate(limits):
        columns[f"mass_{name}"] = back[:, n, 0] * (header.mass * 1e10)
        columns[f"radius_{name}"] = back[:, n, 1]
    return columns


def _densest(space: Space, tree: cKDTree, members: Members, farthest: float) -> np.ndarray:
    """Returns the places of the densest members of the halos that this rank keeps.

    Args:
        space, tree, members: see `spherical_masses`.
        farthest: how far around the block all particles are in the tree [Mpc/h].
    """
    near = np.zeros(len(members.label))
    if len(near):
        near = tree.query(members.place * space.size, k=[NEIGHBOURS + 1])[0][:, 0]
    near[near > farthest] = np.inf  # another may be nearer
    columns = (members.label, near, members.number, members.place)
    here = _first_of_each(*columns)
    to_keeper = keepers(space, members.label[here])
    label, near, number, place = (to_keeper.send(x[here]).numpy() for x in columns)
    chosen: np.ndarray = place[_first_of_each(label, near, number, place)]
    return chosen


def _first_of_each(
    label: np.ndarray, near: np.ndarray, number: np.ndarray, _: np.ndarray
) -> np.ndarray:
    """Returns the row of the densest member of each label, in the order of labels."""
    order = np.lexsort((number, near, label))
    first = np.ones(len(order), bool)
    first[1:] = np.diff(label[order]) != 0
    return order[first]


def _spheres(
    tree: cKDTree,
    centre: np.ndarray,
    reaches: Sequence[float],
    limits: Sequence[float],
    minimum: int,
) -> np.ndarray:
    """Returns numbers of particles and radii of the spheres about a centre [limits, 2]."""
    spheres = np.full((len(limits), 2), np.nan)
    for reach in reaches:
        inside = tree.data[tree.query_ball_point(centre, reach)] - centre
        distance = np.sort(np.sqrt((inside**2).sum(axis=1)))
        number = np.arange(1, len(distance) + 1)
        for n, limit in enumerate(limits):
            below = number < 4 / 3 * np.pi * limit * distance**3
            below[: NEIGHBOURS - 1] = False
            end = int(below.argmax())
            if below.any() and end >= max(minimum, NEIGHBOURS):
                # Where the mean density of the particles within crosses the threshold.
                spheres[n] = end, np.cbrt(end / (4 / 3 * np.pi * limit))
        if np.isfinite(spheres).all():
            break
    return spheres
