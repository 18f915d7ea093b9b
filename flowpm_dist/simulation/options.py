"""The options of a simulation, whatever its universe and its box."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import BeforeValidator, Field, InstanceOf, ValidationInfo, model_validator
from typing_extensions import override

from flowpm_dist.evolution.adjoints import ADJOINTS, Adjoint, ReversibleAdjoint
from flowpm_dist.evolution.corrections import (
    LPT_ONLY,
    SHIPPED,
    Correction,
    CorrectionFileError,
    CorrectionWarning,
    ForceCorrection,
    StateCorrection,
    chosen_correction,
    force_cell,
)
from flowpm_dist.evolution.integrators import INTEGRATORS, FastPM, Integrator, name_of
from flowpm_dist.grid.decomposition import Grid, PyramidChoice, finer_grid, usual_halo
from flowpm_dist.initial.options import InitialOptions, LptOrder, Noise
from flowpm_dist.options import (
    Options,
    Problem,
    Variants,
    checked_python_name,
    either,
    python_object,
)
from flowpm_dist.particle_mesh.lattice import LatticeWarning, instability
from flowpm_dist.particle_mesh.options import Exchange, ForceGradient, ForceOptions
from meshimpl import launch
from meshimpl.imports import import_tensorflow


class HaloOptions(Options):
    """The options of the halo: how far particles may stray.

    Attributes:
        halo: planes exchanged along split axes [particle spacings]; "auto" sizes it from the LPT
            displacement.
    """

    halo: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description='"auto" or a whole number of cells, at least 1'
    )

    def usual_halo(self, grid: Grid, size: Sequence[float], a: float = 1.0) -> int:
        """Returns the halo for estimates: instead of "auto", what a run usually suggests.

        Args:
            grid, size: cells along each side of the box, and its sides [Mpc/h].
            a: scale factor at the end of the run.
        """
        return usual_halo(grid, size, a) if self.halo == "auto" else self.halo

    def with_usual_halo(self, grid: Grid, size: Sequence[float], a: float = 1.0) -> Self:
        """Returns these options with `usual_halo` in place of "auto"."""
        return self.model_copy(update={"halo": self.usual_halo(grid, size, a)})


class RunOptions(HaloOptions):
    """The options of the computation of a run.

    Attributes:
        precision: of fields and particles, "float32" or "float64".
    """

    precision: Literal["float32", "float64"] = Field(
        default="float32", description='"float32" or "float64"'
    )


def _chosen(value: Any, info: ValidationInfo) -> Any:
    return chosen_correction(value, (info.context or {}).get("folder"))


def _user_class(kind: type[Options], name: str) -> type[Options]:
    """Returns a user's class of integrators or adjoints; TensorFlow is imported before its module.

    Raises:
        ValueError: there is no such class, it is of another kind, or its module raises an error.
    """
    checked_python_name(name)
    if "tensorflow" not in sys.modules:
        launch.configure_threads()
        import_tensorflow()
    try:
        model = python_object(name)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        text = next(iter(str(error).splitlines()), "")
        raise ValueError(f"its module raises {type(error).__name__}: {text}") from error
    if not (isinstance(model, type) and issubclass(model, kind)) or inspect.isabstract(model):
        raise ValueError(f"it is no complete class that derives from {kind.__name__}")
    return model


class DynamicsOptions(ForceOptions):
    """How particles are moved: by which force, integrator and correction.

    An integrator or an adjoint that is named takes its own options next to its name, such as
    half_step of "fastpm". A correction brings the options of the force that it was trained with,
    where none are given.

    Attributes:
        integrator: an `Integrator`; or the name of one in `INTEGRATORS`, or of a user's class as
            "package.module:object".
        adjoint: how a run under a `tf.GradientTape` is differentiated: an `Adjoint`; or the name of
            one in `ADJOINTS`, or of a user's class.
        correction: a `Correction` of the force or of the states that leave a run, "default",
            "default-2", "network", "network-2", or the path of a file; None for none.
    """

    integrator: Annotated[
        InstanceOf[Integrator],
        Variants("integrator", INTEGRATORS, "fastpm", True, partial(_user_class, Integrator)),
    ] = Field(default_factory=FastPM, description=either(INTEGRATORS))
    adjoint: Annotated[
        InstanceOf[Adjoint],
        Variants("adjoint", ADJOINTS, "reversible", True, partial(_user_class, Adjoint)),
    ] = Field(default_factory=ReversibleAdjoint, description=either(ADJOINTS))
    correction: Annotated[InstanceOf[Correction], BeforeValidator(_chosen)] | None = Field(
        default=None,
        description='"default", "default-2", "network", "network-2", or the file of a correction',
        examples=[*SHIPPED],
    )

    @model_validator(mode="before")
    @classmethod
    def _take_trained_force(cls, keys: Any, info: ValidationInfo) -> Any:
        if not isinstance(keys, Mapping) or keys.get("correction") is None:
            return keys
        try:
            chosen = _chosen(keys["correction"], info)
        except CorrectionFileError:  # reported as a problem of the key itself
            return keys
        trained = chosen.trained if isinstance(chosen, Correction) else None
        return {**(trained.force if trained else {}), **keys, "correction": chosen}


class SolverOptions(InitialOptions, DynamicsOptions, RunOptions):
    """All options of a simulation: of its initial conditions, dynamics and computation."""

    @property
    def force_correction(self) -> ForceCorrection | None:
        """The correction of each kick's force; None without one."""
        return None if self.correction is None else self.correction.in_force

    @property
    def state_correction(self) -> StateCorrection | None:
        """The correction of the states that leave a run; None without one."""
        return None if self.correction is None else self.correction.of_states

    @property
    def brought(self) -> frozenset[str]:
        """Names of the options that were taken from the correction's training."""
        if self.correction is None or self.correction.trained is None:
            return frozenset()
        trained = self.correction.trained.force
        return frozenset(name for name, value in trained.items() if getattr(self, name) == value)

    def warnings(
        self,
        size: Sequence[float],
        grid: Grid,
        edges: Sequence[float],
        values: Mapping[str, Sequence[float]],
    ) -> Iterator[UserWarning]:
        """Yields a `LatticeWarning` of an unstable force, and `CorrectionWarning`s.

        A correction warns of each way in which a run lies outside what it was trained for.

        Args:
            size: sides of the box [Mpc/h].
            grid: particles along each side.
            edges: scale factors at which steps begin and end, at least 2.
            values: values of the cosmology's known parameters, one or several of each.
        """
        cell = [length / n for length, n in zip(size, grid, strict=True)]
        times = next(a for a in edges if a > 0), edges[-1]
        least = {name: min(several) for name, several in values.items()}
        sigma8 = least.get("sigma8")
        if sigma8 is None:  # as in Planck's universe
            sigma8 = 0.82 * math.sqrt(least.get("A_s", 2.1e-9) / 2.1e-9)
        if (text := instability(self.part(ForceOptions), cell, times, sigma8)) is not None:
            yield LatticeWarning(text)
        if self.correction is None or self.correction.trained is None:
            return
        mesh_cell = force_cell(size, finer_grid(grid, self.mesh_factor))
        steps, ends = len(edges) - 1, (edges[0], edges[-1])
        trained, name = self.correction.trained, name_of(self.integrator)
        for text in trained.outside(name, steps, ends, mesh_cell, values):
            yield CorrectionWarning(f"correction: {text}")

    def time_warnings(self, times: Iterable[float]) -> Iterator[CorrectionWarning]:
        """Yields a warning for each state's scale factor outside of a correction's training.

        Args:
            times: scale factors of states that leave a run, or of particles on a light cone.
        """
        if self.correction is not None and self.correction.trained is not None:
            for text in self.correction.trained.outside_times(times):
                yield CorrectionWarning(f"correction: {text}")

    @override
    def problems(self) -> Iterator[Problem]:
        if self.exchange == "float16" and self.precision == "float64":
            message = 'goes with precision = "float32", not with "float64"'
            yield self.problem("exchange", message)
        yield from self._pyramid_problems()
        if self.integrator.uses_lpt and self.lpt_order < 2:
            name = type(self.integrator).__name__
            yield self.problem("lpt_order", f"{name} follows LPT of order 2; must be 2 or 3")
        if self.correction is not None and self.correction.trained is not None:
            force = dict(self.part(ForceOptions))
            for key, message in self.correction.trained.other_force(**force):
                yield self.problem(key, message)
        state = self.state_correction
        if state is not None and state.of_lpt and self.lpt_order != 2:
            yield self.problem(
                "lpt_order", f"the correction was learned from {LPT_ONLY}; must be 2"
            )

    def _pyramid_problems(self) -> Iterator[Problem]:
        """Yields the problems of a pyramid force with other options: kernels of long reach."""
        if self.pyramid == "off":
            return
        if self.force_gradient != "finite-difference":
            yield self.problem("pyramid", 'goes with force_gradient = "finite-difference"')
        if self.deconvolve and (self.pyramid != "1%" or self.mesh_factor != 1):
            yield self.problem(
                "pyramid", 'needs deconvolve = false, unless it is "1%" with mesh_factor 1'
            )
        if self.force_correction is not None:
            yield self.problem("pyramid", "cannot have a correction of the force: leave one out")


class SolverKeys(TypedDict, total=False):
    """The options of `SolverOptions` as keywords of `Simulation`, for editors and type checkers."""

    integrator: Integrator | str
    half_step: str
    exponent: float
    adjoint: Adjoint | str
    max_error_growth: float
    keep_fields: Literal["auto"] | bool
    correction: Correction | str | None
    lpt_order: LptOrder
    noise: Noise
    fixed_amplitude: bool
    force_gradient: ForceGradient
    mesh_factor: float
    deconvolve: bool
    exchange: Exchange
    pyramid: PyramidChoice
    halo: Literal["auto"] | int
    precision: Literal["float32", "float64"]
