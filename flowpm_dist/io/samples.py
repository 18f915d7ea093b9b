"""Draws of parameters from a posterior, for other people's tools. Nothing here imports TensorFlow.

Draws come from the chains of `flowpm-dist reconstruct`, from the posterior of a volume that
`flowpm-dist predict` writes, or from a fitted head.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, Field
from typing_extensions import override

from flowpm_dist.cosmology.parameters import PARAMETERS
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import UnreadableError, read_json, reading
from flowpm_dist.io.labelled import Labelled, LabelledArray, package
from flowpm_dist.io.opening import check_numbers, checked, not_finite
from flowpm_dist.options import in_unit
from flowpm_dist.options.regular_files import check_regular, read_text

if TYPE_CHECKING:
    import xarray
    from getdist import MCSamples

DRAWS, RESULT, DRAWN = "draws.csv", "result.json", "samples.npz"
"""The table of a reconstruction's chains, its results, and the draws of a volume's posterior."""
HEAD = ("samples", "names", "ranges")
"""The arrays of samples.npz that are read."""
FIRST_MODE = ("re(", "im(")
"""How names of modes of the white noise begin, in the table of the chains."""
MOST_TABLE = 2**28
"""Largest table that is read [bytes]."""


@dataclass(frozen=True, eq=False)
class Samples(Labelled):
    """Draws of parameters from a posterior, in one or several chains. All have the same weight.

    Attributes:
        values: the draws [chain, draw, parameter] [physical units], float64.
        names: the names of the parameters.
        ranges: name -> (low, high) of parameters with a uniform prior.
        loss: minus the log posterior of each draw, up to a constant [chain, draw]; None where it is
            not known. A chain's is the posterior of the whole white noise and the parameters, per
            unit of the white noise and of the unit normal number that stands for each parameter. It
            is not the posterior of the parameters alone.
        is_independent: whether the draws are independent of each other, as draws of a fitted head
            are. Draws of a chain are not.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, or a range without a width.
    """

    values: np.ndarray
    names: Sequence[str]
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    loss: np.ndarray | None = None
    is_independent: bool = False

    def __post_init__(self) -> None:
        values = np.asarray(in_unit("values", self.values), np.float64)
        if values.ndim != 3 or values.shape[-1] != len(self.names):
            raise ValueError(
                f"values of shape {values.shape}: must be [chain, draw, parameter] of "
                f"{len(self.names)} parameters, {', '.join(self.names)}"
            )
        if (place := not_finite(values)) is not None:
            raise ValueError(f"the draw at {place} is not finite")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "names", tuple(self.names))
        for name, ends in self.ranges.items():
            try:
                _increasing(ends)
            except ValueError as error:
                raise ValueError(f"the range of {name} {error}") from None
        if self.loss is not None:
            loss = np.asarray(in_unit("loss", self.loss), np.float64)
            if loss.shape != values.shape[:2]:
                raise ValueError(f"loss of shape {loss.shape}: must be {values.shape[:2]}")
            object.__setattr__(self, "loss", loss)

    @classmethod
    def load(cls, path: str | Path, *, modes: bool = False) -> Samples:
        """Reads the draws in a folder of results.

        Args:
            path: the folder of a `flowpm-dist reconstruct` with a sampler, also one that still
                runs, without its warm-up; the folder that `flowpm-dist predict` wrote a volume's
                posterior to; or the samples.npz in it.
            modes: for chains, whether the modes of the largest scales follow the parameters. They
                are real and imaginary parts of the white noise, whose prior is unit normal.

        Raises:
            UserError: the folder has no draws, or none of parameters.
            UnreadableError: a file is damaged.
        """
        path = Path(path)
        if path.name == DRAWN or (path / DRAWN).exists():
            return cls(**_of_head(path if path.name == DRAWN else path / DRAWN))
        if not (path / DRAWS).exists():
            raise UserError(
                f"{path}: holds neither {DRAWS} of a reconstruction with [sampler] nor {DRAWN} of "
                "a prediction"
            )
        return cls(**_of_chains(path, modes=modes))

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes = ("chain", "draw")
        arrays = {
            name: LabelledArray(self.values[..., i], axes, _unit(name), f"draws of {name}")
            for i, name in enumerate(self.names)
        }
        if self.loss is not None:
            meaning = "minus the log posterior with the field, up to a constant"
            arrays["loss"] = LabelledArray(self.loss, axes, "1", meaning)
        return arrays

    def to_getdist(self, **settings: Any) -> MCSamples:
        """Returns the draws as GetDist takes them, with labels, ranges of priors and chains.

        Its `loglikes` are `loss`, where it is known.

        Args:
            **settings: further arguments of `getdist.MCSamples`, such as `label`.
        """
        from getdist import MCSamples  # takes most of a second

        return MCSamples(
            samples=list(self.values),
            loglikes=None if self.loss is None else list(self.loss),
            names=[_plain(name) for name in self.names],
            labels=[_label(name) for name in self.names],
            ranges={_plain(name): list(ends) for name, ends in self.ranges.items()},
            sampler="uncorrelated" if self.is_independent else "mcmc",
            **settings,
        )

    def to_arviz(self) -> xarray.DataTree:
        """Returns the draws as ArviZ 1 takes them, a tree of xarray data sets.

        The group `posterior` has the parameters [chain, draw], with their priors and labels as
        attributes. The group `sample_stats` has `lp`, minus `loss`, where it is known.

        Raises:
            ImportError: arviz-base is not installed.
        """
        groups = {"posterior": {name: self.values[..., i] for i, name in enumerate(self.names)}}
        if self.loss is not None:
            groups["sample_stats"] = {"lp": -self.loss}
        tree: xarray.DataTree = package("arviz_base").from_dict(groups)
        for name in self.names:
            about: dict[str, Any] = {"long_name": f"${_label(name)}$", "units": _unit(name)}
            if name in self.ranges:
                about["prior"] = list(self.ranges[name])
            tree["posterior"][name].attrs.update(about)
        return tree


def _increasing(ends: tuple[float, float]) -> tuple[float, float]:
    """Returns the ends of a range.

    Raises:
        ValueError: they are not finite, or do not increase.
    """
    low, high = ends
    if not (math.isfinite(high - low) and low < high):
        raise ValueError(f"must be two finite numbers, the lower first; got {low:g} and {high:g}")
    return low, high


_Ends = Annotated[tuple[float, float], AfterValidator(_increasing)]


class _Head(BaseModel):
    """What samples.npz says of its draws."""

    names: Annotated[list[str], Field(min_length=1)]
    ranges: list[_Ends] | None


class _Fitted(BaseModel):
    """A parameter in result.json."""

    prior: _Ends


class _Result(BaseModel):
    """What result.json says of parameters."""

    parameters: dict[str, _Fitted]


def _of_head(path: Path) -> dict[str, Any]:
    """Returns the attributes of `Samples` from samples.npz."""
    with reading(path, "it is missing or damaged"):
        check_regular(path)
        with np.load(path) as archive:
            held = {name: archive[name] for name in HEAD if name in archive.files}
    # Other arrays could be addresses, or texts that numpy takes for numbers.
    check_numbers(held.get("samples"), f"{path}: samples", "f")
    if "ranges" in held:
        check_numbers(held["ranges"], f"{path}: ranges", "f")
    with reading(path):
        ranges = held["ranges"].tolist() if "ranges" in held else None
        names = held["names"].tolist() if "names" in held else None
        head = checked(_Head, {"names": names, "ranges": ranges}, f"{path}:")
        if ranges is not None and len(ranges) != len(head.names):
            raise UnreadableError(f"{path}: has {len(ranges)} ranges of {len(head.names)} names")
        Samples(held["samples"][np.newaxis], head.names)  # checks them
    return {
        "values": held["samples"][np.newaxis],
        "names": head.names,
        "ranges": dict(zip(head.names, head.ranges or [], strict=False)),
        "is_independent": True,
    }


def _of_chains(folder: Path, *, modes: bool) -> dict[str, Any]:
    """Returns the attributes of `Samples` from the folder of a reconstruction."""
    result, table = folder / RESULT, folder / DRAWS
    fitted = checked(_Result, read_json(result), f"{result}:").parameters
    with reading(table):
        text = read_text(table, MOST_TABLE)
        text = text[: text.rfind("\n") + 1]  # the last line may be on its way
        rows = csv.DictReader(io.StringIO(text, newline=""))
        whole = [row for row in rows if None not in row.values()]
        of_modes = [name for name in rows.fieldnames or () if name.startswith(FIRST_MODE)]
        names = [*fitted, *(of_modes if modes else ())]
        columns: dict[int, list[list[float]]] = {}
        for row in whole:
            chain = columns.setdefault(int(row["chain"]), [])
            if int(row["drawn"]):
                # Without the volume of the sampler's coordinates, which the column loss has.
                chain.append([float(row[name]) for name in ("data", "prior", *names)])
        draws = min(map(len, columns.values()), default=0)  # a move may be on its way
        values = np.array([columns[chain][:draws] for chain in sorted(columns)], np.float64)
        if draws and (place := not_finite(values)) is not None:
            raise UnreadableError(f"{table}: the draw at {place} is not finite")
    if not draws:
        raise UserError(f"{table}: no chain has a draw yet, but its warm-up")
    if not names:
        raise UserError(
            f"{folder}: no parameters were drawn along with the field, as the run file has no "
            "[priors]; modes=True takes the modes of the largest scales"
        )
    ranges = {name: one.prior for name, one in fitted.items()}
    loss = values[..., 0] + values[..., 1]
    return {"values": values[..., 2:], "names": names, "ranges": ranges, "loss": loss}


def _unit(name: str) -> str:
    return (PARAMETERS[name].unit if name in PARAMETERS else "") or "1"


def _plain(name: str) -> str:
    """Returns a name that GetDist takes: re(0 0 1) becomes re_0_0_1."""
    return name.replace("(", "_").replace(" ", "_").replace(")", "")


def _label(name: str) -> str:
    """Returns the LaTeX label of a parameter, without dollars."""
    if name in PARAMETERS:
        return PARAMETERS[name].symbol.strip("$")
    kind, _, numbers = name.partition("(")
    if numbers:
        return rf"\mathrm{{{kind.capitalize()}}}\,w({numbers.replace(' ', ',')}"
    words = name.replace("_", r"\ ")
    return rf"\mathrm{{{words}}}"
