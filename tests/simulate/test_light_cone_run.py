"""Runs with a light cone by the command: what is refused, what is written, what goes on."""

import functools
import itertools
import math
import re
import tomllib
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from commands import flowpm_and_loaded, flowpm_here, folder_with, plain
from run_files import RUN

import flowpm_dist as fpm
from flowpm_dist.cosmology import Halofit, LinearPower
from flowpm_dist.cosmology.options import PartialCosmologyOptions
from flowpm_dist.cosmology.theory import theory_of
from flowpm_dist.io import load_light_cone, read_light_cone
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import CONE_PARTICLES, LIGHT_CONE, SNAPSHOT
from flowpm_dist.io.light_cone import ROWS
from flowpm_dist.jobs.folder import OF_EVERY_JOB
from flowpm_dist.jobs.job import Request
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.observables.lensing import (
    SmailDistribution,
    SourcePlane,
    TabulatedDistribution,
    convergence_power,
    ray_trace,
    shape_noise,
    shear,
)
from flowpm_dist.observables.light_cone import FlatField, LightCone
from flowpm_dist.observables.light_cone.flat import FlatGeometry
from flowpm_dist.observables.light_cone.layers import LayerCrossing, RankLayers
from flowpm_dist.observables.light_cone.options import plane_of_layers
from flowpm_dist.observables.light_cone.section import distance_of
from flowpm_dist.observables.light_cone.sphere import SphereCrossing, SphereGeometry
from flowpm_dist.particle_mesh.kernels import Ball
from flowpm_dist.simulate.folder import FILES, OF_LIGHT_CONE, SimulationFolder
from flowpm_dist.simulate.job import SimulationJob, demand_of, output_bytes, particle_files
from flowpm_dist.simulate.options import SimulationOptions
from flowpm_dist.simulation.cost import RECORDING
from flowpm_dist.simulation.demand import TooLargeError
from flowpm_dist.statistics.angular_spectra import angular_power, octave_edges, theory_in_bins
from meshimpl.launch import HostMemory
from tests.simulate.test_resume import stopped

CONE = """
[lightcone]
field_of_view = 1.5
pixels = 8
z_max = 1.0
tiles = 3
planes = true
plane_width = 300.0
particles = true
shape_noise = { sigma_e = 0.3, n_eff = 10.0, seed = 5 }
sources = [
    { redshift = 0.6 },
    { smail = [0.3, 2.0, 1.5], z_max = 0.9, shift = 0.02 },
    { file = "nz.txt", column = 2 },
]
"""
TEXT = (RUN + CONE).replace("grid = 16", "grid = 8").replace("steps = 2", "steps = 4")
NZ = "# z, first, second\n0.1, 1, 0\n0.5, 1, 3\n0.8, 1, 0.5\n"
FIELD = {"field_of_view": 1.5, "pixels": 8, "z_max": 1.0, "tiles": 3}
here = folder_with(TEXT)


@pytest.fixture(autouse=True)
def table(here):
    (here / "nz.txt").write_text(NZ)


def checked(text):
    return SimulationOptions.check(tomllib.loads(text), Path("run.toml"))


