"""How good predictions are, beside those of baselines and of each other."""
