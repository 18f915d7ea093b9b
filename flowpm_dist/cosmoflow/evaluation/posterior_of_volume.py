"""The posterior of a user's own volume, from a head that was fitted to a network's features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowpm_dist.cosmoflow.training.trained import Training
from flowpm_dist.cosmology.uniform_priors import UniformPriors
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import GENERATOR, WriteError, save_arrays
from flowpm_dist.jobs.folder import check_foreign, check_ground

PREFERRED = ("flow", "gaussian", "independent")
SAMPLES = 4000
FILES = SAMPLES_FILE, CORNER = "samples.npz", "corner.png"
INTERVALS = (0.683, 0.954)


class PosteriorError(UserError):
    """A head or a statistic that there is not, or no posterior where one is asked for."""


@dataclass(frozen=True)
class VolumePosterior:
    """The posterior of a volume.

    Attributes:
        head: of the posterior.
        priors: of the p parameters.
        samples: [sample, p] [physical units].
        notes: what one should know about it, in sentences.
    """

    head: str
    priors: UniformPriors
    samples: np.ndarray
    notes: tuple[str, ...]

    def sentences(self) -> list[str]:
        """Returns the central intervals of each parameter in words."""
        said = []
        for name, of in zip(self.priors.names, self.samples.T, strict=True):
            ends = [np.quantile(of, [(1 - level) / 2, (1 + level) / 2]) for level in INTERVALS]
            told = ", ".join(
                f"{level:.1%} from {low:.4g} to {high:.4g}"
                for level, (low, high) in zip(INTERVALS, ends, strict=True)
            )
            said.append(f"{name}: {told}")
        return said

    def write(self, folder: Path) -> None:
        """Writes the samples, as `names` and `samples`, and a corner plot.

        Raises:
            OutputError: see `check_prediction_folder`.
            WriteError: a file cannot be written.
        """
        from flowpm_dist.io.figure_style import save_figure
        from flowpm_dist.posteriors.figures import corner_figure

        check_prediction_folder(folder)
        arrays = {"names": np.array(self.priors.names), "samples": self.samples}
        texts = {"head": self.head, "generator": GENERATOR}
        save_arrays(folder / SAMPLES_FILE, arrays | {k: np.array(v) for k, v in texts.items()})
        try:
            save_figure(corner_figure(self.samples, self.priors), folder / CORNER)
        except OSError as error:
            raise WriteError.of(folder / CORNER, error) from error


def check_prediction_folder(folder: Path) -> None:
    """Checks that a posterior can be written to a folder, without changing anything.

    Raises:
        OutputError: it is no folder, cannot be written to, or has files of these names from
            elsewhere.
    """
    check_ground(folder)
    try:
        with np.load(folder / SAMPLES_FILE) as held:
            ours = "generator" in held.files and str(held["generator"]) == GENERATOR
    except (OSError, ValueError):
        ours = False
    if not ours:
        check_foreign(folder, FILES)


def check_head(training: Training, head: str | None) -> str | None:
    """Returns the head whose posterior is asked for, of those that were fitted; None if none was.

    Args:
        training: in whose folder it is.
        head: by default the first of `PREFERRED` that was fitted.

    Raises:
        PosteriorError: no posterior of the head that is asked for was fitted.
    """
    wanted = PREFERRED if head is None else (head,)
    found = [name for name in wanted if training.folder.posterior(name).exists()]
    if not found and head is not None:
        there = training.folder.posterior(head).parent
        fitted = ", ".join(name for name in PREFERRED if training.folder.posterior(name).exists())
        raise PosteriorError(
            f"{there} has no posterior of the head {head!r}"
            + (f", but of {fitted}" if fitted else "")
            + f": flowpm-dist evaluate {training.folder.path} --posteriors fits them"
        )
    return found[0] if found else None


def posterior_of_volume(
    training: Training, features: Mapping[str, np.ndarray], step: int, head: str | None
) -> VolumePosterior | None:
    """Returns the posterior of a volume, or None where none was fitted and none is asked for.

    The same numbers give the same samples: every rank has them.

    Args:
        training: in whose folder the posterior is.
        features: of the volume, [n, value] each by name, the first row of which counts.
        step: number of steps that the network was trained for.
        head: see `check_head`.

    Raises:
        PosteriorError: no posterior of that head was fitted, or its file is damaged.
    """
    from flowpm_dist.cosmoflow.evaluation.summaries import HIDDEN, OUTPUTS
    from flowpm_dist.posteriors.heads import Posterior
    from flowpm_dist.posteriors.novelty import FeatureDensity

    found = check_head(training, head)
    if found is None:
        return None
    path = training.folder.posterior(found)
    try:
        posterior = Posterior.load(path)
        density = FeatureDensity.load(training.folder.feature_density)
        own = features[posterior.about["part"]][:1]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PosteriorError(
            f"{path} or the density of features beside it cannot be read ({error}): fit them again "
            "with flowpm-dist evaluate --posteriors"
        ) from error
    notes = [density.warning(features.get(HIDDEN, features[OUTPUTS])[0])]
    if posterior.about["step"] != step:
        notes.append(
            f"The posterior was fitted to weights of step {posterior.about['step']}, and these are "
            f"of step {step}: fit it again with flowpm-dist evaluate --posteriors."
        )
    samples = posterior.sample(own, SAMPLES)[0]
    return VolumePosterior(found, posterior.priors, samples, tuple(filter(None, notes)))
