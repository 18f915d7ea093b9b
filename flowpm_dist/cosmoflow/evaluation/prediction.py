"""Parameters of a volume, predicted by a trained network."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flowpm_dist.cosmoflow.evaluation.posteriors import VolumePosterior, posterior_of_volume
from flowpm_dist.cosmoflow.evaluation.volume_checks import (
    as_observed,
    check_mean,
    check_values,
    check_volume,
    read_part,
    refuse_values,
)
from flowpm_dist.cosmoflow.training.saved import SavedTraining, trained_network
from flowpm_dist.cosmoflow.volumes.record_files import (
    MEAN_DENSITY,
    ONE_COUNT,
    Block,
    RecordError,
    read_header,
)
from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.io.light_cone import load_light_cone
from flowpm_dist.io.volume import Volume, VolumeError, open_volume
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.observables.light_cone.map_files import differences_from_file, read_convergence
from flowpm_dist.observables.light_cone.section import ConvergenceOptions
from flowpm_dist.observables.options import ObservationOptions
from flowpm_dist.observables.record import BARE, ObservationRecord
from flowpm_dist.observables.tracers import ObservationError

if TYPE_CHECKING:
    from meshimpl.process_mesh import ProcessMesh

COUNTED = ("one particle", ONE_COUNT)
"""Units of counts; the mean of a volume of counts may have any value."""

OF_DENSITIES = (MEAN_DENSITY, "density", "overdensity")
"""Units of volumes with means of about 1, which they keep."""

MEAN_TOLERANCE = 1e-3
"""How far the mean of a density may differ from 1 before the user gets a note."""


@dataclass(frozen=True)
class VolumePrediction:
    """The predicted parameters of a volume.

    Attributes:
        parameters: the name and the value of each parameter, and its error bar if there is one.
        notes: sentences that the user should read with the prediction.
        posterior: the posterior, if one was fitted (see `posterior_of_volume`). The parameters are
            then its means and standard deviations.
    """

    parameters: tuple[tuple[str, float, float | None], ...]
    notes: tuple[str, ...]
    posterior: VolumePosterior | None = None


def check_question(
    training: SavedTraining, volume_path: str | Path, box_size: float | None
) -> None:
    """Checks that a network can predict for a volume, before TensorFlow is loaded.

    Args:
        training, volume_path, box_size: see `predict_volume`.

    Raises:
        VolumeError, ObservationError: see `predict_volume`.
    """
    plan = training.plan
    if plan.lightcone is not None:
        _maps(plan.lightcone, Path(volume_path), box_size)
        return
    volume = open_volume(volume_path)
    channels: int | None = plan.channels
    if plan.data.source == "arrays":
        header = training.header()
        channels = None if header is None else header.channels
    elif not training.plan.simulates and plan.dataset_folder is not None:
        try:
            channels = read_header(plan.dataset_folder)[0].channels
        except RecordError:  # public files: TensorFlow reads the first of them
            channels = None
    check_volume(volume, plan, channels, box_size)
    check_observation(plan.record, volume)
    check_values(volume, _observed_by(training))


def check_observation(trained: ObservationRecord | None, volume: Volume) -> list[str]:
    """Checks that a volume has the observation that the network was trained for, if both are known.

    Returns:
        Warnings about what could not be compared.

    Raises:
        ObservationError: the observations differ; the message names the differences.
    """
    if trained is None:
        return []
    if volume.observation is None:
        if trained == BARE:
            return []
        note = "The volume does not say how it was observed; the network was trained for "
        return [f"{note}{trained.summary()}."]
    trained.check(ObservationRecord.of_table(volume.observation, volume.where), volume.where)
    return []


def _observed_by(training: SavedTraining) -> ObservationOptions | None:
    """Returns how the training observed its universes; None if that is not known."""
    record = training.plan.record
    return None if record is None else record.options


def predict_volume(
    training: SavedTraining,
    volume_path: str | Path,
    mesh: ProcessMesh,
    progress: Progress,
    box_size: float | None = None,
    *,
    which: str = "best",
    head: str | None = None,
    needed: bool = False,
) -> VolumePrediction:
    """Returns the parameters of a volume. On all ranks together, each of which reads its block.

    Args:
        training: the training of the network.
        volume_path: see `open_volume`; for maps, see `read_convergence`. A density or counts are
            divided by their mean if the training volumes were.
        mesh: the ranks, of axes replica, row and col. Several replicas do the same work.
        progress: of this rank.
        box_size: side of the volume [Mpc/h], if its file does not contain it.
        which: see `trained_network`.
        head: head of the posterior; by default the first of `PREFERRED` that was fitted to
            these weights, if any.
        needed: whether there must be a posterior.

    Returns:
        The same on every rank.

    Raises:
        TrainedError: the checkpoint is damaged.
        PosteriorError: no posterior of that head was fitted, or to other weights.
        VolumeError: the volume does not resemble the training volumes, has values that are
            negative or not finite, or is empty.
        ObservationError: the volume has another observation.
    """
    from flowpm_dist.cosmoflow.evaluation.summaries import OUTPUTS, features_of

    cone = training.plan.lightcone
    if cone is None:
        block, notes = _volume(training, volume_path, mesh, progress, box_size)
    else:
        block, notes = _volume_of_maps(cone, Path(volume_path), box_size)
    progress.note("asking the network; compiling")
    regressor = trained_network(training, mesh, mesh.axis_size("replica"), which)
    standardiser, step = regressor.standardiser, regressor.step
    features = features_of(regressor.network, block[np.newaxis])
    values, sigma = regressor.in_physical_units(features[OUTPUTS][:1])
    posterior, warnings = posterior_of_volume(
        training, volume_path, features, step, head, needed=needed
    )
    notes += warnings
    if posterior is not None:
        values, sigma = (f(posterior.samples, axis=0)[np.newaxis] for f in (np.mean, np.std))
    bars = [None] * len(values[0]) if sigma is None else sigma[0].tolist()
    parameters = tuple(zip(standardiser.names, values[0].tolist(), bars, strict=True))
    if not training.complete:
        notes.append(f"The training is not complete: {training.progress_note(step)}.")
    if posterior is None:
        notes += _notes_of_edges(parameters, standardiser)
    return VolumePrediction(parameters, tuple(notes), posterior)


def _notes_of_edges(
    parameters: Sequence[tuple[str, float, float | None]], priors: UniformPriors
) -> list[str]:
    """Returns sentences about parameters at the edge of their priors, or beyond."""
    notes = []
    for (name, value, bar), low, high in zip(parameters, priors.low, priors.high, strict=True):
        trained = f"the {low:g} to {high:g} it was trained on"
        if not low <= value <= high:
            notes.append(f"{name} = {value:.4g} is outside {trained}: do not rely on it.")
        elif bar is not None and min(value - low, high - value) < bar:
            notes.append(
                f"{name} = {value:.4g} ± {bar:.2g} is within its error bar of the edge of "
                f"{trained}: the network is drawn to the middle there."
            )
    return notes


def _volume(
    training: SavedTraining,
    path: str | Path,
    mesh: ProcessMesh,
    progress: Progress,
    box_size: float | None,
) -> tuple[np.ndarray, list[str]]:
    """Returns this rank's block of a volume, as the network takes it, and notes."""
    from flowpm_dist.jobs.session import on_root

    plan, volume, header = training.plan, open_volume(path), training.header()
    channels = plan.channels if header is None else header.channels
    notes = check_volume(volume, plan, channels, box_size)
    # On rank 0 alone, which may read whole masks.
    check = functools.partial(check_observation, plan.record, volume)
    notes += on_root(mesh, check, ObservationError)
    progress.note(f"reading {volume.where}")
    cut, observation = Block.of(mesh).cut(volume.array.shape), _observed_by(training)
    # Masked as the training's volumes.
    block = as_observed(read_part(volume, cut), (cut[0].start, cut[1].start), volume, observation)
    block = block[..., np.newaxis] if block.ndim == 3 else block
    mean = _checked_mean(volume, block, mesh, observation)
    shown = ", ".join(f"{value:.6g}" for value in mean)
    other_mean = bool(np.any(np.abs(mean - 1) > MEAN_TOLERANCE))
    if training.divides_by_mean(header):
        block /= mean
        notes += [f"The volume was divided by its mean, {shown}."] if other_mean else []
    elif header is None or header.unit not in COUNTED:
        if observation is not None and observation.is_positive and observation.mean is not None:
            check_mean(volume, mean, observation.mean)
        elif observation is None and header is not None and header.unit in OF_DENSITIES:
            check_mean(volume, mean, 1.0)
        if header is not None and other_mean:
            notes.append(f"The volume keeps its mean, {shown}, as the training volumes did.")
    return block[..., 0] if channels == 1 else block, notes


