"""Networks that were trained, asked on every mesh: the same answers as on whole volumes by one
rank; tables and figures; volumes that users bring; and datasets of simulations."""

import functools
import json
import shutil
import zlib
from dataclasses import replace

import h5py
import numpy as np
import pytest
import zarr
from ranks import NETWORK_SHAPES, SIZE, process_mesh, shared_folder, solo
from run_files import PRIORS
from scipy.stats import norm
from tiny_network import TINY

from flowpm_dist.cosmoflow.evaluation import evaluation, posterior_fits, summaries
from flowpm_dist.cosmoflow.evaluation.meshes import (
    asking_mesh,
    common_mesh,
    planned_volumes,
    prediction_mesh,
    splits_to_read,
)
from flowpm_dist.cosmoflow.evaluation.posterior_fits import OWN
from flowpm_dist.cosmoflow.evaluation.posteriors import FILES as OF_POSTERIORS
from flowpm_dist.cosmoflow.evaluation.posteriors import posterior_of_volume
from flowpm_dist.cosmoflow.evaluation.prediction import check_observation, predict_volume
from flowpm_dist.cosmoflow.evaluation.results import FILES
from flowpm_dist.cosmoflow.evaluation.trainings import PosteriorError, PosteriorOptions
from flowpm_dist.cosmoflow.planning.data_options import DummyData
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder, fresh_split
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.scores import baselines
from flowpm_dist.cosmoflow.scores.baselines import Mean, RidgeOnPower
from flowpm_dist.cosmoflow.scores.judging import score
from flowpm_dist.cosmoflow.training import held_out
from flowpm_dist.cosmoflow.training.checkpoints import Checkpoints
from flowpm_dist.cosmoflow.training.dataset import write_dataset
from flowpm_dist.cosmoflow.training.saved import (
    SavedTraining,
    TrainedError,
    read_training,
    trained_network,
)
from flowpm_dist.cosmoflow.training.trainer import optimiser_of, regressor_of
from flowpm_dist.cosmoflow.volumes.draws import Lanes, Priors
from flowpm_dist.cosmoflow.volumes.record_files import RecordError
from flowpm_dist.cosmoflow.volumes.records import RecordDataset
from flowpm_dist.cosmoflow.volumes.sources import in_order
from flowpm_dist.cosmoflow.volumes.universes import VolumeMaker, maker_of
from flowpm_dist.io.files import write_text
from flowpm_dist.io.volume import Volume, VolumeError
from flowpm_dist.jobs.folder import OF_EVERY_JOB, OutputError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.jobs.session import on_root
from flowpm_dist.observables import record
from flowpm_dist.observables.options import DensityOptions
from flowpm_dist.observables.record import ObservationRecord
from flowpm_dist.observables.tracers import ObservationError
from flowpm_dist.posteriors.heads import Posterior, fit_posterior
from flowpm_dist.posteriors.options import HeadOptions

RUN = (
    PRIORS
    + """[box]
grid = {grid}
size = 96.0
[evolution]
steps = 2
[network]
name = "{name}"
gather_below = 4
[training]
batch = 2
optimiser = "sgd"
seed = {seed}
[data]
simulations = {simulations}
reuse = 2
fill = 2
validation = 4
test = {test}
"""
)
GRID = 24
ROUNDING = 2e-6
"""Of float32 in parameters whose priors have widths of 0.1 and 0.17."""
MESHES = NETWORK_SHAPES[SIZE]
SILENT = Progress(rank=1)

pytestmark = pytest.mark.timeout(300, method="thread")


def world():
    return process_mesh(f"row:{SIZE}")


def judged(folders, shape, split="test", **options):
    """Trainings, judged on a mesh."""
    read = [read_training(folder) for folder in folders]
    mesh = process_mesh(common_mesh(read, SIZE, shape, split))
    return evaluation.evaluate(read, mesh, SILENT, split=split, **options)


def found_in(folder, volume, shape, **options):
    """What the network of a training finds in a volume."""
    read = read_training(folder)
    mesh = process_mesh(prediction_mesh(read, SIZE, shape))
    return predict_volume(read, volume, mesh, SILENT, **options)


def on_first_rank(function):
    """Done once, after what all ranks did before, and seen by all."""
    world().barrier()
    if world().rank == 0:
        function()
    world().barrier()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return shared_folder(tmp_path_factory)


def config_of(folder, seed=0, simulations=8, test=4, grid=GRID, change=("", "")):
    name = f"run-{seed}-{simulations}-{test}-{grid}.toml"
    text = RUN.format(name=TINY.name, seed=seed, simulations=simulations, test=test, grid=grid)
    path = folder / f"{world().rank}-{name}"
    path.write_text(text.replace(*change))
    return TrainingPlan.load(path)


