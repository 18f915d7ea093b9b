"""Corrections of force and states: zeros change nothing; their gradients, on any mesh."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, by_rank_zero, process_mesh, shared_folder, solo

import flowpm_dist as fpm
from flowpm_dist.corrections import Learner, Pair
from flowpm_dist.corrections.loss import TERMS, Loss
from flowpm_dist.corrections.options import LearningOptions
from flowpm_dist.emulate.folder import EmulationFolder
from flowpm_dist.emulate.options import KINDS, EmulationOptions
from flowpm_dist.emulate.session import EmulationSession
from flowpm_dist.evolution.adjoints import DirectAdjoint
from flowpm_dist.evolution.corrections import (
    SHIPPED,
    PotentialFilter,
    ResidualNetwork,
    load_correction,
)
from flowpm_dist.grid.field import Field
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.observables import ForwardModel

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.timeout(240, method="thread")]

GRID, STEPS = 8, [0.1, 0.5, 1.0]
BEGUN = PotentialFilter.begun(1)
THETA = BEGUN.theta + 0.02 * np.random.default_rng(1).normal(size=BEGUN.theta.size)
NETWORK = ResidualNetwork.begun(1)
MOVING = NETWORK.theta + 0.03 * np.random.default_rng(4).normal(size=NETWORK.theta.size)
NOISE, WEIGHTS, DIRECTION = np.random.default_rng(2).normal(size=(3, GRID, GRID, GRID))


def simulation(mesh, correction=None, **options):
    options = {"integrator": "bullfrog", "precision": "float64", "halo": 4} | options
    cosmology = fpm.Cosmology.planck18()
    return fpm.Simulation(cosmology, GRID, 24.0, STEPS, mesh=mesh, correction=correction, **options)


def block_of(box, whole):
    return tf.constant(whole[box.place])


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("float32", marks=[pytest.mark.long] if SIZE != 2 else []),
        pytest.param("float64", marks=pytest.mark.ranks(1)),
    ],
)
def test_zeros_change_no_bit(mesh, precision):
    plain, begun, other = (
        simulation(mesh, c, precision=precision).run(seed=1).displacement.block.numpy()
        for c in (None, BEGUN, BEGUN.with_theta(THETA))
    )
    np.testing.assert_array_equal(begun, plain)
    assert np.abs(other - plain).max() > 1e-3
    before = simulation(mesh, precision=precision).run(seed=1)
    after = simulation(mesh, NETWORK, precision=precision).run(seed=1)
    for name in ("displacement", "velocity"):
        values = (getattr(state, name).block.numpy() for state in (before, after))
        np.testing.assert_array_equal(*values)


def filtered(theta):
    return PotentialFilter(theta)


def moved(theta):
    """A network on runs that have a correction of the force, whose numbers come first."""
    filter_first = PotentialFilter(theta[: THETA.size])
    return ResidualNetwork(theta[THETA.size :], force=filter_first)


BOTH = np.concatenate([THETA, MOVING])


def loss_of(mesh, noise, theta, omega, sigma8, correction=filtered, **options):
    sim = simulation(mesh, correction(theta), **options)
    cosmology = fpm.Cosmology(Omega_b=0.05, h=0.7, n_s=0.96, sigma8=sigma8, Omega_m=omega)
    state = sim.run(white_noise=noise, cosmology=cosmology)
    weights = block_of(sim.box, WEIGHTS)[..., tf.newaxis]
    return tf.reduce_sum((state.displacement.block + 0.1 * state.velocity.block) * weights)


def slopes(mesh, **options):
    """The loss and its slopes; that by the noise is the block of this rank."""
    inputs = inputs_of(simulation(mesh).box, **options)
    point = {key: tf.constant(value) for key, value in inputs.items()}
    with tf.GradientTape() as tape:
        tape.watch(point)
        part = loss_of(mesh, **point, **options)
    found = tape.gradient(part, point)
    whole = {key: found[key].numpy() for key in ("theta", "omega", "sigma8")}
    return {"loss": mesh.world.allreduce(part).numpy(), "noise": found["noise"], **whole}


def inputs_of(box, correction=filtered, **_):
    """What the loss depends on."""
    theta = BOTH if correction is moved else THETA
    omega, sigma8 = np.float64(0.3), np.float64(0.8)
    return {"noise": NOISE[box.place], "theta": theta, "omega": omega, "sigma8": sigma8}


CASES = {
    "bullfrog": {},
    "network": {"correction": moved},
    "cola, spectral": {"integrator": "cola", "force_gradient": "spectral", "deconvolve": True},
}
ALONE = ["bullfrog", "network", pytest.param("cola, spectral", marks=pytest.mark.long)]
DEAR = [pytest.mark.long] if SIZE == 4 else []
HERE = ALONE if SIZE == 1 else [pytest.param("network", marks=DEAR)]


@pytest.mark.parametrize("case", HERE)
def test_gradients(mesh, case):
    """Of the noise, of the learned numbers and of the cosmology; those of one rank on any mesh.

    One rank's are those of differences.
    """
    found = slopes(mesh, **CASES[case])
    box = simulation(mesh).box
    alone = by_rank_zero(f"corrected-{case}", lambda: slopes(solo(), **CASES[case]))
    np.testing.assert_allclose(found["loss"], alone["loss"], rtol=1e-11)
    np.testing.assert_allclose(found["theta"], alone["theta"], rtol=1e-9, atol=1e-9)
    for name in ("omega", "sigma8"):
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-9)
    np.testing.assert_allclose(found["noise"], np.asarray(alone["noise"])[box.place], atol=1e-9)
    if mesh.size > 1:
        return
    if case != "network":
        plain = slopes(mesh, **CASES[case], adjoint=DirectAdjoint())
        for name, value in found.items():
            np.testing.assert_allclose(value, plain[name], rtol=1e-8, atol=1e-9, err_msg=name)
    point = inputs_of(box, **CASES[case])
    along = np.random.default_rng(3).normal(size=point["theta"].size)
    directions = {"noise": NOISE[box.place], "theta": along, "omega": 1.0, "sigma8": 1.0}
    steps = {"noise": 1e-8, "theta": 1e-7, "omega": 1e-7, "sigma8": 1e-7}
    for name, step in steps.items():
        slope = float(np.sum(found[name] * directions[name]))
        values = []
        for sign in (1, -1):
            there = {**point, name: point[name] + sign * step * directions[name]}
            inputs = {key: tf.constant(value) for key, value in there.items()}
            values.append(float(loss_of(mesh, **inputs, **CASES[case])))
        difference = (values[0] - values[1]) / (2 * step)
        rounding = 1e-13 * abs(values[0]) / step
        assert slope == pytest.approx(difference, rel=1e-6, abs=10 * rounding), name


@pytest.mark.dealt(2)
def test_each_universe_of_a_batch_has_its_coefficients(mesh):
    """Two cosmologies at once are the two alone."""
    sim = simulation(mesh, BEGUN.with_theta(THETA))
    base = fpm.Cosmology.planck18()
    several = [base.replace(sigma8=s) for s in (0.7, 0.9)]
    both = sim.run(seed=[1, 2], cosmology=several).displacement.block.numpy()
    for n, cosmology in enumerate(several):
        one = sim.run(seed=n + 1, cosmology=cosmology).displacement.block.numpy()
        np.testing.assert_allclose(both[n], one, atol=1e-10)


@pytest.mark.dealt(2)
def test_states_on_the_way_have_the_gradients_of_theta(mesh):
    """What a function makes of outputs is differentiated as the states themselves are."""

    def slope(**how):
        theta = tf.constant(BOTH)
        with tf.GradientTape() as tape:
            tape.watch(theta)
            found = simulation(mesh, moved(theta)).run(seed=1, outputs=[0.4, 1.0], **how)
            found = [getattr(each, "displacement", each) for each in found]
            loss = tf.add_n([tf.reduce_sum(each.block**2) for each in found])
        return tape.gradient(loss, theta).numpy()

    direct = slope()
    assert np.abs(direct).max() > 1e-3
    # a new field of it: on_output must return something else than a state's own
    by_output = slope(on_output=lambda state: state.displacement)
    np.testing.assert_allclose(by_output, direct, rtol=1e-9, atol=1e-9)


def turned(values, element):
    """A vector field [x, y, z, 3] under a symmetry of the cube that keeps the site 0."""
    axes = list(itertools.permutations(range(3)))[element // 8]
    values = np.transpose(values, (*axes, 3))[..., list(axes)]
    for axis in range(3):
        if element >> axis & 1:
            values = np.roll(np.flip(values, axis), 1, axis)
            values = values * np.where(np.arange(3) == axis, -1, 1)
    return values


def corrected(state, network, displacement, velocity):
    """What a network makes of other particles [x, y, z, 3] in the box of a state."""
    fields = (Field(block_of(state.box, each), state.box) for each in (displacement, velocity))
    here = dataclasses.replace(
        state, **dict(zip(("displacement", "velocity"), fields, strict=True))
    )
    after = here.corrected(network)
    return after.displacement.numpy() - displacement, after.velocity.numpy() - velocity


@pytest.mark.dealt
def test_a_network_keeps_the_laws_of_a_simulation(mesh):
    """Whatever its numbers: no place, no direction, no common flow, no momentum."""
    state, network = simulation(mesh).lpt(seed=1, a=0.5), NETWORK.with_theta(MOVING)
    before = state.displacement.numpy(), state.velocity.numpy()
    added = corrected(state, network, *before)
    for each in added:
        assert each.std() > 1e-3
        assert np.abs(each.mean(axis=(0, 1, 2))).max() < 1e-13 * each.std() * GRID**3
    flow = np.array([5.0, -1.0, 2.0]), np.array([0.3, 2.0, -1.0])
    moved_together = [field + each for field, each in zip(before, flow, strict=True)]
    shift = {"shift": (1, 3, 2), "axis": (0, 1, 2)}
    cases = {
        "elsewhere": ([np.roll(x, **shift) for x in before], [np.roll(x, **shift) for x in added]),
        "in a common flow": (moved_together, added),
        "at rest": ([np.zeros_like(x) + y for x, y in zip(before, flow, strict=True)], (0.0, 0.0)),
    }
    for element in range(48):
        both = [[turned(x, element) for x in fields] for fields in (before, added)]
        cases[f"turned by {element}"] = both[0], both[1]
    for name, (particles, expected) in cases.items():
        for one, other in zip(corrected(state, network, *particles), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-12, err_msg=name)


@pytest.mark.ranks(1)
def test_a_network_adds_to_long_waves_by_the_fourth_power(mesh):
    """So that nothing is added where the mesh's force is right."""
    cosmology = fpm.Cosmology.planck18()
    sim = fpm.Simulation(cosmology, (64, 4, 4), (64.0, 4.0, 4.0), STEPS, precision="float64")
    state = sim.lpt(seed=1, a=0.5)
    network = NETWORK.with_theta(MOVING)
    largest = []
    for waves in (1, 2):
        wave = np.zeros((64, 4, 4, 3))
        wave += 1e-4 * np.sin(2 * np.pi * waves * np.arange(64) / 64)[:, None, None, None]
        largest.append([np.abs(each).max() for each in corrected(state, network, wave, wave)])
    slopes_in_k = np.diff(np.log2(largest), axis=0)
    np.testing.assert_allclose(slopes_in_k, 4.0, atol=0.1)


