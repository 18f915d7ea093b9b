"""The interfaces of two corrections: of each kick's force, and of the states that a run returns.

A correction of the force gives coefficients for each kick, and the potential's spectrum is
multiplied by its response, a function of them and of k. A correction of states moves the particles
of outputs and of the final state; the run itself does not know of it. Nothing here imports
TensorFlow: run files name corrections.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, FiniteFloat
from typing_extensions import override

from flowpm_dist.cosmology.parameters import PARAMETERS
from flowpm_dist.io.files import reading, write_json
from flowpm_dist.io.opening import checked
from flowpm_dist.options.regular_files import read_text

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmology.power import LinearPower
    from flowpm_dist.grid.box import Box
    from flowpm_dist.particle_mesh.response import Response

VERSION = 2
"""The version of the files of corrections."""
NEW_CHOICES = {"radiation": False}
"""Choices of a cosmology that older corrections do not name, and what they had."""
LPT_ONLY = "2lpt"
"""The integrator in a range that was trained on states of Lagrangian perturbation theory."""
RANGE_TOLERANCE, PARAMETER_TOLERANCE = 1e-3, 1e-2
"""Relative distances from a range that count as inside, of numbers of a run and of parameters."""

Ends = tuple[FiniteFloat, FiniteFloat]
"""The lowest and the highest value."""


@dataclass(frozen=True)
class Range:
    """The runs that a correction was trained on.

    Attributes:
        integrator: the name of the integrator; "2lpt" where no steps were made.
        mesh_factor, deconvolve, force_gradient: see `ForceOptions`.
        steps: the number of steps; or pairs of the side of a cell of the force mesh [Mpc/h] and
            the number of steps in such cells.
        a: the first and the last scale factor.
        cell: the smallest and the largest side of a cell of the force mesh [Mpc/h].
        cosmology: the smallest and the largest value of parameters.
        times: the first and the last scale factor of the states that were compared with the truth;
            None if they are not known.
    """

    integrator: str
    mesh_factor: int | FiniteFloat
    deconvolve: bool
    force_gradient: str
    steps: int | tuple[tuple[FiniteFloat, int], ...]
    a: Ends
    cell: Ends
    cosmology: Mapping[str, Ends]
    times: Ends | None = None

    @property
    def force(self) -> dict[str, Any]:
        """The force options that a run must have; empty if the training made no steps."""
        names = ("mesh_factor", "deconvolve", "force_gradient")
        return {} if self.integrator == LPT_ONLY else {name: getattr(self, name) for name in names}

    def steps_near(self, cell: float) -> tuple[float | None, int]:
        """Returns the nearest size of cells [Mpc/h] and the number of steps in them.

        The size is None if all have the same number of steps.

        Args:
            cell: the side of a cell of the force mesh [Mpc/h].
        """
        if isinstance(self.steps, int):
            return None, self.steps
        return min(self.steps, key=lambda pair: abs(math.log(pair[0] / cell)))

    def other_force(self, **ours: Any) -> Iterator[tuple[str, str]]:
        """Yields each option of the force that differs from ours, and what it must be."""
        for name, there in self.force.items():
            if there != ours[name]:
                text = str(there).lower() if isinstance(there, bool) else repr(there)
                yield name, f"the correction was trained with {name} = {text}: leave this out"

    def outside(
        self,
        integrator: str,
        steps: int,
        a: tuple[float, float],
        cell: float,
        parameters: Mapping[str, Sequence[float]],
    ) -> Iterator[str]:
        """Yields a text for each property of a run that lies outside the range of the training.

        Args:
            integrator: the name of the run's integrator.
            steps: the number of steps.
            a: the first and the last scale factor.
            cell: the side of a cell of the force mesh [Mpc/h].
            parameters: values of parameters of the cosmology that occur.
        """
        of_steps = self.integrator != LPT_ONLY
        if of_steps and integrator != self.integrator:
            yield f"it was trained with {self.integrator}, not with {integrator}"
        known, there = self.steps_near(cell)
        if of_steps and steps != there:
            where = "" if known is None else f" in cells of {known:g} Mpc/h"
            yield f"it was trained with {there} steps{where}, not with {steps}"
        ours = {"a_start": a[0]} if of_steps else {}
        ours |= {"a_stop": a[1], "the force mesh's cell": cell}
        theirs = {"a_start": (self.a[0],) * 2, "a_stop": (self.a[1],) * 2}
        theirs |= {"the force mesh's cell": self.cell, **self.cosmology}
        every = {**{name: [value] for name, value in ours.items()}, **parameters}
        for name, value in ((name, value) for name, values in every.items() for value in values):
            default = PARAMETERS[name].default if name in PARAMETERS else NEW_CHOICES.get(name)
            unknown = (-math.inf, math.inf) if default is None else (default, default)
            tolerance = PARAMETER_TOLERANCE if name in PARAMETERS else RANGE_TOLERANCE
            yield from _outside(name, value, theirs.get(name, unknown), tolerance)

    def outside_times(self, times: Iterable[float]) -> Iterator[str]:
        """Yields a text for each scale factor of a state outside the range of the training."""
        if self.times is not None:
            for a in times:
                yield from _outside("a state's a", a, self.times)


def _outside(
    name: str, value: float, ends: tuple[float, float], tolerance: float = RANGE_TOLERANCE
) -> Iterator[str]:
    """Yields how far a value lies outside of a range, if it does by more than a tolerance."""
    low, high = ends
    if max(low - value, value - high) > tolerance * max(abs(low), abs(high)):
        known = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        yield f"{name} = {value:g}, where it was trained with {known}"


def force_cell(size: Sequence[float], cells: Sequence[int]) -> float:
    """Returns the side of a cell of the force mesh [Mpc/h], of the same volume if not a cube.

    Args:
        size: sides of the box [Mpc/h].
        cells: the cells of the force mesh along each side.
    """
    return float(np.cbrt(math.prod(length / n for length, n in zip(size, cells, strict=True))))


@dataclass(frozen=True, eq=False)
class Correction(abc.ABC):
    """A correction of runs, with the numbers that were learned.

    Attributes:
        theta: the learned numbers, float64 [n]: an array, or a tensor or variable, with respect to
            which runs can be differentiated.
        trained: what it was trained for; None if that is not known.
        scores: what was measured with it on universes that it was not trained on.
        provenance: where it comes from.
        source: the name in `SHIPPED` or the absolute path that it was read from; None if it was
            made in Python.
    """

    theta: Any = field(repr=False)
    trained: Range | None = field(default=None, repr=False)
    scores: Mapping[str, Any] = field(default_factory=dict, repr=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, repr=False)
    source: str | None = field(default=None, init=False)

    name: ClassVar[str]
    """The name in files."""

    @classmethod
    @abc.abstractmethod
    def begun(cls, seed: int = 0) -> Self:
        """Returns a correction that changes nothing yet, for training to begin with."""

    @property
    @abc.abstractmethod
    def in_force(self) -> ForceCorrection | None:
        """The correction of each kick's force; None without one."""

    @property
    @abc.abstractmethod
    def of_states(self) -> StateCorrection | None:
        """The correction of the states that leave a run; None without one."""

    def numbers(self) -> np.ndarray:
        """Returns all learned numbers, float64 [n]."""
        return np.asarray(self.theta, np.float64)

    def with_theta(self, theta: Any) -> Self:
        """Returns the same correction with other learned numbers."""
        return dataclasses.replace(self, theta=theta)

    def equal_but_for_theta(self, other: Any) -> bool:
        """Returns whether another correction is the same, whatever its numbers."""
        if type(self) is not type(other):
            return False
        apart = {"theta": None, "source": None}
        return {**vars(self), **apart} == {**vars(other), **apart}

    def __str__(self) -> str:
        return self.source or self.name

    def about(self) -> dict[str, Any]:
        """Returns the attributes that the correction's file holds."""
        return {
            "kind": self.name,
            "trained": None if self.trained is None else dataclasses.asdict(self.trained),
            "scores": dict(self.scores),
            "provenance": dict(self.provenance),
            "theta": np.asarray(self.theta, np.float64).tolist(),
        }

    def save(self, path: str | Path) -> Path:
        """Writes the correction to a file, which is replaced in one step; returns its path."""
        about = {"flowpm_dist correction": VERSION, **self.about()}
        write_json(Path(path), about)
        return Path(path)