def write_training(config, dataset, path):
    """A training of no steps: its folder with simulations, statistics and a checkpoint."""
    folder = TrainingFolder(path)
    on_first_rank(lambda: folder.begin(resume=False))
    on_first_rank(lambda: shutil.copytree(dataset, folder.held_out))
    on_first_rank(lambda: (folder.held_out / "statistics").rename(path / "statistics"))
    on_first_rank(lambda: write_text(folder.run_file, config.resolved()))
    write_checkpoint(config, world(), folder)


def write_checkpoint(config, mesh, folder):
    network = regressor_of(config, mesh, SavedTraining(folder, config, True).header()).network
    optimiser = optimiser_of(config)
    optimiser.build(network.weights)
    steps = config.training.steps
    Checkpoints(folder.checkpoints.path, mesh, network.state, optimiser, 1).save(steps)
    on_first_rank(lambda: folder.write_mark(complete=True, step=steps, steps=steps))
    folder.release()


def alike(config, original, path):
    """The same training with another seed or number of simulations."""
    on_first_rank(lambda: shutil.copytree(original, path))
    folder = TrainingFolder(path)
    on_first_rank(lambda: write_text(folder.run_file, config.resolved()))
    on_first_rank(lambda: shutil.rmtree(folder.checkpoints.path))
    write_checkpoint(config, world(), folder)


@pytest.fixture(scope="module")
def dataset(shared):
    folder, config = shared / "dataset", config_of(shared)
    write_dataset(config, process_mesh(MESHES[-1]), folder, samples_per_file=3, progress=SILENT)
    return config, folder


@pytest.fixture(scope="module")
def training(shared, dataset):
    write_training(*dataset, shared / "run")
    return shared / "run"


@pytest.fixture(scope="module")
def another_seed(shared, training):
    alike(config_of(shared, seed=1), training, shared / "another")
    return shared / "another"


@pytest.fixture(scope="module")
def fewer(shared, training):
    alike(config_of(shared, simulations=4), training, shared / "fewer")
    return shared / "fewer"


@pytest.fixture(autouse=True)
def quick_baselines(monkeypatch):
    few = (Mean(), RidgeOnPower(alphas=(1e-2,)))
    monkeypatch.setattr(baselines, "baselines_of", lambda _: few)


@pytest.fixture(scope="module")
def known(training):
    """Volumes of the test set, their truth, and what one rank finds in them, sorted by truth."""
    read = read_training(training)
    volumes, truth, _ = next(iter(read.files("test").batches(4, shuffle=False)))
    regressor = regressor_of(read.plan, solo())
    network = regressor.network
    optimiser = optimiser_of(read.plan)
    optimiser.build(network.weights)
    saved = Checkpoints(training / "checkpoints", solo(), network.state, optimiser, 1)
    assert saved.restore().step == read.plan.training.steps
    outputs = [network.predict(volumes[i : i + 2, ..., 0]).numpy() for i in (0, 2)]
    mean, sigma = regressor.in_physical_units(np.concatenate(outputs))
    order = np.argsort(truth[:, 0])
    return tuple(np.asarray(part)[order] for part in (volumes[..., 0], truth, mean, sigma))


@pytest.mark.dealt
@pytest.mark.parametrize("shape", MESHES)
def test_scores_are_those_of_predictions_by_one_rank(shape, training, known, monkeypatch):
    monkeypatch.setattr(summaries, "MOST", 3)  # which is for files alone
    before = TrainingFolder(training).openings()
    world().barrier()
    found = judged([training], shape)
    assert (found is None) == (world().rank > 0)
    if found is None:
        return
    _, truth, mean, sigma = known
    network = found.predictions["network"]
    np.testing.assert_array_equal(network.truth, truth)
    np.testing.assert_allclose(network.mean, mean, atol=ROUNDING, rtol=0)
    np.testing.assert_allclose(network.sigma, sigma, atol=ROUNDING, rtol=0)
    with np.load(training / "statistics" / "train.npz") as held:
        train_mean = held["parameters"].mean(axis=0)
    np.testing.assert_array_equal(found.train_mean, train_mean)
    assert found.scores["network"] == score(network, train_mean)
    assert found.scores["mean"]["sigma8"].rmse_over_mean == pytest.approx(1)
    assert list(found.scores) == ["network", "mean", "ridge on log P(k)"]
    assert found.curves["network"].sizes.tolist() == [8]
    assert found.collapse["network"]
    opened = TrainingFolder(training).openings()
    assert opened[:-1] == before and opened[-1]["step"] == 8
    assert len(found.notes) == bool(before)
    assert all(f"was opened before, first at {opened[0]['time']}." in n for n in found.notes)


def test_mean_loss_is_that_of_the_error_bars(training, known):
    """Minus the log likelihood of the truth, one of a hundred times the prior's, in its units."""
    _, truth, mean, sigma = known
    read = read_training(training)
    requested = trained_network(read, solo(), 2)
    batches = in_order(read.files("test"), Lanes.of(solo(), 2))
    found = requested.mean_errors(batches, len(truth))[0]
    each = np.log(sigma / requested.standardiser.std) + ((truth - mean) / sigma) ** 2 / 2
    each = -np.log(0.99 * np.exp(-each) + 0.01 * np.sqrt(2 * np.pi / 12))
    assert found == pytest.approx(each.mean(), rel=1e-5, abs=1e-5)


