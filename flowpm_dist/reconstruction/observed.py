"""What a reconstruction observes: its model, its data and their likelihood."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist import reconstruction
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field, project
from flowpm_dist.io.files import remove, written_whole
from flowpm_dist.io.labelled import LabelledArray
from flowpm_dist.io.light_cone import write_light_cone
from flowpm_dist.io.snapshot import load_snapshot
from flowpm_dist.observables.light_cone.section import ConvergenceOptions
from flowpm_dist.observables.noise import with_noise
from flowpm_dist.observables.observations import Observations, ObservedBlock
from flowpm_dist.observables.options import CellOptions
from flowpm_dist.observables.tracers import ObservationError
from flowpm_dist.observables.universe_model import UniverseModel
from flowpm_dist.options import nearest, python_object
from flowpm_dist.reconstruction.folder import FIELDS, MAPS
from flowpm_dist.reconstruction.likelihoods.base import Likelihood, in_dtype_of
from flowpm_dist.reconstruction.likelihoods.gaussian_maps import GaussianMaps
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.universe import Universe
from flowpm_dist.statistics.angular_spectra import angular_power, octave_edges
from meshimpl.process_mesh import ProcessMesh

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAP_MEANINGS = {
    "data": "convergence that was observed, with its noise",
    "kappa": "convergence of the universe that was found",
    "truth": "convergence of the mock universe",
}

WHOLE_NUMBERS = ("source", "modes")
"""Columns of whole numbers in tables of spectra."""


def model_of(options: ReconstructionOptions, mesh: ProcessMesh) -> UniverseModel:
    """Returns the model from white noise to what is observed, with a fixed halo.

    Raises:
        ObservationError: a custom structure or bias that cannot be used.
    """
    cosmology = Cosmology(**options.cosmology.arguments())
    simulation = options.simulation(cosmology, mesh=mesh)
    model = options.observation.forward_model(simulation, options.lightcone)
    model.hold_halo()
    return model


class Observed(abc.ABC):
    """The data, their likelihood, and how the results show them; a class for each kind of data.

    On all ranks together.

    Attributes:
        data: float64: this rank's block of a density or of counts, or whole maps.
        likelihood: the likelihood of the data.
        truth: the universe of a mock; None where the truth is not known.

    Args:
        options: the checked run file.
        model: the model from white noise to what is observed.

    Raises:
        UserError: a file that cannot be read, or does not fit.
    """

    picture: ClassVar[str]
    """The file of the figure."""
    data: np.ndarray
    likelihood: Likelihood

    def __init__(self, options: ReconstructionOptions, model: UniverseModel) -> None:
        seed = options.data.mock_seed
        self.options = options
        self.truth = None if seed is None else Universe.mock(model, seed)

    @staticmethod
    @abc.abstractmethod
    def kept_likelihood(options: ReconstructionOptions, box: Box, folder: Path) -> Likelihood:
        """Returns the likelihood of the data that a search has written, for chains.

        Args:
            options: the checked run file.
            box: the box of the chains.
            folder: the folder of the reconstruction.
        """

    def fields(self, found: Universe, *, fits_amplitude: bool) -> dict[str, Field]:
        """Returns the fields of the data for reconstruction.zarr."""
        return {}

    def facts(self, maps: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns the facts about the maps for result.json."""
        return {}

    @abc.abstractmethod
    def maps(self, found: Universe) -> dict[str, np.ndarray]:
        """Returns maps of data and reconstruction by name, on rank 0. On all ranks together."""

    @abc.abstractmethod
    def write(self, folder: Path, maps: dict[str, np.ndarray], attributes: dict[str, Any]) -> None:
        """Writes the maps that are results, if any. On rank 0.

        Raises:
            WriteError: they cannot be written.
        """

    @abc.abstractmethod
    def figure(self, maps: dict[str, np.ndarray]) -> Figure:
        """Returns the figure of the maps. On rank 0."""


