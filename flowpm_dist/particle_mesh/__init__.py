"""Particles on a mesh: paint, read, gravity, and the kernels that do it."""
