"""Trained networks judged on volumes they have not seen, and asked about others."""