class ObservedCells(Observed):
    """This rank's block of an observed density or of counts. See `Observed`."""

    picture = "slabs.png"

    def __init__(self, options: ReconstructionOptions, model: UniverseModel) -> None:
        super().__init__(options, model)
        box, settings = model.simulation.box, options.data
        block = self._block = block_of(options, box)
        data = block.data
        if self.truth is not None:
            quiet = block.mean_count is None and not settings.add_noise
            noisy = replace(block, sigma=None) if quiet else block
            normal = np.zeros(()) if quiet else self.truth.unit_normal(settings.noise_seed)
            data = with_noise(self.truth.expected, noisy, normal)
        assert data is not None
        self.data, self.likelihood = data, likelihood_of(options, box, block, data)

    @staticmethod
    @override
    def kept_likelihood(options: ReconstructionOptions, box: Box, folder: Path) -> Likelihood:
        data = load_snapshot(folder / FIELDS).arrays["data"][box.place[-3:]]
        return likelihood_of(options, box, block_of(options, box), np.asarray(data))

    @override
    def fields(self, found: Universe, *, fits_amplitude: bool) -> dict[str, Field]:
        box, observation = found.state.box, self.options.observation
        fields = {"data": Field(tf.constant(self.data, box.dtype), box)}
        assert isinstance(observation, CellOptions)
        if observation.bias or observation.redshift_space or fits_amplitude:
            fields["expected"] = Field(found.expected, box)
        if observation.mask is not None:
            fields["mask"] = Field(tf.constant(self._block.mask, box.dtype), box)
        return fields

    def maps(self, found: Universe) -> dict[str, np.ndarray]:
        """Returns slabs [x, y] [mean density]: truth, data, reconstruction and residual.

        Each is a mean over what is observed along z. See `Observed.maps`.
        """
        box, mask, mean_count = found.state.box, self._block.mask, self._block.mean_count
        is_observed = mask > 0
        scale = np.ones_like(mask) if mean_count is None else mean_count * mask
        density = np.where(is_observed, self.data / np.where(is_observed, scale, 1.0), 0.0)
        observed, data = tf.constant(is_observed), tf.constant(density, box.dtype)
        share = project(Field(tf.cast(observed, box.dtype), box), self._layers)
        whole = {} if self.truth is None else {"truth": self.truth.expected}
        whole["data"], whole["reconstruction"] = data, found.expected
        whole["residual"] = data - found.expected
        slabs = {}
        for title, block in whole.items():
            of_data = title in ("data", "residual")
            block = tf.where(observed, block, 0) if of_data else block
            slab = project(Field(block, box), self._layers)
            if slab is not None and share is not None:
                slabs[title] = slab / np.where(share > 0, share, np.nan) if of_data else slab
        return slabs

    def write(self, folder: Path, maps: dict[str, np.ndarray], attributes: dict[str, Any]) -> None:
        """Writes nothing: the fields are in reconstruction.zarr. See `Observed.write`."""

    def figure(self, maps: dict[str, np.ndarray]) -> Figure:
        """Returns the figure of the slabs. See `Observed.figure`."""
        from flowpm_dist.reconstruction.figures import slabs_figure

        box = self.options.box
        thickness = self._layers * box.size[2] / box.grid[2]
        return slabs_figure(maps, box.size[:2], thickness, self.options.evolution.last)

    @property
    def _layers(self) -> int:
        """The number of cells along z that a slab is a mean over."""
        return max(1, self.options.box.grid[2] // 8)


def block_of(options: ReconstructionOptions, box: Box) -> ObservedBlock:
    """Returns what this rank of a box observes.

    Raises:
        VolumeError: a file cannot be read.
    """
    observations = Observations(options.observation, options.box.grid, options.data.file)
    return observations.block(box.offset, box.block)


def likelihood_of(
    options: ReconstructionOptions, box: Box, block: ObservedBlock, data: np.ndarray
) -> Likelihood:
    """Returns the likelihood of the data in a block, for the densities of a box.

    Args:
        options: the kind of data and the error of the model.
        box: the box of one universe, or of several chains.
        block: what this rank observes.
        data: density or counts [x, y, z].

    Raises:
        ObservationError: a custom likelihood that cannot be used.
    """
    observed, values = tf.constant(block.mask, box.dtype), tf.constant(data, box.dtype)
    settings = options.likelihood
    noise = block.sigma if block.mean_count is None else block.mean_count
    if settings.name is None:
        of_kind = getattr(reconstruction, options.observation.likelihood)
        error = {"error": settings.error} if settings.error else {}
        default: Likelihood = of_kind(box, values, noise, observed, **error)
        return default
    try:
        instance = python_object(settings.name)(box, values, in_dtype_of(box, noise), observed)
    except ValueError as error:
        raise ObservationError(f"likelihood {settings.name!r}: {error}") from error
    likelihood = cast(Likelihood, instance)
    for missing in options.of_likelihood:
        if missing not in likelihood.parameters:
            raise ObservationError(
                f"likelihood {settings.name!r} has no parameter {missing}"
                f"{nearest(missing, likelihood.parameters)} (it has "
                f"{', '.join(likelihood.parameters) or 'none'}): leave priors.{missing} out, or "
                "name it in `parameters` of the likelihood"
            )
    return likelihood


class ObservedMaps(Observed):
    """Observed maps of the convergence [source, x, y] [1], float64, whole on every rank.

    See `Observed`.
    """

    picture = MAPS[2]

    def __init__(self, options: ReconstructionOptions, model: UniverseModel) -> None:
        super().__init__(options, model)
        assert options.lightcone is not None
        cone = self._cone = options.lightcone
        if self.truth is None:
            self.data = options.read_maps()
        else:
            self.data = np.asarray(self.truth.expected, np.float64)
            if options.data.add_noise:
                assert cone.shape_noise is not None
                self.data = self.data + cone.noise(cone.shape_noise.seed)[:, 0]
        self.likelihood = _likelihood_of_maps(cone, model.simulation.box, self.data)

    @staticmethod
    @override
    def kept_likelihood(options: ReconstructionOptions, box: Box, folder: Path) -> Likelihood:
        maps = load_snapshot(folder / MAPS[0])["data"]
        assert options.lightcone is not None
        return _likelihood_of_maps(options.lightcone, box, np.swapaxes(maps, -1, -2))

    def facts(self, maps: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns how far the maps agree with the truth, where it is known. See `Observed`."""
        if "truth" not in maps:
            return {}
        kappa, data, truth = (maps[name] for name in ("kappa", "data", "truth"))
        rows = [
            {
                "source": source.name,
                "r found": float(np.corrcoef(kappa[n].ravel(), truth[n].ravel())[0, 1]),
                "r data": float(np.corrcoef(data[n].ravel(), truth[n].ravel())[0, 1]),
            }
            for n, source in enumerate(self._cone.sources)
        ]
        return {"convergence": rows}

    def maps(self, found: Universe) -> dict[str, np.ndarray]:
        """Returns the maps [source, x, y] of data, reconstruction and truth. See `Observed`."""
        maps = {"data": self.data, "kappa": np.asarray(found.expected, np.float64)}
        if self.truth is not None:
            maps["truth"] = np.asarray(self.truth.expected, np.float64)
        return maps

    def write(self, folder: Path, maps: dict[str, np.ndarray], attributes: dict[str, Any]) -> None:
        """Writes convergence.zarr and convergence.csv. See `Observed.write`."""
        group, table = (folder / name for name in MAPS[:2])
        remove(group, ignore_errors=True)  # of a session that was stopped here
        arrays = {
            name: LabelledArray(
                np.swapaxes(each, -1, -2), ("source", "y", "x"), "1", MAP_MEANINGS[name]
            )
            for name, each in maps.items()
        }
        axes = {"axes": "a map is [y, x], as pictures are; maps in Python are [x, y]"}
        write_light_cone(group, arrays, attributes, axes)
        write_spectra(table, _spectra(self._cone, maps))

    def figure(self, maps: dict[str, np.ndarray]) -> Figure:
        """Returns the figure of the last source's maps. See `Observed.figure`."""
        from flowpm_dist.reconstruction.figures import maps_figure

        cone, last = self._cone, {name: each[-1] for name, each in maps.items()}
        return maps_figure(last, cone.field_of_view, cone.sources[-1].name)


def _likelihood_of_maps(cone: ConvergenceOptions, box: Box, data: np.ndarray) -> GaussianMaps:
    """Returns the likelihood of maps [source, x, y] with the noise of the shapes of galaxies."""
    return GaussianMaps(box, tf.constant(data, box.dtype), cone.pixel_sigma())


def _spectra(cone: ConvergenceOptions, maps: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns spectra of each source and bin, and r(l) and T(l) where the truth is known."""
    edges, fov = octave_edges(cone.fov, cone.pixels), cone.fov
    spectra = angular_power(maps["kappa"], fov, edges)
    sources, bins = spectra.power.shape
    columns = {
        "source": np.repeat(np.arange(sources), bins),
        "ell": np.tile(spectra.ell, sources),
        "modes": np.tile(spectra.modes, sources),
        "C_ell found": spectra.power.ravel(),
        "C_ell data": angular_power(maps["data"], fov, edges).power.ravel(),
    }
    if "truth" in maps:
        true = angular_power(maps["truth"], fov, edges).power
        cross = angular_power(maps["kappa"], fov, edges, other=maps["truth"]).power
        columns["C_ell truth"] = true.ravel()
        columns["r"] = (cross / np.sqrt(spectra.power * true)).ravel()
        columns["T"] = np.sqrt(spectra.power / true).ravel()
    return columns


def write_spectra(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Writes a table of spectra, one column for each name."""
    formats = ["%d" if name in WHOLE_NUMBERS else "%.8e" for name in columns]
    table, header = np.column_stack(list(columns.values())), ",".join(columns)
    with written_whole(path) as aside:
        np.savetxt(aside, table, fmt=formats, delimiter=",", header=header, comments="")


def observed_kind(options: ReconstructionOptions) -> type[Observed]:
    """Returns the class of the data of an observation: cells or maps."""
    return ObservedMaps if options.observation.layout == "maps" else ObservedCells
