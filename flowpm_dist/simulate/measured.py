"""The statistics of a run's states: measured, written as tables, and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.errors import UserError, decoration
from flowpm_dist.io.files import write_json
from flowpm_dist.io.labelled import Labelled, Values
from flowpm_dist.observables.tracers import LineOfSight
from flowpm_dist.posteriors.features import features_of
from flowpm_dist.simulate.folder import FEATURES, STATISTICS
from flowpm_dist.simulate.options import ResultsOptions, SimulationOptions
from flowpm_dist.simulation.state import State
from flowpm_dist.statistics.register import ARGUMENTS, Statistic, short_name, statistic_named


def check_statistics(names: Sequence[str]) -> None:
    """Imports users' own statistics, so that a mistake ends the job before its work.

    Raises:
        UserError: a module has no such object, or it needs other arguments.
    """
    for name in names:
        try:
            statistic = statistic_named(name)
        except ValueError as error:
            raise UserError(f"results.statistics: {error}") from error
        if others := [each for each in statistic.needed if each not in ARGUMENTS]:
            raise UserError(
                f"results.statistics: {name} needs {', '.join(others)}: it can have a density, and "
                f"any of {', '.join(ARGUMENTS)}"
            )


def particle_noise(box: Box) -> float:
    """Returns the power of particles that are placed at random, V / N [(Mpc/h)^3]."""
    return box.volume / box.cells


def measured(
    statistic: Statistic,
    state: State,
    density: Field,
    results: ResultsOptions,
    axis: LineOfSight | None = None,
) -> Any:
    """Returns a statistic's result for a state of one universe. On all ranks together.

    Args:
        statistic: one that has an argument `axis` is measured in redshift space.
        state: the state.
        density: its density in real space.
        results: the section [results] of the run file.
        axis: the line of sight, in place of `results.line_of_sight`.
    """
    along: LineOfSight | None = (axis or results.line_of_sight) if statistic.takes("axis") else None
    if along is not None:
        density = state.density(redshift_space=along)
    twice = results.interlaced and statistic.takes("interlaced")
    shifted = state.density(redshift_space=along, shift=0.5) if twice else None
    noise = particle_noise(state.box) if results.subtract_shot_noise else 0.0
    window = None if results.window == "none" else results.window
    return statistic.measured(
        density, axis=along, interlaced=shifted, shot_noise=noise, window=window
    )


def write_statistics(
    folder: Path,
    options: SimulationOptions,
    state: State,
    density: Field,
    known: Mapping[Statistic, Any],
    warn: Callable[[str], None],
) -> None:
    """Measures the statistics of [results]; writes tables, figures and features. On all ranks.

    Args:
        folder: folder of the state's results.
        options: the run file.
        state, density: see `measured`.
        known: results that were measured with the same options.
        warn: shows warnings about what cannot be made of a result.

    Raises:
        WriteError: a file cannot be written. Only rank 0 raises it.
    """
    features = {}
    for name in options.results.statistics:
        statistic, short = statistic_named(name), short_name(name)
        if statistic in known:
            result = known[statistic]
        else:
            result = measured(statistic, state, density, options.results)
        if state.box.mesh.rank > 0:
            continue
        with decoration(f"features of {name}", warn):
            features[short] = features_of(name, statistic, result)[0].tolist()
        write_statistic(folder / STATISTICS / short, result, warn, figures=options.output.figures)
    if features:
        write_json(folder / STATISTICS / FEATURES, features)


def write_statistic(
    path: Path, result: Any, warn: Callable[[str], None], *, figures: bool = True
) -> None:
    """Writes the table of a statistic's result, and its figure. On rank 0.

    Args:
        path: the files without their endings, .csv and .png.
        result: what the statistic returned.
        warn: shows a warning about a figure that cannot be drawn.
        figures: whether to draw it.

    Raises:
        WriteError: the table cannot be written.
    """
    table = result if isinstance(result, Labelled) else Values(np.atleast_1d(result))
    table.write_csv(path.with_name(f"{path.name}.csv"))
    if figures and hasattr(table, "plot"):
        with drawing(path.with_name(f"{path.name}.png"), warn) as save:
            from flowpm_dist.io.figures import new_figure

            figure = new_figure(6.4, 4.4)
            table.plot(figure.add_subplot())
            save(figure)
