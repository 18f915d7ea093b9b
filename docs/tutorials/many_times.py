# %% [markdown]
# # Several times, and files of other codes
#
# A run passes through all times between its first and its last step. In this tutorial you take states and spectra at
# several of them, and exchange particles with other codes: as Gadget-4 HDF5 files and as FastPM's bigfile.

# %%
from pathlib import Path
from tempfile import mkdtemp

import h5py
import matplotlib.pyplot as plt
import numpy as np

import flowpm_dist as fpm

planck = fpm.Cosmology.planck18()
sim = fpm.Simulation(planck, grid=64, box_size=128.0, steps=fpm.scale_factor_steps(0.1, 1.0, 10))

# %% [markdown]
# ## States at several times
#
# `outputs` takes scale factors between the first and the last edge of the steps. They need not be edges: between two
# kicks, the state follows from a part of the integrator's own drift and kick. No extra force is computed.

# %%
redshifts = [5.0, 2.0, 0.0]
states = sim.run(seed=42, outputs=[1 / (1 + z) for z in redshifts])

figure, panels = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained", sharey=True)
for axes, z, state in zip(panels, redshifts, states, strict=True):
    slab = state.density().numpy()[..., :8].mean(axis=-1)
    axes.imshow(np.log10(slab.T + 0.05), origin="lower", extent=(0, 128, 0, 128), vmin=-1, vmax=1)
    axes.set(title=f"z = {z:g}", xlabel="x [Mpc/h]")
panels[0].set_ylabel("y [Mpc/h]")
plt.show()

# %% [markdown]
# ## Spectra at many times, without keeping the states
#
# With `on_output`, a function measures each state as the run reaches it. Only its result is kept, so the memory does
# not grow with the number of outputs.

# %%
times = np.linspace(0.1, 1.0, 19)


def lowest_bins(state):
    """Returns the wavenumbers and the power of the first bins."""
    found = fpm.power_spectrum(state.density())
    return found.k[:4], found.power[:4]


measured = sim.run(seed=42, outputs=times, on_output=lowest_bins)
k = measured[0][0]
growth = np.array([power / measured[0][1] for _, power in measured])  # [time, bin]
linear = np.asarray(sim.theory.growth.d1(times) ** 2 / sim.theory.growth.d1(times[0]) ** 2)

figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
for index, wavenumber in enumerate(k):
    axes.plot(times, growth[:, index] / linear, label=f"k = {wavenumber:.2f} h/Mpc")
axes.axhline(1, color="grey", lw=0.8, ls="--")
axes.set(xlabel="scale factor a", ylabel="P(k, a) / P(k, 0.1), divided by D1²(a) / D1²(0.1)")
axes.legend()
plt.show()

# %% [markdown]
# A value of 1 is linear growth. At larger wavenumbers the growth becomes non-linear at late times.
#
# ## Write Gadget-4 and bigfile
#
# `save` takes the format. Each rank writes a file of its own; one rank writes one file. Any HDF5 reader opens the
# Gadget files. Coordinates are comoving in Mpc/h. As in Gadget, `Velocities` are peculiar velocities divided by
# $\sqrt a$.

# %%
folder = Path(mkdtemp())
early, middle, today = states
today.save(folder / "today", format="gadget-hdf5")
today.save(folder / "today", format="bigfile")

with h5py.File(folder / "today" / "snapshot.gadget" / "snapshot.hdf5") as file:
    for name, values in file["PartType1"].items():
        print(f"{name:12s} {values.dtype} {values.shape}")
    print("Time", file["Header"].attrs["Time"], " BoxSize", file["Header"].attrs["BoxSize"])

# %% [markdown]
# ## Read them back, and go on
#
# `State.from_snapshot` recognises the format. The ids of the particles number the sites of the lattice, so each
# particle finds its place again. Positions in the file are rounded, so the state agrees with the original up to
# rounding.

# %%
found = fpm.State.from_snapshot(folder / "today" / "snapshot.bigfile")
difference = np.abs(found.displacement.numpy() - today.displacement.numpy()).max()
print(f"largest difference of a displacement: {difference:.1e} Mpc/h")

future = sim.with_steps([1.0, 1.1, 1.2]).run(particles=found)
future

# %% [markdown]
# Files of another code lack $n_s$ and the amplitude of the spectrum. Give the cosmology for them:
# `fpm.State.from_snapshot("snapdir_005", cosmology=planck)`.
#
# ## Initial conditions for another code
#
# `sim.lpt` returns the universe of Lagrangian perturbation theory at any scale factor. Always give `a`: without it,
# the state is today's.

# %%
initial = sim.lpt(seed=42, a=0.02)
initial.save(folder / "initial", format="gadget-hdf5")
sorted(path.name for path in (folder / "initial" / "snapshot.gadget").iterdir())

# %% [markdown]
# ## Next
#
# - [Snapshots and files of other codes](../howto/snapshots.md): all formats, units and conversions
# - [Moving from other codes](../howto/moving_from_other_codes.md): names and units of FastPM, pmwd, JaxPM and FlowPM
# - [Light cones](../howto/light_cones.md): each particle at the time when its light leaves
