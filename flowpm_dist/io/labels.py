"""Labels of axes, and the scatter that spectra show. Nothing here imports matplotlib."""

from __future__ import annotations

import numpy as np

WAVENUMBER = r"$k$  [$h$/Mpc]"
POWER_OF_K = r"$P(k)$  [(Mpc/$h$)$^3$]"
MULTIPOLE = r"multipole $l$"
POWER_PER_LOG = r"$l\,(l+1)\,C_l\,/\,2\pi$"


def gaussian_scatter(power: np.ndarray, modes: np.ndarray) -> np.ndarray:
    """Returns the standard deviation of measured auto spectra of a Gaussian field.

    Args:
        power: [..., bin].
        modes: number of Fourier modes in each bin, k and -k both counted; broadcasts with `power`.
    """
    return np.abs(power) * np.sqrt(2 / np.maximum(modes, 1))
