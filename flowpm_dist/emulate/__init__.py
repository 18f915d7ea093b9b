"""`flowpm-dist emulate`: learns a correction of the force from converged universes."""
