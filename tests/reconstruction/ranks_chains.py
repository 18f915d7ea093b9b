"""Draws from the posterior: chains against known answers, killed and resumed, from a run file."""

import contextlib
import csv
import functools
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import zarr
from ranks import SHAPES, SIZE, by_rank_zero, process_mesh, shared_folder
from scipy import optimize, stats

from flowpm_dist import Simulation
from flowpm_dist.io import Samples
from flowpm_dist.jobs.job import Request, StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.observables import ForwardModel
from flowpm_dist.reconstruction import (
    HMC,
    LBFGS,
    AdjustedMicrocanonical,
    Annealing,
    Gaussian,
    Microcanonical,
    PointCheckpoints,
    Posterior,
    Search,
    Stage,
    convergence,
    large_modes,
)
from flowpm_dist.reconstruction.chains import Chains, Phase
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.posterior import EvenPosterior, attempt
from flowpm_dist.reconstruction.unknowns import Use, random_numbers
from flowpm_dist.reconstruction.work import ReconstructionJob
from tests.reconstruction.ranks_reconstruction import COSMOLOGY, StoppedHereError, block_of, solo
from tests.reconstruction.ranks_reconstruction_run import DENSITY, config_of

SIGMA8, CELLS = (0.5, 1.1), 8


@functools.cache
def small_model(mesh):
    sim = Simulation(COSMOLOGY, CELLS, 32.0, [0.5, 1.0], mesh=mesh, precision="float64")
    return ForwardModel(sim, "linear")


@functools.cache
def chains_on(mesh, chains):
    """A linear universe seen with Gaussian noise, of several chains; its posterior is known."""
    model, cells = small_model(mesh), CELLS
    box = model.simulation.box_of(chains)
    data = 1 + 0.5 * np.random.default_rng(11).normal(size=[cells] * 3)
    return Posterior(model, Gaussian(box, block_of(data, box), 0.7))


def chain_mesh():
    return process_mesh({1: "row:1", 2: "replica:2,row:1,col:1", 4: "replica:2,row:2"}[SIZE])


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(HMC(leaps=8, step=0.3, seed=1), marks=pytest.mark.long),
        pytest.param(
            AdjustedMicrocanonical(leaps=8, step=0.5, target=0.7, seed=1), marks=pytest.mark.long
        ),
        Microcanonical(leaps=5, step=0.3, energy_error=2e-3, seed=1),
    ],
    ids=["hmc", "adjusted", "microcanonical"],
)
def test_draws_of_a_gaussian_posterior(sampler):
    """In coordinates of even curvature it is unit normal about the Wiener filter's answer.

    Steps of a microcanonical chain, which none refuses, widen it by what is known.
    """
    posterior = chains_on(chain_mesh(), 2)
    objective = EvenPosterior(posterior)
    space, scaling = posterior.space, objective.scaling
    cells = space.box.cells
    mean = -objective.evaluate(space.zeros()).gradient
    sampler.start(objective, space.normal(2))
    for _ in range(15):
        sampler.draw(learn=True)
    # R-hat of 40 of HMC's draws scatters beyond what is asserted, from seed to seed.
    count = 160 if isinstance(sampler, HMC) else 40
    total, squares, modes, errors = space.zeros(), [], [], []
    for _ in range(count):
        draw = sampler.draw(learn=False)
        away = scaling.to_even(draw.point) - mean
        total = total + away
        squares.append(space.dot(away, away) / cells)
        errors.append(draw.energy_error)
        modes.append(large_modes(draw.point.field, space.box))
    variance = 1.0
    if isinstance(sampler, Microcanonical):
        assert 1e-3 < np.mean(errors) < 4e-3
        wide = optimize.brentq(lambda s: s * np.tanh(draw.step * s / 2) - draw.step / 2, 1, 2)
        variance = wide**2
        assert variance > 1.04
    assert np.mean(squares) == pytest.approx(variance, abs=4 * np.sqrt(2 / (2 * cells * count)))
    averages = space.dot(total, total) / count**2 / cells  # 1 / effective number of draws
    assert (averages < 4 / count).all()
    found = convergence(np.array(modes))
    assert np.median(found.rhat) < 1.05
    assert (found.ess > 10).all()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("natural", [False, True])
