"""Linear power as a table, in place of a transfer function. Without TensorFlow."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from flowpm_dist.cosmology.arrays import is_tensor, known
from flowpm_dist.cosmology.camb_tables import PART
from flowpm_dist.cosmology.neutrinos import SPECIES
from flowpm_dist.options import in_unit
from flowpm_dist.options.regular_files import read_numbers

Part = Literal["matter", "cb"]
"""Whose power it is: all matter's, or cold dark matter's and baryons' alone."""
LengthUnit = Literal["Mpc/h", "Mpc"]

Spline: TypeAlias = tuple[float, float, np.ndarray]
"""The first ln k, the step in ln k, and the coefficients [cell, 4] of the powers of u, which runs
from 0 to 1 within a cell."""

SAMPLED = (1e-5, 100.0, 2048)
"""Where functions are sampled: the ends [h/Mpc], and how many wavenumbers, equal in ln k."""
FEWEST = 4
ON_THE_PEAK = ("Omega_m", "Omega_b", "h", "n_s")
"""The parameters that tell where P is largest, see `unit_doubt`."""

LATEST = 1000.0
"""The highest redshift of a table."""
_SAMPLES = 4096
FIRST, OF_SIGMA8, OF_LENSING = 3e-3, 1.0, 10.0
"""Where theory needs P [h/Mpc]: from the first to the second for sigma8, to the third for lensing.
What sigma8 lacks of the rest is below 0.2 %."""
_SAME, _SAME_MASS = 1e-3, 2e-2
_EV = 93.0  # sum of masses over their Omega h^2, within 1 % for usual temperatures
_UNTOLD = 0.15  # |ln h| below which the peak does not tell the unit
_MOST_SPLINES = 16


class PowerTable:
    """The linear power of a universe at one redshift, for `Cosmology(power=...)`.

    ln P is a cubic spline in ln k. Below and above the table's wavenumbers, P is a power law with
    the slope at that end; a simulation whose box has such wavenumbers is refused.

    Args:
        k: wavenumbers, increasing, above 0 [row].
        power: the power there, above 0 [row].
        redshift: the redshift of the table; the growth of the simulation does the rest.
        of: "matter" for the power of all matter, "cb" for cold dark matter and baryons alone;
            without massive neutrinos they are the same.
        unit: "Mpc/h" if k is in h/Mpc and P in (Mpc/h)^3, "Mpc" if k is in 1/Mpc and P in Mpc^3.

    Attributes:
        k, power: float64, as given [row].

    Raises:
        ValueError: fewer than four rows, another shape, wavenumbers that do not increase from above
            0, a power that is not finite and above 0, or a redshift out of range.
    """

    def __init__(
        self,
        k: Any,
        power: Any,
        redshift: float = 0.0,
        *,
        of: Part = "matter",
        unit: LengthUnit = "Mpc/h",
    ) -> None:
        per_length, volume = ("h/Mpc", "(Mpc/h)^3") if unit == "Mpc/h" else ("1/Mpc", "Mpc^3")
        for name, value, choices in (("of", of, Part), ("unit", unit, LengthUnit)):
            if value not in get_args(choices):
                raise ValueError(f"{name} = {value!r}: must be one of {get_args(choices)}")
        self.k = _column("k", in_unit("k", k, per_length))
        self.power = _column("P", in_unit("power", power, volume))
        plain = _numbers("redshift", in_unit("redshift", redshift, "redshift"))
        if isinstance(plain, str):
            raise TypeError(f"redshift must be a number, got {plain!r}")
        self.redshift, self.of, self.unit = float(plain), of, unit
        if not 0 <= self.redshift <= LATEST:
            raise ValueError(f"redshift = {self.redshift:g}: must be from 0 to {LATEST:g}")
        if self.k.shape != self.power.shape or self.k.size < FEWEST:
            raise ValueError(
                f"a table of power needs k and P of at least {FEWEST} rows, as many of each; got "
                f"{self.k.size} and {self.power.size}"
            )
        increase = np.diff(np.log(self.k)) > 0  # also where k is nearly the same
        if not increase.all():
            row = int(np.argmin(increase)) + 1
            raise ValueError(
                f"wavenumbers of a table of power must increase: row {row} (from 0) has k = "
                f"{self.k[row]:g} after {self.k[row - 1]:g}"
            )

    @classmethod
    def read(
        cls,
        path: str | Path,
        columns: Sequence[int] = (0, 1),
        redshift: float = 0.0,
        *,
        of: Part = "matter",
        unit: LengthUnit = "Mpc/h",
    ) -> PowerTable:
        """Reads a text file of numbers, such as CAMB and CLASS write; `#` begins a comment.

        Args:
            path: the file; blanks or commas separate its columns.
            columns: the numbers of the columns with k and P, from 0.
            redshift, of, unit: see the class.

        Raises:
            ValueError: it has no such columns, or no table of power; the message names the file.
            OSError: it cannot be read.
        """
        table, (first, second) = read_numbers(Path(path)), in_unit("columns", columns)
        try:
            if not 0 <= min(first, second) <= max(first, second) < table.shape[1]:
                raise ValueError(
                    f"it has {table.shape[1]} columns: k and P cannot be {first} and {second}"
                )
            return cls(table[:, first], table[:, second], redshift, of=of, unit=unit)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def __repr__(self) -> str:
        unit = "h/Mpc" if self.unit == "Mpc/h" else "1/Mpc"
        ends = f"k {self.k[0]:.4g} to {self.k[-1]:.4g} {unit}"
        return f"PowerTable({ends}, z = {self.redshift:g}, of {self.of})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PowerTable) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.k.tobytes(), self.power.tobytes(), self.redshift, self.of, self.unit

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_numbers, (self.numbers(),)

    def numbers(self) -> dict[str, Any]:
        """Returns plain numbers and texts that make the same table, as `PowerTable(**numbers)`."""
        arrays = {"k": self.k.tolist(), "power": self.power.tolist()}
        return {**arrays, "redshift": self.redshift, "of": self.of, "unit": self.unit}


