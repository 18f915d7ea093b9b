"""Public names of a package that are imported when they are first used.

A command line can then read its arguments and its place among the ranks before TensorFlow, which
takes seconds to load; and TensorFlow finds its number of threads set.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from meshimpl import launch, quiet


def prepare_tensorflow() -> None:
    """Imports TensorFlow with this rank's share of the cores, unless it is imported already."""
    if "tensorflow" not in sys.modules:
        launch.configure_threads()
        quiet.import_tensorflow()


def lazy_names(
    package: str, homes: Mapping[str, str], without_tensorflow: Collection[str] = ()
) -> Callable[[str], Any]:
    """Returns the module-level `__getattr__` of a package.

    Args:
        package: name of the package.
        homes: public name -> the submodule that defines it.
        without_tensorflow: names that do not need it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name not in without_tensorflow:
            prepare_tensorflow()
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get
