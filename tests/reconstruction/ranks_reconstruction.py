"""Initial conditions from observed universes: gradients, searches, draws; on any mesh the same."""

import functools
import json
import os

import numpy as np
import pytest
import tensorflow as tf
from derivatives import slope_at_zero
from ranks import by_rank_zero, process_mesh, shared_folder, solo
from scipy import stats

from flowpm_dist import Cosmology, Simulation, correlation_coefficient, scale_factor_steps
from flowpm_dist.jobs.session import CheckpointError
from flowpm_dist.observables import ForwardModel
from flowpm_dist.observables.bias import bias_expansion
from flowpm_dist.reconstruction import (
    LBFGS,
    Annealing,
    Gaussian,
    NoProgressError,
    PointCheckpoints,
    Poisson,
    Posterior,
    Search,
    Stage,
    Unknowns,
    default_stages,
    large_modes,
)
from flowpm_dist.reconstruction.posterior import Evaluation, EvenPosterior
from flowpm_dist.reconstruction.preconditioner import DAMPING, REMAINDER

GRID = 16
SIZE_OF_BOX = 64.0  # [Mpc/h]
COSMOLOGY = Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.67, n_s=0.96, sigma8=0.8)


def simulation(mesh, order=2, steps=2, **options):
    options = {"precision": "float64", **options}
    edges = scale_factor_steps(0.2, 1.0, steps)
    return Simulation(COSMOLOGY, GRID, SIZE_OF_BOX, edges, lpt_order=order, mesh=mesh, **options)


@functools.cache
def shared_simulation(mesh, order, evolves):
    """One for all tests, as what it is lowered to is kept; the particle mesh holds its halo."""
    return simulation(mesh, order)


def model_of(mesh, structure, **options):
    order = 1 if structure == "1lpt" else 2
    model = ForwardModel(shared_simulation(mesh, order, structure == "pm"), structure, **options)
    model.hold_halo()
    return model


known_model = functools.cache(model_of)


def whole(seed):
    """A field that all ranks know."""
    return np.random.default_rng(seed).normal(size=[GRID] * 3)


def block_of(array, box):
    """This rank's part."""
    return tf.constant(array[box.place[-3:]], box.dtype)


def posterior_of(model, *, sigma=0.5, kind=Gaussian, priors=None, seed=3):
    """Of random data: nothing of a gradient depends on where they are from."""
    box = model.box
    observed = block_of((whole(seed + 1) > -1).astype(float), box)
    if kind is Gaussian:
        likelihood = Gaussian(box, block_of(1 + whole(seed), box), sigma, observed)
    else:
        counts = np.random.default_rng(seed).poisson(3.0, size=[GRID] * 3)
        likelihood = Poisson(box, block_of(counts.astype(float), box), 3.0, observed)
    return Posterior(model, likelihood, priors)


F_NL = (-2000.0, 3000.0)
CASES = {
    "linear": (
        "linear",
        {"bias": {"b": 1.4}},
        {"b": (1.0, 2.0), "sigma8": (0.6, 1.0), "noise_amplitude": (0.5, 2.0), "f_NL": F_NL},
        Gaussian,
    ),
    "1lpt": (
        "1lpt",
        {"redshift_space": "z"},
        {"Omega_m": (0.2, 0.4), "amplitude": (0.8, 1.2), "f_NL": F_NL},
        Poisson,
    ),
    "2lpt": (
        "2lpt",
        {"bias": {"b1": 0.5, "b2": 0.2, "bs2": -0.3}, "redshift_space": "x"},
        {"b1": (0.0, 1.0), "b2": (-1.0, 1.0), "bs2": (-1.0, 1.0)},
        Gaussian,
    ),
    "pm": ("pm", {}, {"Omega_m": (0.2, 0.4), "sigma8": (0.6, 1.0)}, Poisson),
}


@functools.cache
def evaluated(mesh, case):
    """A posterior of a case on a mesh, a point, and what is found there."""
    structure, options, priors, kind = CASES[case]
    posterior = posterior_of(model_of(mesh, structure, **options), kind=kind, priors=priors)
    box = posterior.space.box
    point = Unknowns(block_of(whole(1), box), tf.constant(np.linspace(-0.5, 0.7, len(priors))))
    return posterior, point, posterior.evaluate(point, annealing_of(case))


