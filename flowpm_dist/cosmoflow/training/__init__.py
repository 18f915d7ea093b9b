"""A training from its plan to its last checkpoint, and the networks it leaves."""
