"""Maps as FITS: healpy and astropy read the same values, and the right places on the sky."""

from __future__ import annotations

import warnings

import healpy
import numpy as np
import pytest
import tensorflow as tf
from astropy.io import fits
from astropy.table import Table
from astropy.wcs import WCS

import flowpm_dist as fpm
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import WriteError
from flowpm_dist.io.light_cone import LightConeMaps
from flowpm_dist.observables.lensing import LensPlanes, SourcePlane, born
from flowpm_dist.observables.light_cone import ConvergenceMaps, DensityPlanes
from flowpm_dist.observables.light_cone.options import FlatField, FullSky

PLANCK = fpm.Cosmology.planck18()
RNG = np.random.default_rng(4)
NSIDE = 8
EDGES = np.array([0.0, 120.0, 260.0, 400.0])  # [Mpc/h]
SHELLS = RNG.normal(size=(3, 12 * NSIDE**2))
SKY = FullSky.model_construct(nside=NSIDE, z_max=0.2)
FIELD = FlatField.model_construct(field_of_view=6.0, pixels=16, z_max=0.2)


@pytest.fixture(autouse=True)
def strict():
    """FITS that is not quite right makes astropy warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*np.core|.*deprecated", append=False)
        yield


def read_with_healpy(path, hdu=1):
    maps, header = healpy.read_map(path, field=None, dtype=None, hdu=hdu, h=True)
    return maps, dict(header)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_healpy_reads_maps_of_the_full_sky(tmp_path, dtype):
    kappa = RNG.normal(size=(2, 12 * NSIDE**2)).astype(dtype)
    path = tmp_path / "sky.fits"
    ConvergenceMaps(tf.constant(kappa), SKY).write_fits(path)
    maps, header = read_with_healpy(path)
    assert maps.dtype == dtype
    np.testing.assert_array_equal(maps, kappa)
    expected = {"PIXTYPE": "HEALPIX", "ORDERING": "RING", "NSIDE": NSIDE, "COORDSYS": "C"}
    assert {name: header[name] for name in expected} == expected
    assert header["TTYPE2"] == "KAPPA_2" and "TUNIT1" not in header
    with pytest.raises(FileExistsError, match="sky.fits exists: overwrite=True"):
        ConvergenceMaps(tf.constant(kappa), SKY).write_fits(path)
    batch = np.stack([kappa, 2 * kappa])
    ConvergenceMaps(tf.constant(batch), SKY).write_fits(path, universe=1, overwrite=True)
    np.testing.assert_array_equal(read_with_healpy(path)[0], 2 * kappa)
    assert [each.name for each in tmp_path.iterdir()] == ["sky.fits"]


def test_a_flat_field_has_the_places_of_its_pixels(tmp_path):
    """A point at x, y of a plane at distance chi is seen at x / chi, y / chi off the centre."""
    kappa = RNG.normal(size=(2, 16, 16))  # [source, x, y]
    path = tmp_path / "field.fits.gz"
    ConvergenceMaps(tf.constant(kappa), FIELD).write_fits(path)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    image, header = fits.getdata(path, "KAPPA"), fits.getheader(path, "KAPPA")
    np.testing.assert_array_equal(np.swapaxes(image, -1, -2), kappa)
    wcs = WCS(header)
    x, y = 13, 4
    place = wcs.celestial.pixel_to_world(x, y)
    east, north = np.deg2rad((np.array([x, y]) + 0.5) * 6.0 / 16 - 3.0)
    direction = np.array([1.0, east, north]) / np.sqrt(1 + east**2 + north**2)
    np.testing.assert_allclose(place.cartesian.xyz.value, direction, atol=1e-14)
    assert wcs.naxis == 3 and wcs.pixel_to_world_values(0, 0, 1)[2] == 2  # the second source


@pytest.mark.parametrize("sky", [SKY, FIELD])
def test_shells_come_with_their_redshifts(tmp_path, sky):
    name = "SHELLS" if sky is SKY else "PLANES"
    delta = SHELLS if sky is SKY else SHELLS[:, :256].reshape(3, 16, 16)
    path = tmp_path / "shells.fits"
    DensityPlanes(tf.constant(delta), LensPlanes(EDGES), sky).write_fits(path, PLANCK)
    if sky is SKY:
        np.testing.assert_array_equal(read_with_healpy(path)[0], delta)
    else:
        np.testing.assert_array_equal(fits.getdata(path, name), np.swapaxes(delta, -1, -2))
    table = Table.read(path, hdu=f"{name}_EDGES")
    theirs = PLANCK.to_astropy()
    for end, edges in (("MIN", EDGES[:-1]), ("MAX", EDGES[1:])):
        chi = table[f"CHI_{end}"].quantity.to_value("Mpc")
        np.testing.assert_allclose(chi, edges / 0.6766, 1e-14)
        distances = theirs.comoving_distance(table[f"Z_{end}"]).to_value("Mpc")
        np.testing.assert_allclose(distances, chi, 1e-7, atol=1e-9)
    header = fits.getheader(path)
    assert header["OMEGA_M"] == 0.30966 and header["SIGMA8"] == 0.8102


class GlassCosmology:
    """The distances that GLASS asks for, by astropy."""

    def __init__(self, cosmology):
        self._astropy = cosmology
        self.Omega_m0 = cosmology.Om0
        self.hubble_distance = cosmology.hubble_distance.to_value("Mpc")

    def H_over_H0(self, z):
        return self._astropy.efunc(z)

    def transverse_comoving_distance(self, z1, z2=None):
        ends = (z1,) if z2 is None else (np.asarray(z1), np.asarray(z2))
        if z2 is None:
            return self._astropy.comoving_transverse_distance(*ends).to_value("Mpc")
        chi = [self._astropy.comoving_distance(z).to_value("Mpc") for z in ends]
        return chi[1] - chi[0]  # in flat space


def test_glass_sums_our_shells_to_our_convergence(tmp_path):
    """Its planes lie at mean redshifts, ours at mean distances: as close as shells are thin."""
    glass = pytest.importorskip("glass")
    edges = np.linspace(0.0, 400.0, 41)
    delta = RNG.normal(size=(40, 12 * NSIDE**2))
    path = tmp_path / "shells.fits"
    planes = LensPlanes(edges)
    DensityPlanes(tf.constant(delta), planes, SKY).write_fits(path, PLANCK)
    shells, table = read_with_healpy(path)[0], Table.read(path, hdu="SHELLS_EDGES")
    redshifts = np.append(table["Z_MIN"], table["Z_MAX"][-1])
    convergence = glass.MultiPlaneConvergence(GlassCosmology(PLANCK.to_astropy()))
    for shell, window in zip(shells, glass.tophat_windows(redshifts), strict=True):
        convergence.add_window(shell, window)
    last = [SourcePlane(float(convergence.zsrc))]
    with pytest.warns(UserWarning, match="matter beyond it"):  # the source's own shell
        ours = born(tf.constant(delta[:-1]), LensPlanes(edges[:-1]), last, PLANCK)[0]
    np.testing.assert_allclose(convergence.kappa, ours, atol=0.01 * np.std(ours))


def test_maps_of_a_run(tmp_path):
    """All arrays of lightcone.zarr, with what its attributes tell."""
    about = {"cosmology": PLANCK.numbers(), "z_max": 0.2, "seed": 42}
    kappa = RNG.normal(size=(2, 12 * NSIDE**2)).astype("f4")
    arrays = {"shells": SHELLS, "shell_edges": EDGES, "kappa": kappa}
    path = tmp_path / "maps.fits"
    LightConeMaps(arrays, about | {"nside": NSIDE, "ordering": "RING"}).write_fits(path)
    np.testing.assert_array_equal(read_with_healpy(path)[0], kappa)
    np.testing.assert_array_equal(read_with_healpy(path, "SHELLS")[0], SHELLS)
    with fits.open(path) as file:
        assert [each.name for each in file[1:]] == ["KAPPA", "SHELLS", "SHELLS_EDGES"]
        assert file[0].header["SEED"] == 42 and file[0].header["Z_MAX"] == 0.2
        assert file[0].header["H"] == 0.6766
    flat = {name: RNG.normal(size=(2, 8, 8)) for name in ("kappa", "gamma1", "gamma2", "rotation")}
    flat |= {"x": np.arange(8.0), "planes": RNG.normal(size=(3, 8, 8)), "plane_edges": EDGES}
    LightConeMaps(flat, about | {"field_of_view": 6.0}).write_fits(path, overwrite=True)
    with fits.open(path) as file:
        for name in ("kappa", "gamma1", "gamma2", "rotation", "planes"):
            np.testing.assert_array_equal(file[name.upper()].data, flat[name])
        assert file["ROTATION"].header["BUNIT"] == "rad" and file["KAPPA"].header["FOV"] == 6
        assert "X" not in file and len(file["PLANES_EDGES"].data) == 3
    with pytest.raises(UserError, match="attributes of the maps are damaged: 'field_of_view'"):
        LightConeMaps(flat, about).write_fits(path, overwrite=True)
    with pytest.raises(UserError, match=r"kappa of the light cone has shape \(2, 8, 8\): no maps"):
        LightConeMaps(flat, about | {"nside": 8}).write_fits(path, overwrite=True)
    with pytest.raises(ValueError, match="kappa has 767 pixels: a full sky has 12 nside"):
        LightConeMaps({"kappa": kappa[:, 1:]}, about | {"nside": 8}).write_fits(tmp_path / "x.fits")


def test_a_link_is_not_replaced_and_any_gz_is_compressed(tmp_path):
    maps, link = ConvergenceMaps(tf.constant(SHELLS), SKY), tmp_path / "SKY.FITS.GZ"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        maps.write_fits(link)
    maps.write_fits(link, overwrite=True)
    assert not link.is_symlink() and link.read_bytes()[:2] == b"\x1f\x8b"
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot write .*sky.fits"):
        maps.write_fits(tmp_path / "file" / "sky.fits")


def test_the_header_has_radiation_masses_and_sources(tmp_path):
    hot = PLANCK.replace(radiation=True, m_nu=[0.0, 0.05, 0.1])
    sources = [{"name": "a", "redshift": 0.5}, {"name": "b", "z0": 0.3}, {"redshift": 1.0}]
    about = {"cosmology": hot.numbers(), "sources": sources, "nside": NSIDE}
    path = tmp_path / "maps.fits"
    LightConeMaps({"kappa": SHELLS}, about).write_fits(path)
    header = fits.getheader(path)
    assert header["RADIAT"] is True and header["M_NU"] == pytest.approx(0.15)
    assert [header[f"M_NU{n}"] for n in (1, 2, 3)] == pytest.approx([0.0, 0.05, 0.1])
    assert header["ZSRC1"] == 0.5 and header["ZSRC3"] == 1.0 and "ZSRC2" not in header
    LightConeMaps({"kappa": SHELLS}, {**about, "cosmology": PLANCK.numbers()}).write_fits(
        path, overwrite=True
    )
    assert fits.getheader(path)["RADIAT"] is False and "M_NU1" not in fits.getheader(path)
