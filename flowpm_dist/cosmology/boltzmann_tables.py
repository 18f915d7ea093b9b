"""Tables of linear power by the codes that solve the Boltzmann equations, each run once."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from flowpm_dist.cosmology.camb_tables import PART, camb_power_table
from flowpm_dist.cosmology.class_tables import class_power_table
from flowpm_dist.cosmology.neutrinos import Shares
from flowpm_dist.cosmology.parameters import PACKAGES, PARAMETERS, SHAPE, affecting
from flowpm_dist.cosmology.power_table import Spline, log_spline

TRANSFER = affecting("transfer")
"""The parameters that the transfer function depends on."""

_A_S = 2e-9  # the spectrum is proportional to A_s, so one table is enough
_DEFAULTS = {name: PARAMETERS[name].default for name in SHAPE if not PARAMETERS[name].required}


def boltzmann_spline(transfer: str, shares: Shares = (), **parameters: float) -> Spline:
    """Returns the linear power today over A_s at n_s = 1 as a spline, see `log_spline`.

    It is the power of cold dark matter and baryons [(Mpc/h)^3].

    Another n_s multiplies it by (k / k_pivot)^(n_s - 1), whatever the other parameters. So a code
    runs once for all cosmologies that differ in n_s, k_pivot and the amplitude alone; the last 16
    splines are kept.

    Args:
        transfer: "camb" or "class".
        shares: see `Cosmology.m_nu_shares`.
        **parameters: the parameters in `SHAPE`, which have the defaults of `Cosmology`.

    Raises:
        ImportError: the package of the code is missing.
        ValueError: a universe without baryons.
    """
    values = _DEFAULTS | parameters
    if not values["Omega_b"] > 0:
        raise ValueError(
            f'Omega_b = {values["Omega_b"]:g}: transfer="{transfer}" needs baryons; or use '
            '"eisenstein-hu"'
        )
    return _spline(transfer, shares, *(values[name] for name in TRANSFER))


@contextlib.contextmanager
def power_in_background(cosmology: Mapping[str, Any]) -> Iterator[None]:
    """Runs the code of a transfer function in a thread during the `with` block.

    An error in the thread is raised again, with its message, where the spectrum is used.

    Args:
        cosmology: the arguments of a `Cosmology` by name.
    """
    transfer, shares = cosmology["transfer"], tuple(cosmology.get("m_nu_shares") or ())
    with contextlib.suppress(ImportError):
        importlib.import_module(PACKAGES[transfer])  # here, not in two threads at once
    parameters = {name: float(cosmology[name]) for name in SHAPE if cosmology.get(name) is not None}

    def compute() -> None:
        with contextlib.suppress(Exception):
            boltzmann_spline(transfer, shares, **parameters)

    thread = threading.Thread(target=compute, name=PACKAGES[transfer])
    thread.start()
    try:
        yield
    finally:
        thread.join()


@functools.lru_cache(maxsize=16)
def _spline(transfer: str, shares: Shares, *values: float) -> Spline:
    parameters = {**_DEFAULTS, **dict(zip(TRANSFER, values, strict=True)), "n_s": 1.0}
    if transfer == "class":
        k, power = class_power_table(_A_S, shares, **parameters)
    else:
        k, powers = camb_power_table((0.0,), "linear", _A_S, PART, shares, **parameters)
        power = powers[0]
    return log_spline(k, power / _A_S)
