# %% [markdown]
# # Reconstruct the initial conditions of a universe
#
# You observe the density of a universe today, with noise. Which initial conditions did it grow
# from? The simulation is differentiable, so you can follow its gradient to the answer. This page
# makes a mock universe, searches for its initial conditions, and then draws other initial
# conditions that explain the same data.
#
# The box is tiny, so that the page runs in seconds. [Reconstruct](../howto/reconstruct.md) shows
# the command for larger boxes, and [the explanation](../explanations/reconstruction.md) says how
# the search works.
#
# ## A mock observation
#
# The mock has 16^3 cells of 8 Mpc/h at a = 1. Second-order Lagrangian perturbation theory (2LPT)
# makes it in a single step. Each cell is observed with Gaussian noise of 0.3 mean densities.

# %%
import matplotlib.pyplot as plt
import numpy as np

import flowpm_dist as fpm
from flowpm_dist import reconstruction as rec
from flowpm_dist.observables import ForwardModel

SIGMA = 0.3  # of the noise [mean density]

simulation = fpm.Simulation(fpm.Cosmology.planck18(), grid=16, box_size=128.0, steps=[0.1, 1.0])
box = simulation.box
truth = simulation.lpt(seed=1)
noise = np.random.default_rng(2).normal(0, SIGMA, box.grid)
data = truth.density().numpy() + noise

# %% [markdown]
# ## The posterior
#
# The unknowns are the 4,096 numbers of the white noise that the universe began with. Their prior is
# a unit normal. `ForwardModel` turns white noise into a density, and `Gaussian` compares that
# density with the data. With `"pm"` in place of `"2lpt"`, the model is the particle mesh with the
# steps of `simulation`.

# %%
model = ForwardModel(simulation, "2lpt")
posterior = rec.Posterior(model, rec.Gaussian(box, data, sigma=SIGMA))

# %% [markdown]
# ## The search
#
# `Search` minimises minus the logarithm of the posterior. It begins with smoothed data and greater
# noise, because the small scales have many local maxima. Each stage comes nearer to the real
# problem.

# %%
losses = []
search = rec.Search(posterior, rec.LBFGS(), rec.default_stages(posterior, evaluations=40))
found = search.run(lambda row, point: losses.append((row.evaluations, row.loss, row.inflation)))
state = model.run(found.field, {})
print(f"{losses[-1][0]} gradients, ended because: {search.outcome}")

# %% [markdown]
# The three panels show a slab of the density, one cell thick: the truth, the data, and the universe
# that grows from the initial conditions that were found.

# %%
fig, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
fields = {"truth": truth.density().numpy(), "data": data, "found": state.density().numpy()}
for axis, (name, field) in zip(axes, fields.items(), strict=True):
    slab = field[:, :, 0]
    image = axis.imshow(slab.T, origin="lower", extent=(0, 128, 0, 128), vmin=0, vmax=3)
    axis.set(title=name, xlabel="x [Mpc/h]")
axes[0].set_ylabel("y [Mpc/h]")
fig.colorbar(image, label="density [mean density]")
plt.show()

# %% [markdown]
# ## How good is it?
#
# `compare` returns the correlation coefficient r(k) and the transfer function T(k) of two fields.
# Compare the initial fields, and not only the final ones: the initial fields are what was unknown.
# Where the noise hides a mode, the most probable value is close to 0. T falls there, and r falls,
# too.

# %%
initial = fpm.compare(state.linear_delta, truth.linear_delta)
final = fpm.compare(state.density(), truth.density())
fig, axis = plt.subplots(figsize=(6, 4), layout="constrained")
axis.plot(initial.k, initial.correlation, "C0", label="initial field, r")
axis.plot(initial.k, initial.transfer, "C0--", label="initial field, T")
axis.plot(final.k, final.correlation, "C1", label="density today, r")
axis.plot(final.k, final.transfer, "C1--", label="density today, T")
axis.set(xlabel="k [h/Mpc]", ylim=(0, 1.1))
axis.legend()
plt.show()

# %% [markdown]
# ## A few draws
#
# The search gives the most probable initial conditions. A sampler gives a set of initial conditions
# that all explain the data, so that their scatter is the uncertainty. Its chain here begins at the
# point that was found. In the first moves the sampler learns its step.

# %%
sampler = rec.Microcanonical(leaps=8, seed=3)
sampler.start(rec.EvenPosterior(posterior), found)
for _ in range(6):
    sampler.draw(learn=True)
draws = [sampler.draw(learn=False) for _ in range(12)]
fields = np.array([draw.point.field.numpy() for draw in draws])
gradients, step = draws[0].evaluations, draws[0].step
print(f"{len(fields)} draws, {gradients} gradients each, with steps of {step:.2f}")

# %% [markdown]
# The histogram shows the error of the draws' mean in each cell of the white noise, divided by the
# standard deviation of the draws. For many independent draws it would be the unit normal
# distribution. Twelve independent draws would have a standard deviation of 1.15. These draws follow
# each other closely, so theirs is greater.
# [Draw initial conditions](../howto/draw_samples.md) has the settings of real chains.

# %%
deviation = (truth.white_noise.numpy() - fields.mean(axis=0)) / fields.std(axis=0, ddof=1)
x = np.linspace(-4, 4, 200)
fig, axis = plt.subplots(figsize=(6, 4), layout="constrained")
axis.hist(deviation.ravel(), bins=60, range=(-4, 4), density=True, label="draws")
axis.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), "k", label="unit normal")
axis.set(xlabel="(truth - mean) / standard deviation")
axis.legend()
plt.show()
print(f"standard deviation of the histogram: {deviation.std():.2f}")
