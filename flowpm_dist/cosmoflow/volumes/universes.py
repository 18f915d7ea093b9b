"""Simulated universes as training data: the makers of volumes and maps."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.catalogues.occupation import expected_density
from flowpm_dist.cosmoflow.volumes.draws import Draws, Lanes, Priors, priors_of
from flowpm_dist.cosmoflow.volumes.generations import Generation, Measured, measured
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.grid.field import Field
from flowpm_dist.initial.conditions import InitialConditions
from flowpm_dist.observables.convergence_model import ConvergenceModel
from flowpm_dist.observables.forward_model import ForwardModel
from flowpm_dist.observables.light_cone.section import ConvergenceOptions
from flowpm_dist.observables.noise import SurveyNoise
from flowpm_dist.observables.options import GalaxyOptions
from flowpm_dist.observables.record import BARE
from flowpm_dist.observables.tracers import LineOfSight
from flowpm_dist.observables.universe_model import MANY, SMALL, UniverseModel
from flowpm_dist.statistics.angular_spectra import angular_power
from flowpm_dist.statistics.histogram import DENSITIES, CellValues, map_histogram
from flowpm_dist.statistics.noisy_maps import LEVELS, NoisyMaps
from meshimpl.mesh_graph import one_graph
from meshimpl.process_mesh import ProcessMesh

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan

Values = Mapping[str, np.ndarray]
"""The varying parameters of universes by name, each [lane]."""
Tensors = Mapping[str, tf.Tensor]
"""The same as tensors."""

OF_SURVEY = 1
"""Key of the seeds of observational noise, which differ from the universes' own seeds."""


def as_volumes(kappa: np.ndarray) -> np.ndarray:
    """Returns maps [n, source, x, y] as volumes [n, x, y, 1]; several sources are channels."""
    volumes = np.moveaxis(kappa, 1, -1)[:, :, :, np.newaxis]
    return np.ascontiguousarray(volumes if kappa.shape[1] > 1 else volumes[..., 0])


def as_maps(volumes: np.ndarray) -> np.ndarray:
    """Returns maps [n, source, x, y] from volumes; inverts `as_volumes`."""
    channels = volumes if volumes.ndim == 5 else volumes[..., np.newaxis]
    return np.moveaxis(channels[:, :, :, 0], -1, 1)


def noise_key(channel: int, channels: int) -> tuple[int, ...]:
    """Returns the key of the seeds of a channel's noise; a single channel has the last key."""
    before = channels - 1 - channel
    return (OF_SURVEY, before) if before else (OF_SURVEY,)


