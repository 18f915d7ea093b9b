"""The box, its fields, their decomposition over ranks, and Fourier filters."""
