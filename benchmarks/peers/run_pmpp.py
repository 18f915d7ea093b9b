"""Worker of peers.py: PM++, 2LPT, its FastPM leapfrog and its custom adjoint, on one device.

It follows the first simulation of PM++'s documentation: one jitted function of `linear_modes`,
`lpt`, `nbody` and `scatter`. PM++ is written for GPUs; on a CPU it warns and runs its portable JAX
implementation.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import worker
from pmpp import Configuration
from pmpp.cic import scatter
from pmpp.cosmology import Cosmology, boltzmann
from pmpp.initial_conditions import linear_modes, lpt
from pmpp.nbody import nbody
from pmpp.nbody.particles import Particles


def main() -> None:
    options = worker.arguments()
    warnings.filterwarnings("ignore", message="Pallas CIC was requested")
    given = options.cosmology
    conf = Configuration(
        ptcl_spacing=worker.CELL,
        ptcl_grid_shape=(options.grid,) * 3,
        mesh_shape=options.scheme.get("mesh_factor", 1),
        float_dtype=jnp.float32,
        a_start=worker.A_START,
        a_stop=worker.A_STOP,
        a_custom=tuple(options.edges.tolist()),
        lpt_order=2,
        nbody_cosmo_grad=False,  # its advice where only the gradient by the modes is wanted
    )
    cosmology = boltzmann(
        Cosmology(
            conf,
            A_s_1e9=1e9 * given["A_s"],
            **{name: given[name] for name in ("n_s", "Omega_m", "Omega_b", "h")},
        ),
        conf,
    )

    def simulate(noise: Any) -> tuple[Any, Any]:
        if options.begin:
            disp, vel = (jnp.asarray(each).reshape(-1, 3) for each in options.begin)
            particles = Particles.gen_grid(conf, vel=True).replace(disp=disp, vel=vel, acc=None)
        else:
            particles = lpt(linear_modes(noise, cosmology, conf), cosmology, conf)
        particles = nbody(particles, cosmology, conf)
        return particles.disp, scatter(particles, conf)

    noise, weight = jnp.asarray(options.noise), jnp.asarray(options.weight)
    run = jax.jit(simulate)
    differentiate = jax.jit(jax.value_and_grad(lambda x: jnp.sum(weight * simulate(x)[1])))
    worker.serve(
        options,
        lambda: jax.block_until_ready(run(noise)),
        lambda: jax.block_until_ready(differentiate(noise)),
        version=version("pmpp"),
        beside=f"jax {version('jax')}",
        scheme=f"2LPT, FastPM leapfrog, spectral force, {options.steps + 1} forces",
    )


if __name__ == "__main__":
    main()
