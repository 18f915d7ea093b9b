"""The results of chains in result.json: their convergence and the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowpm_dist.reconstruction.diagnostics import Convergence, convergence
from flowpm_dist.reconstruction.draws_table import Rows, mode_names, values_of
from flowpm_dist.reconstruction.options import SamplerOptions

LEAST_DRAWS = 4
"""The least number of draws for R-hat."""


def sampling_facts(
    rows: Rows, sampler: SamplerOptions, names: Sequence[str], truth: Mapping[str, float] | None
) -> dict[str, Any]:
    """Returns what the rows of draws.csv say.

    Args:
        rows: of all moves.
        sampler: that made them.
        names: of the parameters that were drawn along.
        truth: of parameters and modes by name, where it is known.
    """
    drawn = [row for row in rows if int(row["drawn"])]
    modes = values_of(drawn, mode_names(), sampler.chains)
    parameters = values_of(drawn, names, sampler.chains)
    enough = len(modes) >= LEAST_DRAWS
    checked = convergence(parameters) if names and enough else None
    losses = values_of(drawn, ["loss"], sampler.chains)
    of_loss = convergence(losses) if enough else None
    return {
        "method": sampler.method,
        "chains": sampler.chains,
        "draws": sampler.draws,
        "warm_up": sampler.warm_up,
        "start": sampler.start,
        "seconds": sum(float(row["seconds"]) for row in rows[:: sampler.chains]),
        **{name: _finite_mean(drawn, name) for name in ("acceptance", "energy_error", "step")},
        "loss": _of_parameter(losses, 0, of_loss, None),
        "modes": _of_modes(modes, convergence(modes) if enough else None, truth),
        "parameters": {
            name: _of_parameter(parameters[..., i], i, checked, truth.get(name) if truth else None)
            for i, name in enumerate(names)
        },
    }


def _finite_mean(rows: Rows, name: str) -> float:
    """Returns the mean of what is finite: where a move failed, its energy error is not."""
    values = np.array([float(row[name]) for row in rows])
    return float(np.mean(values[np.isfinite(values)]))


def _of_modes(
    modes: np.ndarray, found: Convergence | None, truth: Mapping[str, float] | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {"count": modes.shape[-1]}
    if found is not None:
        facts |= {
            "rhat_max": float(found.rhat.max()),
            "rhat_median": float(np.median(found.rhat)),
            "ess_min": float(found.ess.min()),
            "ess_median": float(np.median(found.ess)),
        }
    if truth is not None:
        true = np.array([truth[name] for name in mode_names()])
        away = (true - modes.mean((0, 1))) / modes.std((0, 1))
        facts["mean_square_of_truth_in_standard_deviations"] = float(np.mean(away**2))
    return facts


def _of_parameter(
    values: np.ndarray, number: int, found: Convergence | None, truth: float | None
) -> dict[str, float]:
    facts = {"mean": float(values.mean()), "standard_deviation": float(values.std())}
    if found is not None:
        facts |= {"rhat": float(found.rhat[number]), "ess": float(found.ess[number])}
    return facts if truth is None else {**facts, "truth": truth}
