"""The evolution of particles: integrators, kicks and drifts, and their adjoints."""
