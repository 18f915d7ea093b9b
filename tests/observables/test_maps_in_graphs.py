"""Maps of the flat sky as a part of a `tf.function` on one rank, with their gradients."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from sky_runs import GRID, SIDE, SkyRuns, cosmology_of

import flowpm_dist as fpm
from flowpm_dist import reconstruction as rec
from flowpm_dist.evolution.corrections import ResidualNetwork
from flowpm_dist.observables.convergence_model import ConvergenceModel
from flowpm_dist.observables.lensing import IntrinsicAlignment, SmailDistribution, SourcePlane
from flowpm_dist.observables.light_cone import FlatField, FullSky, LightCone
from flowpm_dist.particle_mesh.kernels.portable import Portable
from flowpm_dist.reconstruction.posterior import EvenPosterior

FIELD = FlatField(field_of_view=12.0, pixels=8, z_max=0.25, tiles=3)
CONE = LightCone(FIELD)
RUNS = SkyRuns(CONE, (0.2, 0.75, 0.9, 1.0), plane=0.2, smail=(0.1, 0.24), shift=0.01)
LINE, PLANCK = "row:1,col:1", fpm.Cosmology.planck18()
NOISE = tf.random.stateless_normal([2, GRID, GRID, GRID], [7, 8], dtype=tf.float64)


def traced(function):
    return tf.function(function, autograph=False)


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        size = np.abs(other).max()
        assert size > 0
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10 * size)


@pytest.mark.parametrize(
    "integrator", [pytest.param("fastpm", marks=pytest.mark.long), "bullfrog", "cola"]
)
def test_maps_and_gradients_are_those_of_eager_calls(integrator):
    """At other parameters, too, where layers cross after other kicks, and others are observed."""
    network = ResidualNetwork.begun(1)
    moving = network.with_theta(network.theta + 0.03 * np.cos(np.arange(network.theta.size)))
    massive, batch = integrator == "fastpm", 2 if integrator == "fastpm" else 1
    runs = replace(RUNS, mass=0.6 * massive, curvature=0.0 if massive else 0.2)
    options = {"correction": moving} if integrator == "bullfrog" else {}
    sim = runs.simulation(LINE, integrator, **options)
    alignment = IntrinsicAlignment(1.0) if integrator == "bullfrog" else None

    def kappa_of(noise, numbers):
        universes = [dict(zip(runs.numbers, tf.unstack(row), strict=True)) for row in numbers]
        sources = runs.sources([each.pop("shift") for each in universes][0])
        cosmologies = [cosmology_of(**each, radiation=massive) for each in universes]
        if alignment is not None:  # a plane has no density
            sources = sources[1:]
        given = dict(white_noise=noise, cosmology=cosmologies)
        if batch == 1:
            given = dict(white_noise=noise[0], cosmology=cosmologies[0])
        return CONE.convergence(sim, sources, alignment=alignment, **given).kappa

    def maps(noise, numbers):
        with tf.GradientTape() as tape:
            tape.watch([noise, *numbers])
            kappa = kappa_of(noise, numbers)
            loss = tf.reduce_sum(kappa**2 + kappa)
        return kappa, *tape.gradient(loss, [noise, *numbers])

    if integrator == "cola":  # whose factors alone are its own
        maps = lambda *inputs: [kappa_of(*inputs)]  # noqa: E731
    graph = traced(maps)
    for omega in (0.31, 0.6):
        universes = [runs.numbers | {"Omega_m": omega + 0.05 * n} for n in range(batch)]
        numbers = [tf.constant([*each.values()], tf.float64) for each in universes]
        assert_close(graph(NOISE[:batch], numbers), maps(NOISE[:batch], numbers))
    assert graph.experimental_get_tracing_count() == 1


def test_deep_cones_and_alignments():
    """Where the end of one universe, and what a graph expects, is beyond another's horizon."""
    sky = FIELD.model_copy(update={"field_of_view": 0.5, "z_max": 5.0})
    steps = np.array([0.1, 0.3, 0.6, 1.0])
    sim = fpm.Simulation(PLANCK, 8, [160.0, 160.0, 320.0], steps, precision="float64", mesh=LINE)

    def kappa(omega):
        with tf.GradientTape() as tape:
            tape.watch(omega)
            universes = [PLANCK.replace(Omega_m=x) for x in (omega, 0.12)]
            run = dict(seed=[1, 2], cosmology=universes)
            sources = [SmailDistribution(0.7, z_max=4.9)]
            maps = LightCone(sky).convergence(
                sim, sources, alignment=IntrinsicAlignment(5.0), **run
            )
            loss = tf.reduce_sum(maps.kappa + maps.kappa**2)
        return maps.kappa, tape.gradient(loss, omega)

    graph = traced(kappa)
    for omega in (0.31, 0.8):
        assert_close(graph(tf.constant(omega, tf.float64)), kappa(tf.constant(omega, tf.float64)))