@dataclass(frozen=True, eq=False)
class ForceCorrection(Correction):
    """A correction of the force of each kick. Zeros for theta change nothing."""

    @property
    @abc.abstractmethod
    def response(self) -> Response:
        """The factor of the potential, of k and coefficients."""

    @abc.abstractmethod
    def coefficients(
        self, theta: tf.Tensor, power: LinearPower, cell: float, a: np.ndarray
    ) -> tf.Tensor:
        """Returns the coefficients of the response at scale factors, float64 [times, size].

        Differentiable with respect to theta and the cosmology.

        Args:
            theta: the learned numbers, float64.
            power: the linear power of the universe, with its growth.
            cell: the side of a cell of the force mesh [Mpc/h].
            a: scale factors of the positions [times].
        """

    @property
    @override
    def in_force(self) -> ForceCorrection | None:
        return self

    @property
    @override
    def of_states(self) -> StateCorrection | None:
        return None


@dataclass(frozen=True, eq=False)
class StateCorrection(Correction):
    """A correction of the states that leave a run: of outputs and of the final state.

    Attributes:
        force: the correction of the force that its runs have; None for none.
    """

    force: ForceCorrection | None = None

    @property
    def of_lpt(self) -> bool:
        """Whether the correction is for states of LPT, not for states of runs."""
        return self.trained is not None and self.trained.integrator == LPT_ONLY

    @abc.abstractmethod
    def style(self, power: LinearPower, cell: float, a: float) -> tf.Tensor:
        """Returns numbers that describe the universe at a time, float64 [n].

        Differentiable with respect to the cosmology.

        Args:
            power: the linear power of the universe, with its growth.
            cell: the spacing of the particles [Mpc/h].
            a: scale factor.
        """

    @abc.abstractmethod
    def moved(
        self, theta: tf.Tensor, style: tf.Tensor, fields: Sequence[tf.Tensor], box: Box
    ) -> list[tf.Tensor]:
        """Returns corrected displacements and velocities; differentiable, on any mesh.

        Args:
            theta: the learned numbers, float64, from `replicated`.
            style: the numbers of each universe of this rank, float64 [..., n], see `style`.
            fields: displacement [Mpc/h] and canonical velocity [Mpc/h H0], blocks
                [..., x, y, z, 3].
            box: the box of one universe, or of a batch.
        """

    @property
    @override
    def in_force(self) -> ForceCorrection | None:
        return self.force

    @property
    @override
    def of_states(self) -> StateCorrection | None:
        return self

    @override
    def numbers(self) -> np.ndarray:
        parameters = super().numbers()
        return (
            parameters if self.force is None else np.concatenate([parameters, self.force.numbers()])
        )

    @override
    def about(self) -> dict[str, Any]:
        return {
            **super().about(),
            "force": None if self.force is None else self.force.about(),
        }


