"""The forward model of counts of galaxies in the halos of a universe."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.catalogues.finder import halos
from flowpm_dist.catalogues.occupation import check_occupation, populate
from flowpm_dist.catalogues.options import HOD, FinderOptions
from flowpm_dist.observables.forward_model import AMPLITUDE, ForwardModel
from flowpm_dist.observables.options import GalaxyOptions
from flowpm_dist.observables.tracers import ObservationError
from flowpm_dist.observables.universe_model import Parameters, StructureFormation
from flowpm_dist.options import MOST_SEED, constructed
from flowpm_dist.particle_mesh.scattered import paint_points
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State


class GalaxyModel(ForwardModel):
    """Counts of galaxies in cells, painted by cloud in cell; without a gradient.

    Args:
        simulation: see `UniverseModel`. Its universes have seeds.
        options: halos, galaxies and line of sight.

    Raises:
        ObservationError: a custom structure without particles, or with a density of its own.
        UserError: a module has no such occupation.
    """

    def __init__(self, simulation: Simulation, options: GalaxyOptions) -> None:
        super().__init__(simulation, options.structure, redshift_space=options.redshift_space)
        if not self.formation.has_particles:
            raise ObservationError(
                f"observation.structure = {options.structure}: has no particles to find halos in"
            )
        if type(self.formation).density is not StructureFormation.density:
            raise ObservationError(
                f"observation.structure = {options.structure}: overrides `density`, but halos are "
                "found in the particles: override `state`"
            )
        check_occupation(options.galaxies, "observation.galaxies")
        self._options = options

    @override
    def fitted(self, name: str) -> bool:
        return name in self._options.tracer_values or (name != AMPLITUDE and super().fitted(name))

    @override
    def observe(self, state: State, parameters: Parameters) -> tf.Tensor:
        """Returns this rank's block of the number of galaxies in each cell [..., x, y, z].

        On all ranks that share a universe together.

        Args:
            state: a universe or a batch, made from seeds.
            parameters: of the halo occupation, in the place of those in the options: float64 [...]
                of all universes.

        Raises:
            ValueError: a linking length spans a rank's block, numbers that a halo occupation cannot
                have, or universes without seeds.
        """
        finder = {name: getattr(self._options.halos, name) for name in FinderOptions.model_fields}
        varied = self._options.tracer_values.keys() & parameters.keys()
        values = {name: np.atleast_1d(parameters[name]) for name in varied}
        blocks: list[np.ndarray] = []
        for number, universe in enumerate(state.universes()):
            row = state.box.batch_offset + number
            own = {name: float(of_all[row]) for name, of_all in values.items()}
            if (seed := universe.header()["seed"]) is None:
                raise ValueError(
                    "galaxies are drawn by the seeds of universes: run them from seeds"
                )
            table = self._options.galaxies.model_dump(exclude_none=True) | own
            table["seed"] = (table["seed"] + seed) % (MOST_SEED + 1)
            galaxies = populate(halos(universe, **finder), constructed(HOD, table))
            axis = self.axis
            places = galaxies["position"] if axis is None else galaxies.apparent_positions(axis)
            blocks.append(paint_points(universe.box, places))
        counts = np.stack(blocks) if state.box.batch is not None else blocks[0]
        return tf.constant(counts, state.box.dtype)