def test_planes_of_matter():
    """Of cosmologies of numbers, which decide how many there are."""
    sim = RUNS.simulation(LINE, "bullfrog")

    def planes(noise, omega=0.35):
        cosmology = [sim.cosmology, sim.cosmology.replace(Omega_m=omega)]
        with tf.GradientTape() as tape:
            tape.watch(noise)
            delta = CONE.planes(sim, 150.0, white_noise=noise, cosmology=cosmology).delta
        return delta, tape.gradient(delta, noise, delta)

    assert_close(traced(planes)(NOISE), planes(NOISE))
    with pytest.raises(RuntimeError, match="planes of matter need a cosmology of numbers"):
        traced(planes)(NOISE, tf.constant(0.3, tf.float64))


def test_other_light_cones_are_refused(tmp_path, monkeypatch):
    sim, sources = RUNS.simulation(LINE), [SourcePlane(0.2)]
    full = LightCone(FullSky(nside=4, z_max=0.25))
    for call in (
        lambda: full.convergence(sim, sources, 1).kappa,
        lambda: tf.constant(str(CONE.particles(sim, tmp_path / "cone", 1))),
    ):
        with pytest.raises(RuntimeError, match="was called while TensorFlow builds a graph"):
            traced(call)()
    monkeypatch.setattr("flowpm_dist.observables.light_cone.geometry.kernels", Portable)
    with pytest.raises(RuntimeError, match="needs the compiled kernels on a CPU"):
        traced(lambda: CONE.convergence(sim, sources, 1).kappa)()


def test_what_does_not_fit_ends_the_function():
    """With a message; eager calls raise a ValueError before the run, or, of far moves, work."""
    sim, far = RUNS.simulation(LINE, "bullfrog"), LightCone(replace_field(13.0))

    def kappa(omega, z, cone=CONE):
        run = dict(seed=1, cosmology=sim.cosmology.replace(Omega_m=omega))
        return cone.convergence(sim, [SourcePlane(z)], **run).kappa

    graph, wide = traced(kappa), traced(lambda *given: kappa(*given, far))
    some, little, z = (tf.constant(x, tf.float64) for x in (0.31, 0.1, 0.2))
    for call in (graph, wide):
        assert np.isfinite(call(some, z)).all()
    with pytest.raises(tf.errors.InvalidArgumentError, match="reach beyond z_max = 0.25"):
        graph(some, tf.constant(0.3, tf.float64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="the field is wider than the box"):
        wide(little, z)

    begun = sim.lpt(seed=1, a=RUNS.edges[0])
    at_rest = begun.velocity.block

    def moved(boxes):
        particles = begun.displacement.block + boxes * SIDE, at_rest
        return CONE.convergence(sim, [SourcePlane(0.2)], particles=particles).kappa

    some, many = (tf.constant(x, tf.float64) for x in (1.6, 3.0))
    graph = traced(moved)
    np.testing.assert_allclose(graph(some), moved(some), rtol=0, atol=1e-12)
    assert np.isfinite(moved(many)).all()
    with pytest.raises(tf.errors.InvalidArgumentError, match="displaced by more than two boxes"):
        graph(many)


def replace_field(degrees):
    return FIELD.model_copy(update={"field_of_view": degrees})


def test_a_posterior_of_maps_is_one_graph(recwarn):
    sim = RUNS.simulation(LINE, "bullfrog")
    model = ConvergenceModel(sim, CONE, [SourcePlane(0.2)])
    data = model(NOISE[0], {})
    likelihood = rec.GaussianMaps(sim.box, data, sigma=0.01)
    target = rec.Posterior(model, likelihood, {"Omega_m": (0.2, 0.5), "sigma8": (0.6, 1.0)})
    point = target.space.normal(1)
    eager, whole = (EvenPosterior(target, whole=way).evaluate(point) for way in (False, True))
    assert not [each for each in recwarn if "step by step" in str(each.message)]
    assert float(whole.loss) == pytest.approx(float(eager.loss), rel=1e-9)
    found, expected = ([e.gradient.field, e.gradient.parameters] for e in (whole, eager))
    assert_close(found, expected)