def problems(text):
    with pytest.raises(ConfigError) as message:
        checked(text)
    return str(message.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("field_of_view = 1.5", "field_of_view = 2", "box 64: at most 1.59 degrees fit; repeat ="),
        ("z_max = 1.0\n", "z_max = 12\n", "lightcone.z_max = 12: the run begins at z = 9"),
        ("steps = 4", "a_stop = 0.9", "evolution.a_stop ends the run at a = 0.9: a light cone"),
        ("steps = 4", "edges = [0.1, 0.9]", "evolution.edges ends the run at a = 0.9"),
        ("redshift = 0.6", "redshift = 1.1", "sources[0] reach to z = 1.1, beyond z_max = 1: incr"),
        ("z_max = 0.9,", "", "sources[1] reach to z = 3.02, beyond z_max = 1: increase it, or cut"),
        ("column = 2", "shift = 0.3", "sources[2] reach to z = 1.1, beyond z_max = 1"),
        ("column = 2", "column = 3", "nz.txt: no n(z) of sources: it has 3 columns"),
        ("column = 2", "shift = -0.9", "sources[2] have no member above z = 0 with shift = -0.9"),
        ("nz.txt", "no.txt", "no.txt: no n(z) of sources: No such file"),
        ("redshift = 0.6", "redshift = 0", "sources[0]: redshift = 0: must be a redshift above 0"),
        ("redshift = 0.6", "redshfit = 1", "redshfit'; did you mean redshift? (options: redshift"),
        ("redshift = 0.6", "z_max = 0.6", "redshift, smail, file none is given: give exactly one"),
        ("redshift = 0.6", "redshift = 0.6, column = 2", "sources[0]: column = 2: goes with file"),
        ("pixels = 8", "pixels = 3", "lightcone.pixels = 3: must be a whole number of at least 4"),
        ("pixels = 8", "pixels = 8\npixles = 8", "pixles is not a key; did you mean pixels?"),
        ("planes = true", "", "lightcone.plane_width = 300.0: goes with ray_tracing or planes"),
        ("tiles = 3", "alignment = { eta = 1.0 }", "amplitude is missing: must be A_IA, a number"),
        ("tiles = 3", "alignment = { amplitude = 1 }", "sources[0] are at one redshift: an ali"),
        ("tiles = 3", "ray_tracing = true\nalignment = { amplitude = 1 }", "with ray_tracing"),
        ("[0.3, 2.0, 1.5]", "[1e-6, 2.0, 1.5]", "sources[1] cannot be used: n(z) of a source"),
        ("sigma_e = 0.3", "sigma_e = -0.3", "sigma_e = -0.3: must be a number above 0; must be a"),
    ],
)
def test_mistakes_are_told(here, old, new, message):
    assert TEXT.count(old) == 1
    assert message in plain(problems(TEXT.replace(old, new)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0.1 1\n0.5 -1\n", "must be finite and not negative"),
        ("", "sources[2] cannot be used: /"),
        ("# z, n\n", "no n(z) of sources: it has no rows of numbers"),
    ],
)
def test_tables_of_sources_are_read_before_the_work(here, rows, message):
    (here / "nz.txt").write_text(rows)
    assert message in problems(TEXT.replace(", column = 2", ""))


def test_a_shift_may_leave_some_sources(here):
    """Not a table all of whose members it moves below z = 0; nor an advice that is refused."""
    (here / "nz.txt").write_text("0 1\n0.2 1\n0.3 0\n1 0\n")
    message = (
        "cannot be used: n(z) of a source distribution integrates to 0 above z = 0 with shift = "
    )
    assert f"sources[2] {message}-0.5" in problems(TEXT.replace("column = 2", "shift = -0.5"))
    checked(TEXT.replace("column = 2", "shift = -0.25"))


def test_the_field_that_is_advised_fits():
    wide = FlatField(field_of_view=60.0, pixels=8, z_max=1.0)
    for end in np.linspace(1500.0, 2500.0, 11):
        (problem,) = wide.box_problems((64.0,) * 3, end)
        advised = float(re.search(r"at most (\S+) degrees fit", problem.what)[1])
        assert advised == pytest.approx(np.rad2deg(64.0 / end), rel=1e-2)
        fits = wide.model_copy(update={"field_of_view": advised})
        assert not list(fits.box_problems((64.0,) * 3, end))


@pytest.mark.parametrize("width", [1e-3, 90.0, 300.0, 1e5])
def test_planes_are_told_and_estimated_as_they_are(here, width):
    """Eight layers of 8 Mpc/h in each box; of about the width but for the last."""
    text = TEXT.replace("plane_width = 300.0", f"plane_width = {width}")
    cone = checked(text).light_cone
    layers = math.ceil(cone.chi_max / 8 - 0.5)
    numbers = plane_of_layers(layers, 8.0, width)
    counts = np.bincount(numbers)
    each = min(max(1, round(width / 8)), layers)
    assert cone.planes == len(counts) and set(counts[:-1]) <= {each}
    assert len(counts) == 1 or 0.5 * each <= counts[-1] < 1.5 * each
    message = [each for each in cone.warnings if "plane_width" in each]
    assert len(message) == (width in (1e-3, 1e5))
    assert not message or f"plane_width = {width:g}: planes are {8 * counts[0]} Mpc/h" in message[0]


@pytest.mark.parametrize(("degrees", "percent"), [(19.9, None), (20.0, "1"), (60.0, "10")])
def test_a_field_that_is_too_wide_for_a_flat_sky(degrees, percent):
    """The tangent of half its width is compared with the angle."""
    warning = FlatField(field_of_view=degrees, pixels=8, z_max=0.1).wide_field_warning()
    found = "" if warning is None else warning
    assert (f"edge of the field by {percent} %" in found) == (percent is not None)


