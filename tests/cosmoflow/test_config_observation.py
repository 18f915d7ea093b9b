"""[observation] in a training's run file, and what data sets and volumes tell of theirs."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import zarr
from run_files import check_mistake, write

from flowpm_dist import Cosmology
from flowpm_dist.cosmoflow.evaluation.prediction import check_observation
from flowpm_dist.cosmoflow.evaluation.volume_checks import as_observed, check_mean, check_values
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.memory import (
    buffer_bytes,
    check_training_mesh,
    dataset_memory,
    prediction_memory,
    training_bytes,
    training_memory,
)
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan, differences
from flowpm_dist.cosmoflow.training import held_out
from flowpm_dist.cosmoflow.training.dataset import check_dataset, dataset_bytes
from flowpm_dist.cosmoflow.training.held_out import header_of
from flowpm_dist.cosmoflow.training.saved import SavedTraining
from flowpm_dist.cosmoflow.volumes import sources
from flowpm_dist.cosmoflow.volumes.record_files import DatasetHeader, finish_dataset
from flowpm_dist.cosmoflow.volumes.record_writer import RecordWriter
from flowpm_dist.io.volume import Volume, VolumeError, open_volume
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.observables.light_cone.map_files import cone_table, differences_from_file
from flowpm_dist.observables.light_cone.results import attributes_of
from flowpm_dist.observables.options import CountsOptions, DensityOptions, observation_of
from flowpm_dist.observables.record import BARE, ObservationRecord
from flowpm_dist.observables.tracers import ObservationError
from meshimpl.process_mesh import ProcessMesh
from tests.cosmoflow.test_config_training import FILES, GOOD, changed, dataset, problems

NOISY = """[observation]
structure = "1lpt"
redshift_space = "z"
bias = {b1 = 0.5}
sigma = 0.5
"""
PRIORS = "[priors]\nb1 = [0.0, 1.0]\nnoise_amplitude = [0.5, 1.5]"
SURVEY = GOOD.replace("[priors]", PRIORS) + NOISY
COUNTED = GOOD + '[observation]\nkind = "counts"\nmean_count = 3.0\n'
GALAXIES = GOOD.replace("[priors]", "[priors]\nalpha = [0.8, 1.2]") + (
    '[observation]\nkind = "galaxies"\nredshift_space = "z"\n'
    "halos = { minimum = 30 }\ngalaxies = { log_M_min = 13.0 }\n"
)
RANGES = ((0.5, 1.5), (2.0, 3.0))
RECORD = ObservationRecord(
    DensityOptions(structure="1lpt", redshift_space="z", bias={"b1": 0.5}, sigma=0.5),
    {"b1": (0.0, 1.0), "noise_amplitude": (0.5, 1.5)},
)


def test_without_one_the_density_itself_is_observed(tmp_path):
    plan = TrainingPlan.load(write(tmp_path, GOOD))
    assert plan.record == BARE and plan.network.input == "log1p" and plan.data.augment is True
    assert plan.to_table()["observation"] == {"structure": "pm", "kind": "density"}


def test_nuisances_are_drawn_and_no_targets(tmp_path):
    plan = TrainingPlan.load(write(tmp_path, SURVEY))
    assert plan.parameters == ("Omega_m", "sigma8", "n_s") == tuple(plan.priors.ranges)
    assert tuple(plan.priors.drawn) == ("b1", "noise_amplitude", "Omega_m", "sigma8", "n_s")
    assert plan.record == RECORD
    assert (plan.network.input, plan.initial.lpt_order) == ("asinh", 1)
    chosen = TrainingPlan.load(
        write(tmp_path, SURVEY.replace(PRIORS, PRIORS + '\ntargets = ["b1"]'))
    )
    assert chosen.parameters == ("b1",) and chosen.outputs == 2
    assert chosen.record == RECORD  # which tells what was drawn, learned or not
    assert not set(chosen.fixed_parameters) & {"Omega_m", "sigma8", "n_s"}
    assert TrainingPlan.load(write(tmp_path, COUNTED)).network.input == "log1p-counts"


@pytest.mark.parametrize("text", [SURVEY, COUNTED, GALAXIES])
def test_resolved_reads_back_the_same(tmp_path, text):
    plan = TrainingPlan.load(write(tmp_path, text))
    again = TrainingPlan.load(write(tmp_path, plan.resolved()))
    assert again.resolved() == plan.resolved() and list(again.priors.drawn) == list(
        plan.priors.drawn
    )


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ("sigma = 0.5", "mean_count = 2.0", "observation.mean_count", 'kind = "counts"'),
        ("sigma = 0.5", 'kind = "counts"', "observation.mean_count", "is missing: must be"),
        ("sigma = 0.5", "", "priors.noise_amplitude", "observation has no sigma"),
        ("bias = {b1 = 0.5}\n", "", "priors.b1", "observation.bias has no b1"),
        ('"1lpt"', '"linear"', "observation.redshift_space", "moves no particles"),
        ("b1 = [0.0", "c = [0.0", "priors.c", "is not a parameter"),
        ("[evolution]", "[initial]\nlpt_order = 2\n[evolution]", "initial.lpt_order", "needs 1"),
        ("[network]", '[network]\ninput = "log1p"', "network.input", 'below 0; give "asinh"'),
        (PRIORS, PRIORS + '\ntargets = ["h"]', "priors.targets", "has no h: give its range"),
        ("{b1 = 0.5}", "{b = 1.5}", "observation.bias", "velocities.*b1 = b - 1 = 0.5"),
        (NOISY, NOISY + 'mask = "mask.npy"\n', "observation.mask", "no such file"),
    ],
)
def test_one_mistake(tmp_path, old, new, where, message):
    assert old in SURVEY
    found = problems(tmp_path, SURVEY.replace(old, new, 1))
    assert any(p.split(" ")[0] == where and re.search(message, p) for p in found), found
    others = {p.split(" ")[0] for p in found} - {where}
    assert others <= {"priors.noise_amplitude", "priors.b1", "observation.bias"}


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ("alpha = [0.8", "alpha = [-0.8", "priors.alpha", "from 0 to 10"),
        (
            "alpha = [0.8, 1.2]",
            "alpha = [0.8, 9.0]",
            "priors.alpha",
            "more than 1000000 satellites",
        ),
        ("minimum = 30", "members = true", "observation.halos.members", "leave it out"),
        (
            "minimum = 30",
            'overdensities = ["200c"]',
            "observation.halos.overdensities",
            "200m alone",
        ),
        ("alpha = [0.8", "b1 = [0.8", "priors.b1", "is not a parameter.*log_M_min"),
        ("alpha = [0.8", "seed = [0.8", "priors.seed", "is not a parameter"),
        ("alpha = [0.8", "concentration = [0.8", "priors.concentration", "no number conc"),
        ("alpha = [0.8", "amplitude = [0.8", "priors.amplitude", "is not a parameter"),
        ('"galaxies"', '"galaxies"\nstructure = "linear"', "observation.structure", "no particles"),
        ("minimum = 30", "minimum = 5000000", "observation.halos.minimum", "there are"),
        ("minimum = 30", "linking = 0.3", "observation.halos", "linking"),
        ('"z"', '"z"\nmask = "m.npy"', "observation.mask", "goes with kind"),
        (
            "log_M_min = 13.0",
            "alpha = -1",
            "observation.galaxies",
            "alpha = -1: must be a number of at least 0",
        ),
    ],
)
def test_one_mistake_with_galaxies(tmp_path, old, new, where, message):
    assert old in GALAXIES
    found = problems(tmp_path, GALAXIES.replace(old, new, 1))
    assert any(p.split(" ")[0] == where and re.search(message, p) for p in found), found


def test_galaxies_go_with_blocks_and_memory_of_their_finder(tmp_path):
    plan = TrainingPlan.load(write(tmp_path, GALAXIES))
    assert plan.network.input == "log1p-counts" and plan.parameters == ("Omega_m", "sigma8", "n_s")
    assert plan.record.nuisances == {"alpha": (0.8, 1.2)}
    cells = TrainingPlan.load(write(tmp_path, COUNTED))
    grid = plan.box.grid
    more = dataset_memory(plan, grid, {}) - dataset_memory(cells, grid, {})
    assert more == plan.observation.halos.values * 8 * math.prod(grid)
    long = GALAXIES.replace("minimum = 30", "linking_length = 1.0, minimum = 30")
    wide = TrainingPlan.load(write(tmp_path, long))
    assert wide.mesh_for(1, source=tmp_path)
    box = wide.box.model_copy(update={"grid": (8, 8, 8), "size": (64.0, 128.0, 128.0)})
    narrow = wide.model_copy(update={"box": box})
    with pytest.raises(ConfigError, match="observation.halos.linking_length.*spans a rank's block"):
        check_training_mesh(narrow, 8, source=tmp_path, shape="row:8")
    assert check_training_mesh(narrow, 8, source=tmp_path, shape="row:8", simulating=False)


SEVERAL = GOOD + "[observation]\nredshifts = [1, 0.5, 0]\n"


def test_redshifts_are_channels(tmp_path):
    """Of the volumes, of the network, and of what both take in memory and on disk."""
    plan, single = (TrainingPlan.load(write(tmp_path, text)) for text in (SEVERAL, GOOD))
    assert (plan.channels, single.channels) == (3, 1) and plan.network.input == "log1p"
    assert plan.record.options.scale_factors(1.0) == [0.5, 1 / 1.5, 1.0]
    assert single.observation.scale_factors(0.5) == [0.5]
    again = TrainingPlan.load(write(tmp_path, plan.resolved()))
    assert again.resolved() == plan.resolved() and again.observation.redshifts == (1.0, 0.5, 0.0)
    assert differences(single.universes(), plan.universes()) == ["observation.redshifts"]
    axes = {"replica": 2}
    assert buffer_bytes(plan, plan.box.grid, axes) == 3 * buffer_bytes(single, plan.box.grid, axes)
    for memory in (training_memory, dataset_memory, prediction_memory):
        less, more = (memory(p, (128, 128, 128), axes) for p in (single, plan))
        assert less < more < 3 * less
    options = {"dtype": "float32", "compressed": False}
    on_disk = [dataset_bytes(p, ["train"], **options) for p in (single, plan)]
    assert on_disk[1] == 3 * on_disk[0]
    folder = TrainingFolder(tmp_path / "none")
    assert training_bytes(plan, folder) > training_bytes(single, folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[0]", "must be a list of two redshifts or more"),
        ("[0, 1]", "1 follows 0, which is not above it; must be a list of two redshifts or more"),
        ("[1, -0.1]", "must be a list of two redshifts or more"),
        ("[1, 0.5]", "the last must be the redshift at the end of the simulation, 0"),
        ("[9.5, 0]", "the steps begin at redshift 9"),
    ],
)
def test_redshifts_that_are_not_those_of_a_simulation(tmp_path, given, message):
    (found,) = problems(tmp_path, SEVERAL.replace("[1, 0.5, 0]", given))
    assert found.startswith("observation.redshifts") and message in found


def test_redshifts_before_the_first_step_need_none(tmp_path):
    text = SEVERAL.replace("[1, 0.5, 0]", '[12, 0]\nstructure = "2lpt"')
    assert TrainingPlan.load(write(tmp_path, text)).channels == 2


def test_a_dataset_has_a_channel_for_each_redshift(tmp_path):
    record = ObservationRecord(DensityOptions(redshifts=(1.0, 0.0)))
    dataset(tmp_path, attributes={"observation": record.table()}, channels=2)
    plan = TrainingPlan.load(on_files(tmp_path))
    assert plan.channels == 2 and plan.record == record
    with pytest.raises(Exception, match=r"redshifts is \[2, 0\] in the training, \[1, 0\] in the"):
        TrainingPlan.load(on_files(tmp_path, "[observation]\nredshifts = [2, 0]\n"))
    path = tmp_path / "set" / "dataset.json"
    message = json.loads(path.read_text())
    path.write_text(json.dumps(message | {"channels": 4}))
    with pytest.raises(Exception, match="redshifts = .*: the volumes have 4 channels, but there"):
        TrainingPlan.load(on_files(tmp_path))


def test_a_volume_keeps_its_mean_where_an_amplitude_is_learned(tmp_path):
    """`predict` and `export` divide by the mean only where it tells nothing."""
    learned = '[priors]\namplitude = [0.5, 1.5]\ntargets = ["sigma8", "amplitude"]'
    plan = TrainingPlan.load(write(tmp_path, GOOD.replace("[priors]", learned)))
    assert plan.record == ObservationRecord(BARE.options, {"amplitude": (0.5, 1.5)})
    assert not SavedTraining(TrainingFolder(tmp_path), plan, True).divides_by_mean(None)
    bare = TrainingPlan.load(write(tmp_path, GOOD))
    assert SavedTraining(TrainingFolder(tmp_path), bare, True).divides_by_mean(None)


def test_a_kept_mean_far_from_the_expected_one_is_refused():
    volume = Volume(np.ones((4, 4, 4)), "v.npy")
    check_mean(volume, np.array([0.05, 30.0]), 1.0)
    check_mean(volume, np.array([1e-6]), 2e-6)
    for mean in (1e10, 1e-6):
        with pytest.raises(VolumeError, match="v.npy has mean 1e.*; .* means of about 1"):
            check_mean(volume, np.array([1.0, mean]), 1.0)


def test_a_mask_is_not_turned(tmp_path):
    np.save(tmp_path / "mask.npy", np.ones((32, 32, 32)))
    masked = SURVEY + 'mask = "mask.npy"\n'
    assert TrainingPlan.load(write(tmp_path, masked)).data.augment is False
    turned = masked.replace("simulations = 400", "simulations = 400\naugment = true")
    assert problems(tmp_path, turned)[0].startswith("data.augment would turn the mask of")
    louder = turned.replace("sigma = 0.5", 'sigma = "mask.npy"')
    assert problems(tmp_path, louder)[0].startswith("data.augment would turn the mask and sigma")
    alone = SURVEY.replace("sigma = 0.5", 'sigma = "mask.npy"')
    assert TrainingPlan.load(write(tmp_path, alone)).data.augment is False


def test_test_sets_of_other_observations_differ(tmp_path):
    one, other = (TrainingPlan.load(write(tmp_path, text)) for text in (GOOD, COUNTED))
    found = differences(one.universes(), other.universes())
    assert found == ["observation.kind", "observation.mean_count"]


def on_files(folder, more=""):
    (folder / "set").exists() or dataset(folder, attributes={"observation": RECORD.table()})
    text = changed(("[training]", "[training]\nsteps = 10"), ("[data]\nsimulations = 400", FILES))
    text = text.replace("Omega_m = [0.25, 0.35]\nsigma8 = [0.78, 0.95]\nn_s = [0.9, 1.0]", "")
    return write(folder, text.replace("size = 256.0", "size = 64.0") + more)


def test_a_dataset_tells_its_observation(tmp_path):
    plan = TrainingPlan.load(on_files(tmp_path))
    assert plan.record == RECORD and plan.network.input == "asinh"
    assert TrainingPlan.load(write(tmp_path, plan.resolved())).record == RECORD
    with pytest.raises(Exception, match="observation differs from the dataset.*structure is pm"):
        TrainingPlan.load(on_files(tmp_path, "[observation]\nsigma = 0.5\n"))


def test_a_dataset_with_a_target_that_is_of_its_observation(tmp_path):
    """Its range comes from the dataset, and no other is taken."""
    ranges = {"sigma8": (0.7, 0.9), "b1": (0.0, 1.0)}
    message = {"parameters": tuple(ranges), "priors": ranges}
    dataset(tmp_path, attributes={"observation": RECORD.table()}, **message)
    plan = TrainingPlan.load(on_files(tmp_path))
    assert plan.parameters == ("sigma8", "b1") and plan.record == RECORD
    for given, said in (
        ("b1 = [0.2, 0.8]", "bias b1 is from 0.2 to 0.8 in the training, from 0 to 1 in the data"),
        ("b1 = [-1.0, 2.0]", "priors.b1 = .*set were drawn from .0.0, 1.0.: give that, or leave"),
        ("amplitude = [0.9, 1.1]", "priors.amplitude = .*: the volumes in .*set all have the same"),
        ("Omega_m = [0.2, 0.4]", "priors are of Omega_m, the parameters in .* are sigma8"),
    ):
        path = on_files(tmp_path)
        path.write_text(path.read_text().replace("[priors]", f"[priors]\n{given}"))
        with pytest.raises(Exception, match=said):
            TrainingPlan.load(path)


def test_a_dataset_that_was_written_anew_is_refused(tmp_path, monkeypatch):
    """Between the training and its evaluation."""
    training = SavedTraining(TrainingFolder(tmp_path), TrainingPlan.load(on_files(tmp_path)), True)
    message = {"observation": RECORD.table()}
    found = SimpleNamespace(header=SimpleNamespace(attributes=message))
    monkeypatch.setattr(sources, "RecordDataset", lambda *_, **__: found)
    assert training.files("test") is found
    message["observation"] = BARE.table()
    with pytest.raises(
        ObservationError, match="the dataset in .*set is of another obs.*is 1lpt in"
    ):
        training.files("test")


@pytest.mark.parametrize(
    ("changes", "nuisances", "message"),
    [
        ({}, {}, None),
        ({"bias": {"b1": 0.2}, "sigma": 0.6}, {}, None),  # in the range of the training
        ({"redshift_space": None}, {}, "redshift_space is z in the training, none in the data"),
        ({"bias": {"b1": 2.2}}, {}, "bias b1 is from 0 to 1 in the training, 2.2 in the data"),
        ({"bias": None}, {}, "bias b1 is from 0 to 1 in the training, none in the data"),
        ({"sigma": 0.1}, {}, "sigma is from 0.25 to 0.75 in the training, 0.1 in the data"),
        ({"sigma": None}, {}, "sigma is 0.5 in the training, none in the data"),
        ({}, {"amplitude": (0.9, 1.1)}, "amplitude is 1 in the training, from 0.9 to 1.1 in"),
        ({"kind": "counts", "sigma": None, "mean_count": 2.0}, {}, "mean_count is none in"),
        ({"mask": Path("/m.npy")}, {}, "mask is none in the training, /m.npy in the data"),
        ({"redshifts": (1.0, 0.5, 0.0)}, {}, "redshifts is none in the training, [1, 0.5, 0] in"),
    ],
)
def test_data_of_another_observation_are_refused(changes, nuisances, message):
    keys = {**RECORD.options.to_table(), **changes}
    observed = observation_of({key: value for key, value in keys.items() if value is not None})
    data = ObservationRecord(observed, nuisances)
    volume = Volume(None, "v.zarr", observation=data.table())
    if message is None:
        assert check_observation(RECORD, volume) == []
        return
    with pytest.raises(ObservationError, match="v.zarr is of another obs.*" + re.escape(message)):
        check_observation(RECORD, volume)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"galaxies": {"log_M_min": 13.0, "alpha": 1.1, "seed": 4}}, None),
        ({"galaxies": {"log_M_min": 13.2}}, "galaxies log_M_min is 13 in the training, 13.2 in"),
        ({"galaxies": {"log_M_min": 13.0, "alpha": 1.3}}, "alpha is from 0.8 to 1.2 in the train"),
        (
            {"galaxies": {"log_M_min": 13.0, "concentration": 5.0}},
            "galaxies concentration is duffy2008 in the training, 5 in the data",
        ),
        ({"halos": {"minimum": 20}}, "halos is {minimum = 30} in the training, {} in the data"),
        ({"kind": "density", "halos": None, "galaxies": None}, "kind is galaxies in the training"),
    ],
)
def test_galaxies_of_another_observation_are_refused(tmp_path, changes, message):
    record = TrainingPlan.load(write(tmp_path, GALAXIES)).record
    keys = {**record.options.to_table(), **changes}
    data = ObservationRecord(observation_of({k: x for k, x in keys.items() if x is not None}))
    differences = "; ".join(record.differences(data))
    assert differences == "" if message is None else message in differences
    assert record.differences(ObservationRecord.of_table(record.table(), "v")) == []
    assert "galaxies = {log_M_min = 13}" in record.summary()


def test_masks_are_compared_by_their_values(tmp_path):
    for name, value in (("one", 1.0), ("same", 1.0), ("other", 0.5)):
        np.save(tmp_path / f"{name}.npy", np.full((4, 4, 4), value))
    one, same, other = (
        ObservationRecord(DensityOptions(mask=tmp_path / f"{name}.npy"))
        for name in ("one", "same", "other")
    )
    assert one.differences(same) == [] and len(one.differences(other)) == 1


def test_a_mask_that_was_written_anew_or_moved(tmp_path):
    """What a data set tells is the mask that it was made with."""
    mask = tmp_path / "mask.npy"
    np.save(mask, np.full((4, 4, 4), 0.5))
    here = ObservationRecord(DensityOptions(mask=mask))
    message = json.loads(json.dumps(here.table()))
    then = ObservationRecord.of_table(message, "dataset.json")
    moved = ObservationRecord.of_table(
        {**message, "mask": str(tmp_path / "gone.npy")}, "dataset.json"
    )
    assert here.differences(then) == here.differences(moved) == []
    np.save(mask, np.full((4, 4, 4), 0.6))
    (said,) = here.differences(then)
    assert said.startswith("mask has other values in the training than in the data")
    assert len(here.differences(moved)) == 1


def test_noise_in_a_file_has_an_amplitude_too(tmp_path):
    np.save(tmp_path / "s.npy", np.ones((4, 4, 4)))
    of_file = DensityOptions(sigma=tmp_path / "s.npy")
    here, louder = (ObservationRecord(of_file, {"noise_amplitude": ends}) for ends in RANGES)
    assert here.differences(ObservationRecord(of_file, {"noise_amplitude": (0.6, 1.4)})) == []
    message = "noise_amplitude is from 0.5 to 1.5 in the training, from 2 to 3 in the data"
    assert here.differences(louder) == [message]


def test_what_a_mask_leaves_out_is_not_checked(tmp_path):
    """In volumes that a network is asked about, as in those of its training."""
    mask = np.random.default_rng(2).uniform(-1, 1, (4, 6, 8)).clip(0)
    np.save(tmp_path / "mask.npy", mask[..., np.newaxis])
    values = np.where(mask > 0, 2.0, np.nan)
    volume = Volume(values, "v.npy")
    with pytest.raises(VolumeError, match="not finite"):
        check_values(volume, DensityOptions())
    masked = DensityOptions(mask=tmp_path / "mask.npy")
    check_values(volume, masked)
    check_values(Volume(np.where(mask > 0, 2.0, -1), "v.npy"), masked)
    with pytest.raises(VolumeError, match="negative"):
        check_values(Volume(np.where(mask > 0, -1, 2.0), "v.npy"), masked)
    unread = DensityOptions(mask=tmp_path / "none.npy")
    check_values(Volume(np.ones((4, 6, 8)), "v.npy"), unread)  # right, whatever the mask
    part, expected = values[2:, 3:], np.where(mask > 0, 2.0, 1.0)[2:, 3:]
    np.testing.assert_array_equal(as_observed(part, (2, 3), volume, masked), expected)
    counted = CountsOptions(mask=masked.mask, mean_count=1.0)
    found = as_observed(part[..., np.newaxis], (2, 3), volume, counted)
    np.testing.assert_array_equal(found[..., 0], np.where(expected == 2, 2, 0))


def test_files_tell_what_was_observed(tmp_path):
    record = RECORD.table()
    group = zarr.open_group(tmp_path / "v.zarr", mode="w", attributes={"observation": record})
    group.create_array("density", data=np.ones((4, 4, 4)))
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["density"] = np.ones((4, 4, 4))
        file["density"].attrs["observation"] = np.bytes_('{"redshift_space": "x"}')
    np.save(tmp_path / "v.npy", np.ones((4, 4, 4)))
    assert check_observation(RECORD, open_volume(tmp_path / "v.zarr")) == []
    with pytest.raises(ObservationError, match="redshift_space is z in the training, x in"):
        check_observation(RECORD, open_volume(tmp_path / "v.h5"))
    (note,) = check_observation(RECORD, open_volume(tmp_path / "v.npy"))
    assert note.startswith("The volume does not say how it was observed") and "sigma = 0.5" in note
    assert check_observation(BARE, open_volume(tmp_path / "v.npy")) == []
    damaged = Volume(None, "v.zarr", observation={"kind": "stars"})
    with pytest.raises(ObservationError, match="v.zarr: observation is not readable"):
        check_observation(RECORD, damaged)


MAPS = (
    GOOD.replace("steps = 5", "steps = 5\na_start = 0.3").replace(
        "[network]",
        '[network]\nname = "flowpm_dist.cosmoflow.network.keras_network:map_convolutions"',
    )
    + """[observation]