@pytest.mark.ranks(1)
def test_velocities_enter_a_network_as_displacements_of_linear_growth(mesh):
    """Of first-order LPT they are its displacements, in any cosmology and at any time."""
    cosmology = fpm.Cosmology(Omega_m=0.25, Omega_b=0.05, h=0.7, n_s=0.96, sigma8=0.8, w0=-0.8)
    sim = fpm.Simulation(cosmology, GRID, 24.0, STEPS, lpt_order=1, mesh=mesh, precision="float64")
    power = fpm.LinearPower(cosmology)
    for a in (0.2, 0.5, 1.0):
        state = sim.lpt(seed=1, a=a)
        pace = NETWORK.style(power, 3.0, a)[-1]
        moved = pace * state.velocity.block
        np.testing.assert_allclose(moved, state.displacement.block, rtol=1e-6, atol=1e-12)
    assert np.isfinite(NETWORK.style(power, 3.0, 0.0)).all()


@pytest.mark.ranks(1)
def test_a_filter_leaves_the_force_of_long_waves(mesh):
    response = BEGUN.response
    coefficients = tf.constant(np.random.default_rng(5).normal(size=response.size))
    k = tf.constant([0.0, 0.05, 0.1, 0.3], tf.float64)
    factors = response(k, tf.unstack(coefficients)).numpy()
    np.testing.assert_array_equal(factors[:3], 1.0)
    assert abs(factors[3] - 1.0) > 1e-3


