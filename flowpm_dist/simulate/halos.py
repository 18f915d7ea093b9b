"""The halos of a run's states: found, written as catalogues and tables, and drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowpm_dist.catalogues.abundance import MassFunction, mass_function
from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.clustering import TracerPower, tracer_power
from flowpm_dist.catalogues.finder import halos
from flowpm_dist.catalogues.occupation import populate
from flowpm_dist.catalogues.options import FinderOptions, HaloSection
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.grid.field import Field
from flowpm_dist.io.drawing import drawing
from flowpm_dist.simulate.folder import GALAXIES, HALOS
from flowpm_dist.simulation.state import State
from flowpm_dist.statistics.power import multipoles


@dataclass(frozen=True)
class FoundHalos:
    """The halos of a state, and what was measured of them.

    Attributes:
        catalogue: this rank's halos.
        abundance: by mass.
        power: their power and bias; None with fewer than two halos.
        galaxies: number of galaxies.
        galaxy_power: the power and bias of galaxies; None with fewer than two of them.
    """

    catalogue: Catalogue
    abundance: MassFunction
    power: TracerPower | None
    galaxies: int = 0
    galaxy_power: TracerPower | None = None


def write_halos(
    folder: Path,
    section: HaloSection,
    state: State,
    density: Field,
    warn: Callable[[str], None],
) -> FoundHalos:
    """Finds the halos of a state and their galaxies; writes catalogues and tables. On all ranks.

    Args:
        folder: folder of the state's results.
        section: the section [halos] of the run file.
        state: a single universe.
        density: its density.
        warn: shows a warning, where there are too few halos for a spectrum.

    Raises:
        WriteError: a file cannot be written. The job must end.
        ValueError: see `halos`.
    """
    options = {name: getattr(section, name) for name in FinderOptions.model_fields}
    catalogue = halos(state, **options)
    catalogue.write(folder / f"{HALOS}.{section.format}", section.format)
    abundance = mass_function(catalogue)
    if state.box.mesh.rank == 0:
        abundance.write_csv(folder / "halo_mass_function.csv")
    power = _write_power(folder / "halo_power.csv", catalogue, density, warn)
    if section.galaxies is None:
        return FoundHalos(catalogue, abundance, power)
    galaxies = populate(catalogue, section.galaxies)
    galaxies.write(folder / f"{GALAXIES}.{section.format}", section.format)
    of_galaxies = _write_power(folder / "galaxy_power.csv", galaxies, density, warn)
    if of_galaxies is not None:
        axis, noise = section.line_of_sight, galaxies.shot_noise()
        apparent = galaxies.density(state.box, redshift_space=axis)
        poles = multipoles(apparent, axis=axis, shot_noise=noise)
        if state.box.mesh.rank == 0:
            poles.write_csv(folder / "galaxy_multipoles.csv")
    return FoundHalos(catalogue, abundance, power, galaxies.total, of_galaxies)


def _write_power(
    path: Path, tracers: Catalogue, density: Field, warn: Callable[[str], None]
) -> TracerPower | None:
    """Writes the power and bias of objects; warns and returns None where there are too few."""
    if tracers.total < 2:
        warn(f"{tracers.total} {tracers.kind} at a = {tracers.a:.4g}: too few for their power")
        return None
    power = tracer_power(tracers, density)
    if tracers.mesh.rank == 0:
        power.write_csv(path)
    return power


def draw_halos(
    folder: Path,
    found: FoundHalos,
    slab: np.ndarray | None,
    thickness: float,
    theory: Theory,
    warn: Callable[[str], None],
) -> None:
    """Draws halos over the density, their abundance and their power. On all ranks.

    Args:
        folder: folder of the results.
        found: the halos.
        slab: the density of a slab below z = `thickness` on rank 0 [x, y]; None on the others.
        thickness: of the slab [Mpc/h].
        theory: of the universe.
        warn: shows a warning, about a figure that cannot be drawn.
    """
    catalogue = found.catalogue
    shown = catalogue.of(catalogue["position"][:, 2] < thickness).whole()
    if slab is None:
        return
    with drawing(folder / "halos.png", warn) as save:
        from flowpm_dist.catalogues.figures import halos_figure

        save(halos_figure(slab, thickness, shown))
    with drawing(folder / "halo_mass_function.png", warn) as save:
        from flowpm_dist.catalogues.figures import abundance_figure

        save(abundance_figure(found.abundance, theory, catalogue))
    for power, of, name in (
        (found.power, "halos", "halo_power.png"),
        (found.galaxy_power, "galaxies", "galaxy_power.png"),
    ):
        if power is not None:
            with drawing(folder / name, warn) as save:
                from flowpm_dist.catalogues.figures import tracer_figure

                save(tracer_figure(power, catalogue.a, of))
