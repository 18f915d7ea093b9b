"""The section [observation] of a training's run file, and what data sets tell of theirs.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowpm_dist.config.checks import ParsedRunFile, Problem
from flowpm_dist.config.dataset_tables import stated
from flowpm_dist.config.light_cone import SECTION, light_cone_rules, maps_fit
from flowpm_dist.config.observation_rules import (
    files_fit,
    given_priors,
    model_fits,
    needed_noise,
    nuisances_fit,
    redshifts_fit,
)
from flowpm_dist.cosmoflow.planning.declarations import declaration
from flowpm_dist.cosmoflow.volumes.record_files import RecordError, read_header
from flowpm_dist.jobs.light_cone import ConvergenceOptions
from flowpm_dist.observables.lensing.options import ShapeNoiseOptions
from flowpm_dist.observables.options import ObservationOptions
from flowpm_dist.observables.record import BARE, ObservationRecord
from flowpm_dist.options import Options

OF_DENSITIES = ("log1p", "log1p-counts")
"""Inputs of a network that take no values below 0."""


FEWEST = 6
"""Pixels along a side of maps whose statistics are measured, also at half the resolution."""

OF_MAPS = "flowpm_dist.cosmoflow.network.map_models:convolutions"
"""A network of maps, see there."""


def observation_of(file: ParsedRunFile) -> ObservationOptions:
    """Returns the section [observation], or what is seen without one."""
    found = file.sections.get("observation")
    return found if isinstance(found, ObservationOptions) else BARE.options


def input_of(options: ObservationOptions) -> str:
    """Returns what is done to volumes of an observation before a network sees them."""
    if options.kind != "density":
        return "log1p-counts" if options.kind == "counts" else options.kind
    return "log1p" if options.is_positive else "asinh"


def lpt_order_of(file: ParsedRunFile) -> dict[str, int]:
    """Returns the order of LPT that the structure must have, where [initial] does not give it."""
    given = file.sections["initial"].model_fields_set
    asked = observation_of(file)
    needed = asked.structure in ("1lpt", "2lpt") and "lpt_order" not in given
    return {"lpt_order": asked.lpt_order} if needed else {}


def _simulates(file: ParsedRunFile) -> bool:
    return bool(file.value("data", "source") == "simulate")


def _of_model(file: ParsedRunFile) -> Iterator[Problem]:
    yield from model_fits(file)
    yield from nuisances_fit(file)
    yield from needed_noise(file, ("mean_count", "counts"))
    if not _simulates(file):
        return
    yield from files_fit(file)
    yield from redshifts_fit(file)
    structure, order = file.value("observation", "structure"), file.value("initial", "lpt_order")
    given = file.given.get("initial", {})
    if structure in ("1lpt", "2lpt") and "lpt_order" in given and order != int(structure[0]):
        what = f'= {order}: observation.structure = "{structure}" needs {structure[0]}'
        yield Problem("initial.lpt_order", what)


def _targets(file: ParsedRunFile) -> Iterator[Problem]:
    """Those that the network is to find are some of those that vary."""
    given = file.given.get("priors", {})
    for name in file.value("priors", "targets") or ():
        if name not in given or name in ("sampling", "targets"):
            what = f"= {given['targets']}: [priors] has no {name}: give its range there"
            yield Problem("priors.targets", what)


def _maps(file: ParsedRunFile) -> Iterator[Problem]:
    """Maps are simulated while a Keras model learns from them, and are not periodic."""
    maps = file.value("observation", "kind") == "convergence"
    chosen, name = file.value("network", "input"), file.value("network", "name")
    if chosen is not None and (chosen == "convergence") != maps:
        kind = file.value("observation", "kind") or "density"
        what = f'= "{chosen}": does not go with observation.kind = "{kind}"'
        yield Problem("network.input", what)
    if not maps:
        return
    if not _simulates(file) and (source := file.value("data", "source")) is not None:
        what = f'= "{source}": maps are simulated while the network learns; must be "simulate"'
        yield Problem("data.source", what)
    if name is not None and not declaration(name).is_keras:
        what = f'= "{name}": sees volumes; of maps it must be a Keras model, such as "{OF_MAPS}"'
        yield Problem("network.name", what)
    cone = file.sections.get(SECTION)
    if isinstance(cone, ConvergenceOptions):
        if isinstance(cone.pixels, int) and cone.pixels < FEWEST:
            yield Problem(f"{SECTION}.pixels", f"= {cone.pixels}: must be at least {FEWEST}")
        noise = cone.shape_noise
        if isinstance(noise, ShapeNoiseOptions) and "seed" in noise.model_fields_set:
            what = "is given, but each universe has noise of its own, by data.seed: leave it out"
            yield Problem(f"{SECTION}.shape_noise.seed", what)
    if file.value("data", "augment") is True:
        what = "= true: maps have edges, where a shift leaves a seam: give "
        yield Problem("data.augment", f'{what}"symmetries" or false')
    if file.value("cosmology", "transfer") == "camb":
        what = '= "camb": maps are made of many cosmologies at once: use "eisenstein-hu"'
        yield Problem("cosmology.transfer", what)


def _input(file: ParsedRunFile) -> Iterator[Problem]:
    """The network's input takes what is seen."""
    options, chosen = observation_of(file), file.value("network", "input")
    if options.kind == "convergence":
        return
    if chosen in OF_DENSITIES and not options.is_positive:
        what = f'= "{chosen}": what [observation] sees may be below 0; give "asinh" or "density"'
        yield Problem("network.input", what)


def _augment(file: ParsedRunFile) -> Iterator[Problem]:
    """A mask, and noise that differs from cell to cell, stay where they are."""
    files = " and ".join(reversed(observation_of(file).files))
    if files and file.value("data", "augment"):
        what = f"would turn the {files} of [observation] with the volume: give false, or leave it"
        yield Problem("data.augment", f"{what} out")


def _of_dataset(file: ParsedRunFile) -> Iterator[Problem]:
    """What [observation] says of a dataset is what the dataset tells."""
    named, section = file.value("data", "folder"), file.sections.get("observation")
    if file.value("data", "source") != "files" or named is None:
        return
    if "observation" not in file.given or not isinstance(section, ObservationOptions):
        return
    try:
        record = stated(read_header(file.folder / named)[0])
    except RecordError:
        return
    if record is None:
        return
    given = {name: file.value("priors", name) for name in given_priors(file)}
    drawn = {name: ends for name, ends in given.items() if isinstance(ends, tuple)}
    differences = ObservationRecord(section, drawn).differences(record)
    for difference in differences:
        what = f"is not that of the dataset in {named}: {difference}; give that, or leave it out"
        yield Problem("observation", what)
    for name, ends in drawn.items():
        there = record.nuisances.get(name)
        if not differences and there != ends:
            how = "all have the same" if there is None else f"were drawn from {list(there)}"
            what = f"= {list(ends)}: the volumes in {named} {how}: give that, or leave it out"
            yield Problem(f"priors.{name}", what)


RULES = [_of_model, maps_fit, light_cone_rules, _maps, _targets, _input, _augment, _of_dataset]
"""All that must hold between [observation] and the rest of a training's run file."""


def record_of(
    section: Options, nuisances: Mapping[str, tuple[float, float]], *, simulates: bool
) -> ObservationRecord | None:
    """Returns what is seen of a training's universes; None of files that do not tell it.

    Args:
        section: [observation].
        nuisances: the ranges of its parameters that vary, targets or not.
        simulates: whether the universes are simulated.
    """
    assert isinstance(section, ObservationOptions)
    if simulates or section.model_fields_set:
        return ObservationRecord(section, nuisances)
    return None