@functools.cache
def evaluated_alone(case):
    """What rank 0 finds without the others, as whole fields."""
    return by_rank_zero(f"evaluated-{case}", lambda: found_in(evaluated(solo(), case)[2]))


def found_in(evaluation):
    slope = evaluation.gradient
    return {"loss": evaluation.loss, "field": slope.field, "parameters": slope.parameters}


def assert_slopes_are(gradient, alone, box, rtol):
    np.testing.assert_allclose(gradient.parameters, alone["parameters"], rtol=rtol, atol=1e-8)
    np.testing.assert_allclose(gradient.field, block_of(alone["field"], box), atol=1e-9)


def annealing_of(case):
    return Annealing(8.0, 2.0) if case in ("linear", "pm") else Annealing()


@pytest.mark.dealt
@pytest.mark.parametrize(
    "case",
    # Bias of second order and redshift space along x: what ranks exchange most for.
    [pytest.param(c, marks=pytest.mark.ranks(4)) if c == "2lpt" else c for c in CASES],
)
def test_gradient_is_the_slope_and_the_same_on_any_mesh(mesh, case):
    posterior, point, found = evaluated(mesh, case)
    box, alone = posterior.space.box, evaluated_alone(case)
    np.testing.assert_allclose(found.loss, alone["loss"], rtol=1e-11)
    assert_slopes_are(found.gradient, alone, box, rtol=1e-9)
    parameters = tf.constant(np.linspace(1.0, -1.0, len(posterior.priors)))
    direction = Unknowns(block_of(whole(2), box), parameters)
    slope = float(posterior.space.dot(found.gradient, direction))
    # Cloud-in-cell has kinks: steps so short that hardly a particle crosses one.
    step, tolerance = (1e-3, 1e-8) if case == "linear" else (1e-6, 5e-5)

    def loss(h):
        return posterior.evaluate(point.plus(h, direction), annealing_of(case)).loss

    assert slope == pytest.approx(slope_at_zero(loss, step), rel=tolerance)


def even(mesh, case):
    """A posterior in coordinates of even curvature, and coordinates."""
    posterior, point, _ = evaluated(mesh, case)
    annealing = annealing_of(case)
    objective = EvenPosterior(posterior, annealing)
    return objective, objective.scaling.to_even(point), point


@functools.cache
def even_alone(case):
    def found():
        objective, u, _ = even(solo(), case)
        evaluation = objective.evaluate(u)
        return found_in(evaluation) | {"u": u.parameters, "volume": evaluation.volume}

    return by_rank_zero(f"even-{case}", found)


@pytest.mark.parametrize("case", ["linear", "2lpt"])
def test_even_coordinates(mesh, case):
    """There and back; the density in them has the slope that is told, on any mesh the same."""
    objective, u, point = even(mesh, case)
    back = objective.scaling.from_even(u)
    np.testing.assert_allclose(back.field, point.field, atol=1e-12)
    np.testing.assert_allclose(back.parameters, point.parameters, atol=1e-12)
    found, box = objective.evaluate(u), objective.space.box
    alone = even_alone(case)
    np.testing.assert_allclose(u.parameters, alone["u"], rtol=1e-9)
    np.testing.assert_allclose(found.volume, alone["volume"], rtol=1e-11)
    np.testing.assert_allclose(found.loss, alone["loss"], rtol=1e-11)
    assert_slopes_are(found.gradient, alone, box, rtol=1e-8)
    along = Unknowns(block_of(whole(2), box), tf.ones_like(u.parameters))
    step, tolerance = (1e-3, 1e-8) if case == "linear" else (1e-6, 5e-5)
    slope = slope_at_zero(lambda h: objective.evaluate(u.plus(h, along)).loss, step)
    assert float(objective.space.dot(found.gradient, along)) == pytest.approx(slope, rel=tolerance)


def test_an_amplitude_multiplies_the_noise(mesh):
    """And gives the universe and the response of its cosmology."""
    given = {name: tf.constant(x, tf.float64) for name, x in (("sigma8", 0.9), ("Omega_m", 0.28))}
    model = model_of(mesh, "2lpt", **CASES["2lpt"][1])
    noise = block_of(whole(1), model.box)
    field = model(noise, given)
    np.testing.assert_allclose(field, model.observe(model.run(noise, given), given), rtol=1e-9)
    linear = known_model(mesh, "linear")
    response = linear.simulation.linear_amplitude(COSMOLOGY.replace(**given))
    np.testing.assert_allclose(linear.linear_response(given), response, rtol=1e-9)


