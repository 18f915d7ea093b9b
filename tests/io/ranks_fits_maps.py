"""Maps as FITS on several ranks: rank 0 writes, and all of them know how it went."""

import numpy as np
import pytest
import tensorflow as tf
from astropy.io import fits
from ranks import shared_folder

import flowpm_dist as fpm
from flowpm_dist.io.files import WriteError
from flowpm_dist.observables.lensing import LensPlanes
from flowpm_dist.observables.light_cone import ConvergenceMaps, DensityPlanes
from flowpm_dist.observables.light_cone.options import FullSky

KAPPA = np.arange(2 * 12 * 8**2, dtype=np.float64).reshape(2, -1)
SKY = FullSky.model_construct(nside=8, z_max=0.2)


@pytest.mark.ranks(1, 2, 4)
def test_all_ranks_read_the_file_or_have_the_error(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    maps = ConvergenceMaps(tf.constant(KAPPA), SKY)
    planes = DensityPlanes(maps.kappa, LensPlanes(np.array([0.0, 120.0, 260.0])), SKY)
    planck = fpm.Cosmology.planck18()
    for path, write in (
        (folder / "sky.fits.gz", lambda path, **more: maps.write_fits(path, **more)),
        (folder / "shells.fits", lambda path, **more: planes.write_fits(path, planck, **more)),
    ):
        write(path)
        np.testing.assert_array_equal(fits.getdata(path).field(1), KAPPA[1])
        with pytest.raises(FileExistsError, match="overwrite=True"):
            write(path)
        write(path, overwrite=True)
        with pytest.raises(WriteError, match="cannot write"):
            write(path / "inside.fits")
