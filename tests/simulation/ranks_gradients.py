"""Gradients of whole runs: another code's, finite differences, adjoint against plain."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, by_rank_zero, process_mesh, solo
from reference import pmwd_parameters, reference, relative_rms

import flowpm_dist as fpm
from flowpm_dist.evolution.adjoints import DirectAdjoint, ReversibleAdjoint
from flowpm_dist.statistics import binned_power
from tests.simulation.ranks_simulation import check_pmwd, pmwd_simulation

pytestmark = pytest.mark.timeout(240, method="thread")


def block_of(sim, whole):
    """This rank's block of a whole array."""
    cut = tuple(slice(o, o + n) for o, n in zip(sim.box.offset, sim.box.block, strict=True))
    return tf.constant(whole[cut])


ON_FOUR = [pytest.mark.long] if SIZE == 4 else []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pmwd_lcdm_32", marks=[pytest.mark.ranks(1, 4), *ON_FOUR]),
        pytest.param("pmwd_w0wa_32", marks=pytest.mark.ranks(1)),
        pytest.param("pmwd_lcdm_32_mesh2", marks=pytest.mark.ranks(1)),
        pytest.param("pmwd_open_16", marks=pytest.mark.ranks(1)),
        pytest.param("pmwd_closed_16", marks=pytest.mark.ranks(1)),
    ],
)
def test_pmwd(mesh, name):
    """The run, and its gradient to the white noise and to each parameter of the cosmology.

    The latter goes through transfer, growth, LPT and all steps.
    """
    data = reference(name)
    sim = pmwd_simulation(data, mesh, "float64")
    mesh_factor = int(data["mesh"][0]) // sim.box.grid[0]
    parameters = {k: tf.Variable(v, dtype=tf.float64) for k, v in pmwd_parameters(data).items()}
    noise = block_of(sim, data["white_noise"])
    with tf.GradientTape() as tape:
        tape.watch(noise)
        state = sim.run(white_noise=noise, cosmology=fpm.Cosmology(**parameters))
        density = state.density(mesh_factor)
        cut = tuple(slice(o, o + n) for o, n in zip(density.offset, density.box.block, strict=True))
        part = tf.reduce_sum(density.block * data["loss_weights"][cut])
    to_noise, to_parameters = tape.gradient(part, [noise, parameters])
    check_pmwd(state, density, data, 1e-6)
    loss = float(mesh.world.allreduce(part))
    assert loss == pytest.approx(float(data["loss"]), rel=1e-6)
    whole = fpm.Field(to_noise, sim.box).numpy()
    assert relative_rms(whole[tuple(data["sites"])], data["grad_white_noise"]) < 1e-6
    keys = {"A_s": "A_s_1e9", "w0": "w_0", "wa": "w_a"}
    for key, gradient in to_parameters.items():
        expected = float(data[f"grad_{keys.get(key, key)}"]) * (1e9 if key == "A_s" else 1)
        assert float(gradient) == pytest.approx(expected, rel=1e-5), key


