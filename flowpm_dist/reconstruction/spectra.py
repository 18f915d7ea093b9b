"""Two-point statistics of what was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flowpm_dist.observables.universe_model import UniverseModel
from flowpm_dist.reconstruction.logs import LARGE, SMALL
from flowpm_dist.reconstruction.universe import Universe
from flowpm_dist.statistics import Comparison, compare, power_spectrum


@dataclass(frozen=True)
class Spectra:
    """Two-point statistics of what was found.

    Attributes:
        k, modes: of the bins [h/Mpc].
        columns: further ones by name, with units.
        compared: initial and final field against the truth, where there is one.
    """

    k: np.ndarray
    modes: np.ndarray
    columns: dict[str, np.ndarray]
    compared: dict[str, Comparison]

    @classmethod
    def of(cls, model: UniverseModel, found: Universe, truth: Universe | None, a: float) -> Spectra:
        """Returns the spectra of a universe, or its comparison with the truth.

        On all ranks together.

        Args:
            model: from white noise to what is observed.
            found: the universe.
            truth: where it is known.
            a: scale factor of the data.
        """
        window: Any = "cic" if model.formation.has_particles else None
        if truth is not None:
            initial = compare(found.state.linear_delta, truth.state.linear_delta)
            final = compare(found.matter, truth.matter, window=window)
            columns = {
                "r initial": initial.correlation,
                "T initial": initial.transfer,
                "r final": final.correlation,
                "T final": final.transfer,
            }
            compared = {"initial field": initial, "final field": final}
            return cls(initial.k, initial.modes, columns, compared)
        initial_power = power_spectrum(found.state.linear_delta)
        final_power = power_spectrum(found.matter, window=window)
        k, theory = initial_power.k, model.simulation.power
        columns = {
            "P initial at a = 1 [(Mpc/h)^3]": initial_power.power,
            "linear at a = 1 [(Mpc/h)^3]": np.asarray(theory(k, 1.0)),
            "P final [(Mpc/h)^3]": final_power.power,
            "linear [(Mpc/h)^3]": np.asarray(theory(k, a)),
        }
        return cls(k, initial_power.modes, columns, {})

    def correlations(self) -> dict[str, Any]:
        """Returns the correlations with the truth at a few wavenumbers, for result.json."""
        rows = {}
        for wanted in (LARGE, SMALL) if self.compared else ():
            i = int(np.argmin(np.abs(np.log(self.k / wanted))))
            of_fields = {f"r {n}": float(c.correlation[i]) for n, c in self.compared.items()}
            rows[i] = {"k [h/Mpc]": float(self.k[i]), **of_fields}
        return {"correlations": list(rows.values())} if rows else {}
