"""White noise that a user brings: .npy files, and files of MUSIC. A rank reads only its part.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.opening import not_finite
from flowpm_dist.io.volume import mapped_array
from flowpm_dist.options.regular_files import first_bytes
from meshimpl import launch

FORMATS = "a .npy file, a file wnoise_XXXX.bin of MUSIC, or white noise in GRAFIC's format"
LARGEST = 2**16
"""Sides of a file of another size are below this if it is taken for a cache of MUSIC."""
_HEADER = 16
"""Size of the header in GRAFIC's format: three sides and the seed, int32 [bytes]."""


class WhiteNoiseError(UserError):
    """A file of white noise cannot be used."""


class GraficNoise:
    """White noise in GRAFIC's format, read like an array [x, y, z].

    The file holds Fortran records: the sides and the seed, then a plane [y, x] for each z
    (Bertschinger 2001, ApJS 137, 1, arXiv:astro-ph/0103301). Values are multiplied by -1, as by
    MUSIC and monofonIC unless `grafic_sign = yes`.

    Attributes:
        shape, dtype, ndim, size: as of an array.
    """

    def __init__(self, records: np.ndarray) -> None:
        self._values = records["values"].transpose(2, 1, 0)
        self.shape, self.ndim, self.size = self._values.shape, 3, self._values.size
        self.dtype = self._values.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, place: Any) -> np.ndarray:
        return np.negative(self._values[place])


def open_white_noise(path: Path) -> np.ndarray | GraficNoise:
    """Returns the array of a file, memory-mapped: a rank reads only the part it needs.

    Args:
        path: a .npy file; the file `wnoise_XXXX.bin` in which MUSIC keeps the noise of a level, as
            sides nx, ny and nz, int32, and then planes [y, z] for each x; or see `GraficNoise`.

    Raises:
        WhiteNoiseError: there is no such file, or it holds no white noise of these formats.
    """
    try:
        first = first_bytes(path, 32)
    except FileNotFoundError:
        raise WhiteNoiseError("there is no such file") from None
    except OSError as error:
        raise WhiteNoiseError(f"cannot be read ({error.strerror})") from error
    try:
        if path.suffix != ".npy" and (noise := _of_music(path, first)) is not None:
            return noise
        array = mapped_array(path)
    except WhiteNoiseError:
        raise
    except (OSError, ValueError, EOFError) as error:
        if path.suffix != ".npy" and first[:6] != b"\x93NUMPY":
            raise WhiteNoiseError(f"must be {FORMATS}") from error
        raise WhiteNoiseError(f"not a readable .npy file ({error})") from error
    if not isinstance(array, np.ndarray):
        raise WhiteNoiseError("an .npz archive; must be a .npy file with one array")
    if wrong := wrong_noise_type(array.dtype):
        raise WhiteNoiseError(wrong)
    return array


def _of_music(path: Path, first: bytes) -> np.ndarray | GraficNoise | None:
    """Returns white noise in a format of MUSIC; None if the file is in none.

    Args:
        path: the file.
        first: its first 32 bytes.

    Raises:
        WhiteNoiseError: the file is damaged.
    """
    size = path.stat().st_size
    for order in "<>":  # the cache first: its first side may be 16, as the length of a header
        sides = [_number(first[4 * i :][:4], order) for i in range(3)]
        for width in (4, 8):
            if all(sides) and size == 12 + math.prod(sides) * width:
                return np.memmap(path, f"{order}f{width}", "r", 12, tuple(sides))
    for order in "<>":
        for marker in (4, 8):
            lengths = first[:marker], first[marker + _HEADER :][:marker]
            if all(_number(length, order) == _HEADER for length in lengths):
                nx, ny, nz = (_number(first[marker + 4 * i :][:4], order) for i in range(3))
                if 0 < min(nx, ny, nz) and max(nx, ny, nz) < 2**31:
                    return _grafic(path, order, marker, (nx, ny, nz))
    for order in "<>":
        nx, ny, nz = (_number(first[4 * i :][:4], order) for i in range(3))
        if 0 < min(nx, ny, nz) and max(nx, ny, nz) < LARGEST:
            if nx == ny == nz or path.name.startswith("wnoise"):
                raise WhiteNoiseError(
                    f"{size - 12:,} bytes of noise after its header; {nx} x {ny} x {nz} values "
                    f"need {4 * nx * ny * nz:,} or {8 * nx * ny * nz:,}"
                )
    return None


