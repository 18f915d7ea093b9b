# %% [markdown]
# # Gradients: fit sigma8
#
# A simulation is differentiable. In this tutorial you compute the derivative of a power spectrum with respect to
# $\sigma_8$, fit $\sigma_8$ to data with it, and see how the power depends on every cell of the initial conditions.

# %%
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.statistics import bin_contents, binned_power

planck = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.97, sigma8=0.75)
sim = fpm.Simulation(planck, grid=32, box_size=128.0, steps=fpm.scale_factor_steps(0.1, 1.0, 5))
bins = fpm.Bins(4, k_max=0.25)

# %% [markdown]
# ## One gradient
#
# A `tf.GradientTape` around `run` records the run as a single operation. Here it differentiates the logarithm of the
# power in one bin. `binned_power` is the differentiable form of `power_spectrum`.


# %%
def log_power(sigma8, seed=1):
    """Returns ln P in each bin, for a universe with this sigma8."""
    universe = sim.run(seed=seed, cosmology=planck.replace(sigma8=sigma8))
    return tf.math.log(binned_power(universe.density(), bins=bins))


sigma8 = tf.Variable(0.75, dtype=tf.float64)
with tf.GradientTape() as tape:
    first_bin = log_power(sigma8)[0]
slope = float(tape.gradient(first_bin, sigma8))
print(f"d ln P / d ln sigma8 = {0.75 * slope:.3f} in the first bin; linear theory has 2")

# %% [markdown]
# The backward pass undoes the steps in reverse order. Its memory does not grow with their number, beyond [a small
# amount](../explanations/gradients.md#memory).
#
# ## All bins at once
#
# `fpm.jacobian` runs the universe once and returns the derivatives of all outputs.

# %%
found = fpm.jacobian(lambda p: log_power(p["sigma8"]), {"sigma8": 0.75}, sim.box.mesh)
k, modes = bin_contents(sim.box, bins)

figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
axes.plot(k, 0.75 * found.derivatives["sigma8"], "o-")
axes.axhline(2, color="grey", lw=0.8, ls="--", label="linear theory")
axes.set(xlabel="k [h/Mpc]", ylabel="d ln P / d ln sigma8")
axes.legend()
plt.show()

# %% [markdown]
# ## Fit sigma8
#
# The data are the spectrum of a universe with $\sigma_8 = 0.81$ and other initial conditions, another seed. The
# relative variance of the power of a Gaussian field is 2 over the number of modes. Both universes have this scatter,
# so it counts twice. The Gauss-Newton method needs one Jacobian in each iteration.

# %%
data = log_power(0.81, seed=2).numpy()
variance = 2 * 2 / modes

value, history = 0.70, [0.70]
for _ in range(3):
    found = fpm.jacobian(lambda p: log_power(p["sigma8"]), {"sigma8": value}, sim.box.mesh)
    derivative, residual = found.derivatives["sigma8"], data - found.values
    information = np.sum(derivative**2 / variance)
    value += float(np.sum(derivative * residual / variance) / information)
    history.append(value)
    print(f"sigma8 = {value:.5f} +- {information**-0.5:.5f}")

# %% [markdown]
# Each iteration moves $\sigma_8$ by the residual over the derivative, so a few suffice. The error assumes a Gaussian
# field, which holds on these large scales. With `k_max=0.5`, fits to other seeds scatter by several times this error,
# because non-linear bins are correlated. A real analysis averages the model over seeds, and measures the covariance.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
left.plot(history, "o-")
left.axhline(0.81, color="grey", lw=0.8, ls="--")
left.set(xlabel="iteration", ylabel="sigma8")
right.errorbar(k, data, np.sqrt(variance), fmt="o", label="data")
right.plot(k, found.values, label="fit")
right.set(xlabel="k [h/Mpc]", ylabel="ln P")
right.legend()
plt.show()

# %% [markdown]
# ## The gradient with respect to the initial conditions
#
# The same backward pass reaches every cell of the white noise. Here is the gradient of the density in the middle of
# the box, today: the initial conditions that would make the place denser.

# %%
noise = tf.Variable(sim.lpt(seed=1).white_noise.block)
with tf.GradientTape() as tape:
    density = sim.run(white_noise=noise).density().block
    central = tf.reduce_mean(density[15:18, 15:18, 15:18])
to_noise = tape.gradient(central, noise).numpy()

figure, axes = plt.subplots(figsize=(5.2, 4.2), layout="constrained")
limit = np.abs(to_noise[..., 16]).max()
shown = axes.imshow(
    to_noise[..., 16].T,
    origin="lower",
    extent=(0, 128, 0, 128),
    cmap="RdBu_r",
    vmin=-limit,
    vmax=limit,
)
figure.colorbar(shown, label="gradient with respect to white noise")
axes.set(xlabel="x [Mpc/h]", ylabel="y [Mpc/h]")
plt.show()

# %% [markdown]
# A search for initial conditions follows such gradients: see [reconstruction](reconstruction.py).
#
# ## Next
#
# - [Gradients](../explanations/gradients.md): how they are computed, their memory and precision, and what has none
# - [A forecast](forecast.py) of Omega_m, sigma8 and the mass of neutrinos
# - [Measure a field](../howto/statistics.md#jacobians-and-fisher-matrices): Jacobians and Fisher matrices
