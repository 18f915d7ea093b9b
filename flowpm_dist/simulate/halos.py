"""The halos of a run's states: found, written as catalogues and tables, and drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowpm_dist.catalogues.abundance import MassFunction, mass_function
from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.clustering import TracerPower, tracer_power
from flowpm_dist.catalogues.figures import abundance_figure, halos_figure, tracer_figure
from flowpm_dist.catalogues.finder import halos
from flowpm_dist.catalogues.options import FinderOptions, HaloSection
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.grid.field import Field
from flowpm_dist.io.drawing import drawing
from flowpm_dist.simulate.folder import HALOS
from flowpm_dist.simulation.state import State


@dataclass(frozen=True)
class FoundHalos:
    """The halos of a state, and what was measured of them.

    Attributes:
        catalogue: this rank's halos.
        abundance: by mass.
        power: their power and bias; None with fewer than two halos.
    """

    catalogue: Catalogue
    abundance: MassFunction
    power: TracerPower | None


def write_halos(
    folder: Path,
    section: HaloSection,
    state: State,
    density: Field,
    warn: Callable[[str], None],
) -> FoundHalos:
    """Finds the halos of a state, and writes their catalogue and tables. On all ranks.

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
    abundance, power = mass_function(catalogue), None
    if catalogue.total > 1:
        power = tracer_power(catalogue, density)
    else:
        warn(f"{catalogue.total} halos at a = {state.a:.4g}: too few for their power")
    if state.box.mesh.rank == 0:
        abundance.write_csv(folder / "halo_mass_function.csv")
        if power is not None:
            power.write_csv(folder / "halo_power.csv")
    return FoundHalos(catalogue, abundance, power)


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
        save(halos_figure(slab, thickness, shown))
    with drawing(folder / "halo_mass_function.png", warn) as save:
        save(abundance_figure(found.abundance, theory, catalogue))
    if found.power is not None:
        with drawing(folder / "halo_power.png", warn) as save:
            save(tracer_figure(found.power, catalogue.a))