def test_an_evaluation_in_one_graph_is_the_same(natural):
    """Of particles with a parameter; where nothing is finite there is no evaluation."""
    sim = Simulation(COSMOLOGY, CELLS, 32.0, [0.5, 1.0], precision="float64")
    data = 1 + 0.5 * np.random.default_rng(12).normal(size=[CELLS] * 3)
    likelihood = Gaussian(sim.box, tf.constant(data), 0.7)
    posterior = Posterior(ForwardModel(sim, "pm"), likelihood, {"sigma8": SIGMA8})
    eager, whole = (EvenPosterior(posterior, natural=natural, whole=w) for w in (False, True))
    for seed in (1, 2):
        point = posterior.space.normal(seed)
        one, other = (objective.evaluate(point) for objective in (eager, whole))
        for name in ("data", "prior", "volume"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-12)
        for name in ("field", "parameters"):
            slopes = (getattr(each.gradient, name) for each in (one, other))
            np.testing.assert_allclose(*slopes, rtol=1e-9, atol=1e-10)
    nowhere = point.times(np.inf)
    assert attempt(eager, nowhere) is None and attempt(whole, nowhere) is None


@pytest.mark.ranks(1)
def test_each_chain_may_have_data_of_its_own():
    box = chains_on(chain_mesh(), 2).space.box
    data, density = np.random.default_rng(5).normal(1, 0.5, [2, *box.shape.to_integer_list])
    together = Gaussian(box, tf.constant(data), 0.7)
    alone = [Gaussian(box, tf.constant(one), 0.7) for one in data]
    parts = [one.parts(tf.constant(density))[i] for i, one in enumerate(alone)]
    np.testing.assert_allclose(together.parts(tf.constant(density)), parts, rtol=1e-12)
    assert together.information() == pytest.approx(alone[0].information(), rel=1e-12)
    with pytest.raises(ValueError, match="same data for all chains"):
        Gaussian(box, tf.constant(data), 0.7, error=0.1)


@pytest.mark.ranks(1)
def test_no_two_uses_share_random_numbers():
    """The noise of a mock is not the first velocity of chains of the same seed."""
    numbers = [(), (0,), (1,), (0, 0), (1, 0)]
    keys = [(use, *number) for use in Use.__members__.values() for number in numbers]
    assert len({random_numbers(7, *key).integers(2**62) for key in keys}) == len(keys)
    space = chains_on(chain_mesh(), 2).space
    noise, velocity = (space.normal(7, Use.NOISE, *number).field for number in [(), (0,)])
    assert abs(np.corrcoef(np.ravel(noise), np.ravel(velocity))[0, 1]) < 0.2


@pytest.mark.ranks(1)
def test_adjusted_moves_are_of_random_length_where_their_steps_are_limited():
    posterior = chains_on(chain_mesh(), 2)
    sampler = AdjustedMicrocanonical(leaps=6, step=0.05, seed=1)
    sampler.start(EvenPosterior(posterior), posterior.space.normal(5))
    steps = [sampler.draw(learn=False).evaluations for _ in range(12)]
    assert min(steps) >= 2 and max(steps) <= 6 and len(set(steps)) >= 4


def linear_universe(mesh):
    """A model so small that chains of it are drawn soon."""
    sim = Simulation(COSMOLOGY, CELLS, 64.0, [0.5, 1.0], mesh=mesh, precision="float64")
    return ForwardModel(sim, "linear")


def of_sigma8_on(mesh, chains=None, prior=SIGMA8):
    """The posterior of field and sigma8, given the data of `of_sigma8`."""
    model = linear_universe(mesh)
    box = model.simulation.box_of(chains)
    likelihood = Gaussian(box, block_of(of_sigma8()[0], box), 0.3)
    return Posterior(model, likelihood, {"sigma8": prior})


