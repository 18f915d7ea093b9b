"""Initial conditions from a density, by gradient descent through the simulation.

A mock universe, and sixty steps of Adam on the white noise that should make it. Runs as
`python reconstruct.py`, and on two ranks as `mpirun -np 2 python reconstruct.py`.
"""

import tensorflow as tf

import flowpm_dist as fpm

simulation = fpm.Simulation(
    fpm.Cosmology.planck18(), grid=32, box_size=256.0, steps=fpm.scale_factor_steps(0.1, 1.0, 3)
)
truth = simulation.run(seed=1)
observed = truth.density().block

noise = tf.Variable(0.1 * simulation.run(seed=2).white_noise.block)  # this rank's block
optimizer = tf.keras.optimizers.Adam(0.05)
mesh = simulation.box.mesh
for iteration in range(61):
    with tf.GradientTape() as tape:
        residual = simulation.run(white_noise=noise).density().block - observed
        # This rank's part of minus the log posterior: cells of unit noise, unit normal prior.
        part = 0.5 * tf.reduce_sum(residual**2) + 0.5 * tf.reduce_sum(noise**2)
    optimizer.apply_gradients([(tape.gradient(part, noise), noise)])
    loss = mesh.world.allreduce(part)
    if iteration % 10 == 0 and mesh.rank == 0:
        print(f"iteration {iteration:3d}  loss {float(loss):10.1f}", flush=True)

found = simulation.run(white_noise=noise)
k, correlation = fpm.correlation_coefficient(found.linear_delta, truth.linear_delta)
if mesh.rank == 0:
    print("k [h/Mpc]  r(k) of the initial fields")
    for row in zip(k, correlation, strict=True):
        print("{:9.3f}  {:6.3f}".format(*row))
