"""The power of halos or galaxies, and their bias."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.grid.field import Field
from flowpm_dist.io.drawing import Axes, draw_curves
from flowpm_dist.io.labelled import Labelled, LabelledArray
from flowpm_dist.io.labels import WAVENUMBER
from flowpm_dist.statistics.bins import Bins
from flowpm_dist.statistics.comparison import compare
from flowpm_dist.statistics.power import power_spectrum


@dataclass(frozen=True)
class TracerPower(Labelled):
    """The power of halos or galaxies, and the power of matter.

    Attributes:
        k: mean wavenumbers [bin] [h/Mpc].
        modes: number of modes [bin]; k and -k are both counted.
        power: power of the objects, interlaced and without their shot noise [bin] [(Mpc/h)^3].
        cross: of objects and matter [bin] [(Mpc/h)^3].
        matter: power of matter [bin] [(Mpc/h)^3].
        bias: cross / matter [bin].
        error: error of the bias [bin], from the scatter of objects about the matter of this box.
        shot_noise: which was subtracted [(Mpc/h)^3].
    """

    k: np.ndarray
    modes: np.ndarray
    power: np.ndarray
    cross: np.ndarray
    matter: np.ndarray
    bias: np.ndarray
    error: np.ndarray
    shot_noise: float

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        power = "(Mpc/h)^3"
        about = {
            "k": ("h/Mpc", "mean wavenumber"),
            "power": (power, "power of the objects without shot noise"),
            "cross": (power, "power of objects and matter"),
            "matter": (power, "power of matter"),
            "bias": ("1", "cross / matter"),
            "error": ("1", "error of the bias, from the scatter of objects about the matter"),
            "modes": ("1", "number of modes"),
        }
        return {n: LabelledArray(getattr(self, n), ("k",), *about[n]) for n in about}

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws the bias by wavenumber with its errors; see `PowerSpectrum.plot`."""
        return draw_curves(
            axes, self.k, self.bias, (WAVENUMBER, "bias"), scatter=self.error, labels=(label,)
        )


def tracer_power(
    tracers: Catalogue,
    matter: Field,
    *,
    weights: np.ndarray | None = None,
    bins: Bins | None = None,
) -> TracerPower:
    """Returns the power and the bias of halos or galaxies. On all ranks together.

    Args:
        tracers: the objects.
        matter: the density of matter of the same universe; objects are painted on its mesh.
        weights: of this rank's objects [n]; 1 if None.
        bins: see `power_spectrum`.

    Raises:
        ValueError: there are no objects, or the density is of another box.
    """
    if tuple(matter.box.size) != tuple(tracers.box_size):
        raise ValueError(
            f"{tracers.kind} of a box of {tracers.box_size} Mpc/h, and matter of {matter.box.size}"
        )
    noise = tracers.shot_noise(weights)
    density, shifted = (
        tracers.density(matter.box, weights=weights, shift=shift) for shift in (0.0, 0.5)
    )
    power = power_spectrum(density, bins=bins, shot_noise=noise, interlaced=shifted).power
    spectra = compare(density, matter, bins=bins)
    scatter = np.maximum(spectra.power_a * spectra.power_b - spectra.cross**2, 0)
    return TracerPower(
        spectra.k,
        spectra.modes,
        power,
        spectra.cross,
        spectra.power_b,
        spectra.cross / spectra.power_b,
        np.sqrt(scatter / spectra.modes) / spectra.power_b,
        noise,
    )
