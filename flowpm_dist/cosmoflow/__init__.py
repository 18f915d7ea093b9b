"""Cosmological parameters from density volumes, by a network trained where they are simulated."""
