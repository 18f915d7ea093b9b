"""The commands of networks: early messages about mistakes, and resumed trainings."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import pytest
from commands import COMMAND, flowpm, flowpm_and_loaded, flowpm_here, folder_with, plain
from run_files import PRIORS, with_keys

from flowpm_dist.cosmoflow.planning.folder import MARK, TrainingFolder
from flowpm_dist.cosmoflow.planning.memory import training_bytes
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.dataset import UNFINISHED
from flowpm_dist.evolution.corrections import PotentialFilter
from flowpm_dist.jobs.run_file import ConfigError
from meshimpl import launch

RUN = (
    PRIORS
    + """[box]
grid = 32
size = 64.0
[evolution]
drawn = [{steps = 2}, {integrator = "bullfrog", steps = [2, 3]}]
[training]
batch = 2
optimiser = "sgd"
calibrate = 4
validate_every = 6
checkpoint_every = 3
[data]
simulations = 6
reuse = 4
fill = 4
validation = 2
test = 4
"""
)
ITSELF = '[training]\nstart_from = "run-training"'
STEPS = 12
needs_ranks = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed")


here = folder_with(RUN)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The message about a mistake."""
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    return plain(done.stderr)


def error_without_tensorflow(*words: str) -> str:
    """The message about a mistake, from a process that has not loaded TensorFlow, nor MPI."""
    done, loaded = flowpm_and_loaded(*words)
    assert not loaded & {"tensorflow", "horovod", "mpi4py"}
    return error_of(done)


def test_mistakes_are_reported_before_anything_heavy_is_imported(here):
    (here / "volume.npy").touch()
    for words in (
        "train run.toml --ranks 5",
        "dataset run.toml --output run.toml",
        "evaluate none",
        "predict none volume.npy",
    ):
        error_without_tensorflow(*words.split())


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        (("batch = 2", "batsch = 2"), [], "training.batsch is not a key; did you mean batch?"),
        (("", ""), ["--mesh", "row:3"], "row:3': 3 places, but the job has 1 rank"),
        (("", ""), ["--output", "."], "holds run.toml from elsewhere"),
        (("", ""), ["--output", ".."], "holds other things ("),
        (("", ""), ["--resume"], "run-training holds no training to resume"),
        (("[training]", '[training]\nstart_from = "no"'), [], "no holds no training: give the"),
        (
            ("[training]", ITSELF),
            ["--overwrite"],
            "the folder of this training itself: give",
        ),
        (("", ""), ["--resume", "--overwrite"], "--overwrite replaces it: give one"),
    ],
)
def test_mistakes_of_train_have_status_2_and_leave_nothing(here, change, words, said):
    (here / "run.toml").write_text(RUN.replace(*change))
    assert said in error_of(flowpm_here("train", "run.toml", *words))
    assert [path.name for path in here.iterdir()] == ["run.toml"]


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    text = RUN
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "changed.toml"
    path.write_text(text)
    return path


def check_same(then, now, source: Path, output: Path) -> None:
    """As the command compares the training in `output` with a run file."""
    begun = f"the training in {output}"
    begun_with = output / "begun.toml"
    begun_with.write_text(then.resolved())
    now.check_resumed(begun_with, source, begun)


def test_a_training_is_resumed_only_as_the_same(here):
    then = TrainingPlan.load(here / "run.toml")
    allowed = changed(
        here,
        ("checkpoint_every = 3", "checkpoint_every = 7\nkeep = 9\nsteps = 30\nwarmup = 1"),
        ("validate_every = 6", "validate_every = 5"),
    )
    text = allowed.read_text()
    allowed.write_text(text + '[mesh]\nshape = "replica:2"\n')
    check_same(then, TrainingPlan.load(allowed), allowed, here)
    other = changed(
        here,
        ("batch = 2", "batch = 1"),
        ("Omega_b", "A_s = 2e-9\nOmega_b"),
        ("sigma8 = [0.78, 0.95]", ""),
    )
    with pytest.raises(ConfigError) as found:
        check_same(then, TrainingPlan.load(other), other, here)
    keys = {"cosmology.A_s", "priors.sigma8", "training.batch", "training.warmup"}
    assert {problem.key for problem in found.value.problems} == keys
    assert f"training.batch = 1: the training in {here} has 2" in str(found.value)
    assert "priors.sigma8 is not given: the training in" in str(found.value)
    fewer = changed(here, ("batch = 2", "batch = 2\nsteps = 10\nwarmup = 1"))
    with pytest.raises(ConfigError, match="training.steps = 10: .* has 12; .* that or more"):
        check_same(then, TrainingPlan.load(fewer), fewer, here)
    damaged = here / "damaged.toml"
    damaged.write_text("[training\nbatch = 2")
    with pytest.raises(ConfigError, match=r"damaged.toml: 1 problem\n  not TOML"):
        then.check_resumed(damaged, here / "run.toml", "the training")


