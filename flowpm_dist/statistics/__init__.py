"""Statistics of fields, measured where they lie: each rank bins its own modes or cells.

The functions named `binned_...` and `soft_histogram` give tensors and are differentiable; the
others give numpy arrays, the same on every rank. A statistic of your own is built on `box_of`,
`Sample`, `mode_means`, `bin_contents` and `whole` (docs/extending.md).

Maps of the flat sky, tensors [..., x, y] that a rank has whole, are measured by `angular_power`,
`peaks` and `map_histogram`, and differentiably by `binned_angular_power` and `soft_map_histogram`;
those of the whole sky by `spherical_power`.
"""

from flowpm_dist.statistics.angular_power import (
    AngularPower,
    angular_power,
    binned_angular_power,
    theory_in_bins,
)
from flowpm_dist.statistics.bins import Bins, bin_contents, bin_count, bin_edges
from flowpm_dist.statistics.bispectrum import Bispectrum, binned_bispectrum, bispectrum
from flowpm_dist.statistics.comparison import (
    Comparison,
    binned_compare,
    compare,
    correlation_coefficient,
    cross_power,
    transfer_function,
)
from flowpm_dist.statistics.histogram import Histogram, density_histogram, soft_histogram
from flowpm_dist.statistics.maps import Peaks, map_histogram, peaks, soft_map_histogram
from flowpm_dist.statistics.measure import Sample, box_of, mode_means, whole
from flowpm_dist.statistics.multipoles import Multipoles, binned_multipoles, multipoles
from flowpm_dist.statistics.power import PowerSpectrum, binned_power, power_spectrum
from flowpm_dist.statistics.spherical_power import (
    painting_window,
    spherical_power,
    spherical_theory_in_bins,
)
from flowpm_dist.statistics.wedges import Wedges, binned_wedges, power_wedges

__all__ = [
    "AngularPower",
    "Bins",
    "Bispectrum",
    "Comparison",
    "Histogram",
    "Multipoles",
    "Peaks",
    "PowerSpectrum",
    "Sample",
    "Wedges",
    "angular_power",
    "bin_contents",
    "bin_count",
    "bin_edges",
    "binned_angular_power",
    "binned_bispectrum",
    "binned_compare",
    "binned_multipoles",
    "binned_power",
    "binned_wedges",
    "bispectrum",
    "box_of",
    "compare",
    "correlation_coefficient",
    "cross_power",
    "density_histogram",
    "map_histogram",
    "mode_means",
    "multipoles",
    "painting_window",
    "peaks",
    "power_spectrum",
    "power_wedges",
    "soft_histogram",
    "soft_map_histogram",
    "spherical_power",
    "spherical_theory_in_bins",
    "theory_in_bins",
    "transfer_function",
    "whole",
]
