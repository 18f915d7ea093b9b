"""A universe at one scale factor, or a batch of them."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.steps import SAME
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.evolution.corrections import StateCorrection, force_cell
from flowpm_dist.evolution.plan import Particles
from flowpm_dist.grid.box import Box, check_same_box
from flowpm_dist.grid.decomposition import default_mesh, usual_halo
from flowpm_dist.grid.field import Field, project
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.io.files import reading
from flowpm_dist.io.other_codes import particle_files
from flowpm_dist.io.particles import HUBBLE
from flowpm_dist.io.snapshot import (
    DEFAULT_FIELDS,
    FIELDS,
    VECTORS,
    Snapshot,
    SnapshotError,
    check_particles,
    load_snapshot,
    save_fields,
)
from flowpm_dist.options import constructed, in_unit
from flowpm_dist.options.html import as_html
from flowpm_dist.particle_mesh.options import ForceOptions
from flowpm_dist.particle_mesh.positions import positions, redshift_space
from flowpm_dist.simulation.compiled_solver import CompiledSolver
from flowpm_dist.simulation.options import SolverOptions
from flowpm_dist.simulation.run import (
    Inputs,
    WhiteNoiseSource,
)
from flowpm_dist.simulation.universes import LocalCosmologies, TheoryOf
from meshimpl import launch
from meshimpl.mesh_function import replicated
from meshimpl.process_mesh import MeshShape, ProcessMesh

Axis = Literal["x", "y", "z"]
AXES = get_args(Axis)
MOST_PICTURED = 128**3
"""Largest number of particles of which a notebook shows a picture."""


@dataclass(frozen=True, eq=False, repr=False)
class State:
    """A universe at one scale factor, or a batch of them.

    A state does not need its simulation: it can be pickled (each rank its own part), written to a
    snapshot and read back. If a state has a theory of its own, its pickle stores only the name of
    what made it. If a state was read from a snapshot, its pickle holds this rank's part of it.

    Attributes:
        displacement: comoving, from the Lagrangian lattice [Mpc/h].
        velocity: canonical, a^2 dx/dt [Mpc/h H0].
        a: scale factor [1].
        timings: "phases" {name: [seconds per step]}, "steps" [seconds], and the seconds of
            "compile" (of a kick), "initial", "evolution" and "total" (without "compile").
            "ns_per_particle_per_step" is the evolution's, over all particles. Empty where no step
            was made here.
    """

    displacement: Field
    velocity: Field
    a: float
    _inputs: Inputs
    timings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        particles: Particles,
        inputs: Inputs,
        a: float,
        timings: Mapping[str, Any] | None = None,
    ) -> State:
        """Returns the state of particles at scale factor `a`.

        Args:
            particles: displacement and canonical velocity.
            inputs: the run's inputs.
            a: scale factor.
            timings: the timings of the run, see `State`.
        """
        box = inputs.box
        displacement, velocity = Field(particles.displacement, box), Field(particles.velocity, box)
        # A copy, which does not keep the lowered functions.
        return cls(displacement, velocity, a, replace(inputs), timings or {})

    @classmethod
    def leaving(
        cls,
        particles: Particles,
        inputs: Inputs,
        a: float,
        timings: Mapping[str, Any] | None = None,
    ) -> State:
        """Returns the state at the end of a run, after the run's correction of states."""
        state, correction = cls.of(particles, inputs, a, timings), inputs.options.state_correction
        return state if correction is None else state.corrected(correction)

    @classmethod
    def from_snapshot(
        cls,
        path: str | Path,
        *,
        mesh: ProcessMesh | MeshShape | None = None,
        cosmology: Cosmology | None = None,
        theory: TheoryOf = Theory,
        units: Mapping[str, Any] | None = None,
    ) -> State:
        """Returns the state that a snapshot holds, in the precision it was written in.

        The state has the halo of its run, and the options for initial conditions and force. A
        snapshot does not hold integrator and adjoint of the simulation, which do not affect what a
        state measures, nor a theory of its own: give it again. If the snapshot has only the seed,
        white noise and linear field are computed again from it.

        Snapshots of other codes are read if their particles number a lattice: by ids from 0 or 1,
        or by their order, by rows, by columns, or in tiles as N-GenIC and 2LPTic write. The
        formats are bigfile, HDF5 of Gadget, AREPO and SWIFT, and binary files of Gadget.

        Args:
            path: `snapshot.zarr`, or the folder that holds it; or files of another code: the
                folder, a file, one of several files, or their common name without the number.
            mesh: the ranks; by default chosen from their number. It need not be the mesh that wrote
                the snapshot.
            cosmology: the cosmology of another code's files, which lack some parameters; those that
                the files hold, such as Omega_m, must be equal.
            theory: what makes the theory of the cosmology, as for `Simulation`.
            units: the units of another code's files that do not name theirs, such as
                `{"UnitLength_in_cm": 3.085678e24, "UnitVelocity_in_cm_per_s": 1e5}` for Mpc/h and
                km/s. For initial conditions of SWIFT it is `{"HubbleParam": h}`.

        Raises:
            SnapshotError: there is no complete snapshot, it lacks the particles, or files of
                another code do not fit a lattice or the cosmology.
            ValueError: the mesh does not divide the grid.
        """
        files = particle_files(path, units)
        if files is not None:
            snapshot, dtype = Snapshot({}, files.attributes(cosmology)), files.dtype
        else:
            snapshot = _complete_snapshot(path, units, cosmology)
            dtype = snapshot.array("displacement").dtype
        about = snapshot.attributes
        nx, ny, nz = (int(n) for n in about["grid"])
        lx, ly, lz = (float(length) for length in about["box_size"])
        if mesh is None:
            halo = usual_halo((nx, ny, nz), (lx, ly, lz))  # as for a run to a = 1
            mesh = default_mesh(launch.detect().size, (nx, ny, nz), halo=halo)
        if not isinstance(mesh, ProcessMesh):
            mesh = ProcessMesh(mesh)
        precision = np.dtype(dtype).name
        box = Box((nx, ny, nz), (lx, ly, lz), mesh, tf.as_dtype(precision))
        blocks = (
            [snapshot.values(name, box.place) for name in VECTORS]
            if files is None
            else files.blocks(box)
        )
        particles = Particles(*(tf.convert_to_tensor(b.astype(precision)) for b in blocks))
        local = LocalCosmologies.of([Cosmology(**about["cosmology"])], False, theory)
        with reading(Path(path), raises=SnapshotError):
            solver = {**about.get("options", {}), "precision": precision}
            options = constructed(SolverOptions, solver)
        halo = int(about.get("halo", 1))
        _warn_of_other_theory(path, local.theories[0], about.get("Omega_de"))
        a, source = float(about["a"]), WhiteNoiseSource.of_snapshot(snapshot)
        return cls.of(particles, Inputs(box, options, np.array([a]), local, source, halo), a)

    def corrected(self, correction: StateCorrection) -> State:
        """Returns the state with its particles moved by a correction of states; differentiable.

        Runs do this to the states that leave them. By the derivative of a state with respect to
        the numbers of the correction each rank receives the complete gradient.

        Args:
            correction: the correction; its range is not checked.
        """
        box, local = self.box, self._inputs.cosmologies
        cell = force_cell(box.size, box.grid)
        style = local.of_powers(lambda theory: correction.style(theory.power, cell, self.a))
        theta = replicated(box.mesh, as_float64(correction.theta))
        fields = [self.displacement.block, self.velocity.block]
        moved = correction.moved(theta, local.stack(style), fields, box)
        displacement, velocity = (Field(block, box) for block in moved)
        return replace(self, displacement=displacement, velocity=velocity)

    def save(
        self,
        folder: str | Path,
        attributes: Mapping[str, Any] | None = None,
        *,
        format: str = "zarr",
        fields: Sequence[str] | None = None,
    ) -> Path:
        """Writes a new snapshot; each rank writes its part. All ranks must call this together.

        Args:
            folder: the folder of the new snapshot, on a file system that all ranks see.
            attributes: additional attributes of the snapshot.
            format: "zarr" (`snapshot.zarr`); or, for other codes, particles as "gadget-hdf5"
                (`snapshot.gadget`) or "bigfile" (`snapshot.bigfile`).
            fields: names of the fields to write to a zarr snapshot, see `fields`.

        Returns:
            The path of the snapshot.

        Raises:
            FileExistsError: there is such a snapshot in the folder. Raised on every rank.
            ValueError: a batch of universes, an unknown format or field, or fields with a format
                of particles.
            WriteError: raised only on a rank that cannot write; the job must then end.
        """
        if self.box.batch is not None:
            raise ValueError("a batch of universes cannot be saved as one snapshot")
        if format != "zarr":
            if fields is not None:
                raise ValueError(f"fields: {format} holds the particles alone; fields go with zarr")
            fields = VECTORS
        about = {**self.header(), **(attributes or {})}
        return save_fields(Path(folder), self.fields(fields or DEFAULT_FIELDS), about, format)

    def fields(self, names: Sequence[str] = DEFAULT_FIELDS) -> dict[str, Field]:
        """Returns fields, under the names that they have in snapshots.

        Args:
            names: any of "displacement", "velocity", "density", "white_noise" and "linear_delta".

        Raises:
            ValueError: an unknown name, or white noise that is not known.
        """
        for name in names:
            if name not in FIELDS:
                raise ValueError(f"field {name!r}: must be one of {', '.join(map(repr, FIELDS))}")
        return {n: self.density() if n == "density" else getattr(self, n) for n in names}

    def header(self) -> dict[str, Any]:
        """Returns the attributes of a snapshot of this state, as JSON takes them."""
        source, options = self._inputs.source, self._inputs.options
        correction = options.correction
        return {
            "a": self.a,
            "box_size": list(self.box.size),
            "box_size_units": "Mpc/h",
            "grid": list(self.box.grid),
            "cosmology": self.cosmology.numbers(),
            "Omega_de": float(self._inputs.cosmologies.theories[0].background.Omega_de),
            "seed": source.seed,
            "paired": source.paired,
            "halo": self.halo,
            "correction": None if correction is None else correction.name,
            "options": {
                **options.part(InitialOptions).model_dump(),
                **options.part(ForceOptions).model_dump(),
            },
        }

    def universes(self) -> Iterator[State]:
        """Yields the universes of a batch that are this rank's, each as a state; differentiable.

        They are on the ranks that share a universe, `mesh.without("replica")`. A single universe is
        the only one.
        """
        box, inputs = self.box, self._inputs
        if box.batch is None:
            yield self
            return
        one = replace(box, mesh=box.mesh.without("replica"), batch=None)
        for number, theory in enumerate(inputs.cosmologies.theories):
            local = replace(inputs.cosmologies, theories=(theory,), batched=False)
            source = inputs.source.of_universe(number, box)
            vectors = (field.block[number] for field in (self.displacement, self.velocity))
            its_inputs = replace(inputs, box=one, cosmologies=local, source=source)
            yield State.of(Particles(*vectors), its_inputs, self.a)

    def particles_for(self, a: float, box: Box, cosmology: Cosmology | None) -> tuple[Field, Field]:
        """Returns displacement and velocity, for a run that begins at scale factor `a`.

        They keep their layout; a run on another mesh of the same ranks moves them, see `Field.on`.

        Args:
            a: scale factor.
            box: the run's box; its grid and size must be the state's.
            cosmology: the cosmology that the run assumes; None if the run is given one explicitly.

        Raises:
            ValueError: the state has another scale factor, grid, box size or cosmology.
        """
        for simulated in self._inputs.cosmologies.cosmologies:
            if cosmology is not None and simulated.numbers() != cosmology.numbers():
                raise ValueError(
                    f"the particles are of {simulated}, the simulation is of "
                    f"{cosmology}: give run(cosmology=...) as well if that is meant"
                )
        if (self.box.grid, self.box.size) != (box.grid, box.size):
            raise ValueError(
                f"the particles are of grid {self.box.grid} in a box of {self.box.size} Mpc/h, "
                f"the simulation is of grid {box.grid} in one of {box.size} Mpc/h"
            )
        if abs(self.a - a) > SAME * a:
            raise ValueError(
                f"the particles are at a = {self.a:.10g}, the first step begins at {a:.10g}"
            )
        return self.displacement, self.velocity

    def __reduce__(self) -> tuple[Any, ...]:
        inputs = self._inputs
        return _unpickled, (
            (self.displacement.block.numpy(), self.velocity.block.numpy()),
            replace(inputs, source=inputs.source.without_snapshot(self.box)),
            self.a,
            dict(self.timings),
        )

    def __repr__(self) -> str:
        return f"State(a = {self.a:.6g}, {self.box})"

    def _repr_html_(self) -> str:
        return as_html(self, self._facts, self._picture)

    def _facts(self) -> dict[str, object]:
        cells = _slab(self.box)
        about = self._without_picture() or f"a slab of {cells * self.box.cell[2]:.3g} Mpc/h"
        source = self._inputs.source
        return {
            "scale factor": f"{self.a:.6g}",
            "redshift": f"{1 / self.a - 1:.4g}" if self.a else "infinite",
            **self.box.facts(),
            "halo": self.halo,
            **({} if source.seeds is None else {"seed": _texts(source.seeds)}),
            "cosmology": ", ".join(f"{n} = {text}" for n, text in self.cosmology.facts().items()),
            "picture": about,
        }

    def _without_picture(self) -> str:
        """Returns why a notebook shows no picture of the density; an empty text if it shows one."""
        if self.box.mesh.size > 1:  # ranks would have to draw it together
            return "none on several ranks: project(state.density(), ...) of flowpm_dist.grid.field"
        if self.box.batch is not None:
            return "none of a batch"
        return "" if self.box.cells <= MOST_PICTURED else "none of more than 128^3 particles"

    def _picture(self) -> bytes | None:
        from flowpm_dist.io.figures import density_picture

        slab = None if self._without_picture() else project(self.density(), _slab(self.box))
        return None if slab is None else density_picture(slab)

    def __copy__(self) -> State:
        return replace(self)

    def __deepcopy__(self, memo: Any) -> State:
        return replace(self)  # nothing of it changes

    @property
    def box(self) -> Box:
        """Grid, size, ranks and batch."""
        return self.displacement.box

    @property
    def cosmology(self) -> Cosmology:
        """The cosmology of the universe; in a batch, of this rank's first universe."""
        return self._inputs.cosmologies.cosmologies[0]

    @property
    def halo(self) -> int:
        """The halo of the run [particle spacings]; for LPT, the halo that a run would have had."""
        return self._inputs.halo

    @property
    def _solver(self) -> CompiledSolver:
        return self._inputs.solver

    @functools.cached_property
    def white_noise(self) -> Field:
        """The unit normal noise that the universe came from; drawn again from the seed.

        Raises:
            ValueError: it came from given particles.
        """
        return Field(self._inputs.white_noise(), self.box)

    @functools.cached_property
    def linear_delta(self) -> Field:
        """Linear overdensity of the initial conditions, extrapolated to a = 1 [1].

        Raises:
            ValueError: as for `white_noise`.
        """
        linear = self._inputs.source.held("linear_delta", self.box)
        if linear is None:
            local = self._inputs.cosmologies
            linear = self._solver.linear_delta(self.white_noise.block, local)
        return Field(linear, self.box)

    def positions(self, wrap: bool = True, *, redshift_space: Axis | None = None) -> Field:
        """Returns the comoving positions of the particles [Mpc/h], differentiable.

        Args:
            wrap: whether to move positions into the periodic box, 0 <= x < side. Otherwise a
                position is the lattice site plus the displacement, and may lie outside the box.
            redshift_space: the line of sight, along which peculiar velocities move the particles.

        Returns:
            A vector field on the particle lattice, whose sites are at whole multiples of
            `box.cell`. The value at a site is the present position of the particle that started
            there.
        """
        displacement = self._displacement_to(redshift_space).block
        return Field(positions(displacement, self.box, wrap=wrap), self.box)

    def peculiar_velocity(self) -> Field:
        """Returns the peculiar velocity of the particles, v = a dx/dt [km/s], differentiable.

        The canonical velocity is p = a^2 dx/dt [Mpc/h H0], so v = p / a, and 1 Mpc/h H0 is 100
        km/s. At a = 0, where p falls as a^(3/2), it is 0.
        """
        return self.velocity * (HUBBLE / self.a if self.a else 0.0)

    def density(
        self,
        mesh_factor: float = 1,
        *,
        redshift_space: Axis | None = None,
        shift: float = 0.0,
        weights: Field | tf.Tensor | None = None,
    ) -> Field:
        """Returns the cloud-in-cell density, mean 1; `density().delta()` is the overdensity.

        The field knows its window, which spectra divide out.

        Args:
            mesh_factor: mesh cells per particle spacing, at least 1; not only whole numbers, see
                `Box.finer`.
            redshift_space: the line of sight, along which peculiar velocities move the particles.
            shift: how far all particles are moved along each axis [mesh cells]; use 0.5 for the
                second density of an interlaced spectrum.
            weights: the particles' weights: a scalar field on the state's box, or this rank's block
                [..., x, y, z] of it. The mean density is then the mean weight.

        Raises:
            ValueError: an argument out of its range, or weights of another box.
        """
        mesh_factor, shift = in_unit("mesh_factor", mesh_factor), in_unit("shift", shift)
        weights = in_unit("weights", weights)
        arguments = {"mesh_factor": mesh_factor, "redshift_space": redshift_space, "shift": shift}
        self.box.check_equal("a density", weighted=weights is not None, **arguments)
        box = self.box.finer(mesh_factor)
        displacement = self._displacement_to(redshift_space).block
        if isinstance(weights, Field):
            check_same_box(self.box, weights.box, "the particles and their weights")
            weights = weights.block
        if shift:
            displacement += tf.constant([shift * cell for cell in box.cell], box.dtype)
        label = f"density, a = {self.a:.4g}"
        density = self._solver.density(
            displacement, weights, halo=self.halo, mesh_factor=mesh_factor, label=label
        )
        return Field(density, box, "cic")

    @property
    def linear_growth(self) -> tf.Tensor:
        """D1(a) / D1(1), of each universe of this rank, float64 [...].

        Raises:
            ValueError: growth depends on the wavenumber, and a is not 1.
        """
        local = self._inputs.cosmologies
        if local.by_scale and self.a != 1:
            raise ValueError("m_nu: linear fields before a = 1 have another growth at each scale")
        return local.stack(
            local.of_growths(lambda theory: theory.growth.d1(self.a) / theory.growth.d1(1.0))
        )

    def redshift_space(self, axis: Axis) -> Field:
        """Returns the displacement to where a distant observer places the particles [Mpc/h].

        Args:
            axis: the line of sight.

        Raises:
            ValueError: an unknown axis.
        """
        if axis not in AXES:
            raise ValueError(f"redshift_space {axis!r} is not one of {', '.join(AXES)}")
        if not self.a:  # where velocities move nothing
            return self.displacement
        local = self._inputs.cosmologies
        rate = local.stack(local.of_growths(lambda theory: theory.background.e(self.a)))
        moved = redshift_space(self.displacement.block, self.velocity.block, self.a, rate, axis)
        return Field(moved, self.box)

    def _displacement_to(self, axis: Axis | None) -> Field:
        """Returns the displacement, to redshift space if there is a line of sight."""
        return self.displacement if axis is None else self.redshift_space(axis)


