"""The halo that particles must not leave: how wide it has to be, and the error if it is not."""

from __future__ import annotations

import math

HALO_MARGIN = 1.2
"""How much further than linear theory's largest displacement a suggested halo reaches."""


class HaloError(RuntimeError):
    """A particle strayed beyond the halo. Raised on every rank, before any mass is lost.

    Attributes:
        needed: halo that should do for the whole run [particle spacings].
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


def check_finite(reach: float, label: str) -> None:
    """Checks that displacements are finite, from their reach, which is infinite where one is not.

    Args:
        reach: largest displacement, as `MaxDisplacement` gives it.
        label: of this moment of the run, for the message.

    Raises:
        FloatingPointError: one is not.
    """
    if not math.isfinite(reach):
        raise FloatingPointError(f"{label}: the displacement has values that are not finite")


def check_halo(reach: float, halo: int, label: str, growth: float = 1.0) -> None:
    """Checks that particles that stray `reach` cells are all within a halo.

    Args:
        reach: largest displacement [particle spacings].
        halo: [particle spacings].
        label: of this moment of the run, for the message.
        growth: of linear displacements from here to the end of the run, for the halo to suggest.

    Raises:
        FloatingPointError: the displacement is not finite.
        HaloError: names the step, the reach and the halo that would do.
    """
    check_finite(reach, label)
    if reach >= halo:
        whole_run = suggested_halo(reach, growth)
        raise HaloError(
            f"{label}: a particle is {reach:.2f} cells from its lattice site, beyond the halo of "
            f"{halo}; halo = {needed_halo(reach)} would do for this step, "
            f"halo = {whole_run} should for the whole run",
            whole_run,
        )


def needed_halo(reach: float) -> int:
    """Returns the smallest halo [particle spacings] for particles that stray `reach` cells."""
    return math.floor(reach) + 1


def suggested_halo(reach: float, growth: float = 1.0) -> int:
    """Returns a halo [particle spacings] that should do for a whole run.

    Args:
        reach: largest displacement now [particle spacings].
        growth: of linear displacements from now to the end of the run.
    """
    return needed_halo(HALO_MARGIN * reach * growth) + 1
