"""Snapshots of particles for other codes: what their formats share, and the writing of one.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmology.parameters import HEADERS
from flowpm_dist.io.particle_formats import PARTICLE_FORMATS
from flowpm_dist.io.particles import Header, ParticleBlock, mark_particles_complete, write_error

if TYPE_CHECKING:
    from flowpm_dist.grid.field import Field

UNITS = {
    "UnitLength_in_cm": 3.085678e24,
    "UnitMass_in_g": 1.989e43,
    "UnitVelocity_in_cm_per_s": 1.0e5,
}
"""Mpc, 1e10 solar masses and km/s in cgs units."""
TYPES, DARK_MATTER = 6, 1
"""The number of types of particles, and the type of ours."""
NAMES = ("ParticleIDs", "Coordinates", "Velocities")
"""The data sets of a Gadget-4 file."""


def header_facts(header: Header) -> dict[str, Any]:
    """Returns box size, dark energy and those parameters that have an effect.

    Names are Gadget's and MP-Gadget's; ours where they have none, as for neutrinos.
    """
    parameters = {
        theirs: header.cosmology[ours]
        for ours, theirs in HEADERS.items()
        if ours in header.cosmology
    }
    return {"BoxSize": header.length, "OmegaLambda": header.Omega_de, **parameters}


def of_type(value: float, dtype: type) -> np.ndarray:
    """Returns an array over the types of particles: `value` for ours, 0 for the others."""
    return np.where(np.arange(TYPES) == DARK_MATTER, value, 0).astype(dtype)


def writer_of(format: str) -> Any:
    """Returns the module that writes a format, see `particle_formats`."""
    return importlib.import_module(PARTICLE_FORMATS[format].module)


def write_particles(
    path: Path, fields: Mapping[str, Field], attributes: Mapping[str, Any], format: str
) -> None:
    """Writes a snapshot of particles: each rank writes a part, and all ranks call it together.

    Args:
        path: the folder to make.
        fields: displacement and velocity.
        attributes: the snapshot's attributes.
        format: see `PARTICLE_FORMATS`.

    Raises:
        WriteError: this rank cannot write. Only this rank raises it, and the job must end.
    """
    displacement, velocity = fields["displacement"], fields["velocity"]
    box, writer = displacement.box, writer_of(format)
    header = Header.of(attributes)
    mesh, x, v = box.mesh, np.asarray(displacement.block), np.asarray(velocity.block)
    block = ParticleBlock(x, v, box.offset, 0, box.block[0], path)
    try:
        if mesh.rank == 0:
            path.mkdir(parents=True)
        mesh.barrier()
        parts = mesh.gather_to_root(writer.write_part(path, mesh.rank, mesh.size, block, header))
        if parts is not None:
            writer.finish(path, parts, header)
            mark_particles_complete(path, attributes)
    except OSError as error:
        raise write_error(path, error) from error
