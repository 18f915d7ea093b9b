# %% [markdown]
# # Lensing with your own n(z)
#
# In this tutorial you look at a universe as its light reaches an observer today. You give the redshift distribution
# $n(z)$ of your galaxies, make maps of their convergence and shear, and compare the angular power spectrum with
# theory.

# %%
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.cosmology import Distances, Halofit, LinearPower
from flowpm_dist.observables.lensing import (
    SourcePlane,
    TabulatedDistribution,
    convergence_power,
    lensing_efficiency,
    shape_noise,
)
from flowpm_dist.observables.light_cone import FlatField, LightCone
from flowpm_dist.statistics import angular_power, binned_angular_power, theory_in_bins

# %% [markdown]
# ## Your galaxies
#
# A text file has the columns $z$, $n$. It may have more columns of $n$, one for each population. The unit of $n$ does
# not matter, because distributions are normalised. This cell writes such a file; use your own instead.

# %%
z = np.linspace(0.0, 0.8, 41)
near, far = z**2 * np.exp(-((z / 0.25) ** 2)), np.exp(-0.5 * ((z - 0.6) / 0.06) ** 2)
path = Path(mkdtemp()) / "nz.txt"
np.savetxt(path, np.transpose([z, near, far]), header="z  n_near  n_far")

sources = [
    TabulatedDistribution.from_file(path, column=1),
    TabulatedDistribution.from_file(path, column=2),
    SourcePlane(0.8),  # all at one redshift
]
names = ["near", "far", "z = 0.8"]

# %% [markdown]
# The lensing efficiency $q(\chi)$ shows at which distance matter acts as a lens for each population.

# %%
cosmology = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.97, sigma8=0.81)
chi = np.linspace(1.0, 1950.0, 100)
efficiency = lensing_efficiency(sources, chi, Distances(cosmology)).numpy()

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
for each, label in ((near, "near"), (far, "far")):
    left.plot(z, each / np.trapezoid(each, z), label=label)
left.set(xlabel="z", ylabel="n(z)")
left.legend()
for each, label in zip(efficiency, names, strict=True):
    right.plot(chi, each, label=label)
right.set(xlabel="distance [Mpc/h]", ylabel="lensing efficiency q")
right.legend()
plt.show()

# %% [markdown]
# ## Maps
#
# The light cone paints each particle where it is when its light leaves, while the simulation runs. The box is
# repeated along the line of sight up to `z_max`, each copy shifted and flipped. The field must not be wider than the
# box at `z_max`; the error message names the widest field that fits.

# %%
sim = fpm.Simulation(
    cosmology, grid=64, box_size=200.0, steps=fpm.scale_factor_steps(0.1, 1.0, 8), mesh_factor=1.5
)
cone = LightCone(FlatField(field_of_view=5.0, pixels=40, z_max=0.8))
maps = cone.convergence(sim, sources, seed=1)
gamma1, gamma2 = maps.shear()

figure, panels = plt.subplots(1, 3, figsize=(11.5, 4.2), layout="constrained", sharey=True)
for axes, kappa, name in zip(panels, maps.kappa, names, strict=True):
    low, high = np.quantile(kappa, [0.002, 0.998])
    shown = axes.imshow(kappa.numpy().T, origin="lower", extent=(0, 5, 0, 5), vmin=low, vmax=high)
    axes.set(title=name, xlabel="degrees")
    figure.colorbar(shown, ax=axes, shrink=0.8)
panels[0].set_ylabel("degrees")
plt.show()

# %% [markdown]
# Bright spots that all maps share are matter close to the observer, where a few particles cover a pixel.
#
# Galaxies are not round. `shape_noise` draws their noise for each component of the shear.

# %%
noise = shape_noise((40, 40), maps.sky.fov, sigma_e=0.26, n_eff=[3.0, 3.0, 3.0], seed=7)
observed1 = gamma1 + noise[:, 0]
print("rms of the shear:", np.std(gamma1, axis=(1, 2)), " of its noise:", np.std(noise[:, 0]))

