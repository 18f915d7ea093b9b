"""The plan of a training, as one plain object without TensorFlow and run files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tomli_w

from flowpm_dist.cosmoflow.planning.declarations import Declaration, declaration
from flowpm_dist.cosmoflow.planning.options import (
    DataOptions,
    NetworkOptions,
    PriorOptions,
    TrainingOptions,
)
from flowpm_dist.cosmology.ranges import VARIABLE
from flowpm_dist.jobs.light_cone import ConvergenceOptions
from flowpm_dist.observables.record import ObservationRecord
from flowpm_dist.simulation.plan import SimulationPlan

WARMUP = 100
"""Steps of the warm-up, unless that is more than a tenth of all."""

OF_UNIVERSES = ("box", "cosmology", "priors", "initial", "evolution", "observation", "lightcone")
"""Settings that say what is simulated."""


@dataclass(frozen=True)
class TrainingPlan:
    """A training: its universes, its network, and how the network learns.

    Attributes:
        simulation: how volumes are simulated; its box is that of the volumes, also of those that
            are read from files.
        fixed_parameters: arguments of `Cosmology` that are the same in all universes.
        priors: of the parameters that vary.
        network: the options of the network.
        training: the options of the optimiser, the schedule and the checkpoints.
        data: where volumes come from.
        mesh: the shape of the ranks, such as "replica:2,row:2"; None where it is chosen later.
        observation: what is seen of the universes; None for files that do not tell it.
        lightcone: the maps of weak lensing that are seen, with their noise; None for volumes.
        settings: section -> key -> value of everything that the run depends on, with defaults;
            written beside the results, and compared between trainings.
    """

    simulation: SimulationPlan
    fixed_parameters: Mapping[str, Any]
    priors: PriorOptions
    network: NetworkOptions
    training: TrainingOptions
    data: DataOptions
    mesh: str | None
    settings: Mapping[str, Mapping[str, Any]]
    observation: ObservationRecord | None = None
    lightcone: ConvergenceOptions | None = None

    @property
    def grid(self) -> tuple[int, int, int]:
        """Cells along each side of the box."""
        return self.simulation.box.grid

    @property
    def box_size(self) -> tuple[float, float, float]:
        """Sides of the box [Mpc/h]."""
        return self.simulation.box.size

    @property
    def seen(self) -> tuple[int, int, int]:
        """Cells along each side of what the network sees: a volume, or maps as one layer of it."""
        if self.lightcone is None:
            return self.grid
        return self.lightcone.pixels, self.lightcone.pixels, 1

    @property
    def width(self) -> int:
        """Cells along a side of a volume, which is a cube, or of maps."""
        return self.seen[0]

    @property
    def cells(self) -> int:
        """Cells of what the network sees."""
        return math.prod(self.seen)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of what the network finds, in the order of its outputs."""
        return self.data.parameters or tuple(self.priors.ranges)

    @property
    def middle(self) -> dict[str, Any]:
        """Arguments of `Cosmology` of the universe in the middle of the priors."""
        drawn = self.priors.drawn.items()
        varied = {name: sum(ends) / 2 for name, ends in drawn if name in VARIABLE}
        return {**self.fixed_parameters, **varied}

    @property
    def channels(self) -> int:
        """Values of a cell: one for each redshift, or source of lensing.

        Files that tell no observation may have more.
        """
        if self.lightcone is not None:
            return len(self.lightcone.sources)
        return 1 if self.observation is None else self.observation.options.channels

    @property
    def outputs(self) -> int:
        """Number of the network's outputs: a likelihood adds an error bar for each parameter."""
        return len(self.parameters) * (2 if self.network.loss == "likelihood" else 1)

    @property
    def declaration(self) -> Declaration:
        """The layers of the network."""
        return declaration(self.network.name)

    @property
    def total_steps(self) -> int:
        """The number of updates in the whole training."""
        return self.training.steps

    def is_due(self, number: int, every: int) -> bool:
        """Returns whether what is done every so many steps is done after so many.

        Of rates by epochs, as many steps as there are whole ones in an epoch stand for the epoch:
        it is done at the end of each, also where the batch does not divide the samples.

        Args:
            number: of the steps made.
            every: how many.
        """
        steps, epochs = self.total_steps, self.training.epochs
        if self.training.decay == "epochs" and epochs and every == max(1, steps // epochs):
            return number * epochs // steps != (number - 1) * epochs // steps
        return number % every == 0

    @property
    def simulates(self) -> bool:
        """Whether volumes are simulated while the network learns."""
        return self.data.source == "simulate"

    def with_mesh(self, shape: str) -> TrainingPlan:
        """Returns the same training on a mesh of another shape."""
        return replace(self, mesh=shape, settings={**self.settings, "mesh": {"shape": shape}})

    def resolved(self) -> str:
        """Returns the settings as the text of a run file (TOML)."""
        return tomli_w.dumps(self.settings)

    def held_out(self, split: str) -> int:
        """Returns how many universes are simulated to be held out: whole batches of the training.

        Args:
            split: "validation" or "test".
        """
        return -(-getattr(self.data, split) // self.training.batch) * self.training.batch

    def universes(self) -> dict[str, Any]:
        """Returns all settings that simulated volumes depend on."""
        found: dict[str, Any] = {section: self.settings.get(section) for section in OF_UNIVERSES}
        precision = self.simulation.run.precision
        return {**found, "data.seed": self.data.seed, "precision of the simulation": precision}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names of the settings that differ between two nested tables."""
    found = []
    for key in dict.fromkeys([*one, *other]):
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += [f"{key}.{name}" for name in differences(a, b)]
        elif a != b:
            found.append(key)
    return found