def test_seeds_and_sizes_and_what_is_written(training, another_seed, fewer):
    found = judged([training, another_seed, fewer], None)
    if found is None:
        return
    base = "network, 8 simulations"
    assert found.main == f"{base}, mean of 2 seeds"
    one, two = (found.predictions[f"{base}, seed {seed}"] for seed in (0, 1))
    assert np.abs(one.mean - two.mean).max() > 1e-6
    both = found.predictions[found.main]
    np.testing.assert_allclose(both.mean, (one.mean + two.mean) / 2)
    spread = (one.mean - two.mean) ** 2 / 4
    np.testing.assert_allclose(both.sigma**2, (one.sigma**2 + two.sigma**2) / 2 + spread)
    rmse = [found.scores[f"{base}, seed {seed}"]["sigma8"].rmse for seed in (0, 1)]
    wanted = np.mean(rmse), abs(rmse[0] - rmse[1]) / np.sqrt(2)
    assert found.seeds[base]["sigma8"]["rmse"] == pytest.approx(wanted)
    curve = found.curves["network"]
    assert curve.sizes.tolist() == [4, 8]
    assert np.isnan(curve.errors["Omega_m"]).tolist() == [[False, True], [False, False]]

    old = training / "evaluation"
    old.mkdir()
    write_text(old / "scores.json", '{"generator": "flowpm-dist"}')
    write_text(old / "table.md", "old")
    folder = found.write()
    assert folder == training / "evaluation"
    expected, shown = {*FILES, *OF_EVERY_JOB}, (folder / "report.html").read_text()
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected - {*OF_POSTERIORS})
    assert f"{found.scores[found.main]['sigma8'].rmse:.4g}"[:5] in shown
    stored = json.loads((folder / "scores.json").read_text())
    scores = stored["scores"]
    assert scores[found.main]["sigma8"]["rmse"] == found.scores[found.main]["sigma8"].rmse
    paired = stored["differences"]["mean"]["sigma8"]
    known = [scores[method]["sigma8"]["r2"] for method in (found.main, "mean")]
    assert paired["r2"] == pytest.approx(known[0] - known[1])
    assert f"sigma8: R² of {found.main} minus R² of" in found.markdown()
    assert stored["learning_curves"]["network"]["rmse_over_mean"]["sigma8"][0][1] is None
    with np.load(folder / "predictions.npz") as held:
        np.testing.assert_array_equal(held["mean"], both.mean)
        assert held["names"].tolist() == ["Omega_m", "sigma8"]
    assert "over the seeds" in found.markdown()
    assert (folder / "table.md").read_text() == found.markdown()
    elsewhere = training.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "table.csv").write_text("mine")
    with pytest.raises(OutputError, match=r"table.csv from elsewhere"):
        found.write(elsewhere)
    assert (elsewhere / "table.csv").read_text() == "mine"


def test_trainings_that_cannot_be_judged(shared, training, fewer):
    def refused(folders, text, kind=TrainedError, shape=None):
        with pytest.raises(kind, match=text):
            judged(folders, shape)

    refused([shared / "nowhere"], "holds no training")
    refused([training, training], "same training, with seed 0")
    refused([training], "do not multiply|places", ConfigError, f"row:{SIZE + 1}")
    broken = shared / "broken"
    on_first_rank(lambda: shutil.copytree(training, broken))
    on_first_rank(lambda: shutil.rmtree(broken / "checkpoints"))
    refused([broken], "has not saved a checkpoint yet")
    other = config_of(shared, change=("sigma8 = [0.78, 0.95]", "sigma8 = [0.7, 0.95]"))
    on_first_rank(lambda: shutil.copytree(training, shared / "other"))
    on_first_rank(lambda: write_text(shared / "other" / "run.toml", other.resolved()))
    refused([training, shared / "other"], "different test sets: priors.sigma8 differ")
    batches, text = [], config_of(shared, test=6).resolved()
    for batch in (2, 4):
        changed = text.replace("batch = 2", f"batch = {batch}").replace(
            "fill = 2", f"fill = {batch}"
        )
        batches.append(shared / f"batches-of-{batch}")
        on_first_rank(lambda: shutil.copytree(training, batches[-1]))
        on_first_rank(lambda c=changed: write_text(batches[-1] / "run.toml", c))
    refused(batches, "different test sets: data.test in whole batches differ")
    loss = config_of(shared, change=("gather_below", 'loss = "l2"\ngather_below'))
    on_first_rank(lambda: write_text(shared / "other" / "run.toml", loss.resolved()))
    refused([shared / "other"], "latest checkpoint in .* cannot be used")