@pytest.mark.budget(60)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", list(SHIPPED))
def test_a_shipped_correction_changes_no_large_scales(mesh, name):
    """Below 0.06 of the Nyquist wavenumber, where the force of the mesh is right.

    Networks add a little by the halos that they contract.
    """
    correction, cosmology = load_correction(name), fpm.Cosmology.planck18()
    options = {"integrator": "bullfrog", **correction.trained.force}
    steps = fpm.scale_factor_steps(0.1, 1.0, 10)
    sim = fpm.Simulation(cosmology, 64, 256.0, steps, mesh=mesh, **options)
    for plain, other in zip(
        sim.run(seed=1, outputs=[0.5, 1.0]),
        sim.with_correction(correction).run(seed=1, outputs=[0.5, 1.0]),
        strict=True,
    ):
        compared = fpm.compare(other.density(2), plain.density(2))
        large = compared.k < 0.06 * np.pi * 64 / 256.0
        assert large.sum() >= 1
        tolerance = 1.5e-3 if correction.of_states else 3e-4
        np.testing.assert_allclose(compared.transfer[large] ** 2, 1.0, atol=tolerance)
        for before, after in (
            (plain.displacement, other.displacement),
            (plain.velocity, other.velocity),
        ):
            added = after.numpy().astype(np.float64) - before.numpy()
            assert np.abs(added.mean(axis=(0, 1, 2))).max() < 1e-6 * added.std()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["network", "network-2"])
