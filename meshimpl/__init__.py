"""Mesh TensorFlow on Horovod process sets: ranks, layouts, collectives, and nothing of physics."""

from meshimpl.collectives import CollectiveError, Communicator
from meshimpl.process_mesh import MeshError, ProcessMesh, initialise

__all__ = ["CollectiveError", "Communicator", "MeshError", "ProcessMesh", "initialise"]