def test_bias_weights(mesh):
    """Against numpy's transforms, of a field without mean and without waves of two cells."""
    box = known_model(mesh, "2lpt").box
    k = np.fft.fftfreq(GRID)
    waves = np.stack(np.meshgrid(k, k, k, indexing="ij"))
    square = np.sum(waves**2, axis=0)
    spectrum = np.fft.fftn(0.3 * whole(5))
    spectrum[(square == 0) | (np.abs(waves) == 0.5).any(axis=0)] = 0
    square[0, 0, 0] = 1
    delta = np.fft.ifftn(spectrum).real
    tide = np.zeros_like(delta)
    for i, j in np.ndindex(3, 3):
        kernel = waves[i] * waves[j] / square - (i == j) / 3
        tide += np.fft.ifftn(kernel * spectrum).real ** 2
    expected = 1 + 0.7 * delta - 0.4 * (delta**2 - np.mean(delta**2)) + 0.9 * (tide - tide.mean())
    factors = tf.constant([0.7, -0.4, 0.9], tf.float64)
    found = bias_expansion(box)(block_of(delta, box), factors)
    np.testing.assert_allclose(found, block_of(expected, box), atol=1e-12)


def test_likelihoods(mesh):
    """Against scipy's, over the cells that are observed."""
    box = known_model(mesh, "linear").box
    density, data = 1 + 0.3 * whole(1), 1 + whole(2)
    mask = whole(3) > 0
    sigma = 0.5 + whole(4) ** 2
    gaussian = Gaussian(
        box, block_of(data, box), block_of(sigma, box), block_of(mask.astype(float), box)
    )
    mesh_sum = mesh.world.allreduce(gaussian.parts(block_of(density, box)))
    log = stats.norm(density, sigma)
    expected = (log.logpdf(density) - log.logpdf(data))[mask].sum()
    np.testing.assert_allclose(mesh_sum, expected, rtol=1e-12)
    assert gaussian.count == mask.sum()
    assert gaussian.information() == pytest.approx(np.mean(mask / sigma**2))
    erring = Gaussian(
        box, block_of(data, box), block_of(sigma, box), block_of(mask.astype(float), box), 0.4
    )
    wider = np.hypot(sigma, 0.4 * np.maximum(data, 0))
    assert erring.information() == pytest.approx(np.mean(mask / wider**2))
    assert erring.information(Annealing(1.0)) == pytest.approx(np.mean(mask / sigma**2))
    mesh_sum = mesh.world.allreduce(erring.parts(block_of(density, box)))
    expected = 0.5 * np.sum(((density - data) / wider)[mask] ** 2)
    np.testing.assert_allclose(mesh_sum, expected, rtol=1e-12)
    louder = np.hypot(1.5 * sigma, 0.4 * np.maximum(data, 0))
    of_amplitude = erring.parts(
        block_of(density, box), noise_amplitude=tf.constant(1.5, tf.float64)
    )
    expected = np.sum((0.5 * ((density - data) / louder) ** 2 + np.log(louder / wider))[mask])
    np.testing.assert_allclose(mesh.world.allreduce(of_amplitude), expected, rtol=1e-12)
    counts = np.random.default_rng(5).poisson(2.0, size=density.shape)
    positive = np.abs(density) + 0.5
    poisson = Poisson(
        box, block_of(counts.astype(float), box), 2.0, block_of(mask.astype(float), box)
    )
    mesh_sum = mesh.world.allreduce(poisson.parts(block_of(positive, box)))
    best = stats.poisson(np.maximum(counts, 1e-300)).logpmf(counts)
    expected = (best - stats.poisson(2 * positive).logpmf(counts))[mask].sum()
    np.testing.assert_allclose(mesh_sum, expected, rtol=1e-9)
    empty = block_of(np.full(density.shape, -40.0), box)
    with tf.GradientTape() as tape:
        tape.watch(empty)
        parts = poisson.parts(empty)
    slope = -block_of((counts * mask).astype(float), box) / 0.02  # of the logarithm of the rate
    np.testing.assert_allclose(tape.gradient(parts, empty), slope, rtol=1e-9)


