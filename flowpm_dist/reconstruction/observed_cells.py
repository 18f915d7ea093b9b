"""Observed cells of the box: a density, or counts of tracers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.figures import project, save_figure
from flowpm_dist.io.snapshot import load_snapshot
from flowpm_dist.observables.noise import with_noise
from flowpm_dist.observables.observations import Observations, ObservedBlock
from flowpm_dist.observables.options import CellOptions, ObservationError
from flowpm_dist.observables.universe_model import UniverseModel
from flowpm_dist.options import nearest, python_object
from flowpm_dist.reconstruction import likelihoods
from flowpm_dist.reconstruction.figures import slabs_figure
from flowpm_dist.reconstruction.likelihoods import Likelihood
from flowpm_dist.reconstruction.likelihoods.base import in_dtype_of
from flowpm_dist.reconstruction.observed import Observed, Universe
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.work import FIELDS


class ObservedCells(Observed):
    """This rank's block of an observed density or of counts.

    Args:
        options, data, likelihood, truth: see `Observed`.
        block: the mask and the noise of these cells.
    """

    def __init__(
        self,
        options: ReconstructionOptions,
        data: np.ndarray,
        likelihood: Likelihood,
        truth: Universe | None,
        block: ObservedBlock,
    ) -> None:
        super().__init__(options, data, likelihood, truth)
        self._block = block

    @classmethod
    def of(cls, options: ReconstructionOptions, model: UniverseModel) -> Self:
        """See `Observed.of`."""
        box, asked = model.simulation.box, options.data
        block, truth = block_of(options, box), None
        data = block.data
        if asked.mock_seed is not None:
            truth = Universe.mock(model, asked.mock_seed)
            quiet = block.mean_count is None and not asked.add_noise
            noisy = replace(block, sigma=None) if quiet else block
            normal = np.zeros(()) if quiet else truth.unit_normal(asked.noise_seed)
            data = with_noise(truth.expected, noisy, normal)
        assert data is not None
        likelihood = likelihood_of(options, box, block, data)
        return cls(options, data, likelihood, truth, block)

    @staticmethod
    def kept_likelihood(options: ReconstructionOptions, box: Box, folder: Path) -> Likelihood:
        """See `Observed.kept_likelihood`."""
        data = load_snapshot(folder / FIELDS).arrays["data"][box.place[-3:]]
        return likelihood_of(options, box, block_of(options, box), np.asarray(data))

    def fields(self, found: Universe, *, fits_amplitude: bool) -> dict[str, Field]:
        """See `Observed.fields`."""
        box, asked = found.state.box, self.options.observation
        fields = {"data": Field(tf.constant(self.data, box.dtype), box)}
        assert isinstance(asked, CellOptions)
        if asked.bias or asked.redshift_space or fits_amplitude:
            fields["expected"] = Field(found.expected, box)
        if asked.mask is not None:
            fields["mask"] = Field(tf.constant(self._block.mask, box.dtype), box)
        return fields

    def maps(self, found: Universe) -> dict[str, np.ndarray]:
        """Returns slabs [x, y] [mean density]: truth, data, reconstruction and residual.

        Each is a mean over what is observed along z. See `Observed.maps`.
        """
        box, mask, mean_count = found.state.box, self._block.mask, self._block.mean_count
        is_seen = mask > 0
        scale = np.ones_like(mask) if mean_count is None else mean_count * mask
        density = np.where(is_seen, self.data / np.where(is_seen, scale, 1.0), 0.0)
        seen, data = tf.constant(is_seen), tf.constant(density, box.dtype)
        share = project(Field(tf.cast(seen, box.dtype), box), self._layers)
        blocks = {} if self.truth is None else {"truth": self.truth.expected}
        blocks |= {"data": data, "reconstruction": found.expected}
        blocks["residual"] = data - found.expected
        slabs = {}
        for title, block in blocks.items():
            of_data = title in ("data", "residual")
            whole = project(
                Field(tf.where(seen, block, 0) if of_data else block, box), self._layers
            )
            if whole is not None and share is not None:
                slabs[title] = whole / np.where(share > 0, share, np.nan) if of_data else whole
        return slabs

    def write(self, folder: Path, maps: dict[str, np.ndarray], attributes: dict[str, Any]) -> None:
        """Writes slabs.png. See `Observed.write`."""
        box = self.options.box
        thickness = self._layers * box.size[2] / box.grid[2]
        figure = slabs_figure(maps, box.size[:2], thickness, self.options.evolution.last)
        save_figure(figure, folder / "slabs.png")

    @property
    def _layers(self) -> int:
        """The number of cells along z that a slab is a mean over."""
        return max(1, self.options.box.grid[2] // 8)


def block_of(options: ReconstructionOptions, box: Box) -> ObservedBlock:
    """Returns what this rank of a box observes.

    Raises:
        VolumeError: a file cannot be read.
    """
    observations = Observations(options.observation, options.box.grid, options.data.file)
    return observations.block(box.offset, box.block)


def likelihood_of(
    options: ReconstructionOptions, box: Box, block: ObservedBlock, data: np.ndarray
) -> Likelihood:
    """Returns the likelihood of the data in a block, for the densities of a box.

    Args:
        options: the kind of data and the error of the model.
        box: of one universe, or of several chains.
        block: what this rank observes.
        data: density or counts [x, y, z].

    Raises:
        ObservationError: a custom likelihood that cannot be used.
    """
    observed, values = tf.constant(block.mask, box.dtype), tf.constant(data, box.dtype)
    asked = options.likelihood
    noise = block.sigma if block.mean_count is None else block.mean_count
    if asked.name is None:
        of_kind = getattr(likelihoods, options.observation.likelihood)
        error = {"error": asked.error} if asked.error else {}
        default: Likelihood = of_kind(box, values, noise, observed, **error)
        return default
    try:
        found = python_object(asked.name)(box, values, in_dtype_of(box, noise), observed)
    except ValueError as error:
        raise ObservationError(f"likelihood {asked.name!r}: {error}") from error
    own = cast(Likelihood, found)
    for missing in options.of_likelihood:
        if missing not in own.parameters:
            raise ObservationError(
                f"likelihood {asked.name!r} has no parameter {missing}"
                f"{nearest(missing, own.parameters)} (it has "
                f"{', '.join(own.parameters) or 'none'}): leave priors.{missing} out, or name "
                "it in `parameters` of the likelihood"
            )
    return own
