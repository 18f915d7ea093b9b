"""Particle kernels: compiled for CPUs and NVIDIA's GPUs, portable elsewhere."""

from flowpm_dist.particle_mesh.kernels.base import Ball, Kernels, Lattice, Slabs
from flowpm_dist.particle_mesh.kernels.compiled import (
    Compiled,
    KernelsError,
    kernels,
    why_portable,
)
from flowpm_dist.particle_mesh.kernels.portable import Portable
