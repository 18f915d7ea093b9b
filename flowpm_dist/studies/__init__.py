"""Studies: many runs of one subject, to measure how it scales or to tune its keys."""