def power_table(value: Any, parameters: Mapping[str, Any] | None = None) -> PowerTable:
    """Returns the table that a user's linear power stands for.

    Args:
        value: a `PowerTable`, or its numbers by name; a pair (k, P) in h/Mpc and (Mpc/h)^3 today; a
            function of k that returns P in these units, for an array; camb's results
            (`CAMBdata`) or a computed `classy.Class`, at the lowest of their redshifts.
        parameters: those by name that the object of camb or classy must have, too.

    Raises:
        TypeError: something else.
        ValueError: see `PowerTable`; or the object of camb or classy has other parameters.
    """
    if isinstance(value, PowerTable):
        return value
    if isinstance(value, Mapping):
        return _of_numbers(value)
    package = type(value).__module__.partition(".")[0]
    if package == "camb" and hasattr(value, "get_linear_matter_power_spectrum"):
        return _of_camb(value, parameters)
    if package == "classy" and hasattr(value, "get_pk_and_k_and_z"):
        return _of_classy(value, parameters)
    if callable(value):
        first, last, count = SAMPLED
        k = np.geomspace(first, last, count)
        return PowerTable(k, value(k))
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) and len(value) == 2:
        return PowerTable(*value)
    raise TypeError(
        "power must be a PowerTable, a pair (k, P), a function of k, or an object of camb or "
        f"classy; got {type(value).__name__} (a file: PowerTable.read)"
    )


def _of_camb(value: Any, parameters: Mapping[str, Any] | None) -> PowerTable:
    """Returns the table of cb at the lowest redshift of `CAMBdata`."""
    of = value.Params
    matter = (of.ombh2 + of.omch2 + of.omnuh2) / of.h**2
    there = {"h": of.h, "Omega_m": matter, "Omega_b": of.omegab, "Omega_k": of.omk}
    there |= {"w0": of.DarkEnergy.w, "wa": of.DarkEnergy.wa, "n_s": of.InitPower.ns}
    if parameters is not None and parameters["radiation"]:
        there |= {"T_cmb": of.TCMB, "N_eff": of.N_eff}
    _compare("camb", {**there, "m_nu": of.omnuh2 * _EV}, parameters)
    each = zip(of.nu_mass_numbers, of.nu_mass_fractions, strict=False)
    species = [fraction / count for count, fraction in each for _ in range(count)]
    _compare_shares("camb", species, parameters)
    try:
        k, redshifts, power = value.get_linear_matter_power_spectrum(PART, PART)
    except Exception as error:
        raise ValueError(f"power: the object of camb has no matter power: {error}") from error
    return PowerTable(k, power[0], redshifts[0], of="cb")