KEEPS_MANY = ReversibleAdjoint(max_error_growth=2.0)
AGAIN = ReversibleAdjoint(keep_fields=False)  # fields of forces are computed again
SCHEMES = {
    "fastpm": dict(integrator="fastpm", steps=fpm.scale_factor_steps(0.1, 1.0, 4)),
    "fastpm, log a": dict(integrator="fastpm", steps=fpm.logarithmic_steps(0.1, 1.0, 4)),
    "bullfrog from a = 0": dict(integrator="bullfrog", steps=np.linspace(0.0, 1.0, 5)),
    "cola": dict(integrator="cola", steps=fpm.scale_factor_steps(0.1, 1.0, 3), adjoint=AGAIN),
    "spectral, 2": dict(
        integrator="fastpm",
        steps=fpm.scale_factor_steps(0.1, 1.0, 2),
        force_gradient="spectral",
        mesh_factor=2,
        deconvolve=True,
        adjoint=AGAIN,
    ),
    "mesh factor 1.5": dict(
        integrator="bullfrog",
        steps=fpm.scale_factor_steps(0.1, 1.0, 2),
        mesh_factor=1.5,
        deconvolve=True,
    ),
    "third order": dict(
        integrator="bullfrog", steps=fpm.scale_factor_steps(0.3, 1.0, 2), lpt_order=3
    ),
    "bullfrog, states kept": dict(
        integrator="bullfrog", steps=fpm.logarithmic_steps(0.02, 1.0, 4), adjoint=KEEPS_MANY
    ),
    "cola, states kept": dict(
        integrator="cola",
        steps=fpm.scale_factor_steps(0.1, 1.0, 3),
        adjoint=AGAIN.model_copy(update={"max_error_growth": 2.0}),
    ),
    "pyramid": dict(
        integrator="bullfrog",
        steps=fpm.scale_factor_steps(0.1, 1.0, 2),
        grid=16,
        box_size=64.0,
        pyramid="0.1%",
        deconvolve=False,
    ),
    **{
        f"massive neutrinos, {integrator}": dict(
            integrator=integrator,
            steps=fpm.scale_factor_steps(0.1, 1.0, 2),
            cosmology={"radiation": True, "m_nu": 0.3, "N_eff": 3.0},
            **({"adjoint": AGAIN} if integrator == "cola" else {}),
        )
        for integrator in ("fastpm", "bullfrog", "cola")
    },
    "uneven box": dict(
        integrator="fastpm",
        steps=fpm.scale_factor_steps(0.1, 1.0, 2),
        grid=(8, 12, 10),
        box_size=(40.0, 42.0, 30.0),
    ),
}


# On several ranks the one that exchanges most, and one whose potential has its halo;
# ranks_outputs.py has BullFrog on them.
LONG = pytest.param("pyramid", marks=pytest.mark.long)
MASSIVE = "massive neutrinos, bullfrog"
ON_RANKS = {
    1: [name for name in SCHEMES if name != "pyramid"],
    2: ["cola", MASSIVE, LONG],
    4: [pytest.param(MASSIVE, marks=pytest.mark.long)],
}
HERE = ON_RANKS.get(SIZE, [])


BATCH_MESHES = {2: ["row:2,col:1", "replica:2,row:1,col:1"], 4: ["replica:2,row:2,col:1"]}


class Problem:
    """A loss of a small run by its white noise and four parameters."""

    def __init__(self, scheme, mesh):
        options = {"grid": 12, "box_size": 48.0} | SCHEMES[scheme]
        universe = options.pop("cosmology", {})
        self.fixed = {name: value for name, value in universe.items() if name == "radiation"}
        self.sim = fpm.Simulation(
            fpm.Cosmology.planck18(), mesh=mesh, precision="float64", halo=8, **options
        )
        self.reversible = options.get("adjoint", ReversibleAdjoint())
        random = np.random.default_rng(3)
        self.noise, self.direction, weights = (
            block_of(self.sim, random.normal(size=self.sim.box.grid)) for _ in range(3)
        )
        self.weights = weights
        # w0 = -1 and wa = 0: where naive derivatives are not finite.
        self.parameters = {"Omega_m": 0.3, "sigma8": 0.8, "w0": -1.0, "wa": 0.0, "Omega_k": 0.0}
        self.parameters["f_NL"] = 100.0
        if universe:  # larger steps, which the others' kinks do not allow
            self.parameters = {"Omega_m": 0.3, "sigma8": 0.8}
            self.parameters |= {n: v for n, v in universe.items() if n not in self.fixed}

    def loss(self, noise, parameters):
        cosmology = fpm.Cosmology(Omega_b=0.05, h=0.7, n_s=0.96, **self.fixed, **parameters)
        state = self.sim.run(white_noise=noise, cosmology=cosmology)
        momentum = 0.1 * tf.reduce_sum(state.velocity.block[..., 0] * self.weights)
        return tf.reduce_sum(state.density().block * self.weights) + momentum

    def whole_loss(self, noise, parameters):
        return float(self.sim.box.mesh.world.allreduce(self.loss(noise, parameters)))

    def gradient(self, adjoint):
        """Along the direction in the noise, and to each parameter."""
        self.sim.options = self.sim.options.model_copy(update={"adjoint": adjoint})
        parameters = {k: tf.Variable(v, dtype=tf.float64) for k, v in self.parameters.items()}
        with tf.GradientTape() as tape:
            tape.watch(self.noise)
            part = self.loss(self.noise, parameters)
        to_noise, slopes = tape.gradient(part, [self.noise, parameters])
        along = self.sim.box.mesh.world.allreduce(tf.reduce_sum(to_noise * self.direction))
        return {"noise": float(along)} | {k: float(v) for k, v in slopes.items()}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("scheme", HERE)
