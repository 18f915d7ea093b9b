"""Runs with a light cone of the whole sky by the command; power of maps on the sphere."""

import re

import healpy
import numpy as np
import pytest
from commands import flowpm_here, folder_with, plain
from run_files import RUN, check_mistake

import flowpm_dist as fpm
from flowpm_dist.cosmology import Halofit, LinearPower
from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.io import load_light_cone, read_light_cone
from flowpm_dist.io.files import CONE_PARTICLES, SNAPSHOT
from flowpm_dist.jobs.folder import OF_EVERY_JOB
from flowpm_dist.jobs.job import read_record
from flowpm_dist.observables.lensing import SmailDistribution, SourcePlane, convergence_power
from flowpm_dist.observables.light_cone import FullSky, LightCone
from flowpm_dist.observables.light_cone.pictures import mollweide
from flowpm_dist.simulate.folder import FILES, OF_LIGHT_CONE
from flowpm_dist.simulate.options import SimulationOptions
from flowpm_dist.statistics import painting_window, spherical_power, spherical_theory_in_bins
from flowpm_dist.statistics.angular_spectra import spherical_octave_edges
from tests.simulate.test_light_cone_run import COSMOLOGY, assert_same_light_cones, checked, problems
from tests.simulate.test_resume import stopped

CONE = """
[lightcone]
sky = "full"
nside = 8
z_max = 0.3
observer = [200.0, 100.0, 0.0]
shells = true
shell_width = 300.0
particles = true
sources = [{ redshift = 0.25 }, { smail = [0.1, 2.0, 1.5], z_max = 0.28, shift = 0.01 }]
"""
TEXT = (RUN + CONE).replace("grid = 16", "grid = 8").replace("size = 64.0", "size = 400.0")
TEXT = TEXT.replace("steps = 2", "steps = 4")
SKY = LightCone(FullSky(nside=8, z_max=0.3, observer=(200.0, 100.0, 0.0)))
here = folder_with(TEXT)
ALIGNED = "lightcone.alignment = { amplitude = 1 }\n"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("lightcone.nside = 12", "= 12: a power of two up to 8192 is needed; must be"),
        ("lightcone.pixels = 8", '= 8: goes with sky = "flat"'),
        ('lightcone.sky = "whole"', 'there is no such sky; must be "flat" or "full"'),
        ("lightcone.z_max = 12", "= 12: the run begins at z = 9"),
        ("evolution.a_stop = 0.9", "ends the run at a = 0.9: a light cone"),
        ("lightcone.sources = [{ redshift = 0.4 }]", "0. reach to z = 0.4, beyond z_max = 0.3"),
        ("lightcone.observer = [200.0, 401.0, 0.0]", "at 200, 401, 0 Mpc/h: must be in the box"),
        ("box.size = 40.0\nlightcone.z_max = 0.3", "the observed sphere holds the"),
        ("lightcone.shell_width = 0.1", "= 0.1: 8343 shells up to"),
        ("lightcone.shells = false\nlightcone.shell_width = 300.0", "goes with shells = true"),
        (ALIGNED + "lightcone.sources = [{ redshift = 0.25 }]", "0. are at one redshift"),
    ],
)
def test_mistakes_are_reported(here, keys, message):
    check_mistake(SimulationOptions, here, TEXT, keys, message)


def test_what_is_advised_will_do(here):
    many = TEXT.replace("shell_width = 300.0", "shell_width = 0.1")
    width = re.search(r"a width of (\S+) Mpc/h would do", plain(problems(many)))[1]
    checked(many.replace("width = 0.1", f"width = {width}"))
    small = TEXT.replace("observer = [200.0, 100.0, 0.0]", "").replace(
        "size = 400.0", "size = 40.0"
    )
    times = float(re.search(r"a box that is (\S+) times as wide", plain(problems(small)))[1])
    checked(small.replace("size = 40.0", f"size = {40 * times}"))


def test_the_resolved_run_file_is_the_same_run(here):
    config = SimulationOptions.load("run.toml")
    (here / "again.toml").write_text(config.resolved())
    assert SimulationOptions.load("again.toml").resolved() == config.resolved()
    assert SimulationOptions.load("again.toml").lightcone == config.lightcone


