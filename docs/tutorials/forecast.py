# %% [markdown]
# # Forecast a survey
#
# How well can a survey measure $\Omega_m$, $\sigma_8$ and the mass of neutrinos? In this tutorial you compute a Fisher
# forecast from multipoles in redshift space and from a histogram of the density. The derivatives come from simulations
# in two ways: by differentiation, and by differences for what has no gradient.
#
# The box is tiny, so that this page takes seconds. The numbers belong to this box, and to no survey.

# %%
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.statistics import binned_multipoles, density_histogram

fiducial = {"Omega_m": 0.31, "sigma8": 0.8, "m_nu": 0.2}  # m_nu in eV
universe = fpm.Cosmology(**fiducial, Omega_b=0.049, h=0.68, n_s=0.97, radiation=True)
sim = fpm.Simulation(universe, grid=24, box_size=300.0, steps=fpm.scale_factor_steps(0.1, 1.0, 4))
bins = fpm.Bins(3, k_min=0.02, k_max=0.2)
edges = np.linspace(-1.2, 1.2, 5)  # of ln(density)

# %% [markdown]
# ## What is measured
#
# The summary of a universe has nine numbers: monopole and quadrupole in three bins, and the shares of cells in three of
# four bins of the density. The fourth would add nothing, because nearly all cells are in one of the four. Both take a
# batch of universes.


# %%
def multipoles(state):
    """Returns monopole and quadrupole in redshift space, [universe, 6]."""
    power = binned_multipoles(state.density(redshift_space="z"), orders=(0, 2), bins=bins)
    return tf.reshape(power, [-1, 6])


def shares(state):
    """Returns the shares of cells in three bins of the density, [universe, 3]."""
    histogram = density_histogram(state.density(), edges, log=True)
    return histogram.counts[:, :-1] / histogram.cells


def summary(state):
    """Returns all nine numbers, [universe, 9]."""
    return np.concatenate([multipoles(state), shares(state)], axis=1)


# %% [markdown]
# ## The covariance
#
# The scatter of 128 universes of the fiducial cosmology. A batch of 32 runs at once.

# %%
draws = np.concatenate(
    [summary(sim.run(seed=list(range(first, first + 32)))) for first in range(0, 128, 32)]
)
covariance = np.cov(draws.T)
scatter = np.sqrt(np.diag(covariance)) / draws.mean(axis=0)
print("scatter of multipoles:", scatter[:6].round(3), "of shares:", scatter[6:].round(3))

# %% [markdown]
# ## Derivatives through the simulation
#
# `fpm.jacobian` simulates 16 universes once, and makes one backward pass for each number: here the three of the monopole.
# `Omega_m` and `sigma8` count all matter, neutrinos included.

# %%
seeds = list(range(16))


def mean_monopole(parameters):
    """Returns the mean monopole of 16 universes."""
    cosmology = universe.replace(**parameters)
    return tf.reduce_mean(multipoles(sim.run(seed=seeds, cosmology=cosmology)), axis=0)[:3]


exact = fpm.jacobian(mean_monopole, fiducial, sim.box.mesh)
for name, derivative in exact.derivatives.items():
    print(f"d ln P0 / d {name}:", (derivative / exact.values).round(3))

# %% [markdown]
# With $\sigma_8$ fixed, heavier neutrinos raise the power of the particles, which are cold dark matter and baryons. They
# do so nearly as a higher $\sigma_8$ does, in all three bins: the two will be hard to tell apart.
#
# ## Derivatives of what has no gradient
#
# Counts of cells have none. (`soft_histogram` has one.) Two universes of one seed on both sides of the fiducial share
# their sample variance, so their difference is precise. Here is the mean of the differences of 64 seeds, with the same
# differences of the monopole as a check.

# %%
steps = {"Omega_m": 0.01, "sigma8": 0.02, "m_nu": 0.05}


def differences(first, last):
    """Returns each universe's derivatives with respect to the parameters, [universe, 9, 3]."""
    columns = []
    for name, step in steps.items():
        above, below = (
            summary(
                sim.run(
                    seed=list(range(first, last)),
                    cosmology=universe.replace(**{name: fiducial[name] + side}),
                )
            )
            for side in (step, -step)
        )
        columns.append((above - below) / (2 * step))
    return np.stack(columns, axis=-1)


