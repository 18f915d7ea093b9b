"""Results come first: what only shows them comes last, and costs no more than a warning.

Jobs are done twice, once with all that decorates them broken. Each decoration must find the results
safe and warn by itself, and both folders must hold the same results.
"""

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import commands
import numpy as np
import pytest
from commands import COMMAND, flowpm_here
from run_files import PRIORS, ROUND_NUMBERS
from tiny_network import TINY

from flowpm_dist.cli import common
from flowpm_dist.cosmoflow.evaluation.posteriors import Question, VolumePosterior
from flowpm_dist.cosmoflow.evaluation.prediction import VolumePrediction
from flowpm_dist.cosmoflow.evaluation.results import Evaluation
from flowpm_dist.cosmoflow.planning.folder import SCORES, TrainingFolder
from flowpm_dist.cosmoflow.scores.judging import LearningCurve, score
from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.emulate.folder import EmulationFolder
from flowpm_dist.grid.field import project
from flowpm_dist.io.errors import WorkError, decoration
from flowpm_dist.io.files import snapshot_attributes
from flowpm_dist.jobs.folder import OF_EVERY_JOB
from flowpm_dist.jobs.job import job_class
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.simulate.folder import SimulationFolder
from flowpm_dist.studies.process import COMPLETE, Outcome
from flowpm_dist.studies.study import StudyFolder
from flowpm_dist.studies.tuning.job import FIGURES as OF_TUNING
from flowpm_dist.studies.tuning.job import TuneFolder
from tests.cosmoflow.test_judging import MEANS, NAMES, predictions
from tests.posteriors.test_posterior_results import results as posterior_results
from tests.studies.test_tune import fill, run_file

REPORT, SUMMARY, SPEED = "report", "summary", "record of the speed"
OF_JOBS = [REPORT, SUMMARY]

