"""Arrays with a table of parameters: cells, dtypes, rows and names, right or told what is wrong."""

import re
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from commands import flowpm_here, plain

from flowpm_dist.cosmoflow.evaluation import prediction
from flowpm_dist.cosmoflow.evaluation.evaluation import evaluate as judge
from flowpm_dist.cosmoflow.evaluation.results import Evaluation, check_evaluation_folder
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder, fresh_split
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.saved import SavedTraining
from flowpm_dist.cosmoflow.volumes.arrays import ArrayDataset, TableError, arrays_of, read_table
from flowpm_dist.cosmoflow.volumes.record_files import Block, RecordError
from flowpm_dist.cosmoflow.volumes.records import global_order
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.run_file import ConfigError
from meshimpl.process_mesh import ProcessMesh

ROWS = 20
RUN = """
[box]
grid = 32
size = 25.0
[network]
[training]
batch = 2
epochs = 3
[data]
source = "arrays"
volumes = "{volumes}"
table = "table.txt"
dtype = "float32"
unit = "density"
validation = 4
test = 3
seed = 7
"""


def volumes_of(count=ROWS, side=32, channels=()) -> np.ndarray:
    """Each a quarter of its number, plus where in it a cell is: the first ones are about 1."""
    cells = np.linspace(0, 0.5, side**3 * int(np.prod(channels))).reshape((side,) * 3 + channels)
    numbers = np.arange(count).reshape((-1,) + (1,) * cells.ndim)
    return (numbers / 4 + cells).astype(np.float32)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A table of three columns next to volumes of one channel."""
    np.save(tmp_path / "all.npy", volumes_of())
    numbers = np.stack([0.1 + 0.02 * np.arange(ROWS), np.arange(ROWS)[::-1], np.full(ROWS, 5)], 1)
    rows = [f"LH_{n} " + " ".join(map(str, row)) for n, row in enumerate(numbers)]
    (tmp_path / "table.txt").write_text("#Name Omega_m sigma_8 seed\n" + "\n".join(rows) + "\n")
    return tmp_path


def run(folder: Path, *changes: tuple[str, str], volumes="all.npy"):
    text = RUN.format(volumes=volumes).replace("seed = 7", 'seed = 7\nparameters = ["sigma_8"]')
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = folder / "run.toml"
    path.write_text(text)
    return TrainingPlan.load(path)


def problem(folder: Path, *changes: tuple[str, str], volumes="all.npy") -> str:
    with pytest.raises(ConfigError) as caught:
        run(folder, *changes, volumes=volumes)
    (found,) = caught.value.problems
    return str(found)


def test_a_run_file_on_arrays_resolves_and_splits_by_rows(folder):
    plan = run(folder)
    assert TrainingPlan.load(folder / "run.toml") == plan
    again = folder / "again.toml"
    again.write_text(plan.resolved())
    assert TrainingPlan.load(again) == plan
    assert (plan.parameters, plan.training.steps, plan.data.augment) == (
        ("sigma_8",), 3 * (ROWS - 7) // 2, "symmetries",
    )  # fmt: skip
    arrays = arrays_of(plan)
    rows = [arrays.rows(split).tolist() for split in ("train", "validation", "test")]
    assert [len(part) for part in rows] == [13, 4, 3] and sorted(sum(rows, [])) == list(range(ROWS))
    assert rows[2] != arrays_of(run(folder, ("seed = 7", "seed = 8"))).rows("test").tolist()
    assert arrays.header.priors == {"sigma_8": (-0.5, 19.5)}, "half a step beyond 0 and 19"
    assert arrays.header.box_size == (25.0,) * 3
    with pytest.raises(RecordError, match="no split 'tests'; the splits there are: train, valid"):
        arrays.rows("tests")


def test_each_rank_reads_its_block_of_what_is_in_the_order(folder):
    arrays, volumes = arrays_of(run(folder)), volumes_of()
    whole = ArrayDataset(arrays, "train")
    block = ArrayDataset(arrays, "train", (1, 2, 3, 4))
    batches = list(block.batches(4, (1, 2), seed=3, start_step=2, steps=5))
    assert len(batches) == 5 and block.block_shape == (16, 8, 32, 1) and len(whole) == 13
    order = np.concatenate([global_order(len(whole), 3, epoch) for epoch in range(3)])
    for step, (found, y, index) in enumerate(batches, 2):
        wanted = arrays.rows("train")[order[4 * step + 1 : 4 * step + 3]]
        assert index.tolist() == wanted.tolist()
        np.testing.assert_array_equal(found[..., 0], volumes[wanted][:, 16:, 24:])
        np.testing.assert_array_equal(y[:, 0], 19.0 - wanted)
    endless = iter(whole.batches(3))
    assert [len(next(endless)[0]) for _ in range(9)] == [3] * 9


@pytest.mark.parametrize("channels", [(), (2,)])
def test_hdf5_and_a_file_each_hold_the_same(folder, channels):
    volumes = volumes_of(channels=channels)
    with h5py.File(folder / "all.h5", "w") as file:
        file["grids/density"] = volumes
    for number, volume in enumerate(volumes):
        (folder / f"{number}").mkdir(exist_ok=True)
        np.save(folder / f"{number}" / "df.npy", volume)
    for name in ("all.h5:grids/density", "{}/df.npy"):
        arrays = arrays_of(run(folder, volumes=name))
        assert arrays.header.channels == (channels or (1,))[0]
        np.testing.assert_array_equal(arrays.read(5), volumes[5].reshape(32, 32, 32, -1))
        assert all(path.exists() for path in arrays.files)
    np.save(folder / "3/df.npy", volumes[3][:16])
    with pytest.raises(RecordError, match=r"3/df.npy has the shape \[16, 32, 32.*like the fir"):
        arrays.read(3)
    (folder / "3/df.npy").unlink()
    assert re.search("3/df.npy is missing; .* has 20 rows", problem(folder, volumes="{}/df.npy"))


def test_what_a_damaged_array_makes_hdf5_raise_names_the_file(folder):
    with h5py.File(folder / "all.h5", "w") as file:
        volumes = file.create_dataset(
            "rho", data=volumes_of(), chunks=(1, 32, 32, 32), fletcher32=True
        )
        chunk = volumes.id.get_chunk_info(19)
    with open(folder / "all.h5", "r+b") as file:
        file.seek(chunk.byte_offset + 100)
        file.write(b"\xff\xff\xff")
    for unit in ("density", "mass"):
        change = ('unit = "density"', f'unit = "{unit}"')
        arrays = arrays_of(run(folder, change, volumes="all.h5:rho"))
        with pytest.raises(RecordError, match="all.h5:rho cannot be read"):
            arrays.read(19)


def test_units_make_a_density_of_mean_one(folder):
    volumes = volumes_of()
    cut = np.s_[16:, :16]
    for unit, stored, wanted in (
        ("overdensity", volumes - 1, volumes),
        ("mass", 1e10 * (volumes + 1), None),
    ):
        np.save(folder / "all.npy", stored.astype(np.float32))
        arrays = arrays_of(run(folder, ('"density"', f'"{unit}"')))
        if wanted is None:
            wanted = (volumes + 1) / (volumes + 1).mean(axis=(1, 2, 3), keepdims=True)
        assert arrays.header.unit == ("mean density 1" if unit == "mass" else unit)
        found = arrays.read(6, Block(1, 2, 0, 2))
        np.testing.assert_allclose(found[..., 0], wanted[6][cut], rtol=1e-5, atol=1e-6)
    for unit, wrong in (("density", 1e10 * volumes), ("overdensity", volumes / volumes[:8].mean())):
        np.save(folder / "all.npy", wrong.astype(np.float32))
        message = problem(folder, ('"density"', f'"{unit}"'))
        assert (
            f'data.unit = "{unit}" it must be from' in message and "has volumes of mean" in message
        )
    below = volumes.copy()
    below[1, 0, 0, 0] = -1
    np.save(folder / "all.npy", below)
    with pytest.raises(RecordError, match="volume 1 of .*all.npy .* negative or not finite"):
        arrays_of(run(folder)).read(1)
    np.save(folder / "all.npy", np.where(volumes > 1.5, np.nan, volumes))
    with pytest.raises(RecordError, match="volume 6 of .* not finite"):
        arrays_of(run(folder)).read(6)


@pytest.mark.parametrize("unit", ["density", "mass"])
def test_predict_asks_about_the_volume_that_evaluate_does(folder, monkeypatch, unit):
    """A volume of mean 1.2 keeps it, unless arrays hold masses."""
    stored = volumes_of() + 1
    stored *= 1.2 / stored.mean(axis=(1, 2, 3), keepdims=True)
    np.save(folder / "all.npy", stored)
    np.save(folder / "one.npy", stored[5])
    plan = run(folder, ('"density"', f'"{unit}"'))
    requested = []

    def predict(block):
        requested.append(block[0])
        raise InterruptedError

    network = SimpleNamespace(predict=predict, whole_outputs=None)
    monkeypatch.setattr(
        prediction,
        "trained_network",
        lambda *_: SimpleNamespace(network=network, standardiser=0, step=0),
    )
    training = SavedTraining(TrainingFolder(folder), plan, True)
    with pytest.raises(InterruptedError):
        prediction.predict_volume(
            training, folder / "one.npy", ProcessMesh("replica:1"), Progress(rank=1)
        )
    wanted = arrays_of(plan).read(5)[..., 0]
    assert wanted.mean() == pytest.approx(1.0 if unit == "mass" else 1.2, rel=1e-5)
    np.testing.assert_allclose(requested[0], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("grid = 32", "grid = 64")], r"shape \[20, 32, 32, 32\]; must be \['volumes', 64, 64"),
        ([('"float32"', '"float64"')], "holds float32, data.dtype is 'float64'"),
        ([("all.npy", "none.npy")], "none.npy is no readable .npy or HDF5 file"),
        ([("validation = 4", "validation = 1")], "13|16 .* each must have at least .* = 2"),
        ([("validation = 4", "validation = 16")], "20 volumes are divided into 1 for train"),
        ([('"sigma_8"', '"s8"')], "data.table = .*table.txt.: .* no column 's8'; .* sigma_8"),
        ([('"sigma_8"', '"seed"')], "seed is 5 in all rows"),
        ([('"sigma_8"', '"Name"')], "line 2: Name = 'LH_0' is no finite number"),
        ([('dtype = "float32"\n', "")], "data.dtype is missing: must be"),
        ([('unit = "density"\n', "")], "data.unit is missing"),
        ([("epochs = 3", "epochs = 3\nsteps = 3")], "both are given"),
        ([("seed = 7", 'seed = 7\nfolder = "x"')], 'data.folder .*source = "files", not with "arr'),
        ([('"sigma_8"', '"Omega_m"'), ("[box]", "[priors]\nOmega_m = [0.2, 0.5]\n[box]")],
         r"Omega_m is from 0.1 to 0.48, but priors.Omega_m is \[0.2, 0.5\]"),
    ],
)  # fmt: skip
def test_what_does_not_match_is_told(folder, changes, message):
    assert re.search(message, problem(folder, *changes))


def test_rows_and_volumes_that_differ_in_number(folder):
    np.save(folder / "all.npy", volumes_of(19))
    found = problem(folder)
    assert re.search("all.npy holds 19 volumes, .*table.txt has 20 rows: one row for each", found)
    (folder / "all.npy").write_bytes(b"not an array")
    assert "no readable .npy" in problem(folder)
    with h5py.File(folder / "all.h5", "w") as file:
        file["density"] = volumes_of(2)
    assert "all.h5 has no data set 'x'" in problem(folder, volumes="all.h5:x")
    assert "those it has are density" in problem(folder, volumes="all.h5")


@pytest.mark.parametrize(
    ("text", "columns", "names"),
    [
        ("Om,s8\n0.3,0.8\n\n0.2,0.7\n", None, ("Om", "s8")),
        ('"Om", "s8"\n# a remark\n0.3, 0.8\n0.2, 0.7', None, ("Om", "s8")),
        ("0.3 0.8\n0.2 0.7\n", ("a", "b"), ("a", "b")),
        ("\ufeff# Om s8\n3e-1 0.8\n0.2\t0.7\n", ("a", "b"), ("a", "b")),
    ],
)
def test_tables_of_several_kinds(tmp_path, text, columns, names):
    path = tmp_path / "table"
    path.write_text(text)
    found, values = read_table(path, columns)
    assert found == names
    np.testing.assert_array_equal(values, [[0.3, 0.8], [0.2, 0.7]])
    np.testing.assert_array_equal(read_table(path, columns, names[1:])[1], [[0.8], [0.7]])


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("0.3 0.8\n", None, "does not name its 2 columns: give data.columns"),
        ("a b\n1 2\n", ("a", "b", "c"), "has 2 columns, data.columns names 3"),
        ("a b\n1 2\n1 2 3\n", None, "line 3: 3 values for 2 columns"),
        ("a b\n1 nan\n", None, "line 2: b = 'nan' is no finite number"),
        ("a b\n", None, "has no rows"),
        ("#\n\n", None, "is empty"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path, text, columns, message):
    (tmp_path / "table").write_text(text)
    with pytest.raises(TableError, match=message):
        read_table(tmp_path / "table", columns)
    with pytest.raises(TableError, match="cannot read the table"):
        read_table(tmp_path / "none")


def begun_in(folder: Path) -> TrainingFolder:
    """A training with the files that other commands ask for before they load its weights."""
    begun = TrainingFolder(folder / "begun")
    begun.begin(resume=False)
    begun.run_file.write_text(run(folder).resolved())
    begun.checkpoints.path.mkdir()
    (begun.checkpoints.path / "step-1.index").touch()
    begun.write_mark(complete=True, step=1, steps=1)
    begun.release()
    return begun


def test_there_are_no_fresh_volumes_in_arrays(folder):
    refused = flowpm_here("evaluate", str(begun_in(folder).path), "--fresh", "1", "--check")
    assert refused.returncode == 2
    assert "fresh ones cannot be made; leave out --fresh" in plain(refused.stderr)


WRITTEN = {
    "evaluate": ["test-set.json", "summaries", "posterior/a.npz", "statistics", "evaluation"],
    "predict": ["predictions", "predictions/one.npy"],
}


@pytest.mark.parametrize("name", [*WRITTEN["evaluate"], *WRITTEN["predict"], "tensorboard"])
def test_answers_are_not_written_through_links_in_a_training(folder, name):
    """What a command only reads there may be a link, as to a scratch disk.

    Predictions are written only where a posterior was fitted.
    """
    training = begun_in(folder)
    np.save(folder / "one.npy", volumes_of(1)[0])
    link, posterior = training.path / name, training.posterior("flow")
    posterior.parent.mkdir()
    posterior.touch()
    link.parent.mkdir(exist_ok=True)
    (folder / "scratch").mkdir()
    if name == "posterior/a.npz" or name == "test-set.json":
        link.symlink_to(folder / "one.npy")
    else:
        link.symlink_to(folder / "scratch")
    ask = ["predict", str(training.path), str(folder / "one.npy"), "--box-size", "25"]
    elsewhere = ["--output", str(folder / "judged")]
    for words in (["evaluate", str(training.path)], ask):
        done = flowpm_here(*words, "--check")
        assert done.returncode == (2 if name in WRITTEN[words[0]] else 0), done.stderr
        if done.returncode:
            assert f"error: {link} is a symbolic link, and" in done.stderr
            there = "written there" if words == ask else "an evaluation writes there"
            assert there in plain(done.stderr)
        if words != ask:
            moved = flowpm_here(*words, *elsewhere, "--check")
            assert moved.returncode == (done.returncode if name != "evaluation" else 0)
            assert "--output" not in moved.stderr


@pytest.mark.parametrize("name", ["summaries", "posterior", "statistics", "fresh/1"])
def test_a_script_does_not_judge_through_links_either(folder, name):
    """It is refused before the ranks meet for the first time."""
    training = begun_in(folder)
    other, link = SavedTraining(training, None, True), training.path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(folder)
    split = fresh_split(1) if "fresh" in name else "test"
    with pytest.raises(OutputError, match=f"{link} is a symbolic link, and an evaluation writes"):
        judge([other], None, None, split=split)


def test_a_script_does_not_write_an_evaluation_through_a_link(folder):
    own, scratch = folder / "evaluation", folder / "scratch"
    scratch.mkdir()
    own.symlink_to(scratch)
    with pytest.raises(OutputError, match=f"{own} is a symbolic link"):
        Evaluation.write(SimpleNamespace(folder=own))
    assert not [*scratch.iterdir()]
    check_evaluation_folder(own)  # which was given


def test_weights_of_another_division_of_the_same_volumes_are_refused(folder):
    """They have seen volumes that are held out now."""
    begun = begun_in(folder)
    start = "batch = 2", f'batch = 2\nstart_from = "{begun.path}"'
    words = ["train", str(folder / "run.toml"), "--check", "--output", str(folder / "new")]
    run(folder, start, ("seed = 7", "seed = 8"), ("test = 3", "test = 5"))
    refused = flowpm_here(*words)
    assert refused.returncode == 2
    assert "were divided otherwise there" in plain(refused.stderr)
    assert "use its data.seed, data.test" in plain(refused.stderr)
    run(folder, start)
    assert flowpm_here(*words).returncode == 0
