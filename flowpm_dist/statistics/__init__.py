"""Statistics of fields and maps; each rank bins the modes or cells of its own block.

The functions named `binned_...` and `soft_histogram` return tensors and are differentiable; the
others return numpy arrays, the same on every rank. To write another statistic, use `box_of`,
`Sample`, `mode_means`, `bin_contents`, `sum_over_universe` and `whole`; see
docs/howto/own_statistic.md.

Maps of the flat sky are tensors [..., x, y] that a rank has whole. `angular_power`, `peaks` and
`map_histogram` measure them; `binned_angular_power` and `soft_map_histogram` are differentiable.
`spherical_power` measures maps of the full sky.
"""

from typing import TYPE_CHECKING

from meshimpl.imports import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see
    from flowpm_dist.statistics.angular_spectra import AngularPower as AngularPower
    from flowpm_dist.statistics.angular_spectra import angular_power as angular_power
    from flowpm_dist.statistics.angular_spectra import binned_angular_power as binned_angular_power
    from flowpm_dist.statistics.angular_spectra import painting_window as painting_window
    from flowpm_dist.statistics.angular_spectra import spherical_power as spherical_power
    from flowpm_dist.statistics.angular_spectra import (
        spherical_theory_in_bins as spherical_theory_in_bins,
    )
    from flowpm_dist.statistics.angular_spectra import theory_in_bins as theory_in_bins
    from flowpm_dist.statistics.bins import Bins as Bins
    from flowpm_dist.statistics.bins import bin_contents as bin_contents
    from flowpm_dist.statistics.bins import bin_count as bin_count
    from flowpm_dist.statistics.bins import bin_edges as bin_edges
    from flowpm_dist.statistics.bins import sum_over_universe as sum_over_universe
    from flowpm_dist.statistics.bispectra import Bispectrum as Bispectrum
    from flowpm_dist.statistics.bispectra import binned_bispectrum as binned_bispectrum
    from flowpm_dist.statistics.bispectra import bispectrum as bispectrum
    from flowpm_dist.statistics.comparison import Comparison as Comparison
    from flowpm_dist.statistics.comparison import binned_compare as binned_compare
    from flowpm_dist.statistics.comparison import compare as compare
    from flowpm_dist.statistics.comparison import correlation_coefficient as correlation_coefficient
    from flowpm_dist.statistics.comparison import cross_power as cross_power
    from flowpm_dist.statistics.comparison import transfer_function as transfer_function
    from flowpm_dist.statistics.correlation import CorrelationFunction as CorrelationFunction
    from flowpm_dist.statistics.correlation import CorrelationMultipoles as CorrelationMultipoles
    from flowpm_dist.statistics.correlation import correlation_function as correlation_function
    from flowpm_dist.statistics.correlation import correlation_multipoles as correlation_multipoles
    from flowpm_dist.statistics.derivatives import Jacobian as Jacobian
    from flowpm_dist.statistics.derivatives import jacobian as jacobian
    from flowpm_dist.statistics.histogram import Histogram as Histogram
    from flowpm_dist.statistics.histogram import Peaks as Peaks
    from flowpm_dist.statistics.histogram import density_histogram as density_histogram
    from flowpm_dist.statistics.histogram import map_histogram as map_histogram
    from flowpm_dist.statistics.histogram import peaks as peaks
    from flowpm_dist.statistics.histogram import soft_histogram as soft_histogram
    from flowpm_dist.statistics.histogram import soft_map_histogram as soft_map_histogram
    from flowpm_dist.statistics.measure import Sample as Sample
    from flowpm_dist.statistics.measure import box_of as box_of
    from flowpm_dist.statistics.measure import mode_means as mode_means
    from flowpm_dist.statistics.measure import whole as whole
    from flowpm_dist.statistics.power import Multipoles as Multipoles
    from flowpm_dist.statistics.power import PowerSpectrum as PowerSpectrum
    from flowpm_dist.statistics.power import Wedges as Wedges
    from flowpm_dist.statistics.power import binned_multipoles as binned_multipoles
    from flowpm_dist.statistics.power import binned_power as binned_power
    from flowpm_dist.statistics.power import binned_wedges as binned_wedges
    from flowpm_dist.statistics.power import multipoles as multipoles
    from flowpm_dist.statistics.power import power_spectrum as power_spectrum
    from flowpm_dist.statistics.power import power_wedges as power_wedges
    from flowpm_dist.statistics.register import MAP_STATISTICS as MAP_STATISTICS
    from flowpm_dist.statistics.register import STATISTICS as STATISTICS
    from flowpm_dist.statistics.register import Statistic as Statistic

_HOMES = {
    "AngularPower": "angular_spectra",
    "angular_power": "angular_spectra",
    "binned_angular_power": "angular_spectra",
    "painting_window": "angular_spectra",
    "spherical_power": "angular_spectra",
    "spherical_theory_in_bins": "angular_spectra",
    "theory_in_bins": "angular_spectra",
    "Bins": "bins",
    "bin_contents": "bins",
    "bin_count": "bins",
    "bin_edges": "bins",
    "sum_over_universe": "bins",
    "Bispectrum": "bispectra",
    "binned_bispectrum": "bispectra",
    "bispectrum": "bispectra",
    "Comparison": "comparison",
    "binned_compare": "comparison",
    "compare": "comparison",
    "correlation_coefficient": "comparison",
    "cross_power": "comparison",
    "transfer_function": "comparison",
    "CorrelationFunction": "correlation",
    "CorrelationMultipoles": "correlation",
    "correlation_function": "correlation",
    "correlation_multipoles": "correlation",
    "Jacobian": "derivatives",
    "jacobian": "derivatives",
    "Histogram": "histogram",
    "Peaks": "histogram",
    "density_histogram": "histogram",
    "map_histogram": "histogram",
    "peaks": "histogram",
    "soft_histogram": "histogram",
    "soft_map_histogram": "histogram",
    "Sample": "measure",
    "box_of": "measure",
    "mode_means": "measure",
    "whole": "measure",
    "Multipoles": "power",
    "PowerSpectrum": "power",
    "Wedges": "power",
    "binned_multipoles": "power",
    "binned_power": "power",
    "binned_wedges": "power",
    "multipoles": "power",
    "power_spectrum": "power",
    "power_wedges": "power",
    "MAP_STATISTICS": "register",
    "STATISTICS": "register",
    "Statistic": "register",
}

__all__ = sorted(_HOMES)
if not TYPE_CHECKING:  # where it would accept any name
    __getattr__, __dir__ = lazy_names(
        __name__, _HOMES, without_tensorflow=["MAP_STATISTICS", "STATISTICS", "Statistic"]
    )
