"""C_l of light cones with corrections, compared with what TreePM's power implies.

    python benchmarks/corrected_light_cones.py --universes FILES [--correction network ...]
        [--cones 4]

The light cone has the field of examples/lensing.toml: 6 degrees, here in 240 pixels a side, with
sources at z = 0.5 and 1, in runs of 256 Mpc/h. FILES are TreePM runs of benchmarks/treepm.py, all
of one grid, with particles as far apart as in the light cones. Halofit's power times TreePM's power
over the converged run's power, interpolated in k and a, gives by Limber's integral what TreePM
would have. The script prints C_l of each kind of runs over the converged run's, means of two seeds,
and the time of a light cone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from emulator import Measured, Universe, options_of

import flowpm_dist as fpm
from flowpm_dist.cosmology.nonlinear import Halofit
from flowpm_dist.evolution.corrections import SHIPPED
from flowpm_dist.observables.lensing import SourcePlane, convergence_power
from flowpm_dist.observables.light_cone import FlatField, LightCone
from flowpm_dist.statistics.angular_spectra import angular_power

EDGES = [200, 400, 700, 850, 1180, 1700, 2350, 3000]
"""Edges of bins of multipoles; two of them lie around 1000 and 2000."""
SIZE = 256.0
"""[Mpc/h]"""

CONVERGED: dict[str, Any] = {"mesh_factor": 3, "deconvolve": True}
"""The force of runs that stand for converged ones."""


def truth_over_runs(
    paths: Sequence[Path], options: dict[str, Any], steps: int, sources: Sequence[SourcePlane]
) -> np.ndarray:
    """Returns an estimate of TreePM's C_l divided by C_l in runs [source, ell].

    Halofit's power is multiplied by the mean ratio of powers in snapshots, interpolated in k and a.
    """
    universes = [Universe(path, steps) for path in paths]
    found = [
        [Measured(run).against(Measured(truth)) for run, truth in zip(*both, strict=True)]
        for both in ((universe.run(options), universe.states) for universe in universes)
    ]
    k, times = np.asarray(found[0][0].k), universes[0].times
    ratios = np.mean([[np.asarray(x.transfer) ** -2 for x in each] for each in found], axis=0)
    cosmology = universes[0].cosmology
    halofit = Halofit(fpm.LinearPower(cosmology))

    def power(k_there: Any, a: Any) -> tf.Tensor:
        k_there, a = np.broadcast_arrays(k_there, a)
        at = np.clip(np.searchsorted(times, a) - 1, 0, len(times) - 2)
        begin, end = np.take(times, at), np.take(times, at + 1)
        share = np.clip((a - begin) / (end - begin), 0.0, 1.0)
        each = np.stack([np.interp(k_there, k, ratio) for ratio in ratios])
        early, late = (np.take_along_axis(each, i[None], axis=0)[0] for i in (at, at + 1))
        return halofit(k_there, a) * (early + share * (late - early))

    ell = 0.5 * (np.array(EDGES[1:]) + EDGES[:-1])
    spectra = [np.asarray(convergence_power(ell, sources, cosmology, p)) for p in (power, halofit)]
    return np.einsum("iil->il", spectra[0] / spectra[1])


def main() -> None:
    """Print C_l over a converged run's, first what TreePM would have, and times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--universes", type=Path, nargs="+", required=True)
    parser.add_argument("--correction", nargs="*", default=list(SHIPPED))
    text = "light cones of each row, at least 2: two seeds in turns; the first one is not timed"
    parser.add_argument("--cones", type=int, default=4, help=text)
    arguments = parser.parse_args()
    if arguments.cones < 2:
        parser.error("--cones must be at least 2")
    first = Universe(arguments.universes[0])
    grid = round(SIZE / first.spacing)
    cosmology = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.97, sigma8=0.81)
    cone = LightCone(FlatField(field_of_view=6.0, pixels=240, z_max=1.0))
    sources = [SourcePlane(0.5), SourcePlane(1.0)]
    rows: dict[str, dict[str, Any]] = {
        "converged": {**CONVERGED, "steps": 40},
        "plain": {},
        **{each: options_of(each) for each in arguments.correction},
        "B = 2": {"mesh_factor": 2},
    }
    expected = truth_over_runs(arguments.universes, CONVERGED, 40, sources)
    print("TreePM, estimated:", np.round(expected, 3).tolist(), flush=True)
    found: dict[str, np.ndarray] = {}
    for name, options in rows.items():
        steps = fpm.scale_factor_steps(0.1, 1.0, options.pop("steps", first.steps))
        more = {"integrator": "bullfrog", **options}
        simulation = fpm.Simulation(cosmology, grid, SIZE, steps, **more)
        spectra, laps = [], []
        for cone_number in range(arguments.cones):
            begin = time.perf_counter()
            maps = cone.convergence(simulation, sources, seed=1 + cone_number % 2)
            laps.append(time.perf_counter() - begin)
            spectra.append(angular_power(maps.kappa, maps.sky.fov, EDGES, window="bilinear"))
        found[name] = np.array([np.asarray(spectrum.power) for spectrum in spectra[:2]])
        ratio = (found[name] / found["converged"]).mean(axis=0)
        print(f"{name}, {np.median(laps[1:]):.2f} s:", np.round(ratio, 3).tolist(), flush=True)
    print("at l =", np.round(spectra[0].ell))


if __name__ == "__main__":
    main()
