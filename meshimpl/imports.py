"""Imports TensorFlow late, without Keras, and without the notices that it prints.

TensorFlow takes seconds to load. A command reads its arguments, finds its place among the ranks and
sets the number of threads before it loads TensorFlow.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from meshimpl import launch

# TensorFlow 2.21 prints these before it reads TF_CPP_MIN_LOG_LEVEL (tensorflow#100442).
_NOISE = re.compile(
    rb"^WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|^To enable the following instructions: "
    rb"|^[IWE]\d{4} .*(port\.cc|cudart_stub\.cc|cuda_dnn\.cc|cuda_blas\.cc|cuda_fft\.cc"
    rb"|computation_placer\.cc|cpu_feature_guard\.cc)"
)


# TensorFlow imports it at the end; it loads Keras, SciPy, scikit-learn and Matplotlib as well.
_EAGER = "keras.src.optimizers"


@contextlib.contextmanager
def without_keras() -> Iterator[None]:
    """Lets TensorFlow be imported without Keras, which takes 40 % of the time.

    `tf.keras` and `import keras` work afterwards: they load Keras when it is used.
    """
    if _EAGER in sys.modules or "tensorflow" in sys.modules:
        yield
        return
    # With None there, importing the module raises an ImportError, which TensorFlow ignores.
    sys.modules[_EAGER] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[_EAGER]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pauses the garbage collector, which would look 600 times through what modules make.

    TensorFlow makes 400,000 objects: during its import of 2 s this took 0.4 s.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def import_tensorflow() -> None:
    """Imports TensorFlow, without Keras.

    Known notices are removed from the standard error. With TF_CPP_MIN_LOG_LEVEL=0 in the
    environment, everything is printed at once.
    """
    if "tensorflow" in sys.modules:
        return
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") == "0":
        with without_keras(), uncollected():
            importlib.import_module("tensorflow")
        return
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        try:
            with without_keras(), uncollected():
                importlib.import_module("tensorflow")
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
            printed.seek(0)
            lines = [line for line in printed if not _NOISE.match(line)]
            os.write(2, b"".join(lines))


def lazy_names(
    package: str, homes: Mapping[str, str], without_tensorflow: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the module-level `__getattr__` and `__dir__` of a package.

    Args:
        package: name of the package.
        homes: public name -> the submodule that defines it.
        without_tensorflow: names that do not need it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name not in without_tensorflow and "tensorflow" not in sys.modules:
            launch.configure_threads()
            import_tensorflow()
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def directory() -> list[str]:
        attributes = vars(sys.modules[package]).items()
        rooms = (n for n, x in attributes if getattr(x, "__name__", "") == f"{package}.{n}")
        return sorted({*homes, *rooms, *(n for n, _ in attributes if n.startswith("__"))})

    return get, directory
