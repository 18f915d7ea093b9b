"""A part of run files that several tests share."""

PRIORS = """
[cosmology]
Omega_b = 0.049
h = 0.67
n_s = 0.96
[priors]
Omega_m = [0.25, 0.35]
sigma8 = [0.78, 0.95]
"""
