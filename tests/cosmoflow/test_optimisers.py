"""Optimisers against Keras and their formulas, resumed and skipped updates, schedules, layers."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from flowpm_dist.cosmoflow.network import layers
from flowpm_dist.cosmoflow.network.layers import Standardiser
from flowpm_dist.cosmoflow.network.optimisers import Adam, Momentum, Schedule
from flowpm_dist.cosmoflow.planning.options import (
    SC18_TRUST,
    CosineDecay,
    MilestoneDecay,
    MomentumOptions,
    NetworkOptions,
    PolynomialDecay,
    TrainingOptions,
)

SHAPES = [(2, 2, 3, 4), (4,), (5, 3), ()]
# Keras rounds its constants to float32: these stay what they are, as do binary fractions below.
RATE = 2.0**-7
BETAS = (1 - 2.0**-3, 1 - 2.0**-10)


def arrays(seed: int, scale: float = 1.0, dtype=np.float64) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(scale * rng.standard_normal(shape), dtype) for shape in SHAPES]


def variables(seed: int = 0, dtype=np.float64) -> list[tf.Variable]:
    return [tf.Variable(values) for values in arrays(seed, dtype=dtype)]


def run(optimiser, weights, steps, dtype=np.float64) -> list[dict]:
    """Updates with the gradients of these steps, each of another scale."""
    return [
        optimiser.apply([tf.constant(g) for g in arrays(99 + n, 0.1 * (n + 1), dtype)], weights)
        for n in steps
    ]


def state(optimiser, weights) -> list[bytes]:
    return [v.numpy().tobytes() for v in (*weights, *optimiser.variables)]


def keras_weights(optimiser) -> list[np.ndarray]:
    weights = [keras.Variable(values, dtype="float64") for values in arrays(0)]
    optimiser.build(weights)
    for n in range(10):
        optimiser.apply([tf.constant(g) for g in arrays(99 + n, 0.1 * (n + 1))])
    return [weight.numpy() for weight in weights]


# Keras's epsilon is added before the bias correction: it is made too small to matter here.
TINY = 1e-30


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda: Adam(Schedule(RATE), *BETAS, epsilon=TINY, clip_norm=None),
            lambda: keras.optimizers.Adam(RATE, *BETAS, epsilon=TINY),
        ),
        (
            lambda: Adam(Schedule(RATE), 0.75, 0.5, TINY, weight_decay=0.5, clip_norm=0.5),
            lambda: keras.optimizers.AdamW(RATE, 0.5, 0.75, 0.5, epsilon=TINY, global_clipnorm=0.5),
        ),
        (
            lambda: Momentum(Schedule(RATE), 0.875, clip_norm=None),
            lambda: keras.optimizers.SGD(RATE, 0.875),
        ),
        (
            lambda: Momentum(
                Schedule(RATE, PolynomialDecay(end_rate=RATE / 4), steps=8), 0.75, clip_norm=None
            ),
            lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.PolynomialDecay(RATE, 8, RATE / 4), 0.75
            ),
        ),
    ],
    ids=["adam", "adam with decay and clipping", "momentum", "momentum with decay"],
)
def test_ten_updates_equal_those_of_keras(ours, theirs):
    weights = variables()
    run(ours(), weights, range(10))
    for found, expected in zip(weights, keras_weights(theirs()), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_float32_weights_follow_float64_ones():
    exact, weights = variables(), variables(dtype=np.float32)
    run(Adam(Schedule(RATE)), exact, range(5))
    run(Adam(Schedule(RATE)), weights, range(5), np.float32)
    for found, expected in zip(weights, exact, strict=True):
        assert found.dtype == tf.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def larc_adam(weights, steps, trust, epsilon=0.1, beta1=0.9, beta2=0.999):
    """Algorithm 1 of Kingma and Ba as printed, its direction scaled by LARC's rate."""
    m, v = ([np.zeros_like(w) for w in weights] for _ in range(2))
    used = []
    for t in range(1, steps + 1):
        for i, g in enumerate(arrays(98 + t, 0.1 * t)):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            u = (m[i] / (1 - beta1**t)) / (np.sqrt(v[i] / (1 - beta2**t)) + epsilon)
            norms = np.sqrt(np.sum(weights[i] ** 2)), np.sqrt(np.sum(u**2))
            free = weights[i].ndim <= 1 or min(norms) == 0
            rate = RATE if free else RATE * min(1, trust * norms[0] / (RATE * norms[1]))
            used.append(rate / RATE)
            weights[i] = weights[i] - rate * u
    return weights, used


