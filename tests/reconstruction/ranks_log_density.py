"""The log posterior as a function of a vector: the same on any mesh; each rank has all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import RANK, SIZE, by_rank_zero, solo

import flowpm_dist as fpm
from flowpm_dist.reconstruction import LogDensity, Posterior
from flowpm_dist.reconstruction.observed import model_of, observed_kind
from flowpm_dist.reconstruction.options import ReconstructionOptions
from meshimpl import ProcessMesh
from meshimpl.engine import CollectiveError

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.every_split]

TABLE: dict[str, Any] = {
    "box": {"grid": 8, "size": 64.0},
    "cosmology": dict(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.97, sigma8=0.8),
    "evolution": {"steps": 2},
    "observation": {"structure": "pm", "sigma": 0.5},
    "data": {"mock_seed": 42},
    "priors": {"sigma8": [0.6, 1.0]},
    "run": {"precision": "float64", "halo": 2},
}


def on_one_rank() -> LogDensity:
    options = ReconstructionOptions.check(TABLE, Path("run"))
    model = model_of(options, solo())
    likelihood = observed_kind(options)(options, model).likelihood
    return LogDensity(Posterior(model, likelihood, options.priors.ranges))


def found_in(density: LogDensity) -> dict[str, Any]:
    start = density.start(3)
    value, gradient = density(start)
    white_noise, values = density.unknowns(start)
    # All ranks together: each has a block.
    box = density.posterior.space.box
    noise = box.whole(white_noise.block, box.shape)
    again = density.vector(white_noise, values)
    return {"start": start, "value": value, "gradient": gradient, "noise": noise, "again": again}


def test_it_is_the_same_on_any_mesh(mesh: ProcessMesh):
    expected = by_rank_zero("log-density", lambda: found_in(on_one_rank()))
    density = fpm.log_density(TABLE, mesh=str(mesh))
    found = found_in(density)
    for name, tolerance in {"start": 1e-12, "noise": 1e-12, "gradient": 1e-9}.items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name], expected[name], atol=tolerance * scale)
    assert found["value"] == pytest.approx(float(expected["value"]), 1e-12)
    np.testing.assert_allclose(found["again"], found["start"], atol=1e-9)
    if SIZE > 1:
        with pytest.raises(CollectiveError, match="vector differs between ranks"):
            density(found["start"] + RANK)  # another one on each rank
        with pytest.raises(CollectiveError, match="shape differs between ranks"):
            density(found["start"] if RANK == 0 else found["start"][1:])
    with pytest.raises(ValueError, match="a vector of shape"):
        density(found["start"][1:])
    outside = found["start"].copy()
    outside[-1] = np.nan
    assert density(outside)[0] == -np.inf
