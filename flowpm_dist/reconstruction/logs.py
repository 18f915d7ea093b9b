"""The columns of iterations.csv and draws.csv."""

LARGE, SMALL = 0.1, 0.3
"""Wavenumbers at which the correlation with the truth is told, about [h/Mpc]."""

COLUMNS = (
    "iteration", "stage", "evaluations", "radius", "inflation", "loss", "data", "prior",
    "gradient_norm", "step", "seconds", f"r({LARGE})", f"r({SMALL})",
)  # fmt: skip

MOVE_COLUMNS = (
    "move", "chain", "drawn", "evaluations", "radius", "inflation", "step", "acceptance",
    "energy_error", "loss", "data", "prior", "seconds",
)  # fmt: skip