@functools.cache
def of_sigma8(prior=SIGMA8):
    """Data, and of sigma8 alone: where its posterior is highest, its mean and its width.

    In the unit normal unknown. Modes of a linear universe are independent: the variance of each is
    that of the structure and of the noise.
    """
    model = linear_universe(solo())
    noise = np.random.default_rng(13).normal(size=(2, CELLS, CELLS, CELLS))
    density = model(tf.constant(noise[0]), {}).numpy() + 0.3 * noise[1]
    modes = np.abs(np.fft.fftn(density - 1)) ** 2 / CELLS**3
    response = np.asarray(model.linear_response({})) / COSMOLOGY.sigma8  # [kz, ky, kx]
    kz = np.minimum(np.arange(CELLS), CELLS - np.arange(CELLS))
    response = np.transpose(response[kz][:, :CELLS])

    def loss(u):  # of the value; of the coordinate there is u^2 / 2 besides
        sigma8 = prior[0] + (prior[1] - prior[0]) * stats.norm.cdf(u)
        variance = (sigma8 * response) ** 2 + 0.3**2
        return 0.5 * np.sum(modes / variance + np.log(variance))

    u = np.linspace(-4, 4, 4001)
    of_value = np.array([loss(x) for x in u])
    losses = of_value + 0.5 * u**2
    share = np.exp(losses.min() - losses)
    mean = np.sum(u * share) / np.sum(share)
    spread = np.sqrt(np.sum((u - mean) ** 2 * share) / np.sum(share))
    return density, u[np.argmin(of_value)], mean, spread


@pytest.mark.ranks(1)
def test_a_parameter_fitted_along_is_the_most_probable_one(mesh):
    """Of a linear universe the joint maximum is that of the parameter's own posterior.

    The maximum is near the end of a uniform prior, which must not pull it to the middle.
    """
    prior = (SIGMA8[0], 0.85)
    posterior = of_sigma8_on(mesh, prior=prior)
    point = Search(posterior, LBFGS(), [Stage(Annealing(), 60)], tolerance=1e-8).run()
    best = of_sigma8(prior)[1]
    assert best > 1
    assert float(point.parameters[0]) == pytest.approx(best, abs=3e-3)


@pytest.mark.long
@pytest.mark.ranks(1)
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("kind", [HMC, AdjustedMicrocanonical, Microcanonical])
def test_draws_of_a_parameter(kind):
    """Of a linear universe against its own posterior, of which mean and width are known."""
    posterior = of_sigma8_on(chain_mesh(), 2)
    drawn = []
    warm_up = [Phase(Annealing(), 20)]
    sampler = kind(leaps=4 if kind is Microcanonical else 6, seed=3)
    chains = Chains(posterior, sampler, warm_up=warm_up, draws=160)
    chains.run(
        lambda: posterior.space.normal(1),
        lambda move: drawn.append(move.draw.point.parameters[:, 0].numpy()) if move.drawn else None,
    )
    values = np.array(drawn)
    _, _, mean, spread = of_sigma8()
    ess = convergence(values[..., None]).ess[0]
    assert ess > 80
    assert values.mean() == pytest.approx(mean, abs=4 * spread / np.sqrt(ess))
    assert values.std() == pytest.approx(spread, rel=4 / np.sqrt(2 * ess))
    moments = chains.moments()
    np.testing.assert_allclose(moments[0].parameters[:, 0], values.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(moments[1].parameters[:, 0], values.std(axis=0), rtol=1e-6)


@pytest.mark.parametrize("sampler", [HMC, AdjustedMicrocanonical, Microcanonical])
def test_chains_that_were_killed_go_on_exactly(tmp_path_factory, sampler):
    folder = shared_folder(tmp_path_factory)

    def chains_of(ranks, name="killed"):
        posterior = chains_on(ranks, 2)
        warm_up = [Phase(Annealing(8.0, 2.0), 2), Phase(Annealing(), 2)]
        checkpoints = PointCheckpoints(folder / name, posterior.space)
        return Chains(
            posterior,
            sampler(leaps=2),
            warm_up=warm_up,
            draws=3,
            checkpoints=checkpoints,
            every=3,
        )

    def losses_of(chains, *, until=99, resume=False):
        losses = []

        def after(move):
            if move.number == until:
                raise StoppedHereError
            losses.append(move.draw.evaluation.loss)

        with contextlib.suppress(StoppedHereError):
            chains.run(lambda: chains.posterior.space.normal(5), after, resume=resume)
        return np.array(losses), chains.moments()

    known, moments = losses_of(chains_of(chain_mesh(), "whole"))
    losses_of(chains_of(chain_mesh()), until=5)
    again, ends = losses_of(chains_of(chain_mesh()), resume=True)
    np.testing.assert_array_equal(again, known[3:])
    np.testing.assert_array_equal(ends[0].field, moments[0].field)
    again, _ = losses_of(chains_of(process_mesh(SHAPES[SIZE][-1])), resume=True)
    np.testing.assert_allclose(again, known[6:], rtol=1e-9)


@pytest.mark.parametrize("kind", [HMC, AdjustedMicrocanonical, Microcanonical])
def test_chains_are_drawn_alike_on_any_mesh(kind):
    """And each for itself: a chain of a batch is not moved by the other."""

    def third_draw(ranks):
        posterior = chains_on(ranks, 2)
        sampler = kind(leaps=3, seed=4)
        objective = EvenPosterior(posterior)
        sampler.start(objective, posterior.space.normal(5))
        for _ in range(3):
            draw = sampler.draw(learn=True)
        box = posterior.space.box
        return {
            "field": box.whole(draw.point.field, box.shape),
            "acceptance": draw.acceptance,
            "energy error": draw.energy_error,
        }

    alone = by_rank_zero(f"draw-{kind.__name__}", lambda: third_draw(solo()))
    found = third_draw(chain_mesh())
    np.testing.assert_allclose(found["field"], alone["field"], atol=1e-9)
    for name in ("acceptance", "energy error"):
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-6, atol=1e-9)


