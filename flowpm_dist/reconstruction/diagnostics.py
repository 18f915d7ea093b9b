"""Diagnostics of chains: modes of the largest scales, R-hat, effective draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.options import in_unit
from flowpm_dist.reconstruction.sampler_options import SamplerOptions

LARGEST = 2
"""Greatest wave number of the modes in draws.csv, in waves across the box."""

LEAST_DRAWS = 4
"""The least number of draws for R-hat."""

Rows = list[dict[str, str]]
"""The rows of draws.csv: one for each move of each chain."""


def wave_numbers() -> np.ndarray:
    """Returns the wave vectors (nx, ny, nz) of half of all modes up to a radius, [mode, 3].

    They are whole numbers of waves across the box, without the mode 0. The other half are their
    opposites.
    """
    along = range(-LARGEST, LARGEST + 1)
    ball = (n for n in itertools.product(along, repeat=3) if 0 < sum(x * x for x in n))
    inside = (n for n in ball if sum(x * x for x in n) <= LARGEST**2)
    return np.array([n for n in inside if n > (0, 0, 0)])


def mode_names() -> tuple[str, ...]:
    """Returns the columns of the largest modes: real parts, then imaginary ones."""
    return tuple(f"{part}({x} {y} {z})" for part in ("re", "im") for x, y, z in wave_numbers())


def large_modes(field: tf.Tensor, box: Box) -> np.ndarray:
    """Returns the real and imaginary parts of each chain's modes of the largest scales.

    If the field is unit normal white noise, each part is unit normal. Must be called on all ranks
    together.

    Args:
        field: this rank's block [..., x, y, z].
        box: the box of the field; its batch dimension holds the chains.

    Returns:
        The parts of all chains, float64 [..., 2 x mode], on every rank.
    """
    waves = wave_numbers()
    axes = []
    for axis, (n, begin, cells) in enumerate(zip(box.block, box.offset, box.grid, strict=True)):
        phase = -2 * np.pi / cells * np.outer(begin + np.arange(n), waves[:, axis])
        axes.append(tf.constant(np.exp(1j * phase)))
    values = tf.cast(tf.reshape(field, [-1, *box.block]), tf.complex128)
    part = tf.einsum("bxyz,zm->bxym", values, axes[2])
    part = tf.einsum("bxym,ym->bxm", part, axes[1])
    part = tf.einsum("bxm,xm->bm", part, axes[0])
    both = tf.concat([tf.math.real(part), tf.math.imag(part)], axis=-1) * np.sqrt(2 / box.cells)
    if box.batch is None:
        return box.mesh.world.allreduce(both[0]).numpy()
    after = box.batch - box.batch_offset - box.local_batch[0]
    return box.mesh.world.allreduce(tf.pad(both, [[box.batch_offset, after], [0, 0]])).numpy()


@dataclass(frozen=True)
class Convergence:
    """The convergence of several numbers that chains have drawn.

    Attributes:
        rhat: the rank-normalised split R-hat of each number [n] (Vehtari and others 2021).
        ess: the effective sample size of each number, of all chains together [n].
    """

    rhat: np.ndarray
    ess: np.ndarray


def convergence(draws: np.ndarray) -> Convergence:
    """Returns the convergence of draws, as ArviZ computes it.

    Args:
        draws: [draw, chain, n], with at least 4 draws.

    Raises:
        ValueError: if there are fewer draws.
    """
    from arviz_stats.base import array_stats

    draws = in_unit("draws", draws)
    if len(draws) < LEAST_DRAWS:
        raise ValueError(f"{len(draws)} draws: convergence needs at least {LEAST_DRAWS}")
    axes = {"chain_axis": 1, "draw_axis": 0}
    return Convergence(array_stats.rhat(draws, **axes), array_stats.ess(draws, **axes))


def values_of(rows: Rows, names: Sequence[str], chains: int) -> np.ndarray:
    """Returns columns of the table, float64 [move, chain, name]."""
    values = np.array([[float(row[name]) for name in names] for row in rows])
    return values.reshape(len(rows) // chains, chains, len(names))


def usual_energy_error(errors: Sequence[np.ndarray] | Sequence[float]) -> float:
    """Returns the median of the energy errors of moves; nan if all of them failed.

    The mean would be dominated by single moves with a hundred times the usual error.
    """
    finite = np.array(errors)
    finite = finite[np.isfinite(finite)]  # it is not where a move failed
    return float(np.median(finite)) if finite.size else math.nan


def sampling_facts(
    rows: Rows, sampler: SamplerOptions, names: Sequence[str], truth: Mapping[str, float] | None
) -> dict[str, Any]:
    """Returns the numbers of the chains for result.json.

    Args:
        rows: the rows of all moves.
        sampler: the options of the sampler.
        names: the names of the parameters that were drawn along.
        truth: the true values of parameters and modes by name, where they are known.
    """
    drawn = [row for row in rows if int(row["drawn"])]
    modes = values_of(drawn, mode_names(), sampler.chains)
    watched, truth = ("loss", *names), truth or {}
    values = values_of(drawn, watched, sampler.chains)
    enough = len(drawn) >= LEAST_DRAWS * sampler.chains
    agreement = convergence(values) if enough else None
    numbers: dict[str, dict[str, float]] = {}
    for i, name in enumerate(watched):
        of_chains = values[..., i]
        facts = {"mean": float(of_chains.mean()), "standard_deviation": float(of_chains.std())}
        if agreement is not None:
            facts |= {"rhat": float(agreement.rhat[i]), "ess": float(agreement.ess[i])}
        if truth.get(name) is not None:
            facts["truth"] = truth[name]
        numbers[name] = facts
    of_moves = {
        name: np.array([float(row[name]) for row in drawn]) for name in ("acceptance", "step")
    }
    of_modes: dict[str, Any] = {"count": modes.shape[-1]}
    if enough:
        checked = convergence(modes)
        of_modes |= {
            "rhat_max": float(checked.rhat.max()),
            "rhat_median": float(np.median(checked.rhat)),
            "ess_min": float(checked.ess.min()),
            "ess_median": float(np.median(checked.ess)),
        }
    if truth:
        true = np.array([truth[name] for name in mode_names()])
        away = (true - modes.mean((0, 1))) / modes.std((0, 1))
        of_modes["mean_square_of_truth_in_standard_deviations"] = float(np.mean(away**2))
    return {
        "method": sampler.name,
        "chains": sampler.chains,
        "draws": sampler.draws,
        "warm_up": sampler.warm_up,
        "start": sampler.start,
        "seconds": sum(float(row["seconds"]) for row in rows[:: sampler.chains]),
        **{name: float(x.mean()) for name, x in of_moves.items()},
        "energy_error": usual_energy_error([float(row["energy_error"]) for row in drawn]),
        "loss": numbers.pop("loss"),
        "modes": of_modes,
        "parameters": numbers,
    }
