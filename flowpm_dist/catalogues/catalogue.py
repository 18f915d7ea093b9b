"""Catalogues of halos and of galaxies: arrays with a row for each object, split over ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.catalogues.columns import COLUMNS, Column, Kind, by_mass
from flowpm_dist.catalogues.options import CatalogueFormat
from flowpm_dist.cosmology.background import Background
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.options import Scheme
from flowpm_dist.grid.space import Space
from flowpm_dist.io.catalogue_files import CatalogueFile, write_catalogue
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import reading
from flowpm_dist.io.labelled import Labelled, LabelledArray, add_column, package
from flowpm_dist.io.particles import HUBBLE, Header
from flowpm_dist.options import in_unit
from flowpm_dist.particle_mesh.positions import axis_number
from flowpm_dist.particle_mesh.scattered import paint
from flowpm_dist.simulation.state import Axis
from meshimpl.exchange import RowExchange
from meshimpl.process_mesh import MeshShape, ProcessMesh

if TYPE_CHECKING:
    import pandas
    from astropy.table import QTable


@dataclass(frozen=True, eq=False, repr=False)
class Catalogue(Labelled):
    """Halos or galaxies: arrays with a row for each object.

    A column is an attribute of the catalogue: `halos.mass`, `halos["mass"]`. The objects lie on the
    rank in whose block of the box they are, unless the catalogue is `whole`; galaxies lie with
    their halo. On each rank they are in the order of falling mass, objects of one mass in the order
    of their `id`, and the galaxies of a halo in the order of `satellite`.

    Attributes:
        kind: "halos" or "galaxies".
        columns: arrays [n, ...] by name, see `COLUMNS`.
        about: the snapshot's attributes, see `State.header`, and the settings of the finder; JSON
            can take them.
        mesh: the ranks.
        total: the number of objects on all ranks.
        is_whole: whether each rank has all objects, instead of a part of them.
        members: numbers of the member particles, int64 [sum of `number`], one halo after the other
            and rising within each; None if they were not wanted.
    """

    kind: Kind
    columns: Mapping[str, np.ndarray]
    about: Mapping[str, Any]
    mesh: ProcessMesh
    total: int
    is_whole: bool
    members: np.ndarray | None = None

    def __getattr__(self, name: str) -> np.ndarray:
        if name.startswith("_") or name not in self.columns:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return self.columns[name]

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a column.

        Raises:
            KeyError: there is no such column.
        """
        if name not in self.columns:
            raise KeyError(f"the {self.kind} have no {name!r}; they have {', '.join(self.columns)}")
        return self.columns[name]

    def __len__(self) -> int:
        """The number of objects that this rank has."""
        return len(next(iter(self.columns.values())))

    def __repr__(self) -> str:
        part = "" if self.is_whole or self.mesh.size == 1 else f", {len(self)} on this rank"
        return f"<{self.total} {self.kind} at a = {self.a:.6g}{part}: {', '.join(self.columns)}>"

    @functools.cached_property
    def header(self) -> Header:
        """Scale factor, box, universe and the particles' mass."""
        return Header.of(self.about)

    @property
    def a(self) -> float:
        """Scale factor."""
        return self.header.a

    @property
    def box_size(self) -> tuple[float, float, float]:
        """The sides of the box [Mpc/h]."""
        return self.header.box_size

    @functools.cached_property
    def cosmology(self) -> Cosmology:
        """The universe."""
        return Cosmology(**self.about["cosmology"])

    def check_one_time(self, what: str) -> None:
        """Checks that the objects fill a box at one time, not a light cone.

        Raises:
            ValueError: they are on a light cone; `what` is what a box is needed for.
        """
        if "scale_factor" in self.columns:
            raise ValueError(f"{what} needs {self.kind} of a box at one time, not a light cone")

    def of(self, rows: Any) -> Catalogue:
        """Returns a catalogue of some of the objects, such as `halos.of(halos.mass > 1e13)`.

        On all ranks together.

        Args:
            rows: this rank's objects: a mask [n], or their numbers.
        """
        if isinstance(rows, list) and not rows:
            rows = slice(0, 0)
        rows = np.atleast_1d(np.arange(len(self))[rows])
        chosen = {name: values[rows] for name, values in self.columns.items()}
        members = self.members
        if members is not None:
            ends = np.cumsum(self["number"])
            pieces = np.split(members, ends[:-1])
            members = np.concatenate([members[:0], *(pieces[row] for row in rows)])
        return self.with_columns(chosen, members=members)

    def members_of(self, row: int) -> np.ndarray:
        """Returns the numbers of a halo's member particles, see `members`.

        Args:
            row: of this rank's halos.

        Raises:
            ValueError: the catalogue was made without members.
        """
        if self.members is None:
            raise ValueError("the catalogue has no members: find its halos with members=True")
        end = int(self["number"][: row + 1].sum())
        return self.members[end - int(self["number"][row]) : end]

    def with_columns(
        self,
        columns: Mapping[str, np.ndarray],
        kind: Kind | None = None,
        members: np.ndarray | None = None,
    ) -> Catalogue:
        """Returns a catalogue of other objects on the same ranks. On all ranks together."""
        count = tf.constant(len(next(iter(columns.values()))), tf.int64)
        total = count if self.is_whole else self.mesh.world.allreduce(count)
        kind, columns = kind or self.kind, dict(columns)
        return replace(self, kind=kind, columns=columns, members=members, total=int(total))

    def sorted(self) -> Catalogue:
        """Returns the catalogue in its order. On all ranks together."""
        return self.of(by_mass(self.columns))

    def whole(self) -> Catalogue:
        """Returns the catalogue of all objects on each rank. On all ranks together."""
        if self.is_whole or self.mesh.size == 1:
            return replace(self, is_whole=True)
        columns = {name: self._from_all(part) for name, part in self.columns.items()}
        members = None if self.members is None else self._from_all(self.members)
        return replace(self, columns=columns, members=members, is_whole=True).sorted()

    def _from_all(self, part: np.ndarray) -> np.ndarray:
        """Returns the rows of all ranks, on each of them."""
        parts = self.mesh.gather_to_root(part)
        rows = np.zeros(0, part.dtype) if parts is None else np.concatenate(parts).ravel()
        return self.mesh.array_from_root(rows).reshape(-1, *part.shape[1:])

    def density(
        self,
        grid: int | tuple[int, int, int] | Box,
        *,
        weights: np.ndarray | None = None,
        redshift_space: Axis | None = None,
        scheme: Scheme = "cic",
        shift: float = 0.0,
    ) -> Field:
        """Returns the density of the objects, mean 1. On all ranks together.

        The field knows its window, which spectra divide out. There is no gradient.

        Args:
            grid: cells along each side, or along x, y and z; or the box with the mesh.
            weights: of this rank's objects [n]; 1 if None.
            redshift_space: the line of sight, along which peculiar velocities move the objects.
            scheme, shift: see `flowpm_dist.paint`.

        Raises:
            ValueError: there are no objects, their weights have no positive sum, an unknown scheme,
                or a grid that the ranks do not divide.
        """
        self.check_one_time("a density")
        grid = in_unit("grid", grid)
        box = grid if isinstance(grid, Box) else self._box(grid)
        weights, shift = in_unit("weights", weights), in_unit("shift", shift)
        positions = self["position"]
        if redshift_space is not None:
            positions = self.apparent_positions(redshift_space)
        if self.is_whole and self.mesh.rank:  # each object counts once
            positions, weights = positions[:0], None if weights is None else weights[:0]
        if not self.total:
            raise ValueError(f"0 {self.kind}: there is no density")
        return paint(positions, box, weights, scheme=scheme, shift=shift)

    def _box(self, grid: int | tuple[int, int, int]) -> Box:
        x, y, z = np.broadcast_to(grid, 3).tolist()
        return Box((x, y, z), self.box_size, self.mesh, tf.float64)

    def apparent_positions(self, axis: Axis) -> np.ndarray:
        """Returns the positions at which a distant observer places the objects [n, 3] [Mpc/h].

        They are x + v / (a H), from 0 to below the side.

        Args:
            axis: the line of sight, "x", "y" or "z".
        """
        self.check_one_time("redshift space")
        rate = float(Background(self.cosmology).e(self.a))
        moved = self["position"].copy()
        number = axis_number(axis)
        moved[:, number] += self["velocity"][:, number] / (HUBBLE * self.a * rate)
        space = Space(self.box_size, self.mesh)
        return space.positions(space.places(moved))

    def shot_noise(self, weights: np.ndarray | None = None) -> float:
        """Returns the power of objects that are placed at random [(Mpc/h)^3].

        V sum w^2 / (sum w)^2, which is V / N without weights. On all ranks together.

        Args:
            weights: of this rank's objects [n]; 1 if None.
        """
        self.check_one_time("shot noise")
        if not self.total:
            raise ValueError(f"there are no {self.kind}: they have no shot noise")
        weights = in_unit("weights", weights)
        if weights is None:
            return float(np.prod(self.box_size) / self.total)
        sums = np.array([np.sum(weights), np.sum(np.square(weights))])
        first, second = sums if self.is_whole else self.mesh.world.allreduce(sums).numpy()
        return float(np.prod(self.box_size) * second / first**2)

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        one = {"halos": "halo", "galaxies": "galaxy"}[self.kind]
        arrays = {}
        for name, values in self.columns.items():
            axes = [f"{name}_{n}" for n in range(1, values.ndim)]
            about = COLUMNS.get(name, Column("1", "", tuple(axes)))
            arrays[name] = LabelledArray(values, (one, *about.axes), about.units, about.meaning)
        return arrays

    @override
    def to_pandas(self) -> pandas.DataFrame:
        """Returns a table with a row for each object of this rank.

        The components of vectors are columns: `position_x`, `position_y`, `position_z`.
        `attrs["units"]` holds the units by column.

        Raises:
            ImportError: pandas is not installed.
        """
        columns, units = {}, {}
        for name, each in self.labelled().items():
            for place in np.ndindex(each.values.shape[1:]):
                axes = zip(each.dimensions[1:], place, strict=True)
                parts = ["xyz"[n] if axis == "axis" else str(n + 1) for axis, n in axes]
                full = "_".join([name, *parts])
                columns[full], units[full] = each.values[:, *place], each.units
        table: pandas.DataFrame = package("pandas").DataFrame(columns)
        table.attrs["units"] = units
        return table

    @override
    def to_table(self) -> QTable:
        """Returns a table of astropy with units, a row for each object of this rank.

        Its `meta` has the catalogue's attributes.
        """
        from astropy.table import QTable

        table = QTable(meta=dict(self.about))
        for name, each in self.labelled().items():
            add_column(table, name, each.values, each)
        return table

    def write(
        self, path: str | Path, format: CatalogueFormat = "hdf5", *, overwrite: bool = False
    ) -> None:
        """Writes the catalogue; each rank writes its part. On all ranks together.

        `Catalogue.read` returns it exactly. An HDF5 file has the table `data`, as halotools keeps
        halos: `halo_id`, `halo_x`, `halo_vx`, `halo_mass`, `halo_m200m`, `halo_r200m` and so on;
        galaxies have `x`, `vx`, `halo_id`, `halo_mass`, `central`, `satellite`. `Table.read(path,
        path="data")` of astropy reads it, and nbodykit's `HDFCatalog(path, root="data")`. A bigfile
        is a folder with blocks as FastPM writes them: `LL-0.200/MinID`, `Length`, `Position`,
        `Velocity`, `Mass` and so on, or `Galaxies/Position`. nbodykit reads it by
        `BigFileCatalog(path, dataset="LL-0.200")`. `COLUMNS` has the units. The
        numbers of member particles are in `members` or `Members/ID`.

        Args:
            path: the file, or the folder of a bigfile, on a file system that all ranks see.
            format: "hdf5" or "bigfile".
            overwrite: replace a catalogue that is there.

        Raises:
            FileExistsError: there is one, on every rank.
            ValueError: a column of a user holds no real numbers, or its name is not of letters,
                digits and _.
            UserError: `path` is a folder with other things.
            WriteError: raised only on a rank that cannot write; the job must then end.
        """
        ours = slice(0 if self.is_whole and self.mesh.rank else None)  # each object once
        columns = {n: replace(x, values=x.values[ours]) for n, x in self.labelled().items()}
        members = None if self.members is None else self.members[ours]
        write_catalogue(
            *(Path(path), self.kind, columns, members, self.about, self.mesh, format),
            overwrite=overwrite,
        )

    @classmethod
    def read(cls, path: str | Path, mesh: MeshShape | ProcessMesh = "") -> Catalogue:
        """Returns a catalogue that `write` has written. On all ranks together.

        Galaxies come to the rank in whose block they are, like halos.

        Args:
            path: its file or folder, in either format.
            mesh: the ranks, on any number of which it was written.

        Raises:
            UserError: there is none, it is another code's, or it is damaged.
        """
        ranks = mesh if isinstance(mesh, ProcessMesh) else ProcessMesh(mesh)
        file = CatalogueFile.at(Path(path))
        facts = file.facts
        begin, end = (facts.count * n // ranks.size for n in (ranks.rank, ranks.rank + 1))
        columns = file.read(begin, end)
        with reading(Path(path), raises=UserError):
            space = Space(Header.of(facts.about).box_size, ranks)
            to_owner = space.to_owners(space.places(columns["position"]))
        here = {name: to_owner.send(values).numpy() for name, values in columns.items()}
        members = None
        if facts.members is not None:
            number = columns["number"]
            sums = ranks.world.allgather(tf.constant([number.sum()], tf.int64)).numpy()
            before = int(sums[: ranks.rank].sum())
            members = file.read_members(before, before + int(number.sum()))
            to_rank = np.repeat(to_owner.ranks, number)
            members = RowExchange(ranks.world, to_rank).send(members).numpy()
        return cls(facts.kind, here, facts.about, ranks, 0, False, members).sorted()
