"""Catalogues of surveys: galaxies on the sky with redshifts, and the randoms that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tensorflow as tf
from scipy.interpolate import CubicSpline

from flowpm_dist.cosmology.theory import Universe, theory_of
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import UnreadableError
from flowpm_dist.io.galaxy_files import read_columns
from flowpm_dist.io.opening import not_finite
from flowpm_dist.options import in_unit, keep_in_units
from meshimpl.process_mesh import MeshShape, ProcessMesh

NODES = 4096
"""The number of distances between which a cubic spline gives the others, to 1e-11 or better."""
SKY = ("RA", "DEC", "Z")


@dataclass(frozen=True, eq=False, repr=False)
class SurveyCatalogue:
    """Galaxies of a survey, or its randoms: points in comoving space about an observer.

    Each rank has some of the objects, any of them.

    Attributes:
        positions: comoving, of this rank's objects, with the observer at the origin, float64 [n, 3]
            [Mpc/h].
        weights: weights of this rank's objects, at least 0, float64 [n]; 1 if None.
        density: the mean number density of galaxies at the place of each object, which FKP weights
            need, float64 [n] [(h/Mpc)^3]; None if it is not known.
        mesh: the ranks, or the shape of their mesh.
        total: the number of objects on all ranks.

    Raises:
        ValueError: arrays of different lengths, a number that is not finite, a weight or density
            below 0, or weights or a density on some ranks alone. If they are wrong on one rank, all
            ranks raise it.
    """

    positions: np.ndarray
    weights: np.ndarray | None = None
    density: np.ndarray | None = None
    mesh: ProcessMesh | MeshShape = ""
    total: int = field(init=False)

    def __post_init__(self) -> None:
        keep_in_units(self, positions="Mpc/h", weights="", density="(h/Mpc)^3")
        mesh = self.mesh if isinstance(self.mesh, ProcessMesh) else ProcessMesh(self.mesh)
        positions = np.asarray(self.positions, np.float64)
        optional = {"weights": self.weights, "density": self.density}
        arrays = {n: np.asarray(x, np.float64) for n, x in optional.items() if x is not None}
        arrays = {"positions": positions, **arrays}
        mesh.raise_together(_problem(arrays), ValueError)
        here = [int(sign * (name in arrays)) for name in optional for sign in (1, -1)]
        most = mesh.world.allreduce(tf.constant(here), "max").numpy().reshape(-1, 2)
        for name, (some_have, all_have) in zip(optional, most, strict=True):
            if some_have != -all_have:
                raise ValueError(f"{name} is given on some ranks alone: give it on all, or on none")
        count = int(mesh.world.allreduce(tf.constant(len(positions), tf.int64)))
        arrays.setdefault("weights", np.ones(len(positions)))
        for name, value in {**arrays, "mesh": mesh, "total": count}.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """The number of objects that this rank has."""
        return len(self.positions)

    def __repr__(self) -> str:
        return f"<survey catalogue of {self.total} objects, {len(self)} on this rank>"

    @classmethod
    def from_sky(
        cls,
        ra: np.ndarray,
        dec: np.ndarray,
        redshift: np.ndarray,
        cosmology: Universe,
        weights: np.ndarray | None = None,
        density: np.ndarray | None = None,
        mesh: ProcessMesh | MeshShape = "",
    ) -> SurveyCatalogue:
        """Returns the catalogue of objects on the sky. On all ranks together.

        x points to right ascension 0 and declination 0, z to declination 90.

        Args:
            ra, dec: right ascension and declination of this rank's objects [n] [deg].
            redshift: above 0 [n]. Peculiar velocities are a part of it, so that positions are in
                redshift space.
            cosmology: the universe that turns redshifts into comoving distances; a flat one.
            weights, density, mesh: see `SurveyCatalogue`.

        Raises:
            ValueError: a redshift that is not above 0, a declination beyond 90 degrees, a right
                ascension beyond 360 degrees, or a curved universe; see also `SurveyCatalogue`.
        """
        ra, dec = in_unit("ra", ra, "deg"), in_unit("dec", dec, "deg")
        redshift = in_unit("redshift", redshift, "redshift")
        sky = dict(zip(SKY, (np.asarray(x, np.float64) for x in (ra, dec, redshift)), strict=True))
        ranks = mesh if isinstance(mesh, ProcessMesh) else ProcessMesh(mesh)
        ranks.raise_together(_problem_on_sky(sky), ValueError)
        return cls(_positions([*sky.values()], cosmology), weights, density, ranks)


def read_galaxies(
    path: str | Path,
    cosmology: Universe,
    mesh: ProcessMesh | MeshShape = "",
    *,
    columns: Sequence[str] = SKY,
    weights: Sequence[str] = (),
    density: str | None = None,
) -> SurveyCatalogue:
    """Returns the galaxies or randoms of a file in FITS, HDF5 or CSV. On all ranks together.

    Each rank reads its part of the rows. See `flowpm_dist.io.galaxy_files.read_columns` for the
    forms of files.

    Args:
        path: the file.
        cosmology: the universe that turns redshifts into comoving distances; a flat one.
        mesh: the ranks, or the shape of their mesh.
        columns: names of right ascension and declination [deg], and of the redshift.
        weights: names of columns whose product is the weight of an object, such as "WEIGHT" and
            "WEIGHT_FKP"; without any, each has the weight 1.
        density: name of the column with the mean number density [(h/Mpc)^3], such as "NZ" of BOSS.

    Raises:
        UserError: the file is missing or damaged, lacks a column, or holds a number that is not
            allowed; on all ranks. The message names the file and the column.
    """
    path = Path(path)
    ranks = mesh if isinstance(mesh, ProcessMesh) else ProcessMesh(mesh)
    named = [columns] if isinstance(columns, str) else list(columns)
    if len(named) != len(SKY):
        raise UserError(f"columns = {named}: must be the names of {', '.join(SKY)}")
    factors = [weights] if isinstance(weights, str) else list(weights)
    others = [] if density is None else [density]
    ranks.check_equal("a catalogue", path=str(path), columns=named, weights=factors, density=others)
    part = f", part {ranks.rank + 1} of {ranks.size}" if ranks.size > 1 else ""
    problem, values, where = "", {}, f"{path}{part}: "
    try:
        values = read_columns(path, [*named, *factors, *others], ranks.rank, ranks.size)
        problem = _problem_on_sky({name: values[name] for name in named}, where)
        problem = problem or _problem({name: values[name] for name in [*factors, *others]}, where)
    except UnreadableError as error:
        problem = str(error)
    ranks.raise_together(problem, UserError)
    count = len(values[named[0]])
    weight = np.prod([values[name] for name in factors], axis=0) * np.ones(count)
    places = _positions([values[name] for name in named], cosmology)
    made = SurveyCatalogue(places, weight, None if density is None else values[density], ranks)
    if not made.total:
        raise UserError(f"{path} has no rows")
    return made


def _problem(arrays: dict[str, np.ndarray], where: str = "") -> str:
    """Returns what is wrong with the arrays of a catalogue, or an empty text."""
    count = len(next(iter(arrays.values()))) if arrays else 0
    for name, values in arrays.items():
        shape = (count, 3) if name == "positions" else (count,)
        if values.shape != shape:
            wanted = "[n, 3]" if name == "positions" else f"[{count}]"
            return f"{where}{name} has the shape {list(values.shape)}; must be {wanted}"
        if (place := not_finite(values)) is not None:
            return f"{where}{name} {values[*place]} of row {place[0]} is not finite"
        if name != "positions" and (values < 0).any():
            row = int(np.argmax(values < 0))
            return f"{where}{name} {values[row]:g} of row {row} must be at least 0"
    return ""


def _problem_on_sky(sky: dict[str, np.ndarray], where: str = "") -> str:
    """Returns what is wrong with right ascensions, declinations and redshifts, in this order."""
    (ra_name, ra), (dec_name, dec), (z_name, redshift) = sky.items()
    if not ra.shape == dec.shape == redshift.shape or ra.ndim != 1:
        shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in sky.items())
        return f"{where}the shapes {shapes} must be equal, [n]"
    for name, values in sky.items():
        if (place := not_finite(values)) is not None:
            return f"{where}{name} {values[*place]} of row {place[0]} is not finite"
    for name, angles, most in ((ra_name, ra, 360), (dec_name, dec, 90)):
        if (np.abs(angles) > most).any():
            row = int(np.argmax(np.abs(angles) > most))
            angle = f"{angles[row]:g} of row {row}"
            return f"{where}{name} {angle} must lie from -{most} to {most} degrees"
    if not (redshift > 0).all():
        row = int(np.argmax(redshift <= 0))
        return f"{where}{z_name} {redshift[row]:g} of row {row} must be a redshift above 0"
    return ""


def _positions(sky: Sequence[np.ndarray], cosmology: Universe) -> np.ndarray:
    """Returns comoving positions [n, 3] [Mpc/h] of right ascensions, declinations and redshifts."""
    ra, dec, redshift = sky
    theory = theory_of(cosmology)
    if not theory.background.is_flat:
        raise UserError(
            f"Omega_k = {float(theory.background.Omega_k):g}: places in curved space have no "
            "Cartesian coordinates; a flat cosmology is needed"
        )
    roots = (1 + redshift) ** -0.5
    nodes = np.linspace(roots.min(initial=0.5), 1, NODES)
    # chi is smooth in sqrt(a).
    chi = CubicSpline(nodes, np.asarray(theory.distances.comoving(nodes**2)))(roots)
    alpha, delta = np.radians(ra), np.radians(dec)
    across = np.cos(delta)
    directions = (across * np.cos(alpha), across * np.sin(alpha), np.sin(delta))
    return chi[:, np.newaxis] * np.stack(directions, axis=1)
