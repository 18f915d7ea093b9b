"""Halos of a state, or of any particles: friends of friends with their properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.friends import friends_of_friends, keepers
from flowpm_dist.catalogues.moments import Moments, axes_of, moments_of
from flowpm_dist.catalogues.options import FinderOptions
from flowpm_dist.catalogues.spherical import Members, spherical_masses
from flowpm_dist.grid.space import Space
from flowpm_dist.io.particles import Header
from flowpm_dist.options import constructed
from flowpm_dist.simulation.state import State
from meshimpl.exchange import RowExchange


def halos(state: State, *, whole: bool = False, **options: Any) -> Catalogue:
    """Returns the halos of dark matter of a state: friends of friends. On all ranks together.

    There is no gradient: the members of a halo change in jumps.

    Args:
        state: a single universe.
        whole: give each rank all halos, instead of those in its block.
        **options: `linking_length=0.2`, `minimum=20` and the others of `FinderOptions`.

    Raises:
        ValueError: a batch of universes, an option out of its range, or a linking length that spans
            a rank's block.
        TypeError: there is no such option.
    """
    box, chosen = state.box, constructed(FinderOptions, options)
    if box.batch is not None:
        raise ValueError("halos of a batch: take each of state.universes()")
    box.check_equal("halos", whole=whole, options=chosen)
    x, y, z = (np.arange(b, b + n) for b, n in zip(box.offset, box.block, strict=True))
    _, ny, nz = box.grid
    numbers = (x[:, np.newaxis, np.newaxis] * ny + y[:, np.newaxis]) * nz + z
    particles = Particles(
        Space(box.size, box.mesh),
        state.positions(wrap=False).block.numpy().reshape(-1, 3),
        state.peculiar_velocity().block.numpy().reshape(-1, 3),
        numbers.ravel().astype(np.int64),
    )
    catalogue = find_halos(particles, state.header(), chosen)
    return catalogue.whole() if whole else catalogue


@dataclass(frozen=True)
class Particles:
    """Particles of this rank, anywhere in space.

    Attributes:
        space: space and ranks.
        positions: comoving [n, 3] [Mpc/h].
        velocities: peculiar [n, 3] [km/s].
        numbers: int64 [n]; no two particles of any rank have the same.
        edge: whether each is near an edge, beyond which particles may be missing [n]; None where
            there are no edges.
    """

    space: Space
    positions: np.ndarray
    velocities: np.ndarray
    numbers: np.ndarray
    edge: np.ndarray | None = None


def find_halos(
    particles: Particles, about: Mapping[str, Any], options: FinderOptions | None = None
) -> Catalogue:
    """Returns the halos of particles. On all ranks together.

    Args:
        particles: of this rank.
        about: attributes of a snapshot, see `State.header`; "grid" has the number of particles in a
            box of "box_size".
        options: options of the finder.

    Raises:
        ValueError: a position that is not finite, or a linking length that spans a rank's block.
    """
    header, options, space = Header.of(about), options or FinderOptions(), particles.space
    places = space.places(particles.positions)
    home = space.to_owners(places)
    columns_here = (places, particles.velocities, particles.numbers)
    owned = _Owned(space, *(home.send(values).numpy() for values in columns_here))
    moments, halo = _groups(owned, options, header.spacing)
    columns = _columns(owned, moments, halo, options, header)
    if particles.edge is not None:
        columns["edge"] = _touching(owned, moments, halo[home.send(particles.edge).numpy()])
    to_owner = space.to_owners(moments.place)
    columns = {name: to_owner.send(values).numpy() for name, values in columns.items()}
    settings = options.model_dump(mode="json")
    catalogue = Catalogue("halos", columns, {**about, **settings}, space.mesh, 0, False)
    if options.members:
        catalogue = replace(catalogue, members=_members(owned, moments, halo, to_owner))
    return catalogue.sorted()


@dataclass(frozen=True)
class _Owned:
    """The particles in this rank's block: places [n, 3], velocities [n, 3] and numbers [n]."""

    space: Space
    place: np.ndarray
    velocity: np.ndarray
    number: np.ndarray


def _groups(owned: _Owned, options: FinderOptions, spacing: float) -> tuple[Moments, np.ndarray]:
    """Returns the halos that this rank keeps, and of each owned particle its halo's id or -1."""
    halo, moments = np.full(len(owned.number), -1, np.int64), None
    rows = np.arange(len(halo))
    for length, below in options.stages:
        place = owned.place[rows]
        groups = friends_of_friends(owned.space, place, owned.number[rows], length * spacing)
        members, at, pieces = groups.within(options.minimum, below)
        labels = groups.label[pieces]
        halo[rows[members]] = labels[at]
        velocity = owned.velocity[rows[members]]
        stage = moments_of(owned.space, place[members], velocity, at, labels)
        moments = stage if moments is None else moments.joined_with(stage)
        rows = rows[groups.count[groups.piece] >= below]
    assert moments is not None
    return moments, halo


def _columns(
    owned: _Owned, moments: Moments, halo: np.ndarray, options: FinderOptions, header: Header
) -> dict[str, np.ndarray]:
    """Returns the columns of the halos that this rank keeps."""
    lengths, directions = axes_of(moments.spread)
    columns = {
        "id": moments.label,
        "number": moments.number,
        "mass": moments.number * (header.mass * 1e10),
        "position": owned.space.positions(moments.place),
        "velocity": moments.velocity,
        "velocity_dispersion": np.sqrt(moments.dispersion / 3),
        "axis_lengths": lengths,
        "axis_directions": directions,
    }
    if options.overdensities:
        rows = np.flatnonzero(halo >= 0)
        members = Members(owned.place[rows], owned.number[rows], halo[rows])
        columns |= spherical_masses(
            *(owned.space, owned.place, members, moments.label, moments.number),
            *(header, options.overdensities, options.minimum),
        )
    return columns


def _touching(owned: _Owned, moments: Moments, near: np.ndarray) -> np.ndarray:
    """Returns whether the halos that this rank keeps have one of the particles near an edge.

    Args:
        owned, moments: the particles and the halos.
        near: the ids of the halos of these particles, or -1.
    """
    labels = np.unique(near[near >= 0])
    touching: np.ndarray = keepers(owned.space, labels).send(labels).numpy()
    return np.isin(moments.label, touching)


def _members(
    owned: _Owned, moments: Moments, halo: np.ndarray, to_owner: RowExchange
) -> np.ndarray:
    """Returns the numbers of the members of the halos that come here, one halo after the other."""
    rows = np.flatnonzero(halo >= 0)
    to_keeper = keepers(owned.space, halo[rows])
    label, number = (to_keeper.send(x[rows]).numpy() for x in (halo, owned.number))
    number = number[np.lexsort((number, label))]
    ranks = np.repeat(to_owner.ranks, moments.number)
    return RowExchange(owned.space.mesh.world, ranks).send(number).numpy()
