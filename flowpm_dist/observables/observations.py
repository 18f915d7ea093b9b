"""The files of an observation, which are checked first; each rank then reads its block.

Nothing here imports TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.io.volume import Volume, VolumeError, open_volume
from flowpm_dist.observables.options import CellOptions, CountsOptions, ObservationOptions
from flowpm_dist.options import Problem

REASON = (0.5, 2.0)
"""Limits of the mean density of observed cells, and of the mean count over the expected one."""

FAR = 5
"""How far noise may carry the mean beyond these limits [its standard deviation]."""

BELOW = 10
"""How far noise may carry a density below 0 [its standard deviation]."""

CHUNK_BYTES = 2**26  # of a file read at a time

KEYS = {"file": "data.file"} | {
    key: f"observation.{key}" for key in ("sigma", "mask", "mean_count")
}
"""The keys of run files that say what is read here."""


def spread_of(sigma: np.ndarray | float, mask: np.ndarray) -> np.ndarray:
    """Returns the standard deviation of the noise of cells of which a share is observed.

    Args:
        sigma: the standard deviation of cells that are observed whole.
        mask: the shares; the result is sigma where nothing is observed.
    """
    return np.asarray(sigma / np.sqrt(np.where(mask > 0, mask, 1.0)))


def file_problems(
    files: Mapping[str, Path],
    grid: tuple[int, int, int],
    size: tuple[float, float, float],
    a: float | None = None,
) -> Iterator[Problem]:
    """Yields the problems of files that do not fit a box; their values are not read.

    Args:
        files: paths by key of the run file; see `open_volume`.
        grid: the cells along each side.
        size: the size of the box [Mpc/h].
        a: the scale factor that the files must be at; None leaves it unchecked.
    """
    for key, path in files.items():
        try:
            volume = open_volume(path)
        except VolumeError as error:
            yield Problem(key, f"= {error}")
            continue
        shape, sides = tuple(volume.array.shape), volume.box_size
        if shape not in (tuple(grid), (*grid, 1)):
            yield Problem(key, f"= {path}: shape {shape}; must be box.grid = {tuple(grid)}")
        if sides is not None and not np.allclose(size, sides, rtol=1e-4):
            message = f"its box has {list(sides)} Mpc/h; must be box.size = {list(size)}"
            yield Problem(key, f"= {path}: {message}")
        if a is not None and volume.a is not None and not np.isclose(a, volume.a, rtol=1e-4):
            message = f"is at scale factor {volume.a:g}; the last step must be there, not at {a:g}"
            yield Problem(key, f"= {path}: {message}")


@dataclass(frozen=True)
class ObservedBlock:
    """A rank's block of the observations, float64 [x, y, z].

    Attributes:
        mask: the share of each cell that is observed, from 0 to 1.
        sigma: the standard deviation of the noise [mean density]; 1 where nothing is observed. None
            where there is no noise, and for counts.
        data: a density or counts; 1 or 0 where nothing is observed. None where they are drawn.
        mean_count: the mean count of a cell of mean density; None where a density is observed.
    """

    mask: np.ndarray
    sigma: np.ndarray | None
    data: np.ndarray | None
    mean_count: float | None = None


class Observations:
    """The observations in opened files, or the numbers in their place.

    Args:
        options: what is observed; its files must fit `grid`, see `file_problems`.
        grid: the cells along each side.
        data: the file of the data, if there is one.
        priors: the ranges of parameters that are fitted along, which widen what data may be.

    Raises:
        VolumeError: if a file cannot be opened any more.
    """

    def __init__(
        self,
        options: ObservationOptions,
        grid: tuple[int, int, int],
        data: Path | None = None,
        priors: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self._options, self._grid = options, grid
        self._mean_count = options.mean_count if isinstance(options, CountsOptions) else None
        one = (1.0, 1.0)
        self._amplitude = (priors or {}).get("amplitude", one)
        self._max_noise_amplitude = (priors or {}).get("noise_amplitude", one)[1]
        files = options.files if data is None else {**options.files, "file": data}
        self._volumes = {key: open_volume(path) for key, path in files.items()}

    def block(self, offset: tuple[int, int, int], shape: tuple[int, int, int]) -> ObservedBlock:
        """Returns the observations in a part of the grid; only that part is read.

        Args:
            offset: the first cell of the part.
            shape: the part's number of cells along each side.

        Raises:
            VolumeError: a file cannot be read.
        """
        place = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        values = self._values(place)
        mask, sigma, data = (values.get(key) for key in ("mask", "sigma", "file"))
        mask = np.ones(shape) if mask is None else mask
        observed = mask > 0
        noise = self._options.value("sigma")
        sigma = np.full(shape, noise) if isinstance(noise, float) else sigma
        sigma = None if sigma is None else np.where(observed, sigma, 1.0)
        if data is not None:
            data = np.where(observed, data, self._options.unobserved)
        return ObservedBlock(mask, sigma, data, self._mean_count)

    def _values(self, place: tuple[slice, ...]) -> dict[str, Any]:
        """Returns a part of each file, by key."""
        return {key: _read(volume, place) for key, volume in self._volumes.items()}

    def problems(self) -> dict[str, str]:
        """Returns the errors in the values of the files, by key of the run file.

        Each message says where the first wrong value is and what it must be. All files are read,
        plane by plane.

        Raises:
            VolumeError: if a file cannot be read.
        """
        if not self._volumes:
            return {}
        wrong: dict[str, str] = {}
        observed_cells, total, expected, variance = 0, 0.0, 0.0, 0.0
        nx, ny, nz = self._grid
        planes = max(1, CHUNK_BYTES // (8 * ny * nz))
        for start in range(0, nx, planes):
            stop = min(start + planes, nx)
            values = self._values((slice(start, stop), slice(None), slice(None)))
            mask = values.get("mask")
            observed = np.ones((stop - start, ny, nz), bool) if mask is None else mask > 0
            for key, bad, must in self._bad(values, observed):
                if key not in wrong and bad.any():
                    x, y, z = np.argwhere(bad)[0].tolist()
                    message = f"{values[key][x, y, z]:g} at {[start + x, y, z]}; {must}"
                    wrong[key] = f"= {self._volumes[key].where} is {message}"
            data = values.get("file")
            observed_cells += int(np.count_nonzero(observed))
            expected += float(
                observed.sum() if mask is None else np.nansum(np.where(observed, mask, 0))
            )
            if data is not None:
                total += float(np.sum(np.where(observed, data, 0)))
                noise = self._noise(values)
                variance += 0.0 if noise is None else float(np.sum(noise**2, where=observed))
        if not observed_cells and "mask" not in wrong:
            wrong["mask"] = f"= {self._volumes['mask'].where} is 0 everywhere: nothing is observed"
        if "file" in self._volumes and not wrong:
            wrong |= self._unreasonable(total, observed_cells, expected, variance)
        return {KEYS[name]: message for name, message in wrong.items()}

    def _bad(
        self, values: dict[str, Any], observed: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray, str]]:
        """Yields for each rule the key of a file, a mask of cells that break it, and the rule."""
        if (mask := values.get("mask")) is not None:
            yield "mask", ~((mask >= 0) & (mask <= 1)), "must be from 0 to 1"
        if (sigma := values.get("sigma")) is not None:
            right = np.isfinite(sigma) & (sigma > 0)
            yield "sigma", observed & ~right, "must be above 0 wherever the mask is"
        if (data := values.get("file")) is not None:
            must = "must be finite wherever the mask is above 0"
            yield "file", observed & ~np.isfinite(data), must
            if self._mean_count is not None:
                yield "file", observed & (data < 0), "counts must be at least 0"
                yield "file", observed & (data != np.round(data)), "counts must be whole numbers"
            elif isinstance(self._options, CellOptions) and self._options.is_positive_without_noise:
                noise = self._noise(values)
                must = f"a density is at least 0, up to noise: must be above -{BELOW} times its"
                least = 0.0 if noise is None else -BELOW * noise
                yield "file", observed & (data < least), f"{must} standard deviation there"

    def _noise(self, values: dict[str, Any]) -> np.ndarray | None:
        """Returns the standard deviation of the noise of a density; None where there is none."""
        sigma, mask = values.get("sigma", self._options.value("sigma")), values.get("mask")
        if sigma is None:
            return None
        loud = spread_of(self._max_noise_amplitude * sigma, np.ones(1) if mask is None else mask)
        return np.broadcast_to(loud, values["file"].shape)

    def _unreasonable(
        self, total: float, cells: int, expected: float, variance: float
    ) -> dict[str, str]:
        """Returns the problem of an unreasonable mean of the data, by key; empty if there is none.

        Args:
            total: the sum of the data.
            cells: the number of observed cells.
            expected: the sum of the mask over them.
            variance: the sum of the variances of the noise of a density.
        """
        where = self._volumes["file"].where
        low, high = (limit * end for limit, end in zip(REASON, self._amplitude, strict=True))
        if self._mean_count is None:
            mean, tolerance = total / cells, FAR * variance**0.5 / cells
            if low - tolerance <= mean <= high + tolerance:
                return {}
            hint = "; if it is an overdensity, add 1" if abs(mean) < low else ""
            message = (
                f"has mean {mean:.4g} over the observed cells; must be a density of mean about 1"
            )
            limits = f"from {low - tolerance:.3g} to {high + tolerance:.3g}"
            return {"file": f"= {where} {message}, {limits}{hint}"}
        mean, mean_count = total / expected, self._mean_count
        tolerance = FAR / (expected * mean_count) ** 0.5
        if low - tolerance <= mean / mean_count <= high + tolerance:
            return {}
        message = f"{where} has a mean of {mean:.4g} per observed cell"
        return {"mean_count": f"= {mean_count:g}: {message}; must be about that"}


def _read(volume: Volume, place: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a volume, float64 [x, y, z]."""
    part = np.array(volume.array[place], dtype=np.float64)
    return part[..., 0] if part.ndim == 4 else part
