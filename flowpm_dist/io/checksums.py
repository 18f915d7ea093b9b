"""Checksums of values, which tell whether a file still holds what it held before."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def checksum(array: Any) -> str:
    """Returns the checksum of the values of an array, whatever their type and their format.

    Args:
        array: of at least one axis, or what is read like one, plane by plane. The first three of
            its sides belong to what is summed.
    """
    digest = hashlib.blake2b(repr(tuple(array.shape[:3])).encode(), digest_size=16)
    for plane in range(array.shape[0]):
        digest.update(np.array(array[plane], dtype="<f8").tobytes())
    return digest.hexdigest()