def _number(raw: bytes, order: str) -> int:
    return int.from_bytes(raw, "little" if order == "<" else "big")


def _grafic(path: Path, order: str, marker: int, sides: tuple[int, int, int]) -> GraficNoise:
    """Returns white noise in GRAFIC's format.

    Args:
        path: the file.
        order: its byte order, "<" or ">".
        marker: the size of the number before and after each record [bytes].
        sides: nx, ny and nz.

    Raises:
        WhiteNoiseError: the file has another size, or a record another length.
    """
    nx, ny, nz = sides
    begin, size = _HEADER + 2 * marker, path.stat().st_size
    wanted = [begin + nz * (nx * ny * width + 2 * marker) for width in (4, 8)]
    if size not in wanted:
        raise WhiteNoiseError(
            f"{size} bytes; must have {wanted[0]} or {wanted[1]}, for {nx} x {ny} x {nz} values in "
            "GRAFIC's format"
        )
    width = (4, 8)[wanted.index(size)]
    number, plane = f"{order}u{marker}", (f"{order}f{width}", (ny, nx))
    kind = np.dtype([("begin", number), ("values", *plane), ("end", number)])
    records = np.memmap(path, kind, "r", begin, (nz,))
    length = nx * ny * width % 256**marker
    wrong = np.flatnonzero((records["begin"] != length) | (records["end"] != length))
    if wrong.size:
        raise WhiteNoiseError(f"damaged: record {wrong[0] + 2} must have {length} bytes")
    return GraficNoise(records)


def wrong_noise_type(dtype: np.dtype) -> str:
    """Returns what is wrong with a dtype of white noise; an empty text if it can be used."""
    good = np.issubdtype(dtype, np.floating)  # of any byte order
    return "" if good else f"dtype {dtype.str}; must be real floating-point numbers"


def noise_moments(values: np.ndarray) -> np.ndarray:
    """Returns the sum of values and the sum of their squares, float64 [2], not finite if too large.

    Args:
        values: real numbers, of any shape.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(values, dtype=np.float64).sum()
        return np.array([values.sum(dtype=np.float64), squares])


def warn_of_other_noise(total: float, squares: float, count: int) -> None:
    """Warns if white noise has another mean than 0, or a greater deviation than 1; once for each.

    A smaller deviation has a field that a search found, which lacks what its data do not show.

    Args:
        total, squares: the sum of all values, and of their squares.
        count: number of values.
    """
    if launch.detect().rank:
        return
    mean, error = total / count, 1 / math.sqrt(count)
    deviation = math.sqrt(max(squares / count - mean * mean, 0.0))
    noise = f"unit normal noise of {count:,} values has"
    if abs(mean) > 6 * error + 0.01:
        warnings.warn(
            f"white_noise has a mean of {mean:.3g}, which has no effect: {noise} 0 +- {error:.1g}. "
            "Is it another field?",
            stacklevel=1,
        )
    elif not deviation <= 1.1 + 6 * error:
        warnings.warn(
            f"white_noise has a standard deviation of {deviation:.3g}, and fluctuations are as "
            f"much greater: {noise} 1 +- {error / math.sqrt(2):.1g}",
            stacklevel=1,
        )


def check_white_noise_file(path: Path, grid: tuple[int, int, int] | None) -> None:
    """Checks that a file holds one finite real number for each cell.

    Args:
        path: the file, see `open_white_noise`.
        grid: number of cells along each side; with None the shape is not checked.

    Raises:
        WhiteNoiseError: the file cannot be used; the message says why.
    """
    array = open_white_noise(path)
    if grid is not None and array.shape != tuple(grid):
        raise WhiteNoiseError(f"shape {array.shape}; must be box.grid = {tuple(grid)}")
    if array.ndim == 0:
        raise WhiteNoiseError("a single number; must be an array")
    planes, moments = max(1, 2**24 // max(1, array[:1].nbytes)), np.zeros(2)
    for start in range(0, len(array), planes):
        slab = array[start : start + planes]
        if (place := not_finite(slab)) is not None:
            there = [start + place[0], *place[1:]]
            raise WhiteNoiseError(f"{slab[*place]} at {there}; all values must be finite")
        moments += noise_moments(slab)
    total, squares = moments.tolist()
    warn_of_other_noise(total, squares, array.size)
