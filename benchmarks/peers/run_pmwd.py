"""Worker of gpu.py and peers.py: pmwd, 2LPT, its FastPM leapfrog and its adjoint, on one device.

It does what run_pmpp.py does, with the functions that PM++ took from pmwd.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import worker
from pmwd import Configuration, Cosmology, boltzmann, linear_modes, lpt, nbody, scatter


def _version() -> str:
    try:
        return version("pmwd")
    except PackageNotFoundError:
        return "a checkout"


def main() -> None:
    options = worker.arguments()
    given = options.cosmology
    conf = Configuration(
        ptcl_spacing=worker.CELL,
        ptcl_grid_shape=(options.grid,) * 3,
        mesh_shape=1,
        float_dtype=jnp.float32,
        a_start=worker.A_START,
        a_stop=worker.A_STOP,
        # A little more than a step, so that rounding makes no step more.
        a_nbody_maxstep=(worker.A_STOP - worker.A_START) / options.steps * (1 + 1e-9),
        lpt_order=2,
    )
    cosmology = boltzmann(
        Cosmology(
            conf,
            A_s_1e9=1e9 * given["A_s"],
            **{name: given[name] for name in ("n_s", "Omega_m", "Omega_b", "h")},
        ),
        conf,
    )

    @jax.jit
    def simulate(noise: Any) -> tuple[Any, Any]:
        particles, seen = lpt(linear_modes(noise, cosmology, conf), cosmology, conf)
        particles, _ = nbody(particles, seen, cosmology, conf)
        return particles.disp, scatter(particles, conf)

    noise, weight = jnp.asarray(options.noise), jnp.asarray(options.weight)
    differentiate = jax.jit(jax.value_and_grad(lambda x: jnp.sum(weight * simulate(x)[1])))
    worker.serve(
        options,
        lambda: jax.block_until_ready(simulate(noise)),
        lambda: jax.block_until_ready(differentiate(noise)),
        version=_version(),
        beside=f"jax {version('jax')}",
        scheme=f"2LPT, FastPM leapfrog, spectral force, {options.steps + 1} forces",
    )


if __name__ == "__main__":
    main()