@functools.cache
def known_posterior(mesh, structure, fits_sigma8):
    """Of a mock: one for all searches, as what its likelihood is lowered to is kept."""
    model = known_model(mesh, structure)
    truth = model.run(block_of(whole(7), model.box), {})
    data = model.observe(truth, {})
    priors = {"sigma8": (0.6, 1.0)} if fits_sigma8 else None
    return Posterior(model, Gaussian(model.box, data, 0.3), priors)


def search_on(mesh, folder=None, *, structure, fits_sigma8=False, every=3, evaluations=8):
    posterior = known_posterior(mesh, structure, fits_sigma8)
    stages = [Stage(Annealing(8.0, 3.0), evaluations), Stage(Annealing(), evaluations)]
    checkpoints = None if folder is None else PointCheckpoints(folder, posterior.space)
    return Search(posterior, LBFGS(), stages, checkpoints=checkpoints, every=every)


def path_of(search, **options):
    """Losses and the end of a search."""
    rows = []
    point = search.run(lambda row, _: rows.append(row), **options)
    return [row.loss for row in rows], point


def iterates(mesh, structure):
    return path_of(search_on(mesh, structure=structure, fits_sigma8=True))


@functools.cache
def iterates_alone(structure):
    def found():
        losses, point = iterates(solo(), structure)
        return {"losses": losses, "field": point.field, "parameters": point.parameters}

    return by_rank_zero(f"iterates-{structure}", found)


@pytest.mark.parametrize(
    "structure",
    [
        pytest.param("1lpt", marks=[pytest.mark.ranks(4), pytest.mark.long]),
        pytest.param("pm", marks=[pytest.mark.ranks(2, 4), pytest.mark.long]),
    ],
)
def test_the_same_iterates_on_any_mesh(mesh, structure):
    losses, point = iterates(mesh, structure)
    alone = iterates_alone(structure)
    assert len(losses) >= 8  # of 16 evaluations; the others were steps that were too long
    np.testing.assert_allclose(losses, alone["losses"], rtol=1e-9)
    box = known_model(mesh, structure).box
    np.testing.assert_allclose(point.field, block_of(alone["field"], box), atol=1e-7)
    np.testing.assert_allclose(point.parameters, alone["parameters"], atol=1e-7)


class StoppedHereError(Exception):
    """As if the job were killed."""


