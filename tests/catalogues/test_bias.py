"""The bias of halos where local f_NL couples large scales to small ones."""

import numpy as np
import pytest

import flowpm_dist as fpm
from flowpm_dist.catalogues.clustering import tracer_power

GAUSSIAN = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.677, n_s=0.965, sigma8=0.81)
F_NL, SIDE, COLLAPSE = 500.0, 500.0, 1.686


def matter_over_potential(k):
    """M(k) of delta = M Phi today, by the Poisson equation in the era of matter, where D is a."""
    theory = fpm.Theory(GAUSSIAN)
    early, largest = 1e-3, 1e-5
    growth = float(theory.growth.d1(1.0)) / (float(theory.growth.d1(early)) / early)
    primordial = (k / largest) ** GAUSSIAN.n_s
    transfer = np.sqrt(np.asarray(theory.power(k)) / float(theory.power(largest)) / primordial)
    return 2 / 3 * k**2 * transfer * growth * 2997.92458**2 / GAUSSIAN.Omega_m


@pytest.mark.long
@pytest.mark.timeout(600)
def test_local_f_NL_makes_a_bias_that_depends_on_scale():
    """2 f_NL (b - 1) 1.686 / M(k) (Dalal and others 2008), of which halos of friends of friends
    have 0.75 to 1; and a constant, as f_NL changes how heavy halos of one mass are for theirs."""
    slopes = []
    for seed in (1, 2, 3):
        biases = []
        for f_NL in (F_NL, -F_NL):
            universe = GAUSSIAN.replace(f_NL=f_NL)
            steps = fpm.scale_factor_steps(0.1, 1.0, 10)
            state = fpm.Simulation(
                universe, 128, SIDE, steps, integrator="bullfrog", mesh_factor=1
            ).run(seed=seed)
            power = tracer_power(fpm.halos(state), state.density())
            biases.append(power.bias)
        large = power.k < 0.08
        k, weight = power.k[large], np.sqrt(power.modes[large])
        shift, mean = np.subtract(*biases)[large] / 2, np.mean(biases, axis=0)[large]
        bias = np.average(mean[1:], weights=weight[1:] ** 2)
        expected = 2 * F_NL * (bias - 1) * COLLAPSE / matter_over_potential(k)
        both = np.stack([expected, np.ones_like(k)], axis=1) * weight[:, np.newaxis]
        slopes.append(np.linalg.lstsq(both, shift * weight, rcond=None)[0][0])
    error = np.std(slopes, ddof=1) / np.sqrt(len(slopes))
    assert error < 0.3 and 0.75 - 3 * error < np.mean(slopes) < 1.0 + 3 * error, slopes
    assert np.mean(slopes) > 3 * error
