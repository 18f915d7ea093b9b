"""The section [data] of a training's run file: the source of the volumes.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import Field

from flowpm_dist.cosmoflow.planning.options import DERIVED
from flowpm_dist.cosmoflow.volumes.draws import most_filled
from flowpm_dist.options import A_SEED, AnyPath, Names, Options, Problem, Seed, count


class DataOptions(Options):
    """The source of the volumes; each source has its own subclass.

    Attributes:
        augment: how volumes are transformed each time they are used; None until the plan is
            complete.
    """

    augment: bool | Literal["symmetries"] | None = Field(
        default=None, description='true (shifts and symmetries), "symmetries" or false'
    )


class DividedData(DataOptions):
    """Volumes that are divided into a training set and held-out sets."""

    validation: int = count(128)
    test: int = count(256)
    seed: Seed = Field(default=0, description=A_SEED)


class SimulatedData(DividedData):
    """Universes that are simulated during the training.

    Attributes:
        buffer, fill: `DERIVED` until the plan is complete.
    """

    source: Literal["simulate"] = "simulate"
    simulations: int = count(2000)
    reuse: int = count(10)
    buffer: int = count(DERIVED)
    fill: int = count(DERIVED)
    balanced: bool = Field(default=True, description="true or false")

    def batch_problems(self, batch: int) -> Iterator[Problem]:
        """Yields a problem for each number that does not fit the batch or another number."""

        def problem(key: str, what: str) -> Problem:
            default = "" if self.is_given(key) else ", the default"
            return Problem(key, f"= {getattr(self, key)}{default}: must be {what}")

        for key in ("validation", "test"):
            if getattr(self, key) < batch:
                yield problem(key, f"at least training.batch = {batch}")
        for key in ("simulations", "buffer", "fill"):
            number = getattr(self, key)
            if number != DERIVED and number % batch:
                below = number // batch * batch
                near = f"{below} or {below + batch}" if below else f"{batch}"
                yield problem(key, f"a multiple of training.batch = {batch}: {near}")
        buffer = self.simulations if self.buffer == DERIVED else self.buffer
        if buffer > self.simulations:
            yield problem("buffer", f"at most data.simulations = {self.simulations}")
        elif self.fill > self.simulations:
            yield problem("fill", f"at most data.simulations = {self.simulations}")
        elif self.fill > (most := most_filled(self.simulations, buffer, batch)):
            room = f"at most {most} with data.buffer = {buffer}, where half makes room for new ones"
            yield problem("fill", room)


class StoredData(DataOptions):
    """Volumes that are on disk before the training."""

    parameters: Names | None = Field(
        default=None, description='a list of different names, such as ["Omega_m", "sigma8"]'
    )


class FileData(StoredData):
    """A dataset in TFRecord files, in this package's layout or in CosmoFlow's public layout."""

    source: Literal["files"] = "files"
    folder: AnyPath = Field(description="the folder of a dataset")
    staging: AnyPath | None = Field(default=None, description="a folder on fast local storage")


class ArrayData(DividedData, StoredData):
    """Volumes in arrays, with a table of their parameters."""

    source: Literal["arrays"] = "arrays"
    volumes: AnyPath = Field(
        description='a .npy file, a data set as in "file.h5:name", or a .npy file for each volume, '
        'as in "{}/density.npy"',
    )
    dtype: Literal["float16", "float32", "float64", "int16", "uint16", "int32"] = Field(
        description='"float16", "float32", "float64", "int16", "uint16" or "int32"',
    )
    unit: Literal["density", "overdensity", "mass"] = Field(
        description='"density" (mean 1), "overdensity" (mean 0) or "mass" (divided by its mean)',
    )
    table: AnyPath = Field(description="a text file, a row for each volume")
    columns: Names | None = Field(default=None, description="a list of different names")


class DummyData(DataOptions):
    """One batch of random numbers, to measure the speed of a training without reading data."""

    source: Literal["dummy"] = "dummy"


AnyData = SimulatedData | FileData | ArrayData | DummyData
SOURCES: dict[str, type[AnyData]] = {
    model.model_fields["source"].default: model for model in get_args(AnyData)
}