@dataclass(eq=False)
class UniverseMaker(abc.ABC):
    """A maker of universes: it simulates one generation at a time, a universe for each lane.

    A subclass implements `see` and `observe`.

    Attributes:
        model: the model from white noise to the observed universe. Its simulation is on
            `mesh.without("replica")`, because each replica simulates its own universes; its
            cosmology gives the parameters without a prior.
        priors: the priors of all parameters that vary, and the seeds.
        lanes: this replica's lanes.
        targets: names of the parameters in each `Generation`; by default all that vary.
        groups: models in groups, one of which makes each universe, see `model_of`; by default
            `model` makes all. They have its box and the end of its run.
        many: whether each model makes so many universes that a graph may be worth it, see
            `is_whole`.
    """

    model: UniverseModel
    priors: Priors
    lanes: Lanes
    targets: tuple[str, ...] = ()
    groups: Sequence[Sequence[UniverseModel]] = field(default=(), kw_only=True)
    many: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.simulation = self.model.simulation
        self.targets = tuple(self.targets) or self.priors.names
        self.groups = self.groups or [[self.model]]
        self._box = self.simulation.box_of(self.at_once)
        self._initial = InitialConditions(self._box, self.simulation.options)
        self._graphs: dict[UniverseModel, Callable[..., tf.Tensor]] = {}

    def is_whole(self, model: UniverseModel) -> bool:
        """Whether a graph makes each universe of a model, see `one_graph`.

        They are small and on one rank, and no user's code takes part. In a graph each universe of a
        batch would have operations of its own.
        """
        box = self.simulation.box
        small = box.mesh.size == 1 and box.cells <= SMALL
        return self.many and small and model.is_built_in

    def observed(self, model: UniverseModel, seeds: np.ndarray, values: Values) -> tf.Tensor:
        """Returns this rank's part of universes without noise, `observe`; arguments as `see`."""
        names = tuple(values)

        def observe(white: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
            return self.observe(model, white, dict(zip(names, tf.unstack(columns), strict=True)))

        if model not in self._graphs:
            whole = self.is_whole(model)
            self._graphs[model] = one_graph(observe, self._box.mesh) if whole else observe
        white, columns = self._initial.white_noise(seeds), tf.constant([*values.values()])
        return model.retry_with_wider_halo(lambda: self._graphs[model](white, columns))

    @abc.abstractmethod
    def observe(self, model: UniverseModel, white: tf.Tensor, values: Tensors) -> tf.Tensor:
        """Returns what white noise becomes, [universe, ...]; may be a part of a graph.

        Args:
            model: the model.
            white: this rank's block of the white noise [universe, x, y, z].
            values: the varying parameters by name, float64 [universe].
        """

    def model_of(self, stream: str, number: int) -> UniverseModel:
        """Returns the model of a universe of a stream; groups have turns, in a random order."""
        turn, place = divmod(number, len(self.groups))
        order = self.priors.generator(stream, turn).permutation(len(self.groups))
        group = self.groups[order[place]]
        return group[int(self.priors.generator(stream, turn, place).integers(len(group)))]

    @property
    def at_once(self) -> int:
        """The number of universes of which each rank makes its part at once; 1 if models differ."""
        return 1 if self.models > 1 or self.is_whole(self.model) else self.lanes.count

    @property
    def models(self) -> int:
        """The number of models."""
        return sum(map(len, self.groups))

    @abc.abstractmethod
    def see(
        self,
        model: UniverseModel,
        seeds: np.ndarray,
        values: Values,
        noise_seeds: Callable[..., np.ndarray],
    ) -> tuple[np.ndarray, Measured]:
        """Returns observed universes, as in a `Generation`, and their statistics.

        Args:
            model: the model that makes them.
            seeds: the seeds of the white noise, int64 [universe].
            values: the varying parameters by name, each [universe].
            noise_seeds: returns the seeds of the observational noise for a key, int64 [universe],
                see `noise_key`.
        """

    def make(self, stream: str, generation: int, numbers: np.ndarray | None = None) -> Generation:
        """Simulates a generation. Must be called on all ranks of the replica together.

        Args:
            stream: the stream of the universes.
            generation: the number of the generation.
            numbers: the numbers of the universes of all lanes, int64 [batch]; by default in the
                order of the stream.

        Raises:
            HaloError: if a particle left the halo.
            ObservationError: see `ForwardModel.at_times`.
        """
        batch, begin = self.lanes.batch, generation * self.lanes.batch
        index = begin + np.arange(batch) if numbers is None else numbers
        index = index[self.lanes.first : self.lanes.first + self.lanes.count]
        drawn = self.priors.draw(stream, begin, batch)[index - begin]

        def seeds(*key: int) -> np.ndarray:
            return self.priors.noise_seeds(stream, begin, batch, *key)[index - begin]

        made = []
        for first in range(0, len(index), self.at_once):
            few = slice(first, first + self.at_once)
            values = dict(zip(self.priors.names, drawn[few].T, strict=True))
            model = self.model_of(stream, int(index[first]))
            made.append(self.see(model, seeds()[few], values, lambda *key, at=few: seeds(*key)[at]))
        volumes, statistics = zip(*made, strict=True)
        k, power, shares, edges = zip(*statistics, strict=True)
        columns = [self.priors.names.index(name) for name in self.targets]
        return Generation(
            np.concatenate(volumes),
            drawn[:, columns],
            index,
            seeds(),
            k[0],
            np.concatenate(power),
            np.concatenate(shares),
            edges[0],
        )


@dataclass(eq=False)
class VolumeMaker(UniverseMaker):
    """A maker of volumes: of densities or counts.

    Attributes:
        model, priors, lanes, targets, groups: see `UniverseMaker`; models are `ForwardModel`s.
        noise: the observational noise and the mask, if there are any.
        values: the kind of the observed values.
        times: increasing scale factors, one for each channel. The last is the end of the
            simulation, which is also the default.
    """

    noise: SurveyNoise | None = None
    values: CellValues = DENSITIES
    times: Sequence[float] | None = None

    def see(
        self,
        model: UniverseModel,
        seeds: np.ndarray,
        values: Values,
        noise_seeds: Callable[..., np.ndarray],
    ) -> tuple[np.ndarray, Measured]:
        """Returns volumes of densities or counts, and their statistics."""
        assert isinstance(model, ForwardModel)
        times = [float(self.simulation.edges[-1])] if self.times is None else list(self.times)
        if self.is_whole(model):
            channels = [Field(self.observed(model, seeds, values), self._box, model.painting)]
        else:
            universes = self._cosmologies({name: tf.constant(x) for name, x in values.items()})
            channels = model.at_times(times, seeds.tolist(), *universes)
        if self.noise is not None:
            louder = values.get("noise_amplitude")
            for number, field in enumerate(channels):
                of_noise = noise_seeds(*noise_key(number, len(channels))).tolist()
                observed = self.noise.observe(field.block, field.box, of_noise, louder)
                channels[number] = Field(tf.constant(observed), field.box)
        blocks = [field.block.numpy() for field in channels]
        volumes = blocks[0] if len(blocks) == 1 else np.stack(blocks, axis=-1)
        return volumes, measured(channels, self.values)

    @override
    def is_whole(self, model: UniverseModel) -> bool:
        # Batches of densities are as fast.
        alone = self.lanes.count == 1 or self.models > 1
        return alone and len(self.times or [1]) == 1 and super().is_whole(model)

    @override
    def observe(self, model: UniverseModel, white: tf.Tensor, values: Tensors) -> tf.Tensor:
        assert isinstance(model, ForwardModel)
        cosmologies, nuisances = self._cosmologies(values)
        field = Field(white, self._box)
        return model.observe(model.formation.state(model.simulation, field, cosmologies), nuisances)

    def _cosmologies(self, values: Tensors) -> tuple[list[Cosmology], Tensors]:
        """Returns the universes' cosmologies, of numbers where they are known, and the rest."""
        base = self.simulation.cosmology
        varied = [name for name in values if name in base.names]
        numbers = tf.stack([values[name] for name in varied], axis=1)
        rows = numbers.numpy() if tf.executing_eagerly() else tf.unstack(numbers)
        table = [row.tolist() if isinstance(row, np.ndarray) else tf.unstack(row) for row in rows]
        cosmologies = [base.replace(**dict(zip(varied, row, strict=True))) for row in table]
        return cosmologies, {name: x for name, x in values.items() if name not in varied}


@dataclass(eq=False)
class MapMaker(UniverseMaker):
    """A maker of maps of the convergence, with the noise of the shapes of galaxies.

    Maps are volumes of one layer, with a channel for each source: [lane, x, y, 1], or with
    channels. Each replica is one rank, which has its maps whole.

    Attributes:
        model: a `ConvergenceModel`, see `UniverseMaker`. So are the models in `groups`.
        cone: the light cone, with noise. The seed of its noise is not used: each universe has a
            separate seed.
        priors, lanes, targets, groups: see `UniverseMaker`. "noise_amplitude" multiplies the noise.
    """

    cone: ConvergenceOptions = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        first, *others = itertools.chain(*self.groups)
        first.hold_halo()  # the halo of LPT, which is the same for all
        for model in others:
            model.hold_halo(first)

    def see(
        self,
        model: UniverseModel,
        seeds: np.ndarray,
        values: Values,
        noise_seeds: Callable[..., np.ndarray],
    ) -> tuple[np.ndarray, Measured]:
        """Returns maps with the noise of shapes, as volumes of one layer, and their statistics."""
        varied = {name: x for name, x in values.items() if name != "noise_amplitude"}
        clean = self.observed(model, seeds, varied).numpy()
        of_noise = noise_seeds(OF_SURVEY).tolist()
        louder = values.get("noise_amplitude", np.ones(len(of_noise)))
        noise = [x * self.cone.noise(seed)[:, 0] for x, seed in zip(louder, of_noise, strict=True)]
        kappa = (clean + np.stack(noise)).astype(clean.dtype)
        maps = NoisyMaps(kappa, self.cone.fov, self.cone.pixel_sigma())
        spectra = angular_power(kappa, maps.fov, maps.power_edges)
        # The share of the pixels in bins of convergence divided by the noise's standard deviation.
        levels = map_histogram(kappa / maps.sigma, LEVELS)
        power, shares = (
            each.reshape(len(kappa), -1) for each in (spectra.power, levels.counts / levels.cells)
        )
        return as_volumes(kappa), (spectra.ell, power, shares, LEVELS)

    @override
    def observe(self, model: UniverseModel, white: tf.Tensor, values: Tensors) -> tf.Tensor:
        return model(white, values)


def maker_of(
    plan: TrainingPlan, mesh: ProcessMesh, lanes: Lanes, universes: int = 0
) -> UniverseMaker:
    """Returns the maker of a training's universes.

    Its simulation has the cosmology in the middle of the priors.

    Args:
        plan: the training.
        mesh: all ranks.
        lanes: this replica's lanes.
        universes: how many all replicas will make, at least.

    Raises:
        ObservationError: a user's object cannot be used.
        VolumeError: the file of a mask or of noise cannot be read.
    """
    ranks, observation = mesh.without("replica"), (plan.record or BARE).options
    shared = priors_of(plan), lanes, tuple(plan.priors.ranges)

    def model_of(run: TrainingPlan) -> UniverseModel:
        simulation = run.simulation(Cosmology(**plan.middle), mesh=ranks)
        if plan.lightcone is not None:
            return ConvergenceModel.of(simulation, plan.lightcone)
        return observation.forward_model(simulation)

    groups = [[model_of(run) for run in runs] for runs in plan.run_plans]
    model, makers = groups[0][0], mesh.axis_size("replica") * sum(map(len, groups))
    many = universes >= MANY * makers
    if plan.lightcone is not None:
        return MapMaker(model, *shared, groups=groups, many=many, cone=plan.lightcone)
    noise, simulation = None, model.simulation
    if observation.is_noisy or observation.value("mask") is not None:
        noise = SurveyNoise(observation, simulation.box)
    values, times = cell_values_of(plan), observation.scale_factors(float(simulation.edges[-1]))
    return VolumeMaker(model, *shared, noise, values, times, groups=groups, many=many)


def cell_values_of(plan: TrainingPlan) -> CellValues:
    """Returns the kind of a training's values; a density where no observation is known."""
    observation = (plan.record or BARE).options
    count = observation.value("mean_count")
    if isinstance(observation, GalaxyOptions):
        # A scale for bins, of about the right size in any universe.
        density = expected_density(Theory(Cosmology.planck18()), observation.galaxies)
        count = density * math.prod(plan.box.size) / math.prod(plan.box.grid)
    return CellValues(observation.is_positive, count)


def line_of_sight_of(plan: TrainingPlan) -> LineOfSight:
    """Returns the line of sight of a training's volumes; "z" in real space."""
    return (plan.record or BARE).options.line_of_sight or "z"


def draws_of(plan: TrainingPlan) -> Draws:
    """Returns the order in which simulated universes are trained on."""
    data, training = plan.simulated, plan.training
    return Draws(
        simulations=data.simulations,
        reuse=data.reuse,
        buffer=data.buffer,
        fill=data.fill,
        batch=training.batch,
        seed=training.seed,
        balanced=data.balanced and plan.priors.sampling == "sobol",
    )
