# %% [markdown]
# # A first universe
#
# In this tutorial you simulate a universe, look at it, and measure its power spectrum, in real space and in redshift
# space. The box has 64³ particles, so every cell takes seconds on a laptop. Lengths are comoving in Mpc/h.
#
# You need an installed package (`make setup` in the folder of the project) and matplotlib.

# %%
import matplotlib.pyplot as plt
import numpy as np

import flowpm_dist as fpm

# %% [markdown]
# ## Simulate
#
# A simulation needs a cosmology, a grid, a box size and the edges of its time steps. Here ten steps of equal length
# in the scale factor $a$ lead from $a = 0.1$ to today, $a = 1$. `mesh_factor=2` computes the force on a mesh twice as
# fine as the particle lattice.

# %%
planck = fpm.Cosmology.planck18()
sim = fpm.Simulation(
    planck,
    grid=64,
    box_size=128.0,
    steps=fpm.scale_factor_steps(0.1, 1.0, 10),
    mesh_factor=2,
)
state = sim.run(seed=42)
state

# %% [markdown]
# The seed fixes the initial conditions. The same seed gives the same universe on any number of ranks.
#
# ## Look at it
#
# `state.density()` paints the particles on a mesh. The result is a `Field`: `numpy()` returns the whole array, and
# its mean is 1. The picture shows the mean density of a slab 16 Mpc/h thick. Next to it is the linear overdensity
# that the universe began with, in the same slab.

# %%
density = state.density()


def slab_of(field):
    """Returns the mean over the first 8 of 64 cells along z."""
    return field.numpy()[..., :8].mean(axis=-1).T


figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
extent = (0, 128, 0, 128)
shown = left.imshow(
    slab_of(state.linear_delta), origin="lower", extent=extent, cmap="RdBu_r", vmin=-3, vmax=3
)
figure.colorbar(shown, ax=left, label="linear overdensity at a = 1")
shown = right.imshow(np.log10(slab_of(density) + 0.05), origin="lower", extent=extent, cmap="magma")
figure.colorbar(shown, ax=right, label="log10(density + 0.05)")
for axes, title in ((left, "initial conditions"), (right, "today")):
    axes.set(title=title, xlabel="x [Mpc/h]", ylabel="y [Mpc/h]")
plt.show()

# %% [markdown]
# ## Measure the power spectrum
#
# `fpm.power_spectrum` measures a field. Painting smooths the density; the field knows this, and the spectrum divides
# the smoothing out. Two theories serve as a comparison: linear theory, and the fitting formula halofit.

# %%
from flowpm_dist.cosmology import Halofit

spectrum = fpm.power_spectrum(density)
linear = fpm.LinearPower(planck)
halofit = Halofit(linear)

figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
axes.loglog(spectrum.k, spectrum.power, label="simulation")
axes.loglog(spectrum.k, linear(spectrum.k, state.a), "--", label="linear theory")
axes.loglog(spectrum.k, halofit(spectrum.k, state.a), ":", label="halofit")
axes.set(xlabel="k [h/Mpc]", ylabel="P(k) [(Mpc/h)³]")
axes.legend()
plt.show()

# %% [markdown]
# On large scales the few modes of this small box scatter around theory. On small scales the spectrum falls below
# halofit, because the force mesh does not resolve them. [Accuracy](../measurements/accuracy.md) lists by how much,
# for each number of steps and each mesh.
#
# ## Redshift space
#
# A galaxy survey measures redshifts, which contain the peculiar velocity along the line of sight.
# `state.density(redshift_space="z")` paints the particles where a distant observer along z sees them. The monopole
# and the quadrupole describe how the power depends on the direction. On the largest scales linear theory predicts
# both from the growth rate $f$ (Kaiser 1987). The mean over three lines of sight reduces the scatter of the few modes
# there.

# %%
measured = [fpm.multipoles(state.density(redshift_space=axis), axis=axis) for axis in "xyz"]
k = measured[0].k
monopole, quadrupole, _ = np.mean([each.power for each in measured], axis=0)

f = float(sim.theory.growth.f1(1.0))
kaiser = np.array([1 + 2 * f / 3 + f**2 / 5, 4 * f / 3 + 4 * f**2 / 7])

figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
for power, factor, name in zip((monopole, quadrupole), kaiser, ("P0", "P2"), strict=True):
    (line,) = axes.semilogx(k, k * power, label=name)
    theory = factor * np.asarray(linear(k, 1.0))
    axes.semilogx(k, k * theory, "--", color=line.get_color(), label=f"{name}, Kaiser")
axes.set(xlabel="k [h/Mpc]", ylabel="k P(k) [(Mpc/h)²]")
axes.axhline(0, color="grey", lw=0.5)
axes.legend()
plt.show()

# %% [markdown]
# Random motions in clusters suppress both multipoles towards small scales, and turn the quadrupole negative there.
#
# ## Keep it
#
# A snapshot holds the state. Any number of ranks can read it back.

# %%
from tempfile import mkdtemp

folder = mkdtemp()
state.save(folder)
same = fpm.State.from_snapshot(folder)
np.array_equal(same.density().numpy(), density.numpy())

# %% [markdown]
# ## Next
#
# - [Several times, and files of other codes](many_times.py)
# - [Gradients](gradients.py) with respect to the cosmology and the initial conditions
# - [Lensing](lensing.py): the same universe as an observer sees it
# - [How to simulate](../howto/simulate.md): all choices of a simulation, and the command line
