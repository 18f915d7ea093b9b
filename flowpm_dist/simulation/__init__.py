"""The front door: `Simulation` and the `State` it gives."""
