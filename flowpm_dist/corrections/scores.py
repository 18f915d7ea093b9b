"""Scores of a correction: power and correlation with the truth, without it and with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from flowpm_dist.corrections.loss import SPACES, Compared, Pair
from flowpm_dist.corrections.options import SPACING
from flowpm_dist.cosmology.parameters import PARAMETERS
from flowpm_dist.evolution.corrections import LPT_ONLY, Range, force_cell
from flowpm_dist.evolution.integrators import name_of

SHOWN = (0.5, 1.0)
"""Wavenumbers whose scores are shown [h/Mpc]."""

RUNS = ("plain", "corrected")
"""Ends of the names of scores, of the runs."""
LEAST = {"P": 1e-3, "1 - r": 1e-4}
"""Changes of the errors that count in practice."""
FARTHER = "farther from the truth"

Row = Mapping[str, Any]


def score_rows(pair: Pair, plain: Compared, corrected: Compared) -> Iterator[Row]:
    """Yields a row of scores for each time and bin of a universe.

    Args:
        pair: the universe.
        plain, corrected: the universe without and with the correction.
    """
    box = pair.simulation.box
    for t, a in enumerate(pair.times):
        for i, wavenumber in enumerate(plain.k.tolist()):
            yield {
                "universe": pair.name,
                SPACING: force_cell(box.size, box.grid),
                "a": a,
                "k [h/Mpc]": wavenumber,
                **{
                    f"{prefix}{name} {run}": float(value[t, space, i])
                    for space, prefix in enumerate(SPACES[: plain.power.shape[1]])
                    for run, compared in zip(RUNS, (plain, corrected), strict=True)
                    for name, value in (
                        ("P", compared.power),
                        ("1 - r", 1.0 - compared.correlation),
                    )
                },
            }


def means_at(rows: Sequence[Row], wavenumbers: Sequence[float] = SHOWN) -> list[dict[str, Any]]:
    """Returns the means of universes of a cell and time, in the bins nearest to wavenumbers."""
    numbers = [name for name in rows[0] if name.endswith((" plain", " corrected"))]
    means = []
    for cell, a in sorted({(row[SPACING], row["a"]) for row in rows}):
        same = [row for row in rows if (row[SPACING], row["a"]) == (cell, a)]
        ks = sorted({row["k [h/Mpc]"] for row in same})
        near = {min(ks, key=lambda k: abs(k - x)) for x in wavenumbers if x <= ks[-1] * 1.1}
        for k in sorted(near):
            here = [row for row in same if row["k [h/Mpc]"] == k]
            values = {name: float(np.mean([row[name] for row in here])) for name in numbers}
            means.append({SPACING: cell, "a": a, "k [h/Mpc]": k, **values})
    return means


def verdict(rows: Sequence[Row]) -> str:
    """Returns whether universes are nearer to the truth with a correction than without.

    The error of P is the root mean square of P over the truth's minus 1, over all bins and times of
    a universe. The error of the phases is the mean of 1 - r. Each universe is compared with itself.
    An error is called smaller or larger where its mean change is beyond Student's t at 95 % and
    above the `LEAST` of practice; else it is not decided, as always with one universe. The
    universes also chose the iteration, so that a gain is called one somewhat too often.

    Args:
        rows: of `score_rows`, of all universes held out.
    """
    count, texts = len({(row["universe"], row[SPACING]) for row in rows}), []
    for name, column, mean in (("P", "P", _rms_from_one), ("phases", "1 - r", np.mean)):
        plain, corrected = (_of_universes(rows, f"{column} {run}", mean) for run in RUNS)
        change, word = corrected - plain, "not decided"
        error = np.std(change, ddof=1) / np.sqrt(count) if count > 1 else np.inf
        least = max(LEAST[column], error * stdtrit(max(1, count - 1), 0.975))
        if abs(change.mean()) > least:
            word = "nearer" if change.mean() < 0 else FARTHER
        numbers = f"{plain.mean():.2g} -> {corrected.mean():.2g}"
        numbers += f", by {change.mean():+.2g} +- {error:.1g}" if count > 1 else ""
        texts.append(f"{name} {word} (error {numbers})")
    universes = f"{count} universe{'s' * (count > 1)} held out, which also chose the iteration"
    return f"{', '.join(texts)}; {universes}"


def _rms_from_one(ratio: np.ndarray) -> float:
    return float(np.sqrt(np.mean((ratio - 1.0) ** 2)))


def _of_universes(
    rows: Sequence[Row], column: str, mean: Callable[[np.ndarray], Any]
) -> np.ndarray:
    """Returns the mean of a column of each universe."""
    values: dict[Any, list[float]] = {}
    for row in rows:
        values.setdefault((row["universe"], row[SPACING]), []).append(row[column])
    return np.array([mean(np.array(each)) for each in values.values()])


def range_of(pairs: Sequence[Pair], structure: str) -> Range:
    """Returns the range of the runs that a correction is learned from.

    Args:
        pairs: the universes; their runs have the same options, in cells of a size the same steps.
        structure: see `LearningOptions`.
    """
    simulation, of_lpt = pairs[0].simulation, structure == LPT_ONLY
    options, edges = simulation.options, simulation.edges
    meshes = [pair.simulation.box.finer(options.mesh_factor) for pair in pairs]
    cells = [force_cell(mesh.size, mesh.grid) for mesh in meshes]
    values = [(pair.cosmology or pair.simulation.cosmology).numbers() for pair in pairs]
    names = [n for n in values[0] if n in PARAMETERS and all(n in each for each in values)]
    times = [a for pair in pairs for a in pair.times]
    return Range(
        integrator=LPT_ONLY if of_lpt else name_of(options.integrator),
        mesh_factor=options.mesh_factor,
        deconvolve=options.deconvolve,
        force_gradient=options.force_gradient,
        steps=0 if of_lpt else _steps_of(cells, pairs),
        a=(float(edges[0]), float(edges[-1])),
        cell=(min(cells), max(cells)),
        cosmology={n: (min(v[n] for v in values), max(v[n] for v in values)) for n in names},
        times=(min(times), max(times)),
    )


def _steps_of(cells: Sequence[float], pairs: Sequence[Pair]) -> int | tuple[tuple[float, int], ...]:
    """Returns the number of steps, for each size of a cell if they are not the same."""
    steps = {
        (cell, len(pair.simulation.edges) - 1) for cell, pair in zip(cells, pairs, strict=True)
    }
    return tuple(sorted(steps)) if len({number for _, number in steps}) > 1 else steps.pop()[1]
