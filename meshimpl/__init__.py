"""Mesh TensorFlow on Horovod process sets: ranks, layouts, collectives, and nothing of physics."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_HOMES = {
    "CollectiveError": "collectives",
    "Communicator": "collectives",
    "HvdSimdMeshImpl": "hvd_simd_mesh_impl",
    "MeshError": "process_mesh",
    "MeshFunction": "mesh_function",
    "ProcessMesh": "process_mesh",
    "initialise": "process_mesh",
}

__all__ = sorted(_HOMES)


def prepare_tensorflow() -> None:
    """Import TensorFlow with this rank's share of the cores; nothing if it is there already."""
    if "tensorflow" not in sys.modules:
        from meshimpl import launch, quiet

        launch.configure_threads()
        quiet.import_tensorflow()


def __getattr__(name: str) -> Any:
    """Import on first use, so that `meshimpl.launch` can be asked before TensorFlow is loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    prepare_tensorflow()
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
