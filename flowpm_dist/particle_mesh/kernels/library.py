"""The library of compiled kernels, or the reason why it cannot be used."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import tensorflow as tf

# Where setup.py leaves the library.
PATH = Path(__file__).with_name("_kernels.so")


@functools.cache
def load() -> tuple[Any, str | None]:
    """Returns the library's operations and None, or None and why they cannot be used."""
    if not PATH.exists():
        return None, "the compiled kernels are not built"
    if f"flowpm_dist kernels for TensorFlow {tf.__version__};".encode() not in PATH.read_bytes():
        return None, f"{PATH.name} was built for another TensorFlow than this {tf.__version__}"
    try:
        return tf.load_op_library(str(PATH)), None
    except (tf.errors.OpError, OSError, RuntimeError) as error:
        # The loader's first line names the symbol that TensorFlow no longer has.
        reason = str(getattr(error, "message", error)).strip().split("\n")[0]
        return None, f"{PATH.name} does not load with TensorFlow {tf.__version__} ({reason})"