def test_checking_a_run_tells_its_warnings(here):
    done = flowpm_here("simulate", "run.toml", "--check")
    assert "# warning: lightcone.pixels = 8: half the way" in done.stdout
    tomllib.loads(done.stdout)


def test_fewer_pixels_are_advised_where_the_maps_are_too_large(here):
    config = SimulationOptions.load("run.toml", {("lightcone", "pixels"): 65536})
    config = config.with_mesh("row:1,col:1")
    job = SimulationJob(config, "row:1,col:1", Request(here, 1, here / "out"))
    host = HostMemory(limit=4 * 2**30, free=2**30, is_container=False)
    with pytest.raises(TooLargeError, match=r"; lightcone.pixels = 2048 would fit"):
        job.costs.demand.check(job.costs.estimate, host)


def test_a_mistake_is_told_without_tensorflow(here):
    (here / "run.toml").write_text(TEXT.replace("z_max = 1.0\n", "z_max = 12\n"))
    done, loaded = flowpm_and_loaded("simulate", "run.toml")
    assert done.returncode == 2 and not loaded & {"tensorflow", "zarr", "mpi4py", "camb"}


def test_the_sides_across_the_line_of_sight_limit_the_field():
    field = FlatField(field_of_view=10.0, pixels=8, z_max=0.3)
    assert not list(field.box_problems((150.0, 160.0, 80.0), 840.0))
    (problem,) = field.box_problems((160.0, 140.0, 300.0), 840.0)
    assert "and the box 140" in problem.what


def test_distances_of_run_files():
    """They are astropy's, and need no TensorFlow."""
    from astropy.cosmology import Flatw0waCDM

    given = {"Omega_m": 0.28, "w0": -0.9, "wa": 0.2}
    there = Flatw0waCDM(H0=100.0, Om0=0.28, w0=-0.9, wa=0.2, Tcmb0=0.0)
    for z in (0.1, 1.0, 3.0):
        expected = there.comoving_distance(z).to_value("Mpc")
        assert distance_of(z, PartialCosmologyOptions(**given)) == pytest.approx(expected, rel=1e-9)


def test_the_resolved_run_file_is_the_same_run(here):
    config = SimulationOptions.load("run.toml")
    (here / "again.toml").write_text(config.resolved())
    assert SimulationOptions.load("again.toml").model_dump() == config.model_dump()
    assert config.lightcone.sources[2].file == here / "nz.txt"
    without = checked(TEXT.partition("[lightcone]")[0])
    assert without.lightcone is None and "lightcone" not in without.resolved()


def test_memory_and_disk_have_room_for_the_maps(here):
    config = SimulationOptions.load("run.toml")
    config = config.with_mesh("row:1,col:1")
    both = [config.model_copy(update={"lightcone": cone}) for cone in (None, config.lightcone)]
    memory = [demand_of(each).estimate().memory for each in both]
    planes, pixels = 8, 64  # 2300 Mpc/h in planes of 300
    of_maps = (15 + 12 * 3 + 4 * planes) * pixels * 4 + 45 * 2**20
    assert memory[1] - memory[0] == of_maps + 160 * 2**20
    disk = [output_bytes(each, ranks=2) for each in both]
    # Seven numbers of each particle in a pyramid of this height and field.
    expected = 8**3 / 64**3 * np.deg2rad(1.5) ** 2 * config.light_cone.chi_max**3 / 3
    assert disk[1] - disk[0] == (3 * 3 + planes) * pixels * 4 + int(7 * 4 * (expected + 2 * ROWS))
    output = config.output.model_copy(update={"checkpoint_every": 1})
    often = config.model_copy(update={"output": output})
    assert particle_files(often, ranks=2) == 2 * 4  # none at the end but the last
    assert config.light_cone.chi_max == pytest.approx(2300, rel=0.01)


