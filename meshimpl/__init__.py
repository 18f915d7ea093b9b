"""Mesh TensorFlow on Horovod process sets: ranks, layouts, collectives, and nothing of physics."""

from meshimpl.imports import lazy_names

_HOMES = {
    "CollectiveError": "engine",
    "Communicator": "collectives",
    "HvdSimdMeshImpl": "hvd_simd_mesh_impl",
    "MeshError": "mesh_shape",
    "MeshFunction": "mesh_function",
    "ProcessMesh": "process_mesh",
    "Stopwatch": "graph_guards",
    "initialise": "process_mesh",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