def test_finite_differences(line, scheme):
    """Steps as the reference's README advises: small enough not to cross kinks of cloud-in-cell."""
    problem = Problem(scheme, line)
    adjoint, plain = problem.gradient(problem.reversible), problem.gradient(DirectAdjoint())
    for name, slope in adjoint.items():
        assert slope == pytest.approx(plain[name], rel=1e-9), name
    step = 1e-8
    shift = step * problem.direction
    values = {
        "noise": [
            problem.whole_loss(problem.noise + s, problem.parameters) for s in (shift, -shift)
        ]
    }
    scales = {"noise": step}
    for name, value in problem.parameters.items():
        scales[name] = {"wa": 1e-6, "f_NL": 1e-3}.get(name, 1e-7)
        if problem.fixed:
            scales[name] = {"m_nu": 1e-4, "N_eff": 1e-3}.get(name, 1e-5)
        values[name] = [
            problem.whole_loss(problem.noise, problem.parameters | {name: value + s})
            for s in (scales[name], -scales[name])
        ]
    precision = 1e-11 if problem.fixed else 1e-13  # growth with radiation has this precision
    for name, (up, down) in values.items():
        rounding = precision * abs(up) / scales[name]
        difference = (up - down) / (2 * scales[name])
        assert adjoint[name] == pytest.approx(difference, rel=1e-6, abs=10 * rounding), name


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
def test_a_mesh_factor_that_is_not_whole(mesh):
    """The run, its density and its gradients are those of one rank; a halo is half a cell wider."""

    def found_on(ranks):
        sim = two_steps(8, ranks, mesh_factor=1.5, deconvolve=True, halo=5)
        whole = np.random.default_rng(2).normal(size=[8, 8, 8])
        noise, s8 = block_of(sim, whole), tf.Variable(0.8, dtype=tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(noise)
            cosmology = fpm.Cosmology.planck18().replace(sigma8=s8)
            state = sim.run(white_noise=noise, cosmology=cosmology)
            density = state.density(1.5)
            part = tf.reduce_sum(density.block**2)
        to_noise, slope = tape.gradient(part, [noise, s8])
        fields = state.displacement, density, fpm.Field(to_noise, sim.box)
        return dict(zip("sdn", (f.numpy() for f in fields), strict=True)) | {"s8": float(slope)}

    expected = by_rank_zero("mesh-factor", lambda: found_on(solo()))
    assert expected["d"].mean() == pytest.approx(1, abs=1e-13)
    for name, value in found_on(mesh).items():
        size = np.abs(expected[name]).max()
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-10 * size, err_msg=name)


def two_steps(grid, mesh, cosmology=None, **options):
    """A simulation of two steps, with cells of 4 Mpc/h."""
    steps = fpm.scale_factor_steps(0.1, 1.0, 2)
    cosmology = cosmology or fpm.Cosmology.planck18()
    options |= {"mesh": mesh, "precision": "float64"}
    return fpm.Simulation(cosmology, grid, 4.0 * grid, steps, **options)