kind = "convergence"
[lightcone]
field_of_view = 10.0
pixels = 6
z_max = 0.3
sources = [{ redshift = 0.2 }, { redshift = 0.3 }]
shape_noise = { sigma_e = 0.26, n_eff = 10.0 }
"""
)


def test_maps_of_weak_lensing_are_one_layer_with_a_channel_for_each_source(tmp_path):
    plan = TrainingPlan.load(write(tmp_path, MAPS))
    assert (plan.input_shape, plan.cells, plan.channels) == ((6, 6, 1), 36, 2)
    assert (plan.box.grid, plan.width) == ((32, 32, 32), 6)
    assert (plan.network.input, plan.data.augment) == ("convergence", "symmetries")
    assert plan.record.options.line_of_sight == "z"  # views turn maps about it
    assert not plan.record.has_mean_one and not plan.record.options.is_positive
    again = TrainingPlan.load(write(tmp_path, plan.resolved()))
    assert again.resolved() == plan.resolved()
    other = TrainingPlan.load(write(tmp_path, MAPS.replace("n_eff = 10.0", "n_eff = 20.0")))
    assert differences(plan.universes(), other.universes()) == ["lightcone.shape_noise.n_eff"]
    assert buffer_bytes(plan, plan.box.grid, {}) == 400 * 36 * 2 * 4
    assert plan.warnings == ()
    fine = TrainingPlan.load(write(tmp_path, MAPS.replace("pixels = 6", "pixels = 64")))
    assert "would show as much" in fine.warnings[0]
    enough = int(fine.warnings[0].partition("; pixels = ")[2].partition(" ")[0])
    for pixels, count in ((enough * 6 // 5, 0), (enough * 13 // 10 + 1, 1)):
        other = TrainingPlan.load(write(tmp_path, MAPS.replace("pixels = 6", f"pixels = {pixels}")))
        assert len(other.warnings) == count
    assert dataset_memory(fine, fine.box.grid, {}) > dataset_memory(plan, plan.box.grid, {})
    long = TrainingPlan.load(write(tmp_path, MAPS.replace("256.0", "[256.0, 256.0, 512.0]")))
    assert long.input_shape == plan.input_shape  # a box need not be a cube
    with pytest.raises(ConfigError, match="maps are not split over ranks: use the mesh replica:2"):
        check_training_mesh(plan, 2, source=tmp_path, shape="row:2")
    with pytest.raises(ConfigError, match="has volumes for 1 of 3 ranks, and maps are not split"):
        check_training_mesh(plan, 3, source=tmp_path)
    with pytest.raises(OutputError, match="maps are simulated while a network learns"):
        check_dataset(plan, tmp_path / "set", ["train"])


def test_held_out_volumes_that_lost_a_file_are_simulated_again(tmp_path, monkeypatch):
    plan, folder = TrainingPlan.load(write(tmp_path, GOOD)), TrainingFolder(tmp_path / "run")
    mesh, simulated = ProcessMesh("replica:1"), []
    monkeypatch.setattr(held_out, "simulate_dataset", lambda *args: simulated.append(args[1]))

    def hold_out() -> list:
        simulated.clear()
        held_out.hold_out(plan, mesh, folder, None, maker=SimpleNamespace())
        return simulated

    counts = {"validation": plan.data.validation, "test": plan.data.test}
    assert hold_out() == [counts]
    header = header_of(plan, mesh, samples_per_file=1)
    for split in counts:
        with RecordWriter(folder.held_out, split, header) as writer:
            for index in range(2):
                y = np.ones(len(header.parameters))
                writer.write(np.ones(header.grid), y, seed=0, index=index)
    finish_dataset(folder.held_out, header)
    assert hold_out() == []
    (folder.held_out / "test-00001.tfrecord").unlink()
    assert hold_out() == [counts]


def test_an_n_of_z_that_was_changed_is_told(tmp_path):
    table = np.array([[0.0, 0.0], [0.1, 1.0], [0.25, 0.0]])
    np.savetxt(tmp_path / "nz.txt", table)
    text = MAPS.replace("{ redshift = 0.2 }", '{ file = "nz.txt" }')
    plan = TrainingPlan.load(write(tmp_path, text))
    training = SavedTraining(TrainingFolder(tmp_path / "run"), plan, complete=False)
    attributes = {"lightcone": json.loads(json.dumps(cone_table(plan.lightcone)))}
    header = DatasetHeader(plan.input_shape, ("sigma8",), channels=2, attributes=attributes)
    training.check_observation(header, tmp_path)
    np.savetxt(tmp_path / "nz.txt", table * [1, 2] + [0, 0.1])
    training = replace(training, plan=TrainingPlan.load(write(tmp_path, text)))
    with pytest.raises(ObservationError, match=r"another light cone: sources of \[lightcone\]"):
        training.check_observation(header, tmp_path)
    training.check_held_out()  # nothing is held out yet
    training.folder.held_out.mkdir(parents=True)
    (training.folder.held_out / "dataset.json").write_text("{")
    training.check_held_out()  # it will be made anew
    finish_dataset(training.folder.held_out, header)
    with pytest.raises(ObservationError, match="another light cone: sources"):
        training.check_held_out()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, []),
        ({"z_max": 0.5}, ["z_max"]),
        ({"alignment": {"amplitude": 1.0}}, ["alignment"]),
        ({"approximation": "ray tracing"}, ["ray_tracing"]),
        ({"sources": [{"name": "z = 0.2", "redshift": 0.2, "shift": 0.0}]}, ["sources"]),
    ],
)
def test_maps_of_another_light_cone(tmp_path, changed, message):
    cone = TrainingPlan.load(write(tmp_path, MAPS)).lightcone
    attributes = attributes_of(cone, 800.0, Cosmology.planck18(), [])
    assert differences_from_file(cone, json.loads(json.dumps(attributes | changed))) == message


SOURCES = "lightcone.sources = [{ redshift = 0.2 }, { redshift = 0.3 }]"
NOISE = "lightcone.shape_noise = { sigma_e = 0.26, n_eff = 10.0, seed = 1 }"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('network.name = "sc18"', '= "sc18": works on volumes; for maps give'),
        ('network.input = "log1p"', '= "log1p": does not go with'),
        ("lightcone.pixels = 5", "= 5: must be at least 6"),
        (NOISE, "seed is given, but data.seed sets the noise of"),
        ("priors.b1 = [0, 1]", "is given, but maps of weak lensing have"),
        ("data.augment = true", "= true: maps have edges"),
        ("priors.sigma_8 = [0, 1]", "is not a parameter; did you mean sigma8"),
        ('data.source = "dummy"\ndata.simulations = 400', 'not with "dummy"'),
        ('cosmology.transfer = "camb"', '= "camb": maps'),
        ("lightcone.z_max = 0.25\n" + SOURCES, "1. reach to z = 0.3"),
        ("lightcone.field_of_view = 19.0", "= 19"),
        ("evolution.a_stop = 0.9", "ends the run at a = 0.9"),
        ("priors.amplitude = [0.5, 2.0]", "is given, but maps"),
        ("observation.redshifts = [1, 0]", ""),
    ],
)
def test_mistakes_about_maps(tmp_path, keys, message):
    check_mistake(TrainingPlan, tmp_path, MAPS, keys, message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[lightcone]", "[run]\n[nothing]", "lightcone is missing"),
        ("shape_noise", "# shape_noise", "lightcone.shape_noise is missing: must be a table"),
        ('"convergence"', '"density"', 'lightcone is given, but observation.kind = "density"'),
        ("Omega_m", "w0 = [-1.1, -0.9]\n# Omega_m", "cosmology.Omega_m is missing"),
        ("Omega_m = [0.25, 0.35]", "", "cosmology.Omega_m is missing: fix it at"),
    ],
)
def test_what_maps_need(tmp_path, old, new, message):
    assert old in MAPS
    assert any(message in problem for problem in problems(tmp_path, MAPS.replace(old, new, 1)))


def test_volumes_are_no_convergence(tmp_path):
    text = GOOD.replace("[network]", '[network]\ninput = "convergence"')
    (found,) = problems(tmp_path, text)
    assert 'network.input = "convergence": does not go with observation.kind = "density"' in found
