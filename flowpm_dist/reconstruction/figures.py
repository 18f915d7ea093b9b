"""Figures of a reconstruction: slabs, correlation with the truth, the loss, and the chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from flowpm_dist.io.figures import (
    COLOURS,
    LOW_MAP,
    MEASURED,
    MUTED,
    PLAIN_LEGEND,
    SMALL_TITLE,
    THEORY,
    add_colour_bar,
    draw_measured,
    new_figure,
    plain_log_ticks,
    style_axes,
)
from flowpm_dist.io.labels import WAVENUMBER

SIGNED = "RdBu_r"
"""Colours of maps around 0."""

MOST_MARKED = 12
"""Greatest number of stages of a search for which each has a label."""

Panels = tuple[Mapping[str, np.ndarray], Normalize, str, str]
"""Maps on one colour scale: maps [x, y] by title, NaN where there is nothing; the colour scale, the
label of the bar, and the name of the colours.
"""

LEAST = 0.05
"""Least density of a logarithmic colour scale [mean density]; less is shown as empty."""


def slabs_figure(
    maps: Mapping[str, np.ndarray], size: tuple[float, float], thickness: float, a: float
) -> Figure:
    """Returns a figure of densities side by side on one colour scale, and of the residual.

    Args:
        maps: densities of a slab by title, and the "residual", the data minus the reconstruction,
            [nx, ny] [mean density]; NaN where nothing is observed.
        size: the size of the box along x and y [Mpc/h].
        thickness: the thickness of the slab along z [Mpc/h].
        a: the scale factor.
    """
    densities = {title: each for title, each in maps.items() if title != "residual"}
    norm, residual = _norm(densities), maps["residual"]
    # A logarithm hides what is not above 0.
    densities = {n: np.maximum(each, float(norm.vmin or 0)) for n, each in densities.items()}
    most = float(np.nanpercentile(np.abs(residual), 99.5)) or 1.0
    around = Normalize(-most, most)
    figure = _panels(
        (
            (densities, norm, "density / mean density", "inferno"),
            ({"data - reconstruction": residual}, around, "difference / mean density", SIGNED),
        ),
        size,
        r"[Mpc/$h$]",
    )
    thick = f"mean over {thickness:.3g} Mpc/$h$"
    figure.suptitle(f"{thick} at $z = {1 / a - 1:.3g}$", **SMALL_TITLE)
    return figure


def maps_figure(maps: Mapping[str, np.ndarray], field_of_view: float, source: str) -> Figure:
    """Returns a figure of maps of the convergence: those without noise, then those with noise.

    Args:
        maps: "truth" where it is known, "data" and "kappa", which was found, [x, y] [1].
        field_of_view: side of the maps [deg].
        source: name of the sources.
    """
    smooth = {"truth": maps["truth"]} if "truth" in maps else {}
    smooth["reconstruction"] = maps["kappa"]
    noisy = {"data": maps["data"], "data - reconstruction": maps["data"] - maps["kappa"]}
    groups = []
    for each in (smooth, noisy):
        most = float(np.percentile(np.abs(np.stack(list(each.values()))), 99.7)) or 1e-12
        groups.append((each, Normalize(-most, most), r"convergence $\kappa$", SIGNED))
    figure = _panels(groups, (field_of_view, field_of_view), "[deg]")
    figure.suptitle(f"sources: {source}", **SMALL_TITLE)
    return figure


def _panels(groups: Sequence[Panels], size: tuple[float, float], unit: str) -> Figure:
    """Returns a figure of groups of maps side by side, or one below the other where they are low.

    Args:
        groups: the groups in the order of the panels.
        size: the size of the maps along x and y.
        unit: its unit.
    """
    count, aspect = sum(len(maps) for maps, *_ in groups), size[1] / size[0]
    columns = 1 if aspect < LOW_MAP else 2 if count == 4 and aspect < 2 else count
    rows = -(-count // columns)
    width = 9.0 if columns == 1 else 4.2 / np.sqrt(max(aspect, 1))
    height = float(np.clip(width * aspect, 1.0, 12)) + (1.7 if columns == 1 else 0.7)
    figure = new_figure((width + 1.3) * columns, height * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    panels = iter(grid.ravel())
    for maps, norm, label, colours in groups:
        for title, values in maps.items():
            axes = next(panels)
            axes.set_facecolor("0.8")
            extent = (0, size[0], 0, size[1])
            image = axes.imshow(values.T, colours, norm, origin="lower", extent=extent)
            axes.set_title(title, fontsize=10)
            axes.set(xlabel=f"$x$  {unit}", ylabel=f"$y$  {unit}")
            axes.label_outer()
            add_colour_bar(axes, image, label, aspect)
    return figure


def _norm(densities: Mapping[str, np.ndarray]) -> Normalize:
    """Returns the colour scale of the maps without noise.

    It is logarithmic, unless linear theory has made a density negative.
    """
    maps = [values for title, values in densities.items() if title != "data"]
    low, high = np.percentile(np.concatenate(maps), [1, 99.8])
    if min(values.min() for values in maps) < 0:
        return Normalize(low, max(high, low + 1e-3))
    low = max(low, LEAST)
    return LogNorm(low, max(high, 2 * low))


def correlation_figure(
    k: np.ndarray, fields: Mapping[str, tuple[np.ndarray, np.ndarray]], nyquist: float
) -> Figure:
    """Returns a figure of the correlation with the truth above and the transfer function below.

    Args:
        k: wavenumbers [h/Mpc].
        fields: r(k) and T(k) = sqrt(P / P of the truth) of each field, by name.
        nyquist: the Nyquist wavenumber of the grid [h/Mpc].
    """
    figure = new_figure(6.4, 6.4)
    top, below = figure.subplots(2, 1, sharex=True)
    for (name, (r, t)), colour in zip(fields.items(), (MEASURED, THEORY), strict=False):
        draw_measured(top, k, r, colour=colour, label=name)
        draw_measured(below, k, t, colour=colour, label=name)
    top.set(
        xscale="log",
        ylabel=r"correlation $r(k)$ with the truth",
        ylim=(min(0, *(1.05 * float(np.nanmin(r)) for r, _ in fields.values())), 1.05),
    )
    below.set(xlabel=WAVENUMBER, ylabel=r"$T(k) = \sqrt{P / P_{\rm truth}}$")
    below.set_ylim(0, max(1.3, *(1.05 * float(np.nanmax(t)) for _, t in fields.values())))
    for axes in (top, below):
        axes.axhline(1, color=MUTED, lw=1)
        axes.axvline(nyquist, color=MUTED, lw=1, ls=":", label="Nyquist of the grid")
        style_axes(axes)
    plain_log_ticks(below.xaxis)
    top.legend(loc="lower left", **PLAIN_LEGEND)
    return figure


def loss_figure(
    rows: Sequence[Mapping[str, str]], observed: int, cells: int, outcome: str
) -> Figure:
    """Returns a figure of both parts of the loss against the number of gradient evaluations.

    Args:
        rows: the rows of iterations.csv.
        observed: the number of observed cells.
        cells: the number of all cells.
        outcome: why the search ended.
    """
    stages: list[tuple[int, float, float]] = []
    before, stage = 0, ""
    for row in rows:
        if row["stage"] != stage:
            stages.append((before, float(row["radius"]), float(row["inflation"])))
        before, stage = int(row["evaluations"]), row["stage"]
    evaluations = [int(row["evaluations"]) for row in rows]
    data = [float(row["data"]) / observed for row in rows]
    prior = [float(row["prior"]) / cells for row in rows]
    figure = new_figure(7.0, 4.4)
    axes = figure.add_subplot()
    axes.plot(evaluations, data, color=MEASURED, lw=1.4, label="data, each observed cell")
    axes.plot(evaluations, prior, color=THEORY, lw=1.4, label="prior, each cell")
    axes.axhline(0.5, color=MUTED, lw=1, ls="--", label="1/2: the truth under its noise")
    axes.set(yscale="log", xlabel="gradient evaluations", ylabel="minus the log probability")
    for begin, radius, inflation in stages:
        axes.axvline(begin, color=MUTED, lw=0.8, ls=":")
        if len(stages) <= MOST_MARKED:
            axes.annotate(
                f"{radius:.3g} Mpc/$h$, noise x {inflation:.3g}",
                (begin, 0.98),
                (3, 0),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                rotation=90,
                fontsize=7,
                color=MUTED,
                va="top",
            )
    axes.set_title(outcome, **SMALL_TITLE)
    axes.set_xlim(0, None)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.3)  # room for the labels
    style_axes(axes)
    axes.legend(loc="lower right", **PLAIN_LEGEND)
    return figure


def chains_figure(
    traces: Mapping[str, np.ndarray], truth: Mapping[str, float], warm_up: int
) -> Figure:
    """Returns a figure of the chains: the trace of each number and the histogram of its draws.

    Args:
        traces: the value after each move of each chain by name, [move, chain].
        truth: the true values by name, where they are known.
        warm_up: the number of moves before the draws.
    """
    figure = new_figure(9.0, 1.0 + 1.8 * len(traces))
    panels = figure.subplots(
        len(traces), 2, sharey="row", squeeze=False, width_ratios=(4, 1), sharex="col"
    )
    for (left, right), (name, moves) in zip(panels, traces.items(), strict=True):
        drawn = moves[warm_up:]
        bins = np.linspace(drawn.min(), drawn.max(), 25) if len(drawn) else 1
        for chain, values in enumerate(moves.T):
            colour = COLOURS[chain % len(COLOURS)]
            left.plot(np.arange(1, len(values) + 1), values, lw=0.8, color=colour)
            right.hist(
                values[warm_up:], bins=bins, orientation="horizontal", histtype="step", color=colour
            )
        left.axvspan(0, warm_up + 0.5, color="0.9", lw=0)
        if name in truth:
            for axes in (left, right):
                axes.axhline(truth[name], color=MUTED, lw=1, ls="--")
        left.set_ylabel(name)
        left.set_xlim(0, len(moves) + 1)
        style_axes(left)
        right.set_xticks([])
    panels[-1][0].set_xlabel("move; grey: warm-up, dashed: the truth where it is known")
    panels[0][1].set_title("draws", fontsize=10)
    return figure