def test_an_incomplete_training_is_judged_and_said_so(shared, training):
    unfinished = shared / "unfinished"
    on_first_rank(lambda: shutil.copytree(training, unfinished))
    on_first_rank(lambda: TrainingFolder(unfinished).write_mark(complete=False))
    opened = TrainingFolder(training).openings()
    found = judged([unfinished], None, "validation")
    if found is not None:
        assert found.notes[0].endswith("is not complete: weights of step 8; 8 of 8 steps made.")
        assert found.folder == unfinished / "evaluation-validation"
        # The test set stays shut.
        assert found.notes[1:] == (evaluation.ON_VALIDATION,) and found.split == "validation"
        assert TrainingFolder(unfinished).openings() == opened
        with np.load(training / "statistics" / "validation.npz") as held:
            truth = held["parameters"][np.argsort(held["parameters"][:, 0])]
        np.testing.assert_allclose(found.predictions["network"].truth, truth, rtol=1e-6)


def test_mesh_that_is_chosen(training, monkeypatch):
    read = read_training(training)
    with monkeypatch.context() as changed:
        changed.setattr(
            SavedTraining, "samples", lambda _, split: {"test": 8, "validation": 2}[split]
        )
        assert common_mesh([read], 8, None) == "replica:8"
        assert common_mesh([read], 8, None, fits=True).startswith("replica:2,row:")
    assert splits_to_read(read, "test", fits=True) == ["test", "validation"]
    assert [planned_volumes(read, split) for split in ("test", "validation")] == [4, 4]
    data = read.plan.data.model_copy(update={"validation": 3, "test": 3})
    three = replace(read, plan=read.plan.model_copy(update={"data": data}))
    counts = [planned_volumes(three, split) for split in ("validation", fresh_split(1))]
    assert counts == [4, 3], "held out in whole batches, but for fresh test sets"
    split = read.plan.with_mesh("row:4")
    read = type(read)(read.folder, split, read.complete)
    assert asking_mesh(read, 4, 100, None) == "row:4"
    assert asking_mesh(read, 8, 100, None) == "replica:8"
    assert asking_mesh(read, 8, 5, None) == "replica:4,row:2,col:1"
    assert asking_mesh(read, 8, 5, "replica:2,row:4") == "replica:2,row:4"
    with pytest.raises(TrainedError, match="8 replicas are more than 5 volumes"):
        asking_mesh(read, 8, 5, "replica:8")


@pytest.mark.dealt
@pytest.mark.parametrize("shape", MESHES)
def test_volumes_of_users(shape, shared, training, known):
    """In every format; counts are divided by their mean."""
    volumes, _, mean, sigma = known
    volume, path = volumes[1].astype(np.float64), shared / "volume"

    def write():
        np.save(path.with_suffix(".npy"), 3 * volume)
        shutil.rmtree(path.with_suffix(".zarr"), ignore_errors=True)
        group = zarr.create_group(path.with_suffix(".zarr"), attributes={"box_size": 96.0})
        group["density"] = volume
        group["else"] = volume
        with h5py.File(path.with_suffix(".h5"), "w") as file:
            file["a/density"] = volume[..., np.newaxis]
            file["other"] = volume
            file.attrs["box_size"] = [96.0, 96.0, 96.0]

    on_first_rank(write)
    for name, notes in (
        (
            "volume.npy",
            ["The volume does not state", "The volume was divided by its mean, 3."],
        ),
        ("volume.zarr", []),
        ("volume.h5:a/density", []),
    ):
        found = found_in(training, shared / name, shape)
        names, values, bars = zip(*found.parameters, strict=True)
        assert names == ("Omega_m", "sigma8")
        np.testing.assert_allclose(values, mean[1], atol=ROUNDING, rtol=0)
        np.testing.assert_allclose(bars, sigma[1], atol=ROUNDING, rtol=0)
        beyond = [n for n in found.notes if "error bar" in n or "outside" in n]
        assert [n[: len(w)] for n, w in zip(found.notes, notes, strict=False)] == notes
        assert len(found.notes) == len(notes) + len(beyond)
        assert ("give its side as --box-size [Mpc/h]" in str(found.notes)) == bool(notes)
    with pytest.raises(VolumeError, match="box of 200 Mpc/h: the network was trained on 24"):
        found_in(training, shared / "volume.npy", shape, box_size=200.0)


