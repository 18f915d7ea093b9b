"""Imports TensorFlow without the lines that it prints, and TensorFlow and Horovod without Keras."""

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# TensorFlow 2.21 prints these before it reads TF_CPP_MIN_LOG_LEVEL (tensorflow#100442).
_NOISE = re.compile(
    rb"^WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|^To enable the following instructions: "
    rb"|^[IWE]\d{4} .*(port\.cc|cudart_stub\.cc|cuda_dnn\.cc|cuda_blas\.cc|cuda_fft\.cc"
    rb"|computation_placer\.cc|cpu_feature_guard\.cc)"
)


# Its import, at the end of TensorFlow's, loads Keras, SciPy, scikit-learn and Matplotlib as well.
_EAGER = "keras.src.optimizers"


@contextmanager
def without_keras() -> Iterator[None]:
    """Lets TensorFlow be imported without Keras, which takes 40 % of the time.

    `tf.keras` and `import keras` work afterwards: they load Keras when it is used.
    """
    if _EAGER in sys.modules or "tensorflow" in sys.modules:
        yield
        return
    # With None there, importing that module is an ImportError, which TensorFlow passes over.
    sys.modules[_EAGER] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[_EAGER]


def import_horovod() -> ModuleType:
    """Returns Horovod for TensorFlow, imported without its one Keras layer, and so without Keras.

    `horovod.tensorflow.SyncBatchNormalization` works afterwards: it loads Keras when it is used.
    """
    if "horovod.tensorflow" in sys.modules or "keras" in sys.modules:
        return importlib.import_module("horovod.tensorflow")
    name, layer = "horovod.tensorflow.sync_batch_norm", "SyncBatchNormalization"
    sys.modules[name] = stand_in = ModuleType(name)
    setattr(stand_in, layer, None)
    try:
        horovod = importlib.import_module("horovod.tensorflow")
    finally:
        del sys.modules[name]

    def late(wanted: str) -> Any:
        if wanted != layer:
            raise AttributeError(f"module {horovod.__name__!r} has no attribute {wanted!r}")
        return getattr(importlib.import_module(name), layer)

    delattr(horovod, layer)
    vars(horovod)["__getattr__"] = late
    return horovod


def import_tensorflow() -> None:
    """Imports TensorFlow, without Keras.

    Of what it prints to the standard error, leaves out the known notices. With
    TF_CPP_MIN_LOG_LEVEL=0 in the environment everything is printed as it comes.
    """
    if "tensorflow" in sys.modules:
        return
    with without_keras():
        _import_tensorflow()


def _import_tensorflow() -> None:
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") == "0":
        importlib.import_module("tensorflow")
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        try:
            importlib.import_module("tensorflow")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            printed.seek(0)
            lines = [line for line in printed if not _NOISE.match(line)]
            os.write(2, b"".join(lines))
