"""Simulates a universe and compares its power spectrum with linear theory.

Runs as `python simulate.py`, and on four ranks as `mpirun -np 4 python simulate.py`.
"""

import flowpm_dist as fpm

cosmology = fpm.Cosmology.planck18().replace(transfer="camb")
steps = fpm.scale_factor_steps(0.1, 1.0, 10)

simulation = fpm.Simulation(
    cosmology,
    grid=64,
    box_size=128.0,  # [Mpc/h]
    steps=steps,
)
state = simulation.run(seed=42)

density = state.density()
k, power = fpm.power_spectrum(density)
linear = fpm.LinearPower(cosmology)(k, state.a).numpy()

if density.mesh.rank == 0:
    print("k [h/Mpc]  P [(Mpc/h)^3]  P / linear")
    for row in zip(k, power, power / linear, strict=True):
        print("{:9.4f}  {:13.1f}  {:10.3f}".format(*row))
