"""`flowpm-dist study`: its points, its tables, and what is left of it when it is stopped."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import psutil
import pytest
from commands import flowpm_here, plain
from rank_jobs import needs_horovod

from flowpm_dist.io.files import UnreadableError
from flowpm_dist.jobs.job import PROGRAM
from flowpm_dist.jobs.locks import Lock
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.studies.measures import measured
from flowpm_dist.studies.options import StudyOptions
from flowpm_dist.studies.process import (
    COMPLETE,
    FAILED,
    NO_MEMORY,
    STOPPED,
    memory_of,
    run,
)
from flowpm_dist.studies.study import StudyFolder
from flowpm_dist.studies.summary import Run, groups_of, label_of, summary_rows, summary_text
from flowpm_dist.studies.workers import CLAIM, StopSignals, share

SCRIPT = """
import argparse, csv, json, os, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--rate", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--sleep", type=float, default=0)
parser.add_argument("--mib", type=int, default=0)
options = parser.parse_args()
if int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)):
    sys.exit()
ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
with open(Path(__file__).with_name("begun.txt"), "a") as file:
    file.write(f"{options.output.parent.name}\\n")
if options.rate < 0:
    sys.exit("error: a rate below 0")
room = bytearray(options.mib * options.batch * 2**20)
time.sleep(options.sleep)
columns = ("step", "samples", "epoch", "loss", "accuracy", "read_seconds", "compute_seconds")
with open(options.output / "metrics.csv", "w") as file:
    table = csv.writer(file)
    table.writerow(columns)
    for n in (1, 2, 3, 4):
        first = {1: 9.0, 4: 2.0}.get(n, 0.0)  # medians of rows 2 to 4 do not see these
        compute = first + 0.1 * options.batch + 0.01 * n + 0.3 * options.seed
        table.writerow([10 * n, 10 * n * options.batch * ranks, n, 1 / n, 0.2 * n, 0.5, compute])
threads = os.environ.get("MESHIMPL_THREADS", "own")
about = {"host": threads, "duration [s]": 20.0, "versions": {"python": "3"}}
(options.output / "provenance.json").write_text(json.dumps(about))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a script that a study can run."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    return tmp_path


def study_file(text: str, vary: str = "", subject: str = "script.py") -> Path:
    path = Path("study.toml")
    path.write_text(f'[study]\nsubject = "{subject}"\n{text}\n[vary]\n{vary}\n')
    return path