def test_what_is_costly_or_too_fine_is_told(here):
    """A pixel finer than the mesh, and a box that is repeated very often."""
    text = TEXT.replace("nside = 8", "nside = 64").replace("size = 400.0", "size = 100.0")
    text = text.replace("200.0, 100.0, 0.0", "50.0, 0.0, 0.0")
    fine, often = checked(text).light_cone.warnings
    assert fine.startswith("lightcone.nside = 64: half the way") and "nside = 32 would show" in fine
    assert "holds the box 2433 times" in often and "s of processor time" in often


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sky")
    (folder / "run.toml").write_text(TEXT)
    done = flowpm_here("simulate", str(folder / "run.toml"), "--output", str(folder / "out"))
    assert done.returncode == 0, done.stderr
    assert "convergence.png" in done.stdout and "shear" not in done.stdout
    return folder / "out"


def test_maps_and_spectra_are_those_of_python(done):
    left = {*FILES, *OF_LIGHT_CONE, CONE_PARTICLES, *OF_EVERY_JOB, SNAPSHOT}
    assert {p.name for p in done.iterdir()} == left
    found = load_light_cone(done)
    sim = fpm.Simulation(COSMOLOGY, 8, 400.0, fpm.scale_factor_steps(0.1, 1.0, 4))
    sources = [SourcePlane(0.25), SmailDistribution(0.1, 2.0, 1.5, 0.01, z_max=0.28)]
    kappa = SKY.convergence(sim, sources, 1).kappa.numpy()
    np.testing.assert_allclose(found["kappa"], kappa, rtol=1e-6, atol=1e-9)
    shells = SKY.planes(sim, 300.0, 1)
    np.testing.assert_array_equal(found["shells"], shells.delta)
    np.testing.assert_allclose(found["shell_edges"], shells.planes.edges, rtol=1e-9)
    particles, _ = read_light_cone(done)
    place = particles["Coordinates"]
    expected = 8**3 / 400**3 * 4 / 3 * np.pi * found.attributes["distance_of_z_max"] ** 3
    assert place.dtype == np.float32 and len(place) == pytest.approx(expected, rel=0.02)
    about = found.attributes
    assert (about["nside"], about["ordering"], about["sky"]) == (8, "RING", "full")
    assert about["observer"] == [200.0, 100.0, 0.0] and about["complete"]
    assert "order of rings" in about["conventions"]["axes"]

    table = np.genfromtxt(done / "convergence_power.csv", delimiter=",", names=True)
    edges = spherical_octave_edges(8)
    linear = LinearPower(COSMOLOGY)
    for i, j in ((0, 0), (0, 1), (1, 1)):
        rows = table[(table["i"] == i) & (table["j"] == j)]
        power = spherical_power(kappa[i], edges, other=kappa[j], window="bilinear")
        np.testing.assert_allclose(
            rows["C_ell"], power.power, rtol=1e-5, atol=1e-6 * power.power.max()
        )
        np.testing.assert_allclose(rows["ell"], power.ell, rtol=1e-7)
        np.testing.assert_array_equal(rows["modes"], power.modes)
        for name, of in (("limber_linear", linear), ("limber_halofit", Halofit(linear))):

            def theory(ell, of=of):
                return convergence_power(ell, sources, COSMOLOGY, of).numpy()

            expected = spherical_theory_in_bins(theory, edges, 8)[i, j]
            np.testing.assert_allclose(rows[name], expected, rtol=1e-7)
    for name in ("convergence.png", "convergence_power.png"):
        assert (done / name).stat().st_size > 10_000
    last = table[(table["i"] == 1) & (table["j"] == 1)][-1]
    message = read_record(done).results[f"C_l/halofit at l = {last['ell']:.0f}"]
    assert message == pytest.approx(last["C_ell"] / last["limber_halofit"], rel=1e-7)


def test_healpy_reads_the_maps_of_a_run(done, tmp_path):
    maps = load_light_cone(done)
    maps.write_fits(tmp_path / "maps.fits")
    for hdu, name in ((1, "kappa"), ("SHELLS", "shells")):
        read = healpy.read_map(tmp_path / "maps.fits", field=None, dtype=None, hdu=hdu)
        np.testing.assert_array_equal(read, maps[name])


def test_a_run_that_goes_on_has_the_same_maps(here, done, monkeypatch):
    """To the bit, from a checkpoint before the observed light, and one after some of it."""
    stopped(monkeypatch, 3)
    finished = flowpm_here("simulate", "run.toml", "--output", "out", "--resume")
    assert finished.returncode == 0, finished.stderr
    assert_same_light_cones("out", done)


