"""Records of an observation in run files, data sets and volumes.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.io.files import checksum
from flowpm_dist.io.volume import VolumeError, open_volume
from flowpm_dist.observables.options import (
    SAME_VALUE,
    DensityOptions,
    ObservationOptions,
    observation_of,
)
from flowpm_dist.observables.tracers import ObservationError
from flowpm_dist.options import Options

Ranges = Mapping[str, tuple[float, float]]

ATTRIBUTE = "observation"
"""Name of the attribute of a data set, or of a volume, that holds a record."""

AMPLITUDES = {"sigma": "noise_amplitude", "mean_count": "amplitude"}
"""Keys of the noise, with the nuisance parameter that multiplies each."""


@dataclass(frozen=True)
class ObservationRecord:
    """A record of how data were observed: options, ranges of nuisance parameters, checksums.

    Attributes:
        options: the forward model and its noise.
        nuisances: the lowest and the highest value of each parameter that was drawn, or that is to
            be marginalised.
        checksums: checksums of the values in the files of the options, by key, as they were when
            the record was written: files may have moved or changed since.
    """

    options: ObservationOptions
    nuisances: Ranges = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict, compare=False)

    def keys(self) -> dict[str, Any]:
        """Returns the options, and the ranges as "nuisances"; reads no file."""
        keys = self.options.model_dump(mode="json", exclude_none=True)
        drawn = {name: list(ends) for name, ends in self.nuisances.items()}
        return keys | ({"nuisances": drawn} if drawn else {})

    def table(self) -> dict[str, Any]:
        """Returns the record as JSON can hold it, see `of_table`; reads the files."""
        sums = {key: value for key in self.options.files if (value := self._checksum(key))}
        return self.keys() | ({"checksums": sums} if sums else {})

    def _checksum(self, key: str) -> str | None:
        """Returns the checksum of a file's values; None where it cannot be read."""
        if recorded := self.checksums.get(key):
            return recorded
        try:
            return checksum(open_volume(self.options.files[key]).array)
        except (VolumeError, OSError, ValueError, RuntimeError):
            return None

    @classmethod
    def of_table(cls, table: Mapping[str, Any] | str | bytes, where: str) -> ObservationRecord:
        """Returns the record that `table` has written.

        Args:
            table: with the keys of a section [observation], "nuisances" and "checksums"; or its
                JSON, also in bytes, as HDF5 has it.
            where: it stands, for messages.

        Raises:
            ObservationError: it is no such record.
        """
        try:
            keys = dict(json.loads(table) if isinstance(table, str | bytes) else table)
            drawn = {name: (low, high) for name, (low, high) in keys.pop("nuisances", {}).items()}
            sums = dict(keys.pop("checksums", {}))
            return cls(observation_of(keys), drawn, sums)
        except (ValueError, TypeError, AttributeError) as error:
            raise ObservationError(f"{where}: {ATTRIBUTE} is not readable ({error})") from error

    @property
    def has_mean_one(self) -> bool:
        """Whether the observed field has unit mean by construction."""
        observation = self.options
        whole = observation.kind == "density" and observation.value("mask") is None
        return whole and observation.is_positive and "amplitude" not in self.nuisances

    def differences(self, data: ObservationRecord) -> list[str]:
        """Returns the differences between this observation and the observation of data, in words.

        A parameter that is drawn here may have any value in its range in the data.
        """
        options, other = self.options, data.options
        differences: list[str] = []

        def compare(key: str, here: Any, there: Any) -> None:
            """Compares two names, or two numbers or ranges of them."""
            known = here is not None and there is not None
            named = isinstance(here, str) or isinstance(there, str)
            if not (known and (here == there if named else _holds(here, there))):
                differences.append(_difference(key, here, there))

        def compare_amplitudes(name: str) -> None:
            compare(name, self._range(1.0, name), data._range(1.0, name))

        values, values_there = options.tracer_values, other.tracer_values
        for name in dict.fromkeys([*values, *values_there]):
            key = options.tracer_key if name in values else other.tracer_key
            here = self.nuisances.get(name, values.get(name))
            compare(f"{key} {name}", here, data.nuisances.get(name, values_there.get(name)))
        tracers = (options.tracer_key, other.tracer_key)
        for key in dict.fromkeys([*type(options).model_fields, *type(other).model_fields]):
            here, there = options.value(key), other.value(key)
            if key == "redshifts":  # a tuple is a range here
                here, there = (None if each is None else list(each) for each in (here, there))
            if key in AMPLITUDES and isinstance(here, float) and isinstance(there, float):
                name = AMPLITUDES[key]
                compare(key, self._range(here, name), data._range(there, name))
            elif key == "redshifts" and here and there:
                if len(here) != len(there) or not np.allclose(here, there, rtol=0, atol=SAME_VALUE):
                    differences.append(_difference(key, here, there))
            elif key not in tracers and not self._same_values(data, key):
                differences.append(_difference(key, here, there))
            elif key == "sigma" and here is not None:
                compare_amplitudes(AMPLITUDES[key])
        if options.kind == other.kind == "density":
            compare_amplitudes("amplitude")
        return differences

    def _same_values(self, data: ObservationRecord, key: str) -> bool:
        """Returns whether a key has the same value; of two files, the same values in all cells."""
        here, there = self.options.value(key), data.options.value(key)
        if not (isinstance(here, Path) and isinstance(there, Path)):
            return bool(here == there)
        if here == there and key not in {**self.checksums, **data.checksums}:
            return True
        sums = self._checksum(key), data._checksum(key)
        return here == there if None in sums else sums[0] == sums[1]

    def _range(self, value: float, name: str) -> float | tuple[float, float]:
        """Returns all values of a number times the nuisance parameter of this name."""
        ends = self.nuisances.get(name)
        return value if ends is None else (value * ends[0], value * ends[1])

    def summary(self) -> str:
        """Returns the record in words."""
        parts = [
            f"{key} = {_shown(list(value) if key == 'redshifts' else value)}"
            for key, value in self.options
            if value is not None
        ]
        parts += [f"{name} {_shown(ends)}" for name, ends in self.nuisances.items()]
        return ", ".join(parts)

    def check(self, data: ObservationRecord, what: str) -> None:
        """Checks that data come from the observation that this record describes.

        Args:
            data: what was observed.
            what: names the data, for the message.

        Raises:
            ObservationError: they are not; the message says in what they differ.
        """
        if differences := self.differences(data):
            raise ObservationError(
                f"{what} is of another observation than the training: "
                f"{'; '.join(differences)}. Train a network for it, with that [observation]"
            )


BARE = ObservationRecord(DensityOptions())
"""The density of matter itself, by the particle mesh: the default of run files."""


def _holds(here: Any, there: Any) -> bool:
    """Returns whether a value or range lies within another."""
    low, high = here if isinstance(here, tuple) else (here, here)
    least, most = there if isinstance(there, tuple) else (there, there)
    tolerance = SAME_VALUE * max(abs(low), abs(high))
    return bool(low - tolerance <= least and most <= high + tolerance)


def _difference(key: str, trained: Any, data: Any) -> str:
    if trained == data:
        return f"{key} has other values in the training than in the data, in {_shown(data)}"
    return f"{key} is {_shown(trained)} in the training, {_shown(data)} in the data"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"from {value[0]:g} to {value[1]:g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, Options):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_shown(x)}" for name, x in value.items()) + "}"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
