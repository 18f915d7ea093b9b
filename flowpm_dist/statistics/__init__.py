"""Statistics of fields and maps; each rank bins the modes or cells of its own block.

The functions named `binned_...` and `soft_histogram` return tensors and are differentiable; the
others return numpy arrays, the same on every rank. To write another statistic, use `box_of`,
`Sample`, `mode_means`, `bin_contents`, `sum_over_universe` and `whole`; see
docs/howto/own_statistic.md.

Maps of the flat sky are tensors [..., x, y] that a rank has whole. `angular_power`, `peaks` and
`map_histogram` measure them; `binned_angular_power` and `soft_map_histogram` are differentiable.
`spherical_power` measures maps of the full sky.
"""

from flowpm_dist.statistics.angular_power import (
    AngularPower,
    angular_power,
    binned_angular_power,
    painting_window,
    spherical_power,
    spherical_theory_in_bins,
    theory_in_bins,
)
from flowpm_dist.statistics.bins import (
    Bins,
    bin_contents,
    bin_count,
    bin_edges,
    sum_over_universe,
)
from flowpm_dist.statistics.bispectrum import Bispectrum, binned_bispectrum, bispectrum
from flowpm_dist.statistics.comparison import (
    Comparison,
    binned_compare,
    compare,
    correlation_coefficient,
    cross_power,
    transfer_function,
)
from flowpm_dist.statistics.derivatives import Jacobian, jacobian
from flowpm_dist.statistics.histogram import (
    Histogram,
    Peaks,
    density_histogram,
    map_histogram,
    peaks,
    soft_histogram,
    soft_map_histogram,
)
from flowpm_dist.statistics.measure import Sample, box_of, mode_means, whole
from flowpm_dist.statistics.power import (
    Multipoles,
    PowerSpectrum,
    Wedges,
    binned_multipoles,
    binned_power,
    binned_wedges,
    multipoles,
    power_spectrum,
    power_wedges,
)

__all__ = [
    "AngularPower", "Bins", "Bispectrum", "Comparison", "Histogram", "Jacobian", "Multipoles",
    "Peaks", "PowerSpectrum", "Sample", "Wedges", "angular_power", "bin_contents", "bin_count",
    "bin_edges", "binned_angular_power", "binned_bispectrum", "binned_compare", "binned_multipoles",
    "binned_power", "binned_wedges", "bispectrum", "box_of", "compare", "correlation_coefficient",
    "cross_power", "density_histogram", "jacobian", "map_histogram", "mode_means", "multipoles",
    "painting_window", "peaks", "power_spectrum", "power_wedges", "soft_histogram",
    "soft_map_histogram", "spherical_power", "spherical_theory_in_bins", "sum_over_universe",
    "theory_in_bins", "transfer_function", "whole",
]  # fmt: skip
