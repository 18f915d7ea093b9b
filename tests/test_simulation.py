"""The simulation on one rank: against linear theory, its complaints, and what it imports."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flowpm_dist as fpm

PLANCK = fpm.Cosmology.planck18()
STEPS = fpm.scale_factor_steps(0.05, 0.1, 2)


def deviation(spectrum, theory):
    """How far the mean of P / theory lies from 1, in standard deviations of a Gaussian field.

    Each bin's relative variance is 2 / modes; bins are weighted by their modes.
    """
    ratio = np.average(spectrum.power / theory, weights=spectrum.modes)
    return (ratio - 1) / np.sqrt(2 / spectrum.modes.sum())


@pytest.mark.parametrize("box_size", [100.0, (100.0, 150.0, 80.0)])
@pytest.mark.parametrize("amplitude", [{"A_s": 2.1e-9}, {"sigma8": 0.8}])
def test_linear_field_has_the_linear_power(box_size, amplitude):
    cosmology = PLANCK.replace(**amplitude)
    sim = fpm.Simulation(cosmology, (32, 48, 40), box_size, STEPS, precision="float64")
    state = sim.run(seed=11)
    spectrum = fpm.power_spectrum(state.linear_delta, box_size)
    assert abs(deviation(spectrum, fpm.LinearPower(cosmology)(spectrum.k).numpy())) < 4


def test_early_density_has_the_grown_linear_power():
    """At a = 0.1 on scales of many cells: linear growth, the CIC window divided out."""
    sim = fpm.Simulation(PLANCK, 64, 640.0, STEPS, gradient="spectral", precision="float64")
    spectrum = fpm.power_spectrum(sim.run(seed=12).density(), 640.0, window="cic")
    large = slice(0, 10)
    theory = fpm.LinearPower(PLANCK)(spectrum.k, 0.1).numpy()
    cut = fpm.PowerSpectrum(spectrum.k[large], spectrum.power[large], spectrum.modes[large])
    assert abs(deviation(cut, theory[large])) < 4


def test_one_seed_is_one_universe_in_both_precisions():
    states = [
        fpm.Simulation(PLANCK, 16, 32.0, STEPS, precision=precision).run(seed=5)
        for precision in ("float32", "float64")
    ]
    single, double = (s.white_noise.numpy() for s in states)
    np.testing.assert_array_equal(single, double.astype(np.float32))
    single, double = (s.density().numpy() for s in states)
    np.testing.assert_allclose(single, double, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"grid": 15}, "even numbers"),
        ({"grid": (16, 16)}, "one number or three"),
        ({"grid": 16.5}, "whole numbers"),
        ({"box_size": -1.0}, "positive lengths"),
        ({"steps": [1.0, 0.5]}, "increasing"),
        ({"steps": [0.0, 0.5]}, "above 0"),
        ({"lpt_order": 3}, "lpt_order 3 is not one of 1, 2"),
        ({"integrator": "euler"}, "integrator 'euler' is not one of 'fastpm'"),
        ({"gradient": "exact"}, "'finite-difference', 'spectral'"),
        ({"precision": "float16"}, "'float32', 'float64'"),
        ({"halo": 0}, "from 1 on"),
        ({"mesh": "row:2,col:1"}, "2 places, but this job has 1 rank"),
        ({"mesh": "row:1,row:1"}, "named twice"),
    ],
)
def test_complaints(change, message):
    arguments = {"grid": 16, "box_size": 32.0, "steps": STEPS} | change
    with pytest.raises(ValueError, match=message):
        fpm.Simulation(PLANCK, **arguments)


def test_white_noise_that_does_not_fit():
    sim = fpm.Simulation(PLANCK, 16, 32.0, STEPS)
    with pytest.raises(ValueError, match="either a seed or white_noise"):
        sim.run()
    with pytest.raises(ValueError, match="either a seed or white_noise"):
        sim.run(1, white_noise=np.zeros((16, 16, 16)))
    with pytest.raises(ValueError, match=r"shape \(8, 16, 16\)"):
        sim.run(white_noise=np.zeros((8, 16, 16)))
    with pytest.raises(ValueError, match="real floating"):
        sim.run(white_noise=np.zeros((16, 16, 16), complex))


ALONE = """
import sys
import flowpm_dist as fpm
sim = fpm.Simulation(fpm.Cosmology.planck18(), 8, 32.0, fpm.scale_factor_steps(0.1, 1.0, 2))
k, power = fpm.power_spectrum(sim.run(seed=1).density(), 32.0)
loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"horovod", "mpi4py"}, loaded & {"horovod", "mpi4py"}
"""


def test_one_rank_simulates_without_horovod_and_mpi():
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", ALONE], cwd=root, check=True, timeout=120)