CORRECTIONS: dict[str, type[Correction]] = {}
"""Name in a file -> class; filled by the package."""


class CorrectionWarning(UserWarning):
    """A run lies outside the range of its correction."""


class CorrectionFileError(ValueError):
    """A file that holds no correction."""


def load_correction(path: str | Path) -> Correction:
    """Returns the correction in a file.

    Args:
        path: path of the file, or the name of a correction of the package.

    Raises:
        CorrectionFileError: the file cannot be read, or holds no correction.
    """
    source = str(path) if str(path) in SHIPPED else str(Path(path).expanduser().absolute())
    path = file_of(path)
    with reading(path, raises=CorrectionFileError):
        text = read_text(path)
    try:
        about = json.loads(text)
        version = about["flowpm_dist correction"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorrectionFileError(f"{path} holds no correction") from error
    if version != VERSION:
        raise CorrectionFileError(f"{path} was written by another version of this package")
    with reading(path, raises=CorrectionFileError):
        correction = _made_from(checked(_Contents, about, f"{path} holds no correction: key"), path)
    object.__setattr__(correction, "source", source)
    return correction


class _Contents(BaseModel):
    """The contents of a correction's file, see `Correction.about`."""

    kind: str
    trained: Range | None
    theta: list[FiniteFloat]
    scores: dict[str, Any]
    provenance: dict[str, Any]
    force: _Contents | None = None


def _made_from(contents: _Contents, path: Path) -> Correction:
    kind = CORRECTIONS.get(contents.kind)
    if kind is None:
        known = ", ".join(CORRECTIONS)
        raise CorrectionFileError(f"{path}: kind = {contents.kind!r}: must be one of {known}")
    theta: Any = np.array(contents.theta, np.float64)
    more: dict[str, Any] = {}
    if issubclass(kind, StateCorrection) and contents.force is not None:
        more["force"] = _made_from(contents.force, path)
        if not isinstance(more["force"], ForceCorrection):
            raise CorrectionFileError(f"{path}: force must be a correction of the force")
    return kind(theta, contents.trained, contents.scores, contents.provenance, **more)


SHIPPED = {
    name: Path(__file__).parent / f"{name}.json"
    for name in ("default", "default-2", "network", "network-2")
}
"""The corrections of the package: filters and networks for mesh_factor 1 and 2."""


def file_of(name: str | Path) -> Path:
    """Returns the path of a correction's file, from a name in `SHIPPED` or a path."""
    return SHIPPED.get(str(name), Path(name))


def chosen_correction(value: Any, folder: Path | None = None) -> Any:
    """Returns the correction that a name in `SHIPPED` or a path stands for; any other value as is.

    Args:
        value: the choice.
        folder: the folder of relative paths; by default the current one.

    Raises:
        CorrectionFileError: see `load_correction`.
    """
    if not isinstance(value, str | Path):
        return value
    if str(value) in SHIPPED:
        return load_correction(value)
    return load_correction(((folder or Path()) / Path(value).expanduser()).absolute())