def _compare_shares(code: str, species: Any, parameters: Mapping[str, Any] | None) -> None:
    """Raises a ValueError if neutrinos share their mass in another way than here."""
    total = None if parameters is None else known(parameters["m_nu"])
    if parameters is None or not total:
        return
    there = sorted([*species, *[0.0] * (SPECIES - len(species))])
    here = sorted(parameters["m_nu_shares"] or [1 / SPECIES] * SPECIES)
    if len(there) != len(here) or not np.allclose(there, here, atol=_SAME_MASS):
        theirs, ours = (", ".join(f"{x * total:.3g}" for x in shares) for shares in (there, here))
        raise ValueError(
            f"power: the object of {code} has neutrinos of {theirs} eV, the cosmology of {ours}: "
            "set num_massive_neutrinos (camb) or deg_ncdm (classy), or m_nu = [...] here"
        )


def _of_classy(value: Any, parameters: Mapping[str, Any] | None) -> PowerTable:
    """Returns the table of cb at the lowest redshift of a `classy.Class`."""
    h = value.h()
    if not h > 0:
        raise ValueError("power: the object of classy has not been computed")
    there = {"h": h, "Omega_m": value.Omega0_m(), "Omega_b": value.Omega_b()}
    there |= {"Omega_k": value.Omega0_k(), "n_s": value.n_s(), "m_nu": value.Omega_nu * h**2 * _EV}
    there |= {"w0": float(value.pars.get("w0_fld", -1)), "wa": float(value.pars.get("wa_fld", 0))}
    if parameters is not None and parameters["radiation"]:
        there |= {"T_cmb": value.T_cmb(), "N_eff": value.Neff()}
    _compare("classy", there, parameters)
    if "m_ncdm" in value.pars:
        texts = (str(value.pars.get(name, 1)).strip("[]()") for name in ("m_ncdm", "deg_ncdm"))
        masses, counts = (np.array(text.split(","), float) for text in texts)
        species = np.repeat(masses, np.rint(counts).astype(int))
        _compare_shares("classy", species / species.sum(), parameters)
    try:
        power, k, redshifts = value.get_pk_and_k_and_z(
            nonlinear=False, only_clustering_species=True
        )
    except Exception as error:  # of classy, without a class in common
        raise ValueError(
            "power: the object of classy must have computed P(k) with output = 'mPk' and a "
            f"z_max_pk above 0: {str(error).strip()}"
        ) from error
    latest = int(np.argmin(redshifts))
    return PowerTable(k / h, power[:, latest] * h**3, redshifts[latest], of="cb")


def _compare(code: str, there: Mapping[str, float], parameters: Mapping[str, Any] | None) -> None:
    """Checks that a code's universe has the parameters of the cosmology."""
    for name, value in there.items():
        here = None if parameters is None else known(parameters[name])
        within = _SAME_MASS if name == "m_nu" else _SAME
        if here is not None and abs(value - here) > within * max(abs(here), 1e-2):
            raise ValueError(
                f"power: the object of {code} has {name} = {value:g}, the cosmology {float(here):g}"
            )


def ends_of(table: PowerTable, h: Any) -> tuple[float, float]:
    """Returns the smallest and the largest wavenumber [h/Mpc]; see `box_problem`."""
    scale = 1.0 if table.unit == "Mpc/h" else 1.0 / h
    return float(table.k[0] * scale), float(table.k[-1] * scale)


def box_problem(table: PowerTable, size: Sequence[float], grid: Sequence[int], h: Any) -> str:
    """Returns what a box needs of a table and does not find there; "" if it has all.

    Args:
        table: the table.
        size: the side lengths [Mpc/h].
        grid: particles along each side.
        h: the Hubble constant [100 km/s/Mpc], for tables per Mpc.
    """
    low, high = ends_of(table, h)
    first = 2 * math.pi / max(size)
    last = math.pi * math.hypot(*(n / side for n, side in zip(grid, size, strict=True)))
    if low <= first and last <= high:
        return ""
    return (
        f"a table of power from k = {low:.4g} to {high:.4g} h/Mpc does not hold what this box "
        f"needs, {first:.4g} to {last:.4g} h/Mpc: a longer table, or another box or grid"
    )