def test_flat_field_has_finite_gradients(line):
    """No power, no noise: every derivative is a number."""
    sim = two_steps(12, line)
    noise = tf.zeros(sim.box.block, tf.float64)
    parameters = {"Omega_m": 0.3, "A_s": 2e-9, "w0": -1.0, "wa": 0.0, "f_NL": 0.0}
    variables = {k: tf.Variable(v, dtype=tf.float64) for k, v in parameters.items()}
    with tf.GradientTape() as tape:
        tape.watch(noise)
        cosmology = fpm.Cosmology(Omega_b=0.05, h=0.7, n_s=0.96, **variables)
        density = sim.run(white_noise=noise, cosmology=cosmology).density().block
        part = tf.reduce_sum(density**2)
    for gradient in tf.nest.flatten(tape.gradient(part, [noise, variables])):
        assert np.isfinite(gradient.numpy()).all()


def test_what_has_no_derivative_says_so(line):
    """Second derivatives, and parameters that were evaluated before the tape."""
    omega = tf.Variable(0.3, dtype=tf.float64)
    cosmology = fpm.Cosmology.planck18().replace(Omega_m=omega)
    sim = two_steps(8, line, cosmology)
    with tf.GradientTape(), pytest.raises(ValueError, match=r"run\(cosmology=...\)"):
        sim.run(seed=1)
    noise = sim.run(seed=1).white_noise.block
    with tf.GradientTape() as outer:
        outer.watch(noise)
        with tf.GradientTape() as inner:
            inner.watch(noise)
            displacement = sim.run(white_noise=noise, cosmology=cosmology).displacement.block
            loss = tf.reduce_sum(displacement**2)
        slope = tf.reduce_sum(inner.gradient(loss, noise) ** 2)
    with pytest.raises(LookupError, match="has no second derivative"):
        outer.gradient(slope, noise)
    with tf.GradientTape() as tape:
        tape.watch(noise)
        bins = binned_power(sim.run(white_noise=noise, cosmology=cosmology).density())
    with pytest.raises(RuntimeError, match="use flowpm_dist.jacobian"):
        tape.jacobian(bins, noise)
    with tf.autodiff.ForwardAccumulator(noise, tf.ones_like(noise)):
        with pytest.raises(LookupError, match="flowpm_dist.jacobian in place of"):
            sim.run(white_noise=noise, cosmology=cosmology)


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
def test_jacobian_and_fisher_matrix(mesh):
    """Against central differences, of each bin by a field and by each parameter."""
    sim = two_steps(8, mesh, halo=8)
    noise = sim.lpt(seed=3).white_noise
    inputs = {"noise": noise, "Omega_m": 0.3, "sigma8": 0.8}
    calls = []

    def spectrum(x):
        calls.append(x)
        parameters = {name: x[name] for name in ("Omega_m", "sigma8")}
        cosmology = fpm.Cosmology(Omega_b=0.05, h=0.7, n_s=0.96, **parameters)
        density = sim.run(white_noise=x["noise"], cosmology=cosmology).density()
        return binned_power(density, bins=[0.1, 0.5, 0.8])

    found = fpm.jacobian(spectrum, inputs, mesh)
    assert len(calls) == 1
    direction = block_of(sim, np.random.default_rng(3).normal(size=sim.box.grid))
    along = tf.reduce_sum(found.derivatives["noise"] * direction, axis=[1, 2, 3])
    slopes = dict(found.derivatives) | {"noise": mesh.world.allreduce(along).numpy()}
    for name, value in inputs.items():
        shift, step = (direction, 1e-8) if name == "noise" else (1.0, 1e-7)
        up, down = (spectrum(inputs | {name: value + s * shift}) for s in (step, -step))
        difference = (up - down).numpy() / (2 * step)
        rounding = 1e-13 * np.abs(up) / step
        np.testing.assert_allclose(found.values, (up + down) / 2, rtol=1e-9)
        assert (np.abs(slopes[name] - difference) < 1e-6 * np.abs(difference) + rounding).all(), (
            name
        )

    with pytest.raises(ValueError, match="noise is a field"):
        found.fisher(np.ones(found.values.size))
    del found.derivatives["noise"]
    parameters = dataclasses.replace(found, fields=frozenset())
    factor = np.random.default_rng(4).normal(size=(found.values.size,) * 2)
    covariance = factor @ factor.T + np.eye(found.values.size)
    columns = np.stack(list(parameters.derivatives.values()), axis=1)
    expected = columns.T @ np.linalg.inv(covariance) @ columns
    np.testing.assert_allclose(parameters.fisher(covariance), expected, rtol=1e-9)
    variances = np.diag(covariance)
    np.testing.assert_allclose(
        parameters.fisher(variances), columns.T @ (columns / variances[:, None]), rtol=1e-12
    )