def test_spectra_on_the_sphere():
    """Of one harmonic and of white noise; the window is what is left of a painted harmonic."""
    nside, rng = 16, np.random.default_rng(1)
    alm = np.zeros(healpy.Alm.getsize(40), complex)
    alm[healpy.Alm.getidx(40, 7, 3)] = 0.3 + 0.4j
    maps = healpy.alm2map(alm, nside, lmax=40)
    found = spherical_power(np.stack([maps, 2 * maps]), [5, 7, 8, 12], other=maps)
    one = 2 * 0.25 / 15
    np.testing.assert_allclose(found.power, [[0, one, 0], [0, 2 * one, 0]], atol=1e-5 * one)
    np.testing.assert_array_equal(found.modes, [11 + 13, 15, 17 + 19 + 21 + 23])
    noise = rng.normal(size=12 * nside**2)
    flat = spherical_power(noise, [2, 32])
    area = 4 * np.pi / noise.size
    assert flat.power[0] == pytest.approx(area, rel=5 * np.sqrt(2 / flat.modes[0]))
    assert spherical_theory_in_bins(lambda ell: ell, [5, 8], nside) == pytest.approx(
        np.average([5, 6, 7], weights=[11, 13, 15])
    )
    sphere = Healpix(nside)
    z = rng.uniform(-1, 1, 400_000)
    theta, phi = np.arccos(z), rng.uniform(-np.pi, np.pi, z.size)
    corners = sphere.corners(theta, phi)
    for ell in (8, 16):
        alm = np.zeros(healpy.Alm.getsize(ell), complex)
        of_ell = healpy.Alm.getidx(ell, ell, np.arange(ell + 1))
        alm[of_ell] = rng.normal(size=ell + 1) + 1j * rng.normal(size=ell + 1) * (of_ell != ell)
        fine = healpy.get_interp_val(healpy.alm2map(alm, 512, lmax=ell), theta, phi)
        painted = np.zeros(sphere.pixels)
        for w, p in zip(corners.weights(theta, phi), corners.pixels, strict=True):
            np.add.at(painted, p, w * fine)
        painted /= sphere.painted_areas * z.size / (4 * np.pi)
        along = (healpy.map2alm(painted, lmax=ell) * alm.conj())[of_ell].real
        twice = np.where(np.arange(ell + 1) > 0, 2, 1)
        left = (twice * along).sum() / (twice * np.abs(alm[of_ell]) ** 2).sum()
        assert left == pytest.approx(painting_window(ell, nside), abs=0.02)
    x = np.linspace(0.1, 2.5, 25)
    ell = nside * 1e3 * x  # so many that l (l + 1) is l^2
    mean = painting_window(ell, nside * 1000)
    np.testing.assert_allclose(mean, np.exp(-0.1049 * x**2), rtol=2e-3)
    square = painting_window(ell, nside * 1000, power=2)
    assert (square > mean**2).all() and square[-6] / mean[-6] ** 2 == pytest.approx(1.03, abs=0.01)
    for given, message in (
        ((np.zeros(11), [2, 4]), "do not have the pixels of a full sky"),
        ((noise, [4, 2]), "at least two numbers, increasing"),
        ((noise, [2, 2.5, 2.7]), "the bin from 2.5 to 2.7 holds no multipole of the maps"),
    ):
        with pytest.raises(ValueError, match=message):
            spherical_power(*given)


def test_the_picture_is_the_map():
    """Each direction has its place: the north above, the longitude growing to the left."""
    sphere = Healpix(32)
    theta = np.repeat(sphere.theta[1:-1], sphere.counts[1:-1])
    picture = mollweide(np.cos(theta), 200)
    assert picture.shape == (100, 200)
    assert np.nanmin(picture[-1]) > 0.9 and np.nanmax(picture[0]) < -0.9
    assert abs(np.nanmean(picture)) < 1e-3
    assert np.isnan(picture[0, 0]) and np.isfinite(picture[50]).all()
    inside = np.isfinite(picture).sum()
    assert inside / picture.size == pytest.approx(np.pi / 4, rel=0.01)
    _, phi = healpy.pix2ang(32, np.arange(sphere.pixels))
    east = mollweide(np.sin(phi), 200)[50]
    assert east[50] > 0.99 > -0.99 > east[150]
