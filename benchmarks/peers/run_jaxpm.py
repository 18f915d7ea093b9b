"""Worker of peers.py: JaxPM, 2LPT, diffrax's LeapfrogMidpoint in steps of equal length.

It does what JaxPM's own benchmark does: one jitted function from the noise to the painted density,
with `linear_field`, `lpt`, `make_diffrax_ode` and `diffeqsolve`, and reverse mode through diffrax's
default adjoint, recursive checkpointing. JaxPM's notebooks also show solvers that choose their own
steps (Tsit5, Dopri5). They need many more evaluations of the force and are not compared here. This
leapfrog has no FastPM factors, and with few steps its growth is visibly too small. JaxPM's main
branch has such factors in `symplectic_fpm_ode`, for diffrax's SemiImplicitEuler, which is taken
where it exists.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import jax_cosmo
import jaxpm.pm
import worker
from jaxpm.distributed import uniform_particles
from jaxpm.growth import growth_factor
from jaxpm.kernels import interpolate_power_spectrum
from jaxpm.painting import cic_paint, cic_paint_dx

try:
    from jaxpm.ode import make_diffrax_ode, symplectic_fpm_ode
except ImportError:  # the released version
    from jaxpm.pm import make_diffrax_ode

    symplectic_fpm_ode = None

ABSOLUTE = True
"""Positions rather than displacements: the faster of JaxPM's two ways on a CPU."""


def main() -> None:
    options = worker.arguments()
    grid, shape = options.grid, (options.grid,) * 3
    # linear_field draws its noise: here its seed is the noise, so that all codes share one.
    jaxpm.pm.normal_field = lambda seed, shape, sharding: seed
    cosmology, other = (
        jax_cosmo.Cosmology(
            Omega_c=options.cosmology["Omega_m"] - options.cosmology["Omega_b"],
            **{name: options.cosmology[name] for name in ("Omega_b", "h", "n_s")},
            sigma8=options.sigma8,
            Omega_k=0.0,
            w0=-1.0,
            wa=0.0,
        )
        for _ in range(2)
    )
    growth_factor(cosmology, jnp.atleast_1d(1.0))  # its table, kept in the cosmology
    k = jnp.logspace(-4, 1, 512)
    power = jax_cosmo.power.linear_matter_power(other, k)
    lattice = uniform_particles(shape) if ABSOLUTE else None
    term = diffrax.ODETerm(make_diffrax_ode(shape, paint_absolute_pos=ABSOLUTE))
    solver, scheme = diffrax.LeapfrogMidpoint(), "diffrax's LeapfrogMidpoint"
    first_kick = None
    step = (worker.A_STOP - worker.A_START) / options.steps
    if symplectic_fpm_ode is not None:
        drift, kick, first_kick = symplectic_fpm_ode(
            shape, step, cosmology, paint_absolute_pos=ABSOLUTE
        )
        term = (diffrax.ODETerm(drift), diffrax.ODETerm(kick))
        solver, scheme = diffrax.SemiImplicitEuler(), "FastPM factors, SemiImplicitEuler"

    def first(noise: Any) -> tuple[Any, Any]:
        """Displacement and momentum [cells] at the first edge."""
        if options.begin:
            return tuple(jnp.asarray(each) / worker.CELL for each in options.begin)
        linear = jaxpm.pm.linear_field(
            shape,
            (worker.CELL * grid,) * 3,
            lambda x: interpolate_power_spectrum(x, k, power),
            seed=noise,
        )
        return jaxpm.pm.lpt(cosmology, linear, particles=lattice, a=worker.A_START, order=2)[:2]

    def evolve(noise: Any, saved: Any) -> Any:
        moved, momentum = first(noise)
        start = moved if lattice is None else lattice + moved
        begin = jnp.stack([start, momentum])
        if first_kick is not None:
            begin = (start, momentum + step * first_kick(worker.A_START, start, cosmology))
        solution = diffrax.diffeqsolve(
            term,
            solver,
            t0=worker.A_START,
            t1=worker.A_STOP,
            dt0=None,
            stepsize_controller=diffrax.StepTo(jnp.asarray(options.edges, jnp.float32)),
            y0=begin,
            args=cosmology,
            saveat=saved,
            max_steps=options.steps,
        )
        return solution.ys[:, 0] if first_kick is None else solution.ys[0]

    def simulate(noise: Any) -> tuple[Any, Any]:
        end = evolve(noise, diffrax.SaveAt(t1=True))[-1]
        if lattice is None:
            return end * worker.CELL, cic_paint_dx(end)
        return (end - lattice) * worker.CELL, cic_paint(jnp.zeros(shape), end)

    # As in JaxPM's notebooks: a snapshot for each slab, painted on a plane, then Born. The box is
    # repeated along the line of sight without changes, and cut into two slabs.
    side, slabs = worker.CELL * grid, 2
    redshifts = jnp.asarray(worker.SOURCES)
    distance = jax_cosmo.background.radial_comoving_distance
    end = float(distance(cosmology, 1 / (1 + redshifts[-1]))[0])
    depth = side / slabs
    chi = (jnp.arange(int(end / depth) + 1) + 0.5) * depth
    times = jax_cosmo.background.a_of_chi(cosmology, chi)
    angles = ((jnp.arange(grid) + 0.5) / grid) * side / end
    coords = jnp.stack(jnp.meshgrid(angles, angles, indexing="ij"))

    def convergence(noise: Any) -> Any:
        from jaxpm.lensing import convergence_Born, density_plane

        found = evolve(noise, diffrax.SaveAt(ts=times[::-1]))[::-1]
        planes = [
            {
                "r": chi[i],
                "a": times[i],
                "plane": density_plane(
                    found[i] % grid,
                    shape,
                    (i % slabs + 0.5) * grid / slabs,
                    grid / slabs,
                    grid,
                ),
                "dx": worker.CELL,
                "dz": depth,
            }
            for i in range(len(chi))
        ]
        return convergence_Born(cosmology, planes, coords, redshifts)

    noise, weight = jnp.asarray(options.noise), jnp.asarray(options.weight)
    run = jax.jit(simulate)
    differentiate = jax.jit(jax.value_and_grad(lambda x: jnp.sum(weight * simulate(x)[1])))
    if options.task.startswith("lensing"):
        run = jax.jit(lambda x: (len(chi), convergence(x)))
        differentiate = jax.jit(jax.value_and_grad(lambda x: jnp.sum(convergence(x) ** 2)))
    worker.serve(
        options,
        lambda: jax.block_until_ready(run(noise)),
        lambda: jax.block_until_ready(differentiate(noise)),
        version=version("jaxpm") if first_kick is None else "main",
        beside=f"jax {version('jax')}, diffrax {version('diffrax')}",
        scheme=f"2LPT, {scheme}, finite-difference force, "
        f"{options.steps + (first_kick is not None)} forces",
    )


if __name__ == "__main__":
    main()
