"""The forward model of counts of galaxies in the halos of a universe."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.catalogues.finder import halos
from flowpm_dist.catalogues.occupation import check_occupation, populate
from flowpm_dist.catalogues.options import HOD, FinderOptions
from flowpm_dist.observables.forward_model import AMPLITUDE, ForwardModel
from flowpm_dist.observables.tracers import LineOfSight, ObservationError
from flowpm_dist.observables.universe_model import Parameters, StructureFormation
from flowpm_dist.options import MOST_SEED, constructed
from flowpm_dist.particle_mesh.scattered import paint_points
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State


class GalaxyModel(ForwardModel):
    """Counts of galaxies in cells, painted by cloud in cell; without a gradient.

    Args:
        simulation: see `UniverseModel`. Its universes have seeds.
        structure: see `CellOptions`; or a `StructureFormation` itself.
        finder: the options of the halo finder.
        hod: the halo occupation. Its seed is added to the seed of each universe.
        redshift_space: the line of sight "x", "y" or "z", or None.

    Raises:
        ObservationError: a custom structure without particles, or with a density of its own.
        UserError: a module has no such occupation.
    """

    def __init__(
        self,
        simulation: Simulation,
        structure: str | StructureFormation,
        finder: FinderOptions,
        hod: HOD,
        redshift_space: LineOfSight | None,
    ) -> None:
        super().__init__(simulation, structure, redshift_space=redshift_space)
        if not self.formation.has_particles:
            raise ObservationError(
                f"observation.structure = {structure}: has no particles to find halos in"
            )
        if type(self.formation).density is not StructureFormation.density:
            raise ObservationError(
                f"observation.structure = {structure}: overrides `density`, but halos are found in "
                "the particles: override `state`"
            )
        check_occupation(hod, "observation.galaxies")
        self._finder = {name: getattr(finder, name) for name in FinderOptions.model_fields}
        self._hod = hod.model_dump(exclude_none=True)

    @override
    def fitted(self, name: str) -> bool:
        if name in (AMPLITUDE, "seed"):
            return False
        return name in self._hod or super().fitted(name)

    @override
    def observe(self, state: State, parameters: Parameters) -> tf.Tensor:
        """Returns this rank's block of the number of galaxies in each cell [..., x, y, z].

        On all ranks that share a universe together.

        Args:
            state: a universe or a batch, made from seeds.
            parameters: the halo occupation's, which replace the numbers of `hod`: float64 [...] of
                all universes.

        Raises:
            ValueError: a linking length spans a rank's block, numbers that a halo occupation cannot
                have, or universes without seeds.
        """
        varied = {name: np.atleast_1d(parameters[name]) for name in self._hod if name in parameters}
        blocks: list[np.ndarray] = []
        for number, universe in enumerate(state.universes()):
            row = state.box.batch_offset + number
            table = self._hod | {name: float(values[row]) for name, values in varied.items()}
            if (seed := universe.header()["seed"]) is None:
                raise ValueError(
                    "galaxies are drawn by the seeds of universes: run them from seeds"
                )
            table["seed"] = (table["seed"] + seed) % (MOST_SEED + 1)
            galaxies = populate(halos(universe, **self._finder), constructed(HOD, table))
            axis = self.axis
            places = galaxies["position"] if axis is None else galaxies.apparent_positions(axis)
            blocks.append(paint_points(universe.box, places))
        counts = np.stack(blocks) if state.box.batch is not None else blocks[0]
        return tf.constant(counts, state.box.dtype)
