"""The log posterior for other people's samplers, on one rank."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from scipy.optimize import minimize

import flowpm_dist as fpm
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.samples import Samples
from flowpm_dist.particle_mesh.cloud_in_cell import HaloError
from flowpm_dist.reconstruction import Gaussian, LogDensity, Posterior
from flowpm_dist.reconstruction.posterior import EvenPosterior

TABLE: dict[str, Any] = {
    "box": {"grid": 8, "size": 64.0},
    "cosmology": dict(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.97, sigma8=0.8),
    "evolution": {"steps": 2},
    "observation": {"structure": "pm", "sigma": 0.5},
    "data": {"mock_seed": 42},
    "priors": {"sigma8": [0.6, 1.0], "Omega_m": [0.2, 0.4]},
    "run": {"precision": "float64"},
}
CELLS = 8**3


@pytest.fixture(scope="module")
def even() -> LogDensity:
    return fpm.log_density(TABLE)


@pytest.fixture(scope="module")
def plain() -> LogDensity:
    return fpm.log_density(TABLE, even=False)


@pytest.mark.parametrize("kind", ["even", "plain"])
def test_the_gradient_is_that_of_finite_differences(kind, request):
    density = request.getfixturevalue(kind)
    x = 0.3 * density.start(1)
    value, gradient = density(x)
    assert isinstance(value, float) and gradient.dtype == np.float64
    assert density.dimension == CELLS + 2 == gradient.size
    rng = np.random.default_rng(2)
    one = np.eye(density.dimension)
    # Small steps: the second derivative jumps where a particle enters another cell.
    for direction in (rng.normal(size=x.size), one[7], *one[density.parameters]):
        step = 1e-6 * direction
        slope = (density(x + step)[0] - density(x - step)[0]) / 2e-6
        assert slope == pytest.approx(gradient @ direction, rel=2e-6, abs=1e-5)


def test_a_plain_vector_is_white_noise_and_unit_normal_parameters(tmp_path):
    """Its prior is unit normal; its likelihood is the model's, run as anyone would."""
    observed = 1 + 0.3 * np.random.default_rng(8).normal(size=(8, 8, 8))
    np.save(tmp_path / "data.npy", observed)
    data = {"data": {"file": str(tmp_path / "data.npy")}}
    plain = fpm.log_density({**TABLE, **data}, even=False)
    assert plain.names == ("Omega_m", "sigma8")
    edges = fpm.scale_factor_steps(0.1, 1.0, 2)
    cosmology = fpm.Cosmology(**TABLE["cosmology"])
    sim = fpm.Simulation(cosmology, 8, 64.0, edges, precision="float64")

    def expected(x: np.ndarray) -> float:
        white_noise, values = plain.unknowns(x)
        np.testing.assert_array_equal(white_noise.block.numpy().ravel(), x[plain.field])
        shares = [0.5 * (1 + math.erf(t / math.sqrt(2))) for t in x[plain.parameters]]
        assert values["Omega_m"] == pytest.approx(0.2 + 0.2 * shares[0], 1e-12)
        assert values["sigma8"] == pytest.approx(0.6 + 0.4 * shares[1], 1e-12)
        state = sim.run(white_noise=white_noise.block, cosmology=cosmology.replace(**values))
        misfit = (state.density().block.numpy() - observed) / 0.5
        return float(-0.5 * (misfit**2).sum() - 0.5 * (x**2).sum())

    one, other = plain.start(5), plain.start(6)
    difference = plain(one)[0] - plain(other)[0]  # up to a constant
    assert difference == pytest.approx(expected(one) - expected(other), rel=1e-8)


def test_coordinates_return_to_the_same_unknowns(even, plain):
    x = even.start(4)
    np.testing.assert_allclose(even.vector(*even.unknowns(x)), x, atol=1e-10)
    white_noise, values = even.unknowns(x)
    there = plain.vector(white_noise, values)
    np.testing.assert_allclose(plain.unknowns(there)[0].block, white_noise.block, atol=1e-12)
    # Densities differ by the volume of the coordinates alone, which does not depend on the field.
    moved = plain.vector(0.5 * white_noise, values)
    of_moved = even.vector(0.5 * white_noise, values)
    change = plain(moved)[0] - plain(there)[0]
    assert even(of_moved)[0] - even(x)[0] == pytest.approx(change, rel=1e-9)


def test_draws_have_the_density_of_the_posterior(plain, tmp_path):
    """The samplers' own density has the volume of their coordinates as well."""
    objective, vectors = EvenPosterior(plain.posterior), [plain.start(5), plain.start(6)]
    lines = ["move,chain,drawn,loss,data,prior,Omega_m,sigma8"]
    for number, x in enumerate(vectors, 1):
        point = plain._point(x)
        found = objective.evaluate(objective.scaling.to_even(point))
        values = plain.unknowns(x)[1].values()
        numbers = map(float, (found.loss, found.data, found.prior, *values))
        lines.append(",".join(map(str, (number, 1, number, *numbers))))
    (tmp_path / "draws.csv").write_text("\n".join([*lines, ""]))
    facts = {name: {"prior": ends} for name, ends in TABLE["priors"].items()}
    (tmp_path / "result.json").write_text(json.dumps({"parameters": facts}))
    samples = Samples.load(tmp_path)
    expected = plain(vectors[0])[0] - plain(vectors[1])[0]
    np.testing.assert_allclose(np.diff(samples.loss[0]), expected, 1e-7)


