"""Simulated maps of weak lensing as training data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.volumes.map_layout import as_volumes
from flowpm_dist.cosmoflow.volumes.priors import Priors
from flowpm_dist.cosmoflow.volumes.universes import (
    OF_SURVEY,
    Drawn,
    Lanes,
    Measured,
    UniverseMaker,
)
from flowpm_dist.initial.conditions import InitialConditions
from flowpm_dist.jobs.light_cone import ConvergenceOptions
from flowpm_dist.observables.convergence_model import ConvergenceModel
from flowpm_dist.statistics.angular_power import angular_power
from flowpm_dist.statistics.map_summaries import LEVELS, NoisyMaps
from flowpm_dist.statistics.maps import map_histogram


class MapMaker(UniverseMaker):
    """A maker of maps of the convergence, with the noise of the shapes of galaxies.

    Maps are volumes of one layer, with a channel for each source: [lane, x, y, 1], or with
    channels. Each replica is one rank, which has its maps whole.

    Args:
        model: from white noise to maps, see `UniverseMaker`.
        cone: the light cone, with noise. Its seed of the noise is not used: each universe has
            noise of its own.
        priors, lanes, targets: see `UniverseMaker`. "noise_amplitude" multiplies the noise.
    """

    def __init__(
        self,
        model: ConvergenceModel,
        cone: ConvergenceOptions,
        priors: Priors,
        lanes: Lanes,
        targets: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, priors, lanes, targets)
        self.model, self.cone, self.sigma = model, cone, cone.pixel_sigma()
        model.hold_halo()
        box = self.simulation.box_of(lanes.count)
        self._initial = InitialConditions(box, self.simulation.options)

    def see(self, drawn: Drawn) -> tuple[np.ndarray, Measured]:
        """See `UniverseMaker.see`."""
        white = self._initial.white_noise(drawn.seeds)
        varied = {k: tf.constant(x) for k, x in drawn.values.items() if k != "noise_amplitude"}
        clean = self.model.with_room(lambda: self.model(white, varied)).numpy()
        seeds = drawn.noise_seeds(OF_SURVEY).tolist()
        louder = drawn.values.get("noise_amplitude", np.ones(len(seeds)))
        noise = [one * self.cone.noise(seed) for one, seed in zip(louder, seeds, strict=True)]
        kappa = (clean + np.stack(noise)).astype(clean.dtype)
        return as_volumes(kappa), measured(NoisyMaps(kappa, self.cone.fov, self.sigma))


def measured(maps: NoisyMaps) -> Measured:
    """Returns l, C_l, histogram and edges of maps, in the place of those of a `Generation`.

    Those of one source after another: C_l [sr], and the share of the pixels in bins of the
    convergence over the noise's standard deviation.
    """
    universes = len(maps.kappa)
    spectra = angular_power(maps.kappa, maps.fov, maps.power_edges)
    found = map_histogram(maps.kappa / maps.sigma, LEVELS)
    shares = (found.counts / found.cells).reshape(universes, -1)
    return spectra.ell, spectra.power.reshape(universes, -1), shares, LEVELS