class Cliff(EvenPosterior):
    """Finite up to a number of evaluations."""

    left = 99

    def evaluate(self, u):
        self.left -= 1
        if self.left < 0:
            raise FloatingPointError("not finite")
        return super().evaluate(u)


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("kind", [HMC, AdjustedMicrocanonical, Microcanonical])
def test_a_move_to_where_nothing_is_finite_is_undone(kind, learn):
    sampler = kind(leaps=6)
    posterior = chains_on(chain_mesh(), 2)
    objective = Cliff(posterior)
    sampler.start(objective, posterior.space.normal(5))
    known = sampler.draw(learn=False)
    objective.left = 1
    draw = sampler.draw(learn=learn)
    assert not draw.accepted.any()
    assert draw.evaluations == 2
    np.testing.assert_array_equal(draw.point.field, known.point.field)
    objective.left = 99
    again = sampler.draw(learn=learn)
    assert np.isfinite(again.evaluation.loss).all()
    if kind is not Microcanonical:
        return
    assert again.accepted.all()
    if not learn:
        assert again.step == pytest.approx(known.step / 2)
        assert sampler.draw(learn=False).step == pytest.approx(known.step)
    objective.left, steps = 0, []
    for _ in range(7):
        steps.append(sampler.draw(learn=learn).step)
    np.testing.assert_allclose(steps, steps[0] / 2.0 ** np.arange(7))
    with pytest.raises(FloatingPointError, match="8 moves in a row"):
        sampler.draw(learn=learn)


PRIORS = "[priors]\nsigma8 = [0.6, 1.0]\n"
CHAINS = """
[sampler]
draws = 6
chains = 2
warm_up = 6
leaps = 2
start = "{start}"
keep_every = 3
checkpoint_every = 2
"""
CHAIN_MESH = {1: "row:1,col:1", 2: "replica:2,row:1,col:1", 4: "replica:2,row:2"}


class Interrupted(Progress):
    """A signal comes after this move."""

    def __init__(self, move):
        super().__init__(rank=1)
        self._move = move

    def __call__(self, what, done, total, state=""):
        if what in ("warm-up", "draws") and done == self._move:
            os.kill(os.getpid(), signal.SIGUSR1)


