"""The volumes to learn from: simulated on the ranks, or read from records and arrays."""
