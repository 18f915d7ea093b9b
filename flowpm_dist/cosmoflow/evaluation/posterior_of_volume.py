"""The posterior of a user's own volume, from a head that was fitted to a network's features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowpm_dist.cosmoflow.evaluation.posterior_options import PosteriorError
from flowpm_dist.cosmoflow.training.trained import Training
from flowpm_dist.cosmology.uniform_priors import UniformPriors
from flowpm_dist.io.files import (
    GENERATOR,
    UnreadableError,
    read_arrays,
    save_arrays,
    written_whole,
)
from flowpm_dist.jobs.folder import OutputError, check_foreign, check_ground
from flowpm_dist.posteriors.options import HEADS

PREFERRED = tuple(HEADS)[::-1]
SAMPLES = 4000
FILES = SAMPLES_FILE, CORNER = "samples.npz", "corner.png"
INTERVALS = (0.683, 0.954)


@dataclass(frozen=True)
class Question:
    """A volume, and the training that is asked about it.

    Attributes:
        volume, training: absolute paths.
    """

    volume: str
    training: str

    @classmethod
    def of(cls, volume: str | Path, training: Training) -> Question:
        """Returns the question of a volume, such as "file.h5:a/density"."""
        return cls(str(Path(volume).resolve()), str(training.folder.path.resolve()))


@dataclass(frozen=True)
class VolumePosterior:
    """The posterior of a volume.

    Attributes:
        head: of the posterior.
        priors: of the p parameters.
        samples: [sample, p] [physical units].
        question: whose answer it is.
        step: number of steps that the network was trained for.
    """

    head: str
    priors: UniformPriors
    samples: np.ndarray
    question: Question
    step: int

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
        """Writes the samples, as `names` and `samples`, what they are of, and a corner plot.

        Raises:
            OutputError: see `check_prediction_folder`.
            WriteError: a file cannot be written.
        """
        from flowpm_dist.io.figure_style import save_figure
        from flowpm_dist.posteriors.figures import corner_figure

        check_prediction_folder(folder, self.question)
        arrays = {"names": np.array(self.priors.names), "samples": self.samples}
        about = {"head": self.head, "generator": GENERATOR, "step": self.step}
        about |= {"volume": self.question.volume, "training": self.question.training}
        save_arrays(folder / SAMPLES_FILE, arrays | {k: np.array(v) for k, v in about.items()})
        with written_whole(folder / CORNER) as aside:
            save_figure(corner_figure(self.samples, self.priors), aside)


def check_prediction_folder(folder: Path, question: Question) -> None:
    """Checks that a posterior can be written to a folder, without changing anything.

    Raises:
        OutputError: it is no folder, cannot be written to, has files of these names from elsewhere,
            or the posterior of another volume or from another training.
    """
    check_ground(folder)
    try:
        held = read_arrays(folder / SAMPLES_FILE)
        ours = str(held["generator"]) == GENERATOR
        there = Question(str(held["volume"]), str(held["training"]))
    except (UnreadableError, KeyError):
        ours = False
    if not ours:
        check_foreign(folder, FILES)
    elif there != question:
        raise OutputError(
            f"{folder} holds the posterior of {there.volume} from {there.training}: give another "
            "--output"
        )


def fitted_heads(training: Training, head: str | None) -> list[str]:
    """Returns the heads of which posteriors were fitted, the preferred first.

    Args:
        training: in whose folder they are.
        head: the one that is asked for; by default those of `PREFERRED`.

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
    return found


def posterior_of_volume(
    training: Training,
    volume: str | Path,
    features: Mapping[str, np.ndarray],
    step: int,
    head: str | None,
    *,
    needed: bool = False,
) -> tuple[VolumePosterior | None, list[str]]:
    """Returns the posterior of a volume, and what one should know about it in sentences.

    There is None where none is asked for, and none was fitted to the features of these weights.
    By default it is of the first of `PREFERRED` that was. The same numbers give the same samples:
    every rank has them.

    Args:
        training: in whose folder the posterior is.
        volume: its path.
        features: of the volume, [n, value] each by name, the first row of which counts.
        step: number of steps that the network was trained for.
        head: see `fitted_heads`.
        needed: whether there must be one; there must of a head that is asked for.

    Raises:
        PosteriorError: no posterior of that head was fitted, or to other weights, or its file is
            damaged.
    """
    from flowpm_dist.cosmoflow.evaluation.summaries import HIDDEN, OUTPUTS
    from flowpm_dist.posteriors.heads import Posterior
    from flowpm_dist.posteriors.novelty import FeatureDensity

    others = []
    for found in fitted_heads(training, head):
        path = training.folder.posterior(found)
        try:
            posterior = Posterior.load(path)
            fitted = posterior.about["step"]
            if fitted == step:
                density = FeatureDensity.load(training.folder.feature_density(step))
                own = features[posterior.about["part"]][:1]
                break
            others.append(
                f"The posterior ({found}) was fitted to weights of step {fitted}, and these are of "
                f"step {step}: fit it again with flowpm-dist evaluate --posteriors"
            )
        except (ValueError, KeyError, TypeError) as error:
            others.append(
                f"{path} or the density of features beside it cannot be read ({error}): fit them "
                "again with flowpm-dist evaluate --posteriors"
            )
    else:
        if others and (needed or head is not None):
            raise PosteriorError(others[0])
        return None, [f"{one}." for one in others]
    warning = density.warning(features.get(HIDDEN, features[OUTPUTS])[0])
    samples, question = posterior.sample(own, SAMPLES)[0], Question.of(volume, training)
    answer = VolumePosterior(found, posterior.priors, samples, question, step)
    return answer, [warning] if warning else []