def test_fresh_test_sets_are_simulated_once_and_draws_are_independent(
    training, another_seed, monkeypatch
):
    split, checked, before = fresh_split(1), [], TrainingFolder(training).openings()
    monkeypatch.setattr(
        SavedTraining, "check_held_out", lambda self: checked.append(self.folder.path)
    )
    found = judged([training, another_seed], None, split)
    assert checked == [training, another_seed], "what was seen in the training is seen now"
    three_steps = replace(read_training(training), steps=3)
    assert (summaries.trained_on(three_steps), summaries.count_of(three_steps, "train")) == (6, 6)
    assert summaries.trained_on(three_steps, planned=True) == 6
    with monkeypatch.context() as early:
        early.setattr(SavedTraining, "ended_early", True)
        sizes = [summaries.trained_on(three_steps, planned=planned) for planned in (False, True)]
    assert sizes == [6, 8], "it is compared with those of all steps, and has seen fewer"
    priors = Priors(read_training(training).plan.priors.ranges, "sobol", seed=0)
    drawn = priors.draw(split, 0, 4)
    apart = [np.random.default_rng([0, zlib.crc32(split.encode()), n]).random(2) for n in range(4)]
    np.testing.assert_array_equal(drawn, priors.low + (priors.high - priors.low) * apart)
    monkeypatch.setattr(VolumeMaker, "make", None)
    with monkeypatch.context() as without:
        elsewhere = TrainingFolder(training).path / "nowhere"  # as where held-out is not copied
        held_out = property(lambda folder: elsewhere, lambda folder, value: None)
        without.setattr(TrainingFolder, "held_out", held_out, raising=False)
        again = judged([training, another_seed], None, split)
    if world().rank:
        return
    truth = found.predictions[found.main].truth
    np.testing.assert_allclose(truth, drawn[np.argsort(drawn[:, 0])], rtol=1e-6)
    assert found.folder == training / "fresh" / "1" / "evaluation"
    assert not any("opened before" in note for note in found.notes)
    assert any("give --fresh a number" in note for note in again.notes)
    assert TrainingFolder(training).openings() == before, "the first test set stays shut"
    assert len(TrainingFolder(another_seed).openings(split)) == 2
    assert {"mean", "network, mean of 2 seeds"} <= set(found.scores)


STATISTICS = ("power", "tiny_network:largest")
FIT = HeadOptions(hidden=4, members=2, penalties=(3.0,), epochs=2)