SIMULATION = f"""{ROUND_NUMBERS}
[box]
grid = 8
size = 64.0
[initial]
seed = 1
[evolution]
steps = 2
"""
CONE = """
[lightcone]
field_of_view = 1.5
pixels = 8
z_max = 1.0
tiles = 3
sources = [{ redshift = 0.6 }]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def breaks(monkeypatch):
    """Breaks what decorates a job; returns which decorations were tried, and if it was safe then.

    Args of the returned function:
        command: the job's; its summary and its report are broken, too.
        is_safe: whether the results are safe on disk.
        others: what else is broken, by the name in its warning.
    """

    def break_all(command, is_safe, **others):
        tried = {}

        def failing(name):
            def fail(*_, **__):
                before, tried[name] = tried.get(name, True), False
                tried[name] = before and bool(is_safe())
                raise RuntimeError("out of ink\nand paper")

            return fail

        def save(_, path):
            failing(path.name)()

        monkeypatch.setattr("flowpm_dist.io.figures.save_figure", save)
        monkeypatch.setattr("flowpm_dist.jobs.report.page", failing(REPORT))
        if command:
            monkeypatch.setattr(job_class(command), "report", failing(SUMMARY))
        for place, name in others.items():
            monkeypatch.setattr(place, failing(name))
        return tried

    return break_all


def check_warned(done, names):
    """The command has ended well, with one warning for each name."""
    assert done.returncode == 0 and "Traceback" not in done.stderr, done
    end = r": RuntimeError: out of ink\. The results are not affected\."
    warned = re.findall(rf"^warning: no (.*){end}(?: To \S+ it.*)?$", done.stderr, re.MULTILINE)
    assert sorted(warned) == sorted(names), done.stderr
    assert done.stderr.count("out of ink") == len(names)


def files_of(folder):
    """The files of a folder, without the report and the events of TensorBoard."""
    paths = (path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file())
    return {str(p) for p in paths if str(p) not in OF_EVERY_JOB and p.parts[0] != "tensorboard"}


def check_same(folder, whole, decorations, *timed):
    """The folder lacks the decorations alone, and differs in times alone."""
    left = files_of(folder)
    assert files_of(whole) - left == {*decorations} and left <= files_of(whole)
    for name in sorted(left - {*timed}):
        assert Path(folder, name).read_bytes() == Path(whole, name).read_bytes(), name


def test_simulate(here, breaks, monkeypatch):
    """What only a figure shows is computed when the results are in place, too."""
    Path("run.toml").write_text(SIMULATION + CONE)
    safe = []
    figures = ["density.png", "power_spectrum.png", "convergence.png", "convergence_power.png"]
    words = ["simulate", "run.toml", "--output"]
    assert flowpm_here(*words, "whole").returncode == 0
    speed = {"flowpm_dist.simulate.job.SimulationJob.speeds": SPEED}
    place = "flowpm_dist.simulate.session.project"
    tried = breaks(
        "simulate", is_safe := lambda: SimulationFolder(Path("out")).is_complete, **speed
    )
    monkeypatch.setattr(place, lambda *_: safe.append(is_safe()) or project(*_))
    done = flowpm_here(*words, "out")
    check_warned(done, names := [*figures, *OF_JOBS, SPEED])
    assert tried == dict.fromkeys(names, True) and safe == [True]
    assert "not affected. To write it: flowpm-dist report out\n" in done.stderr
    check_same("out", "whole", figures, "timings.json")
    assert "is complete" in flowpm_here(*words, "out", "--resume").stdout


@pytest.mark.parametrize("missing", ["matplotlib.figure", "matplotlib.backends.backend_agg"])
def test_a_table_of_simulations_without_matplotlib(here, monkeypatch, missing):
    """Nothing imports it before the results are complete, and all rows are done."""
    for name in [*sys.modules]:
        if re.fullmatch(r"flowpm_dist\..*figures", name):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    Path("run.toml").write_text(SIMULATION)
    Path("table.csv").write_text("initial.seed\n1\n2\n")
    done = flowpm_here("simulate", "run.toml", "--table", "table.csv", "--output", "out")
    assert done.returncode == 0, done.stderr
    for number in (0, 1):
        assert SimulationFolder(Path(f"out-{number}")).is_complete
    assert len(re.findall(r"^warning: no \S+.png: .*matplotlib", done.stderr, re.MULTILINE)) == 4


RECONSTRUCTION = f"""{ROUND_NUMBERS}
[box]
grid = 8
size = 64.0
[evolution]
steps = 2
[observation]
structure = "1lpt"
kind = "density"
sigma = 0.4
[data]
mock_seed = 1
[search]
evaluations = 2
[sampler]
chains = 1
draws = 2
warm_up = 1
leaps = 1
"""


def test_reconstruct(here, breaks):
    """The search is marked before its figures are drawn, and so are the chains."""
    Path("run.toml").write_text(RECONSTRUCTION)
    of_search, words = ["correlation.png", "loss.png", "slabs.png"], ["reconstruct", "run.toml"]
    assert flowpm_here(*words, "--output", "whole").returncode == 0
    folder, complete = ReconstructionFolder(Path("out")), []

    def is_safe():
        complete.append(folder.is_complete)
        fields = snapshot_attributes(folder.fields) or {}
        return fields["complete"] and folder.mark()["searched"]

    tried = breaks("reconstruct", is_safe)
    done = flowpm_here(*words, "--output", "out")
    check_warned(done, names := [*of_search, "chains.png", *OF_JOBS])
    assert tried == dict.fromkeys(names, True) and complete == [False] * 3 + [True] * 3
    timed = ("result.json", "iterations.csv", "draws.csv")
    check_same("out", "whole", [*of_search, "chains.png"], *timed)
    assert "is complete" in flowpm_here(*words, "--output", "out", "--resume").stdout


TRAINING = f"""{PRIORS}
[box]
grid = 16
size = 64.0
[network]
name = "{TINY.name}"
[training]
batch = 1
steps = 2
warmup = 1
[data]
source = "dummy"
"""


def test_train(here, breaks):
    Path("run.toml").write_text(TRAINING)
    figures, words = ["phases.png", "training.png"], ["train", "run.toml", "--output"]
    assert flowpm_here(*words, "whole").returncode == 0
    session, logs = (f"flowpm_dist.cosmoflow.training.{name}" for name in ("session", "logs"))
    shown = {
        f"{session}.TrainingSession._write_phases": "phases.json",
        f"{session}.TrainingSession._write_draws": "draws.json",
        f"{logs}.MLPerfLog.end": "end of mlperf.log",
    }
    tried = breaks("train", lambda: TrainingFolder(Path("out")).is_complete, **shown)
    check_warned(flowpm_here(*words, "out"), names := [*figures, *shown.values(), *OF_JOBS])
    assert tried == dict.fromkeys(names, True)
    lacks = [*figures, "phases.json"]  # and draws.json, if the data were not pretended
    check_same("out", "whole", lacks, "metrics.csv", "checkpoints/checkpoint")
    assert "is complete" in flowpm_here(*words, "out", "--resume").stdout


EMULATION = """[cosmology]
Omega_b = 0.049
h = 0.677
n_s = 0.965
sigma8 = 0.81
[priors]
Omega_m = [0.25, 0.35]
[box]
grid = 8
size = 16.0
[evolution]
integrator = "bullfrog"
steps = 2
[truth]
universes = 1
steps = 2
[emulate]
iterations = 2
validation = 1
validate_every = 1
checkpoint_every = 1
"""


def test_emulate(here, breaks):
    """A picture of a validation comes after its checkpoint, and does not end the learning."""
    Path("run.toml").write_text(EMULATION)
    assert flowpm_here("emulate", "run.toml", "--output", "whole").returncode == 0
    folder, marks = EmulationFolder(Path("out")), []

    def is_safe():
        marks.append((folder.mark()["iteration"], folder.is_complete))
        return folder.correction.exists() and folder.checkpoint.exists()

    tried = breaks("emulate", is_safe)
    done = flowpm_here("emulate", "run.toml", "--output", "out")
    check_warned(done, ["correction.png", "correction.png", "learning.png", *OF_JOBS])
    assert tried == dict.fromkeys(["correction.png", "learning.png", *OF_JOBS], True)
    assert marks == [(1, False)] + 4 * [(2, True)]
    check_same("out", "whole", ["correction.png", "learning.png"], "iterations.csv")
    done = flowpm_here("emulate", "run.toml", "--output", "out", "--resume")
    assert "is complete" in done.stdout


@pytest.mark.parametrize("largest", [False, True])
def test_study(here, breaks, monkeypatch, largest):
    """Its runs are pretended. A summary that failed is written by --resume."""
    Path("run.toml").write_text(SIMULATION)
    more = "repeats = 1\n[vary]\n'evolution.steps' = [2, 3]\n"
    more = "largest = 'evolution.steps'\nmemory = 0.5\nmost = 2\n" if largest else more
    Path("study.toml").write_text(f"[study]\nsubject = 'run.toml'\nranks = [1, 2]\n{more}")
    found = {"seconds a step": 2.0, "samples a second": 3.0, "seconds in fft": 1.0}
    found |= {"energy [J]": 5.0, "mean power [W]": 2.0}
    module = "flowpm_dist.studies.study"
    monkeypatch.setattr("flowpm_dist.studies.subject.run", lambda *_, **__: Outcome(COMPLETE, 1.0))

    def measured(output, skip):
        output.parents[2].joinpath("summary.csv").write_text("of fewer runs")
        return found

    monkeypatch.setattr(f"{module}.measured", measured)
    words = ["study", "study.toml", "--output"]
    assert flowpm_here(*words, "whole").returncode == 0
    figures = [] if largest else ["scaling.png", "phases.png", "keys.png", "energy.png"]
    tables = ["summary.csv", "summary.md", *(["largest.csv"] if largest else [])]
    tried = breaks(
        "study",
        lambda: StudyFolder(Path("out")).is_complete and Path("out/points.csv").exists(),
        **{
            "flowpm_dist.studies.summary.summary_rows": "summary.csv",
            "flowpm_dist.studies.summary.summary_text": "summary.md",
            "flowpm_dist.studies.summary.largest_rows": "largest.csv",
        },
    )
    check_warned(flowpm_here(*words, "out"), names := [*figures, *tables, *OF_JOBS])
    assert tried == dict.fromkeys(names, True)
    check_same("out", "whole", [*figures, *tables])
    monkeypatch.undo()
    monkeypatch.chdir(here)
    done = flowpm_here(*words, "out", "--resume")
    assert done.returncode == 0 and "warning: no" not in done.stderr
    check_same("out", "whole", [])
    assert "is complete" in flowpm_here(*words, "out", "--resume").stdout


def test_tune(here, breaks):
    fill(here)
    run_file(trials=2)
    tried = breaks("tune", lambda: TuneFolder(Path("out")).is_complete)
    done = flowpm_here("tune", "tune.toml", "--output", "out")
    check_warned(done, names := [*OF_TUNING, *OF_JOBS])
    assert tried == dict.fromkeys(names, True)
    assert {"best.toml", "trials.csv"} <= files_of("out")
    assert "is complete" in flowpm_here("tune", "tune.toml", "--output", "out", "--resume").stdout


def as_command(monkeypatch, module, mesh, *checks):
    """Lets a command go straight to its work, on one rank: what it checks before is replaced."""
    for name in checks:
        monkeypatch.setattr(f"flowpm_dist.cli.{module}.{name}", MagicMock())
    monkeypatch.setattr(f"flowpm_dist.cli.{module}.{mesh}", lambda *_, **__: "row:1")
    training = SimpleNamespace(plan=MagicMock(), folder=MagicMock(), split_there=lambda _: "ab")
    monkeypatch.setattr(f"flowpm_dist.cli.{module}.read_training", lambda _: training)

    @contextmanager
    def begun(*_, **__):
        with Progress() as progress:
            yield progress

    preview = SimpleNamespace(begun=begun, check_memory=lambda **_: None)
    monkeypatch.setattr(common, "Preview", lambda *_: preview)


def test_evaluate(here, breaks, monkeypatch):
    methods = {"network": predictions(error=0.1), "power": predictions(error=0.3)}
    curve = LearningCurve(np.array([4, 8]), dict.fromkeys(NAMES, np.array([0.9, 0.5])))
    scores = {name: score(found, MEANS) for name, found in methods.items()}
    with Progress() as progress:
        evaluation = Evaluation(
            "network", "test", methods, scores, {}, MEANS, {}, {"network": curve}, {"network": "."},
            (), ({"folder": "t"},), Path("out"), "row:1", progress, posterior_results("test"),
        )  # fmt: skip
        evaluation.write(Path("whole"))
    names = "check_comparable", "asking_demand", "check_evaluation_folder"
    as_command(monkeypatch, "evaluate", "common_mesh", *names)
    monkeypatch.setattr(
        "flowpm_dist.cosmoflow.evaluation.evaluation.evaluate", lambda *_, **__: evaluation
    )
    module = "flowpm_dist.cosmoflow.evaluation"
    tables = {
        f"{module}.results.Evaluation.markdown": "table.md",
        f"{module}.posteriors.PosteriorResults.markdown": "posteriors.md",
        "flowpm_dist.cli.evaluate.show": SUMMARY,
    }
    tried = breaks("", lambda: json.loads(Path("out", SCORES).read_text())["main"], **tables)
    written = ["table.md", "predicted.png", "calibration.png", "learning_curve.png"]
    written += ["posteriors.md", "ranks.png", "tarp.png"]
    heard = []
    monkeypatch.setattr(Progress, "warn", lambda _, text: heard.append(f"warning: {text}\n"))
    done = flowpm_here("evaluate", "training", "--output", "out")
    done.stderr += "".join(heard)
    check_warned(done, [*written, *OF_JOBS])
    assert tried == dict.fromkeys([*written, *OF_JOBS], True)
    check_same("out", "whole", written)
    monkeypatch.setattr(Evaluation, "_decorate", lambda *_: None)
    (killed := Path("out/.predicted.png.0123abcd.partial")).touch()
    evaluation.write(Path("out"))
    assert not killed.exists()


def test_predict(here, breaks, monkeypatch):
    samples = np.random.default_rng(0).uniform(0.3, 0.4, (50, 2))
    priors = UniformPriors({"Omega_m": (0.1, 0.5), "sigma8": (0.1, 0.9)})
    posterior = VolumePosterior("flow", priors, samples, Question("v", "t"), 3)
    found = VolumePrediction((("Omega_m", 0.3, 0.1),), (), posterior)
    names = "check_question", "fitted_heads", "asking_demand"
    as_command(monkeypatch, "predict", "prediction_mesh", *names, "check_prediction_folder")
    monkeypatch.setattr("flowpm_dist.cli.predict.predict_volume", lambda *_, **__: found)
    tried = breaks("", Path("out/samples.npz").exists)
    done = flowpm_here("predict", "training", "v", "--output", "out")
    check_warned(done, ["corner.png"])
    assert tried == {"corner.png": True} and files_of("out") == {"samples.npz"}
    assert done.stdout.startswith("Omega_m = 0.3 ± 0.1\nOmega_m: 68.3% from 0.3")
    with pytest.warns(UserWarning, match="no corner.png: RuntimeError: out of ink. The results"):
        posterior.write(Path("out"))


def test_a_backend_that_is_not_installed_and_a_full_output(here):
    """Figures in files need no backend. The summary alone is lost."""
    Path("run.toml").write_text(SIMULATION)
    buffered = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "simulate", "run.toml", "--output", "out"],
            env={**buffered, "PYTHONPATH": commands.ROOT, "MPLBACKEND": "Qt4Agg"},
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall("warning: (.*)", done.stderr) == [
        "no summary: No space left on device. The results are not affected."
    ]
    assert {"density.png", "power_spectrum.png"} < files_of("out")
    assert SimulationFolder(Path("out")).is_complete and Path("out/report.html").exists()


@pytest.mark.parametrize(("backend", "after"), [("svg", "svg"), ("Qt4Agg", "agg")])
def test_a_valid_backend_stays_the_one_of_pyplot(backend, after):
    """Matplotlib is imported without it, and has it afterwards."""
    script = (
        "import os\nfrom flowpm_dist.io.errors import decoration\n"
        "with decoration('figure'):\n    from flowpm_dist.io import figures\n"
        "from matplotlib import pyplot\nprint(os.environ['MPLBACKEND'], pyplot.get_backend())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": commands.ROOT, "MPLBACKEND": backend},
    )  # fmt: skip
    assert done.stdout.lower().split() == [backend.lower(), after] and not done.stderr


def test_what_becomes_a_warning():
    warned = []
    for error, said in (
        (WorkError("cannot write a.png: full"), "cannot write a.png: full"),
        (OSError(28, "No space left on device", "a.png"), "No space left on device: 'a.png'"),
        (KeyError("k"), "KeyError: 'k'"),
        (MemoryError(), "MemoryError"),
    ):
        with decoration("a.png", warned.append):
            raise error
        assert warned.pop() == f"no a.png: {said}. The results are not affected."
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), decoration("a.png", warned.append):
            raise error

    assert not warned


def test_a_warning_that_cannot_be_shown_ends_nothing():
    """On a full disk, with a closed standard error, and with Python's option -W error."""
    shown = []

    def full(text):
        shown.append(text)
        raise OSError(28, "No space left on device")

    with decoration("a.png", full):
        raise KeyError("k")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with decoration("a.png"):
            raise KeyError("k")
    progress = Progress(stream=(stream := StringIO()))
    stream.close()
    with decoration("a.png", progress.warn):
        raise KeyError("k")
    assert shown == ["no a.png: KeyError: 'k'. The results are not affected."]


def test_figures_are_drawn_in_decorations_alone():
    """And no other module than those of figures imports matplotlib when it is imported."""
    root, drawn = Path(commands.ROOT) / "flowpm_dist", 0
    of_figures = [*root.rglob("figures.py"), *root.rglob("pictures.py")]
    for path in sorted({*root.rglob("*.py")} - {*of_figures}):
        tree = ast.parse(path.read_text())
        drawn += path.read_text().count("with drawing(")
        assert "save_figure(" not in path.read_text() or path.name == "drawing.py", path
        for node in tree.body:
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [getattr(node, "module", None), *(each.name for each in node.names)]
                assert not re.search(r"matplotlib|\b(figures|pictures)\b", f"{names}"), path
    assert drawn > 15