paired = np.concatenate([differences(first, first + 32) for first in (0, 32)])
gradients = np.stack(list(exact.derivatives.values()), axis=-1)
deviation = paired[:16, :3].mean(axis=0) / gradients - 1
print(f"differences and gradients of the same 16 universes agree to {np.abs(deviation).max():.1e}")

# %% [markdown]
# ## The forecast
#
# The Fisher matrix is $F = J^T C^{-1} J$. The inverse of a covariance that is estimated from $n$ draws of $p$ numbers is
# too large by $(n - 1) / (n - p - 2)$ on average (Hartlap and others 2007, astro-ph/0608064), which is divided out.


# %%
def errors_and_fisher(derivatives, numbers):
    """Returns the errors, and the Fisher matrix, from some of the nine numbers."""
    chosen = covariance[np.ix_(numbers, numbers)]
    unbiased = np.linalg.inv(chosen) * (len(draws) - len(numbers) - 2) / (len(draws) - 1)
    fisher = derivatives[numbers].T @ unbiased @ derivatives[numbers]
    return np.sqrt(np.diag(np.linalg.inv(fisher))), fisher


jacobian = paired.mean(axis=0)
choices = {
    "monopole": range(3),
    "monopole and quadrupole": range(6),
    "multipoles and histogram": range(9),
}
fishers = {}
for label, numbers in choices.items():
    errors, fishers[label] = errors_and_fisher(jacobian, list(numbers))
    alone = 1 / np.sqrt(np.diag(fishers[label]))
    print(f"{label}: errors", errors.round(3), "with the other two known", alone.round(3))

# %% [markdown]
# Three numbers hardly tell three parameters apart: with the monopole alone, all errors are large. The quadrupole brings
# the growth rate, and the histogram what is not Gaussian.

# %%
names = {"Omega_m": r"$\Omega_m$", "sigma8": r"$\sigma_8$", "m_nu": r"$\sum m_\nu$ [eV]"}
circle = np.stack([np.cos(angle := np.linspace(0, 2 * np.pi, 200)), np.sin(angle)])

figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
for axes, (i, j) in zip(panels, [(0, 1), (2, 1), (2, 0)], strict=True):
    for label in list(choices)[1:]:
        both = np.linalg.inv(fishers[label])[np.ix_([i, j], [i, j])]
        ellipse = 1.52 * np.linalg.cholesky(both) @ circle  # 68.3 % of two parameters
        centre = [list(fiducial.values())[n] for n in (i, j)]
        axes.plot(centre[0] + ellipse[0], centre[1] + ellipse[1], label=label)
    axes.set(xlabel=list(names.values())[i], ylabel=list(names.values())[j])
for axes in panels[1:]:
    axes.axvspan(axes.get_xlim()[0], 0, color="grey", alpha=0.2)  # no such masses
panels[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# ## How far to trust it
#
# Noise in the derivatives looks like information, so a forecast from too few universes is too good. Forecasts from
# two halves of the seeds show how far they are from converged:

# %%
for half in (paired[:32], paired[32:]):
    errors, _ = errors_and_fisher(half.mean(axis=0), list(range(9)))
    print("errors from half of the seeds:", errors.round(3))
print(f"the covariance: its errors are known to {np.sqrt(1 / (2 * len(draws))):.0%} at best")

# %% [markdown]
# - **The box** has a volume of 0.027 (Gpc/h)$^3$. Errors shrink with the root of the volume, by 6 for 1 (Gpc/h)$^3$,
#   if everything else stays the same.
# - **The shaded masses do not exist.** A Fisher matrix knows no limits of parameters. Where the error is larger than the
#   fiducial mass, it only says that such data cannot measure the mass.
# - **The covariance** comes from 128 universes, for nine numbers.
# - **No galaxies:** the particles are all seen, without bias or shot noise, with cells of 12.5 Mpc/h.
# - **Four steps** are enough for these large scales. Check with more.
#
# ## Next
#
# - [Measure a field](../howto/statistics.md#jacobians-and-fisher-matrices): Jacobians and Fisher matrices
# - [Radiation and neutrinos](../explanations/universe.md): what the code does, and how accurate it is
# - [Posteriors](../howto/posteriors.md): without the assumption of Gaussian errors
