"""The options of initial conditions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flowpm_dist.options import Options

Noise = Literal["cells", "nested"]
LptOrder = Literal[1, 2, 3]
CHUNK = 2**18
"""Wavenumbers at which the linear power is evaluated at a time; a value of each is 2 MiB."""


class InitialOptions(Options):
    """The options of initial conditions: the white noise, and the particles made from it.

    Attributes:
        lpt_order: the order of Lagrangian perturbation theory, 1, 2 or 3.
        noise: "cells" or "nested" (the same large scales on a finer grid), see `noise_function`.
        fixed_amplitude: whether each initial mode has its rms amplitude and only its phase varies.
    """

    lpt_order: LptOrder = Field(default=2, description="1, 2 or 3")
    noise: Noise = Field(
        default="cells", description='"cells" or "nested" (large scales that no finer grid changes)'
    )
    fixed_amplitude: bool = Field(default=False, description="true or false")
