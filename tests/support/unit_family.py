"""The public arguments that take numbers, each with its unit and a call; for test_units.py."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drawn
import numpy as np
import snapshots
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist import cosmoflow, cosmology, posteriors, reconstruction, statistics
from flowpm_dist.cosmoflow.volumes.record_files import DatasetHeader
from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.cosmology.parameters import PARAMETERS
from flowpm_dist.grid.fourier import gaussian_smoothing
from flowpm_dist.observables import ForwardModel, lensing
from flowpm_dist.observables.light_cone import FlatField, FullSky, LightCone
from meshimpl.process_mesh import ProcessMesh

BOX = fpm.Box((8, 8, 8), (64.0, 64.0, 64.0), ProcessMesh("row:1,col:1"))
CUBE = np.random.default_rng(1).random((8, 8, 8), np.float32)
MAP = np.random.default_rng(2).random((8, 8))
SKY = np.random.default_rng(3).random(12)
PLANCK = dict(Omega_m=0.3, Omega_b=0.05, h=0.7, n_s=0.96, sigma8=0.8)
A = np.array([0.5, 1.0])


@functools.cache
def universe() -> fpm.Cosmology:
    return fpm.Cosmology(**PLANCK)


@functools.cache
def simulation() -> fpm.Simulation:
    return fpm.Simulation(universe(), 8, 64.0, [0.1, 0.5, 1.0])


@functools.cache
def linear() -> fpm.LinearPower:
    return fpm.LinearPower(universe())


@functools.cache
def growth() -> fpm.Growth:
    return fpm.Growth(universe())


@functools.cache
def field() -> fpm.Field:
    return fpm.Field(tf.constant(CUBE), BOX)


@functools.cache
def table() -> cosmology.TabulatedPower:
    k, a = np.geomspace(0.01, 1.0, 5), np.linspace(0.2, 1.0, 5)
    return cosmology.TabulatedPower(k, a, np.ones([5, 5]))


@functools.cache
def posterior() -> posteriors.Posterior:
    priors = UniformPriors({"h": (0.5, 0.9)})
    hidden, ones = 1, np.ones(1)
    return posteriors.Posterior("gaussian", priors, hidden, ones, ones, (), 0.0)


@dataclass(frozen=True)
class Argument:
    """An argument that takes numbers.

    Attributes:
        of: the public function, class or method.
        name: the name of the argument.
        unit: its unit.
        value: plain numbers that are allowed.
        call: calls the function with a value of it; its result depends on the value.
        evaluated: whether a test calls it with a value that is allowed; not where that builds a
            graph, and the conversion is one of another row.
    """

    of: str
    name: str
    unit: str
    value: Any
    call: Callable[[Any], Any]
    evaluated: bool = True


def arguments(
    of: str,
    call: Callable[..., Any],
    others: Mapping[str, Any] | None = None,
    evaluated: bool = True,
    **given: tuple[str, Any],
) -> Iterator[Argument]:
    """Yields the arguments of a function, from the unit and a value of each by its name."""
    values = {name: value for name, (_, value) in given.items()}

    def calling(name: str, value: Any) -> Any:
        return call(**{**values, **(others or {}), name: value})

    for name, (unit, value) in given.items():
        each = functools.partial(calling, name)
        yield Argument(of, name, unit, value, each, evaluated)


def alternatives(of: str, call: Callable[..., Any], **given: Any) -> Iterator[Argument]:
    """Yields arguments of which each is given alone."""
    for name, one in given.items():
        yield from arguments(of, call, **{name: one})


def methods(of: str, made: Callable[[], Any], names: str, **given: Any) -> Iterator[Argument]:
    """Yields the arguments of several methods of one object that take the same."""
    for name in names.split():
        call = functools.partial(lambda method, **values: getattr(made(), method)(**values), name)
        yield from arguments(f"{of}.{name}", call, **given)


STEPS = dict(a_start=("", 0.1), a_stop=("", 1.0), steps=("", 3))
NOISE = ("(Mpc/h)^3", 2.0)
BINS = ("h/Mpc", [0.1, 0.2, 0.3])
SIZE = ("Mpc/h", 64.0)
FIELD = ("", CUBE)
EDGES = ("", [0.1, 0.5, 0.9])
CHI = ("Mpc/h", np.array([100.0, 200.0]))


def of_cosmology() -> Iterator[Argument]:
    values = {n: PLANCK.get(n, row.default) for n, row in PARAMETERS.items()} | {"wa": 0.1}
    given = {n: (PARAMETERS[n].unit, v) for n, v in values.items() if v is not None}
    yield from arguments("Cosmology", fpm.Cosmology, **given)
    amplitude = {**PLANCK, "sigma8": None}
    yield from arguments("Cosmology", fpm.Cosmology, amplitude, A_s=("", 2e-9))
    yield from arguments("Cosmology.replace", lambda h: universe().replace(h=h), h=("", 0.7))
    yield from arguments("UniformPriors", lambda h: UniformPriors({"h": h}), h=("", (0.5, 0.9)))
    for name in ("scale_factor_steps", "logarithmic_steps"):
        yield from arguments(name, getattr(fpm, name), **STEPS)
    yield from arguments("growth_steps", functools.partial(fpm.growth_steps, universe()), **STEPS)
    background = functools.cache(lambda: cosmology.Background(universe()))
    names = "e e2 a3_e2 dlne_dlna omega_m clustering omega_de w"
    yield from methods("Background", background, names, a=("", A))
    shares = functools.partial(lambda a: background().shares(a)[0][1])
    yield from arguments("Background.shares", shares, a=("", A))
    fluid = dict(Omega=("", 0.1), w0=("", -0.5), wa=("", 0.1))
    yield from arguments("Fluid", cosmology.Fluid, **fluid)
    one = cosmology.Fluid(0.1, -0.5, 0.1)
    yield from methods("Fluid", lambda: one, "w a3_density", a=("", A))
    yield from methods("Growth", growth, "d2 d2_dlna g_drift g_kick", a=("", A))
    yield from arguments("Growth.ratio", lambda a: growth().ratio(a, 1, 0), a=("", A))
    yield from arguments("Growth.factor", lambda a: growth().factor(a, 1), a=("", A))
    wave = ("h/Mpc", np.array(0.1))
    yield from methods("Growth", growth, "d1 d1_dlna f1", a=("", A), k=wave)
    yield from arguments("Growth.by_d1", lambda a: growth().by_d1(a, 2), a=("", A))
    distances = functools.cache(lambda: cosmology.Distances(universe()))
    yield from methods("Distances", distances, "comoving", a=("", A))
    lengths = "scale_factor redshift transverse transverse_slope tangent"
    yield from methods("Distances", distances, lengths, chi=CHI)
    yield from methods("Distances", distances, "widest", chi=("Mpc/h", 500.0))
    k = ("h/Mpc", np.array([0.1, 0.2]))
    halofit = functools.cache(lambda: cosmology.Halofit(linear()))
    yield from methods("LinearPower", linear, "__call__ cb", k=k, a=("", A))
    yield from methods("LinearPower", linear, "without_growth", k=k, a=("", A))
    yield from methods("LinearPower", linear, "potential", k=k)
    yield from methods("LinearPower", linear, "sigma8 sigma8_cb", a=("", 0.5))
    yield from methods("Halofit", halofit, "__call__", k=k, a=("", A))
    yield from methods("TabulatedPower", table, "__call__", k=k, a=("", A))
    made = cosmology.TabulatedPower
    nodes = ("h/Mpc", np.geomspace(0.01, 1.0, 5)), ("", np.linspace(0.2, 1.0, 5))
    row = ("(Mpc/h)^3", np.ones(5))
    nearer = ("redshift", 1.0)
    yield from arguments("PowerTable", cosmology.PowerTable, k=nodes[0], power=row, redshift=nearer)
    values = ("(Mpc/h)^3", np.ones([5, 5]))
    yield from arguments("TabulatedPower", made, k=nodes[0], a=nodes[1], power=values)
    weight = functools.partial(cosmology.lensing_weight, universe())
    yield from arguments("lensing_weight", weight, chi=CHI, a=("", A))
    limber = functools.partial(cosmology.limber_power, power=lambda k, a: k * a)
    kernels = ("h/Mpc", np.ones([1, 2]))
    yield from arguments(
        "limber_power", limber, ell=("", [10.0]), chi=CHI, a=("", A), widths=CHI, kernels=kernels
    )


def of_grids_and_runs() -> Iterator[Argument]:
    box = functools.partial(fpm.Box, mesh=BOX.mesh)
    sizes = dict(grid=("", (8, 8, 8)), size=("Mpc/h", (64.0, 64.0, 64.0)))
    yield from arguments("Box", lambda **given: box(**given).size, **sizes, batch=("", 2))
    yield from arguments("Box.finer", lambda factor: BOX.finer(factor).cell, factor=("", 2.0))
    block = functools.partial(BOX.block_of, "value", shape=BOX.shape)
    yield from arguments("Box.block_of", block, value=FIELD)
    for name, call in {
        "Field +": lambda operand: (field() + operand).block,
        "Field *": lambda operand: (field() * operand).block,
    }.items():
        yield from arguments(name, call, operand=FIELD)
    yield from arguments("Field", lambda block: fpm.Field(block, BOX).block.shape, block=FIELD)
    smoothing = functools.partial(gaussian_smoothing, BOX)
    yield from arguments("gaussian_smoothing", smoothing, evaluated=False, radius=("Mpc/h", 2.0))
    made = functools.partial(fpm.Simulation, universe())
    given = dict(grid=("", 8), box_size=SIZE, steps=("", [0.1, 1.0]))

    def lattice(**given: Any) -> Any:
        found = made(**given)
        return found.box.grid, found.box.size, found.edges, found.options.mesh_factor

    yield from arguments("Simulation", lattice, **given)
    three = dict(box_size=("Mpc/h", [64.0, 64.0, 32.0]), mesh_factor=("", 2.0))
    yield from arguments("Simulation", lattice, dict(grid=8, steps=[0.1, 1.0]), **three)
    yield from arguments(
        "Simulation.with_steps",
        lambda steps: simulation().with_steps(steps).edges,
        steps=given["steps"],
    )
    run = functools.partial(arguments, evaluated=False)
    for name in ("run", "lpt"):
        call = getattr(simulation(), name)
        yield from run(f"Simulation.{name}", call, seed=("", 1))
        yield from run(f"Simulation.{name}", call, white_noise=FIELD)
        vectors = np.zeros([8, 8, 8, 3], np.float32)
        for vector, unit in (("displacement", "Mpc/h"), ("velocity", "Mpc/h H0")):
            both = dict(displacement=vectors, velocity=vectors)

            def pair(call: Any = call, both: Any = both, **one: Any) -> Any:
                return call(particles=tuple({**both, **one}.values()))

            if name == "run":
                yield from run(f"Simulation.{name}", pair, **{vector: (unit, vectors)})
    outputs = ("", [0.5, 1.0])
    yield from run("Simulation.run", functools.partial(simulation().run, 1), outputs=outputs)
    yield from run("Simulation.states_at", simulation().states_at, times=outputs)
    yield from run("Simulation.lpt", functools.partial(simulation().lpt, 1), a=("", 0.5))
    density = dict(mesh_factor=("", 1.5), shift=("", 0.5), weights=FIELD)
    yield from run("State.density", functools.partial(fpm.State.density, None), **density)
    painted = functools.partial(drawn.catalogue().density, 8)
    weights = ("", np.arange(1.0, 9.0))
    yield from arguments("Catalogue.density", lambda **given: painted(**given).block,
                         weights=weights, shift=("", 0.5))  # fmt: skip
    of_grid = drawn.catalogue().density
    yield from arguments("Catalogue.density", lambda grid: of_grid(grid).block, grid=("", 8))
    yield from arguments("Catalogue.shot_noise", drawn.catalogue().shot_noise, weights=weights)


@functools.cache
def particles() -> fpm.ParticleSnapshot:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snap.hdf5"
        snapshots.write_snapshot(path, snapshots.points())
        found = fpm.read_particles(path)
        rows = {kind: found.files.read(kind, 0, n) for kind, n in found.files.counts.items()}

    def read(kind: int, begin: int, end: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: rows[kind][name][begin:end] for name in names}

    object.__setattr__(found.files, "read", read)
    return found


def of_points() -> Iterator[Argument]:
    places = np.random.default_rng(4).uniform(0, 50, (20, 3))

    def paint(positions: Any = places, **given: Any) -> Any:
        return fpm.paint(positions, BOX, **given)

    points = dict(positions=("Mpc/h", places), weights=("", np.ones(20)), shift=("", 0.5))
    yield from arguments("paint", paint, **points)
    mesh = dict(grid=("", 8), shift=("", 0.5))

    def density(grid: Any = 8, **given: Any) -> Any:
        return particles().density(grid, **given).block

    def densities(grid: Any = 8, **given: Any) -> Any:
        return [field.block for field in particles().densities(grid, **given)]

    yield from arguments("ParticleSnapshot.density", density, **mesh)
    mesh = dict(grid=("", 8), shifts=("", [0.0, 0.5]))
    yield from arguments("ParticleSnapshot.densities", densities, **mesh)


def of_surveys() -> Iterator[Argument]:
    places = np.random.default_rng(4).uniform(0, 50, (20, 3))
    made = fpm.SurveyCatalogue
    points = dict(positions=("Mpc/h", places), weights=("", np.ones(20)))
    yield from arguments("SurveyCatalogue", made, **points, density=("(h/Mpc)^3", np.ones(20)))
    sky = dict(ra=("deg", A), dec=("deg", A), redshift=("redshift", A), weights=("", A))
    sky |= dict(density=("(h/Mpc)^3", A))
    on_sky = functools.partial(made.from_sky, cosmology=universe())
    yield from arguments("SurveyCatalogue.from_sky", on_sky, **sky)
    power = dict(P0=("(Mpc/h)^3", 100.0), area=("deg^2", 1000.0), padding=("", 0.2), bins=BINS)
    box = dict(box_size=SIZE, center=("Mpc/h", [25.0, 25.0, 25.0]), orders=("", [0, 2]))

    def measure(grid: Any = 8, **given: Any) -> Any:
        return fpm.survey_multipoles(made(places), made(places[::2]), grid, **given)

    # XLA compiles it anew for each size of the box.
    refused = functools.partial(arguments, "survey_multipoles", measure, evaluated=False)
    yield from refused(**power, **box, grid=("", 8))
    measured = dict(box_size=50.0, center=[25.0] * 3, orders=[0])
    yield from arguments("survey_multipoles", measure, measured, **power)


def of_statistics() -> Iterator[Argument]:
    for name, values in {
        "power_spectrum": dict(shot_noise=NOISE),
        "multipoles": dict(shot_noise=NOISE, orders=("", [0, 2])),
        "power_wedges": dict(shot_noise=NOISE, wedges=("", [0.0, 0.5, 1.0])),
        "bispectrum": {},
    }.items():
        given = dict(field=FIELD, box_size=SIZE, bins=BINS, **values)
        evaluated = name == "power_spectrum"
        yield from arguments(name, getattr(statistics, name), evaluated=evaluated, **given)
    interlaced = functools.partial(fpm.power_spectrum, CUBE, 64.0)
    refused = functools.partial(arguments, evaluated=False)
    yield from refused("power_spectrum", interlaced, interlaced=FIELD)
    yield from refused(
        "multipoles", functools.partial(fpm.multipoles, CUBE, 64.0), interlaced=FIELD
    )
    wedges = functools.partial(fpm.power_wedges, CUBE, 64.0)
    yield from refused("power_wedges", wedges, interlaced=FIELD)
    lengths = dict(field=FIELD, box_size=SIZE, bins=("Mpc/h", [8.0, 20.0, 30.0]))
    xi = statistics.correlation_function
    yield from arguments("correlation_function", xi, **lengths)
    yield from refused("correlation_function", functools.partial(xi, CUBE, 64.0), interlaced=FIELD)
    poles = statistics.correlation_multipoles
    yield from arguments("correlation_multipoles", poles, **lengths, orders=("", [0, 2]))
    moved = functools.partial(poles, CUBE, 64.0)
    yield from refused("correlation_multipoles", moved, interlaced=FIELD)
    two = dict(a=FIELD, b=FIELD, box_size=SIZE, bins=BINS)
    for name in ("compare", "cross_power", "transfer_function", "correlation_coefficient"):
        own = dict(shot_noise=NOISE) if name in ("compare", "cross_power") else {}
        yield from refused(name, getattr(fpm, name), **two, **own)
    pair = functools.partial(fpm.compare, CUBE, CUBE, 64.0)
    second = lambda shot_noise: pair(shot_noise=(1.0, shot_noise))  # noqa: E731
    yield from refused("compare", second, shot_noise=NOISE)
    for name in "binned_power binned_multipoles binned_wedges binned_bispectrum".split():
        own = dict(wedges=("", [0.0, 1.0])) if "wedges" in name else {}
        own |= dict(orders=("", [0, 2])) if "multipoles" in name else {}
        call = functools.partial(getattr(statistics, name), box=BOX)
        yield from refused(name, call, field=FIELD, bins=BINS, **own)
    compared = functools.partial(statistics.binned_compare, box=BOX)
    yield from refused("binned_compare", compared, a=FIELD, b=FIELD, bins=BINS)
    bins = dict(width=("h/Mpc", 0.1), k_min=("h/Mpc", 0.1), k_max=("h/Mpc", 0.4))
    yield from arguments("Bins", statistics.Bins, **bins)
    yield from arguments("Bins", statistics.Bins, number=("", 3))
    dex = functools.partial(statistics.Bins, spacing="log")
    yield from arguments("Bins", dex, width=("", 0.1))
    yield from arguments("bin_edges", lambda bins: statistics.bin_edges(bins, BOX), bins=BINS)
    contents = functools.partial(statistics.bin_contents, BOX)
    yield from arguments("bin_contents", contents, bins=BINS)
    means = functools.partial(statistics.mode_means, [], BOX)
    yield from refused("mode_means", means, bins=BINS)

    def sides(field: Any, box_size: Any) -> Any:
        box, block = statistics.box_of(field, box_size)
        return box.size, block

    yield from arguments("box_of", sides, field=FIELD, box_size=SIZE)
    yield from arguments("box_of", lambda box_size: sides(field(), box_size), box_size=SIZE)
    yield from arguments("Sample", statistics.Sample, block=FIELD, shifted=FIELD)
    sums = functools.partial(statistics.sum_over_universe, BOX.mesh)
    yield from arguments("sum_over_universe", sums, values=FIELD)
    histogram = dict(field=FIELD, edges=EDGES)
    yield from arguments("density_histogram", statistics.density_histogram, **histogram)
    soft = functools.partial(statistics.soft_histogram, box=BOX)
    yield from refused("soft_histogram", soft, **histogram)
    maps = ("", MAP)
    yield from arguments("peaks", statistics.peaks, maps=maps, edges=EDGES, sigma=("", 0.5))
    yield from arguments("map_histogram", statistics.map_histogram, maps=maps, edges=EDGES)
    yield from refused("soft_map_histogram", statistics.soft_map_histogram, maps=maps, edges=EDGES)
    angles = dict(maps=maps, fov=("rad", 0.1), bins=("", [30.0, 150.0, 260.0]), other=maps)
    yield from arguments("angular_power", statistics.angular_power, **angles, noise=("sr", 1e-7))
    yield from arguments("binned_angular_power", statistics.binned_angular_power, **angles)
    theory = functools.partial(statistics.theory_in_bins, lambda ell: 1 / ell)
    sky = dict(pixels=("", (8, 8)), fov=("rad", 0.1), bins=("", [50.0, 150.0, 260.0]))
    yield from arguments("theory_in_bins", theory, **sky)
    own = functools.partial(statistics.theory_in_bins, pixels=8, fov=0.1)
    yield from arguments(
        "theory_in_bins", lambda power: own(lambda ell: power / ell), power=("sr", 1.0)
    )
    spheres = dict(edges=("", [1.0, 3.0]))
    yield from arguments(
        "spherical_power", statistics.spherical_power, maps=("", SKY), other=("", SKY), **spheres
    )
    spherical = statistics.spherical_theory_in_bins
    yield from arguments(
        "spherical_theory_in_bins",
        functools.partial(spherical, lambda ell: 1 / ell),
        **spheres,
        nside=("", 2),
    )
    yield from arguments(
        "spherical_theory_in_bins",
        lambda power: spherical(lambda ell: power / ell, [1.0, 3.0], 2),
        power=("sr", 1.0),
    )
    window = dict(ell=("", [10.0, 20.0]), nside=("", 8), power=("", 2))
    yield from arguments("painting_window", statistics.painting_window, **window)
    slopes = statistics.Jacobian(np.ones(2), {"h": np.eye(2)}, frozenset())
    yield from arguments("Jacobian.fisher", slopes.fisher, covariance=("", [1.0, 2.0]))
    inputs = functools.partial(statistics.jacobian, lambda given: given["h"], mesh=BOX.mesh)
    yield from refused("jacobian", lambda h: inputs({"h": h}), h=("", 0.7))


def of_lensing() -> Iterator[Argument]:
    z = "redshift"
    plane = dict(redshift=(z, 1.0), shift=(z, 0.1))
    yield from arguments("SourcePlane", lensing.SourcePlane, **plane)
    yield from arguments("SourcePlane", lensing.SourcePlane, distance=("Mpc/h", 1000.0))
    smail = dict(z0=(z, 0.3), alpha=("", 2.0), beta=("", 1.5), shift=(z, 0.1), z_max=(z, 2.0))
    yield from arguments("SmailDistribution", lensing.SmailDistribution, **smail)
    rows = dict(z=(z, [0.1, 0.5, 1.0]), n=("", [0.0, 1.0, 0.5]), shift=(z, 0.1))
    yield from arguments("TabulatedDistribution", lensing.TabulatedDistribution, **rows)
    near = functools.cache(lambda: lensing.SourcePlane(1.0))
    wide = functools.cache(lambda: lensing.SmailDistribution(0.3))
    far = cosmology.Distances(universe())
    for name, made in (("SourcePlane", near), ("SourceDistribution", wide)):
        for method, argument in (("efficiency", "chi"), ("fractions", "edges")):

            def call(made: Any = made, method: str = method, **given: Any) -> Any:
                return getattr(made(), method)(*given.values(), far)

            yield from arguments(f"{name}.{method}", call, **{argument: CHI})
    yield from arguments(
        "SourceDistribution.density", lambda chi: wide().density(chi, far), chi=CHI
    )
    ia = dict(amplitude=("", 1.0), eta=("", 0.5), z_pivot=(z, 0.6))
    yield from arguments("IntrinsicAlignment", lensing.IntrinsicAlignment, **ia)
    aligned = lensing.IntrinsicAlignment(1.0)
    response = functools.partial(aligned.response, cosmology=universe())
    yield from arguments("IntrinsicAlignment.response", response, a=("", A))
    slabs = ("Mpc/h", [0.0, 100.0, 200.0])
    planes = dict(edges=slabs, chi=("Mpc/h", [50.0, 150.0]), a=("", [0.98, 0.95]))
    yield from arguments("LensPlanes", lensing.LensPlanes, **planes)
    yield from arguments("LensPlanes.of_shells", lensing.LensPlanes.of_shells, edges=slabs)
    efficiency = functools.partial(lensing.lensing_efficiency, [near()], distances=far)
    yield from arguments("lensing_efficiency", efficiency, chi=CHI)
    power = functools.partial(lensing.convergence_power, sources=[near()], cosmology=universe())
    yield from arguments("convergence_power", power, ell=("", [100.0, 200.0]))
    two = lensing.LensPlanes([0.0, 1200.0, 2400.0])
    shared = dict(planes=two, sources=[near()], cosmology=universe())
    delta = ("", np.stack([MAP, MAP]))
    yield from arguments("born", lensing.born, shared, delta=delta)
    rays = dict(delta=delta, fov=("rad", 0.1), positions=("rad", np.array([[0.05, 0.05]])))
    yield from arguments("ray_trace", lensing.ray_trace, shared, **rays)
    fov = ("rad", 0.1)
    yield from arguments("shear", lensing.shear, kappa=("", MAP), fov=fov)
    shapes = dict(gamma1=("", MAP), gamma2=("", MAP), fov=fov)
    yield from arguments("convergence", lensing.convergence, **shapes)
    density = dict(sigma_e=("", 0.3), n_eff=("1/arcmin^2", 30.0))
    counts = dict(pixels=("", (4, 4)), seed=("", 1), components=("", 2))
    yield from arguments("shape_noise", lensing.shape_noise, fov=fov, **density, **counts)
    flat = dict(z_max=(z, 1.0), field_of_view=("deg", 5.0), pixels=("", 8), tiles=("", 1))
    yield from arguments("FlatField", FlatField, **flat)
    full = dict(z_max=(z, 1.0), nside=("", 8), observer=("Mpc/h", [1.0, 2.0, 3.0]))
    yield from arguments("FullSky", FullSky, **full)
    cone = LightCone(FullSky(z_max=0.1, nside=8))
    for width in (10.0, [10.0, 20.0]):
        widths = dict(width=("Mpc/h", width))
        observer = lambda width: cone.planes_observer(width).args  # noqa: E731
        yield from arguments("LightCone.planes_observer", observer, **widths)
        maps = functools.partial(cone.planes, simulation())
        yield from arguments("LightCone.planes", maps, evaluated=False, **widths)
    run = functools.partial(arguments, evaluated=False, white_noise=FIELD)
    yield from run("LightCone.planes", functools.partial(cone.planes, simulation(), 10.0))


def of_inference() -> Iterator[Argument]:
    rec = reconstruction
    yield from arguments("Annealing", rec.Annealing, radius=("Mpc/h", 2.0), inflation=("", 3.0))
    yield from arguments("Stage", functools.partial(rec.Stage, rec.EXACT), evaluations=("", 9))
    yield from arguments("Phase", functools.partial(rec.Phase, rec.EXACT), moves=("", 9))
    yield from arguments("LBFGS", rec.LBFGS, history=("", 9))
    for sampler in (rec.HMC, rec.Microcanonical, rec.AdjustedMicrocanonical):
        given = dict(step=("", 0.1), leaps=("", 9))
        yield from arguments(sampler.__name__, sampler, **given)
    data = dict(data=FIELD, sigma=("", 0.5), observed=FIELD, error=("", 0.1))
    yield from arguments("Gaussian", functools.partial(rec.Gaussian, BOX), **data)
    counts = dict(counts=FIELD, mean_count=("", 5.0), observed=FIELD)
    yield from arguments("Poisson", functools.partial(rec.Poisson, BOX), **counts)
    draws = np.random.default_rng(4).random((8, 2, 1))
    yield from arguments("reconstruction.convergence", rec.convergence, draws=("", draws))
    refused = functools.partial(arguments, evaluated=False)
    biased = lambda bias: ForwardModel(simulation(), bias={"b": bias})  # noqa: E731
    yield from refused("ForwardModel", biased, bias=("", 1.5))
    model = functools.cache(lambda: ForwardModel(simulation(), "linear"))
    yield from refused("UniverseModel.__call__", lambda noise: model()(noise, {}), noise=FIELD)
    varied = lambda sigma8: model()(tf.constant(CUBE), {"sigma8": sigma8})  # noqa: E731
    yield from refused("UniverseModel.__call__", varied, sigma8=("", 0.8))
    fitted = lambda h: rec.Posterior(model(), rec.Gaussian(BOX, CUBE, 0.5), {"h": h})  # noqa: E731
    yield from refused("reconstruction.Posterior", fitted, h=("", (0.5, 0.9)))
    of_vector = functools.cache(lambda: rec.LogDensity(fitted((0.5, 0.9)), even=False))
    vector = dict(vector=("", np.zeros(513)))
    yield from refused("LogDensity.__call__", lambda vector: of_vector()(vector), **vector)
    yield from refused("LogDensity.unknowns", lambda vector: of_vector().unknowns(vector), **vector)
    yield from refused("LogDensity.start", lambda seed: of_vector().start(seed), seed=("", 1))
    placed = lambda h: of_vector().vector(field(), {"h": h})  # noqa: E731
    yield from refused("LogDensity.vector", placed, h=("", 0.7))
    table = np.random.default_rng(5).random((9, 2))
    yield from arguments("Summaries", posteriors.Summaries, features=("", table), truth=("", table))
    two = UniformPriors({"h": (0.0, 1.0), "n_s": (0.0, 1.0)})
    answers = functools.partial(posteriors.Answers, two)
    samples = dict(truth=("", table), samples=("", table[:, None]), gain=("", table[:, 0]))
    yield from arguments("Answers", answers, **samples)
    density = posteriors.FeatureDensity.of(table, table)
    yield from arguments("FeatureDensity.distances", density.distances, features=("", table))
    both = dict(train=("", table), held_out=("", table))
    yield from arguments("FeatureDensity.of", posteriors.FeatureDensity.of, **both)
    one = dict(features=("", [[0.5]]), parameters=("", [[0.7]]))
    yield from refused("Posterior.gain", posterior().gain, **one)
    sample = dict(features=("", [[0.5]]), count=("", 4), seed=("", 1))
    yield from refused("Posterior.sample", posterior().sample, **sample)
    plot = dict(features=("", [[0.5]]), count=("", 4), seed=("", 1), truth=("", [0.7]))
    yield from refused("Posterior.plot", posterior().plot, **plot)


def of_trainings() -> Iterator[Argument]:
    schedule = cosmoflow.Schedule(0.1)
    shared = dict(larc=("", 0.1), weight_decay=("", 0.1), clip_norm=("", 2.0))
    adam = dict(beta1=("", 0.8), beta2=("", 0.9), epsilon=("", 1e-6))
    refused = functools.partial(arguments, evaluated=False)
    yield from refused("Adam", functools.partial(cosmoflow.Adam, schedule), **adam, **shared)
    momentum = functools.partial(cosmoflow.Momentum, schedule)
    yield from refused("Momentum", momentum, momentum=("", 0.8))
    header = functools.partial(DatasetHeader, (8, 8, 8), ("h",))
    yield from arguments("DatasetHeader", header, box_size=SIZE, scale=("", 256.0))
    write = functools.partial(cosmoflow.RecordWriter.write, None, seed=1, index=1)
    yield from refused("RecordWriter.write", write, volume=FIELD, y=("", [0.7]))
    layers = cosmoflow.Declaration("linear", (cosmoflow.Convolution(1, 1),), "valid", 0.0)
    network = functools.cache(lambda: cosmoflow.Network(layers, BOX.mesh, width=8, batch=1))
    volume = ("", CUBE[np.newaxis])
    yield from refused("Network.predict", lambda volume: network().predict(volume), volume=volume)
    step = lambda **batch: network().step(sample=[0], seed=1, **batch)  # noqa: E731
    yield from refused("Network.step", step, volume=volume, target=("", [[0.7]]))


FAMILY = [
    *of_cosmology(),
    *of_grids_and_runs(),
    *of_statistics(),
    *of_points(),
    *of_surveys(),
    *of_lensing(),
    *of_inference(),
    *of_trainings(),
]
