"""The parameters of a universe: their table, which is the class `Cosmology` itself.

Ranges, symbols, names in files and what each parameter affects follow from the fields below:
sections of run files, priors, symbols of figures, headers of snapshots and caches all read them.
TensorFlow is loaded only by cosmologies made of tensors.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from flowpm_dist.cosmology.arrays import as_array, as_float64, is_tensor, known
from flowpm_dist.cosmology.neutrinos import Neutrinos, Shares, shares_of, sum_and_shares
from flowpm_dist.cosmology.power_table import OF_SIGMA8, PowerTable, power_table, theory_problem
from flowpm_dist.options import in_unit
from flowpm_dist.options.html import as_html

if TYPE_CHECKING:
    import tensorflow as tf
    from astropy.cosmology import FLRW

Parameter: TypeAlias = "float | tf.Tensor | tf.Variable"
"""A number, or a scalar floating tensor when gradients are wanted."""

Transfer = Literal["eisenstein-hu", "camb", "class"]
"""Where the transfer function comes from."""

PACKAGES = {"camb": "camb", "class": "classy"}
"""The packages of the transfer functions that are tables."""

Effect = Literal["background", "growth", "transfer", "primordial", "amplitude", "gaussianity"]
"""What a parameter can change. background: densities in physical units, such as h does; growth:
E(a), and with it the growth of structure and distances; the transfer function; the slope of the
primordial spectrum; the amplitude of the spectrum; gaussianity: how the initial field is
distributed, with this spectrum."""

WITHOUT_RADIATION = "needs radiation = true, because neutrinos are radiation at early times"
NEEDS_RADIATION = ("m_nu",)
"""Parameters that have an effect with radiation only."""

NOT_IN_TABLES = {
    "A_s": "goes without power, which has its own amplitude; sigma8 rescales it",
    "f_NL": "goes without power, which does not tell the primordial power",
    "transfer": "goes without power, which is in its place",
}
"""Why a table of power does not go with other choices."""

LATEST_DARK_ENERGY = -0.2
"""Upper limit of w0 + wa: dark energy must be negligible early for the normalisation D1 -> a."""

_compiled = ContextVar("compiled", default=False)


@dataclass(frozen=True)
class ParameterRow:
    """A row of the table of parameters.

    Attributes:
        range_text: the range in words, as in "must be ...".
        limits: the limits by the names of their comparisons: gt, ge, lt or le.
        symbol: for figures.
        affects: what it changes.
        unit: its unit, see `options.in_unit`.
        header: its name in the headers of particle files: Gadget-4's and MP-Gadget's, or ours where
            they have none; None if it is left out.
        in_run_files: whether run files have it, in [cosmology] and in [priors].
        default: its value unless given.
        required: whether it must be given.
    """

    range_text: str
    limits: dict[str, Any]
    symbol: str
    affects: frozenset[str]
    unit: str = ""
    header: str | None = None
    in_run_files: bool = True
    default: Any = None
    required: bool = False

    def holds(self, value: float) -> bool:
        """Returns whether a value lies in the range."""
        return all(getattr(operator, name)(value, end) for name, end in self.limits.items())


def _row(range_text: str, limits: dict[str, Any], symbol: str, affects: str, **more: Any) -> Any:
    return {"row": ParameterRow(range_text, limits, symbol, frozenset(affects.split()), **more)}


@contextmanager
def compiled_cosmologies() -> Iterator[None]:
    """Compiles growth and power of cosmologies that are made of tensors in the `with` block.

    Compiling takes a few seconds, once. Each evaluation then takes a third of the time. Posteriors
    use this, because each of their evaluations has another cosmology.
    """
    token = _compiled.set(True)
    try:
        yield
    finally:
        _compiled.reset(token)


def is_compiled(values: Mapping[str, Any]) -> bool:
    """Returns whether growth and power of these parameters are compiled."""
    return _compiled.get() and any(map(is_tensor, values.values()))


@dataclass(frozen=True)
class Cosmology:
    """Parameters of a universe of matter and w0-wa dark energy, checked at construction.

    Values are Python numbers, or scalar TensorFlow tensors or variables to differentiate by. A
    tensor whose value is not known yet (inside a tf.function) is not checked.

    Attributes:
        Omega_m: matter (cold dark matter, baryons, massive neutrinos) today over the critical
            density [1].
        Omega_b: baryons today over the critical density [1].
        h: Hubble constant [100 km/s/Mpc].
        n_s: tilt of the primordial scalar spectrum [1].
        A_s: amplitude of the primordial scalar spectrum at `k_pivot` [1]; or
        sigma8: rms linear overdensity in spheres of 8 Mpc/h today [1]. Exactly one of the two; with
            `power` neither is needed, and sigma8 rescales it.
        w0, wa: dark energy equation of state w(a) = w0 + wa (1 - a) [1].
        T_cmb: temperature of the microwave background today [K]. It changes the transfer function
            and, with `radiation`, the expansion.
        k_pivot: pivot wavenumber of `A_s` and `n_s` [1/Mpc].
        Omega_k: curvature of space today [1], above 0 in an open universe. It changes expansion,
            growth, and the angles under which lengths are seen.
        N_eff: effective number of neutrino species [1]. It changes the transfer function and, with
            `radiation`, the expansion.
        m_nu: sum of the masses of three equal neutrinos, or the three masses [eV], of which the sum
            and `m_nu_shares` are kept; above 0 it needs `radiation`. `Omega_m` and `sigma8` count
            all matter, neutrinos included.
        f_NL: local primordial non-Gaussianity [1]; above 0 for a density skewed towards peaks. It
            changes the initial conditions alone, see `flowpm_dist.initial.non_gaussianity`.
        transfer: "eisenstein-hu" (differentiable), or tables of "camb" or "class", which need the
            package camb or classy.
        radiation: whether photons and neutrinos are part of expansion and growth.
        m_nu_shares: each mass of the three neutrinos over their sum `m_nu`; empty for equal ones.
        power: linear power in place of a transfer function and `n_s`: a `PowerTable`, or what
            `power_table` takes. Other parameters then change expansion and growth alone.

    In most of the ranges growth functions are resolved; `growth.Growth` refuses the others.

    Raises:
        ValueError: a value out of its range, not exactly one amplitude, or an A_s, f_NL or transfer
            with a `power`, which does not tell them.
        TypeError: a value that is neither a number nor a scalar floating tensor.
    """

    Omega_m: Parameter = field(
        metadata=_row("a number from 0.005 to 1", dict(ge=0.005, le=1), r"$\Omega_m$",
                      "background growth transfer", header="Omega0")
    )  # fmt: skip
    Omega_b: Parameter = field(
        metadata=_row("a number of at least 0, below Omega_m", dict(ge=0, lt=1), r"$\Omega_b$",
                      "transfer", header="OmegaBaryon")
    )  # fmt: skip
    h: Parameter = field(
        metadata=_row("H0 / (100 km/s/Mpc), above 0.1, below 3", dict(gt=0.1, lt=3), "$h$",
                      "background transfer", header="HubbleParam")
    )  # fmt: skip
    n_s: Parameter = field(
        metadata=_row("a number above 0, below 3", dict(gt=0, lt=3), "$n_s$", "primordial")
    )
    A_s: Parameter | None = field(
        default=None,
        metadata=_row("a number above 0, below 1e-6, such as 2.1e-9", dict(gt=0, lt=1e-6), "$A_s$",
                      "amplitude"),
    )  # fmt: skip
    sigma8: Parameter | None = field(
        default=None,
        metadata=_row("a number above 0, below 10", dict(gt=0, lt=10), r"$\sigma_8$", "amplitude"),
    )
    w0: Parameter = field(
        default=-1.0,
        metadata=_row("a number from -3 to below 0", dict(ge=-3, lt=0), "$w_0$",
                      "background growth transfer", header="w0"),
    )  # fmt: skip
    wa: Parameter = field(
        default=0.0,
        metadata=_row("a number from -5 to below 5", dict(ge=-5, lt=5), "$w_a$",
                      "background growth transfer", header="wa"),
    )  # fmt: skip
    T_cmb: Parameter = field(
        default=2.7255,
        metadata=_row("a temperature in kelvin, above 0 and below 100", dict(gt=0, lt=100),
                      r"$T_\mathrm{CMB}$", "background transfer", unit="K", header="CMBTemperature",
                      in_run_files=False),
    )  # fmt: skip
    k_pivot: Parameter = field(
        default=0.05,
        metadata=_row("a wavenumber in 1/Mpc, above 0", dict(gt=0, lt=math.inf),
                      r"$k_\mathrm{pivot}$", "primordial", unit="1/Mpc", in_run_files=False),
    )  # fmt: skip
    Omega_k: Parameter = field(
        default=0.0,
        kw_only=True,
        metadata=_row("a number from -0.5 to 0.5", dict(ge=-0.5, le=0.5), r"$\Omega_k$",
                      "background growth transfer"),
    )  # fmt: skip
    N_eff: Parameter = field(
        default=3.046,
        kw_only=True,
        metadata=_row("a number from 0 to 20", dict(ge=0, le=20), r"$N_\mathrm{eff}$",
                      "background transfer", header="N_eff"),
    )  # fmt: skip
    m_nu: Parameter = field(
        default=0.0,
        kw_only=True,
        metadata=_row("a sum of masses in eV, from 0 to 2", dict(ge=0, le=2), r"$\sum m_\nu$",
                      "background transfer", unit="eV", header="m_nu"),
    )  # fmt: skip
    f_NL: Parameter = field(
        default=0.0,
        kw_only=True,
        metadata=_row("a number from -5000 to 5000", dict(ge=-5000, le=5000),
                      r"$f_\mathrm{NL}$", "gaussianity"),
    )  # fmt: skip
    transfer: Transfer = "eisenstein-hu"
    radiation: bool = field(default=False, kw_only=True)
    m_nu_shares: Shares = field(default=(), kw_only=True)
    power: PowerTable | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        amplitudes = [name for name in AMPLITUDES if getattr(self, name) is not None]
        if len(amplitudes) != 1 and (amplitudes or self.power is None):
            raise ValueError(
                "exactly one of A_s and sigma8 must be given, got "
                + ("both" if amplitudes else "neither")
            )
        self._take_masses()
        if self.power is not None:
            object.__setattr__(self, "power", power_table(self.power, vars(self)))
        if self.transfer not in get_args(Transfer):
            choices = ", ".join(map(repr, get_args(Transfer)))
            raise ValueError(f"transfer must be one of {choices}, got {self.transfer!r}")
        if not isinstance(self.radiation, bool | np.bool_):
            raise TypeError(f"radiation must be True or False, got {self.radiation!r}")
        names = [n for n in PARAMETERS if n not in AMPLITUDES or getattr(self, n) is not None]
        for name in names:
            object.__setattr__(self, name, _scalar(name, getattr(self, name)))
        if not self.radiation and is_tensor(self.m_nu):
            raise ValueError(f"m_nu, a tensor: {WITHOUT_RADIATION}")
        numbers = {name: known_value(getattr(self, name)) for name in names}
        for name, number in numbers.items():
            if number is not None and not PARAMETERS[name].holds(number):
                raise ValueError(f"{name} must be {PARAMETERS[name].range_text}; got {number:g}")
        ends = {n: () if v is None else (v,) for n, v in numbers.items()}
        for name, rule in conflicts(ends, self.radiation):
            raise ValueError(f"{name} = {numbers[name]:g}: {rule}")
        if self.power is not None:
            for name, rule in NOT_IN_TABLES.items():
                choice = getattr(self, name)
                if is_tensor(choice) or choice != type(self).__dataclass_fields__[name].default:
                    raise ValueError(f"{name} = {choice}: {rule}")
            if self.sigma8 is not None and (h := known_value(self.h)) is not None:
                if problem := theory_problem(self.power, OF_SIGMA8, h):
                    raise ValueError(f"sigma8 {problem}")

    def _take_masses(self) -> None:
        """Makes the sum and the shares of three masses, and checks the shares."""
        masses, shares = in_unit("m_nu", self.m_nu, "eV"), self.m_nu_shares
        three = isinstance(masses, list | tuple | np.ndarray) and np.ndim(masses) == 1
        if three and len(shares):
            raise ValueError("m_nu_shares go with the sum of the masses: m_nu has three")
        if three and any(map(is_tensor, masses)):
            raise TypeError("m_nu: give the sum of the masses as a tensor, and m_nu_shares")
        try:
            if three:
                masses, shares = sum_and_shares(masses)
                object.__setattr__(self, "m_nu", masses)
            elif len(shares):
                shares = shares_of(shares)
        except ValueError as error:
            raise ValueError(f"{'m_nu' if three else 'm_nu_shares'} {error}") from None
        object.__setattr__(self, "m_nu_shares", shares)

    @classmethod
    def planck18(cls) -> Cosmology:
        """Planck 2018 with lensing and BAO (arXiv:1807.06209), normalised to its sigma8 today.

        Planck's cosmology has neutrinos of 0.06 eV, which slow the growth of structure. This one
        has no neutrinos. With Planck's A_s = 2.1064e-9 it would have sigma8 = 0.829 (0.823 with
        CAMB's transfer function), and its power today would be 5 % too high. Therefore sigma8 is
        set instead; the A_s that it implies is lower by 5 %.
        """
        return cls(Omega_m=0.30966, Omega_b=0.04897, h=0.6766, n_s=0.96822, sigma8=0.8102)

    @classmethod
    def from_astropy(cls, cosmology: Any, **parameters: Any) -> Cosmology:
        """The matter and dark energy of an `astropy.cosmology` object.

        Radiation and neutrinos are left out: their share of the density is added to dark energy, so
        that the curvature stays, and a warning says how large it was. With `radiation=True` they
        are taken, with N_eff and the sum of the masses; Omega_m is astropy's Om0 and the neutrinos.

        Args:
            cosmology: LambdaCDM, wCDM, w0waCDM, or FlatLambdaCDM, FlatwCDM, Flatw0waCDM.
            **parameters: parameters that astropy does not have (`n_s`, and `A_s` or `sigma8`), and
                any that replace astropy's.

        Raises:
            TypeError: another kind of dark energy, or not an astropy cosmology.
            ValueError: no baryon density, `n_s` or amplitude is given.
        """
        from flowpm_dist.cosmology.astropy_bridge import parameters_from_astropy

        if "n_s" not in parameters or not any(n in parameters for n in (*AMPLITUDES, "power")):
            names = ", ".join(parameters) or "neither"
            raise ValueError(
                "astropy's cosmologies have no spectrum of initial fluctuations: give n_s, and "
                f"A_s, sigma8 or power, as keywords (given: {names})"
            )
        radiation = bool(parameters.get("radiation", False))
        there = parameters_from_astropy(cosmology, parameters, radiation=radiation)
        return cls(**{**there, **parameters})

    def to_astropy(self, name: str | None = None) -> FLRW:
        """Returns the expansion of this universe as an `astropy.cosmology` object.

        It is LambdaCDM, wCDM or w0waCDM, or their flat forms. Without `radiation`, its Tcmb0 is 0,
        so that its distances are the same as here. With `radiation` it has photons and
        neutrinos. Then its Om0 is cold dark matter and baryons alone, as everywhere in astropy, and
        its densities of massive neutrinos are fits, good to about 1e-3 of theirs. Astropy has no
        spectrum: n_s, the amplitude, f_NL and a table of power are left out.

        Args:
            name: the name of the new object.

        Raises:
            ValueError: a parameter is a tensor whose value is not known yet, or N_eff is below 3 or
                from 4 on and neutrinos have a mass.
        """
        from flowpm_dist.cosmology.astropy_bridge import to_astropy

        return to_astropy(self, name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the numerical parameters that have an effect, A_s or sigma8 among them."""
        others = tuple(name for name in PARAMETERS if name not in AMPLITUDES)
        if not self.radiation:
            others = tuple(name for name in others if name not in NEEDS_RADIATION)
        return others + tuple(n for n in AMPLITUDES if getattr(self, n) is not None)

    @property
    def is_gaussian(self) -> bool:
        """Whether the initial field is Gaussian; not if f_NL is a tensor, whatever its value."""
        return not is_tensor(self.f_NL) and self.f_NL == 0

    @property
    def expansion(self) -> dict[str, Any]:
        """What is chosen of the expansion: radiation, and the shares of the masses."""
        return {"radiation": bool(self.radiation), "m_nu_shares": self.m_nu_shares}

    @property
    def choices(self) -> dict[str, Any]:
        """What is chosen besides the parameters: power or transfer, and the expansion."""
        of = {"transfer": self.transfer} if self.power is None else {"power": self.power}
        shares = {"m_nu_shares": list(self.m_nu_shares)} if self.m_nu_shares else {}
        return {**of, "radiation": bool(self.radiation), **shares}

    def parameters(self) -> dict[str, tf.Tensor]:
        """The numerical parameters that are set, by name, as scalar float64 tensors."""
        return {name: as_float64(getattr(self, name)) for name in self.names}

    def values(self) -> dict[str, Any]:
        """The parameters that are set, by name: NumPy's numbers where they are plain numbers."""
        return {name: as_array(getattr(self, name)) for name in self.names}

    def numbers(self) -> dict[str, Any]:
        """Returns plain numbers that make the same cosmology, as `Cosmology(**numbers)`."""
        values = {name: float(getattr(self, name)) for name in self.names}
        table = {} if self.power is None else {"power": self.power.numbers()}
        return {**values, **self.choices, **table}

    def facts(self) -> dict[str, str]:
        """Returns the parameters as texts by name, for notebooks."""
        values = {name: known_value(getattr(self, name)) for name in self.names}
        texts = {n: "a tensor" if v is None else f"{v:.6g}" for n, v in values.items()}
        return texts | {name: str(choice) for name, choice in self.choices.items()}

    def _repr_html_(self) -> str:
        return as_html(self, self.facts)

    def replace(self, **changes: Any) -> Cosmology:
        """A copy with some parameters changed; a new A_s replaces sigma8, and vice versa.

        A new sum of masses keeps their shares.

        Raises:
            TypeError: an unknown parameter.
            ValueError: as at construction.
        """
        names = [each.name for each in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                raise TypeError(f"no cosmological parameter {name!r}: one of {', '.join(names)}")
        if np.ndim(changes.get("m_nu", 0.0)) == 1:
            changes.setdefault("m_nu_shares", ())
        if changes.get("A_s") is not None:
            changes.setdefault("sigma8", None)
        elif changes.get("sigma8") is not None:
            changes.setdefault("A_s", None)
        return dataclasses.replace(self, **changes)


def _row_of(declared: dataclasses.Field[Any]) -> ParameterRow:
    row: ParameterRow = declared.metadata["row"]
    if declared.default is dataclasses.MISSING:
        return dataclasses.replace(row, required=True)
    return dataclasses.replace(row, default=declared.default)


PARAMETERS = {f.name: _row_of(f) for f in dataclasses.fields(Cosmology) if f.metadata}
"""The table of parameters: each row by its name, see `Cosmology`."""


def affecting(*effects: Effect) -> tuple[str, ...]:
    """Returns the names of the parameters that change any of these, in the order of the table."""
    return tuple(name for name, row in PARAMETERS.items() if row.affects.intersection(effects))


AMPLITUDES = affecting("amplitude")
"""The parameters of which exactly one is given."""

SHAPE = affecting("background", "growth", "transfer", "primordial")
"""The parameters that determine the shape of the spectrum."""

VARIABLE = tuple(n for n, row in PARAMETERS.items() if row.in_run_files and n != "A_s")
"""Parameters that may vary between the universes of a training."""

HEADERS = {name: row.header for name, row in PARAMETERS.items() if row.header is not None}
"""Our names of parameters, and those in the headers of particle files."""


def conflicts(ends: Mapping[str, tuple[float, ...]], radiation: bool) -> Iterator[tuple[str, str]]:
    """Yields a parameter and why others do not allow it, for values anywhere in ranges.

    Args:
        ends: by parameter its value, or the ends of its range; empty or missing if not known.
        radiation: whether the expansion has radiation.
    """

    def shown(name: str) -> str:
        return str(list(ends[name]) if len(ends[name]) > 1 else ends[name][0])

    matter, baryons = ends.get("Omega_m"), ends.get("Omega_b")
    if matter and baryons and max(baryons) >= min(matter):
        yield "Omega_b", f"must be below Omega_m = {shown('Omega_m')}, which contains it"
    curvature = ends.get("Omega_k")
    if matter and curvature:
        low, high = -min(matter) - 1e-12, 1 - max(matter) + 1e-12  # rounding
        if min(curvature) < low or max(curvature) > high:
            message = f"must lie between -Omega_m and 1 - Omega_m; Omega_m = {shown('Omega_m')}"
            yield "Omega_k", f"{message}: there would be no big bang, or dark energy below 0"
    masses = ends.get("m_nu")
    if masses and max(masses) > 0 and not radiation:
        yield "m_nu", WITHOUT_RADIATION
    numbers, temperatures = (
        ends.get(name) or (PARAMETERS[name].default,) for name in ("N_eff", "T_cmb")
    )
    if masses and max(masses) > 0 and min(numbers) <= 0:
        yield "N_eff", f"must be above 0 with massive neutrinos, m_nu = {shown('m_nu')}"
    elif masses and max(masses) > 0 and matter and baryons and (hubble := ends.get("h")):
        most = Neutrinos(max(masses), max(numbers), max(temperatures), min(hubble), min(matter))
        if max(baryons) + most.Omega_matter >= min(matter):
            yield "m_nu", f"with Omega_b, neutrinos are more than Omega_m = {shown('Omega_m')}"
    w0, wa = ends.get("w0"), ends.get("wa")
    if w0 and wa and max(w0) + max(wa) > LATEST_DARK_ENERGY + 1e-12:  # up to rounding of the sum
        message = f"w0 + wa must be at most {LATEST_DARK_ENERGY}, or dark energy would matter early"
        yield "wa", f"{message}; w0 = {shown('w0')}"


def _scalar(name: str, value: Any) -> Parameter:
    if is_tensor(value):
        if not value.dtype.is_floating:
            raise TypeError(f"{name} must be a floating tensor, got {value.dtype.name}")
        if value.shape.rank not in (0, None):
            raise TypeError(f"{name} must be a scalar, got a tensor of shape {value.shape}")
        return value
    value = in_unit(name, value, PARAMETERS[name].unit)
    if isinstance(value, (bool, str)) or np.ndim(value) != 0:
        raise TypeError(f"{name} must be a number or a scalar tensor, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a scalar tensor, got {value!r}") from None


def known_value(value: Any) -> float | None:
    """The number behind `value`, or None when a graph has yet to compute it."""
    number = known(value)
    return None if number is None else float(number)