def sampled(path, config, progress=None, resume=False):
    """What stopped all that the run file asks for, and the moves."""
    requested = Request(Path("run.toml"), SIZE, path, resume=resume)
    job = ReconstructionJob(config, CHAIN_MESH[SIZE], requested)
    folder, ranks = job.folder, process_mesh(f"row:{SIZE}")
    if ranks.rank == 0:
        folder.begin(resume=resume)
    ranks.barrier()
    progress = progress or Progress(rank=1)
    stopped = None
    try:
        job.work(progress)
    except StopError as error:
        stopped = error
    folder.release()
    with folder.draws.open() as file:
        return stopped, list(csv.DictReader(file))


def copy_without_chains(known, path):
    """A reconstruction whose search has ended, and whose chains have not begun."""
    ranks = process_mesh(f"row:{SIZE}")
    if ranks.rank == 0:
        chains = shutil.ignore_patterns("chains", "draws.csv", "samples", ".lock", "chains.png")
        shutil.copytree(known, path, ignore=chains)
        ReconstructionFolder(path).write_mark(complete=False, searched=True)
    ranks.barrier()


START = {1: "prior", 4: "found"}


@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize(
    "structure",
    [
        pytest.param("linear", marks=pytest.mark.ranks(1)),
        pytest.param("1lpt", marks=[pytest.mark.ranks(4), pytest.mark.long]),
    ],
)
def test_chains_after_the_search(structure, tmp_path_factory):
    """Interrupted and resumed they make the same moves; on one rank with no parameters."""
    folder = shared_folder(tmp_path_factory)
    names = ["sigma8"] if SIZE > 1 else []
    priors = PRIORS if names else ""
    change = ("[search]", priors + CHAINS.format(start=START[SIZE]) + "[search]")
    chosen = ('structure = "1lpt"', f'structure = "{structure}"')
    config = config_of(folder, DENSITY, change, chosen)
    _, known = sampled(folder / "known", config)
    copy_without_chains(folder / "known", folder / "found")
    stopped, _ = sampled(folder / "found", config, Interrupted(5), resume=True)
    assert (stopped.signal, stopped.place) == ("SIGUSR1", "after move 5 of 12")
    stopped, rows = sampled(folder / "found", config, resume=True)
    assert stopped is None
    assert len(rows) == 2 * 12
    for column in ("loss", "step", "re(0 0 1)", "drawn", *names):
        assert [row[column] for row in rows] == [row[column] for row in known]
    facts = json.loads((folder / "found" / "result.json").read_text())
    of_chains = facts["sampling"]
    assert facts["iterations"] > 0
    drawn = [row for row in rows if int(row["drawn"])]
    columns = [name for name in rows[0] if name.startswith(("re(", "im("))]
    modes = np.array([[float(row[name]) for name in columns] for row in drawn])
    read = Samples.load(folder / "found", modes=True)
    assert read.names == (*names, *columns)
    np.testing.assert_array_equal(
        read.values[..., len(names) :], modes.reshape(-1, 2, len(columns)).swapaxes(0, 1)
    )
    known = convergence(modes.reshape(-1, 2, len(columns))).rhat
    losses = np.array([float(row["loss"]) for row in drawn]).reshape(-1, 2, 1)
    assert of_chains["loss"]["rhat"] == pytest.approx(convergence(losses).rhat[0], rel=1e-4)
    assert of_chains["modes"]["rhat_max"] == pytest.approx(np.nanmax(known), rel=1e-4)
    assert list(of_chains["parameters"]) == names
    for name in names:
        drawn = [float(row[name]) for row in rows if int(row["drawn"])]
        assert of_chains["parameters"][name]["mean"] == pytest.approx(np.mean(drawn), rel=1e-6)
        assert of_chains["parameters"][name]["truth"] == 0.8
    group = zarr.open_group(folder / "found" / "reconstruction.zarr" / "samples", mode="r")
    samples = group["white_noise"][...]
    assert samples.shape == (2, 2, 16, 16, 16)
    assert np.isfinite(samples).all() and np.isfinite(group["standard_deviation"][...]).all()
    last = np.fft.fftn(samples[1, 1])[0, 0, 1].real * np.sqrt(2 / 16**3)
    assert float(rows[-1]["re(0 0 1)"]) == pytest.approx(last, abs=1e-6)
    assert (folder / "found" / "chains.png").stat().st_size > 500
    assert ReconstructionFolder(folder / "found").mark()["complete"]