def geometries(n, far):
    """Both skies, and a plane of n^2 particles, all at the scale factor 0.5."""
    flat = FlatGeometry.__new__(FlatGeometry)
    flat.end, flat._a, flat._moved = far + 1.0, np.array([0.5]), np.ones((1, 4))
    flat._speed, flat._theory = flat._moved, theory_of(COSMOLOGY)
    flat.box, flat.sky = (
        SimpleNamespace(cell=(1.0,) * 3, size=(float(n),) * 3),
        SimpleNamespace(fov=0.1),
    )
    zero = np.zeros(1, int)
    places = np.array([[0, 1, 2, 0, 1, 0]])
    directions = np.array([[-n / 2, 1, -n / 2, 1, 1, -np.inf, np.inf]])
    layers = RankLayers(zero, np.array([far]), places, directions)
    flat._in_view = SimpleNamespace(of=lambda crossing, reach: layers)
    sphere = SphereGeometry.__new__(SphereGeometry)
    edges = np.array([0.0, 200.0, 400.0])
    given = dict(first=(0, 0, 0), spacing=(1.0,) * 3, lengths=(float(n),) * 3, nside=1)
    given |= dict(borders=edges, step=1.0, power=0, depth=1.0, near=0.0, far=400.0)
    given |= dict(observer=(n / 2, n / 2, 0.0), copies=np.zeros((1, 3), np.int32), edges=edges)
    sphere.end, sphere.box = 400.0, flat.box
    sphere._ball = lambda crossing, reach: (0, Ball(**given))
    factors = np.eye(4)[np.zeros((2, 9), int)]  # of 1
    of_all = SphereCrossing(edges, 0, zero, slice(0, 2), factors)
    return (flat, LayerCrossing(zero, zero == 0)), (sphere, of_all)


def test_particles_are_written_in_the_memory_that_is_told():
    """Of planes with a million particles, all of which cross after the same kick."""
    n, far = 1024, 2000.0
    field = np.zeros((n, n, 1, 3), np.float32)
    lattice = np.arange(n) - 512
    square = (np.abs(lattice) <= 0.05 * far).sum() ** 2
    disc = (lattice**2 + lattice[:, np.newaxis] ** 2 < 400**2).sum()
    for (sky, crossing), count in zip(geometries(n, far), (square, disc), strict=True):
        tracemalloc.start()
        found = sum(len(a) for *_, a in sky.record(crossing, field, field, [field] * 4))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == count and peak < RECORDING


@pytest.mark.parametrize("moved", [1e20, -81.0, 79.0])
def test_particles_without_a_place_are_written_as_such(moved):
    """Those displaced by more than ten times the side of the box, which is 8."""
    field = np.zeros((8, 8, 1, 3), np.float32)
    field[3, 4, 0, 2] = moved
    for sky, crossing in geometries(8, 2000.0):
        places = np.concatenate(
            [p for p, *_ in sky.record(crossing, field, 0 * field, [0 * field] * 4)]
        )
        assert np.isnan(places).any() == (abs(moved) > 80)


@pytest.mark.parametrize("pixels", [4, 5, 7, 8, 17, 100, 243])
def test_no_bin_is_empty(pixels):
    edges = octave_edges(0.1, pixels)
    assert angular_power(tf.zeros([pixels, pixels]), 0.1, edges).modes.min() >= 4


@pytest.fixture(scope="module")
def born(tmp_path_factory):
    folder = tmp_path_factory.mktemp("born")
    (folder / "run.toml").write_text(TEXT)
    (folder / "nz.txt").write_text(NZ)
    done = flowpm_here("simulate", str(folder / "run.toml"), "--output", str(folder / "out"))
    assert done.returncode == 0, done.stderr
    return folder / "out", done


COSMOLOGY = fpm.Cosmology(0.30966, 0.04897, 0.6766, 0.96822, A_s=2.1064e-9)


def simulation():
    return fpm.Simulation(COSMOLOGY, 8, 64.0, fpm.scale_factor_steps(0.1, 1.0, 4))


def sources():
    table = np.loadtxt(NZ.splitlines(), delimiter=",")
    return [
        SourcePlane(0.6),
        SmailDistribution(0.3, 2.0, 1.5, 0.02, z_max=0.9),
        TabulatedDistribution(table[:, 0], table[:, 2]),
    ]


@functools.cache
def convergence():
    with pytest.warns(UserWarning, match="^pixels = 8: half the way"):
        return LightCone(FlatField(**FIELD)).convergence(simulation(), sources(), 1)


@functools.cache
def planes():
    return LightCone(FlatField(**FIELD)).planes(simulation(), 300.0, 1)


