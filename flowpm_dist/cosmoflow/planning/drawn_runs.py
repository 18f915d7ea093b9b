"""The section [evolution] of a training, whose universes may be made by different runs.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, ValidationError, ValidationInfo, model_validator
from typing_extensions import override

from flowpm_dist.options import Options, Problem
from flowpm_dist.options.base import flat_variants, keys_of, problems_of
from flowpm_dist.options.types import ProblemsError
from flowpm_dist.simulate.options import EvolutionOptions

OF_FORCE = ("mesh_factor", "force_gradient", "deconvolve")
"""Keys of the force that a correction brings."""
OF_A_RUN = ("correction", *OF_FORCE, "steps", "spacing", "integrator")
"""Keys of a table of `EvolutionRanges.drawn`, besides the options of its integrator."""
MOST_DRAWN = 100
"""Most steps of a run whose number of steps is drawn."""


class RunDraw(Options):
    """A table of `EvolutionRanges.drawn`.

    Attributes:
        names: the names of the table's keys, and of its force and integrator if it has its own.
        runs: the section with these keys, once for each number of steps, which increase.
    """

    names: tuple[str, ...]
    runs: tuple[EvolutionOptions, ...]

    @classmethod
    def read(
        cls, section: Mapping[str, Any], table: Any, model: type[EvolutionOptions], context: Any
    ) -> Self:
        """Returns the runs of a table.

        A table that names a correction or a key of the force has its own force. One that names an
        integrator has its own options for it. The section's keys for these are left out.

        Args:
            section: the other keys of the section, which are valid.
            table: the keys in place of them; steps may be [fewest, most].
            model: the model of the section.
            context: what the validation knows, such as the folder of relative paths.

        Raises:
            ProblemsError: wrong keys or values.
        """
        if not isinstance(table, Mapping):
            raise ProblemsError([Problem("", f"= {table!r}: must be a table of keys")])
        integrators = flat_variants(model)["integrator"]
        others = {*keys_of(model)} - {*OF_A_RUN, *integrators.keys()}
        same = f"must be the same in all: give it in [evolution]; here are {', '.join(OF_A_RUN)}"
        if wrong := [Problem(key, same) for key in table if key in others]:
            raise ProblemsError(wrong)
        has_force = any(key in table for key in ("correction", *OF_FORCE))
        left_out = {*(OF_FORCE if has_force else ())}
        left_out |= {*(integrators.keys() if "integrator" in table else ())}
        keys = {key: value for key, value in section.items() if key not in left_out} | {**table}
        steps = keys.get("steps")
        runs = []
        for number in _counts(steps) if isinstance(steps, list | tuple) else [steps]:
            with_number = keys if number is None else {**keys, "steps": number}
            try:
                runs.append(model.model_validate(with_number, context=context))
            except ValidationError as error:
                raise ProblemsError(problems_of(model, with_number, error)) from None
        if "integrator" in table:  # now with the options of a user's class
            left_out |= {*integrators.keys()}
        return cls(names=tuple(sorted({*table, *left_out})), runs=tuple(runs))

    def key_in_table(self, text: str, number: int) -> str:
        """Returns a key that begins a text, such as "evolution.steps", as one of this table.

        Args:
            text: the text; it is returned unchanged if the key is not one of the table's.
            number: the number of the table.
        """
        section, _, rest = text.partition(".")
        if section != "evolution" or rest.partition(":")[0] not in self.names:
            return text
        return f"evolution.drawn[{number}].{rest}"

    @override
    def to_table(self) -> dict[str, Any]:
        table = {k: v for k, v in self.runs[0].to_table().items() if k in self.names}
        if len(self.runs) > 1:
            table["steps"] = [self.runs[0].steps, self.runs[-1].steps]
        return table


def _counts(ends: Sequence[Any]) -> range:
    """Returns the numbers of steps from the fewest to the most."""
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in ends)
    if len(ends) != 2 or not whole or not 1 <= ends[0] < ends[1] <= MOST_DRAWN:
        must = f"must be a whole number, or two from 1 to at most {MOST_DRAWN}, rising"
        raise ProblemsError([Problem("steps", f"= {list(ends)}: {must}")])
    return range(ends[0], ends[1] + 1)


class EvolutionRanges(EvolutionOptions):
    """The section [evolution] of universes whose runs may differ.

    Attributes:
        drawn: tables of keys of this section. Each universe has the keys of one table instead of
            the section's. The tables have turns, in a random order. If steps are [fewest, most],
            their number is random. None if all runs are the same.
    """

    drawn: tuple[RunDraw, ...] | None = Field(
        default=None,
        description='a list of tables of keys of this section, such as {correction = "network"}; '
        "steps may be [fewest, most]",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_drawn(cls, keys: Any, info: ValidationInfo) -> Any:
        tables = keys.get("drawn") if isinstance(keys, Mapping) else None
        if not isinstance(tables, list | tuple):
            return keys
        section = {key: value for key, value in keys.items() if key != "drawn"}
        try:
            cls.model_validate(section, context=info.context)
        except ValidationError:  # reported as problems of the section itself
            return section
        draws, problems = [], []
        for number, table in enumerate(tables):
            try:
                draws.append(RunDraw.read(section, table, cls, info.context))
            except ProblemsError as error:
                key = f"drawn[{number}]"
                problems += [
                    Problem(f"{key}.{each.key}".rstrip("."), each.what) for each in error.problems
                ]
        if not tables:
            problems.append(Problem("drawn", "= []: must have at least one table, or be left out"))
        if problems:
            raise ProblemsError(problems)
        return {**section, "drawn": tuple(draws)}
