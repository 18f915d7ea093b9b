"""The time steps of a run, and as options of a run file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import override

from flowpm_dist.cosmology.background import A_MAX
from flowpm_dist.options import Options, Problem, constructed, listed

if TYPE_CHECKING:
    from flowpm_dist.cosmology.parameters import Cosmology
    from flowpm_dist.cosmology.theory import Universe

SAME = 1e-6
"""Relative difference below which two scale factors are the same; rounded to float32 they are."""


def _increasing(edges: tuple[float, ...]) -> tuple[float, ...]:
    for before, after in itertools.pairwise(edges):
        if after <= before:
            raise ValueError(f"{before:g} is followed by {after:g}")
    return edges


ScaleFactor = Annotated[float, Field(ge=0, le=A_MAX)]
Edges = Annotated[
    tuple[ScaleFactor, ...],
    Field(min_length=2),
    BeforeValidator(listed),
    AfterValidator(_increasing),
]


MOST_STEPS = 100_000


class StepOptions(Options):
    """The steps of a run: `steps` of them between two scale factors, or their `edges`.

    Attributes:
        a_start, a_stop: the scale factors at which the first step begins and the last one ends [1].
        steps: the number of steps.
        spacing: the quantity in which steps are equal: "a", "log a" or "D" (the growth factor).
        edges: the scale factors at which steps begin and end [1]; they replace all other options.
    """

    a_start: float = Field(
        default=0.1, ge=0, lt=A_MAX, description="a scale factor from 0, below 2"
    )
    a_stop: float = Field(
        default=1.0, gt=0, le=A_MAX, description="a scale factor above 0, at most 2"
    )
    steps: int = Field(default=10, ge=1, description="a whole number of at least 1")
    spacing: Literal["a", "log a", "D"] = Field(
        default="a", description='what the steps are equal in: "a", "log a" or "D"'
    )
    edges: Edges | None = Field(
        default=None, description="a list of two or more increasing scale factors from 0 to 2"
    )

    @override
    def problems(self) -> Iterator[Problem]:
        if self.steps > MOST_STEPS:
            yield self.problem("steps", f"must be at most {MOST_STEPS}")
        if self.edges is None and self.a_start >= self.a_stop:
            yield self.problem("a_start", f"must be below a_stop = {self.a_stop}")
        elif self.edges is None and self.a_start == 0 and self.spacing == "log a":
            yield self.problem("spacing", "must start later than a_start = 0")

    @override
    def idle(self) -> dict[str, str]:
        equal = ("a_start", "a_stop", "steps", "spacing")
        return dict.fromkeys(equal if self.edges else (), "equal steps, not with edges")

    @property
    def step_count(self) -> int:
        """The number of steps."""
        return self.steps if self.edges is None else len(self.edges) - 1

    @property
    def first(self) -> float:
        """The scale factor of the start [1]."""
        return self.edges[0] if self.edges else self.a_start

    @property
    def last(self) -> float:
        """The scale factor of the end [1]."""
        return self.edges[-1] if self.edges else self.a_stop

    def edges_of(self, cosmology: Cosmology) -> np.ndarray:
        """Returns the scale factors at which steps begin and end, float64 [step_count + 1].

        Args:
            cosmology: the cosmology whose growth factor is used by steps equal in "D".
        """
        if self.edges is not None:
            return np.asarray(self.edges, dtype=np.float64)
        if self.spacing == "a":
            return scale_factor_steps(self.a_start, self.a_stop, self.steps)
        if self.spacing == "log a":
            return logarithmic_steps(self.a_start, self.a_stop, self.steps)
        return growth_steps(cosmology, self.a_start, self.a_stop, self.steps)


def _checked(a_start: float, a_stop: float, steps: int, spacing: str) -> StepOptions:
    keys = {"a_start": a_start, "a_stop": a_stop, "steps": steps, "spacing": spacing}
    return constructed(StepOptions, keys)


def scale_factor_steps(a_start: float, a_stop: float, steps: int) -> np.ndarray:
    """Returns the edges of `steps` steps equal in the scale factor [1], float64 [steps + 1].

    Raises:
        ValueError: `StepOptions` does not allow these values.
    """
    options = _checked(a_start, a_stop, steps, "a")
    return np.linspace(options.a_start, options.a_stop, options.steps + 1)


def logarithmic_steps(a_start: float, a_stop: float, steps: int) -> np.ndarray:
    """Returns the edges of `steps` steps equal in log a [1], float64 [steps + 1].

    Raises:
        ValueError: `StepOptions` does not allow these values.
    """
    options = _checked(a_start, a_stop, steps, "log a")
    edges = np.geomspace(options.a_start, options.a_stop, options.steps + 1)
    edges[[0, -1]] = options.a_start, options.a_stop
    return edges


def growth_steps(cosmology: Universe, a_start: float, a_stop: float, steps: int) -> np.ndarray:
    """Returns the edges of `steps` steps equal in D1(a) of a cosmology or a theory, [steps + 1].

    The edges are scale factors, float64. They are constants for gradients by the cosmology.

    Raises:
        ValueError: `StepOptions` does not allow these values.
    """
    from flowpm_dist.cosmology.theory import theory_of

    options = _checked(a_start, a_stop, steps, "D")
    a_start, a_stop, steps = options.a_start, options.a_stop, options.steps
    growth = theory_of(cosmology).growth
    first, last = (float(growth.d1(a)) for a in (a_start, a_stop))
    wanted = np.linspace(first, last, steps + 1)[1:-1]
    low, high = np.full(steps - 1, a_start), np.full(steps - 1, a_stop)
    for _ in range(60 if steps > 1 else 0):
        middle = 0.5 * (low + high)
        below = growth.d1(middle).numpy() < wanted
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.concatenate([[a_start], 0.5 * (low + high), [a_stop]])