def test_maps_are_those_of_python(born):
    out, done = born
    found = load_light_cone(out)
    expected = convergence()
    np.testing.assert_array_equal(found["kappa"], np.swapaxes(expected.kappa, 1, 2))
    noise = shape_noise([8, 8], expected.sky.fov, np.full(3, 0.3), 10.0, 5).numpy()
    for n, gamma in enumerate(shear(expected.kappa, expected.sky.fov)):
        values = np.swapaxes(gamma + noise[:, n], 1, 2)
        np.testing.assert_allclose(found[f"gamma{n + 1}"], values, atol=1e-7 * abs(values).max())
    np.testing.assert_array_equal(found["planes"], np.swapaxes(planes().delta, 1, 2))
    np.testing.assert_array_equal(found["plane_edges"], planes().planes.edges)
    np.testing.assert_allclose(found["x"], (np.arange(8) + 0.5) * 1.5 / 8)
    about = found.attributes
    assert about["complete"] and about["approximation"] == "Born" and about["seed"] == 1
    assert [each["name"] for each in about["sources"]][:2] == ["z = 0.6", "Smail, z0 = 0.3 +0.02"]
    assert "[y, x]" in about["conventions"]["axes"]
    with pytest.raises(KeyError, match="no 'rotation'; it has"):
        found["rotation"]


def test_a_coarse_mesh_is_told(born):
    out, done = born
    (warning,) = load_light_cone(out).attributes["warnings"]
    assert warning.startswith("lightcone.pixels = 8: half the way")
    assert "pixels = 4 would show" in warning
    assert f"warning: {warning}" in done.stderr


def test_the_spectra_are_those_of_python(born):
    out, _ = born
    table = np.genfromtxt(out / "convergence_power.csv", delimiter=",", names=True)
    kappa = convergence().kappa
    fov = np.deg2rad(1.5)
    edges = octave_edges(fov, 8)
    measured = angular_power(kappa[:, None], fov, edges, other=kappa, window="bilinear")
    linear = LinearPower(COSMOLOGY)
    theories = {
        name: theory_in_bins(
            lambda ell, power=power: convergence_power(ell, sources(), COSMOLOGY, power),
            8,
            fov,
            edges,
        )
        for name, power in (("limber_linear", linear), ("limber_halofit", Halofit(linear)))
    }
    assert len(table) == 6 * len(measured.ell)
    for i, j in itertools.combinations_with_replacement(range(3), 2):
        rows = table[(table["i"] == i) & (table["j"] == j)]
        np.testing.assert_allclose(rows["ell"], measured.ell, rtol=1e-7)
        np.testing.assert_array_equal(rows["modes"], measured.modes)
        scale = abs(measured.power[i, j]).max()
        np.testing.assert_allclose(rows["C_ell"], measured.power[i, j], atol=1e-6 * scale)
        for name, theory in theories.items():
            np.testing.assert_allclose(rows[name], theory[i, j], rtol=1e-7)


def test_the_noise_of_particles_is_in_the_table(born):
    """For sources at one redshift it is V / N times the integral of their kernel over distances."""
    out, _ = born
    table = np.genfromtxt(out / "convergence_power.csv", delimiter=",", names=True)
    noise = table["particle_noise"][(table["i"] == 0) & (table["j"] == 0)]
    line = theory_of(COSMOLOGY).distances
    source = float(line.comoving(tf.constant(1 / 1.6, tf.float64)))
    chi = (np.arange(4000) + 0.5) * source / 4000
    a = line.scale_factor(tf.constant(chi)).numpy()
    kernel = 1.5 * COSMOLOGY.Omega_m / 2997.92458**2 * chi / a * (1 - chi / source)
    expected = (64.0 / 8) ** 3 * np.sum((kernel / chi) ** 2) * source / 4000
    np.testing.assert_allclose(noise, expected, rtol=1e-5)


def test_the_noise_of_particles_is_subtracted(here, born):
    """From C_l and from P, the noise of particles that are placed at random."""
    text = f"{TEXT}\n[results]\nsubtract_shot_noise = true\n"
    (here / "less.toml").write_text(text)
    done = flowpm_here("simulate", "less.toml", "--output", "less")
    assert done.returncode == 0, done.stderr
    (maps, maps_less), (power, power_less) = (
        [
            np.genfromtxt(folder / name, delimiter=",", names=True)
            for folder in (born[0], here / "less")
        ]
        for name in ("convergence_power.csv", "power_spectrum.csv")
    )
    noise = maps["C_ell"] - maps_less["C_ell"]
    np.testing.assert_allclose(noise, maps["particle_noise"], rtol=1e-3)
    np.testing.assert_allclose(power["P_Mpch3"] - power_less["P_Mpch3"], 8.0**3, rtol=1e-3)
    np.testing.assert_allclose(power["particle_noise_Mpch3"], 8.0**3)


