"""The options of learning a correction. Nothing here imports TensorFlow."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from flowpm_dist.evolution.corrections import Correction, StateCorrection
from flowpm_dist.options import A_SEED, Options, Seed, count

OF_FORCE = {"rate": 0.01, "displacement": 0.0, "histogram": 0.0, "redshift_space": 0.0}
"""Defaults for a correction of the force."""
OF_STATES = {"rate": 0.005, "displacement": 0.003, "histogram": 0.2, "redshift_space": 0.1}
"""Defaults for a correction of states."""
FINER = 2
"""Cells of the mesh on which densities are compared, per particle spacing."""
SPACING = "spacing [Mpc/h]"
"""The name of the spacing of the particles in scores."""


class LearningOptions(Options):
    """The options of `Learner`.

    Attributes:
        structure: the cheap universes: runs of the particle mesh, or Lagrangian perturbation
            theory of order 2 without any step, for a network.
        iterations: the number of steps of Adam; each uses one universe.
        rate: its first learning rate, which falls to 0 by half a cosine; by default 0.01 for a
            filter, 0.005 for a network.
        correlation: the weight of 1 - r^2 in the loss. The squared logarithm of the ratio of powers
            has the weight 1.
        displacement: the weight of the mean squared distance of particles from their true
            places [spacing^2]; by default 0 for a filter, 0.003 for a network.
        histogram: the weight of the mean squared logarithm of the share of cells in bins of
            density, divided by the truth's; by default 0 for a filter, 0.2 for a network.
        redshift_space: the weight of the terms of power and phases in redshift space, along z, and
            of velocities on the lattice; by default 0 for a filter, 0.1 for a network. With 0
            nothing is learned from velocities.
        validate_every: the number of iterations between validations.
        seed: the seed of the order of the universes; in run files it gives the first weights, too.
    """

    structure: Literal["pm", "2lpt"] = Field(default="pm", description='"pm" or "2lpt"')
    iterations: int = count(300)
    rate: float | None = Field(default=None, gt=0, le=1, description="a number above 0, at most 1")
    correlation: float = Field(default=0.2, ge=0, description="a number of at least 0")
    displacement: float | None = Field(default=None, ge=0, description="a number of at least 0")
    histogram: float | None = Field(default=None, ge=0, description="a number of at least 0")
    redshift_space: float | None = Field(default=None, ge=0, description="a number of at least 0")
    validate_every: int = count(50)
    seed: Seed = Field(default=0, description=A_SEED)

    def completed(self, kind: type[Correction]) -> Self:
        """Returns the same with the defaults of a kind of correction, where a value is None."""
        defaults = OF_STATES if issubclass(kind, StateCorrection) else OF_FORCE
        missing = {name: x for name, x in defaults.items() if getattr(self, name) is None}
        return self.model_copy(update=missing)
