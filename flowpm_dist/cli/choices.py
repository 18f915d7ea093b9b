"""Choices that commands which ask trained networks share."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class Weights(enum.StrEnum):
    """Weights of a training."""

    best = "best"
    last = "last"


Which = Annotated[
    Weights, typer.Option(help="The weights of the least validation loss, or of the last step.")
]