def test_a_search_that_was_killed_goes_on_exactly(line, tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    # A search is through with a linear universe before it could be killed.
    search_of = functools.partial(search_on, structure="1lpt", every=5)
    known, end = path_of(search_of(line))
    killed = search_of(line, folder)

    def stop(row, _):
        if row.iteration == 7:
            raise StoppedHereError

    with pytest.raises(StoppedHereError):
        killed.run(stop)
    again = search_of(line, folder)
    losses, point = path_of(again, resume=True)
    assert losses == known[5:]
    np.testing.assert_array_equal(point.field, end.field)
    other = process_mesh("row:1,col:2")
    losses, _ = path_of(search_of(other, folder), resume=True)
    assert losses
    np.testing.assert_allclose(losses, known[-len(losses) :], rtol=1e-9)
    wrong = search_of(line, folder, fits_sigma8=True)
    with pytest.raises(CheckpointError, match="names"):
        wrong.run(resume=True)
    last = max(folder.glob("iteration-*.zarr"))
    line.barrier()
    if line.world.index == 0:
        for file in last.rglob("*"):
            if file.is_file() and file.name != "zarr.json":
                os.truncate(file, 3)
    line.barrier()
    with pytest.raises(CheckpointError, match=rf"{last.name} is damaged .* uses iteration"):
        search_of(line, folder).run(resume=True)


@pytest.mark.parametrize("ended", [False, True])
def test_checkpoints_of_an_older_search_are_refused(line, tmp_path_factory, ended):
    folder = shared_folder(tmp_path_factory)
    search_of = functools.partial(search_on, structure="linear", evaluations=2, every=1)
    path_of(search_of(line, folder))
    if line.world.index == 0:
        for path in folder.glob("iteration-*.zarr"):
            about = json.loads((path / "zarr.json").read_text())
            progress = about["attributes"]["progress"]
            del progress["losses"], progress["left"]
            progress["ended"] = ended
            (path / "zarr.json").write_text(json.dumps(about))
    line.barrier()
    with pytest.raises(CheckpointError, match="older version .* begin anew with --overwrite"):
        search_of(line, folder).run(resume=True)


def test_linear_initial_conditions_are_found(mesh):
    """Of linear theory with little noise, to rounding of what the noise lets through."""
    search = search_on(mesh, structure="linear", evaluations=12)
    _, point = path_of(search)
    model = search.posterior.model
    truth = Unknowns(block_of(whole(7), model.box), point.parameters)
    scaling = search.posterior.scaling()
    wiener = truth - scaling.from_even(scaling.from_even(truth))
    np.testing.assert_allclose(point.field, wiener.field, atol=1e-3)


@functools.cache
def masked_posterior(mesh):
    """Of a linear universe: a quarter is masked, and an eighth has twice the noise."""
    model = known_model(mesh, "linear")
    data = model(block_of(whole(7), model.box), {}) + 0.2 * block_of(whole(8), model.box)
    mask = np.ones([GRID] * 3)
    mask[: GRID // 2, : GRID // 2] = 0
    mask[GRID // 2 :, GRID // 2 :, GRID // 2 :] = 0.25
    return Posterior(model, Gaussian(model.box, data, 0.2, block_of(mask, model.box)))


def test_a_preconditioner_undoes_the_curvature_of_a_mask(mesh):
    """Which is the change of the gradient, as the loss of a linear universe is a parabola."""
    objective = EvenPosterior(masked_posterior(mesh))
    space, preconditioned = objective.space, objective.scaling.preconditioned
    origin = objective.evaluate(space.zeros()).gradient
    wave = np.tile(np.sin(2 * np.pi / GRID * np.arange(GRID)), [GRID, GRID, 1])
    wave[GRID // 2 :], wave[:, GRID // 2 :] = 0, 0  # where the mask is
    none = space.zeros().parameters
    x, y, masked = (Unknowns(block_of(f, space.box), none) for f in (whole(1), whole(2), wave))
    for each, before in ((x, 0.4), (masked, 0.7)):
        curved = (objective.evaluate(each).gradient - origin).plus(DAMPING, each)
        assert space.norm(curved - each) > before * space.norm(each)
        assert space.norm(preconditioned(curved) - each) < REMAINDER * space.norm(each)
    assert space.dot(x, preconditioned(y)) == pytest.approx(
        space.dot(preconditioned(x), y), rel=1e-10
    )
    even = known_posterior(mesh, "linear", False).scaling()
    assert even.preconditioned(x).field is x.field


@pytest.mark.ranks(1)
def test_a_masked_search_says_how_far_it_is(mesh):
    """Against the minimum of the parabola by conjugate gradients.

    On two ranks a search is killed and resumed, and the preconditioner is tested.
    """
    posterior = masked_posterior(mesh)
    objective, space = EvenPosterior(posterior), posterior.space
    point = space.zeros()
    here = objective.evaluate(point).gradient
    residual = direction = -here
    while (size := space.dot(residual, residual)) > 1e-3:
        curved = objective.evaluate(direction).gradient - here
        length = float(size / space.dot(direction, curved))
        point, residual = point.plus(length, direction), residual.plus(-length, curved)
        direction = residual.plus(float(space.dot(residual, residual) / size), direction)
    least = objective.evaluate(point).loss
    for evaluations, outcome in ((8, "evaluations"), (60, "converged")):
        search = Search(posterior, LBFGS(), [Stage(Annealing(), evaluations)])
        rows = []
        found = search.run(lambda row, _, rows=rows: rows.append(row))
        to_gain = search.evaluate(found).loss - least
        assert search.outcome == outcome
        assert -0.1 < to_gain < rows[-1].left  # curvatures are above 1/200
        assert (rows[-1].left < 0.5) == (outcome == "converged")
    assert rows[-1].evaluations < 35


class Broken:
    """An objective that is finite where the search begins, and nowhere else."""

    def __init__(self, posterior, everywhere=False):
        self.space, self._posterior = posterior.space, posterior
        self.scaling = posterior.scaling()
        self._first, self._everywhere = not everywhere, everywhere

    def evaluate(self, u):
        found = self._posterior.evaluate(u)
        if self._first:
            self._first = False
            return found
        return Evaluation(found.data * np.nan, found.prior, found.gradient)


def test_values_that_are_not_finite(mesh):
    posterior = posterior_of(known_model(mesh, "linear"))
    optimiser = LBFGS()
    optimiser.start(Broken(posterior, everywhere=True), posterior.space.zeros())
    with pytest.raises(NoProgressError, match="not finite"):
        optimiser.iterate()
    start = posterior.space.zeros()
    optimiser.start(Broken(posterior), start)
    with pytest.raises(NoProgressError, match="not finite"):
        for _ in range(2):
            optimiser.iterate()


@pytest.mark.ranks(1)
def test_stages_end_with_what_is():
    posterior = posterior_of(known_model(solo(), "linear"), sigma=0.1)
    stages = default_stages(posterior, 100)
    assert stages[-1].annealing == Annealing()
    assert sum(stage.evaluations for stage in stages) == pytest.approx(100, abs=len(stages))
    assert stages[0].annealing == Annealing(16.0, pytest.approx(30.0))
    for name in ("radius", "inflation"):
        values = [getattr(stage.annealing, name) for stage in stages]
        assert values == sorted(values, reverse=True)
    noisy = default_stages(posterior_of(known_model(solo(), "linear"), sigma=3.0), 100)
    assert {stage.annealing.inflation for stage in noisy} == {1.0}


def test_what_a_stage_leaves_is_for_the_next(mesh):
    model = known_model(mesh, "2lpt")
    truth = model.run(block_of(whole(7), model.box), {})
    posterior = Posterior(model, Gaussian(model.box, truth.density().block, 0.3))
    stages = [Stage(Annealing(16.0, 100.0), 9), Stage(Annealing(), 2)]
    rows = []
    Search(posterior, LBFGS(), stages).run(lambda row, _: rows.append(row))
    first = max(row.evaluations for row in rows if row.stage == 1)
    assert first < 9
    assert rows[-1].stage == 2
    assert first + 2 < rows[-1].evaluations <= 11 + 1


def test_modes_of_large_scales(mesh):
    """Against numpy's transform."""
    model = known_model(mesh, "linear")
    field = whole(9)
    found = large_modes(block_of(field, model.box), model.box)
    spectrum = np.fft.fftn(field)
    from flowpm_dist.reconstruction.diagnostics import wave_numbers

    waves = wave_numbers()
    known = spectrum[tuple(waves.T)] * np.sqrt(2 / GRID**3)
    np.testing.assert_allclose(found, np.concatenate([known.real, known.imag]), atol=1e-10)


def test_lpt_is_where_a_run_begins(mesh):
    sim = shared_simulation(mesh, 2, False)
    lpt = sim.lpt(seed=3, a=0.2)
    short = Simulation(
        COSMOLOGY, GRID, SIZE_OF_BOX, [0.2, 0.2002], mesh=mesh, precision="float64"
    ).run(seed=3)
    scale = np.abs(short.displacement.block).max()
    np.testing.assert_allclose(lpt.displacement.block, short.displacement.block, atol=3e-3 * scale)
    scale = np.abs(short.velocity.block).max()
    np.testing.assert_allclose(lpt.velocity.block, short.velocity.block, atol=3e-3 * scale)
    with pytest.raises(ValueError, match="above 0"):
        sim.lpt(seed=1, a=0.0)


@pytest.mark.ranks(1)
def test_initial_conditions_of_a_particle_mesh_are_found(line):
    """On large scales; float32, as users have it."""
    sim = Simulation(
        COSMOLOGY, GRID, 128.0, scale_factor_steps(0.2, 1.0, 2), mesh=line, halo="auto"
    )
    model = ForwardModel(sim, "pm")
    model.hold_halo()
    truth = sim.run(seed=1)
    posterior = Posterior(model, Gaussian(model.box, truth.density().block, 0.2))
    search = Search(posterior, LBFGS(), default_stages(posterior, 40))
    point = search.run()
    found = sim.run(white_noise=point.field)
    k, r = correlation_coefficient(found.linear_delta, truth.linear_delta)
    assert (r[k < 0.15] > 0.95).all()
