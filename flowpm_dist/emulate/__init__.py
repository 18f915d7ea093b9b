"""`flowpm-dist emulate`: learns a correction from converged universes."""
