"""Linear response of a particle lattice to its own force mesh, in closed form.

Particles of a cubic lattice of spacing 1 are displaced by s(q) = s exp(i k q). Their acceleration,
over 1.5 Omega_m, is D(k) s exp(i k q), with D a matrix [3, 3]. In a continuous fluid D has one
eigenvalue 1, for displacements along k, and two of 0. Numpy alone.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np

from flowpm_dist.particle_mesh.options import ForceOptions

REACH = 6
"""Harmonics of the lattice that are summed along each axis, on either side."""
CLOUD = 0.1
"""Width of the Gaussian clouds that stand for points in `lattice_gravity` [lattice spacings]."""


def mean_response(k: np.ndarray, force: ForceOptions) -> np.ndarray:
    """Returns D(k), averaged over all positions of the lattice relative to the force mesh.

    That is the response of particles which large-scale motions have carried away from their sites.

    Args:
        k: wavenumbers [..., 3] in units of 1 / spacing, each component from -pi to pi.
        force: the options of the force.

    Returns:
        [..., 3, 3], force component first.
    """
    k = np.asarray(k, np.float64)
    total = np.zeros((*k.shape, 3))
    for harmonic in _harmonics(range(-REACH, REACH + 1)):
        total += _mean_term(k + harmonic, force)
        if harmonic.any():
            total -= _mean_term(harmonic, force)
    return total


def rest_response(k: np.ndarray, force: ForceOptions) -> np.ndarray:
    """Returns D(k) of a lattice whose particles lie on points of the force mesh.

    That is the response in the early steps of a run, while displacements are below a mesh cell.

    Args:
        k, force: see `mean_response`; force.mesh_factor must be whole.

    Returns:
        [..., 3, 3], force component first.

    Raises:
        ValueError: mesh_factor is not whole, so particles lie between the points of the mesh.
    """
    if force.mesh_factor % 1:
        raise ValueError(f"mesh_factor = {force.mesh_factor:g}: must be whole")
    k = np.asarray(k, np.float64)
    total = np.zeros((*k.shape, 3))
    for harmonic in _harmonics(range(int(force.mesh_factor))):
        total += _rest_term(k + harmonic, force)
        if harmonic.any():
            total -= _rest_term(harmonic, force)
    return total


def lattice_gravity(k: np.ndarray) -> np.ndarray:
    """Returns D(k) of particles that attract each other exactly; see `mean_response`."""
    k = np.asarray(k, np.float64)
    total = np.zeros((*k.shape, 3))
    for harmonic in _harmonics(range(-REACH, REACH + 1)):
        total += _point_term(k + harmonic)
        if harmonic.any():
            total -= _point_term(harmonic)
    return total


@functools.cache
def rest_growth(force: ForceOptions, cells: int = 16) -> float:
    """Returns n, where the fastest wave on a lattice at rest grows as a^n while matter dominates.

    With exact forces n = 1. Where mesh_factor is not whole, n is that of the next whole number.

    Args:
        force: the options of the force.
        cells: wavenumbers along each axis that are tried, from 0 to the Nyquist wavenumber.
    """
    whole = force.model_copy(update={"mesh_factor": math.ceil(force.mesh_factor)})
    steps = np.linspace(0, np.pi, cells + 1)
    k = np.array(list(itertools.combinations_with_replacement(steps, 3))[1:])
    strongest = float(np.linalg.eigvals(rest_response(k, whole)).real.max())
    return (math.sqrt(1 + 24 * max(strongest, 1.0)) - 1) / 4


def _harmonics(numbers: range) -> list[np.ndarray]:
    return [2 * np.pi * np.array(each, float) for each in itertools.product(numbers, repeat=3)]


def _mean_term(k: np.ndarray, force: ForceOptions) -> np.ndarray:
    window = _window(k, force.mesh_factor) ** 2
    folded = _folded(k, force.mesh_factor)
    outer = _gradient(folded, force)[..., :, np.newaxis] * k[..., np.newaxis, :]
    return outer * (window * _inverse(folded, force))[..., np.newaxis, np.newaxis]


def _rest_term(k: np.ndarray, force: ForceOptions) -> np.ndarray:
    """At a mesh point, what is odd in the displacement is a central difference."""
    folded, cell = _folded(k, force.mesh_factor), 1 / force.mesh_factor
    painted = np.sin(folded * cell) / cell
    outer = _gradient(folded, force)[..., :, np.newaxis] * painted[..., np.newaxis, :]
    return outer * _inverse(folded, force)[..., np.newaxis, np.newaxis]


def _point_term(k: np.ndarray) -> np.ndarray:
    square = (k**2).sum(axis=-1)
    clouds = np.exp(-square * CLOUD**2) / np.where(square == 0, np.inf, square)
    return k[..., :, np.newaxis] * k[..., np.newaxis, :] * clouds[..., np.newaxis, np.newaxis]


def _window(k: np.ndarray, mesh_factor: float) -> np.ndarray:
    """Returns the cloud-in-cell window of the mesh."""
    return np.prod(np.sinc(k / (2 * np.pi * mesh_factor)) ** 2, axis=-1)


def _folded(k: np.ndarray, mesh_factor: float) -> np.ndarray:
    """Returns the wavenumbers of the mesh that stand for any."""
    width = 2 * np.pi * mesh_factor
    return k - width * np.round(k / width)


def _gradient(k: np.ndarray, force: ForceOptions) -> np.ndarray:
    """Returns what the gradient multiplies a wave on the mesh with, divided by i."""
    cell = 1 / force.mesh_factor
    if force.force_gradient == "finite-difference":
        return (8 * np.sin(k * cell) - np.sin(2 * k * cell)) / (6 * cell)
    return np.where(np.isclose(np.abs(k) * cell, np.pi), 0, k)


def _inverse(k: np.ndarray, force: ForceOptions) -> np.ndarray:
    """Returns the filter from density to potential, with the sign turned; see `Gravity.filters`."""
    square = (k**2).sum(axis=-1)
    result = 1 / np.where(square < 1e-20, np.inf, square)
    if force.deconvolve:
        inside = (np.abs(k) <= np.pi * (1 + 1e-12)).all(axis=-1)
        result /= np.where(inside, _window(k, force.mesh_factor) ** 2, 1)
    return result