def test_a_buffer_larger_than_the_memory_is_refused(here):
    cells = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    many = 2 * (cells // 32**3 + 1)
    path = changed(here, ("simulations = 6", f"simulations = {many}"))
    done = flowpm_here("train", str(path))
    assert done.returncode == 2
    fits = re.search(r"; data.buffer = (\d+)\b.* would fit", error_of(done))[1]
    assert many // 10 < int(fits) < many
    fitting = (f"simulations = {many}", f"simulations = {many}\nbuffer = {fits}")
    path.write_text(path.read_text().replace(*fitting))
    assert flowpm_here("train", str(path), "--check").returncode == 0


def test_a_buffer_of_less_than_a_batch_is_no_advice(here, monkeypatch):
    little = launch.HostMemory(limit=2**29, free=2**29, is_container=True)
    monkeypatch.setattr(launch, "host_memory", lambda: little)
    done = flowpm_here("train", "run.toml")
    assert done.returncode == 2
    assert "has 512.0 MiB, which is too little for any grid" in error_of(done)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def losses(folder: Path) -> list[tuple[str, str, str]]:
    """As they are written."""
    return [(row["step"], row["loss"], row["validation_loss"]) for row in rows(folder)]


def start_training(ranks: int, output: str, steps: int) -> subprocess.Popen[str]:
    """A training that has done so many steps."""
    process = subprocess.Popen(
        [*COMMAND, "train", "run.toml", "--ranks", str(ranks), "--output", output],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    limit = time.monotonic() + 240
    while time.monotonic() < limit and process.poll() is None:
        if Path(output, "metrics.csv").exists() and len(rows(Path(output))) >= steps:
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(process.communicate())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training that nothing interrupted, on as many ranks as there can be; and what it said."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run.toml").write_text(RUN)
    ranks = "1" if find_spec("horovod") is None else "2"
    done = flowpm("train", "run.toml", "--ranks", ranks, "--output", "whole", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "whole", done


@pytest.mark.budget(60)
def test_a_training_leaves_all_it_names(trained):
    folder, done = trained
    for name in ("metrics.csv", "training.png", "phases.png", "phases.json", "run.toml"):
        assert name in done.stdout
        assert (folder / name).is_file()
    for words in (r"compute \d+ %", f"{STEPS} of {STEPS} steps: loss", r"samples/s",
                  "Next: flowpm-dist evaluate whole"):  # fmt: skip
        assert len(re.findall(words, done.stdout)) == 1, words
    assert f"loss {float(losses(folder)[-1][1]):.4f}" in done.stdout
    assert [int(row["step"]) for row in rows(folder)] == list(range(STEPS))
    page = (folder / "report.html").read_text()
    for words in ("training, complete", "training.png", "metrics.csv", "seconds per step"):
        assert words in page, words
    mark = json.loads((folder / MARK).read_text())
    assert mark["complete"] and mark["step"] == STEPS
    written = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    config = TrainingPlan.load(folder / "run.toml")
    assert written < training_bytes(config, TrainingFolder(folder / "none")) < 3 * written


def test_a_training_is_not_replaced_unless_asked_and_ends_once(trained):
    folder, _ = trained
    words = ["train", str(folder.parent / "run.toml"), "--output", str(folder)]
    before = (folder / "metrics.csv").read_bytes()
    assert "holds a training: add --resume to go on with it" in error_of(flowpm_here(*words))
    done = flowpm_here(*words, "--resume")
    assert done.returncode == 0
    assert done.stdout.strip() == f"The training in {folder} is complete: {STEPS} steps."
    assert (folder / "metrics.csv").read_bytes() == before


@pytest.mark.long
@pytest.mark.budget(70)
@needs_ranks
def test_a_training_that_ranks_began_goes_on_to_the_same_losses(here, trained):
    process = start_training(2, "stopped", 4)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    step = int(
        re.search(r"stopped by SIGTERM after step (\d+) of 12; go on with --resume", said)[1]
    )
    assert step < STEPS
    assert "Traceback" not in said
    assert Path("stopped", "checkpoints", f"step-{step}.index").exists()
    assert len(rows(Path("stopped"))) == step
    done = flowpm_here("train", "run.toml", "--output", "stopped", "--resume")
    assert done.returncode == 0, done.stderr
    now, known = losses(Path("stopped")), losses(trained[0])
    assert now[:step] == known[:step]
    # By one rank, in single precision.
    for found, expected in zip(now, known, strict=True):
        assert [bool(value) for value in found] == [bool(value) for value in expected]
        numbers = ([float(value) for value in row if value] for row in (found, expected))
        np.testing.assert_allclose(*numbers, rtol=1e-3)


@pytest.mark.long
@pytest.mark.budget(40)
def test_a_killed_training_goes_on_from_its_last_checkpoint(here):
    """If the correction of its force is still the same."""
    begin = PotentialFilter.begun()
    begin.save("c.json")
    tables = 'evolution.drawn = [{correction = "c.json"}, {steps = 2}]'
    Path("run.toml").write_text(with_keys(RUN, tables))
    process = start_training(1, "killed", 4)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    (Path("killed") / "metrics.csv").open("a").write("4,10,6,0.1")  # cut short
    resume = ("train", "run.toml", "--output", "killed", "--resume")
    begin.with_theta(begin.theta + 1e-12).save("c.json")
    changed = error_of(flowpm_here(*resume))
    assert 'c.json": it has other values than when the training in killed was begun' in changed
    begin.save("c.json")
    done = flowpm_here(*resume)
    assert done.returncode == 0, done.stderr
    assert re.search(r"training from step (3|6) of 12", done.stderr)
    assert [int(row["step"]) for row in rows(Path("killed"))] == list(range(STEPS))


@pytest.mark.budget(60)
def test_a_network_is_judged_and_asked(here, trained):
    folder, _ = trained
    done = flowpm_here("evaluate", str(folder))
    assert done.returncode == 0, done.stderr
    for word in ("On 4 test samples", "RMSE", "sigma8", "ridge on log P(k)"):
        assert word in plain(done.stdout)
    scores = json.loads((folder / "evaluation" / "scores.json").read_text())
    assert set(scores["collapse"].values()) <= set(done.stdout.splitlines())
    page = (folder / "evaluation" / "report.html").read_text()
    assert (
        flowpm_here("report", str(folder / "evaluation"), "--output", "again.html").returncode == 0
    )
    assert Path("again.html").read_text() == page  # made again, from the same files
    for words in ("evaluation, complete", "predicted.png", "table.csv", "ridge on log P(k)", "sgd"):
        assert words in page, words
    refused = error_of(
        flowpm_here("evaluate", str(folder), "--fresh", "1", "--split", "validation")
    )
    assert "--fresh and --split validation are two test sets: give one" in refused
    done = flowpm_here("evaluate", str(folder), "--fresh", "1")
    assert done.returncode == 0, done.stderr
    assert "On 4 fresh-1 samples, which no method was fitted to" in plain(done.stdout)
    assert (folder / "fresh" / "1" / "evaluation" / "scores.json").exists()
    np.save("volume.npy", np.random.default_rng(0).lognormal(size=(32, 32, 32)))
    done = flowpm_here("predict", str(folder), "volume.npy", "--box-size", "64")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\w+) *= ([-\d.]+) ± ([\d.e-]+)$", done.stdout, re.MULTILINE)
    assert [name for name, _, _ in found] == ["Omega_m", "sigma8"]
    assert "divided by its mean" in done.stdout
    assert "must be (32, 32, 32)" not in done.stdout
    exported = flowpm_here("export", str(folder), "--output", "network")
    assert exported.returncode == 0, exported.stderr
    said = exported.stdout.partition("\n\n")[2]  # how to ask it, without this package
    script = (
        f"import numpy as np\nvolumes = np.load('volume.npy')[None].astype('float32')\n{said}\n"
    )
    script += 'print(*found["mean"][0].numpy(), *found["sigma"][0].numpy())'
    requested = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True)
    assert requested.returncode == 0, requested.stderr
    numbers = [float(number) for _, *both in found for number in both]
    np.testing.assert_allclose([float(n) for n in requested.stdout.split()],
                               [*numbers[::2], *numbers[1::2]], rtol=0.05)  # fmt: skip
    assert "holds an exported network: add --overwrite to replace it" in error_of(
        flowpm_here("export", str(folder), "--output", "network")
    )
    assert "holds other things" in error_of(
        flowpm_here("export", str(folder), "--output", str(here))
    )


