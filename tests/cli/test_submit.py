"""Scripts for Slurm mean what was asked for, and are refused early where they would fail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import flowpm_here, folder_with
from run_files import RUN

from flowpm_dist.cli.batch import gpus_of_a_node, seconds_of
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.io.errors import UserError
from flowpm_dist.simulate.folder import SimulationFolder
from flowpm_dist.simulation.demand import human_time
from flowpm_dist.studies.rows import array_rows
from meshimpl.launch import find_mpirun

SIZE = ("--nodes", "2", "--ranks-per-node", "4", "--time", "02:00:00")

here = folder_with(RUN)


@pytest.fixture(autouse=True)
def no_site_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def script(*words: str, **files: str) -> str:
    """The script of a run file in the current folder."""
    done = flowpm_here("submit", "simulate", "run.toml", *SIZE, "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.partition(":")[0])
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    return path.read_text()


def directives(text: str) -> dict[str, str]:
    """The options of sbatch in a script."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE)
    return dict(found)


def commands(text: str, folder: Path, status: int = 0, **environment: str) -> tuple[str, int]:
    """The commands of a script, run with programs that record their calls; its exit status."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("srun", "mpirun", "scontrol"):
        ends = f"exit {status}" if name != "scontrol" else "exit 0"
        own = 'trap "echo got USR1; exit 138" USR1\n' if name == "mpirun" else ""
        wait = "for i in $(seq 100); do sleep 0.1; done\n" if environment.get("LONG") else ""
        wait = wait if name == "mpirun" else ""
        (programs / name).write_text(
            f'#!/bin/bash\n{own}printf "%q " {name} "$@"; echo\n{wait}{ends}\n'
        )
        (programs / name).chmod(0o755)
    (folder / "job.sh").write_text(text)
    found = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    process = subprocess.Popen(
        ["bash", "job.sh"], cwd=folder, env=found | environment, stdout=subprocess.PIPE, text=True
    )
    if environment.get("LONG"):
        assert process.stdout is not None
        first = process.stdout.readline()
        for _ in range(50):  # until the script has noted which process it has started
            process.send_signal(10)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return first + process.communicate(timeout=0.5)[0], process.returncode
    return process.communicate(timeout=30)[0], process.returncode


def test_a_job_of_srun(here):
    text = script("--threads", "3", "--partition", "fast", "--set", "evolution.steps=5")
    requested = directives(text)
    assert (requested["nodes"], requested["ntasks-per-node"], requested["cpus-per-task"]) == (
        "2",
        "4",
        "3",
    )
    assert (requested["time"], requested["partition"]) == ("02:00:00", "fast")
    assert requested["signal"] == "USR1@120" and "requeue" in requested
    assert "array" not in requested and "gpus-per-node" not in requested
    called, status = commands(text, here)
    words = shlex.split(called)
    assert status == 0 and words[0] == "srun"
    assert {"--mpi=pmix", "--cpus-per-task=3", "--kill-on-bad-exit=0"} <= set(words)
    at = words.index("simulate")
    assert words[at:] == [
        "simulate", str(here / "run.toml"), "--set", "evolution.steps=5",
        "--output", str(here / "run-output"),
    ]  # fmt: skip


def test_a_stopped_job_is_queued_again_and_resumes(here):
    text = script()
    called, status = commands(text, here, status=138)
    assert status == 138
    assert "scontrol requeue 7" in called and "--resume" not in called
    assert "requeue" not in commands(text, here, status=138, SLURM_RESTART_COUNT="100")[0]
    for status in (0, 1, 2, 137, 143):
        assert "requeue" not in commands(text, here, status=status)[0]
    assert "scontrol requeue 7" in commands(text, here, status=75)[0]  # a host was lost
    strict = text.replace("settings=()", "set -euo pipefail\nsettings=()")
    assert "scontrol requeue 7" in commands(strict, here, status=138)[0]
    (here / "run-output/.partial-flowpm-dist/checkpoints/step-000003.zarr").mkdir(parents=True)
    assert shlex.split(commands(text, here)[0])[-1] == "--resume"


def test_a_job_of_mpirun_passes_the_warning_on(here):
    (here / "site.toml").write_text(
        '[site]\nlauncher = "mpirun"\nwarn = 300\nthreads = 2\ngpus_per_rank = 1\n'
        'setup = ["module load openmpi"]\ndirectives = ["--exclusive"]\nprogram = "flowpm-dist"\n'
    )
    text = script("--site", "site.toml")
    requested = directives(text)
    assert requested["signal"] == "B:USR1@300" and requested["gpus-per-node"] == "4"
    assert "exclusive" in requested
    assert "\nmodule load openmpi\n" in text
    text = text.replace("module load openmpi\n", "")
    called, status = commands(text, here, LONG="yes")
    words = shlex.split(called.splitlines()[0])
    assert words[:3] == ["mpirun", "-n", "8"] and "flowpm-dist" in words
    assert "got USR1" in called and "scontrol requeue 7" in called
    assert status == 138
    # A warning that comes when mpirun has ended does not change how it has ended.
    late = 'sleep 0.3; [ -n "$sent" ] || { sent=yes; kill -USR1 $$; }; wait $started'
    called, status = commands(text.replace("wait $started", late), here)
    assert status == 0 and "requeue" not in called
    assert commands(text.replace("mpirun -n", "nowhere -n"), here)[1] == 127
    # A lost host: the ranks have told, and mpirun has been killed.
    lost = text.replace("wait $started", 'echo 75 > "$MESHIMPL_FAILURE_FOLDER/told"; wait $started')
    called, status = commands(lost, here, status=137)
    assert status == 75 and "scontrol requeue 7" in called
    (here / "site.toml").write_text('[site]\nlauncher = "mpirun"\n')
    assert f"\n{shlex.quote(str(find_mpirun()))} -n 8" in script("--site", "site.toml")


def test_an_array_has_a_job_for_each_combination(here):
    requested = ("--array", "initial.seed=3-5", "--array", "evolution.steps=2,10", "--at-once", "2")
    text = script(*requested)
    assert directives(text)["array"] == "0-5%2"
    seen = []
    for number in range(6):
        words = shlex.split(commands(text, here, SLURM_ARRAY_TASK_ID=str(number))[0])
        settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        seen.append(tuple(settings))
        assert words[words.index("--output") + 1] == str(here / f"run-output-{number}")
    expected = {(f"initial.seed={s}", f"evolution.steps={n}") for s in (3, 4, 5) for n in (2, 10)}
    assert set(seen) == expected and len(seen) == 6


def test_what_is_complete_is_left_out_of_an_array(here, monkeypatch):
    requested = (
        "submit",
        "simulate",
        "run.toml",
        *SIZE,
        "--dry-run",
        "--array",
        "initial.seed=3-7",
    )
    done = {0, 2}

    def is_finished(folder):
        return int(folder.path.name.rpartition("-")[2]) in done

    monkeypatch.setattr(SimulationFolder, "is_finished", is_finished)
    found = flowpm_here(*requested)
    assert "3 jobs of 8 ranks on 2 nodes, 2 hours" in found.stdout, found
    assert "2 are complete" in found.stdout
    assert directives((here / "run-output.sbatch").read_text())["array"] == "1,3-4"
    done |= set(range(5))
    found = flowpm_here(*requested)
    assert found.returncode == 2 and "the work is complete" in found.stderr


def test_what_it_costs_elsewhere(here, monkeypatch):
    """A dry run needs no room here; its time follows from the cores of the nearest measurement."""
    monkeypatch.setenv("FLOWPM_CACHE", str(here / "cache"))
    full = shutil._ntuple_diskusage(2**40, 2**40, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    refused = flowpm_here("submit", "simulate", "run.toml", *SIZE)
    assert refused.returncode == 2 and "has 0 bytes free, the run needs about" in refused.stderr
    dry = ("submit", "simulate", "run.toml", *SIZE, "--dry-run")
    said = flowpm_here(*dry).stdout.splitlines()
    assert said[1].startswith("warning: output.checkpoint_every = 0: a checkpoint is written only")
    dry += ("--set", "output.checkpoint_every=1")
    said = flowpm_here(*dry).stdout.splitlines()
    assert said[1].startswith("disk: at most ") and said[2].startswith("time: not known")
    # 2 steps of 16^3 cells; 4 cores took 1 s for a cell, and 16 have 2 threads for each of 8 ranks.
    far, near = (
        json.dumps({"work": "simulate", "ranks": n, "threads": 2, "host": "a"}) for n in (1, 2)
    )
    (here / "cache").mkdir(exist_ok=True)
    rates = {"no json": {}, far: {"512": 9.0}, near: {"4000": 1.0}}
    (here / "cache" / "rates.json").write_text(json.dumps(rates))
    said = flowpm_here(*dry, "--threads", "2", "--array", "initial.seed=0-2").stdout.splitlines()
    expected = f"time: about {human_time(2 * 16**3 * 4 / 16)} each, if the speed grows"
    assert said[2] == f"{expected} with the cores from a with 4 cores, a box of 4,000 cells"
    one = flowpm_here(*dry).stdout.splitlines()[1].partition("most ")[2].split()
    assert float(said[1].partition("most ")[2].split()[0]) == pytest.approx(
        3 * float(one[0]), rel=0.01
    )
    (here / "site.toml").write_text('[site]\ndirectives = ["--gres=gpu:4"]\n')
    for words in (("--gpus-per-rank", "1"), ("--site", "site.toml")):
        said = flowpm_here(*dry, *words).stdout.splitlines()
        node = said[0].partition("about ")[2].removesuffix(" of memory a node")
        assert said[2].startswith("memory of a GPU: about ")
        assert said[2].endswith(f"; a node's {node} include it for each rank")
        assert said[3].startswith("time: not known")
    # A study of runs needs no room here either.
    (here / "study.toml").write_text(
        '[study]\nsubject = "run.toml"\n[vary]\n"initial.seed" = [1, 2]\n'
    )
    study = flowpm_here("submit", "study", "study.toml", *SIZE, "--dry-run")
    assert study.returncode == 0, study.stderr
    assert "has 0 bytes free" in flowpm_here("submit", "study", "study.toml", *SIZE).stderr


def test_seconds_of_a_time_limit():
    limits = {"02:00:00": 7200, "90": 5400, "2:30": 150, "1-12": 129600, "1-02:03:04": 93784}
    limits |= {"48:00:00": 172800, "1-00:30": 88200}
    for text, seconds in limits.items():
        assert seconds_of(text) == seconds
    for text in ("soon", "1:60", "99:99:99", "1-24", "", "1:2:3:4"):
        with pytest.raises(UserError, match=f"--time {text}"):
            seconds_of(text)


def test_results_whose_name_has_special_characters_are_resumed(here):
    text = script("--output", "x y/out[1]")
    (here / "x y/out[1]/.partial-flowpm-dist/checkpoints/step-000003.zarr").mkdir(parents=True)
    assert shlex.split(commands(text, here)[0])[-1] == "--resume"


def test_rows_of_an_array():
    assert array_rows([]) == []
    assert array_rows(["a.b=x,y"]) == [{"a.b": "x"}, {"a.b": "y"}]
    wrong = ("seed=0-3", "a.b=", "a.b=1,,2", "a.b=5-3", "a.b=0-10000")
    for text in wrong:
        with pytest.raises(UserError, match=re.escape(f"--array {text}")):
            array_rows([text])
    with pytest.raises(UserError, match="more than 10000 jobs"):
        array_rows(["a.b=0-999", "a.c=0-99"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("other.toml",), "submit simulate: cannot take other.toml"),
        (("--", "--resume"), "submit simulate: cannot take --resume"),
        (("--time", "soon"), "--time soon: must be as sbatch takes it"),
        (("--time", "00:02:00"), "--time 00:02:00 is 2 min"),
        (("--array", "initial.seeds=0-3"), "initial.seeds is not a key"),
        (("--array", "initial.seed=1,1"), "has a value twice"),
        (("--array", "initial.seed=0-3", "--set", "initial.seed=9"), "by --array and by --set"),
        (("--at-once", "4"), "there is none"),
        (("--mesh", "row:3"), "here --ranks is --nodes times --ranks-per-node"),
        (("--array", "initial.seed=1,x"), "initial.seed"),
        (("--nodes", "3"), "run.toml"),
        (("--site", "nowhere.toml"), "nowhere.toml"),
        (("--output", "new\ntouch X"), "--output has the character '\\n'"),
        (("--partition", "p\ntouch X"), "partition has the character '\\n'"),
        (("--qos", "q\rtouch X"), "qos has the character '\\r'"),
        (("--set", 'run.precision="float32"\n'), "command has the character '\\n'"),
        (("--array", "initial.seed=1,2\n"), "--array has the character"),
        (("--time", "1:00:00", "--script", "new\n.sbatch"), "the command line has the character"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(here, words, message):
    requested = ("submit", "simulate", "run.toml", *SIZE, "--dry-run", *words)
    done = flowpm_here(*requested)
    assert done.returncode == 2 and message in done.stderr, done
    assert not list(here.glob("*.sbatch"))


TRAINING = """
[priors]
Omega_m = [0.25, 0.35]
[training]
batch = 8
[data]
simulations = 16
validation = 8
test = 8
"""


@pytest.fixture
def training(here):
    """The run file of networks, in the current folder."""
    text = RUN.partition("[initial]")[0].replace("Omega_m = 0.30966\n", "").replace("16", "32")
    (here / "nets.toml").write_text(text + "[evolution]\nsteps = 2\n" + TRAINING)
    return here


def test_a_dataset_begins_anew(training):
    """It cannot be stopped and resumed: there is no warning, and a second turn overwrites."""
    requested = ("submit", "dataset", "nets.toml", *SIZE, "--dry-run", "--array")
    done = flowpm_here(*requested, "data.seed=3-4", "--", "--split", "train", "--dtype", "int16")
    assert done.returncode == 0, done.stderr
    text = (training / "nets-dataset.sbatch").read_text()
    requested = directives(text)
    assert "signal" not in requested and requested["array"] == "0-1"
    words = shlex.split(commands(text, training, SLURM_ARRAY_TASK_ID="1")[0])
    assert words[words.index("dataset") :] == [
        "dataset", str(training / "nets.toml"), "--split", "train", "--dtype", "int16",
        "--output", str(training / "nets-dataset-1"), "--set", "data.seed=4",
    ]  # fmt: skip
    again = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_RESTART_COUNT": "1"}
    assert shlex.split(commands(text, training, **again)[0])[-1] == "--overwrite"
    called, status = commands(text, training, status=138, SLURM_ARRAY_TASK_ID="0")
    assert "requeue" not in called and status == 138


def test_a_dry_run_of_datasets_and_fresh_test_sets_needs_no_room_here(training):
    """10^9 volumes of 128 KiB, which no disk here has room for."""
    text = (training / "nets.toml").read_text().replace("test = 8", "test = 1_000_000_000")
    (training / "nets.toml").write_text(text)
    trained = TrainingFolder(training / "trained")
    trained.begin(resume=False)
    trained.run_file.write_text(TrainingPlan.load(training / "nets.toml").resolved())
    trained.checkpoints.path.mkdir()
    (trained.checkpoints.path / "step-1.index").touch()
    trained.write_mark(complete=True, step=1, steps=1)
    trained.release()
    jobs = {"dataset": ("nets.toml",), "evaluate": ("trained", "--", "--fresh", "1")}
    for command, words in jobs.items():
        refused = flowpm_here("submit", command, *SIZE, *words)
        assert refused.returncode == 2 and "free, the " in refused.stderr, refused
        done = flowpm_here("submit", command, *SIZE, "--dry-run", *words)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("row", [0, 2])
def test_each_row_of_a_table_of_datasets_is_checked(training, row):
    sizes = ["2", "3", "4"]
    sizes[row] = '"none"'
    (training / "t.csv").write_text("\n".join(["evolution.steps", *sizes]))
    words = ("submit", "dataset", "nets.toml", *SIZE, "--dry-run", "--table", "t.csv")
    done = flowpm_here(*words)
    assert done.returncode == 2 and f"t.csv, row {row} (counted from 0): " in done.stderr
    assert "evolution.steps = 'none'" in done.stderr and not list(training.glob("*.sbatch"))


def test_evaluations_and_predictions(here, monkeypatch):
    """They take trainings; their own --check has the last word."""
    requested = ("submit", "evaluate", "one", "two", *SIZE, "--dry-run")
    done = flowpm_here(*requested)
    assert done.returncode == 2 and "one" in done.stderr and not list(here.glob("*.sbatch"))
    seen = []

    def checked(words, **_):
        seen.append([str(word) for word in words])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr("flowpm_dist.cli.submit.subprocess.run", checked)
    assert flowpm_here(*requested, "--", "--split", "validation").returncode == 0
    assert {"--check", "--ranks", "8", "--ignore-memory"} <= set(seen[0])
    words = shlex.split(commands((here / "one-evaluation.sbatch").read_text(), here)[0])
    assert words[words.index("evaluate") :] == [
        "evaluate", str(here / "one"), str(here / "two"), "--split", "validation"
    ]  # fmt: skip
    requested = ("submit", "predict", "one", "volume.npy", *SIZE, "--dry-run")
    assert flowpm_here(*requested, "--", "--box-size", "64").returncode == 0
    words = shlex.split(commands((here / "one-prediction.sbatch").read_text(), here)[0])
    assert words[-4:] == [str(here / "one"), str(here / "volume.npy"), "--box-size", "64"]


def test_ranks_that_would_share_a_gpu(here, monkeypatch):
    """Refused where Horovod has NCCL, when the site asks for fewer GPUs than ranks."""
    (here / "site.toml").write_text('[site]\ndirectives = ["--gres=gpu:a100:2"]\n')
    requested = ("submit", "simulate", "run.toml", *SIZE, "--dry-run", "--site", "site.toml")
    assert flowpm_here(*requested).returncode == 0
    monkeypatch.setattr("meshimpl.launch.horovod_has_nccl", lambda: True)
    done = flowpm_here(*requested)
    assert done.returncode == 2 and "2 GPUs a node, for 4 ranks" in done.stderr
    fewer = (*requested, "--ranks-per-node", "2", "--script", "fewer.sbatch")
    assert flowpm_here(*fewer).returncode == 0
    both = flowpm_here(*fewer, "--gpus-per-rank", "1")
    assert both.returncode == 2 and "leave one of them out" in both.stderr
    requested_counts = {
        "--gpus-per-node=4": 4, "--gpus-per-node=h100:2": 2, "--gres=gpu": 1,
        "--gres=shard:1,gpu:3": 3, "--gres=gpu:1g.5gb:4": 4, "--gres=gpumem:80": None,
        "--exclusive": None, "--gpus-per-task=1": None,
    }  # fmt: skip
    for directive, count in requested_counts.items():
        assert gpus_of_a_node(["--exclusive", directive]) == count, directive


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ('launcher = "horovodrun"', '"srun" or "mpirun"'),
        ('directives = ["exclusive"]', "must begin with --"),
        ('program = "~/bin/flowpm-dist"', "without ~ and $"),
        ('program = "/bin/\'x"', "No closing quotation: must be as in a shell"),
        ("program = \"'/bin/x\\n'\"", "command has the character '\\n'"),
        ('directives = ["--exclusive\\ntouch X"]', "directives has the character"),
        ('setup = ["module load\\u0000x"]', "setup has the character '\\x00'"),
        ('account = "a\\ntouch X"', "account has the character"),
        ('mpi = "none; ls"', "site.mpi"),
        ('mpi = "pmi2"', "without PMIx"),
    ],
)
def test_the_site_files_own_mistakes(here, key, message):
    (here / "site.toml").write_text(f"[site]\n{key}\n")
    done = flowpm_here("submit", "simulate", "run.toml", *SIZE, "--site", "site.toml")
    assert done.returncode == 2 and message in done.stderr


def test_an_edited_script_stays(here):
    path = here / "run-output.sbatch"
    script()
    script()
    path.write_text(path.read_text() + "# mine\n")
    done = flowpm_here("submit", "simulate", "run.toml", *SIZE, "--dry-run")
    assert done.returncode == 2 and "was edited" in done.stderr
    assert path.read_text().endswith("# mine\n")


@pytest.mark.parametrize("there", [False, True])
def test_a_script_is_not_written_through_a_link(here, there):
    path, other = here / "run-output.sbatch", here / "other.sbatch"
    if there:
        other.write_text(script())
        path.unlink()
    path.symlink_to(other)
    flowpm_here("submit", "simulate", "run.toml", *SIZE, "--dry-run", "--at-once", "0")
    assert path.is_file() and not path.is_symlink()
    assert other.exists() == there


def test_a_script_as_it_was_written_is_replaced(here):
    script()
    assert directives(script("--time", "1:00:00"))["time"] == "1:00:00"


def test_nothing_of_the_current_folder_is_executed(here):
    """Not a module with the name of one of ours, nor a user's package before the work begins."""
    for module in ("tomli_w.py", "own/__init__.py", "own/structure.py"):
        (here / module).parent.mkdir(exist_ok=True)
        (here / module).write_text(f"open({str(here / 'executed')!r}, 'w')")
    requested = shlex.split(commands(script(), here)[0])
    at = requested.index("simulate")
    done = subprocess.run([*requested[requested.index(sys.executable) : at], "--version"], cwd=here)
    assert done.returncode == 0
    example = str(Path(__file__).parents[2] / "examples" / "reconstruct.toml")
    words = ("reconstruct", example, "--check", "--set")
    done = flowpm_here(*words, "observation.structure=own.structure:grow")
    assert done.returncode == 0, done.stderr
    for name in ("own.other:grow", "own.structure.deeper:grow", "other.own:grow"):
        done = flowpm_here(*words, f"observation.structure={name}")
        assert done.returncode == 2 and "there is no module" in done.stderr
    assert not (here / "executed").exists()


def test_submission(here, monkeypatch):
    programs = here / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", "/nowhere")
    done = flowpm_here("submit", "simulate", "run.toml", *SIZE)
    assert done.returncode == 1 and "there is no sbatch here" in done.stderr
    (programs / "sbatch").write_text('#!/bin/sh\necho "Submitted batch job 12 $1"\n')
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/bin")
    done = flowpm_here("submit", "simulate", "run.toml", *SIZE)
    assert "Submitted batch job 12 run-output.sbatch" in done.stdout
    (programs / "sbatch").write_text('#!/bin/sh\necho "invalid account" >&2; exit 1\n')
    done = flowpm_here("submit", "simulate", "run.toml", *SIZE)
    assert done.returncode == 1 and "invalid account" in done.stderr
