"""Exported networks: loaded by a process that has nothing of this package, they answer the same."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from run_files import PRIORS

from flowpm_dist.cosmoflow import DECLARATIONS, Convolution, Declaration, Dense, Pool, Shrink
from flowpm_dist.cosmoflow.network.network import of_all_replicas
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training import export
from flowpm_dist.cosmoflow.training.saved import SavedTraining
from flowpm_dist.cosmoflow.training.trainer import Regressor, regressor_of, standardiser_of
from flowpm_dist.jobs.folder import OutputError
from meshimpl import ProcessMesh

LAYERS = (Convolution(4, 4), Pool(), Convolution(5, 3, stride=2), Pool("max"))
SIMPLE = (Convolution(4, 3), Pool(), Convolution(5, 3), Pool("max"))
LAST = {"periodic": (Shrink(1), Dense(6)), "zero": (Dense(6),), "valid": (Dense(6), Dense(4))}
for edges in LAST:
    DECLARATIONS[f"export-{edges}"] = Declaration(
        f"export-{edges}",
        (SIMPLE if edges == "zero" else LAYERS) + LAST[edges],
        edges,
        0.1,
        bounded=edges == "zero",
    )
RUN = (
    PRIORS
    + """[box]
grid = 16
size = 64.0
[evolution]
steps = 2
[network]
name = "{name}"
loss = "{loss}"
precision = "{precision}"
"""
)
KINDS = {
    "float64": ("export-periodic", "likelihood", "float64", 1e-12),
    "float32": ("export-valid", "l1", "float32", 1e-5),
    "bounded": ("export-zero", "likelihood", "float32", 1e-5),
    "keras": ("keras_models:with_all", "likelihood", "float64", 1e-12),
}
"""Network, loss, precision, and how equal the numbers are, in standard deviations of the prior."""

ASK = """
import sys, numpy as np, tensorflow as tf
volumes = np.load(sys.argv[1])
for path in sys.argv[2:]:
    network = tf.saved_model.load(path)
    dtype = network.signatures["serving_default"].structured_input_signature[1]["volumes"].dtype
    given = tf.constant(volumes, dtype)
    with tf.GradientTape() as tape:
        tape.watch(given)
        found = network.ask(given)
        total = tf.reduce_sum(found["mean"])
    np.savez(path + ".npz", gradient=tape.gradient(total, given), **found)
assert not {"flowpm_dist", "meshimpl"} & set(sys.modules)
"""


def trained_like(folder: Path, kind: str) -> tuple[SavedTraining, Regressor]:
    """A training that was not made, and a network of it with random weights."""
    name, loss, precision, _ = KINDS[kind]
    folder.mkdir()
    (folder / "run.toml").write_text(RUN.format(name=name, loss=loss, precision=precision))
    plan = TrainingPlan.load(folder / "run.toml")
    trained = regressor_of(plan, ProcessMesh("replica:1"), batch=2)
    network = trained.network
    rng = np.random.default_rng(3)
    for variable in network.state:
        variable.assign(variable + tf.cast(rng.normal(0, 0.1, variable.shape), variable.dtype))
    if kind == "keras":  # the variance that batches are divided by
        network.state[-1].assign(abs(network.state[-1]))
    return SavedTraining(TrainingFolder(folder), plan, True), replace(trained, step=7)


def test_it_says_what_was_observed(tmp_path, monkeypatch):
    np.save(tmp_path / "mask.npy", np.full((16, 16, 16), 0.5))
    learned = '[priors]\namplitude = [0.5, 2.0]\ntargets = ["sigma8", "amplitude"]'
    text = RUN.format(name="export-valid", loss="l1", precision="float32")
    counted = 'kind = "counts"\nmean_count = 2.0\nmask = "mask.npy"\n'
    network = SimpleNamespace(channels=1, saved=None)
    monkeypatch.setattr(export, "_save", lambda *_: None)
    for kind, over_mean, unobserved in (
        ("", False, None),
        (counted, False, 0.0),
        (None, True, None),
    ):
        more = "" if kind is None else f"[observation]\n{kind}"
        run = text if kind is None else text.replace("[priors]", learned)
        (tmp_path / "run.toml").write_text(run + more)
        plan = TrainingPlan.load(tmp_path / "run.toml")
        requested = Regressor(network, standardiser_of(plan), 7)
        monkeypatch.setattr(export, "trained_network", lambda *_, requested=requested: requested)
        folder = export.ExportFolder(tmp_path / f"network-{unobserved}-{over_mean}")
        folder.begin()
        message = export.export_network(SavedTraining(TrainingFolder(tmp_path), plan, True), folder)
        folder.release()
        assert message["divided_by_mean"] is over_mean
        assert message.get("unobserved_cells") == unobserved
        assert message["observation"] == plan.record.table()
        assert ("amplitude" in message["observation"].get("nuisances", {})) == (kind is not None)


def test_the_numbers_are_those_of_the_network_on_its_mesh(tmp_path, monkeypatch):
    volumes = np.random.default_rng(1).lognormal(size=(2, 16, 16, 16))
    np.save(tmp_path / "volumes.npy", volumes)
    networks, paths = {}, []
    for kind in KINDS:
        training, networks[kind] = trained_like(tmp_path / kind, kind)
        monkeypatch.setattr(export, "trained_network", lambda *_, kind=kind: networks[kind])
        folder = export.ExportFolder(tmp_path / f"{kind}-network")
        folder.begin()
        about = export.export_network(training, folder)
        folder.release()
        assert json.loads((folder.path / export.MARK).read_text()).items() >= about.items()
        written = sum(file.stat().st_size for file in folder.path.rglob("*") if file.is_file())
        assert written < export.export_bytes(training)
        paths.append(str(folder.path))
    requested = subprocess.run(
        [sys.executable, "-I", "-c", ASK, str(tmp_path / "volumes.npy"), *paths],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert requested.returncode == 0, requested.stderr
    over_mean = volumes / volumes.mean(axis=(1, 2, 3), keepdims=True)
    for path, (kind, (_, loss, precision, equal)) in zip(paths, KINDS.items(), strict=True):
        found, trained = np.load(path + ".npz"), networks[kind]
        given = over_mean.astype("float64" if precision == "float64" else "float32")
        outputs = of_all_replicas(trained.network.predict(given), trained.network.mesh)
        mean, sigma = trained.in_physical_units(outputs)
        unit = trained.standardiser.std
        assert np.ptp(mean / unit, axis=0).max() > 10 * equal  # it tells the volumes apart
        np.testing.assert_allclose(found["mean"] / unit, mean / unit, atol=equal)
        assert ("sigma" in found) == (loss == "likelihood")
        if sigma is not None:
            np.testing.assert_allclose(found["sigma"] / sigma, 1, atol=equal)
        assert np.isfinite(found["gradient"]).all() and np.abs(found["gradient"]).max() > 0


def test_a_folder_of_others_is_left_alone(tmp_path):
    (tmp_path / "saved_model.pb").touch()
    with pytest.raises(OutputError, match="elsewhere"):
        export.ExportFolder(tmp_path).check(overwrite=True, needed=1)
