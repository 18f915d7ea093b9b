"""Gravity of the particles: density -> potential -> force at the particles.

With the density's mean 1 and time in 1/H0 the acceleration is -grad phi, laplacian phi =
1.5 Omega_m (density - 1); the scale factor stands in the kick factors.
"""

from __future__ import annotations

from typing import Any

from flowpm_dist.fields import Box
from flowpm_dist.painting import read_gradient, read_vector
from flowpm_dist.spectral import (
    filter_real,
    gradient_fields,
    inverse_square,
    to_field,
    to_spectrum,
)

GRADIENTS = ("finite-difference", "spectral")


def potential(density: Any, box: Box) -> Any:
    """phi / (1.5 Omega_m) with laplacian -k^2, an mtf field [x, y, z] [(Mpc/h)^2]."""
    spectrum = filter_real(to_spectrum(density), box, lambda *k: -inverse_square(*k))
    return to_field(spectrum, box)


def spectral_force(density: Any, box: Box) -> Any:
    """-grad phi / (1.5 Omega_m) with the exact gradient, mtf [x, y, z, component] [Mpc/h]."""
    return gradient_fields(to_spectrum(density), box, inverse_square)


def force_field(density: Any, box: Box, gradient: str) -> Any:
    """What `read_force` reads: the potential, or the three components of the force."""
    return spectral_force(density, box) if gradient == "spectral" else potential(density, box)


def read_force(field: Any, displacement: Any, box: Box, halo: int, gradient: str) -> Any:
    """Force over 1.5 Omega_m at the particles, mtf [x, y, z, component] [Mpc/h]."""
    read = read_vector if gradient == "spectral" else read_gradient
    return read(field, displacement, box, halo)
