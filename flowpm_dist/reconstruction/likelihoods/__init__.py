"""Likelihoods of the data, one in each file; your own derive from `base.Likelihood`."""
