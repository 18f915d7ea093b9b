"""White noise that a user brings as a .npy file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flowpm_dist.io.errors import UserError


class WhiteNoiseError(UserError):
    """A file of white noise cannot be used."""


def open_white_noise(path: Path) -> np.ndarray:
    """Returns the array of a file, memory-mapped so that a rank reads only the part it needs.

    Raises:
        WhiteNoiseError: there is no such file, or it is no .npy file of float32 or float64.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise WhiteNoiseError("there is no such file") from None
    except (OSError, ValueError, EOFError) as error:
        raise WhiteNoiseError(f"not a readable .npy file ({error})") from error
    if not isinstance(array, np.ndarray):
        raise WhiteNoiseError("an .npz archive; must be a .npy file with one array")
    if array.dtype not in (np.float32, np.float64):
        raise WhiteNoiseError(f"dtype {array.dtype.str}; must be float32 or float64")
    return array


def check_white_noise_file(path: Path, grid: tuple[int, int, int] | None) -> None:
    """Check that a file holds one finite real number for each cell.

    Args:
        path: of the .npy file.
        grid: number of cells along each side; None leaves the shape unchecked.

    Raises:
        WhiteNoiseError: the file cannot be used; the message says why.
    """
    array = open_white_noise(path)
    if grid is not None and array.shape != tuple(grid):
        raise WhiteNoiseError(f"shape {array.shape}; must be box.grid = {tuple(grid)}")
    if array.ndim == 0:
        raise WhiteNoiseError("a single number; must be an array")
    planes = max(1, 2**24 // max(1, array[:1].nbytes))
    for start in range(0, len(array), planes):
        finite = np.isfinite(array[start : start + planes])
        if not finite.all():
            place = np.argwhere(~finite)[0]
            place[0] += start
            value = array[tuple(place)]
            raise WhiteNoiseError(f"{value} at {place.tolist()}; all values must be finite")
