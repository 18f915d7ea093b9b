# %% [markdown]
# # Train a network on your own arrays
#
# You have volumes in a `.npy` or HDF5 file, and a text file with the parameters of each volume.
# CAMELS and Quijote publish their data in this way. A network learns the parameters from these
# files without conversion, and posteriors are fitted to its outputs. The data of this page are a
# toy, and tiny, so that the page runs in seconds.
#
# ## Volumes and a table
#
# The toy fields are lognormal. Their power spectrum is a power law in a box of 16³ cells, and two
# parameters vary: the `spread` of the logarithm of the density, and the `tilt` of the power law.

# %%
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.chdir(tempfile.mkdtemp())

GRID, VOLUMES = 16, 144
rng = np.random.default_rng(1)
modes = np.fft.fftfreq(GRID, 1 / GRID)
wavenumber = np.sqrt(sum(k**2 for k in np.meshgrid(modes, modes, modes, indexing="ij")))
wavenumber[0, 0, 0] = np.inf


def lognormal(spread, tilt):
    """Returns a density of mean 1, [x, y, z]."""
    white = np.fft.fftn(rng.normal(size=[GRID, GRID, GRID]))
    field = np.fft.ifftn(white * wavenumber ** (tilt / 2)).real
    density = np.exp(spread * field / field.std())
    return (density / density.mean()).astype(np.float32)


parameters = np.column_stack([rng.uniform(0.5, 1.5, VOLUMES), rng.uniform(-2, 0, VOLUMES)])
np.save("volumes.npy", [lognormal(*row) for row in parameters])
np.savetxt("parameters.txt", parameters, header="spread tilt")

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 3))
for axis, number in zip(axes, range(3), strict=True):
    axis.imshow(np.log(np.load("volumes.npy", mmap_mode="r")[number, :, :, 0]))
    axis.set_title("spread {:.2f}, tilt {:.2f}".format(*parameters[number]))
    axis.axis("off")
plt.show()

# %% [markdown]
# ## The run file
#
# `[data]` names the files. The first line of the table names its columns. `unit` says what the
# numbers are: `"density"` has mean 1, `"overdensity"` mean 0, and `"mass"` is divided by its mean.
# The rows for validation and test are drawn at random and never trained on.

# %%
Path("run.toml").write_text("""
[box]
grid = 16
size = 16.0               # [Mpc/h]

[network]
name = "tiny"

[training]
batch = 8
steps = 80
learning_rate = 2e-3
warmup = 10
validate_every = 40

[data]
source = "arrays"
volumes = "volumes.npy"
dtype = "float32"
unit = "density"
table = "parameters.txt"
validation = 32
test = 48
augment = true            # these boxes are whole and periodic
""")

# %% [markdown]
# The networks of the package need volumes of at least 24³ cells; a smaller one is declared here.
# See [your own network](../howto/own_network.md).

# %%
from flowpm_dist.cli.program import app
from flowpm_dist.cosmoflow import DECLARATIONS, Convolution, Declaration, Dense, Pool

DECLARATIONS["tiny"] = Declaration(
    name="tiny",
    layers=(Convolution(8, 3), Pool(), Convolution(16, 3), Pool(), Dense(32)),
    edges="periodic",
    slope=0.01,
)


def run(command):
    """Runs a command of flowpm-dist in this process; raises SystemExit if it fails."""
    app(command.split(), standalone_mode=False)


# %% [markdown]
# ## Train
#
# In a shell, the declaration goes into a file `tiny.py` that ends like [the guide's
# example](../howto/own_network.md#declare-a-network). The command is then
# `python tiny.py train run.toml`.

# %%
run("train run.toml --quiet")

# %% [markdown]
# ## Posteriors, and whether they are right
#
# `--posteriors` fits a posterior to the outputs of the network, and another to the power spectrum
# of the same volumes. The table judges both on the 48 test volumes. ln(q / prior) is the
# information gained over the prior: 0 for a posterior that is the prior. The P values test the
# ranks of the truth among samples, and TARP; a value far below 0.01 says that the posteriors are
# wrong.

# %%
run("evaluate run-training --quiet --posteriors --head gaussian --baseline power")

# %%
Image("run-training/evaluation/ranks.png")

# %% [markdown]
# The sentences below the table name posteriors that are too wide or too narrow, and by about how much. Expect such
# sentences here: the network and the posteriors were fitted to 64 volumes. In the picture a right posterior has flat
# ranks, within the grey band. [Fit and check posteriors](../howto/posteriors.md) explains all checks.

# %% [markdown]
# ## The posterior of a new volume
#
# After `evaluate --posteriors`, `predict` answers with samples of the posterior. They are in
# `samples.npz`, and `corner.png` shows them. Its contours hold 68.3 and 95.4 % of the samples.

# %%
np.save("mine.npy", lognormal(spread=1.0, tilt=-1.0))
run("predict run-training mine.npy --quiet --output mine")
Image("mine/corner.png")

# %% [markdown]
# The network has seen lognormal fields alone, and so its posteriors are right for lognormal fields
# alone. `predict` warns about volumes that do not resemble the training set. The spread of this
# volume is far outside the range of the table:

# %%
np.save("strange.npy", lognormal(spread=3.0, tilt=-1.0))
run("predict run-training strange.npy --quiet")

# %% [markdown]
# ## With your own data
#
# - HDF5 files, one file for each volume, several channels and the units of CAMELS and Quijote are
#   in [train on your data](../howto/train_on_your_data.md).
# - Leave out `[network] name` and the declaration for volumes of 24³ cells or more. The command is
#   then `flowpm-dist train run.toml`.
# - Leave out `--head` and `--baseline`, and three heads are compared for three sets of statistics
#   ([posteriors](../howto/posteriors.md)).
# - `--ranks 2` divides the work over two ranks.
