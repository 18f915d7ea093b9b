# %% [markdown]
# # Train a network on simulations
#
# A network learns $\Omega_m$ and $\sigma_8$ from density volumes that are simulated for it. You
# write one run file, and three commands train, judge and use the network. Everything here is tiny,
# so that the page runs in seconds: 16³ cells, 64 universes. The last section says what to change
# for a useful size.
#
# ## The run file

# %%
import os
import tempfile
from pathlib import Path

from IPython.display import Image

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.chdir(tempfile.mkdtemp())

Path("run.toml").write_text("""
[box]
grid = 16
size = 64.0               # [Mpc/h]

[cosmology]               # fixed in all universes
Omega_b = 0.049
h = 0.67
n_s = 0.96

[priors]                  # what the network predicts
Omega_m = [0.1, 0.5]
sigma8 = [0.6, 1.0]

[initial]
lpt_order = 1

[evolution]
steps = 3

[network]
name = "tiny"

[training]
batch = 8
learning_rate = 2e-3
warmup = 10
validate_every = 32

[data]
simulations = 64          # universes to train on
reuse = 8                 # how often each is used
validation = 16
test = 48
""")

# %% [markdown]
# `[priors]` holds the parameters to predict with their ranges, and `[cosmology]` fixes the others.
# The section `[data]` says how many universes there are. Universes for validation and test are
# never trained on.
#
# The networks of the package need volumes of at least 24³ cells. A smaller one is declared in a
# few lines; see [your own network](../howto/own_network.md).

# %%
from flowpm_dist.cosmoflow import DECLARATIONS, Convolution, Declaration, Dense, Pool

DECLARATIONS["tiny"] = Declaration(
    name="tiny",
    layers=(Convolution(8, 3), Pool(), Convolution(16, 3), Pool(), Dense(32)),
    edges="periodic",
    slope=0.01,
)

# %% [markdown]
# ## Train
#
# In a shell, the declaration goes into a file `tiny.py` that ends like [the guide's
# example](../howto/own_network.md#declare-a-network). `python tiny.py train run.toml --ranks 2` is
# then `flowpm-dist train` with one network more. This page calls the same program from Python.

# %%
from flowpm_dist.cli.program import app


def run(command):
    """Runs a command of flowpm-dist in this process; raises SystemExit if it fails."""
    app(command.split(), standalone_mode=False)


run("train run.toml --quiet")

# %% [markdown]
# The training is in the folder `run-training`. `metrics.csv` has a row for each step, and
# `training.png` shows the losses and the learning rate:

# %%
Image("run-training/training.png")

# %% [markdown]
# ## Evaluate
#
# `flowpm-dist evaluate` asks the network about the 48 test universes. Regressions on the power
# spectra of the same volumes get the same question. A network is worth its cost only where it
# beats them.

# %%
run("evaluate run-training --quiet")

# %% [markdown]
# An `RMSE / mean's` of 1 means that a method knows no more than the prior. The sentences below the
# table name the parameters that the network has not learned. [Judge a
# network](../howto/evaluate.md) explains every column.

# %%
Image("run-training/evaluation/predicted.png")

# %% [markdown]
# ## Predict
#
# `flowpm-dist predict` takes a volume from a file. This one is simulated with $\Omega_m = 0.3$ and
# $\sigma_8 = 0.8$, and with the run file's time steps:

# %%
import numpy as np

import flowpm_dist as fpm

cosmology = fpm.Cosmology(Omega_m=0.3, Omega_b=0.049, h=0.67, n_s=0.96, sigma8=0.8)
steps = fpm.scale_factor_steps(0.1, 1.0, 3)
sim = fpm.Simulation(cosmology, grid=16, box_size=64.0, steps=steps, lpt_order=1)
np.save("volume.npy", np.asarray(sim.run(seed=1).density()))

run("predict run-training volume.npy --quiet")

# %% [markdown]
# A network that was trained for seconds is unsure, and its error bars say so. `predict` warns
# where a value is close to the edge of a prior.
#
# ## At a useful size
#
# [`examples/demo_training.toml`](../../examples/demo_training.toml) trains on 400 universes of 32³ cells in a few
# minutes on two cores: `flowpm-dist train examples/demo_training.toml --ranks 2`. Its network is the default,
# `sc18-periodic`. For your own runs change these keys first:
#
# - `box.grid` and `box.size`, the resolution and the box of your data;
# - `data.simulations`: with 2,048 universes instead of 256, the network is
#   [better](../measurements/trainings.md#fewer-simulations);
# - `[observation]`, if a survey [observes the
#   universes](../howto/training_data.md#what-the-survey-observes).
#
# [Train a network](../howto/train.md) has all keys, and [posteriors](../howto/posteriors.md) shows
# how to get correlations between parameters. With your own volumes continue with [own
# arrays](own_arrays.py).