def test_between_times_a_network_adds_what_lies_between(mesh, name):
    """It learned from states at a = 0.5 and 0.67, and knows the time by growth and amplitude."""
    cosmology, steps = fpm.Cosmology.planck18(), np.linspace(0.1, 0.7, 8)
    sim = fpm.Simulation(
        cosmology, 16, 32.0, steps, integrator="bullfrog", mesh=mesh, correction=name
    )
    runs = [
        each.run(seed=1, outputs=[0.5, 0.58, 0.67]) for each in (sim, sim.with_correction(None))
    ]
    for field in ("displacement", "velocity"):
        moved, plain = ([getattr(state, field).numpy() for state in run] for run in runs)
        early, here, late = (a - b for a, b in zip(moved, plain, strict=True))
        least, size, most = (np.sqrt(np.mean(each**2)) for each in (early, here, late))
        assert least < size < most
        # particles of halos have moved on in between
        assert np.corrcoef(here.ravel(), (early + late).ravel())[0, 1] > 0.9


@pytest.mark.ranks(1)
def test_a_normalisation_that_is_searched_for_enters_the_correction(mesh):
    """A forward model with a sigma8 as a parameter is the run of that sigma8."""
    sim = simulation(mesh, PotentialFilter(THETA))
    noise = tf.constant(NOISE)
    density = ForwardModel(sim, "pm")(noise, {"sigma8": tf.constant(0.6, tf.float64)})
    state = sim.run(white_noise=noise, cosmology=sim.cosmology.replace(sigma8=0.6))
    np.testing.assert_allclose(density.numpy(), state.density().numpy(), atol=1e-10)


@pytest.mark.ranks(2)
def test_a_network_and_universes_of_several_replicas():
    """Each universe of a batch has its style, on the replica that holds it."""
    mesh, network = process_mesh("replica:2"), NETWORK.with_theta(MOVING)
    several = [fpm.Cosmology.planck18().replace(sigma8=s) for s in (0.6, 0.7, 0.8, 0.9)]
    state = simulation(mesh).lpt(seed=[1, 2, 3, 4], cosmology=several).corrected(network)

    def alone():
        sim = simulation(solo())
        states = [sim.lpt(seed=n + 1, cosmology=c) for n, c in enumerate(several)]
        return {str(n): state.corrected(network).velocity.numpy() for n, state in enumerate(states)}

    expected = by_rank_zero("replicas", alone)
    for n, found in enumerate(state.velocity.block.numpy()):
        other = expected[str(state.box.batch_offset + n)]
        np.testing.assert_allclose(found, other, atol=1e-12)


EMULATION = {
    "box": {"grid": GRID, "size": 16.0},
    "cosmology": {"Omega_b": 0.049, "h": 0.677, "n_s": 0.965, "sigma8": 0.81},
    "priors": {"Omega_m": [0.25, 0.35]},
    "evolution": {"integrator": "bullfrog", "steps": 2},
    "run": {"precision": "float64"},
    "truth": {"universes": 2, "sizes": [16.0, 8.0], "mesh_factor": 2, "steps": 2},
    "emulate": {"iterations": 2, "validation": 1},
}


def emulation(**changes):
    """The options of an emulation with other values of [truth] or [emulate]."""
    sections = {name: {**EMULATION[name], **changes.get(name, {})} for name in EMULATION}
    return EmulationOptions.check(sections, Path("run.toml"))


def learned(mesh, folder, options):
    """The correction that an emulation learns in a folder."""
    owner = EmulationFolder(folder)
    if mesh.rank == 0:
        owner.begin()
    mesh.barrier()
    EmulationSession(options, mesh, owner, Progress(mesh.rank)).run(resume=False)
    owner.release()
    return load_correction(owner.correction)


