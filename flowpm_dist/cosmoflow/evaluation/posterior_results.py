"""The results of judging posteriors, with their tables and figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from flowpm_dist.cosmoflow.scores.paired import Difference, MeanDifference
from flowpm_dist.posteriors.calibration import LEVELS, Calibration

FILES = ("posteriors.md", "posterior_samples.npz", "ranks.png", "tarp.png")
SUSPICIOUS = 0.01
"""Probability with which some posterior is said to be not right if all are: a P-value is compared
with this over the number of tests (Bonferroni).
"""
VALIDATION = "validation"
"""The split that heads are chosen by: its P-values would say nothing."""

Key = tuple[str, str]
"""Name of the features, and of the head."""


@dataclass(frozen=True)
class PosteriorResults:
    """How good posteriors are.

    Attributes:
        main: the network's, of the head that was asked for last.
        found: calibration of each.
        rmse_error: one standard error of each RMSE, [p].
        differences: of `main` from others: in ln(q / prior), and of each parameter's mean.
        chosen: which features each posterior of a network uses.
        arrays: truth, samples and ln(q / prior) of `main`, to be kept.
        judged_by: the split.
    """

    main: Key
    found: Mapping[Key, Calibration]
    rmse_error: Mapping[Key, np.ndarray]
    differences: Mapping[Key, tuple[MeanDifference, Mapping[str, Difference]]]
    chosen: Mapping[str, str]
    arrays: Mapping[str, np.ndarray]
    judged_by: str = "test"

    @property
    def _names(self) -> tuple[str, ...]:
        return self.found[self.main].names

    @property
    def tested(self) -> bool:
        """Whether P-values mean something: the volumes have chosen nothing."""
        return self.judged_by != VALIDATION

    def _p(self, value: float) -> str:
        return f"{value:.2g}" if self.tested else "-"

    def table(self) -> Table:
        """Returns a table for a terminal."""
        drawn = Table(box=SIMPLE)
        for heading in ("posterior of", "head", "ln(q / prior)", "least P of ranks", "P of TARP"):
            is_text = heading in ("posterior of", "head")
            drawn.add_column(heading, justify="left" if is_text else "right")
        for (name, head), one in self.found.items():
            tests = self._p(one.ranks_p.min()), self._p(one.tarp_p)
            drawn.add_row(name, head, _with_error(one.gain, one.gain_error), *tests)
        return drawn

    def sentences(self) -> list[str]:
        """Returns sentences on what the table does not show."""
        said = self._wrong() if self.tested else []
        for (name, head), (gain, _) in self.differences.items():
            said.append(
                f"ln(q / prior) of {self.main[0]} ({self.main[1]}) minus that of {name} ({head}): "
                f"{gain.value:+.3f} ± {gain.error:.3f}."
            )
        return said

    def _wrong(self) -> list[str]:
        """Returns a sentence for each posterior that fails a test, of all that were made."""
        count = sum(len(one.ranks_p) + 1 for one in self.found.values())
        said = []
        for (name, head), one in self.found.items():
            tests = {
                "ranks": dict(zip(one.names, one.ranks_p.tolist(), strict=True)),
                "tarp": {"all parameters together": one.tarp_p},
            }
            for kind, values in tests.items():
                wrong = {n: p for n, p in values.items() if p < SUSPICIOUS / count}
                drawn = f"{kind}.png" if head == self.main[1] else FILES[0]
                if wrong:
                    said.append(
                        f"Posteriors of {name} ({head}) are not right for {', '.join(wrong)}: P = "
                        f"{min(wrong.values()):.1g} is below {SUSPICIOUS:g} / {count}, the number "
                        f"of tests; see {drawn}."
                    )
        return said

    def markdown(self) -> str:
        """Returns the tables in Markdown."""
        rows = [["posterior of", "head", "ln(q / prior)", "TARP P"]]
        for name in self._names:
            rows[0] += [
                f"{name} RMSE",
                "width",
                *(f"in {level:.1%}" for level in LEVELS),
                "ranks P",
            ]
        for (name, head), one in self.found.items():
            row = [name, head, _with_error(one.gain, one.gain_error), self._p(one.tarp_p)]
            for i, of_rmse in enumerate(self.rmse_error[name, head]):
                row += [f"{one.rmse[i]:.3g}±{of_rmse:.1g}", f"{one.width[i]:.3g}"]
                for share, error in zip(one.coverage[:, i], one.coverage_error[:, i], strict=True):
                    row.append(_with_error(share, error))
                row.append(self._p(one.ranks_p[i]))
            rows.append(row)
        pairs = [["posterior of", "head", "ln(q / prior) higher by", "in"]]
        pairs[0] += [f"{name} RMSE lower by" for name in self._names]
        for (name, head), (gain, each) in self.differences.items():
            row = [name, head, _with_error(gain.value, gain.error), f"{gain.larger:.0%}"]
            row += [f"{each[n].rmse:.2g}±{each[n].rmse_error:.1g}" for n in self._names]
            pairs.append(row)
        main = self.found[self.main]
        used = "".join(f"- {name} uses the {part}.\n" for name, part in self.chosen.items())
        return (
            f"On {main.count} volumes of {main.groups} universes:\n\n{_markdown(rows)}\n"
            f"{self.main[0]} ({self.main[1]}) beside the others, by a paired bootstrap:\n\n"
            f"{_markdown(pairs)}\n{used}"
        )

    def numbers(self) -> dict[str, Any]:
        """Returns all numbers as JSON takes them."""
        return {
            "main": list(self.main),
            "scores": [
                {"of": name, "head": head, **self._scores(name, head)} for name, head in self.found
            ],
            "differences": [
                {
                    "from": name,
                    "head": head,
                    "gain": dataclasses.asdict(gain),
                    **{n: dataclasses.asdict(d) for n, d in each.items()},
                }
                for (name, head), (gain, each) in self.differences.items()
            ],
            "features": dict(self.chosen),
        }

    def _scores(self, name: str, head: str) -> dict[str, Any]:
        errors = dict(zip(self._names, self.rmse_error[name, head].tolist(), strict=True))
        scores = self.found[name, head].as_dict() | {"rmse_error": errors}
        return {key: v for key, v in scores.items() if self.tested or not key.endswith("_p")}

    def write_into(self, folder: Path) -> None:
        """Writes tables, samples and figures into a folder."""
        from flowpm_dist.io.figure_style import save_figure
        from flowpm_dist.posteriors import figures

        (folder / FILES[0]).write_text(self.markdown(), encoding="utf-8")
        np.savez(folder / FILES[1], **self.arrays)  # type: ignore[arg-type]
        shown = {f"{n}\n{h}": one for (n, h), one in self.found.items() if h == self.main[1]}
        save_figure(figures.rank_figure(shown, tested=self.tested), folder / FILES[2])
        one_line = {name.replace("\n", ", "): one for name, one in shown.items()}
        save_figure(figures.tarp_figure(one_line, tested=self.tested), folder / FILES[3])


def _with_error(value: float, error: float) -> str:
    return f"{value:.3f}±{error:.3f}"


def _markdown(rows: list[list[str]]) -> str:
    ruled = [rows[0], ["---", "---", *["---:"] * (len(rows[0]) - 2)], *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in ruled)
