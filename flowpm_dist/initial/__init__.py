"""Initial conditions: white noise, the linear field, Lagrangian perturbation theory."""
