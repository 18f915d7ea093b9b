"""Compares the gradient of a loss to Omega_m, sigma8 and white noise with finite differences.

Runs as `python gradients.py`, and on two ranks as `mpirun -np 2 python gradients.py`.
"""

import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.initial import noise_function

simulation = fpm.Simulation(
    fpm.Cosmology.planck18(),
    grid=32,
    box_size=128.0,
    steps=fpm.scale_factor_steps(0.1, 1.0, 5),
    precision="float64",
)
mesh = simulation.box.mesh
noise, direction = (noise_function(simulation.box)(seed) for seed in (1, 2))  # this rank's blocks
values = {"Omega_m": 0.31, "sigma8": 0.81}


def part_of_loss(noise, parameters):
    """Returns this rank's part of the variance of the density at a = 1."""
    cosmology = fpm.Cosmology(Omega_b=0.049, h=0.68, n_s=0.97, **parameters)
    density = simulation.run(white_noise=noise, cosmology=cosmology).density().block
    return tf.reduce_sum((density - 1) ** 2) / simulation.box.cells


def loss(noise, parameters):
    """Returns the variance over all ranks."""
    return float(mesh.world.allreduce(part_of_loss(noise, parameters)))


parameters = {name: tf.Variable(value, dtype=tf.float64) for name, value in values.items()}
with tf.GradientTape() as tape:
    tape.watch(noise)
    part = part_of_loss(noise, parameters)
to_noise, slopes = tape.gradient(part, [noise, parameters])

# The gradient to a parameter is complete on every rank; the one to a field is this rank's block.
found = {name: float(slope) for name, slope in slopes.items()}
found["noise"] = float(mesh.world.allreduce(tf.reduce_sum(to_noise * direction)))

# The steps are small because the loss has a kink where a particle crosses the face of a cell.
step = 1e-7
differences = {
    name: (loss(noise, values | {name: value + step}) - loss(noise, values | {name: value - step}))
    / (2 * step)
    for name, value in values.items()
}
up, down = (loss(noise + shift * direction, values) for shift in (step, -step))
differences["noise"] = (up - down) / (2 * step)

if mesh.rank == 0:
    print("by        gradient          difference")
    for name, slope in found.items():
        print(f"{name:8s}  {slope:16.10f}  {differences[name]:16.10f}")