def test_larc_bounds_the_update_of_each_tensor():
    weights = variables()
    weights[0].assign(tf.zeros_like(weights[0]))
    start = [weight.numpy() for weight in weights]
    expected, used = larc_adam(start, 6, trust=0.01)
    assert used[0] == 1.0, "a kernel of zero takes the global rate, and so does a bias"
    assert min(used) < 1 and used.count(1.0) > 1, "both branches are to be seen"
    run(Adam(Schedule(RATE), epsilon=0.1, larc=0.01, clip_norm=None), weights, range(6))
    for found, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-12)


def test_larc_lets_no_tensor_change_by_more_than_its_trust():
    weights = variables()
    before = [weight.numpy() for weight in weights]
    run(Adam(Schedule(1e3), larc=SC18_TRUST), weights, [0])
    for old, new in zip(before, weights, strict=True):
        if old.ndim <= 1:
            continue
        change = np.linalg.norm(new.numpy() - old) / np.linalg.norm(old)
        np.testing.assert_allclose(change, SC18_TRUST, rtol=1e-10)


def test_momentum_with_larc_is_algorithm_1_of_you_gitman_and_ginsburg():
    weights = variables()
    expected = [weight.numpy() for weight in weights]
    velocity = [np.zeros_like(w) for w in expected]
    for n in range(3):
        for i, g in enumerate(arrays(99 + n, 0.1 * (n + 1))):
            norms = np.sqrt(np.sum(expected[i] ** 2)), np.sqrt(np.sum(g**2))
            trusted = RATE if g.ndim <= 1 else min(RATE, 0.004 * norms[0] / norms[1])
            velocity[i] = 0.9 * velocity[i] + trusted * g
            expected[i] = expected[i] - velocity[i]
    run(Momentum(Schedule(RATE), larc=0.004, clip_norm=None), weights, range(3))
    for found, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-12)


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
def test_clipping_is_that_of_tensorflow_and_reports_the_norm_before(clip_norm):
    gradients = [tf.constant(g) for g in arrays(1)]
    clipped, norm = tf.clip_by_global_norm(gradients, clip_norm)
    weights, expected = variables(), variables()
    found = Momentum(Schedule(RATE), clip_norm=clip_norm).apply(gradients, weights)
    Momentum(Schedule(RATE), clip_norm=None).apply(clipped, expected)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    np.testing.assert_allclose(found["gradient_norm"], norm, rtol=1e-12)
    assert found["rate"] == RATE and found["finite"]


def test_a_gradient_of_zeros_changes_nothing_but_the_counter():
    weights = variables()
    optimiser = Adam(Schedule(RATE), clip_norm=1.0)
    found = optimiser.apply([tf.zeros_like(w) for w in weights], weights)
    assert found["finite"] and found["gradient_norm"] == 0 and optimiser.iterations == 1
    for weight, start in zip(weights, arrays(0), strict=True):
        np.testing.assert_array_equal(weight, start)


@pytest.mark.parametrize("kind", [Adam, Momentum])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported(kind):
    weights = variables(dtype=np.float32)
    optimiser = kind(Schedule(RATE, PolynomialDecay(), steps=10), weight_decay=0.1, clip_norm=1.0)
    assert all(found["finite"] for found in run(optimiser, weights, range(2), np.float32))
    before = state(optimiser, weights)
    for bad in (np.nan, np.inf, 1e25):  # the square of the last is beyond float32
        gradients = arrays(5, dtype=np.float32)
        gradients[2][3, 1] = bad
        found = optimiser.apply([tf.constant(g) for g in gradients], weights)
        assert not found["finite"] and not np.isfinite(found["gradient_norm"])
        assert state(optimiser, weights) == before
    assert optimiser.iterations == 2
    assert run(optimiser, weights, [2], np.float32)[0]["finite"]
    assert state(optimiser, weights) != before


@pytest.mark.parametrize("kind", [Adam, Momentum])
def test_a_restored_optimiser_goes_on_bit_for_bit(kind, tmp_path):
    def new(seed):
        schedule = Schedule(RATE, PolynomialDecay(), steps=13, warmup_steps=3)
        return kind(schedule, larc=0.01), variables(seed, np.float32)

    optimiser, weights = new(0)
    run(optimiser, weights, range(3), np.float32)
    path = tf.train.Checkpoint(optimiser=optimiser, weights=weights).save(str(tmp_path / "c"))
    run(optimiser, weights, range(3, 6), np.float32)

    for slots_before_restoring in (True, False):
        resumed, others = new(1)
        if slots_before_restoring:
            resumed.build(others)
        status = tf.train.Checkpoint(optimiser=resumed, weights=others).restore(path)
        run(resumed, others, range(3, 6), np.float32)
        status.assert_existing_objects_matched()
        assert state(resumed, others) == state(optimiser, weights)
        assert resumed.iterations == 6


def test_an_update_within_a_function_of_the_training_loop():
    inside, outside = variables(), variables()
    optimiser = Adam(Schedule(RATE))
    step = tf.function(lambda *gradients: optimiser.apply(gradients, inside))
    assert step(*arrays(99, 0.1))["finite"] and step(*arrays(100, 0.2))["finite"]
    run(Adam(Schedule(RATE)), outside, range(2))
    for one, other in zip(inside, outside, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)