def _complete_snapshot(
    path: str | Path, units: Mapping[str, Any] | None, cosmology: Cosmology | None
) -> Snapshot:
    """Returns a snapshot of this package, which holds the particles, units and cosmology."""
    if not os.path.lexists(path):
        raise SnapshotError(f"{path}: there is no such file or folder")
    snapshot = load_snapshot(path)
    check_particles(path, snapshot)
    if units is not None:
        raise SnapshotError(f"{path} is in units of its own: leave units out")
    if cosmology is not None:
        raise SnapshotError(f"{path} holds its cosmology: leave cosmology out")
    return snapshot


def _warn_of_other_theory(path: str | Path, theory: Theory, recorded: float | None) -> None:
    rest = float(theory.background.Omega_de)
    if recorded is not None and abs(rest - recorded) > 1e-9:
        warnings.warn(
            f"{path} holds a universe with Omega_de = {recorded:g}, the theory has {rest:g}: "
            "give State.from_snapshot(..., theory=) the theory of its simulation",
            stacklevel=3,
        )


def _texts(seeds: Any) -> str:
    return ", ".join(str(seed) for seed in np.ravel(seeds))


def _slab(box: Box) -> int:
    """Returns the number of layers of z in the picture of a state."""
    return max(1, box.grid[2] // 8)


def _unpickled(
    particles: tuple[np.ndarray, np.ndarray], inputs: Inputs, a: float, timings: dict[str, Any]
) -> State:
    return State.of(Particles(*map(tf.constant, particles)), inputs, a, timings)
