"""Tuning of the keys of a run file, or of the options of a script."""
