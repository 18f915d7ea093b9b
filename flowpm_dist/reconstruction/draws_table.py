"""draws.csv: a row for each move of each chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.jobs.tables import Table
from flowpm_dist.reconstruction.chains import Move
from flowpm_dist.reconstruction.diagnostics import wave_numbers
from flowpm_dist.reconstruction.logs import MOVE_COLUMNS

Rows = list[dict[str, str]]


def mode_names() -> tuple[str, ...]:
    """Returns the columns of the modes that are watched: real parts, then imaginary ones."""
    waves = [f"({x} {y} {z})" for x, y, z in wave_numbers()]
    return (*(f"re{w}" for w in waves), *(f"im{w}" for w in waves))


def values_of(rows: Rows, names: Sequence[str], chains: int) -> np.ndarray:
    """Returns columns of the table, float64 [move, chain, name]."""
    values = np.array([[float(row[name]) for name in names] for row in rows])
    return values.reshape(len(rows) // chains, chains, len(names))


class DrawsTable:
    """The table while chains are moving.

    Args:
        path: of the file.
        parameters: names of those that are drawn along.
        first: number of the first move that will be added; later rows of the file are dropped.

    Raises:
        WriteError: the file cannot be written.
    """

    def __init__(self, path: Path, parameters: Sequence[str], first: int) -> None:
        self._table = Table(path, (*MOVE_COLUMNS, *parameters, *mode_names()), first)

    def add(
        self, move: Move, parameters: Mapping[str, Any], modes: np.ndarray, seconds: float
    ) -> None:
        """Adds a row for each chain.

        Args:
            move: of all chains.
            parameters: values of all chains by name.
            modes: of the largest scales [chain, mode].
            seconds: that the move took.

        Raises:
            WriteError: a row cannot be written.
        """
        draw = move.draw
        for chain in range(len(modes)):
            row = {
                "move": move.number,
                "chain": chain + 1,
                "drawn": move.drawn,
                "evaluations": draw.evaluations,
                "radius": move.phase.annealing.radius,
                "inflation": move.phase.annealing.inflation,
                "step": draw.step,
                "acceptance": float(draw.acceptance[chain]),
                "energy_error": float(draw.energy_error[chain]),
                "loss": float(draw.evaluation.loss[chain]),
                "data": float(draw.evaluation.data[chain]),
                "prior": float(draw.evaluation.prior[chain]),
                "seconds": seconds,
            }
            row |= {name: float(x[chain]) for name, x in parameters.items()}
            row |= dict(zip(mode_names(), map(float, modes[chain]), strict=True))
            self._table.add(row)

    def close(self) -> None:
        """Closes the file."""
        self._table.close()