def test_scipy_climbs_to_the_truth(even):
    truth = even.posterior.model.simulation.lpt(seed=42).white_noise
    found = minimize(
        lambda x: tuple(-y for y in even(x)),
        0.01 * even.start(0),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 40},
    )
    at_truth = even(even.vector(truth, {"Omega_m": 0.31, "sigma8": 0.8}))[0]
    assert -found.fun > at_truth
    noise = even.unknowns(found.x)[0].block.numpy()
    assert np.corrcoef(noise.ravel(), truth.block.numpy().ravel())[0, 1] > 0.3


def test_a_model_that_fails_has_no_density(even, monkeypatch):
    def fails(*_: Any) -> Any:
        raise HaloError("too far", 9)

    monkeypatch.setattr(even._even, "evaluate", fails)
    value, gradient = even(even.start(0))
    assert value == -math.inf and not gradient.any() and gradient.size == even.dimension


@pytest.mark.parametrize("kind", ["even", "plain"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e200, 1e30])
def test_there_is_no_density_outside(kind, wrong, request):
    density = request.getfixturevalue(kind)
    for place in (0, density.dimension - 1):
        x = density.start(0)
        x[place] = wrong
        value, gradient = density(x)
        assert value == -math.inf and not gradient.any() and gradient.size == density.dimension
    assert math.isfinite(density(density.start(0))[0])


def test_values_outside_the_prior_are_refused(even):
    noise = even.unknowns(even.start(0))[0]
    inside = {"Omega_m": 0.3, "sigma8": 0.8}
    for wrong, message in (
        ({"sigma8": 1.1}, "sigma8 = 1.1: must lie inside its prior, above 0.6 and below 1"),
        ({"sigma8": 0.6}, "sigma8 = 0.6: must lie inside"),
        ({"Omega_m": math.nan}, "Omega_m = nan: must lie inside"),
        ({"h": 0.7}, "parameters Omega_m, sigma8, h: must be Omega_m, sigma8"),
    ):
        with pytest.raises(ValueError, match=message):
            even.vector(noise, inside | wrong)
    with pytest.raises(ValueError, match="parameters sigma8: must be Omega_m, sigma8"):
        even.vector(noise, {"sigma8": 0.8})
    assert math.isfinite(even(even.vector(noise, inside))[0])


def test_what_is_no_vector_or_no_run_file_is_refused(even, tmp_path):
    with pytest.raises(ValueError, match=r"shape \(3,\): must be \(514,\)"):
        even(np.zeros(3))
    wrong = {**TABLE, "observation": {"structure": "pm", "sigma": -1.0}}
    with pytest.raises(UserError, match="observation.sigma = -1.0"):
        fpm.log_density(wrong)
    np.save(tmp_path / "data.npy", np.full((8, 8, 8), np.nan))
    with pytest.raises(UserError, match="must be finite"):
        fpm.log_density({**TABLE, "data": {"file": str(tmp_path / "data.npy")}})
    several = even.posterior.model.simulation.box_of(2)
    likelihood = Gaussian(several, tf.zeros([8, 8, 8], tf.float64), sigma=0.5)
    with pytest.raises(ValueError, match="the posterior of one universe"):
        LogDensity(Posterior(even.posterior.model, likelihood))


def jax_function(density: LogDensity) -> Any:
    """As docs/howto/take_away.md has it."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    number = jax.ShapeDtypeStruct((), "float64")
    vector = jax.ShapeDtypeStruct((density.dimension,), "float64")

    def evaluated(x: Any) -> Any:
        return jax.pure_callback(
            lambda at: density(np.asarray(at)), (number, vector), x, vmap_method="sequential"
        )

    @jax.custom_vjp
    def log_density(x: Any) -> Any:
        return evaluated(x)[0]

    log_density.defvjp(evaluated, lambda gradient, by: (by * gradient,))
    return log_density


def test_blackjax(even):
    blackjax = pytest.importorskip("blackjax")
    import jax

    log_density = jax_function(even)
    start = even.start(1)
    value, gradient = jax.value_and_grad(log_density)(start)
    assert float(value) == even(start)[0]
    np.testing.assert_array_equal(gradient, even(start)[1])
    sampler = blackjax.hmc(log_density, 0.05, np.ones(even.dimension), 4)
    state, step = sampler.init(start), jax.jit(sampler.step)
    accepted = []
    for key in jax.random.split(jax.random.key(0), 8):
        state, about = step(key, state)
        accepted.append(float(about.acceptance_rate))
    # Short steps keep the energy, which they do only with the density's own gradient.
    assert (
        np.mean(accepted) > 0.8 and float(state.logdensity) == even(np.asarray(state.position))[0]
    )
    assert float(state.logdensity) > even(start)[0]


def test_numpyro(even):
    infer = pytest.importorskip("numpyro").infer
    import jax

    log_density, start = jax_function(even), even.start(1)
    kernel = infer.NUTS(potential_fn=lambda x: -log_density(x), max_tree_depth=3)
    chain = infer.MCMC(kernel, num_warmup=4, num_samples=4, progress_bar=False)
    chain.run(jax.random.key(1), init_params=start)
    drawn = np.asarray(chain.get_samples())
    assert drawn.shape == (4, even.dimension) and even(drawn[-1])[0] > even(start)[0]
