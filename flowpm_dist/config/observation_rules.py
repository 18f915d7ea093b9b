"""What must hold between the keys of [observation], and between them and [priors].

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flowpm_dist.config.checks import ParsedRunFile, Problem, unknown_key
from flowpm_dist.config.dependent_keys import DependentKeys
from flowpm_dist.cosmology.time_steps import StepOptions
from flowpm_dist.observables.observations import file_misfits
from flowpm_dist.observables.options import BIASES, NUISANCE_AMPLITUDES, ObservationOptions
from flowpm_dist.observables.record import CLOSE
from flowpm_dist.options import three

GOES_WITH = (
    DependentKeys("observation.kind", ("density",), ("observation.sigma",)),
    DependentKeys("observation.kind", ("counts",), ("observation.mean_count",)),
    DependentKeys(
        "observation.kind",
        ("density", "counts"),
        tuple(f"observation.{key}" for key in ("redshift_space", "bias", "mask", "redshifts")),
    ),
    DependentKeys("observation.bias", (), ("observation.bias_scheme",), goes_with="bias"),
)
"""Keys that have no meaning beside some values of others."""


UNEVOLVED = ("linear", "1lpt", "2lpt")
"""Structures that make no steps: they are known at any time."""


def model_fits(file: ParsedRunFile) -> Iterator[Problem]:
    """The choices of the forward model fit each other and the integrator."""
    structure, axis, bias, own = (
        file.value("observation", key)
        for key in ("structure", "redshift_space", "bias", "bias_scheme")
    )
    if structure == "linear":
        what = "linear theory on the grid moves no particles; take 1lpt, 2lpt or pm, or"
        if axis is not None:
            yield Problem("observation.redshift_space", f'= "{axis}": {what} leave it out')
        if bias and own is None and "b" not in bias:
            yield Problem("observation.bias", f"= {bias}: {what} give b")
    if structure == "1lpt" and file.value("evolution", "integrator") == "cola":
        what = '= "cola": follows LPT of order 2; 1lpt makes no step, so that fastpm will do'
        yield Problem("evolution.integrator", what)


def redshifts_fit(file: ParsedRunFile) -> Iterator[Problem]:
    """The redshifts of channels are those of a simulation, the last that of its end."""
    asked, steps = file.value("observation", "redshifts"), file.sections.get("evolution")
    if asked is None or not isinstance(steps, StepOptions) or steps.last is None:
        return
    given = file.given["observation"]["redshifts"]
    end = 1.0 / steps.last - 1.0
    if abs(asked[-1] - end) > CLOSE * (1.0 + end):
        what = f"= {given}: the last must be that of the end of the simulation, {end:g}"
        yield Problem("observation.redshifts", what)
    first = steps.first if file.value("observation", "structure") not in UNEVOLVED else None
    if first is not None and 1.0 / (1.0 + asked[0]) < first:
        what = f"= {given}: the steps begin at redshift {1.0 / first - 1.0:g}"
        yield Problem("observation.redshifts", what)


def needed_noise(file: ParsedRunFile, *keys: tuple[str, str]) -> Iterator[Problem]:
    """What the kind of observation needs is given.

    Args:
        file: the run file.
        keys: each with the kind that needs it.
    """
    kind = file.value("observation", "kind")
    for key, wanted in keys:
        if kind == wanted and key not in file.given.get("observation", {}):
            allowed = ObservationOptions.model_fields[key].description
            what = f'is missing: with kind = "{kind}" it must be {allowed}'
            yield Problem(f"observation.{key}", what)


def given_priors(file: ParsedRunFile) -> list[str]:
    """Returns the names of nuisance parameters that [priors] gives, known or not."""
    priors = file.sections.get("priors")
    known = () if priors is None else type(priors).model_fields
    nuisances = {*BIASES, *NUISANCE_AMPLITUDES}
    return [key for key in file.given.get("priors", {}) if key in nuisances or key not in known]


def nuisances_fit(file: ParsedRunFile) -> Iterator[Problem]:
    """Nuisance parameters with a prior are some of the observation's, or of an own likelihood."""
    bias = file.given.get("observation", {}).get("bias", {})
    scheme = file.value("observation", "bias_scheme")
    own_likelihood = file.value("likelihood", "name") is not None
    maps = file.value("observation", "kind") == "convergence"
    models = {name: type(section) for name, section in file.sections.items()}
    for name in given_priors(file):
        where = f"priors.{name}"
        if name == "amplitude":
            if maps:
                yield Problem(where, "is given, but maps have no amplitude of a density")
            continue
        if name == "noise_amplitude" and not own_likelihood:
            if file.value("observation", "sigma") is None and not maps:
                yield Problem(where, "is given, but observation.sigma is not: give it there, too")
        elif isinstance(bias, dict) and name in bias:
            continue
        elif own_likelihood and name not in BIASES:
            continue  # known when the likelihood is made
        elif maps and name in BIASES:
            yield Problem(where, "is given, but maps of weak lensing have no bias: leave it out")
        elif name in BIASES or scheme is not None:
            advice = "give it there, too: the mock's, or about what is expected"
            yield Problem(where, f"is given, but observation.bias has no {name}: {advice}")
        else:
            yield Problem(where, unknown_key(name, "priors", models))


def files_fit(file: ParsedRunFile) -> Iterator[Problem]:
    """The files of the observation are there, and fit the box as far as they tell unread."""
    for key in ("sigma", "mask"):
        yield from fitting_file(file, "observation", key, None)


def fitting_file(file: ParsedRunFile, section: str, key: str, a: float | None) -> Iterator[Problem]:
    """A file that a key names is there, and fits the box as far as it tells without being read.

    Args:
        file: the run file.
        section: of the key.
        key: that may name a file.
        a: the scale factor that the file must be at.
    """
    grid, size = file.value("box", "grid"), file.value("box", "size")
    path = file.value(section, key)
    if not isinstance(path, str | Path):
        return
    wrong = file_misfits(
        file.folder / path,
        None if grid is None else three(grid),
        None if size is None else three(size),
        a,
    )
    yield from (Problem(f"{section}.{key}", what) for what in wrong)
