"""Scores of predictions, compared with baselines and with each other."""
