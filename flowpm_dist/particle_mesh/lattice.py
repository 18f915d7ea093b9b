"""Linear response of a particle lattice to its own force mesh, in closed form.

Particles of a lattice are displaced by s(q) = s exp(i k q). Their acceleration, over 1.5 Omega_m,
is D(k) s exp(i k q), with D a matrix [3, 3]. In a continuous fluid D has one eigenvalue 1, for
displacements along k, and two of 0. Numpy alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from flowpm_dist.particle_mesh.options import ForceOptions

REACH = 6
"""Harmonics of the lattice that are summed along each axis, on either side."""
CLOUD = 0.1
"""Width of the Gaussian clouds that stand for points in `lattice_gravity` [lattice spacings]."""
DISPLACEMENT = 6.0
"""Root mean square of linear displacements along an axis today, over sigma8, about [Mpc/h]."""
MOST_GROWTH = 100.0
"""How much too much the shortest waves of a run may grow. In FastPM runs of 32^3 particles 8 Mpc/h
apart, those with 96 kept linear theory on large scales as well as runs with other forces, and those
with 119 did not."""


class LatticeWarning(UserWarning):
    """The force of a run is unstable while particles are near their lattice sites."""


Cell = tuple[float, float, float]
CUBE: Cell = (1.0, 1.0, 1.0)


def mean_response(k: np.ndarray, force: ForceOptions) -> np.ndarray:
    """Returns D(k) of a cubic lattice, averaged over all its positions relative to the force mesh.

    That is the response of particles which large-scale motions have carried away from their sites.

    Args:
        k: wavenumbers [..., 3] in units of 1 / spacing, each component from -pi to pi.
        force: the options of the force.

    Returns:
        [..., 3, 3], force component first.
    """
    return _sum(lambda wave: _mean_term(wave, force), k, range(-REACH, REACH + 1))


def rest_response(k: np.ndarray, force: ForceOptions, cell: Cell = CUBE) -> np.ndarray:
    """Returns D(k) of a lattice whose particles lie on points of the force mesh.

    That is the response in the early steps of a run, while displacements are below a mesh cell.

    Args:
        k: wavenumbers [..., 3] in units of 1 / spacing along each axis, from -pi to pi.
        force: the options of the force; mesh_factor must be whole.
        cell: sides of a cell of the lattice, in any unit.

    Returns:
        [..., 3, 3], force component first.

    Raises:
        ValueError: mesh_factor is not whole, so particles lie between the points of the mesh.
    """
    if force.mesh_factor % 1:
        raise ValueError(f"mesh_factor = {force.mesh_factor:g}: must be whole")
    sides = np.array(cell)
    return _sum(lambda wave: _rest_term(wave, force, sides), k, range(int(force.mesh_factor)))


def lattice_gravity(k: np.ndarray) -> np.ndarray:
    """Returns D(k) of particles that attract each other exactly; see `mean_response`."""
    return _sum(_point_term, k, range(-REACH, REACH + 1))


@functools.cache
def rest_growth(force: ForceOptions, cell: Cell = CUBE, number: int = 16) -> float:
    """Returns n, where the fastest wave on a lattice at rest grows as a^n while matter dominates.

    With exact forces n = 1. Where mesh_factor is not whole, the next whole number gives n.

    Args:
        force: the options of the force.
        cell: sides of a cell of the lattice, in any unit.
        number: wavenumbers along each axis that are tried, from 0 to the Nyquist wavenumber.
    """
    whole = force.model_copy(update={"mesh_factor": math.ceil(force.mesh_factor)})
    steps = np.linspace(0, np.pi, number + 1)
    cubic = len(set(cell)) == 1
    waves = itertools.combinations_with_replacement(steps, 3) if cubic else None
    k = np.array(list(waves or itertools.product(steps, repeat=3))[1:])
    strongest = float(np.linalg.eigvals(rest_response(k, whole, cell)).real.max())
    return (math.sqrt(1 + 24 * max(strongest, 1.0)) - 1) / 4


def instability(
    force: ForceOptions, cell: Sequence[float], a: tuple[float, float], sigma8: float
) -> str | None:
    """Returns a warning if a force acts for too long on particles that are still near the lattice.

    Args:
        force: the options of the force.
        cell: sides of a cell of the lattice [Mpc/h].
        a: the first and the last scale factor of the steps, above 0.
        sigma8: of linear theory today; a tenth more or less hardly matters.
    """
    near = min(a[1], max(cell) / force.mesh_factor / 2 / (DISPLACEMENT * sigma8))
    if near <= a[0]:
        return None
    x, y, z = (round(side / min(cell), 6) for side in cell)
    times = (near / a[0]) ** (rest_growth(force, (x, y, z)) - 1)
    if times < MOST_GROWTH:
        return None
    return (
        f'with force_gradient = "{force.force_gradient}" and deconvolve = '
        f"{str(force.deconvolve).lower()}, until a = {near:.2g} displacements are below half a "
        f"cell of the force mesh, and the shortest waves grow {times:.2g} times too much. This "
        "spoils larger scales, too. Set deconvolve = false, or start later"
    )


def _sum(term: Callable[[np.ndarray], np.ndarray], k: np.ndarray, numbers: range) -> np.ndarray:
    """Returns the sum of the terms of all harmonics of k, less the terms of a displaced lattice."""
    k = np.asarray(k, np.float64)
    total = np.zeros((*k.shape, 3))
    for each in itertools.product(numbers, repeat=3):
        harmonic = 2 * np.pi * np.array(each, float)
        total += term(k + harmonic)
        if harmonic.any():
            total -= term(harmonic)
    return total


def _mean_term(k: np.ndarray, force: ForceOptions) -> np.ndarray:
    window = _window(k, force.mesh_factor) ** 2
    folded = _folded(k, force.mesh_factor)
    sides = np.ones(3)
    outer = _gradient(folded, force, sides)[..., :, np.newaxis] * k[..., np.newaxis, :]
    return outer * (window * _inverse(folded, force, sides))[..., np.newaxis, np.newaxis]


def _rest_term(k: np.ndarray, force: ForceOptions, sides: np.ndarray) -> np.ndarray:
    """Returns one term; a particle at a mesh point is painted as a central difference."""
    folded, cell = _folded(k, force.mesh_factor), 1 / force.mesh_factor
    painted = np.sin(folded * cell) / (cell * sides)
    outer = _gradient(folded, force, sides)[..., :, np.newaxis] * painted[..., np.newaxis, :]
    return outer * _inverse(folded, force, sides)[..., np.newaxis, np.newaxis]


def _point_term(k: np.ndarray) -> np.ndarray:
    square = (k**2).sum(axis=-1)
    clouds = np.exp(-square * CLOUD**2) / np.where(square == 0, np.inf, square)
    return k[..., :, np.newaxis] * k[..., np.newaxis, :] * clouds[..., np.newaxis, np.newaxis]


def _window(k: np.ndarray, mesh_factor: float) -> np.ndarray:
    """Returns the cloud-in-cell window of the mesh."""
    return np.prod(np.sinc(k / (2 * np.pi * mesh_factor)) ** 2, axis=-1)


def _folded(k: np.ndarray, mesh_factor: float) -> np.ndarray:
    """Returns the aliases of wavenumbers within the mesh's Nyquist wavenumber."""
    width = 2 * np.pi * mesh_factor
    return k - width * np.round(k / width)


def _gradient(k: np.ndarray, force: ForceOptions, sides: np.ndarray) -> np.ndarray:
    """Returns the factor of the gradient of a wave on the mesh, divided by i."""
    cell = 1 / force.mesh_factor
    if force.force_gradient == "finite-difference":
        return (8 * np.sin(k * cell) - np.sin(2 * k * cell)) / (6 * cell * sides)
    return np.where(np.isclose(np.abs(k) * cell, np.pi), 0, k) / sides


def _inverse(k: np.ndarray, force: ForceOptions, sides: np.ndarray) -> np.ndarray:
    """Returns the filter from density to potential, with the sign turned; see `Gravity.filters`."""
    square = ((k / sides) ** 2).sum(axis=-1)
    result = 1 / np.where(square < 1e-20, np.inf, square)
    if force.deconvolve:
        inside = (np.abs(k) <= np.pi * (1 + 1e-12)).all(axis=-1)
        result /= np.where(inside, _window(k, force.mesh_factor) ** 2, 1)
    return result