def test_a_volume_that_does_not_fit_is_refused_before_tensorflow_is_loaded(here):
    """`read_training` asks for no more than these files of a training."""
    folder = TrainingFolder(here / "trained")
    folder.checkpoints.path.mkdir(parents=True)
    (folder.checkpoints.path / "step-1.index").touch()
    folder.run_file.write_text(TrainingPlan.load("run.toml").resolved())
    folder.write_mark(complete=True, step=STEPS)
    np.save("small.npy", np.ones((16, 16, 16)))
    assert "must be (32, 32, 32)" in error_without_tensorflow("predict", "trained", "small.npy")
    np.save("stack.npy", np.ones((5, 32, 32, 32), np.float32))
    assert "holds 5 volumes, and predict takes one" in error_of(
        flowpm_here("predict", "trained", "stack.npy")
    )
    np.save("volume.npy", np.ones((32, 32, 32)))
    nowhere = error_without_tensorflow("predict", "trained", "volume.npy", "--output", "there")
    assert "--output there: trained has no posterior whose samples could go there" in nowhere
    for words, said in (
        ("--head flwo", "no head 'flwo'"),
        ("--baseline pwr", "no statistic 'pwr'"),
    ):
        assert said in error_without_tensorflow("evaluate", "trained", *words.split(), "--check")
    wrong_box = error_without_tensorflow("predict", "trained", "volume.npy", "--box-size", "128")
    assert "is a box of 128 Mpc/h: the network was trained on 32^3 cells" in wrong_box
    for value, said in ((np.nan, "has 1 values that are not finite"), (-1, "has 1 negative")):
        values = np.ones((32, 32, 32))
        values[3, 4, 5] = value
        np.save("wrong.npy", values)
        assert said in error_of(flowpm_here("predict", "trained", "wrong.npy"))
    with h5py.File("own.h5", "w") as file:
        file["density"] = np.ones((32, 32, 32))
        file.attrs["box_size"] = 128.0
    said = error_of(flowpm_here("predict", "trained", "own.h5", "--box-size", "64"))
    assert "own.h5:density states a box of 128 Mpc/h, but --box-size is 64" in said