def _maps(cone: ConvergenceOptions, path: Path, box_size: float | None) -> np.ndarray:
    """Returns the maps in a file [source, x, y] [1], float64.

    Raises:
        ObservationError: the maps differ from those that the network was trained on.
    """
    if box_size is not None:
        raise ObservationError("--box-size is for volumes, but the network takes maps: omit it")
    kappa = read_convergence(path, cone)
    if path.suffix == ".npy":
        return kappa
    if names := differences_from_file(cone, load_light_cone(path).attributes):
        raise ObservationError(
            f"{path} has maps of another light cone than the network was trained on: "
            f"{', '.join(names)} differ; train a network for it"
        )
    return kappa


def _volume_of_maps(
    cone: ConvergenceOptions, path: Path, box_size: float | None
) -> tuple[np.ndarray, list[str]]:
    """Returns maps, as the network takes them, and notes. Raises ObservationError, see `_maps`."""
    from flowpm_dist.cosmoflow.volumes.universes import as_volumes

    volume = as_volumes(_maps(cone, path, box_size)[np.newaxis])[0]
    noise = cone.shape_noise
    assert noise is not None
    if path.suffix == ".npy":
        names = ", ".join(source.name for source in cone.sources)
        note = (
            f"The maps do not say what they show; the network was trained for fields of "
            f"{cone.field_of_view:g} degrees, sources at {names} and the noise of sigma_e = "
            f"{noise.sigma_e:g} and n_eff = {noise.n_eff:g}."
        )
    else:
        note = (
            f"{path} has maps without the noise of shapes: no such maps were in the training. Do "
            f"not rely on the answer: add noise of {cone.pixel_sigma():.3g} to each pixel, and "
            "ask again."
        )
    return volume, [note]


def _checked_mean(
    volume: Volume, block: np.ndarray, mesh: ProcessMesh, observation: ObservationOptions | None
) -> np.ndarray:
    """Returns the mean of each channel over all cells. On wrong values all ranks raise."""
    import tensorflow as tf

    group = mesh.without("replica")
    positive = observation is None or observation.is_positive
    bad = [np.sum(~np.isfinite(block)), np.sum(block < 0) if positive else 0]
    with np.errstate(invalid="ignore"):
        sums = block.sum(axis=(0, 1, 2)) / (block[..., 0].size * group.size)
    totals = group.world.allreduce(tf.constant([*bad, *sums], tf.float64)).numpy()
    refuse_values(volume, *map(int, totals[:2]))
    if not totals[2:].all() and (observation is None or observation.mean is not None):
        raise VolumeError(f"{volume.where} is empty: its mean is 0")
    return totals[2:]