def test_defaults_are_those_of_run_files():
    requested = TrainingOptions()
    for optimiser in (Adam(Schedule(RATE)), Momentum(Schedule(RATE))):
        assert (
            (optimiser.larc, optimiser.clip_norm)
            == (requested.trust, requested.max_gradient_norm)
            == (None, 1.0)
        )
        assert optimiser.weight_decay == requested.weight_decay
    assert Momentum(Schedule(RATE)).momentum == MomentumOptions().momentum
    assert TrainingOptions(larc=True).trust == SC18_TRUST
    assert TrainingOptions(clip_norm=0).max_gradient_norm is None


def test_weights_and_gradients_that_do_not_match():
    optimiser, weights = Adam(Schedule(RATE)), variables()
    gradients = [tf.constant(g) for g in arrays(1)]
    with pytest.raises(ValueError, match="gradients of shapes"):
        optimiser.apply([None, *gradients[1:]], weights)
    optimiser.apply(gradients, weights)
    with pytest.raises(ValueError, match="was given weights"):
        optimiser.apply(gradients[:2], weights[:2])
    with pytest.raises(ValueError, match="larc -1 of an optimiser must be positive or None"):
        Adam(Schedule(RATE), larc=-1)
    for name, value in (("beta1", 1), ("beta2", -0.1), ("epsilon", 0)):
        with pytest.raises(ValueError, match=f"{name} {value} of an optimiser must be"):
            Adam(Schedule(RATE), **{name: value})


WARM = {"warmup_steps": 4, "start_factor": 0.25}
LINEAR = PolynomialDecay(end_rate=1.0)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (Schedule(2.0), {0: 2.0, 10**9: 2.0}),
        (Schedule(2.0, **WARM), {0: 0.5, 1: 0.875, 3: 1.625, 4: 2.0, 5: 2.0}),
        (Schedule(2.0, LINEAR, steps=10), {0: 2.0, 1: 1.9, 5: 1.5, 10: 1.0, 11: 1.0, 10**9: 1.0}),
        (Schedule(2.0, PolynomialDecay(end_rate=1.0, power=2.0), steps=10),
         {0: 2.0, 5: 1.25, 10: 1.0, 99: 1.0}),
        (Schedule(2.0, LINEAR, steps=14, **WARM),
         {0: 0.5, 2: 1.25, 4: 2.0, 9: 1.5, 14: 1.0, 15: 1.0}),
        (Schedule(2.0, CosineDecay(end_rate=1.0), steps=16, **WARM),
         {0: 0.5, 4: 2.0, 8: 1.75, 10: 1.5, 16: 1.0, 99: 1.0}),
        (Schedule(2.0, MilestoneDecay(milestones=[(6, 0.5), (8, 0.25)]), **WARM),
         {0: 0.5, 4: 2.0, 5: 2.0, 6: 1.0, 9: 0.5}),
    ],
)  # fmt: skip
def test_schedules_at_their_edges(schedule, rates):
    compiled = tf.function(schedule.rate)
    for step, rate in rates.items():
        np.testing.assert_allclose(schedule.rate(step), rate, rtol=1e-15)
        np.testing.assert_allclose(compiled(tf.constant(step, tf.int64)), rate, rtol=1e-15)
    np.testing.assert_allclose(schedule.rate(np.array(list(rates))), list(rates.values()))


def test_the_optimiser_takes_the_schedules_rate_of_its_counter():
    schedule = Schedule(RATE, PolynomialDecay(), steps=6, warmup_steps=2)
    found = run(Momentum(schedule), variables(), range(8))
    rates = [float(each["rate"]) for each in found]
    np.testing.assert_allclose(rates, [schedule.rate(n) for n in range(8)], rtol=1e-15)
    assert rates[-1] == 0.0


def test_schedules_say_what_is_wrong():
    with pytest.raises(ValueError, match="steps\n  Input .* or equal to 1"):
        Schedule(1.0, steps=0)
    with pytest.raises(ValueError, match="step 8 is followed by step 6"):
        MilestoneDecay(milestones=[(8, 0.5), (6, 0.25)])
    with pytest.raises(ValueError, match="Schedule\n.*\n  Input should be greater than 0"):
        Schedule(-1.0)


def test_rates_for_more_samples_in_a_step():
    assert TrainingOptions(learning_rate=0.1, batch=64).base_rate == 0.1
    for rule, rate in (("sqrt", 0.4), ("linear", 1.6)):
        keys = {"rate_rule": rule, "reference_batch": 4, "learning_rate": 0.1, "batch": 64}
        assert TrainingOptions.model_validate(keys).base_rate == pytest.approx(rate)


