"""What was observed, as run files, data sets and volumes tell it.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from flowpm_dist.io.checksums import checksum
from flowpm_dist.io.volume import VolumeError, open_volume
from flowpm_dist.observables.options import ObservationError, ObservationOptions

Ranges = Mapping[str, tuple[float, float]]

ATTRIBUTE = "observation"
"""Name of the attribute of a data set, or of a volume, that holds a record."""

CLOSE = 1e-6
"""Relative difference of numbers that are taken as equal."""


@dataclass(frozen=True)
class ObservationRecord:
    """What was observed.

    Attributes:
        options: the forward model and its noise.
        nuisances: the lowest and the highest value of each parameter that was drawn, or that is to
            be marginalised.
        checksums: those of the values in the files of the options, by key, where they were read
            before: files may have been moved or written anew since.
    """

    options: ObservationOptions
    nuisances: Ranges = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict, compare=False)

    def keys(self) -> dict[str, Any]:
        """Returns the options, and the ranges as "nuisances"; reads no file."""
        found = self.options.model_dump(mode="json", exclude_none=True)
        drawn = {name: list(ends) for name, ends in self.nuisances.items()}
        return found | ({"nuisances": drawn} if drawn else {})

    def table(self) -> dict[str, Any]:
        """Returns the record as JSON can hold it, see `of_table`; reads the files."""
        sums = {key: told for key in self.options.files if (told := self._checksum(key))}
        return self.keys() | ({"checksums": sums} if sums else {})

    def _checksum(self, key: str) -> str | None:
        """Returns the checksum of a file's values; None where it cannot be read."""
        path = getattr(self.options, key)
        return self.checksums.get(key) or checksum_of_volume(path)

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
            return cls(ObservationOptions.model_validate(keys), drawn, sums)
        except (ValidationError, ValueError, TypeError, AttributeError) as error:
            raise ObservationError(f"{where}: {ATTRIBUTE} is not readable ({error})") from error

    @property
    def has_mean_one(self) -> bool:
        """Whether the mean of what is seen is 1 by itself, so that it tells nothing."""
        asked = self.options
        whole = asked.kind == "density" and asked.mask is None
        return whole and asked.is_positive and "amplitude" not in self.nuisances

    def differences(self, data: ObservationRecord) -> list[str]:
        """Returns in what data differ from what this is made for, each in words; empty if nowhere.

        Values that the data have of a parameter that is drawn here may be any in its range.
        """
        own, other = self.options, data.options
        found = [
            _told(key, getattr(own, key), getattr(other, key))
            for key in ("structure", "redshift_space", "bias_scheme", "kind")
            if getattr(own, key) != getattr(other, key)
        ]
        here, there = map(_redshifts, (own, other))
        if not _same_redshifts(here, there):
            found.append(_told("redshifts", here, there))
        return [*found, *self._of_bias(data), *self._of_noise(data)]

    def _of_bias(self, data: ObservationRecord) -> Iterator[str]:
        own, other = self.options.bias or {}, data.options.bias or {}
        for name in dict.fromkeys([*own, *other]):
            here = self.nuisances.get(name, own.get(name))
            there = data.nuisances.get(name, other.get(name))
            if here is None or there is None or not _holds(here, there):
                yield _told(f"bias {name}", here, there)

    def _of_noise(self, data: ObservationRecord) -> Iterator[str]:
        own, other = self.options, data.options
        names = {"sigma": "noise_amplitude", "mean_count": "amplitude"}
        for key, name in names.items():
            here, there = getattr(own, key), getattr(other, key)
            if isinstance(here, float) and isinstance(there, float):
                here, there = self._range(here, name), data._range(there, name)
                if _holds(here, there):
                    continue
            elif self._same_values(data, key):
                if key == "sigma" and here is not None:
                    yield from self._of_amplitude(data, name)
                continue
            yield _told(key, here, there)
        if own.kind == other.kind == "density":
            yield from self._of_amplitude(data, "amplitude")
        if not self._same_values(data, "mask"):
            yield _told("mask", own.mask, other.mask)

    def _same_values(self, data: ObservationRecord, key: str) -> bool:
        """Returns whether two files, or their absence, say the same of every cell."""
        here, there = getattr(self.options, key), getattr(data.options, key)
        if not (isinstance(here, Path) and isinstance(there, Path)):
            return bool(here == there)
        if here == there and key not in {**self.checksums, **data.checksums}:
            return True
        sums = self._checksum(key), data._checksum(key)
        return here == there if None in sums else sums[0] == sums[1]

    def _of_amplitude(self, data: ObservationRecord, name: str) -> Iterator[str]:
        here, there = self._range(1.0, name), data._range(1.0, name)
        if not _holds(here, there):
            yield _told(name, here, there)

    def _range(self, value: float, name: str) -> float | tuple[float, float]:
        """Returns a number times the factor of this name: all that it may be."""
        ends = self.nuisances.get(name)
        return value if ends is None else (value * ends[0], value * ends[1])

    def told(self) -> str:
        """Returns the record in words."""
        told = {key: value for key, value in self.options if value is not None}
        if self.options.redshifts is not None:
            told["redshifts"] = _redshifts(self.options)
        parts = [f"{key} = {_shown(value)}" for key, value in told.items()]
        parts += [f"{name} {_shown(ends)}" for name, ends in self.nuisances.items()]
        return ", ".join(parts)

    def check(self, data: ObservationRecord, what: str) -> None:
        """Checks that data are what this is made for.

        Args:
            data: what was observed.
            what: names the data, for the message.

        Raises:
            ObservationError: they are not; the message says in what they differ.
        """
        if found := self.differences(data):
            raise ObservationError(
                f"{what} is of another observation than the training: {'; '.join(found)}. Train a "
                "network for it, with that [observation]"
            )


BARE = ObservationRecord(ObservationOptions())
"""The density of matter itself, by the particle mesh: what is seen unless a run file says more."""


def _redshifts(options: ObservationOptions) -> list[float] | None:
    """Returns the redshifts as a list: a tuple is a range here."""
    return None if options.redshifts is None else list(options.redshifts)


def _same_redshifts(one: list[float] | None, other: list[float] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return one == other
    return bool(np.allclose(one, other, rtol=0, atol=CLOSE))


def _holds(here: Any, there: Any) -> bool:
    """Returns whether a value or range lies within another."""
    low, high = here if isinstance(here, tuple) else (here, here)
    least, most = there if isinstance(there, tuple) else (there, there)
    room = CLOSE * max(abs(low), abs(high))
    return bool(low - room <= least and most <= high + room)


def checksum_of_volume(path: Path) -> str | None:
    """Returns the checksum of the values of a volume, of any format; None if it cannot be read."""
    try:
        return checksum(open_volume(path).array)
    except (VolumeError, OSError, ValueError, RuntimeError):
        return None


def _told(key: str, trained: Any, data: Any) -> str:
    if trained == data:
        return f"{key} has other values in the training than in the data, in {_shown(data)}"
    return f"{key} is {_shown(trained)} in the training, {_shown(data)} in the data"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"from {value[0]:g} to {value[1]:g}"
    if isinstance(value, list):
        return "[" + ", ".join(f"{x:g}" for x in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {x:g}" for name, x in value.items()) + "}"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