@pytest.mark.parametrize("others", [["train-00000.tfrecord"], ["notes.txt", "dataset.json"]])
def test_a_dataset_goes_only_where_nothing_else_is(here, others):
    folder = here / "somebodys"
    folder.mkdir()
    for name in others:
        (folder / name).write_text("mine")
    for more in ([], ["--overwrite"]):
        said = error_of(flowpm_here("dataset", "run.toml", "--output", "somebodys", *more))
        assert f"somebodys holds other things ({', '.join(sorted(others))}), and a dataset" in said
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        others, "mine"
    )


def test_a_training_that_simulates_nothing_makes_no_dataset(here):
    Path("dummy.toml").write_text(
        f'{PRIORS}[box]\ngrid = 32\nsize = 64.0\n[training]\nsteps = 3\n[data]\nsource = "dummy"\n'
    )
    said = error_without_tensorflow("dataset", "dummy.toml", "--output", "set")
    assert 'data.source = "dummy" simulates nothing' in said


def test_a_dataset_is_one_to_train_on(here):
    done = flowpm_here("dataset", "run.toml", "--output", "set", "--samples-per-file", "4")
    assert done.returncode == 0, done.stderr
    assert "6 of train" in done.stdout
    assert "add --overwrite" in error_of(
        flowpm_here("dataset", "run.toml", "--output", "set", "--split", "test")
    )
    assert not Path("set", UNFINISHED).exists()
    Path("files.toml").write_text(
        "[box]\ngrid = 32\nsize = 64.0\n[cosmology]\n[priors]\n[training]\nbatch = 2\nsteps = 3\n"
        '[data]\nsource = "files"\nfolder = "set"\n'
    )
    assert TrainingPlan.load("files.toml").parameters == ("Omega_m", "sigma8")
