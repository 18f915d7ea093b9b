"""The run file of `flowpm-dist simulate`, and the rules that other run files share with it.

Nothing here imports TensorFlow, Horovod or MPI, so that the mistakes of a file are reported within
a second, before any work begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from flowpm_dist.config.checks import (
    ConfigError,
    ParsedRunFile,
    Problem,
    Rule,
    check_sections,
    exactly_one,
    fitting_mesh,
    models_of,
    problems_of,
    read_table,
    to_toml,
)
from flowpm_dist.config.dependent_keys import DependentKeys, idle_key_problems, idle_keys
from flowpm_dist.config.full_sky import OF_SHELLS, full_sky_rules, full_sky_work
from flowpm_dist.config.light_cone import (
    OF_PLANES,
    SECTION,
    light_cone_model,
    light_cone_rules,
    light_cone_work,
)
from flowpm_dist.config.sections import (
    ROUNDED,
    EvolutionSection,
    InitialSection,
    IntegratorOptions,
    ResultsSection,
)
from flowpm_dist.config.settings import Settings
from flowpm_dist.cosmology.options import CosmologyOptions
from flowpm_dist.cosmology.ranges import LATEST_DARK_ENERGY, dark_energy_fades
from flowpm_dist.cosmology.time_steps import EQUAL_STEPS, SAME
from flowpm_dist.evolution.integrators import INTEGRATORS
from flowpm_dist.evolution.options import RunOptions
from flowpm_dist.grid.decomposition import default_mesh, misfits, parse_mesh
from flowpm_dist.grid.options import BoxOptions, MeshOptions
from flowpm_dist.io.white_noise_file import WhiteNoiseError, check_white_noise_file
from flowpm_dist.jobs.full_sky import FullSkyLensingOptions, FullSkyWork
from flowpm_dist.jobs.light_cone import LensingOptions, LightConeWork
from flowpm_dist.jobs.options import OutputOptions, output_name
from flowpm_dist.options import Options, three

GOES_WITH = (
    DependentKeys(
        "initial.seed",
        (),
        ("initial.noise", "initial.fixed_amplitude", "initial.paired"),
        goes_with="a seed, not with white_noise",
        default_may_stand=True,
    ),
    DependentKeys(
        "output.format",
        ("zarr",),
        ("output.fields",),
        goes_with="zarr; other formats hold the particles alone, as positions, velocities and ids",
    ),
    DependentKeys("run.precision", ("float32",), ROUNDED, default_may_stand=True),
    OF_PLANES,
    OF_SHELLS,
)
"""Keys that have no meaning beside some values of others."""


class RunConfig(Options):
    """A checked run file, see `load`."""

    box: BoxOptions
    cosmology: CosmologyOptions
    initial: InitialSection
    evolution: EvolutionSection
    mesh: MeshOptions
    run: RunOptions
    results: ResultsSection
    output: OutputOptions
    lightcone: LensingOptions | FullSkyLensingOptions | None = None

    def resolved(self) -> str:
        """Returns the run file as TOML with all defaults and full paths; `load` reads it back.

        Keys that have no meaning beside the others are left out.
        """
        return to_toml(self, idle_keys(self, GOES_WITH))

    @property
    def light_cone(self) -> LightConeWork | FullSkyWork | None:
        """What the run sees on its light cone."""
        if self.lightcone is None:
            return None
        size = three(self.box.size)
        cells = [self.evolution.mesh_factor * n for n in self.box.grid]
        if isinstance(self.lightcone, FullSkyLensingOptions):
            return full_sky_work(self.lightcone, self.cosmology, size, cells, self.box.grid)
        return light_cone_work(self.lightcone, self.cosmology, size, cells, self.box.grid)

    def with_mesh(self, shape: str) -> RunConfig:
        """Returns the same run on a mesh of another shape."""
        return self.model_copy(update={"mesh": MeshOptions(shape=shape)})


SECTIONS = models_of(RunConfig)


def load(path: str | Path, settings: Settings | None = None) -> RunConfig:
    """Read and check the run file of a simulation.

    Args:
        path: of the TOML file; paths inside the file are relative to its folder.
        settings: values in place of the file's own.

    Raises:
        ConfigError: the file has mistakes; the error has all of them.
    """
    return check(read_table(path, settings), Path(path))


def check(table: Mapping[str, Any], source: Path) -> RunConfig:
    """Check the tables of a TOML file, and return the run they describe.

    Args:
        table: sections and their keys.
        source: path of the file; paths inside the file are relative to its folder.

    Raises:
        ConfigError: there are mistakes; the error has all of them.
    """
    rules: list[Rule] = [
        amplitude_rule, _origin, universe_rules, _white_noise, evolution_rules, _output_times,
        light_cone_rules, full_sky_rules, _idle,
    ]  # fmt: skip
    models = {**SECTIONS, SECTION: light_cone_model(table)}
    checked = check_sections(table, source, models, rules, optional=(SECTION,))
    return RunConfig.model_validate(checked)


def amplitude_rule(file: ParsedRunFile) -> Iterator[Problem]:
    """Yield a problem unless one amplitude of the power spectrum is given."""
    return exactly_one(file, ("cosmology", "A_s"), ("cosmology", "sigma8"))


def _origin(file: ParsedRunFile) -> Iterator[Problem]:
    return exactly_one(file, ("initial", "seed"), ("initial", "white_noise"))


def universe_rules(file: ParsedRunFile) -> Iterator[Problem]:
    """Yield problems between cosmological parameters, fixed or anywhere in their priors."""
    (_, matter), (where, baryons) = (_given_of(file, key) for key in ("Omega_m", "Omega_b"))
    if matter and baryons and max(baryons) >= min(matter):
        what = f"= {_shown(baryons)}: must be below Omega_m = {_shown(matter)}"
        yield Problem(where, what)
    if baryons and min(baryons) == 0 and file.value("cosmology", "transfer") == "camb":
        what = f'= {_shown(baryons)}: transfer = "camb" needs baryons, above 0'
        yield Problem(where, f'{what}; or use transfer = "eisenstein-hu"')
    (_, w0), (where, wa) = (_given_of(file, key) for key in ("w0", "wa"))
    if w0 and wa and not dark_energy_fades(max(w0), max(wa)):
        what = f"= {_shown(wa)}: w0 + wa must be at most {LATEST_DARK_ENERGY}, or dark energy would"
        yield Problem(where, f"{what} matter early")


def _given_of(file: ParsedRunFile, name: str) -> tuple[str, list[float]]:
    """Returns the key of a cosmological parameter, and its value or its lowest and highest one."""
    if (prior := file.value("priors", name)) is not None:
        return f"priors.{name}", list(prior)
    value = file.value("cosmology", name)
    return f"cosmology.{name}", [] if value is None else [value]


def _shown(values: list[float]) -> str:
    return str(values if len(values) > 1 else values[0])


def _white_noise(file: ParsedRunFile) -> Iterator[Problem]:
    noise, grid = file.value("initial", "white_noise"), file.value("box", "grid")
    if noise is None:
        return
    try:
        check_white_noise_file(file.folder / noise, None if grid is None else three(grid))
    except WhiteNoiseError as error:
        yield Problem("initial.white_noise", f"= '{noise}': {error}")


def _idle(file: ParsedRunFile) -> Iterator[Problem]:
    return idle_key_problems(file, GOES_WITH)


def _output_times(file: ParsedRunFile) -> Iterator[Problem]:
    output, steps = file.sections.get("output"), file.sections.get("evolution")
    given = [key for key in ("a", "redshifts") if key in file.given.get("output", {})]
    if len(given) == 2:
        yield Problem("output.redshifts", "is given beside a: give one of them")
    if not (isinstance(output, OutputOptions) and isinstance(steps, EvolutionSection) and given):
        return
    first, last, where = steps.first, steps.last, f"output.{given[0]}"
    times = output.times()
    if first is None or last is None:
        return
    for a in times:
        if not first * (1 - SAME) <= a <= last * (1 + SAME):
            found, low, high = (a, first, last)
            if given[0] == "redshifts":
                found, low, high = (1 / x - 1 if x else math.inf for x in (a, last, first))
            name = "z" if given[0] == "redshifts" else "a"
            what = f"has {name} = {found:g}: must be from {low:g} to {high:g}, as the steps are"
            yield Problem(where, what)
    names = [output_name(a) for a in times]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield Problem(where, f"has two of one name, {', '.join(twice)}: must differ by 0.0001")


def evolution_rules(file: ParsedRunFile) -> Iterator[Problem]:
    """Yield problems between the keys of [evolution]."""
    evolution, given = file.sections.get("evolution"), file.given.get("evolution", {})
    if not isinstance(evolution, EvolutionSection):
        return
    scheme, start, stop = evolution.integrator, evolution.a_start, evolution.a_stop
    if "edges" in given:
        if both := [key for key in EQUAL_STEPS if key in given]:
            what = f"is given beside {', '.join(both)}: give either the edges or the equal steps"
            yield Problem("evolution.edges", what)
    elif start is not None and stop is not None and start >= stop:
        yield Problem("evolution.a_start", f"= {start}: must be below a_stop = {stop}")
    elif start == 0 and evolution.spacing == "log a":
        what = '= "log a": must start later than a_start = 0'
        yield Problem("evolution.spacing", what)
    kind = INTEGRATORS.get(scheme)
    if kind is None:
        return
    if evolution.first == 0 and not kind.starts_at_zero:
        key = "edges" if "edges" in given else "a_start"
        able = " and ".join(name for name, other in INTEGRATORS.items() if other.starts_at_zero)
        what = f"starts at 0, which only {able} can; {scheme} must start later"
        yield Problem(f"evolution.{key}", what)
    for key in sorted(set(given) & set(IntegratorOptions.model_fields) - set(kind.model_fields)):
        owners = [name for name, other in INTEGRATORS.items() if key in other.model_fields]
        what = f"is given, but {scheme} has none; it goes with {' and '.join(owners)}"
        yield Problem(f"evolution.{key}", what)
    try:
        evolution.scheme  # noqa: B018 - its options are checked
    except ValidationError as error:
        yield from problems_of("evolution", {"evolution": kind}, given, error)
    if kind.uses_lpt and file.value("initial", "lpt_order") == 1:
        yield Problem("initial.lpt_order", f"= 1: {scheme} follows LPT of order 2; must be 2 or 3")


class OfOneBox(Protocol):
    """A run file of one universe."""

    @property
    def box(self) -> BoxOptions:
        """The grid and the size of the universe."""

    @property
    def mesh(self) -> MeshOptions:
        """The mesh that the grid is split over."""


def check_mesh(config: OfOneBox, ranks: int, *, source: Path, shape: str | None = None) -> str:
    """Returns the shape of the mesh, such as "row:2,col:2": the given one, or one that fits.

    Args:
        config: the run file.
        ranks: number of ranks of the job.
        source: path of the run file, for messages.
        shape: value of `--mesh`, which is taken instead of the run file's.

    Raises:
        ConfigError: the text is no shape, its sizes do not multiply to `ranks`, or an axis does not
            divide its side of the grid.
    """
    grid = config.box.grid

    def misfits_of(text: str) -> list[str]:
        return misfits(parse_mesh(text), grid, ranks)

    if shape or config.mesh.shape:
        return fitting_mesh(shape, config.mesh.shape, misfits_of, source)
    try:
        return default_mesh(ranks, grid)
    except ValueError as error:
        raise ConfigError(source, [Problem("box.grid", f"= {list(grid)}: {error}")]) from error