def test_summaries_of_volumes_are_those_of_one_rank(shared, training, fewer, monkeypatch):
    """Features of networks and statistics; training universes are simulated again, once for all."""
    read = {}
    for where in ("alone", "together"):
        for kind, folder in {"all": training, "fewer": fewer}.items():
            copy = shared / f"{kind}-{where}"
            on_first_rank(lambda copy=copy, folder=folder: shutil.copytree(folder, copy))
            read[where, kind] = read_training(copy)
    splits = ["train", "test"]
    both = [read["together", "fewer"], read["together", "all"]]
    made, make = [], VolumeMaker.make
    monkeypatch.setattr(VolumeMaker, "make", lambda *given: made.append(given[1:]) or make(*given))
    found = summaries.summarise(both, splits, [(), STATISTICS], process_mesh(MESHES[-1]), SILENT)
    together = max(2, process_mesh(MESHES[-1]).axis_size("replica"))
    assert made == [("train", number) for number in range(8 // together)]
    assert (found == []) == (world().rank > 0)
    if world().rank:
        return
    of_fewer, found = found
    for kind, statistics, tables in (("fewer", (), of_fewer), ("all", STATISTICS, found)):
        [alone] = summaries.summarise([read["alone", kind]], splits, [statistics], solo(), SILENT)
        for split, wanted in alone.items():
            np.testing.assert_array_equal(tables[split].truth, wanted.truth)
            assert list(tables[split].parts) == [summaries.OUTPUTS, summaries.HIDDEN, *statistics]
            for name, values in wanted.parts.items():
                most = 3e-4 * np.abs(values).max()
                np.testing.assert_allclose(
                    tables[split].parts[name], values, atol=most, err_msg=name
                )
            path = read["together", kind].folder.summaries(split)
            held = summaries.SplitSummaries.read(path)
            users = set(wanted.parts) - set(held.parts)
            assert users == set(statistics[1:]), "a user's own is kept"
    assert len(of_fewer["train"].truth) == 4 and len(found["train"].truth) == 8
    with np.load(training / "statistics" / "train.npz") as held:
        order = np.lexsort(held["parameters"].astype(np.float32).T[::-1])
        power = np.log(held["power"][order])
    np.testing.assert_allclose(found["train"].parts["power"], power, atol=1e-4)


@pytest.mark.long
@pytest.mark.ranks(1)
@pytest.mark.budget(60)
def test_posteriors_are_fitted_judged_and_taken_up_by_predictions(
    shared, training, another_seed, known, monkeypatch
):
    folder, other = shared / "posteriors", shared / "other-posteriors"
    shutil.copytree(training, folder)
    shutil.copytree(another_seed, other)
    wanted = PosteriorOptions(("gaussian", "gaussian"), (STATISTICS[:1], STATISTICS), FIT)
    fits = []

    def noted(head, priors, train, validation, options):
        fits.append(options.members)
        return fit_posterior(head, priors, train, validation, options)

    with monkeypatch.context() as recorded:
        recorded.setattr(posterior_fits, "fit_posterior", noted)
        found = judged([folder, other], None, posteriors=wanted)
    # Outputs and features of two networks; statistics, as many as the mean of the two networks has.
    assert fits == 4 * [FIT.members] + 2 * [2 * FIT.members]
    check_posteriors(found, folder, monkeypatch)
    kept = [folder / "summaries" / f"{split}.npz" for split in ("train", "test")]
    before = [path.stat().st_mtime_ns for path in kept]
    requested = [read_training(folder)], ["train", "test"], [["power"]]
    [again] = summaries.summarise(*requested, solo(), SILENT)
    assert [path.stat().st_mtime_ns for path in kept] == before, "nothing has changed"
    summaries.summarise(requested[0], ["test"], [["histograms"]], solo(), SILENT)
    assert {"power", "histograms"} <= set(summaries.SplitSummaries.read(kept[1]).parts)
    monkeypatch.setattr(summaries, "STATISTICS_VERSION", 0)
    with pytest.raises(ValueError, match="of another version"):
        summaries.SplitSummaries.read(kept[0])
    volumes = known[0].astype(np.float64)
    np.save(shared / "asked.npy", volumes[1])
    with pytest.raises(
        PosteriorError, match="no posterior of the head 'flow', but of gaussian: flowpm"
    ):
        found_in(folder, shared / "asked.npy", None, head="flow", box_size=96.0)
    message = found_in(folder, shared / "asked.npy", None, box_size=96.0)
    posterior = Posterior.load(folder / "posterior" / "gaussian.npz")
    assert message.posterior.head == "gaussian" and posterior.about["step"] == 8
    row = again["test"].parts[posterior.about["part"]][1:2]
    samples = posterior.sample(row, len(message.posterior.samples))[0]
    np.testing.assert_allclose(message.posterior.samples, samples, atol=1e-5)
    values = [(value, bar) for _, value, bar in message.parameters]
    np.testing.assert_allclose(
        values, np.transpose([samples.mean(axis=0), samples.std(axis=0)]), atol=1e-5
    )
    message.posterior.write(shared / "asked")
    with np.load(shared / "asked" / "samples.npz") as held:
        np.testing.assert_array_equal(held["samples"], message.posterior.samples)
    assert (shared / "asked" / "corner.png").exists()
    np.save(shared / "unlike.npy", np.exp(3 * np.sin(9 * volumes[1])))
    strange = found_in(folder, shared / "unlike.npy", None, box_size=96.0)
    assert any("does not resemble the training set" in note for note in strange.notes)
    requested, row = (read_training(folder), "asked.npy"), again["test"].parts
    stale, notes = posterior_of_volume(*requested, row, step=9, head=None)
    assert stale is None and "weights of step 8, and these are of step 9: fit it" in notes[0]
    with pytest.raises(PosteriorError, match="of step 8, and these are of step 9"):
        posterior_of_volume(*requested, row, step=9, head="gaussian")
    with pytest.raises(PosteriorError, match="of step 8, and these are of step 9"):
        posterior_of_volume(*requested, row, step=9, head=None, needed=True)
    of_flow = read_training(folder).folder.posterior("flow")
    replace(posterior, about=posterior.about | {"step": 9}).save(of_flow)
    with pytest.raises(PosteriorError, match="features-9.npz"):
        posterior_of_volume(*requested, row, step=9, head="flow")  # there is no density of features
    found, _ = posterior_of_volume(*requested, row, step=8, head=None)
    assert found.head == "gaussian", "one of these weights, not the preferred one of others"
    (folder / "posterior" / "features-8.npz").write_text("damaged")
    damaged = found_in(folder, shared / "asked.npy", None, box_size=96.0)
    assert damaged.posterior is None and any("fit them again" in note for note in damaged.notes)
    with pytest.raises(PosteriorError, match="fit them again"):
        found_in(folder, shared / "asked.npy", None, box_size=96.0, head="gaussian")


def check_posteriors(found, folder, monkeypatch):
    results = found.posteriors
    mean, *members = names = ["network, mean of 2 densities", "network, seed 0", "network, seed 1"]
    names += ["power", "power + tiny_network:largest"]
    assert results.main == (mean, "gaussian")
    expected = {(n, "gaussian") for n in names} | {(n, OWN) for n in names[:3]}
    assert set(results.calibrations) == expected
    assert all(np.isfinite(one.gain) for one in results.calibrations.values())
    each = []
    for name in members:
        own = found.predictions[name]
        logs = norm.logpdf(own.truth, own.mean, own.sigma) + np.log([0.1, 0.17])
        logs = np.log(0.99 * np.exp(logs) + 0.01)
        each.append(logs.sum(axis=1))
        assert results.calibrations[name, OWN].gain == pytest.approx(each[-1].mean())
    both = np.mean(np.logaddexp(*each) - np.log(2))
    assert results.calibrations[mean, OWN].gain == pytest.approx(both)
    assert len(results.differences) == 4 + 3
    written, files = (
        found.write(folder / "made"),
        sorted([*FILES, *OF_EVERY_JOB]),
    )
    assert sorted(path.name for path in written.iterdir()) == files
    numbers = json.loads((written / "scores.json").read_text())["posteriors"]
    assert numbers["scores"][0]["of"] == mean and "gain" in numbers["differences"][0]
    assert (written / "posteriors.md").read_text() == results.markdown()
    without = replace(found, posteriors=None)
    without.write(written)
    assert sorted(path.name for path in written.iterdir()) == files
    assert json.loads((written / "scores.json").read_text())["posteriors"] == numbers
    moved = {name: replace(one, truth=one.truth + 1) for name, one in found.predictions.items()}
    for number, (change, same) in enumerate((
        ({"folder": "by another path"}, True),
        ({"step": 9}, False),
        ({"saved": 1.0}, False),
        ({}, False),
    )):  # fmt: skip
        shutil.copytree(written, copy := folder / f"{number}")
        trainings = tuple(one | change for one in found.trainings)
        other = replace(without, trainings=trainings)
        with monkeypatch.context() as fast:
            fast.setattr("flowpm_dist.io.figures.save_figure", lambda *_: None)
            replace(other, predictions=other.predictions if change else moved).write(copy)
        assert ("posteriors" in json.loads((copy / "scores.json").read_text())) == same
        assert {path.name for path in copy.iterdir()} >= set(OF_POSTERIORS) or not same
        assert not {path.name for path in copy.iterdir()} & set(OF_POSTERIORS) or same


def with_value(value):
    volume = np.ones((GRID,) * 3)
    volume[-1, -1, -1] = value
    return volume


@pytest.mark.parametrize(
    ("volume", "text"),
    [
        (np.ones((GRID, GRID, 2 * GRID)), r"shape \(24, 24, 48\); must be \(24, 24, 24\)"),
        (with_value(np.nan), "1 values that are not finite"),
        (with_value(-1.0), "1 negative values"),
        (np.zeros((GRID,) * 3), "its mean is 0"),
        (np.ones((GRID,) * 3, complex), "complex128; must be real numbers"),
        (None, "there is no such file"),
    ],
)
def test_volumes_that_are_refused(volume, text, shared, training):
    path = shared / "refused.npy"
    on_first_rank(lambda: path.unlink(missing_ok=True))
    if volume is not None:
        on_first_rank(lambda: np.save(path, volume))
    with pytest.raises(VolumeError, match=text):
        found_in(training, path, None)
    world().barrier()


@pytest.fixture(scope="module")
def maker(shared):
    config = config_of(shared)
    return maker_of(config, solo(), Lanes.of(solo(), config.training.batch))


@pytest.mark.ranks(1, 2, 4)
def test_one_rank_reads_masks_for_all(shared, monkeypatch):
    """What it finds is told to the others, and a volume of another mask is refused by all."""
    reads, own, world_ = [], record.checksum, world()
    monkeypatch.setattr(record, "checksum", lambda path: reads.append(path) or own(path))
    for name, value in (("here", 0.5), ("same", 0.5), ("other", 0.25)):
        on_first_rank(lambda n=name, v=value: np.save(shared / f"{n}.npy", np.full([4] * 3, v)))
    here, same, other = (
        ObservationRecord(DensityOptions(mask=shared / f"{name}.npy"))
        for name in ("here", "same", "other")
    )

    def checked(**known):
        check = functools.partial(check_observation, here, Volume(None, "v", **known))
        return on_root(world_, check, ObservationError)

    assert checked(observation=same.keys()) == []
    with pytest.raises(ObservationError, match="v is of another.*: mask is .*here.npy in the"):
        checked(observation=other.keys())
    (note,) = checked()
    assert note.startswith("The volume does not say")
    assert len(reads) == (0 if world_.rank else 4)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_dataset_holds_what_is_simulated(split, dataset, maker):
    folder = dataset[1]
    made = maker.make(split, 1)
    stored = RecordDataset(folder, split, grid=(GRID,) * 3)
    assert len(stored) == {"train": 8}.get(split, 4)
    batches = stored.batches(len(stored), steps=1, shuffle=False)
    volumes, parameters, index = next(iter(batches))
    order = np.argsort(index)
    assert index[order].tolist() == list(range(len(stored)))
    rounding = 16 * GRID * np.finfo(np.float32).eps  # of a particle's position [cells]
    found = volumes[order][2:4, ..., 0]
    np.testing.assert_allclose(found, made.volumes, rtol=1e-5, atol=rounding)
    np.testing.assert_array_equal(parameters[order][2:4], made.parameters.astype(np.float32))
    with np.load(folder / "statistics" / f"{split}.npz") as held:
        np.testing.assert_allclose(held["power"][2:4], made.power, rtol=1e-5)


def test_files_are_measured_as_simulations_are(shared, dataset, monkeypatch):
    """A network trained on files: its baselines see what they see of simulations."""
    config, folder = dataset
    text = RUN.format(name=TINY.name, seed=0, simulations=8, test=4, grid=GRID)
    box, network = text[: text.index("[cosmology]")], text[text.index("[network]") :]
    network = network[: network.index("[data]")] + 'steps = 8\n[data]\nsource = "files"\n'
    path = shared / f"files-{world().rank}.toml"
    path.write_text(f'{box}{network}folder = "{folder}"\n')
    of_files, training = TrainingPlan.load(path), TrainingFolder(shared / "on-files")
    on_first_rank(lambda: training.begin(resume=False))
    on_first_rank(lambda: write_text(training.run_file, of_files.resolved()))
    write_checkpoint(of_files, world(), training)
    beside = judged([training.path], MESHES[-1])
    on_first_rank(lambda: (folder / "statistics").rename(shared / "hidden"))
    measured = judged([training.path], MESHES[0])
    on_first_rank(lambda: (shared / "hidden").rename(folder / "statistics"))
    with monkeypatch.context() as changed:
        changed.setattr(summaries, "MOST", 3)
        wanted = PosteriorOptions(("gaussian",), (("power",),), FIT)
        part = judged([training.path], MESHES[-1], posteriors=wanted) if SIZE == 2 else None
    if beside is None:
        return
    if part is not None:
        check_first_volumes(part, training)
    assert not beside.notes and beside.curves["network"].sizes.tolist() == [8]
    for split in ("train", "validation", "test"):
        one = held_out.features(folder / "statistics" / f"{split}.npz")
        two = held_out.features(training.statistics(split), len(one.truth))
        order = [np.argsort(found.truth[:, 0]) for found in (one, two)]
        for field in ("truth", "log_power", "histogram"):
            a, b = (getattr(found, field)[o] for found, o in zip((one, two), order, strict=True))
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3 if field == "histogram" else 0)
    network = beside.predictions["network"]
    np.testing.assert_allclose(measured.predictions["network"].mean, network.mean, atol=ROUNDING)


def check_first_volumes(found, training):
    """There are more than posteriors are judged on: those of the network itself as well."""
    assert len(found.predictions["network"].truth) == 4
    assert "Posteriors are judged on the first 3 of the 4 volumes." in found.notes
    assert {one.count for one in found.posteriors.calibrations.values()} == {3}
    first = summaries.SplitSummaries.read(training.summaries("test")).truth
    np.testing.assert_array_equal(found.posteriors.arrays["truth"], first)
    assert ("network", OWN) in found.posteriors.differences


def test_dataset_that_is_there_and_one_that_was_interrupted(shared, dataset, monkeypatch):
    config, original = dataset
    folder = shared / "interrupted"
    on_first_rank(lambda: shutil.copytree(original, folder))
    options = {"progress": SILENT, "samples_per_file": 3}
    with pytest.raises(OutputError, match="holds the splits test: add --overwrite"):
        write_dataset(config, process_mesh(MESHES[-1]), folder, ["test"], **options)
    other = config_of(shared, change=("steps = 2", "steps = 3"))
    with pytest.raises(OutputError, match="train, validation, which differ in evolution.steps"):
        write_dataset(other, process_mesh(MESHES[-1]), folder, ["test"], overwrite=True, **options)
    assert len(RecordDataset(folder, "test")) == 4
    world().barrier()

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(held_out, "_simulate_split", stop)
    with pytest.raises(KeyboardInterrupt):
        write_dataset(config, process_mesh(MESHES[-1]), folder, ["test"], overwrite=True, **options)
    assert len(RecordDataset(folder, "train")) == 8
    with pytest.raises(RecordError, match="has no split 'test'"):
        RecordDataset(folder, "test")
    world().barrier()
    with pytest.raises(KeyboardInterrupt):
        write_dataset(config, process_mesh(MESHES[-1]), folder, overwrite=True, **options)
    assert not list(folder.glob("*.tfrecord")) and not (folder / "dataset.json").exists()
    world().barrier()

    def copy(maker, split, *_, **__):
        world().barrier()  # every rank has begun
        for path in original.glob(f"{split}-*") if world().rank == 0 else ():
            shutil.copy(path, folder)
        world().barrier()

    monkeypatch.setattr(held_out, "_simulate_split", copy)
    for split in ("train", "test"):
        write_dataset(config, process_mesh(MESHES[-1]), folder, [split], **options)
        assert len(RecordDataset(folder, split)) == {"train": 8, "test": 4}[split]
    assert len(RecordDataset(folder, "train")) == 8
    files = config.model_copy(update={"data": DummyData()})
    with pytest.raises(OutputError, match="simulates nothing"):
        write_dataset(files, process_mesh(MESHES[-1]), folder, **options)
