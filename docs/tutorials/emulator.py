# %% [markdown]
# # Correct a cheap run
#
# A run with few steps on a coarse mesh is cheap, and it lacks power on small scales. A correction
# was learned from runs that resolve those scales. It adds most of what is missing. This page
# compares a cheap run, two runs with the corrections that come with the package, and a run that
# costs much more. Then it learns a tiny correction of its own.
#
# [Use and learn corrections](../howto/corrections.md) is the guide, and [the
# measurements](../measurements/corrections.md) compare them with TreePM runs.
#
# ## Four runs from the same white noise
#
# The shipped corrections were learned for particles 1 to 4 Mpc/h apart, ten BullFrog steps from a =
# 0.1 to 1, and `deconvolve`, the default with `mesh_factor = 1`. So the cheap run here has 32^3 particles in 64 Mpc/h.

# %%
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import flowpm_dist as fpm

options = {"integrator": "bullfrog"}
box = {"grid": 32, "box_size": 64.0}
cosmology = fpm.Cosmology.planck18()
cheap = fpm.Simulation(cosmology, steps=fpm.scale_factor_steps(0.1, 1.0, 10), **box, **options)
converged = fpm.Simulation(
    cosmology, steps=fpm.scale_factor_steps(0.1, 1.0, 20), mesh_factor=3, **box, **options
)

# %% [markdown]
# `correction = "default"` is a filter of the force, and `"network"` is a network that moves the
# particles at the end. `"default-2"` and `"network-2"` are the same for `mesh_factor = 2`. A
# simulation with a correction is called as any other.

# %%
states = {
    "plain": cheap.run(seed=1),
    'correction = "default"': cheap.with_correction("default").run(seed=1),
    'correction = "network"': cheap.with_correction("network").run(seed=1),
}
truth = converged.run(seed=1)

# %% [markdown]
# ## Power and correlation
#
# Each density is painted on a mesh twice as fine as the particles' lattice and compared with the
# converged run. The left panel shows the ratio of powers. The right panel shows how much of the
# plain run's error in the phases, 1 - r, is left.
# In its first bin 1 - r is only a few times 1e-6 in all runs.
#
# The converged run resolves forces on a mesh three times as fine. A mesh still lacks some power on
# small scales. The corrections were learned from TreePM runs, which do not lack it. So at large k a
# corrected run can rightly lie above this converged run.

# %%
reference = truth.density(2)
found = {name: fpm.compare(state.density(2), reference) for name, state in states.items()}
k = found["plain"].k
shown = k < np.pi * box["grid"] / box["box_size"]  # below the Nyquist wavenumber of the particles

fig, (power, phases) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for name, one in found.items():
    error = (1 - one.correlation) / (1 - found["plain"].correlation)
    power.plot(k[shown], one.transfer[shown] ** 2, label=name)
    phases.plot(k[shown], error[shown], label=name)
power.axhline(1, color="k", lw=0.5)
power.set(xlabel="k [h/Mpc]", ylabel="P / P of the converged run")
phases.set(xlabel="k [h/Mpc]", ylabel="(1 - r) / (1 - r of the plain run)", ylim=(0, None))
power.legend()
plt.show()

# %% [markdown]
# ## Outside of the range
#
# A correction's file holds what it was trained on. A simulation warns if it lies outside. Here the
# cells are three times as large.

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fpm.Simulation(
        cosmology,
        grid=32,
        box_size=192.0,
        steps=fpm.scale_factor_steps(0.1, 1.0, 10),
        correction="default",
        **options,
    )
for warning in caught:
    print(warning.message)

# %% [markdown]
# ## Learn a tiny one
#
# `flowpm-dist emulate` learns a correction; `fpm.run` starts it from Python. The job makes
# converged runs, runs cheap universes of the same white noise, and changes the filter until their
# densities agree. Two universes of 16^3 particles and a few iterations show how it works. They do
# not make a good correction.

# %%
folder = Path(tempfile.mkdtemp()) / "tiny"
learned = fpm.run(
    {
        "box": {"grid": 16, "size": 32.0},
        "cosmology": {"Omega_m": 0.30966, "Omega_b": 0.04897, "h": 0.6766, "n_s": 0.96822},
        "priors": {"sigma8": [0.8, 0.9]},
        "evolution": {"integrator": "bullfrog", "steps": 5},
        "truth": {"universes": 2, "mesh_factor": 2, "steps": 10},
        "emulate": {"iterations": 12, "rate": 0.05, "validation": 1, "validate_every": 6},
    },
    folder,
    quiet=True,
)
print(learned.steps, learned.results)

# %% [markdown]
# `scores.csv` compares the universe that was held out with its converged run. This correction
# overshoots: it would need more universes and more iterations.

# %%
scores = np.genfromtxt(folder / "scores.csv", delimiter=",", names=True, dtype=None, encoding=None)
fig, axis = plt.subplots(figsize=(6, 4), layout="constrained")
axis.plot(scores["k_hMpc"], scores["P_plain"], label="plain")
axis.plot(scores["k_hMpc"], scores["P_corrected"], label="with the tiny correction")
axis.axhline(1, color="k", lw=0.5)
axis.set(xlabel="k [h/Mpc]", ylabel="P / P of the converged run")
axis.legend()
plt.show()

# %% [markdown]
# The file of the new correction goes where the names of the shipped ones went before:
# `cheap.with_correction(folder / "correction.json")`, or `correction = "tiny/correction.json"` in
# `[evolution]`.
