"""Halos of a state, or of any particles: friends of friends with their properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.halos.catalogue import Catalogue, by_mass
from flowpm_dist.halos.friends import Groups, friends_of_friends
from flowpm_dist.halos.moments import axes_of, moments_of
from flowpm_dist.halos.space import Space
from flowpm_dist.io.particles import Header
from flowpm_dist.simulation.state import State


def halos(
    state: State,
    linking_length: float = 0.2,
    minimum: int = 20,
    *,
    whole: bool = False,
) -> Catalogue:
    """Returns the halos of dark matter of a state: friends of friends. On all ranks together.

    There is no gradient: the members of a halo change in jumps.

    Args:
        state: a single universe.
        linking_length: [mean distance of particles].
        minimum: the number of particles that make a halo, at least 2.
        whole: give each rank all halos, instead of those in its block.

    Raises:
        ValueError: a batch of universes, a number out of its range, or a linking length that spans
            a rank's block.
    """
    box = state.box
    if box.batch is not None:
        raise ValueError("halos of a batch: run its universes one by one")
    first, block, (_, ny, nz) = box.offset, box.block, box.grid
    x, y, z = (np.arange(b, b + n) for b, n in zip(first, block, strict=True))
    numbers = (x[:, np.newaxis, np.newaxis] * ny + y[:, np.newaxis]) * nz + z
    space = Space(box.size, box.mesh)
    found = find_halos(
        space,
        state.positions(wrap=False).block.numpy().reshape(-1, 3),
        state.peculiar_velocity().block.numpy().reshape(-1, 3),
        numbers.ravel().astype(np.int64),
        state.header(),
        linking_length,
        minimum,
    )
    return found.whole() if whole else found


def find_halos(
    space: Space,
    positions: np.ndarray,
    velocities: np.ndarray,
    numbers: np.ndarray,
    about: Mapping[str, Any],
    linking_length: float = 0.2,
    minimum: int = 20,
) -> Catalogue:
    """Returns the halos of particles. On all ranks together.

    Args:
        space: space and ranks.
        positions: comoving, of this rank's particles, which may be anywhere in it [n, 3] [Mpc/h].
        velocities: peculiar [n, 3] [km/s].
        numbers: of the particles, int64 [n]; no two of any rank have the same.
        about: attributes of a snapshot, see `State.header`; "grid" has the number of particles in a
            box of "box_size".
        linking_length: [mean distance of particles].
        minimum: the number of particles that make a halo, at least 2.

    Raises:
        ValueError: a number out of its range, or a linking length that spans a rank's block.
    """
    header = Header.of(about)
    if not linking_length > 0:
        raise ValueError(f"linking_length {linking_length}: must be positive")
    if minimum < 2:
        raise ValueError(f"minimum {minimum}: a halo has at least 2 particles")
    spacing = float(np.prod(header.box_size) / header.count) ** (1 / 3)
    places = space.places(positions)
    home = space.to_owners(places)
    places = home.send(places).numpy()
    groups = friends_of_friends(space, places, home.send(numbers).numpy(), linking_length * spacing)
    columns = _columns(space, places, home.send(velocities).numpy(), groups, minimum, header)
    settings = {"linking_length": linking_length, "minimum": minimum}
    return _catalogue(columns, {**about, **settings}, space)


def _columns(
    space: Space,
    places: np.ndarray,
    velocities: np.ndarray,
    groups: Groups,
    minimum: int,
    header: Header,
) -> dict[str, np.ndarray]:
    """Returns the columns of the halos, on the ranks in whose blocks their centres are."""
    found = moments_of(space, places, velocities, groups, minimum)
    lengths, directions = axes_of(found.spread)
    columns = {
        "id": found.label,
        "number": found.number,
        "mass": found.number * (header.mass * 1e10),
        "position": space.positions(found.place),
        "velocity": found.velocity,
        "velocity_dispersion": np.sqrt(found.dispersion / 3),
        "axis_lengths": lengths,
        "axis_directions": directions,
    }
    to_owner = space.to_owners(found.place)
    return {name: to_owner.send(values).numpy() for name, values in columns.items()}


def _catalogue(
    columns: Mapping[str, np.ndarray], about: Mapping[str, Any], space: Space
) -> Catalogue:
    order = by_mass(columns)
    total = int(space.mesh.world.allreduce(tf.constant(len(order), tf.int64)))
    sorted_columns = {name: values[order] for name, values in columns.items()}
    return Catalogue("halos", sorted_columns, about, space.mesh, total, False)
