"""States at several times of one run, and their gradients, on any mesh."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, by_rank_zero, solo

import flowpm_dist as fpm
from flowpm_dist.evolution.adjoints import DirectAdjoint, ReversibleAdjoint

pytestmark = pytest.mark.ranks(1)

BOX = dict(grid=8, box_size=32.0, precision="float64", halo=4)
EDGES = np.array([0.1, 0.3, 0.5, 0.75, 1.0])
ON_EDGES = [0.5, 0.1, 1.0]
BETWEEN = [0.25, 0.6, 0.7]
SCHEMES = ("fastpm", "bullfrog", "cola")


def simulation(mesh, integrator="fastpm", edges=EDGES, **options):
    given = {**BOX, "mesh": mesh, "integrator": integrator, **options}
    return fpm.Simulation(fpm.Cosmology.planck18(), steps=edges, **given)


def same(found, expected, tolerance):
    for name in ("displacement", "velocity"):
        ours, theirs = (getattr(state, name).block.numpy() for state in (found, expected))
        size = max(np.abs(theirs).max(), 1e-30)
        np.testing.assert_allclose(ours / size, theirs / size, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "integrator",
    [pytest.param("fastpm", marks=pytest.mark.ranks(1, 4)), "bullfrog", "cola"],
)
def test_states_at_edges_are_those_of_runs_that_end_there(mesh, integrator):
    sim = simulation(mesh, integrator)
    states = sim.run(seed=3, outputs=ON_EDGES)
    assert [state.a for state in states] == ON_EDGES
    same(states[0], sim.with_steps(EDGES[:3]).run(seed=3), 1e-13)
    same(states[1], sim.lpt(seed=3, a=0.1), 1e-13)
    last = sim.run(seed=3)
    same(states[2], last, 0.0 if integrator == "fastpm" else 1e-14)
    kept = []
    assert sim.run(seed=3, outputs=[1.0], on_output=kept.append) == [None]
    same(kept[0], states[2], 1e-14)  # growth of one time or three rounds in its own way
    assert kept[0].halo == last.halo


def test_the_first_state_is_at_rest(mesh):
    """Where velocities of BullFrog, which may begin at a = 0, have the limit 0."""
    (state,) = simulation(mesh, "bullfrog", np.array([0.0, 0.5, 1.0])).run(seed=3, outputs=[0.0])
    assert not state.peculiar_velocity().block.numpy().any()
    seen, place = state.redshift_space("z").block.numpy(), state.displacement.block.numpy()
    np.testing.assert_allclose(seen, place, atol=1e-13)
    assert np.abs(place).max() < 1e-13


@pytest.mark.parametrize("integrator", SCHEMES)
def test_states_between_edges_are_of_second_order(mesh, integrator):
    """Twice as many steps leave a quarter of the distance to a run with many."""
    fine = simulation(mesh, integrator, np.linspace(0.2, 1.0, 65))
    times = [0.33, 0.47, 0.61, 0.88]  # before and after the middles of steps
    exact = fine.run(seed=3, outputs=times)
    errors = []
    for steps in (4, 8, 16):
        found = simulation(mesh, integrator, np.linspace(0.2, 1.0, steps + 1)).run(
            seed=3, outputs=times
        )
        errors.append(
            [
                np.sqrt(np.mean((getattr(x, n).block - getattr(y, n).block).numpy() ** 2))
                / getattr(y, n).block.numpy().std()
                for n in ("displacement", "velocity")
                for x, y in zip(found, exact, strict=True)
            ]
        )
    coarse, middle, close = (np.sqrt(np.mean(np.square(e))) for e in errors)
    assert close < 4e-3
    assert coarse / middle > 2.5
    assert middle / close > 2.5


@pytest.mark.parametrize("integrator", SCHEMES)
def test_states_are_continuous_in_time(mesh, integrator):
    """Where a step is halved or ends, the states from both sides meet."""
    sim = simulation(mesh, integrator)
    for a in (0.2, 0.3, 0.4, 0.5):
        before, after = sim.run(seed=3, outputs=[a * (1 - 1e-9), a * (1 + 1e-9)])
        same(before, after, 1e-7)


def cosmology_of(tensors):
    return fpm.Cosmology(Omega_b=0.049, h=0.68, n_s=0.965, w0=-0.9, **tensors)


def loss_of(state, weights):
    """Of places, velocities and, through redshift space, the expansion rate."""
    density = state.density(redshift_space="z").block
    return tf.reduce_sum(density**2 * weights) * (1.0 + state.a)


def value_of(sim, noise, cosmology, weights, on_output=True):
    run = dict(white_noise=noise, cosmology=cosmology, outputs=TIMES)
    if on_output:
        parts = sim.run(**run, on_output=lambda state: {"loss": loss_of(state, weights)})
        return tf.add_n([part["loss"] for part in parts])
    return tf.add_n([loss_of(state, weights) for state in sim.run(**run)])


def value_and_gradients(sim, noise, weights, on_output=True):
    tensors = {name: tf.constant(value, tf.float64) for name, value in NUMBERS.items()}
    with tf.GradientTape() as tape:
        tape.watch([noise, *tensors.values()])
        value = value_of(sim, noise, cosmology_of(tensors), weights, on_output)
    to_noise, to_parameters = tape.gradient(value, [noise, tensors])
    return float(value), to_noise.numpy(), {k: float(v) for k, v in to_parameters.items()}


TIMES = [0.25, 0.6, 1.0, 0.5]
NUMBERS = {"Omega_m": 0.31, "sigma8": 0.8}


@pytest.mark.parametrize(
    "integrator",
    [
        "fastpm",
        pytest.param("bullfrog", marks=pytest.mark.ranks(1, 2)),
        "cola",  # on 4 ranks: the same way back in ranks_light_cone.py
    ],
)
def test_gradients_of_several_outputs(mesh, integrator):
    """By the adjoint, kept or not, as by plain differentiation and by differences; any mesh."""
    sim = simulation(mesh, integrator)
    noise = sim.lpt(seed=3).white_noise.block
    weights = tf.constant(np.cos(noise.numpy() * 3))
    value, to_noise, to_parameters = value_and_gradients(sim, noise, weights)
    others = [(sim, False)] if SIZE < 4 else []
    if SIZE == 1:
        kept = simulation(mesh, integrator, adjoint=ReversibleAdjoint(max_error_growth=1.0))
        others += [(kept, True), (simulation(mesh, integrator, adjoint=DirectAdjoint()), True)]
    for other, on_output in others:
        found = value_and_gradients(other, noise, weights, on_output)
        assert found[0] == pytest.approx(value, rel=1e-13)
        np.testing.assert_allclose(found[1], to_noise, atol=1e-9 * np.abs(to_noise).max())
        assert found[2] == pytest.approx(to_parameters, rel=1e-9)

    def alone():
        line = simulation(solo(), integrator)
        field = line.lpt(seed=3).white_noise.block
        w = tf.constant(np.cos(field.numpy() * 3))
        h = 1e-7  # small, so that hardly a particle crosses the face of a cell

        def slope(direction=0.0, **steps):
            def at(h):
                numbers = {k: v + h * steps.get(k, 0.0) for k, v in NUMBERS.items()}
                moved = field + h * direction * tf.sin(5 * field)
                return float(value_of(line, moved, cosmology_of(numbers), w))

            return (at(h) - at(-h)) / (2 * h)

        value, gradient, parameters = value_and_gradients(line, field, w)
        along = float(tf.reduce_sum(gradient * tf.sin(5 * field)))
        pairs = {name: [parameters[name], slope(**{name: 1.0})] for name in NUMBERS}
        return pairs | {"value": value, "gradient": gradient, "along": [along, slope(1.0)]}

    known = by_rank_zero(f"outputs-{integrator}", alone)
    for name in ("along", *NUMBERS):
        gradient, slope = known[name]
        assert gradient == pytest.approx(slope, rel=1e-6), name
    world, cut = mesh.world, sim.box.place
    assert float(world.allreduce(tf.constant(value))) == pytest.approx(float(known["value"]))
    size = np.abs(known["gradient"]).max()
    np.testing.assert_allclose(to_noise, known["gradient"][cut], atol=1e-10 * size)
    for name, slope in to_parameters.items():
        assert slope == pytest.approx(float(known[name][0]), rel=1e-9)


def test_a_batch_has_its_outputs(mesh):
    sim = simulation(mesh, "cola")
    cosmologies = [fpm.Cosmology.planck18().replace(sigma8=s) for s in (0.7, 0.9)]
    both = sim.run(seed=[3, 4], cosmology=cosmologies, outputs=[0.4, 1.0])
    for i, (seed, cosmology) in enumerate(zip([3, 4], cosmologies, strict=True)):
        one = sim.run(seed=seed, cosmology=cosmology, outputs=[0.4, 1.0])
        for several, alone in zip(both, one, strict=True):
            np.testing.assert_allclose(
                several.velocity.block[i], alone.velocity.block, rtol=0, atol=1e-12
            )


def test_outputs_that_cannot_be_are_refused(mesh):
    sim = simulation(mesh)
    for outputs, message in (
        ([0.05], "a = 0.05 is not between the first and the last of the steps, 0.1 and 1"),
        ([0.5, 1.1], "a = 1.1 is not between"),
        ([0.5, 0.5], "a scale factor is there twice"),
        ([], "a list of scale factors is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            sim.run(seed=1, outputs=outputs)
    with pytest.warns(
        UserWarning, match="returned a SimpleNamespace, which holds tensors: no grad"
    ):
        sim.run(seed=1, outputs=[0.5], on_output=lambda state: SimpleNamespace(x=state.density()))
    with pytest.raises(ValueError, match="on_output needs outputs"):
        sim.run(seed=1, on_output=print)
    with pytest.raises(TypeError, match="call run without on_output for states"):
        sim.run(seed=1, outputs=[0.5], on_output=lambda state: state)


def test_what_else_an_output_depends_on_is_not_lost_silently(mesh):
    sim = simulation(mesh)
    noise = sim.lpt(seed=3).white_noise.block
    bias = tf.Variable(2.0, dtype=tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(noise)
        with pytest.raises(ValueError, match="depends on watched tensors besides"):
            sim.run(
                white_noise=noise,
                outputs=[0.5],
                on_output=lambda state: bias * tf.reduce_sum(state.density().block ** 2),
            )


def test_an_output_may_return_fields_and_the_noise_it_came_from(mesh):
    sim = simulation(mesh)
    noise = sim.lpt(seed=3).white_noise.block
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(noise)
        (found,) = sim.run(
            white_noise=noise,
            outputs=[0.5],
            on_output=lambda state: (state.density(), state.linear_delta.block, "told"),
        )
        (state,) = sim.run(white_noise=noise, outputs=[0.5])
        density, linear = state.density().block, state.linear_delta.block
    assert found[2] == "told"
    assert isinstance(found[0], fpm.Field)
    for ours, expected in ((found[0].block, density), (found[1], linear)):
        np.testing.assert_array_equal(ours, expected)
        gradient, known = tape.gradient(ours, noise), tape.gradient(expected, noise)
        np.testing.assert_allclose(gradient, known, atol=1e-12)