def test_jacobians_that_are_refused(line):
    """On both ranks, so that none waits."""
    shared = functools.partial(fpm.jacobian, inputs={"x": 1.0, "y": 2.0}, mesh=line)
    with pytest.raises(ValueError, match="outputs differ between ranks"):
        shared(lambda p: tf.stack([p["x"] * p["y"] * (1 + line.rank)]))
    with pytest.raises(ValueError, match="no output depends on y"):
        shared(lambda p: p["x"] * float(p["y"]))
    with pytest.raises(ValueError, match="returned a Field"):
        shared(lambda p: two_steps(8, line).lpt(seed=1).density() * p["x"])
    with pytest.raises(ValueError, match="x is int32: floating"):
        shared(lambda p: p["x"], inputs={"x": tf.constant(1)})
    found = shared(lambda p: tf.stack([p["x"] ** 2, p["y"] + np.nan]))
    np.testing.assert_array_equal(found.derivatives["x"], [2.0, 0.0])  # complete on each rank
    with pytest.raises(ValueError, match="output 1 or a derivative of it is not finite"):
        found.fisher([1.0, 1.0])
    found = shared(lambda p: tf.stack([p["x"], p["y"]]))
    for covariance, message in (
        (np.eye(3), "shape .3, 3., and there are 2 outputs"),
        ([[1.0, 0.5], [0.0, 1.0]], "not symmetric"),
        (np.ones([2, 2]), "not positive definite"),
        ([1.0, 0.0], "not positive definite"),
    ):
        with pytest.raises(ValueError, match=message):
            found.fisher(covariance)


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shape", BATCH_MESHES.get(SIZE, []))
def test_batch_gradients_arrive_complete(shape):
    """Each universe's parameters get their own slope, on every rank."""
    batch, mesh = 2, process_mesh(shape)
    sim = two_steps(8, mesh, lpt_order=1, halo=8)
    s8 = [tf.Variable(value, dtype=tf.float64) for value in (0.7, 0.9)]
    base = fpm.Cosmology.planck18()
    with tf.GradientTape() as tape:
        state = sim.run(seed=[1, 2], cosmology=[base.replace(sigma8=s) for s in s8])
        part = tf.reduce_sum(state.density().block ** 2)
    slopes = [float(g) for g in tape.gradient(part, s8)]
    for seed, s, slope in zip((1, 2), s8, slopes, strict=True):
        step = 1e-6
        up, down = (
            sim.run(seed=[seed] * batch, cosmology=base.replace(sigma8=float(s) + d)).density()
            for d in (step, -step)
        )
        difference = float(
            mesh.world.allreduce(tf.reduce_sum(up.block**2) - tf.reduce_sum(down.block**2))
        ) / (2 * step * batch)
        assert slope == pytest.approx(difference, rel=1e-4)
