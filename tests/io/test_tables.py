"""Tables of astropy: every result has one, whatever its units are called."""

from __future__ import annotations

import numpy as np
import pytest
from astropy.cosmology.units import littleh
from astropy.units import Unit

from flowpm_dist.io.labelled import astropy_unit
from flowpm_dist.statistics.histogram import Histograms

MPC = Unit("Mpc") / littleh


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("(Mpc/h)^3", MPC**3),
        ("(h/Mpc)^3", MPC**-3),
        ("(Mpc/h)^3 / Msun", None),
        ("Msun/h", Unit("solMass") / littleh),
        ("km/s", Unit("km / s")),
        ("(km/s)^2", Unit("km / s") ** 2),
        ("cells", None),
        ("1", None),
        ("", None),
    ],
)
def test_units_are_those_of_astropy(text, unit):
    assert astropy_unit(text) == unit


def test_units_that_astropy_does_not_have_are_in_the_description():
    edges = np.stack([np.arange(3.0), np.arange(1.0, 4.0)], -1)[np.newaxis]
    table = Histograms(np.ones(1), edges, np.array([[1, 2, 3]]), 8).to_table()
    assert table["radius"].info.description == "radius of the Gaussian [cells]"
    np.testing.assert_array_equal(table["radius"], np.ones(3))
    assert table["counts"].info.description == "cells in the bin"