# %% [markdown]
# ## C_l and theory
#
# `angular_power` measures the maps. `convergence_power` is Limber's approximation with halofit. `theory_in_bins`
# averages it over the modes of each bin.
#
# CCL, the library of the LSST Dark Energy Science Collaboration, computes the same theory from its own code. These are
# its numbers for the two populations, made by `benchmarks/lensing_ccl.py` with pyccl 3.3.6.

# %%
edges = [80.0, 200.0, 400.0, 700.0, 1000.0, 1400.0]
measured = angular_power(maps.kappa, maps.sky.fov, edges, window="bilinear")
halofit = Halofit(LinearPower(cosmology))


def theory(ell):
    """Returns C_l of each population with itself [source, l]."""
    pairs = convergence_power(ell, sources, cosmology, halofit).numpy()
    return np.array([pairs[i, i] for i in range(len(sources))])


expected = theory_in_bins(theory, 40, maps.sky.fov, edges)
ccl = np.array(  # l, near, far
    [
        [80, 6.8241e-10, 3.8989e-09],
        [150, 3.1978e-10, 1.6949e-09],
        [300, 1.4660e-10, 7.1589e-10],
        [600, 6.2884e-11, 3.2514e-10],
        [1000, 3.0011e-11, 1.7560e-10],
        [1400, 1.7251e-11, 1.1149e-10],
    ]
)
print("C_l here divided by CCL's:\n", theory(ccl[:, 0])[:2] / ccl[:, 1:].T)

figure, axes = plt.subplots(figsize=(6.5, 4.4), layout="constrained")
ell = measured.ell
for power, curve, name in zip(measured.power, expected, names, strict=True):
    errors = power * np.sqrt(2 / measured.modes)
    points = axes.errorbar(ell, power, errors, fmt="o", label=name)
    axes.loglog(ell, curve, color=points[0].get_color())
axes.loglog(ccl[:, 0], ccl[:, 1:], "k+", label=["CCL", None])
axes.set(xlabel="l", ylabel="C_l of the convergence", xscale="log", yscale="log")
axes.legend()
plt.show()

# %% [markdown]
# Points are the maps, curves are theory, crosses are CCL. The theory here is within 7e-4 of CCL. On small scales the maps
# lack power: a cell of this force mesh is 2.1 Mpc/h wide, and nearby lenses resolve less.
# [Measurements](../measurements/lensing.md) lists which cell and how many steps reach which l.
#
# ## A gradient through the light cone
#
# Everything in these maps has gradients: the initial conditions, the cosmology, and the parameters of the sources. An
# error of photometric redshifts shifts $n(z)$. Here is how much that changes the spectrum of the far population, by
# the simulation and by theory.

# %%
shift = tf.Variable(0.0, dtype=tf.float64)
with tf.GradientTape() as tape:
    shifted = [TabulatedDistribution(z, far, shift=shift)]
    kappa = cone.convergence(sim, shifted, seed=1).kappa
    power = binned_angular_power(kappa, maps.sky.fov, edges, window="bilinear")
    mean_log = tf.reduce_mean(tf.math.log(power[0, :3]))
slope = float(tape.gradient(mean_log, shift))


def theory_at(value):
    """Returns the same mean by theory, for a shift of n(z)."""
    moved = [TabulatedDistribution(z, far, shift=value)]
    return np.log(convergence_power(ell[:3], moved, cosmology, halofit)[0, 0]).mean()


by_theory = (theory_at(0.005) - theory_at(-0.005)) / 0.01
print(f"ln C_l changes by {slope:.2f} times the shift; theory has {by_theory:.2f}")

# %% [markdown]
# ## Next
#
# - [Light cones](../howto/light_cones.md) and [lensing](../howto/lensing.md): run files, ray tracing, the full sky,
#   peaks
# - [How light cones are painted](../explanations/light_cones.md)