def test_a_run_with_a_light_cone_leaves_its_results(born):
    out, done = born
    left = {*FILES, *OF_LIGHT_CONE, CONE_PARTICLES, *OF_EVERY_JOB, SNAPSHOT}
    assert {p.name for p in out.iterdir()} == left
    assert "on the light cone" in done.stdout + done.stderr
    assert "load_light_cone" in done.stdout and "convergence_power.png" in done.stdout
    for name in ("convergence.png", "convergence_power.png"):
        assert (out / name).stat().st_size > 10_000
    for wrong in (out.parent, out / SNAPSHOT):
        with pytest.raises(UserError, match="holds no maps of a light cone"):
            load_light_cone(wrong)


RAYS = ("--set", "lightcone.ray_tracing=true", "--set", "lightcone.shape_noise=")


def test_rays_are_those_of_python(here):
    done = flowpm_here("simulate", "run.toml", "--output", "out", *RAYS)
    assert done.returncode == 0, done.stderr
    found = load_light_cone("out")
    chunks = (here / "out" / LIGHT_CONE / "kappa" / "c").rglob("*")
    next(path for path in chunks if path.is_file()).unlink()
    with pytest.raises(UserError, match="kappa lacks 1 of"):
        load_light_cone("out")
    matter = planes()
    rays = ray_trace(matter.delta, matter.planes, sources(), COSMOLOGY, matter.sky.fov)
    for name in ("kappa", "gamma1", "gamma2", "rotation"):
        values = np.swapaxes(getattr(rays, name), 1, 2)
        np.testing.assert_allclose(found[name], values, atol=1e-6 * abs(values).max(), err_msg=name)
    assert found.attributes["approximation"] == "ray tracing"
    assert "without the mean of each plane" in found.attributes["conventions"]["kappa"]


def test_a_run_that_goes_on_has_the_same_maps(here, born, monkeypatch):
    """To the bit, from a checkpoint before the observed light, and one after some of it."""
    stopped(monkeypatch, 3)
    done = stopped(monkeypatch, 1, "--resume")
    assert "after step 4 of 4" in done.stderr
    changed = ("--set", "lightcone.tiles=4", "--resume")
    refused = flowpm_here("simulate", "run.toml", "--output", "out", *changed)
    assert "lightcone.tiles = 4: the run in out has 3" in plain(refused.stderr)
    (here / "nz.txt").write_text(NZ.replace("0.5, 1, 3", "0.5, 1, 2"))
    refused = flowpm_here("simulate", "run.toml", "--output", "out", "--resume")
    assert refused.returncode == 2 and "1 problem" in refused.stderr
    assert f'sources[2].file = "{here / "nz.txt"}": it has other values' in plain(refused.stderr)
    (here / "nz.txt").write_text(f"# the same\n{NZ}")
    done = flowpm_here("simulate", "run.toml", "--output", "out", "--resume")
    assert done.returncode == 0, done.stderr
    found, expected = load_light_cone("out"), load_light_cone(born[0])
    assert found.attributes["checksums"] == expected.attributes["checksums"] != {}
    assert_same_light_cones("out", born[0])


def test_a_run_with_a_network_goes_on_after_its_last_output(here, monkeypatch):
    """The maps of the checkpoint go on, though a resumed run has no states to observe."""
    words = ("--set", "evolution.correction=network", "--set", "evolution.integrator=bullfrog")
    words += ("--set", "output.a=[0.4]", "--set", "lightcone.particles=true")
    done = stopped(monkeypatch, 3, *words)
    assert "after step 3 of 4" in done.stderr
    assert (
        flowpm_here("simulate", "run.toml", "--output", "out", "--resume", *words).returncode == 0
    )
    assert flowpm_here("simulate", "run.toml", "--output", "whole", *words).returncode == 0
    assert_same_light_cones("out", "whole")


def assert_same_light_cones(found, expected):
    """Maps and particles of two folders, to the bit."""
    for read in (lambda folder: load_light_cone(folder).arrays, lambda f: read_light_cone(f)[0]):
        ours, theirs = read(found), read(expected)
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values, err_msg=name)


def test_maps_of_an_older_run_do_not_stay(tmp_path):
    """Those files would look like files of the new run."""
    folder = SimulationFolder(tmp_path / "out")
    (folder.path / LIGHT_CONE).mkdir(parents=True)
    (folder.path / "convergence.png").touch()
    folder.partial.mkdir()
    (folder.partial / SNAPSHOT).mkdir()
    folder.publish()
    assert [path.name for path in folder.path.iterdir()] == [SNAPSHOT]
