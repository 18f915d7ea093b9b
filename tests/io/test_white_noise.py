"""White noise in files of other codes, against the array that was written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from commands import flowpm_here
from foreign_snapshots import KMS, MPC, grafic, music
from reference import DATA
from run_files import RUN

import flowpm_dist as fpm
from flowpm_dist.io.files import checksum
from flowpm_dist.io.white_noise import WhiteNoiseError, check_white_noise_file, open_white_noise
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.simulate.options import SimulationOptions

SHAPE = (4, 6, 8)
MARKERS = ("<u4", ">u4", "<u8", ">u8")


def noise(real: str = "f4", shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(real)


def check(found, written):
    assert found.shape == written.shape and found.ndim == 3 and found.size == written.size
    assert np.dtype(found.dtype).itemsize == written.dtype.itemsize
    np.testing.assert_array_equal(found[...], written)
    np.testing.assert_array_equal(found[1:3, 2:5, 1], written[1:3, 2:5, 1])
    np.testing.assert_array_equal(found[3], written[3])
    assert len(found) == len(written) and checksum(found) == checksum(written)


@pytest.mark.parametrize("real", ["<f4", "<f8", ">f4", ">f8"])
def test_a_cache_of_music(tmp_path, real):
    """Its sides are in the byte order of this machine, its values in single or double precision."""
    written, path = noise(real), tmp_path / "wnoise_0003.bin"
    music(path, written, order=real[0])
    check(open_white_noise(path), written)
    check_white_noise_file(path, SHAPE)


def test_a_cache_of_sixteen_cells_is_none_of_grafic(tmp_path):
    """Whose files begin with the length of a header, 16."""
    for shape in ((16, 16, 16), (16, 4, 2)):
        written = noise("f4", shape)
        check(open_white_noise(music(tmp_path / "wnoise_0004.bin", written)), written)
    written = noise("f4", (16, 16, 16))
    check(open_white_noise(grafic(tmp_path / "noise", written)), written)


@pytest.mark.parametrize("real", ["f4", "f8"])
@pytest.mark.parametrize("marker", MARKERS)
def test_noise_of_grafic(tmp_path, marker, real):
    """With the sign that MUSIC gives it: what is in the file times -1."""
    written, path = noise(real), tmp_path / "noise"
    grafic(path, written, marker)
    check(open_white_noise(path), written)
    check_white_noise_file(path, SHAPE)
    raw = path.read_bytes()
    size = np.dtype(marker).itemsize
    first = np.frombuffer(raw, np.dtype(real).newbyteorder(marker[0]), 2, 16 + 3 * size)
    np.testing.assert_array_equal(-first, written[:2, 0, 0])  # x varies fastest


def test_damaged_files_are_refused_before_they_are_read(tmp_path):
    cache, plain = tmp_path / "wnoise.bin", tmp_path / "plain"
    none = "must be a .npy file, a file wnoise_XXXX.bin of MUSIC, or white noise in GRAFIC's"
    raw = music(cache, noise()).read_bytes()
    huge = np.full(3, 2**31 - 1, "<u4").tobytes()
    for damaged in (raw[:-1], raw + b"\0", raw[:11], b"", huge + raw[12:], b"\0" * 12):
        plain.write_bytes(damaged)
        with pytest.raises(WhiteNoiseError, match=re.escape(none)):
            open_white_noise(plain)
    raw = grafic(tmp_path / "noise", noise()).read_bytes()
    plane = 4 * 6 * 4
    size = f"{len(raw) - 1} bytes; must have {len(raw)} or {len(raw) + 8 * plane}, for 4 x 6 x 8"
    many = b"\x10\0\0\0" + huge + raw[16:]
    for damaged, message in (
        (raw[:-1], size),
        (raw[:28] + raw[27:], f"{len(raw) + 1} bytes; must have"),
        (many, "must have"),
        (raw[:24] + b"\1" + raw[25:], f"record 2 must have {plane} bytes"),
        (raw[:-4] + b"\1" + raw[-3:], f"record 9 must have {plane} bytes"),
    ):
        plain.write_bytes(damaged)
        with pytest.raises(WhiteNoiseError, match=message):
            open_white_noise(plain)
    wrong = noise()
    wrong[1, 2, 3] = np.nan
    with pytest.raises(WhiteNoiseError, match=r"nan at \[1, 2, 3\]; all values must be finite"):
        check_white_noise_file(grafic(plain, wrong), SHAPE)
    with pytest.raises(WhiteNoiseError, match=r"shape \(4, 6, 8\); must be box.grid = \(8, 6, 4\)"):
        check_white_noise_file(grafic(plain, noise()), SHAPE[::-1])
    os.truncate(cache, 0)
    with pytest.raises(WhiteNoiseError, match="there is no such file"):
        open_white_noise(tmp_path / "missing")


@pytest.mark.parametrize("order", "<>")
def test_a_cache_of_music_that_is_cut_is_named(tmp_path, order):
    """By its name, or by three equal sides."""
    for name, shape, values in (
        ("wnoise_0003.bin", SHAPE, "4 x 6 x 8 values need 768 or 1,536"),
        ("noise.bin", (8, 8, 8), "8 x 8 x 8 values need 2,048 or 4,096"),
    ):
        path = music(tmp_path / name, noise(f"{order}f4", shape), order)
        size = path.stat().st_size - 100
        os.truncate(path, size)
        message = f"{size - 12:,} bytes of noise after its header; {values}"
        with pytest.raises(WhiteNoiseError, match=message):
            open_white_noise(path)


def test_a_run_file_names_noise_in_any_format(tmp_path, monkeypatch):
    """The run is the same as with the array in a .npy file, and so is the checksum of the noise."""
    monkeypatch.chdir(tmp_path)
    written = noise("f8", (16, 16, 16))
    np.save("noise.npy", written)
    music(tmp_path / "wnoise_0004.bin", written)
    grafic(tmp_path / "grafic.dat", written, ">u4")
    found = []
    for name in ("noise.npy", "wnoise_0004.bin", "grafic.dat"):
        run = Path(f"{name}.toml")
        run.write_text(RUN.replace("seed = 1", f'white_noise = "{name}"'))
        checksums = SimulationOptions.load(run).checksums()
        done = flowpm_here("simulate", str(run), "--output", f"of {name}")
        assert done.returncode == 0, done.stderr
        density = fpm.State.from_snapshot(f"of {name}").density().numpy()
        found.append((checksums["initial.white_noise"], density))
    for checksum_of, density in found[1:]:
        assert checksum_of == found[0][0]
        np.testing.assert_array_equal(density, found[0][1])
    os.truncate("wnoise_0004.bin", 100)
    with pytest.raises(ConfigError, match="wnoise_0004.bin': 88 bytes of noise after its header"):
        SimulationOptions.load(Path("wnoise_0004.bin.toml"))


def test_a_run_takes_the_path_of_a_file(tmp_path):
    """In single precision, of files in either precision and byte order."""
    written = noise("f8", (4, 4, 4))
    planck = fpm.Cosmology.planck18()
    sim = fpm.Simulation(planck, 4, 32.0, [0.1, 1.0])
    expected = sim.lpt(white_noise=written, a=0.1)
    np.save(tmp_path / "noise.npy", written)
    for path in (
        tmp_path / "noise.npy",
        music(tmp_path / "wnoise_0002.bin", written),
        grafic(tmp_path / "grafic", written, ">u4"),
    ):
        for given in (path, str(path)):
            state = sim.lpt(white_noise=given, a=0.1)
            assert state.displacement.dtype.name == "float32"
            np.testing.assert_array_equal(state.displacement.numpy(), expected.displacement.numpy())
    with pytest.raises(ValueError, match=r"white_noise has shape \(4, 6, 8\); the grid is \(4, 4,"):
        sim.lpt(white_noise=grafic(tmp_path / "other", noise()), a=0.1)
    with pytest.raises(WhiteNoiseError, match=r"white_noise = '.*none': there is no such file"):
        sim.lpt(white_noise=tmp_path / "none", a=0.1)
    with pytest.raises(ValueError, match="white_noise is float64, it must be float32: use tf.cast"):
        sim.lpt(white_noise=tf.constant(written), a=0.1)


def test_music_makes_the_same_particles_of_its_noise():
    """By first-order LPT: with the same sign and axes, and shifted by half a cell.

    The amplitudes of the power and of growth are computed by each code on its own.
    """
    folder = DATA / "music_16"
    cosmology = fpm.Cosmology(Omega_m=0.305, Omega_b=0.045, h=0.6777, n_s=0.961, sigma8=0.811)
    units = {"UnitLength_in_cm": MPC, "UnitVelocity_in_cm_per_s": KMS}
    theirs = fpm.State.from_snapshot(folder / "ics_music", cosmology=cosmology, units=units)
    sim = fpm.Simulation(cosmology, 16, 100.0, [theirs.a, 1.0], lpt_order=1, precision="float64")
    ours = sim.lpt(white_noise=folder / "wnoise_0004.bin", a=theirs.a)
    assert theirs.a == 1 / 51 and theirs.box.size == (100.0,) * 3
    moved = theirs.displacement.numpy() - 100 / 16 / 2
    for found, expected in ((moved, ours.displacement), (theirs.velocity.numpy(), ours.velocity)):
        error = np.sqrt(np.mean((found - expected.numpy()) ** 2) / np.mean(expected.numpy() ** 2))
        assert error < 3e-4
