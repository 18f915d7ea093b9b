"""Values with units: every public argument that takes numbers converts them, or refuses them.

`unit_family.py` lists these arguments. Two tests here hold the list complete: one compares it with
the signatures of public names, and one compares units with the descriptions of all options.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import astropy.cosmology.units as cu
import astropy.units as u
import numpy as np
import pytest
import tensorflow as tf
from astropy.table import Column
from unit_family import BOX, CUBE, FAMILY, Argument, universe

import flowpm_dist as fpm
from flowpm_dist.observables.light_cone import FlatField
from flowpm_dist.options import Options, Unit, in_unit
from flowpm_dist.options.units import UNITS

H = cu.littleh
CONVERTED: dict[str, tuple[Any, float]] = {
    "": (u.percent, 100),
    "redshift": (cu.redshift, 1),
    "Mpc/h": (u.kpc / H, 1e3),
    "h/Mpc": (H / u.Gpc, 1e3),
    "(Mpc/h)^3": (u.Gpc**3 / H**3, 1e-9),
    "(h/Mpc)^3": (H**3 / u.Gpc**3, 1e9),
    "1/Mpc": (1 / u.Gpc, 1e3),
    "deg": (u.arcmin, 60),
    "rad": (u.mrad, 1e3),
    "sr": (u.mrad**2, 1e6),
    "deg^2": (u.arcmin**2, 3600),
    "1/arcmin^2": (1 / u.deg**2, 3600),
    "K": (u.mK, 1e3),
    "eV": (u.meV, 1e3),
}
"""Unit of an argument -> another unit that is converted to it, and how many of them are one."""
REFUSED = {
    "Mpc/h": u.Mpc,  # without h: another length for each cosmology
    "h/Mpc": 1 / u.Mpc,
    "(Mpc/h)^3": u.Mpc**3,
    "(h/Mpc)^3": u.Mpc**-3,
    "1/Mpc": H / u.Mpc,
    "Mpc/h H0": u.km / u.s,
    "K": u.kpc,
}
"""Unit of an argument -> one that is refused; kpc for all others, and redshifts for numbers."""


def quantity(value: Any, unit: Any, factor: float = 1.0) -> u.Quantity:
    """Returns a value in a unit of which `factor` are one of its own; integers stay integers."""
    if isinstance(value, int) or np.asarray(value).dtype.kind == "i":
        return u.Quantity(value, u.one if factor != 1 else unit, dtype=int)
    return u.Quantity(np.asarray(value) * np.asarray(value).dtype.type(factor), unit)


def numbers_in(result: Any) -> Iterator[np.ndarray]:
    """Yields the numbers of a result, which may be an object."""
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, Options):
        result = list(dict(result).values())
    if isinstance(result, list | tuple):
        for part in result:
            yield from numbers_in(part)
    elif isinstance(result, int | float | np.generic | np.ndarray | tf.Tensor | fpm.Field):
        yield np.asarray(result, np.float64).ravel()
    elif not isinstance(result, fpm.Box) and hasattr(result, "__dict__"):
        yield from numbers_in(vars(result))


@pytest.mark.parametrize("row", FAMILY, ids=lambda row: f"{row.of}-{row.name}")
def test_a_unit_that_needs_a_cosmology_or_does_not_fit_is_refused_by_name(row: Argument):
    for unit in {REFUSED.get(row.unit, u.kpc), *([cu.redshift] if row.unit == "" else [])}:
        with pytest.raises(ValueError, match=rf"\b{row.name}\b.*= .*must be "):
            row.call(quantity(row.value, unit))


@pytest.mark.parametrize(
    "row", [row for row in FAMILY if row.evaluated], ids=lambda row: f"{row.of}-{row.name}"
)
def test_other_units_give_the_results_of_plain_numbers(row: Argument):
    unit, factor = CONVERTED[row.unit]
    found, expected = (
        np.concatenate(list(numbers_in(row.call(value))))
        for value in (quantity(row.value, unit, factor), row.value)
    )
    assert found.size
    # Conversion rounds once; what is computed from it may be a hundred times as sensitive.
    kind = np.asarray(row.value).dtype
    rounding = 100 * np.finfo(kind if kind.kind == "f" else float).eps
    np.testing.assert_allclose(found, expected, rounding, rounding * np.abs(expected).max())


def test_plain_values_are_returned_as_they_are():
    values = [1.0, 3, True, None, "auto", CUBE, np.float32(2), [1.0, 2.0], (CUBE, 1.0), BOX]
    values += [tf.constant(1.0), tf.Variable(1.0), Column([1.0, 2.0]), FlatField]
    for value in values:
        assert in_unit("value", value, "Mpc/h") is value


class OtherQuantity:
    """A quantity of another package, as pint and unyt have them."""

    def __init__(self, units: Any) -> None:
        self.units = units

    def __float__(self) -> float:
        return 100.0

    def __str__(self) -> str:
        return f"100 {self.units}"


def test_quantities_of_other_packages_are_refused_by_name():
    class Kiloparsec:
        __str__ = staticmethod(lambda: "kpc")

    for units in (Kiloparsec(), "kpc"):
        message = "box_size = 100 kpc: must be in Mpc/h; give plain numbers"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            fpm.Simulation(universe(), 8, OtherQuantity(units), [0.1, 1.0])
    # xarray has the units of an array as a text; those of this package are right.
    assert fpm.Simulation(universe(), 8, OtherQuantity("Mpc/h"), [0.1, 1.0]).box.size == (100,) * 3


def test_a_column_called_unit_is_no_unit_and_named_tuples_are_looked_into():
    table = np.rec.array([(1.0, 2.0)], names="unit,other")
    assert in_unit("k", table, "h/Mpc") is table
    sides = NamedTuple("Sides", [("x", object), ("y", object)])(32 * u.Mpc / H, 16.0)
    assert in_unit("box_size", sides, "Mpc/h") == (32.0, 16.0)


@pytest.mark.parametrize("unit", [unit for unit in UNITS if UNITS[unit][1]])
def test_the_remedy_of_a_message_is_right(unit: str):
    base, power = UNITS[unit]
    given = [3.0 * u.Unit(base), u.Quantity([3.0, 4.0], base), Column([3.0, 4.0], unit=base)]
    for value in given:
        with pytest.raises(ValueError, match=rf"must be in {re.escape(unit)}; give ") as refusal:
            in_unit("value", value, unit)
        remedy = str(refusal.value).partition("; give ")[2]
        found = eval(remedy, {"value": value, "h": 0.7})
        own = u.Quantity(value).to_value(
            u.Unit(base) / H**power, cu.with_H0(70 * u.km / u.s / u.Mpc)
        )
        np.testing.assert_allclose(found, own, rtol=1e-14)


def test_magnitudes_are_ratios_and_no_lengths():
    assert in_unit("bias", u.Magnitude(-2.5)) == pytest.approx(10.0, rel=1e-14)
    with pytest.raises(ValueError, match="box_size = 3.0 mag.*: must be in Mpc/h"):
        in_unit("box_size", u.Magnitude(3.0), "Mpc/h")


def test_a_value_in_a_list_is_named_and_the_others_may_be_plain():
    message = "box_size[1] = 64.0 Mpc: must be in Mpc/h; give box_size[1].to_value('Mpc') * h"
    with pytest.raises(ValueError, match=re.escape(message)):
        fpm.Simulation(universe(), 8, [64.0, 64 * u.Mpc, 64.0], [0.1, 1.0])
    sides = [64.0, 64000 * u.kpc / H, 64.0]
    assert fpm.Simulation(universe(), 8, sides, [0.1, 1.0]).box.size == (64.0, 64.0, 64.0)


def test_values_of_run_files_with_units_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="size = 64.0 Mpc: must be in the unit of run files"):
        fpm.run({"box": {"size": 64 * u.Mpc}}, tmp_path / "out", command="simulate")
    settings = {"box.size": [64 * u.Mpc / H] * 3}
    with pytest.raises(ValueError, match="box.size = 64.0 Mpc / littleh: must be in the unit of"):
        fpm.run({"box": {}}, tmp_path / "out", command="simulate", settings=settings)
    assert not list(tmp_path.iterdir())


def test_astropy_is_imported_for_its_quantities_only():
    code = "import sys; from flowpm_dist.options import in_unit; in_unit('x', [1.0], 'Mpc/h')"
    subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'astropy' not in sys.modules"], check=True
    )


def models(model: type[Options]) -> Iterator[type[Options]]:
    """Yields all models of options of this package."""
    for job in ("simulate", "reconstruction", "emulate", "studies", "studies.tuning"):
        importlib.import_module(f"flowpm_dist.{job}.options")
    for module in ("cosmoflow.planning.options", "posteriors.options"):
        importlib.import_module(f"flowpm_dist.{module}")
    for each in model.__subclasses__():
        yield from (each, *models(each)) if each.__module__.startswith("flowpm_dist") else ()


MEANINGS = {
    "Mpc/h": r"\bMpc/h\b|^a length",
    "redshift": r"\ba redshift\b|\bredshifts\b",
    "deg": r"\[deg\]",
    "1/arcmin^2": "per square arcmin",
}
"""A unit of options -> what the descriptions of these say."""
LENSED = "LensedSky FlatLensingOptions FullSkyLensingOptions ConvergenceOptions".split()
MIXED = {"PowerFile.unit", "SearchOptions.stages", *(f"{sky}.sources" for sky in LENSED)}
"""Options of several numbers with different units, and tables with options of their own."""


def test_the_units_of_options_are_those_of_their_descriptions():
    seen = set()
    for model in models(Options):
        for name, field in model.model_fields.items():
            units = {each.text for each in field.metadata if isinstance(each, Unit)}
            assert units <= set(UNITS)
            said = {n for n, words in MEANINGS.items() if re.search(words, field.description or "")}
            if f"{model.__name__}.{name}" not in MIXED and name != "shift":
                assert units == said, f"{model.__name__}.{name}"
            seen |= units
    assert seen == set(MEANINGS)


NUMERIC = re.compile(r"\b(Any|float|int|Parameters?|ndarray|BinChoice|Pair|Unpack\[SolverKeys\])\b")
ROOMS = (
    "flowpm_dist",
    *(
        f"flowpm_dist.{room}"
        for room in "cosmology grid statistics observables observables.lensing "
        "observables.light_cone corrections reconstruction posteriors".split()
    ),
)


def public_calls() -> Iterator[tuple[str, Any]]:
    """Yields the public functions and classes of `ROOMS`, and the methods of these classes."""
    for room in map(importlib.import_module, ROOMS):
        for name in room.__all__:
            thing = getattr(room, name)
            if inspect.isfunction(thing):
                yield name, thing
            elif inspect.isclass(thing) and not issubclass(thing, Options | Exception):
                yield name, thing
                for method in (n for n in vars(thing) if n == "__call__" or n[0] != "_"):
                    found = getattr(thing, method)
                    if inspect.isfunction(found) or inspect.ismethod(found):
                        yield f"{name}.{method}", found


def public_arguments() -> Iterator[tuple[str, str]]:
    """Yields the arguments of public callables whose annotation has numbers."""
    for name, called in public_calls():
        for parameter in inspect.signature(called).parameters.values():
            note = str(parameter.annotation)
            if NUMERIC.search(note) and not re.search(r"Callable|Mapping\[str, Any\]", note):
                yield name, parameter.name


RESULTS = """AngularPower Bispectrum Calibration Catalogue Catalogue.of Catalogue.with_columns
Comparison CorrelationFunction CorrelationMultipoles FeatureDensity Histogram Iteration
Jacobian Multipoles ParticleSnapshot Peaks Posterior PowerSpectrum State State.of
State.leaving Wedges"""
"""Results and fitted objects, which this package makes."""
INNER = """Box.check_equal Box.function Box.place_of Box.whole ConvergenceModel.linear_response
ConvergenceModel.observed ConvergenceModel.run_and_observe ForwardModel.at_times
ForwardModel.linear_response ForwardModel.observe ForwardModel.run_and_observe Posterior.point
Progress.__call__ Progress.step Sources.density Sources.efficiency Sources.fractions Space.chosen
Space.local_values Space.normal Space.times State.particles_for StructureFormation.at_times
StructureFormation.state to_field to_spectrum Transform Transform.initial
UniverseModel.cosmology UniverseModel.factor UniverseModel.for_chains
UniverseModel.linear_response UniverseModel.matter_response UniverseModel.observed UniverseModel.run
UniverseModel.run_and_observe Universe.of Unknowns.plus Unknowns.times"""
"""What this package calls, and what a scheme of a user implements."""
COUNTS = """Calibration.too_wide Catalogue.members_of ConvergenceMaps.plot
ConvergenceMaps.write_fits DensityPlanes.plot DensityPlanes.write_fits Growth.ratio Growth.factor
PointCheckpoints Progress Simulation.box_of StructureFormation TabulatedDistribution.from_file
calibration_of convergence_power default_mesh default_stages first_points mode_means
read_particles run warm_up Universe.mock Universe.unit_normal"""
"""Whole numbers that count or choose, besides the arguments of the family."""
HANDED_ON = """AdjustedMicrocanonical.options Box.block_of.shape Chains.draws Chains.every
Cosmology.from_astropy.cosmology Cosmology.from_astropy.parameters Cosmology.replace.changes
FeatureDensity.quantiles.features FeatureDensity.warning.features GaussianMaps.sigma HMC.options
Learner.held_out Learner.options Learner.pairs LightCone.convergence.run
LightCone.convergence.seed LightCone.particles.run
LightCone.particles.seed LightCone.planes.run LightCone.planes.seed LogDensity.vector.parameters
MetropolisSampler.options
MetropolisSampler.step Microcanonical.options NonlinearPower.__call__.a NonlinearPower.__call__.k
Pair.start PowerTable.read.columns PowerTable.read.redshift
Posterior.plot.count Posterior.plot.features Posterior.plot.seed Sampler.options
Sampler.step Search.every Search.seed Search.tolerance Simulation.observed.particles
Simulation.observed.white_noise Simulation.run.particles
Simulation.warn_of_times.times
SourceDistribution.shift SourcePlane.density.chi UniverseModel.__call__.parameters
bin_edges.choice binned_compare.interlaced binned_compare.window box_of.box compare.interlaced
compare.window compressed.others compressed.seed correlation_coefficient.options
cross_power.interlaced cross_power.window halos.options transfer_function.options"""
"""Arguments that are handed on to a function of the family, or have another name there."""


def test_no_public_argument_that_takes_numbers_is_forgotten():
    known = {f"{row.of.removeprefix('reconstruction.')}.{row.name}" for row in FAMILY}
    known |= set(HANDED_ON.split())
    others = {*RESULTS.split(), *INNER.split(), *COUNTS.split()}
    named = set()
    for of, name in public_arguments():
        assert of in others or f"{of}.{name}" in known, f"{of}({name}) is not in the family"
        named |= {of, f"{of}.{name}"}
    assert not (others | set(HANDED_ON.split())) - named, "no such argument any more"
