"""Cosmological parameters as options: fixed values, and ranges of those that vary."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from flowpm_dist.cosmology.ranges import RANGES, Transfer
from flowpm_dist.options import Options, Pair, limits

OmegaM = Annotated[float, RANGES["Omega_m"].field]
OmegaB = Annotated[float, RANGES["Omega_b"].field]
Hubble = Annotated[float, RANGES["h"].field]
Tilt = Annotated[float, RANGES["n_s"].field]
PrimordialAmplitude = Annotated[float, RANGES["A_s"].field]
Sigma8 = Annotated[float, RANGES["sigma8"].field]
W0 = Annotated[float, RANGES["w0"].field]
Wa = Annotated[float, RANGES["wa"].field]


def _value(name: str, *default: Any) -> Any:
    return Field(*default, description=RANGES[name].what)


class PartialCosmologyOptions(Options):
    """The parameters that many flat universes of matter and dark energy w0 + wa (1 - a) share."""

    Omega_m: OmegaM | None = _value("Omega_m", None)
    Omega_b: OmegaB | None = _value("Omega_b", None)
    h: Hubble | None = _value("h", None)
    n_s: Tilt | None = _value("n_s", None)
    A_s: PrimordialAmplitude | None = _value("A_s", None)
    sigma8: Sigma8 | None = _value("sigma8", None)
    w0: W0 = _value("w0", -1.0)
    wa: Wa = _value("wa", 0.0)
    transfer: Transfer = Field(default="eisenstein-hu", description='"eisenstein-hu" or "camb"')


class CosmologyOptions(PartialCosmologyOptions):
    """A flat universe of cold dark matter, baryons and dark energy w0 + wa (1 - a)."""

    Omega_m: OmegaM = _value("Omega_m")
    Omega_b: OmegaB = _value("Omega_b")
    h: Hubble = _value("h")
    n_s: Tilt = _value("n_s")


class ParameterRanges(Options):
    """The lowest and the highest value of parameters that vary or are fitted."""

    Omega_m: Pair[OmegaM] | None = limits(RANGES["Omega_m"].what)
    Omega_b: Pair[OmegaB] | None = limits(RANGES["Omega_b"].what)
    h: Pair[Hubble] | None = limits(RANGES["h"].what)
    n_s: Pair[Tilt] | None = limits(RANGES["n_s"].what)
    sigma8: Pair[Sigma8] | None = limits(RANGES["sigma8"].what)
    w0: Pair[W0] | None = limits(RANGES["w0"].what)
    wa: Pair[Wa] | None = limits(RANGES["wa"].what)
