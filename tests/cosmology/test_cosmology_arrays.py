"""Cosmologies of plain numbers, which NumPy evaluates, against those of tensors."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from flowpm_dist.cosmology import Cosmology, Distances, Growth, LinearPower
from flowpm_dist.cosmology.growth_equations import TERMS
from flowpm_dist.evolution.integrators import INTEGRATORS

EVOLVING = {"Omega_m": 0.28, "Omega_b": 0.045, "h": 0.7, "n_s": 0.95, "sigma8": 0.75, "w0": -0.9}
EDGES = [0.1, 0.3, 0.65, 1.0]


def evaluated(cosmology):
    """All that a run takes from a cosmology."""
    growth, a, k = Growth(cosmology), np.array([0.02, 0.5, 1.0]), np.array([0.0, 1e-3, 0.1, 5.0])
    power, distances, background = (
        LinearPower(cosmology, growth),
        Distances(cosmology),
        growth.background,
    )
    found = {f"{term}, {n}": growth.factor(a, term, n) for term in TERMS for n in (0, 1)}
    methods = [growth.d1_dlna, growth.f1, growth.g_drift, growth.g_kick, background.e, background.w]
    methods += [background.omega_m, background.omega_de, background.dlne_dlna, distances.comoving]
    found |= {f"{method.__qualname__}": method(a) for method in methods}
    found |= {"by D1": growth.by_d1(a, 2), "a": distances.scale_factor([0.0, 100.0, 3000.0])}
    found |= {"power": power(k, 0.5), "sigma8": power.sigma8(0.5), "A_s": power.A_s}
    for name, scheme in INTEGRATORS.items():
        found[f"{name}, initial"] = scheme().initial(growth, 0.1, 3)
        found[name] = scheme().schedule(growth, EDGES).factors
    return found


@pytest.mark.parametrize("transfer", ["eisenstein-hu", "camb"])
def test_numbers_and_tensors_make_the_same_universe(transfer):
    """NumPy evaluates the ones, and TensorFlow the others: they agree to rounding."""
    if transfer == "camb":
        pytest.importorskip("camb")
    tensors = {name: tf.constant(value, tf.float64) for name, value in EVOLVING.items()}
    by_numpy = evaluated(Cosmology(**EVOLVING, transfer=transfer))
    by_tensorflow = evaluated(Cosmology(**tensors, transfer=transfer))
    for name, expected in by_tensorflow.items():
        assert tf.is_tensor(by_numpy[name]) and by_numpy[name].dtype == tf.float64, name
        np.testing.assert_allclose(by_numpy[name], expected, rtol=1e-12, atol=1e-14, err_msg=name)


def test_a_cosmology_of_numbers_takes_few_operations_of_tensorflow():
    """In a loop over cosmologies of a small box these operations would take a third of the time."""
    made = []
    op_callbacks.add_op_callback(lambda kind, *_args, **_options: made.append(kind))
    try:
        cosmology = Cosmology(**EVOLVING | {"Omega_m": 0.2801})
        growth = Growth(cosmology)
        LinearPower(cosmology, growth).without_growth(np.linspace(0.0, 1.0, 100))
        INTEGRATORS["fastpm"]().schedule(growth, EDGES)
    finally:
        op_callbacks.clear_op_callbacks()
    assert made == ["MatrixSolve"] * 2  # of first and second order
