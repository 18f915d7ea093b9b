"""Statistics of fields, measured where they lie: each rank bins its own modes or cells.

The functions named `binned_...` and `soft_histogram` take this rank's block and are differentiable;
the others take a `Field` and give numpy arrays, the same on every rank.
"""

from flowpm_dist.statistics.bins import bin_count
from flowpm_dist.statistics.comparison import (
    Comparison,
    binned_compare,
    compare,
    correlation_coefficient,
    cross_power,
    transfer_function,
)
from flowpm_dist.statistics.histogram import Histogram, density_histogram, soft_histogram
from flowpm_dist.statistics.multipoles import Multipoles, binned_multipoles, multipoles
from flowpm_dist.statistics.power import PowerSpectrum, binned_power, power_spectrum

__all__ = [
    "Comparison",
    "Histogram",
    "Multipoles",
    "PowerSpectrum",
    "bin_count",
    "binned_compare",
    "binned_multipoles",
    "binned_power",
    "compare",
    "correlation_coefficient",
    "cross_power",
    "density_histogram",
    "multipoles",
    "power_spectrum",
    "soft_histogram",
    "transfer_function",
]
