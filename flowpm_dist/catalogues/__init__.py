"""Halos of dark matter and galaxies: found where particles are, as catalogues."""
