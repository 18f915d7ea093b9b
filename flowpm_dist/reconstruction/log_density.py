"""The log posterior of a reconstruction as a function of one vector, for other people's samplers.

Vectors and gradients are NumPy's, in float64, so that SciPy, BlackJAX, NumPyro and others can call
the function.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.field import Field
from flowpm_dist.options import in_unit
from flowpm_dist.reconstruction.observed import model_of, observed_kind
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.posterior import EvenPosterior, Posterior, attempt
from flowpm_dist.reconstruction.sampler_options import search_mesh
from flowpm_dist.reconstruction.unknowns import Unknowns, Use
from flowpm_dist.reconstruction.work import check_data
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

OF_A_TABLE = Path("the run")
"""The name in messages of a run file that is a table."""


class LogDensity:
    """The log posterior and its gradient as a function of a vector: `value, gradient = f(vector)`.

    The entries of a vector are the unknowns in coordinates in which the posterior is about equally
    wide in all directions: white noise, scaled mode by mode, and then the parameters, which are
    mixed with each other. The log density is that per unit of these coordinates, up to a constant.
    With `even=False` the entries are the white noise itself in the order [x, y, z], and a unit
    normal number for each parameter, in the order of `names`.

    With several ranks, all of them call each method, with the same vectors. Each returns the same.

    Args:
        posterior: the posterior, of one universe.
        even: whether the coordinates are scaled.

    Attributes:
        posterior: the posterior.
        names: the names of the parameters.
        dimension: the number of entries of a vector.
        field: the slice of the white noise in a vector.
        parameters: the slice of the parameters.

    Raises:
        ValueError: a posterior of several chains.
    """

    def __init__(self, posterior: Posterior, *, even: bool = True) -> None:
        if posterior.space.chains:
            raise ValueError("a log density takes one vector: give the posterior of one universe")
        self.posterior, self.names = posterior, posterior.space.names
        cells = posterior.space.box.cells
        self.dimension = cells + len(self.names)
        self.field, self.parameters = slice(0, cells), slice(cells, self.dimension)
        # Thousands of evaluations are worth the seconds that a graph takes to compile.
        self._even = EvenPosterior(posterior, whole=True) if even else None

    def __call__(self, vector: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the log density at a vector, and its gradient [dimension], float64.

        Where the model fails, as particles move too far or numbers overflow, where the vector is
        not finite, and where parameters lie out of reach, they are minus infinity and zeros.

        Raises:
            ValueError: the vector has another shape.
            CollectiveError: it differs between ranks.
        """
        values, nowhere = self._checked(vector), (-math.inf, np.zeros(self.dimension))
        if not self._is_inside(values):
            return nowhere
        objective = self.posterior if self._even is None else self._even
        evaluation = attempt(objective, self._point(values))
        if evaluation is None or not np.isfinite(loss := float(evaluation.loss)):
            return nowhere
        gradient = -self._whole(evaluation.gradient)
        return (-loss, gradient) if np.isfinite(gradient).all() else nowhere

    def start(self, seed: int = 0) -> np.ndarray:
        """Returns a vector to begin at: a draw of the prior, the same on any number of ranks.

        Args:
            seed: the seed of the draw.
        """
        return self._vector(self.posterior.space.normal(in_unit("seed", seed), Use.START))

    def unknowns(self, vector: np.ndarray) -> tuple[Field, dict[str, float]]:
        """Returns the white noise and the values of the parameters [physical units] of a vector.

        `simulation.run(white_noise=...)` takes the white noise.
        """
        point = self._point(self._checked(vector))
        if self._even is not None:
            point = self._even.scaling.from_even(point)
        values = {name: float(x) for name, x in self.posterior.parameters(point).items()}
        return Field(point.field, self.posterior.space.box), values

    def vector(self, white_noise: Field, parameters: Mapping[str, float]) -> np.ndarray:
        """Returns the vector of white noise and of values of the parameters, see `unknowns`.

        Args:
            white_noise: the white noise, on the box of the posterior or another mesh of it.
            parameters: the value of each parameter, inside its prior [physical units].

        Raises:
            ValueError: a parameter is missing, unknown, or not inside its prior.
        """
        if {*parameters} != {*self.names}:
            raise ValueError(
                f"parameters {', '.join(map(str, parameters)) or 'of no name'}: must be "
                f"{', '.join(self.names) or 'none'}"
            )
        values = {name: float(in_unit(name, parameters[name])) for name in self.names}
        for name, (low, high) in self.posterior.priors.items():
            if not low < values[name] < high:
                raise ValueError(
                    f"{name} = {values[name]:g}: must lie inside its prior, above {low:g} and "
                    f"below {high:g}"
                )
        box = self.posterior.space.box
        block = tf.cast(white_noise.on(box).block, box.dtype)
        return self._vector(self.posterior.point(block, values))

    def _checked(self, vector: np.ndarray) -> np.ndarray:
        """Returns a vector as numbers, of which all ranks have the same.

        Raises:
            ValueError: it has another shape; on every rank.
            CollectiveError: it differs between ranks.
        """
        values, box = np.asarray(in_unit("vector", vector), np.float64), self.posterior.space.box
        if box.mesh.size > 1:
            numbers = hashlib.blake2b(values.tobytes()).hexdigest()
            box.check_equal("a log density", shape=str(values.shape), vector=numbers)
        if values.shape != (self.dimension,):
            raise ValueError(f"a vector of shape {values.shape}: must be ({self.dimension},)")
        return values

    def _is_inside(self, values: np.ndarray) -> bool:
        """Returns whether a model can be asked: finite numbers, and parameters in their priors."""
        if not (np.abs(values) < np.sqrt(self.posterior.space.box.dtype.max)).all():  # nor NaN
            return False
        normal = tf.constant(values[self.parameters])
        if self._even is not None and self.names:
            normal = tf.linalg.matvec(self._even.scaling.inverse_factor, normal, transpose_a=True)
        inside = self.posterior.values_of(normal)
        return all(
            low < float(inside[n]) < high for n, (low, high) in self.posterior.priors.items()
        )

    def _point(self, values: np.ndarray) -> Unknowns:
        """Returns this rank's part of a vector."""
        box = self.posterior.space.box
        field = values[self.field].reshape(box.grid)[box.place[-3:]]
        return Unknowns(tf.constant(field, box.dtype), tf.constant(values[self.parameters]))

    def _vector(self, point: Unknowns) -> np.ndarray:
        """Returns the coordinates of a point as a vector, on every rank."""
        return self._whole(point if self._even is None else self._even.scaling.to_even(point))

    def _whole(self, x: Unknowns) -> np.ndarray:
        box = self.posterior.space.box
        field = box.whole(x.field, box.shape).astype(np.float64).ravel()
        return np.concatenate([field, x.parameters.numpy()])


def log_density(
    run_file: str | Path | Mapping[str, Any], *, mesh: str | None = None, even: bool = True
) -> LogDensity:
    """Returns the log posterior of a run file of `flowpm-dist reconstruct`, for other samplers.

    A mock universe is simulated, and data are read, as the command does it. On all ranks together.

    Args:
        run_file: path of a TOML file, or its sections as dictionaries. Paths inside it are relative
            to the folder of the file, or to the current one. Its [search] and [sampler] have no
            effect.
        mesh: shape of the mesh of ranks; by default the run file's own.
        even: see `LogDensity`.

    Raises:
        UserError: the run file has mistakes, or its data cannot be used.
    """
    if isinstance(run_file, Mapping):
        source, options = OF_A_TABLE, ReconstructionOptions.check(run_file, OF_A_TABLE)
    else:
        source, options = Path(run_file), ReconstructionOptions.load(run_file)
    check_data(options, source)
    shape = options.mesh_for(launch.detect().size, source=source, shape=mesh)
    whole = search_mesh(shape)
    options = options.with_mesh(whole)
    model = model_of(options, ProcessMesh(whole))
    likelihood = observed_kind(options)(options, model).likelihood
    return LogDensity(Posterior(model, likelihood, options.priors.ranges), even=even)
