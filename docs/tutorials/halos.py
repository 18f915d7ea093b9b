# %% [markdown]
# # Halos and galaxies
#
# In this tutorial you find the halos of dark matter in a universe, compare their abundance and their clustering with
# theory, put galaxies into them, and see the galaxies as a survey does. Every cell takes seconds on a laptop.

# %%
import matplotlib.pyplot as plt
import numpy as np

import flowpm_dist as fpm
from flowpm_dist.catalogues.abundance import mass_function, predicted
from flowpm_dist.catalogues.clustering import tracer_power
from flowpm_dist.catalogues.occupation import populate
from flowpm_dist.catalogues.options import HOD

planck = fpm.Cosmology.planck18()
sim = fpm.Simulation(
    planck,
    grid=64,
    box_size=128.0,
    steps=fpm.scale_factor_steps(0.1, 1.0, 10),
    integrator="bullfrog",
    mesh_factor=2,
)
state = sim.run(seed=42)

# %% [markdown]
# ## Find halos
#
# `fpm.halos` joins all particles that are closer than a linking length, by default 0.2 of their mean distance. A group of
# at least `minimum` particles is a halo. Forces of a particle mesh are soft, so small halos are too fluffy:
# `relaxed` links them with longer lengths. [The guide](../howto/halos.md) has a table of what that gains.

# %%
halos = fpm.halos(state, minimum=20, relaxed=[[100, 0.23], [400, 0.215]])
print(halos)
for row in range(3):  # they are in the order of falling mass
    place, speed = halos.position[row].round(1), halos.velocity[row].round()
    print(f"{halos.mass[row]:.2e} Msun/h, {halos.number[row]} particles, at {place}, {speed} km/s")

# %% [markdown]
# A catalogue is a table with units, too: `halos.to_table()` of astropy, `halos.to_pandas()`. `halos.write("halos.hdf5")`
# writes it for halotools and others.
#
# ## Look at them
#
# Each circle is a halo of a slab 16 Mpc/h thick, drawn over the density. Its area grows with the mass.

# %%
density = state.density()
slab = density.numpy()[..., :8].mean(axis=-1).T
shown = halos.of(halos.position[:, 2] < 16.0)

figure, axes = plt.subplots(figsize=(6, 5.4), layout="constrained")
axes.imshow(np.log10(slab + 0.05), origin="lower", extent=(0, 128, 0, 128), cmap="magma")
axes.scatter(
    *shown.position[:, :2].T, s=shown.mass / 5e11, facecolors="none", edgecolors="cyan", lw=0.8
)
axes.set(xlabel="x [Mpc/h]", ylabel="y [Mpc/h]", xlim=(0, 128), ylim=(0, 128))
plt.show()

# %% [markdown]
# ## How many there are
#
# The mass function has Poisson errors. Fits to large simulations, here Watson and others (2013), predict it from the
# linear power spectrum.

# %%
abundance = mass_function(halos)
axes = abundance.plot(label="simulation")
axes.plot(
    abundance.mass, predicted(sim.theory, abundance.mass), "--", color="grey", label="Watson 2013"
)
axes.legend()
plt.show()

# %% [markdown]
# The rarest halos scatter. [The guide](../howto/halos.md) compares halos of each size with a tree code's, whose forces are
# sharp.
#
# ## How they cluster
#
# Halos form where the density is high, so they are biased: their power is $b^2$ times the power of matter. The bias is
# measured from the cross power with matter, which has no shot noise. Heavier halos have a larger bias.

# %%
axes = None
for label, chosen in {
    "20 to 60 particles": halos.of(halos.number < 60),
    "above 60": halos.of(halos.number >= 60),
}.items():
    axes = tracer_power(chosen, density).plot(axes, label=label)
axes.set(xlim=(None, 0.5), ylim=(0, 3))
axes.legend()
plt.show()

# %% [markdown]
# ## Galaxies
#
# A halo occupation distribution says how many galaxies halos have, by their mass. Central galaxies sit where their halo
# is; satellites follow a profile and move about in it. The seed draws the same galaxies on any number of ranks.

# %%
galaxies = populate(halos, HOD(log_M_min=13.2, log_M_0=13.0, log_M_1=14.0, alpha=1.0, seed=1))
print(galaxies, f"{np.mean(~galaxies.central):.0%} of them satellites")

# %% [markdown]
# ## As a survey sees them
#
# A redshift contains the velocity along the line of sight, here z. In clusters, random velocities stretch galaxies into
# "fingers of God".

# %%
axes_of = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained", sharey=True)[1]
apparent = galaxies.apparent_positions("z")
within = galaxies.position[:, 1] < 40.0
for axes, places, title in zip(
    axes_of, (galaxies.position, apparent), ("where they are", "in redshift space"), strict=True
):
    axes.plot(*places[within][:, [0, 2]].T, ".", ms=3)
    axes.set(title=title, xlabel="x [Mpc/h]", aspect="equal")
axes_of[0].set_ylabel("z, the line of sight [Mpc/h]")
plt.show()

# %% [markdown]
# Multipoles measure both effects: infall raises the monopole of large scales, fingers of God lower the quadrupole.

# %%
noise = galaxies.shot_noise()
real, observed = galaxies.density(64), galaxies.density(64, redshift_space="z")
poles = fpm.multipoles(observed, axis="z", shot_noise=noise)
spectrum = fpm.power_spectrum(real, shot_noise=noise)

figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
axes.plot(spectrum.k, spectrum.k * spectrum.power, "--", color="grey", label="real space")
for power, name in zip(poles.power[:2], ("P0", "P2"), strict=True):
    axes.plot(poles.k, poles.k * power, label=name)
axes.set(xscale="log", xlabel="k [h/Mpc]", ylabel="k P(k) [(Mpc/h)²]", xlim=(None, 0.8))
axes.legend()
plt.show()

# %% [markdown]
# ## Next
#
# - [Find halos](../howto/halos.md): in run files, on several ranks, on the light cone; which settings to choose
# - [Train on galaxies](../howto/training_data.md#galaxies-in-halos): a network learns from counts like these
