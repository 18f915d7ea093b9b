"""The optimiser and its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from anatomy import InputError

CHECKPOINT = "checkpoint.npz"


@dataclass
class Adam:
    """The optimiser of Kingma & Ba (2015), whose rate rises for 20 steps and falls as a cosine.

    Attributes:
        weights: the weights, by name.
        first, second: the moments of the gradients.
        step: the steps that were made.
    """

    weights: dict[str, np.ndarray]
    first: dict[str, np.ndarray] = field(default_factory=dict)
    second: dict[str, np.ndarray] = field(default_factory=dict)
    step: int = 0

    def rate(self, largest: float, steps: int) -> float:
        """Returns the learning rate of the next step."""
        rise = min(1.0, (self.step + 1) / 20)
        return largest * rise * (0.02 + 0.98 * (1 + np.cos(np.pi * self.step / steps)) / 2)

    def update(self, gradients: Sequence[np.ndarray], rate: float) -> None:
        """Makes a step. A gradient whose norm exceeds 1 is scaled to 1."""
        self.step += 1
        norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients))
        for (name, weight), gradient in zip(self.weights.items(), gradients, strict=True):
            g = np.asarray(gradient, np.float64) / max(1.0, norm)
            self.first[name] = 0.9 * self.first.get(name, 0) + 0.1 * g
            self.second[name] = 0.99 * self.second.get(name, 0) + 0.01 * g**2
            mean = self.first[name] / (1 - 0.9**self.step)
            spread = np.sqrt(self.second[name] / (1 - 0.99**self.step))
            self.weights[name] = weight - rate * mean / (spread + 1e-8)

    def save(self, path: Path) -> None:
        """Writes everything to a file, which appears when it is complete."""
        parts = {"weight": self.weights, "first": self.first, "second": self.second}
        arrays = {f"{part}/{k}": v for part, found in parts.items() for k, v in found.items()}
        half = path.with_suffix(".half.npz")
        np.savez(half, step=self.step, **arrays)
        os.replace(half, path)

    @classmethod
    def load(cls, path: Path, shapes: Mapping[str, Sequence[int]]) -> Adam:
        """Reads a file of `save`.

        Raises:
            InputError: it cannot be read, or holds another network.
        """
        try:
            with np.load(path) as held:
                parts = [
                    {k.partition("/")[2]: held[k] for k in held if k.startswith(f"{part}/")}
                    for part in ("weight", "first", "second")
                ]
                found = cls(*parts, step=int(held["step"]))
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise InputError(f"{path}: no trained network can be read from it: {error}") from None
        if {k: list(v.shape) for k, v in found.weights.items()} != dict(shapes):
            raise InputError(f"{path}: its network has other iterations, features or convolutions")
        return found