def sample(loss: str, batch: int = 5, parameters: int = 3) -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(7)
    outputs = rng.standard_normal((batch, NetworkOptions(loss=loss).outputs_of(parameters)))
    return tf.constant(rng.standard_normal((batch, parameters))), tf.constant(outputs)


@pytest.mark.parametrize(
    ("loss", "error"),
    [("l1", keras.losses.MeanAbsoluteError), ("l2", keras.losses.MeanSquaredError)],
)
def test_l1_and_l2_of_each_sample_equal_those_of_keras(loss, error):
    targets, outputs = sample(loss)
    found = layers.LOSSES[loss](targets, outputs)
    expected = error(reduction=None, dtype="float64")(targets, outputs)
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    mean, sigma = layers.split_prediction(loss, outputs)
    assert mean is outputs and sigma is None


def test_the_likelihood_that_is_trained_doubts_its_gaussians():
    targets, outputs = sample("likelihood")
    mean, sigma = layers.split_prediction("likelihood", outputs)
    np.testing.assert_array_equal(mean, outputs[:, :3])
    np.testing.assert_allclose(2 * np.log(sigma), outputs[:, 3:], rtol=0.01, atol=0.01)
    uniform = scipy.stats.uniform(-np.sqrt(3), 2 * np.sqrt(3)).pdf(0.0)
    density = 0.99 * scipy.stats.norm.pdf(targets, mean, sigma) + 0.01 * uniform
    expected = -np.log(density).mean(axis=1) - 0.5 * np.log(2 * np.pi)
    found = layers.LOSSES["likelihood"](targets, outputs)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_no_outlier_makes_a_large_loss_or_gradient():
    """A target 1.2 from a mean with an error bar of 0.1, and one 1000 from it."""
    outputs = tf.constant([[0.5, 2 * np.log(0.1)]] * 2)
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        loss = layers.doubting_nll(tf.constant([[-0.7], [-1000.0]]), outputs)
    np.testing.assert_allclose(loss, [4.93, 4.93], atol=0.005)
    assert np.abs(tape.gradient(loss, outputs)).max() < 1e-15


def test_no_log_variance_overflows():
    outputs = tf.constant([[1.0, 1e30], [1.0, -1e30]])
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        loss = layers.doubting_nll(tf.zeros([2, 1]), outputs)
    assert np.all(np.isfinite(loss)) and np.all(np.isfinite(tape.gradient(loss, outputs)))
    sigma = layers.split_prediction("likelihood", outputs)[1]
    limit = layers.LOG_VARIANCE_LIMIT
    np.testing.assert_allclose(2 * np.log(sigma[:, 0]), [limit, -limit], rtol=1e-6)


@pytest.mark.parametrize("loss", layers.LOSSES)
def test_gradients_of_the_losses_are_their_differences(loss):
    targets, outputs = sample(loss)
    function = layers.LOSSES[loss]
    theirs, ours = tf.test.compute_gradient(lambda x: function(targets, x), [outputs], 1e-6)
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-8)


def test_losses_of_wrong_shapes():
    targets, outputs = sample("likelihood")
    with pytest.raises(ValueError, match=r"the outputs must be \(5, 3\)"):
        layers.l1(targets, outputs)
    with pytest.raises(ValueError, match=r"the outputs must be \(5, 6\)"):
        layers.doubting_nll(targets, outputs[:, :3])


PRIORS = Standardiser({"Omega_m": (0.25, 0.35), "sigma8": (0.78, 0.95), "n_s": (0.9, 1.0)})


@pytest.mark.parametrize("of", [np.array, tf.constant], ids=["array", "tensor"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_standardised_uniform_priors_have_mean_0_and_deviation_1(of, dtype):
    uniform = [
        scipy.stats.uniform(low, high - low)
        for low, high in zip(PRIORS.low, PRIORS.high, strict=True)
    ]
    mean, std = ([f() for f in fs] for fs in zip(*[(u.mean, u.std) for u in uniform], strict=True))
    shifted = of(np.array([mean, np.add(mean, std), np.subtract(mean, std)], dtype))
    found = PRIORS.standardise(shifted)
    assert np.asarray(found).dtype == dtype
    scale = np.finfo(dtype).eps
    expected = np.repeat([[0.0], [1.0], [-1.0]], 3, axis=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=100 * scale)
    np.testing.assert_allclose(PRIORS.restore(found), shifted, rtol=4 * scale)
    sigmas = PRIORS.restore_sigma(of(np.ones((1, 3), dtype)))
    np.testing.assert_allclose(sigmas, [std], rtol=4 * scale)


def test_priors_that_make_no_sense():
    with pytest.raises(ValueError, match="the prior of n_s from 1.0 to 0.9"):
        Standardiser({"n_s": (1.0, 0.9)})
