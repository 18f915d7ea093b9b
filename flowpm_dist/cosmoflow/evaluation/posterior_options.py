"""Which posteriors are fitted, by the names that a command is given; without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowpm_dist.io.errors import UserError
from flowpm_dist.options import checked_name
from flowpm_dist.posteriors.options import HEADS, HeadOptions

STATISTIC_NAMES = ("power", "histograms", "bispectrum")
"""Of `STATISTICS`, known without TensorFlow."""
MAP_STATISTIC_NAMES = ("power", "peaks", "histograms")
"""Of `MAP_STATISTICS`."""


def _growing(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(names[: count + 1] for count in range(len(names)))


BASELINES = _growing(STATISTIC_NAMES)
"""Sets of statistics: the power spectrum, with histograms, and with the bispectrum as well."""
MAP_BASELINES = _growing(MAP_STATISTIC_NAMES)
"""The same of maps: the angular power, with peaks, and with histograms as well."""


class PosteriorError(UserError):
    """A head or a statistic that there is not, or no posterior where one is asked for."""


@dataclass(frozen=True)
class PosteriorOptions:
    """What posteriors are fitted to, and how.

    Attributes:
        heads: names of heads, see `posteriors.HEADS`, each once.
        baselines: sets of statistics, see `STATISTICS` and `MAP_STATISTICS`, each once.
        fit: options of the fit of every head.
        of_maps: whether the statistics are those of maps.
    """

    heads: tuple[str, ...]
    baselines: tuple[tuple[str, ...], ...] = BASELINES
    fit: HeadOptions = HeadOptions()
    of_maps: bool = False

    def __post_init__(self) -> None:
        for field in ("heads", "baselines"):
            object.__setattr__(self, field, tuple(dict.fromkeys(getattr(self, field))))

    @property
    def statistics(self) -> tuple[str, ...]:
        """All statistics that are needed, each once."""
        return tuple(dict.fromkeys(name for names in self.baselines for name in names))


def posterior_options(
    heads: Sequence[str] | None = None,
    baselines: Sequence[str] | None = None,
    *,
    of_maps: bool = False,
) -> PosteriorOptions:
    """Returns what is fitted, by the names that a command is given.

    Modules of a user's own are looked for, but not imported.

    Args:
        heads: by default all of `HEADS`.
        baselines: sets of statistics such as "power+histograms"; by default `BASELINES`.
        of_maps: whether they are statistics of maps of weak lensing, by default `MAP_BASELINES`.

    Raises:
        PosteriorError: there is no such head or statistic.
    """
    sets = tuple(tuple(dict.fromkeys(names.split("+"))) for names in baselines or ())
    known, all_sets = STATISTIC_NAMES, BASELINES
    if of_maps:
        known, all_sets = MAP_STATISTIC_NAMES, MAP_BASELINES
    chosen = PosteriorOptions(tuple(heads or HEADS), sets or all_sets, of_maps=of_maps)
    try:
        for head in chosen.heads:
            checked_name(head, HEADS, "head")
        for statistic in chosen.statistics:
            checked_name(statistic, known, "statistic of maps" if of_maps else "statistic")
    except ValueError as error:
        raise PosteriorError(str(error)) from error
    return chosen