def check_slopes(correction, pair, mesh):
    """The gradient of each term of the loss agrees with differences of its values."""
    theta = np.asarray(correction.theta)
    along = np.random.default_rng(5).normal(size=theta.size)
    options = LearningOptions(histogram=0.2, redshift_space=0.1).completed(type(correction))
    loss = Loss(options, correction, [pair])

    def terms(theta):
        return loss.terms(loss.compare(pair, correction.with_theta(theta)))

    begin = tf.constant(theta)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(begin)
        shares = {name: value / mesh.size for name, value in terms(begin).items()}
    beyond, before = (terms(tf.constant(theta + sign * 1e-6 * along)) for sign in (1, -1))
    assert set(shares) == set(TERMS)
    for name, share in shares.items():
        slope = float(np.sum(tape.gradient(share, begin) * along))
        difference = float(beyond[name] - before[name]) / 2e-6
        assert slope == pytest.approx(difference, rel=1e-5) and slope != 0, name


@pytest.mark.budget(30)
@pytest.mark.ranks(1, 2)
def test_a_correction_is_learned_without_a_folder(mesh, tmp_path_factory):
    """The loss falls, also of the universe held out, and `emulate` learns the same bits."""
    settings = {"iterations": 16, "rate": 0.01, "validate_every": 8, "seed": 1}
    options = emulation(
        emulate={**settings, "kind": "network"}, truth={"sizes": [16.0], "universes": 2}
    )
    made = {"integrator": "bullfrog", "precision": "float64", "mesh": mesh}
    cosmologies = [fpm.Cosmology(**c.model_dump(exclude_none=True)) for c in options.cosmologies()]
    steps = fpm.scale_factor_steps(0.1, 1.0, 2)
    cheap = fpm.Simulation(cosmologies[0], GRID, 16.0, steps, **made)
    accurate = fpm.Simulation(
        cosmologies[0], GRID, 16.0, steps, mesh_factor=2, deconvolve=True, **made
    )
    pairs = [
        Pair(cheap, seed, accurate.run(seed, cosmology=cosmology, outputs=[1.0]), cosmology)
        for seed, cosmology in enumerate(cosmologies)
    ]
    iterations = []
    learner = Learner(NETWORK, pairs[:2], pairs[2:], **settings)
    found = learner.run(iterations.append)
    losses = [each.losses["loss"] for each in iterations]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert found.scores["loss"] < found.scores["loss of plain runs"]
    assert [each.number for each in iterations if each.held_out is not None] == [8, 16]
    by_emulate = learned(mesh, shared_folder(tmp_path_factory) / "emulation", options)
    np.testing.assert_array_equal(found.theta, by_emulate.theta)
    assert found.scores == by_emulate.scores and found.trained == by_emulate.trained
    for correction in (NETWORK.with_theta(found.theta), PotentialFilter(THETA)):
        check_slopes(correction, pairs[0], mesh)
    wider = Pair(
        fpm.Simulation(cosmologies[0], GRID, 32.0, fpm.scale_factor_steps(0.1, 1.0, 3), **made),
        0,
        [fpm.Simulation(cosmologies[0], GRID, 32.0, steps, **made).lpt(seed=0, a=1.0)],
    )
    several = Learner(NETWORK, [pairs[0], wider], pairs[2:], iterations=1).run()
    assert several.trained.steps == ((2.0, 2), (4.0, 3))
    for wrong in ({"mesh_factor": 2}, {"correction": NETWORK}):
        other = fpm.Simulation(cosmologies[0], GRID, 16.0, steps, **made, **wrong)
        with pytest.raises(ValueError, match="the same integrator|has a correction already"):
            Learner(NETWORK, pairs[:2], [dataclasses.replace(pairs[2], simulation=other)])
    with pytest.raises(ValueError, match="are not of one white noise"):
        Learner(NETWORK, pairs[:2], [dataclasses.replace(pairs[2], start=7)]).run()


@pytest.mark.long
@pytest.mark.budget(30)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ["filter", "network"])
def test_an_emulation_learns_the_same_on_any_mesh(mesh, kind, tmp_path_factory):
    """From universes in boxes of two sizes."""
    folder = shared_folder(tmp_path_factory)
    options = emulation(emulate={"kind": kind, "redshift_space": 0.5})
    found = learned(mesh, folder / "here", options).theta
    assert np.abs(found - KINDS[kind].begun(0).theta).max() > 1e-3

    def alone():
        return {"theta": learned(solo(), folder / "alone", options).theta}

    expected = by_rank_zero(f"emulation-{kind}", alone)["theta"]
    np.testing.assert_allclose(found, expected, atol=1e-6)