def rows_of(path: str | Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def begun() -> list[str]:
    """The names of the runs that were begun, in order."""
    return Path("begun.txt").read_text().split()


def test_keys_with_the_same_last_word_are_whole_in_a_label():
    steps = {"evolution.steps": 2, "truth.steps": 40, "training.batch": 8}
    assert label_of(steps) == "evolution.steps 2, truth.steps 40, batch 8"


SIMULATION = """
[box]
grid = 8
size = [16.0, 16.0, 16.0]
[cosmology]
Omega_m = 0.3
Omega_b = 0.05
h = 0.7
n_s = 0.96
sigma8 = 0.8
[initial]
seed = 3
[evolution]
steps = 3
[output]
fields = []
"""


def test_points_are_combinations_repeated(here):
    """Each combination, first all of one repetition; seeds grow; the order is random, and fixed."""
    path = study_file('ranks = [1, 2]\nrepeats = 2\nseeds = ["seed"]', "batch = [4, 8]")
    options = StudyOptions.load(path)
    points = options.points()
    assert [(p.varied["batch"], p.ranks, p.repeat, p.settings["seed"]) for p in points] == [
        (4, 1, 0, 0), (4, 2, 0, 0), (8, 1, 0, 0), (8, 2, 0, 0),
        (4, 1, 1, 1), (4, 2, 1, 1), (8, 1, 1, 1), (8, 2, 1, 1),
    ]  # fmt: skip
    order = [point.number for point in options.in_random_order()]
    assert sorted(order) == list(range(8)) != order
    assert order == [point.number for point in options.in_random_order()]


def test_a_resolved_study_is_a_study_file(here):
    options = StudyOptions.load(study_file("ranks = [1, 2]", "batch = [4, 8]"))
    Path("resolved.toml").write_text(options.resolved())
    assert StudyOptions.load("resolved.toml").points() == options.points()


def test_a_mesh_goes_with_its_ranks(here):
    Path("run.toml").write_text(SIMULATION)
    meshes = '"mesh.shape" = ["row:2", "row:2,col:2", "row:4"]'
    path = study_file("ranks = [2, 4]\nrepeats = 1", meshes, "run.toml")
    points = StudyOptions.load(path).points()
    assert [(p.varied["mesh.shape"], p.ranks) for p in points] == [
        ("row:2", 2), ("row:2,col:2", 4), ("row:4", 4)
    ]  # fmt: skip


def test_work_in_proportion_to_the_ranks(here):
    """The box grows along x, a training's batch grows, and a script's batch falls if strong."""
    Path("run.toml").write_text(SIMULATION)
    study_file('ranks = [1, 4]\nrepeats = 1\nscaling = "weak"', subject="run.toml")
    small, large = StudyOptions.load("study.toml").points()
    assert small.settings["box.grid"] == [8, 8, 8] and large.settings["box.grid"] == [32, 8, 8]
    assert large.settings["box.size"] == [64.0, 16.0, 16.0]
    study_file('ranks = [1, 2]\nrepeats = 1\nscaling = "strong"', "batch = [8]")
    assert [p.settings["batch"] for p in StudyOptions.load("study.toml").points()] == [8, 4]
    training = Path(commands.ROOT) / "examples" / "demo_training.toml"
    study_file('ranks = [2, 4]\nrepeats = 1\nscaling = "weak"', subject=str(training))
    assert [p.settings["training.batch"] for p in StudyOptions.load("study.toml").points()] == [
        8,
        16,
    ]


@pytest.mark.parametrize(
    ("text", "vary", "subject", "message"),
    [
        ("", "", "nowhere.py", "study.subject there is no"),
        ("", "", "study.txt", "neither a run file"),
        ("ranks = [0]", "", "script.py", "study.ranks = [0]: must be a list of numbers of ranks"),
        ("ranks = [1, 1]", "", "script.py", "study.ranks = [1, 1]: a number is given twice"),
        ("", "batch = [1, 1]", "script.py", "batch has a value twice"),
        ("", "batch = 4", "script.py", "batch has no list of values"),
        ('scaling = "weak"', "", "script.py", "leave it out"),
        ('scaling = "strong"\nranks = [1, 3]', "batch = [4]", "script.py",
         "batch would be 1.33333 on 3 ranks: must be a whole number"),
        ('scaling = "weak"\nranks = [3, 4]', "", "run.toml", "box.grid[0] would be 10.6667"),
        ('seeds = ["seed"]', "seed = [1, 2]", "script.py", "vary.seed is one of study.seeds"),
        ("trace = 4", "", "script.py", "study.trace = 4: goes with jobs"),
        ('largest = "batch"\nmemory = 1.0\nrepeats = 2', "", "script.py",
         "study.repeats = 2: goes with timed runs, not with largest"),
        ("", '"training.batch" = [4]', "script.py", "the options of a script have none"),
        ("", "batch = [4]", "run.toml", "must be SECTION.KEY, such as evolution.steps"),
        ("", '"evolutoin.steps" = [4]', "run.toml", "did you mean evolution?"),
        ('scaling = "strong"', "", "script.py", "must have vary.batch"),
        ('largest = "batch"', "", "script.py", "study.memory is missing"),
        ("most = 4", "", "script.py", "study.most = 4: goes with largest"),
        ('largest = "batch"\nmemory = 1.0\nsmallest = 9\nmost = 4', "", "script.py",
         "study.most = 4: must be at least smallest, 9"),
        ('largest = "batch"\nmemory = 1.0', "batch = [4]", "script.py", "leave it out"),
    ],
)  # fmt: skip
def test_a_wrong_study_is_refused(here, text, vary, subject, message):
    Path("run.toml").write_text(SIMULATION)
    Path("study.txt").write_text("")
    with pytest.raises(ConfigError) as caught:
        StudyOptions.load(study_file(text, vary, subject))
    assert message in str(caught.value)


def test_points_that_cannot_begin_are_named(here):
    """The job of each point is planned before the first run."""
    Path("run.toml").write_text(SIMULATION)
    study_file("ranks = [1]", '"evolution.steps" = [3, 0]', "run.toml")
    refused = flowpm_here("study", "study.toml")
    assert refused.returncode == 2
    assert "evolution.steps = 0, 1 rank:" in refused.stderr
    assert "must be" in refused.stderr and not Path("study-study").exists()
    ranks = flowpm_here("study", "study.toml", "--ranks", "2")
    assert "study is one process that starts jobs: leave --ranks out" in plain(ranks.stderr)
    mesh = flowpm_here("study", "study.toml", "--mesh", "row:2")
    assert "vary mesh.shape in the study file" in mesh.stderr
    study_file("ranks = [1]\nmemory = 1e6\nlargest = 'evolution.steps'", "", "run.toml")
    assert "study.memory = 1e+06: this host has" in flowpm_here("study", "study.toml").stderr
    study_file("ranks = [2]", '"mesh.shape" = ["row:4"]', "run.toml")
    assert "no mesh.shape in [vary] is of study.ranks" in flowpm_here("study", "study.toml").stderr


@pytest.mark.budget(40)
def test_a_study_of_a_script(here):
    """Medians, spread, speed-up and efficiency are those computed by hand from its table."""
    needs_horovod(2)
    study_file('ranks = [1, 2]\nthreads = 3\nrepeats = 3\nseeds = ["seed"]', "batch = [4, 8]")
    done = flowpm_here("study", "study.toml")
    assert done.returncode == 0, done.stderr
    runs = rows_of("study-study/points.csv")
    assert len(runs) == 12 and {run["status"] for run in runs} == {"complete"}
    # A row is of 10 steps: (0.5 + 0.1 batch + 0.01 n + 0.3 seed) / 10. The first is left out.
    for each in runs:
        batch, seed = int(each["batch"]), int(each["repeat"])
        expected = (0.5 + 0.1 * batch + 0.03 + 0.3 * seed) / 10
        assert float(each["seconds a step"]) == pytest.approx(expected, rel=1e-5)
        assert float(each["seconds an epoch"]) == pytest.approx(10 * expected, rel=1e-5)
        mean = expected - 0.05 + 2.0 / 30
        assert float(each["seconds in compute"]) == pytest.approx(mean, rel=1e-5)
        assert each["host"] == "3"  # the threads that the script was given
        assert float(each["loss"]) == 0.25 and float(each["accuracy"]) == 0.8
    points = rows_of("study-study/summary.csv")
    assert [(p["batch"], p["ranks"], p["runs"]) for p in points] == [
        ("4", "1", "3"), ("4", "2", "3"), ("8", "1", "3"), ("8", "2", "3")
    ]  # fmt: skip
    middle = (0.5 + 0.4 + 0.03 + 0.3) / 10
    assert float(points[0]["seconds a step"]) == pytest.approx(middle, rel=1e-5)
    assert float(points[0]["seconds a step, least"]) == pytest.approx(middle - 0.03, rel=1e-5)
    # The script is as fast on two ranks, each with the same batch.
    assert float(points[1]["speed-up"]) == pytest.approx(2) and float(points[1]["efficiency"]) == 1
    least = 2 * (middle - 0.03) / (middle + 0.03)
    assert float(points[1]["speed-up, least"]) == pytest.approx(least, rel=1e-5)
    text = Path("study-study/summary.md").read_text()
    assert "no counter could be read" in text and "| 4 | 2 | 3 |" in text
    for name in ("scaling.png", "phases.png", "keys.png", "report.html"):
        assert Path("study-study", name).stat().st_size > 1000
    assert not Path("study-study/energy.png").exists()
    assert "12 runs" in plain(flowpm_here("runs", "study-study").stdout)
    assert "study-study is complete" in flowpm_here("study", "study.toml", "--resume").stdout
    assert len(begun()) == 12
    # More repetitions are added to those that are there.
    more = flowpm_here("study", "study.toml", "--resume", "--set", "study.repeats=4")
    assert more.returncode == 0 and len(begun()) == 16
    assert {point["runs"] for point in rows_of("study-study/summary.csv")} == {"4"}


def test_a_run_that_fails_is_a_result(here):
    study_file("repeats = 1", "rate = [0.1, -1.0]")
    done = flowpm_here("study", "study.toml")
    assert done.returncode == 0
    assert [run["status"] for run in rows_of("study-study/points.csv")] == ["complete", "failed"]
    assert (
        "rate 0.1, ranks 1, seconds a step 0.093\nrate -1, ranks 1, not complete fa" in done.stdout
    )
    assert "error: a rate below 0" in Path("study-study/summary.md").read_text()
    assert rows_of("study-study/summary.csv")[1]["not complete"] == "failed"


@pytest.mark.timeout(60)
def test_a_killed_study_goes_on(here):
    """A worker that is killed loses the run that it was making, and no other."""
    study_file("repeats = 3\nseed = 5", "sleep = [1.5]")
    command = [*PROGRAM, "study", "study.toml"]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _until(lambda: Path("begun.txt").exists() and len(begun()) == 2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    _until(lambda: not _alive("script.py"), 1.0)  # the run ends with the process that made it
    ended = {path.parent.name for path in Path("study-study/runs").glob("*/result.json")}
    assert len(ended) == 1
    assert "add --resume to go on with it" in flowpm_here("study", "study.toml").stderr
    assert flowpm_here("study", "study.toml", "--resume").returncode == 0
    assert len(rows_of("study-study/points.csv")) == 3
    assert len(begun()) == 4 and all(begun().count(name) == 1 for name in ended)


@pytest.mark.timeout(60)
def test_a_study_is_stopped(here):
    """SIGTERM ends the present run; what has ended is kept, and the status says so."""
    study_file("repeats = 3", "sleep = [20.0]")
    first = subprocess.Popen([*PROGRAM, "study", "study.toml"], stderr=subprocess.PIPE, text=True)
    _until(lambda: Path("begun.txt").exists())
    first.terminate()
    said = first.communicate(timeout=30)[1]
    assert first.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after 0 runs of 3; go on with --resume" in plain(said)
    assert not _alive("script.py")


@pytest.mark.timeout(60)
def test_workers_share_a_study(here):
    """Two that resume it together make each run once; a third that begins anew is refused."""
    study_file("repeats = 8", "sleep = [0.3]")
    command = [*PROGRAM, "study", "study.toml", "--output", "shared"]
    quiet = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    first = subprocess.Popen(command, **quiet)
    _until(lambda: Path("begun.txt").exists())
    assert "running" in flowpm_here("runs", "shared").stdout
    second = subprocess.Popen([*command, "--resume"], **quiet)
    refused = flowpm_here("study", "study.toml", "--output", "shared", "--overwrite")
    assert refused.returncode == 2 and "another study is writing in shared" in refused.stderr
    assert first.wait(50) == 0 and second.wait(50) == 0
    assert sorted(begun()) == [f"{n:04d}" for n in range(8)]
    assert len(rows_of("shared/points.csv")) == 8
    assert json.loads(Path("shared/study.json").read_text())["complete"]


@pytest.mark.timeout(60)
def test_a_study_is_submitted(here):
    """Its script runs it without a launcher; workers join a folder that `submit` has begun."""
    study_file("repeats = 3\nranks = [1]")
    size = ["--nodes", "1", "--ranks-per-node", "1", "--time", "01:00:00", "--dry-run"]
    said = flowpm_here("submit", "study", "study.toml", *size, "--workers", "2")
    assert said.returncode == 0 and "2 workers, each with 1 rank on 1 node" in said.stdout
    script = Path("study-study.sbatch").read_text()
    assert "#SBATCH --array=0-1" in script and "srun" not in script and "mpirun" not in script
    assert not json.loads(Path("study-study/study.json").read_text())["complete"]
    worker = subprocess.run(["bash", "study-study.sbatch"], capture_output=True, text=True)
    assert worker.returncode == 0, worker.stderr
    assert len(rows_of("study-study/points.csv")) == 3
    four = ["--set", "study.ranks=[4]", "--output", "other"]
    few = flowpm_here("submit", "study", "study.toml", *size, *four)
    assert "has jobs of 4 ranks; --nodes times --ranks-per-node is 1" in few.stderr
    other = flowpm_here("submit", "simulate", "study.toml", *size, "--workers", "2")
    assert "--workers is for a study or a tuning" in other.stderr


def test_a_changed_subject_is_refused(here):
    """Runs before and after a change of the subject cannot be compared."""
    study_file("repeats = 1")
    assert flowpm_here("study", "study.toml").returncode == 0
    Path("script.py").write_text(SCRIPT + "\n")
    more = flowpm_here("study", "study.toml", "--resume", "--set", "study.repeats=2")
    assert more.returncode == 2 and "it has other values than when" in more.stderr


@pytest.mark.timeout(120)
def test_the_largest_value_that_fits(here):
    """A batch takes 40 MiB: with 300 MiB and some 10 MiB of Python, 7 fit; found by bisection."""
    study_file('largest = "batch"\nmemory = 0.293\nmost = 64', "mib = [40]\nsleep = [0.6]")
    done = flowpm_here("study", "study.toml")
    assert done.returncode == 0, done.stderr
    assert "sleep 0.6, ranks 1, largest batch 7, least without room 8" in done.stdout
    found = rows_of("study-study/largest.csv")
    assert [(row["largest batch"], row["least without room"]) for row in found] == [("7", "8")]
    tried = [int(name.partition("-")[2]) for name in begun()]
    assert tried == [1, 2, 4, 8, 6, 7]
    message = next(r["message"] for r in rows_of("study-study/points.csv") if r["batch"] == "8")
    assert message == "it was killed when it took more than 300.0 MiB"


def test_how_a_run_ends(tmp_path):
    """Its status, and the last words of its output."""
    log = tmp_path / "log"

    def ended(code: str, **more):
        return run([sys.executable, "-c", code], log, **more)

    assert ended("pass").status == COMPLETE
    wrong = ended("import sys; print('some text'); sys.exit('error: no')")
    assert (wrong.status, wrong.message) == (FAILED, "error: no")
    assert ended("raise MemoryError").status == NO_MEMORY
    assert ended("import os; os.kill(os.getpid(), 9)").status == NO_MEMORY
    late = ended("import time; time.sleep(60)", limit=0.5)
    assert late.status == FAILED and "its time limit" in late.message and late.seconds < 10
    assert ended("import time; time.sleep(60)", should_stop=lambda: True).status == STOPPED
    assert memory_of(os.getpid()) > 2**20


def test_a_failure_with_a_long_log_is_explained_by_its_end(tmp_path):
    """A log above 16 MiB, of which only the last lines are shown."""
    code = "for n in range(18): print('x' * 2**20)\nraise SystemExit('error: no such field')"
    ended = run([sys.executable, "-c", code], tmp_path / "log")
    assert (tmp_path / "log").stat().st_size > 2**24
    assert (ended.status, ended.message, ended.code) == (FAILED, "error: no such field", 1)


def test_a_claim_is_of_one_process(tmp_path):
    mine, other = (Lock(tmp_path / "piece" / CLAIM) for _ in range(2))
    assert mine.take() and not other.take()
    mine.give_up()
    assert other.take()


def test_measurements_of_a_simulation(tmp_path):
    """Medians of the later steps; a sample is a particle in a step; energy and its mean power."""
    timings = {
        "steps": [9.0, 1.0, 2.0, 4.0],
        "particles": 100,
        "phases": {"paint": [8.0, 0.25, 0.5, 0.75]},
        "peak_memory_bytes": [2**20, 3 * 2**20],
    }
    (tmp_path / "timings.json").write_text(json.dumps(timings))
    sources = {"RAPL package": 300.0, "RAPL DRAM": 60.0, "RAPL platform": 500.0}
    about = {"energy [J]": sources, "mean power [W]": 30.0}
    (tmp_path / "provenance.json").write_text(json.dumps(about))
    found = measured(tmp_path, skip=1)
    assert found["seconds a step"] == 2.0 and found["samples a second"] == 50.0
    assert found["seconds in paint"] == 0.5 and found["memory of a rank [MiB]"] == 3
    assert found["energy [J]"] == 360.0 and found["mean power [W]"] == 30.0
    assert measured(tmp_path, skip=9)["seconds a step"] == 4.0


@pytest.mark.parametrize(
    "result, key",
    [
        ({"seconds": "1"}, "seconds"),
        ({"status": None}, "status"),
        ({"varied": [1]}, "varied"),
        ({"measured": {"seconds a step": "fast"}}, "measured: Value error, seconds a step is"),
        ({"measured": {"host": 3}}, "measured: Value error, host is 3; must be a text"),
    ],
)
def test_a_result_with_other_types_is_named(tmp_path, result, key):
    """By its file, its key and the remedy."""
    known = {"number": 0, "varied": {}, "ranks": 1, "repeat": 0, "status": COMPLETE, "seconds": 1.0}
    path = tmp_path / "runs" / "0000" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(known))
    assert StudyFolder(tmp_path).ended() == [Run(**known)]
    path.write_text(json.dumps(known | result))
    with pytest.raises(UnreadableError, match=f"^{path}: {key}.*; remove this file"):
        StudyFolder(tmp_path).ended()


@pytest.mark.parametrize(
    "timings",
    [{"steps": [1.0], "particles": 8, "phases": ["paint"]}, {"steps": ["a"], "particles": 8}, [1]],
)
def test_timings_with_other_types_fail_their_run_alone(here, timings):
    """The study ends, and says of the run that its measurements cannot be read."""
    leave = f"(options.output / 'timings.json').write_text({json.dumps(timings)!r})"
    Path("script.py").write_text(f"{SCRIPT}\n{leave}\n")
    study_file("repeats = 1")
    done = flowpm_here("study", "study.toml")
    assert done.returncode == 0, done.stderr
    (run_row,) = rows_of("study-study/points.csv")
    assert run_row["status"] == "failed"
    assert "its measurements cannot be read" in run_row["message"]


def test_meshes_are_compared_with_the_fewest_ranks():
    """The speed-up of a mesh of ranks is over the one rank that has the same other values."""
    shapes = {"row:1": (1, 4.0), "row:2": (2, 2.5), "replica:2": (2, 2.0), "col:1": (1, 5.0)}
    runs = [
        Run(n, {"mesh.shape": shape}, ranks, 0, COMPLETE, 1.0, "", {"samples a second": 8 / time})
        for n, (shape, (ranks, time)) in enumerate(shapes.items())
    ]
    speed_ups = {row["mesh.shape"]: row["speed-up"] for row in summary_rows(groups_of(runs))}
    assert speed_ups == pytest.approx({"row:1": 1, "row:2": 1.6, "replica:2": 2, "col:1": 0.8})


def test_measurements_of_a_training(tmp_path):
    """Steps are counted from 0 there; scores are those of the best validation."""
    lines = [
        "step,samples,loss,validation_loss,validation_mae,read_seconds,compute_seconds",
        "0,8,4.0,,,1.0,7.0", "1,16,3.0,0.5,0.3,0.5,1.5", "2,24,2.0,0.4,0.2,0.5,2.5",
        "3,32,1.0,0.6,0.1,0.5,1.0",
    ]  # fmt: skip
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    (tmp_path / "run.toml").write_text("[training]\nepochs = 2\n")
    found = measured(tmp_path, skip=1)
    assert found["seconds a step"] == 2.0 and found["samples a second"] == 4.0
    assert found["seconds an epoch"] == 4.0 and found["seconds in read"] == 0.5
    assert found["loss"] == 1.0
    assert (found["validation_loss"], found["validation_mae"]) == (0.4, 0.2)
    assert measured(tmp_path, skip=0)["seconds a step"] == 2.5
    (tmp_path / "metrics.csv").write_text("\n".join(lines[:2]))
    assert measured(tmp_path, skip=1)["samples a second"] == 1.0


def test_a_point_without_complete_runs():
    """It is listed, and speed-ups are compared with the fewest ranks that have a time."""

    def made(ranks, status, seconds):
        times = {"seconds a step": seconds, "samples a second": 8 / seconds} if seconds else {}
        return Run(ranks, {}, ranks, 0, status, 1.0, "no room" if not seconds else "", times)

    groups = groups_of([made(4, COMPLETE, 1.0), made(1, NO_MEMORY, 0), made(2, COMPLETE, 1.6)])
    rows = summary_rows(groups)
    assert [(row["ranks"], row["runs"]) for row in rows] == [(1, 0), (2, 1), (4, 1)]
    assert rows[0]["not complete"] == NO_MEMORY and "speed-up" not in rows[0]
    assert rows[2]["speed-up"] == pytest.approx(1.6) and rows[2]["efficiency"] == pytest.approx(0.8)
    assert "run 1: no memory. no room" in summary_text(groups, "x")


@pytest.mark.budget(60)
@pytest.mark.parametrize("ranks", [[1], pytest.param([1, 2], marks=pytest.mark.long)])
def test_a_study_of_simulations(here, ranks):
    """Of a real job, whose box grows with the ranks."""
    needs_horovod(max(ranks))
    Path("run.toml").write_text(SIMULATION)
    study_file(f'ranks = {ranks}\nrepeats = 1\nscaling = "weak"', subject="run.toml")
    done = flowpm_here("study", "study.toml")
    assert done.returncode == 0, done.stderr
    runs = rows_of("study-study/points.csv")
    assert [run["status"] for run in runs] == ["complete"] * len(ranks)
    for number, (each, size) in enumerate(zip(runs, ranks, strict=True)):
        throughput = 512 * size / float(each["seconds a step"])
        assert float(each["samples a second"]) == pytest.approx(throughput, rel=1e-5)
        assert float(each["memory of a rank [MiB]"]) > 100 and "tensorflow" in each["versions"]
        timings = Path(f"study-study/runs/{number:04d}/run/timings.json")
        assert json.loads(timings.read_text())["ranks"] == size


def _until(condition, seconds=30.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def _alive(name: str) -> bool:
    """Whether a process of a script in this folder is there."""
    path = str(Path(name).absolute())
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path in each.read_text():
                return True
        except OSError:
            continue
    return False


def test_a_signal_ends_the_sharing_of_work_at_once(tmp_path):
    """Pieces that were not begun leave nothing behind."""
    stop, done = StopSignals(print), []

    def do(claim):
        assert claim.descriptors
        done.append(claim)
        stop.received = signal.SIGTERM

    folders = [tmp_path / f"{number:03d}" for number in range(20)]
    assert share(dict.fromkeys(folders, do), stop, lambda count, folder: None) == 0
    assert len(done) == 1
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [
        Path("000"), Path("000", CLAIM),
    ]  # fmt: skip


def test_memory_that_may_not_be_looked_at_closely_is_counted(monkeypatch):
    def refused(self):
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refused)
    assert memory_of(os.getpid()) >= psutil.Process().memory_info().rss / 2