def theory_problem(table: PowerTable, last: float, h: Any) -> str:
    """Returns what theory needs of a table and does not find there; "" if it has all.

    Args:
        table: the table.
        last: the largest wavenumber that matters, from `FIRST` on [h/Mpc].
        h: see `box_problem`.
    """
    low, high = ends_of(table, h)
    if low <= FIRST and last <= high:
        return ""
    return (
        f"needs P from k = {FIRST:g} to {last:g} h/Mpc, and the table of power has {low:.4g} to "
        f"{high:.4g}"
    )


def unit_doubt(table: PowerTable, Omega_m: float, Omega_b: float, h: float, n_s: float) -> str:
    """Returns why a table's unit of length seems wrong, from where P is largest; "" if it does not.

    In flat universes without massive neutrinos, the expected place is within 3 % of the largest
    value of Eisenstein and Hu's fit, and 14 % at most.
    """
    place = int(np.argmax(table.power))
    if not 0 < place < table.k.size - 1:
        return ""
    matter = Omega_m * h**2
    shift = 1.17 * (n_s - 0.96) - 0.85 * (Omega_b / Omega_m - 0.15)
    expected = 0.0746 * matter / h * math.exp(0.06 + shift - 0.137 * math.log(matter / 0.14))
    other, scale, factor = ("Mpc", 1.0, 1 / h) if table.unit == "Mpc/h" else ("Mpc/h", 1 / h, h)
    peak, margin = float(table.k[place]) * scale, 0.3 * abs(math.log(h))
    other_fit = abs(math.log(peak * factor / expected))
    if abs(math.log(h)) < _UNTOLD or other_fit >= abs(math.log(peak / expected)) - margin:
        return ""
    return (
        f"P is largest at k = {peak:.4g} h/Mpc; these parameters have it near {expected:.4g}, "
        f'and unit = "{other}" would have it at {peak * factor:.4g}'
    )


@functools.lru_cache(_MOST_SPLINES)
def spline_of(table: PowerTable, h: float) -> Spline:
    """Returns ln P [(Mpc/h)^3] of a table as a spline in ln k [h/Mpc], see `log_spline`.

    Args:
        table: the table.
        h: the Hubble constant [100 km/s/Mpc] for tables per Mpc; any for others.
    """
    scale = 1.0 if table.unit == "Mpc/h" else h
    return log_spline(table.k / scale, table.power * scale**3)


def log_spline(k: np.ndarray, power: np.ndarray) -> Spline:
    """Returns ln P as a cubic spline in ln k, on equal cells.

    Args:
        k: wavenumbers, increasing, above 0 [row].
        power: P, above 0 [row].
    """
    from scipy.interpolate import CubicSpline  # takes long to import

    spline = CubicSpline(np.log(k), np.log(power))
    ln_k = np.linspace(np.log(k[0]), np.log(k[-1]), _SAMPLES)
    step = ln_k[1] - ln_k[0]
    value, slope = spline(ln_k), spline(ln_k, 1) * step
    left, right, d_left, d_right = value[:-1], value[1:], slope[:-1], slope[1:]
    rise = right - left
    cubic = [left, d_left, 3 * rise - 2 * d_left - d_right, d_left + d_right - 2 * rise]
    return float(ln_k[0]), float(step), np.stack(cubic, axis=1)


def _of_numbers(numbers: Mapping[str, Any]) -> PowerTable:
    try:
        return PowerTable(**numbers)
    except TypeError as error:
        raise ValueError(f"a table of power: {error}") from error


def _numbers(name: str, value: Any) -> Any:
    """Returns a tensor as an array; a table has no derivatives, so no tape may watch it.

    Raises:
        TypeError: a tape does.
    """
    if not is_tensor(value):
        return value
    from meshimpl.tapes import is_watched

    if is_watched([value]):
        raise TypeError(f"{name} of a table of power has no derivatives: give an array, no tensor")
    return value.numpy()


def _column(name: str, values: Any) -> np.ndarray:
    """Returns a column of numbers, which must be finite and above 0, as an array of its own."""
    column = np.array(_numbers(name, values))
    if column.ndim != 1 or column.dtype.kind not in "fiu":
        raise ValueError(
            f"{name} of a table of power must be a column of numbers, got {column.dtype} of shape "
            f"{column.shape}"
        )
    column = column.astype(np.float64)
    wrong = ~(np.isfinite(column) & (column > 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"{name} of a table of power must be finite and above 0: row {row} (from 0) has "
            f"{column[row]:g}"
        )
    column.setflags(write=False)
    return column
