"""Keys set from outside, how much a job says, lists and reports of runs, runs from Python."""

import base64
import csv
import json
import os
import re
import shutil
import signal
import sys
import tomllib
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, flowpm_and_loaded, flowpm_here, folder_with, plain, python
from run_files import RUN

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.training.dataset import UNFINISHED
from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.job import command_of, read_record
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.report import commit, leave_report
from flowpm_dist.jobs.run_file import LEFT_OUT, completions, parse_settings
from flowpm_dist.options.base import as_written
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.simulate.options import SimulationOptions
from tests.cosmoflow.test_cli_training import RUN as TRAINING

here = folder_with(RUN)


def test_settings_are_read_as_in_a_run_file():
    texts = ["a.b=3", "a.c = [1, 2.5]", 'a.d="x y"', "a.e=cola", "a.f=row:2,col:2", "a.g=", "a.b=4"]
    assert parse_settings(texts) == {
        ("a", "b"): 4, ("a", "c"): [1, 2.5], ("a", "d"): "x y", ("a", "e"): "cola",
        ("a", "f"): "row:2,col:2", ("a", "g"): LEFT_OUT,
    }  # fmt: skip
    tables = [{"steps": [3, 6], "correction": "network"}, {"deconvolve": True}, {}]
    assert parse_settings([f"a.h={as_written(tables)}"]) == {("a", "h"): tables}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps=3", "--set steps=3: must be SECTION.KEY=VALUE, such as evolution.steps=20"),
        ("box.grid=[1,", "--set box.grid=[1,: the value must be as in a run file"),
        ("evolution.steps=0", "evolution.steps = 0: must be a whole number of at least 1"),
        ("evolution.steps=two", "evolution.steps = 'two': must be a whole number"),
        ("evolution.stebs=2", "evolution.stebs is not a key; did you mean steps?"),
        ("evolutoin.steps=2", "evolutoin is not a section; did you mean evolution?"),
        ("initial.seed=", "initial.seed, initial.white_noise neither is given"),
    ],
)
def test_a_wrong_setting_is_told_as_in_a_run_file(here, text, message):
    done = flowpm_here("simulate", "run.toml", "--set", text)
    assert done.returncode == 2
    assert message in plain(done.stderr)


@pytest.mark.parametrize(
    ("begun", "texts"),
    [
        ("evolution.st", ["evolution.steps=", "evolution.steps=10"]),
        ("evolution.integrator=c", ["evolution.integrator=cola"]),
        ("evolution.steps=20", []),
        ("initial.pai", [f"initial.paired={value}" for value in ("", "true", "false")]),
        (
            "lightcone.p",
            [f"lightcone.{key}=" for key in ("pixels", "particles", "plane_width", "planes")],
        ),
        ("lightcone.nsid", ["lightcone.nside="]),  # of another variant than the default
        ("evolutoin.st", []),
    ],
)
def test_a_setting_is_completed_from_the_declarations(begun, texts):
    assert completions(SimulationOptions, begun) == texts


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("sim", {"simulate"}),
        ("simulate run.toml --resu", {"--resume"}),
        ("simulate run.toml --set training.batch", set()),
        ("submit train run.toml --set training.batch", {"training.batch=", "training.batch=4"}),
    ],
)
def test_a_shell_completes_without_tensorflow(monkeypatch, words, texts):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setenv("COMP_WORDS", f"flowpm-dist {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    before = "import sys; sys.argv[0] = 'flowpm-dist'"
    monkeypatch.setenv("_FLOWPM_DIST_COMPLETE", "complete_bash")
    done, loaded = flowpm_and_loaded(before=before)
    assert {*done.stdout.split("#")[0].split()} == texts, done.stderr
    assert "tensorflow" not in loaded


def test_every_command_with_a_run_file_takes_settings(here):
    Path("train.toml").write_text(TRAINING)
    for words in (["train", "train.toml"], ["dataset", "train.toml", "--output", "set"]):
        done = flowpm_here(*words, "--set", "training.batch=0")
        assert "training.batch = 0: must be a whole number of at least 1" in plain(done.stderr)
    example = Path(__file__).parents[2] / "examples" / "reconstruct.toml"
    done = flowpm_here("reconstruct", str(example), "--set", "search.keep=0")
    assert "search.keep = 0: must be a whole number of at least 1" in plain(done.stderr)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two simulations, the second with more steps by --set and quiet; and what they said."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "run.toml").write_text(RUN)
    words = ["simulate", str(folder / "run.toml"), "--output"]
    one = flowpm_here(*words, str(folder / "one"), "--verbose")
    more = flowpm_here(*words, str(folder / "more"), "-q", "--set", "evolution.steps=3")
    assert (one.returncode, more.returncode) == (0, 0), (one.stderr, more.stderr)
    return folder, one, more


def test_a_setting_is_in_the_resolved_run(two):
    folder, _, _ = two
    assert tomllib.loads((folder / "more/run.toml").read_text())["evolution"]["steps"] == 3
    assert len(json.loads((folder / "more/timings.json").read_text())["steps"]) == 3


def test_a_quiet_run_says_its_results_and_a_verbose_one_where_it_runs(two):
    _, verbose, quiet = two
    assert quiet.stderr == ""
    assert "Results in" in quiet.stdout
    assert "1 rank, " in verbose.stderr and "numpy " in verbose.stderr
    assert "step 2/2" in verbose.stderr and "one/report.html" in verbose.stderr


def test_a_list_of_runs_has_their_states_and_results(two, here):
    folder, _, _ = two
    shutil.copytree(folder / "more", "runs/more")
    running = TrainingFolder(here / "runs/net")
    running.begin(resume=False)  # and holds its lock
    stopped = TrainingFolder(here / "runs/stopped")
    stopped.begin(resume=False)
    stopped.write_mark(complete=False, step=3, steps=8)
    stopped.release()
    (stopped.metrics).write_text("step,loss,validation_loss\n0,0.5,\n1,0.4,0.6\n2,0.25,\n")
    found = ReconstructionFolder(here / "runs/found")
    found.begin(resume=False)
    found.write_mark(complete=True)
    found.release()
    found.result.write_text(json.dumps({"parameters": {"sigma8": {"value": 0.8125}}}))
    Path("runs/judged").mkdir()
    scores = {"generator": "flowpm-dist", "split": "test", "samples": 4, "main": "network",
              "trainings": [{"folder": str(stopped.path)}],
              "scores": {"network": {"sigma8": {"rmse_over_mean": 0.25}}}}  # fmt: skip
    Path("runs/judged/scores.json").write_text(json.dumps(scores))
    Path("runs/set").mkdir()
    Path("runs/set", UNFINISHED).touch()
    Path("runs/other").mkdir()
    shutil.copytree(folder / "more/snapshot.zarr", "runs/saved/snapshot.zarr")  # as State.save does
    for name, text in {
        "cut": '{"steps": [',
        "deep": "[" * 100_000,
        "list": '{"steps": ["x"]}',
    }.items():
        shutil.copytree(folder / "more", f"runs/{name}")
        Path("runs", name, "timings.json").write_text(text)
    lines = flowpm_here("runs", "runs").stdout.splitlines()
    running.release()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    names = ("cut", "deep", "found", "judged", "list", "more", "net", "saved", "set", "stopped")
    assert list(rows) == ["run", *(f"runs/{n}" for n in names)]
    for name in ("cut", "deep"):
        assert rows[f"runs/{name}"].startswith("- damaged 20")
        assert rows[f"runs/{name}"].endswith("error: timings.json is damaged")
    assert rows["runs/list"].startswith("- damaged 20")
    assert re.fullmatch(r"simulation complete [-0-9]+ [:0-9]+ -", rows["runs/saved"])
    assert rows["runs/more"].startswith("simulation complete 3/3 steps 20")
    assert "P/linear at 0." in rows["runs/more"]
    assert rows["runs/net"].startswith("training running 20")
    assert rows["runs/stopped"].startswith("training stopped 3/8 steps")
    assert rows["runs/stopped"].endswith("loss 0.25, validation loss 0.6")
    assert rows["runs/found"].startswith("reconstruction complete")
    assert rows["runs/found"].endswith("sigma8 where the posterior is highest 0.8125")
    assert rows["runs/set"].startswith("dataset stopped")
    assert rows["runs/judged"].startswith("evaluation complete 4 samples 20")
    assert rows["runs/judged"].endswith("RMSE of sigma8 / mean's 0.25")


def test_a_comparison_has_what_differs_and_nothing_else(two):
    folder, _, _ = two
    lines = flowpm_here("runs", str(folder), "--compare").stdout.splitlines()
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert set(rows) >= {"done", "evolution.steps", "seconds"}
    assert rows["evolution.steps"][1:] == ["3", "2"]
    assert not [name for name in rows if name.startswith(("box", "cosmology", "mesh", "kind"))]


class Page(HTMLParser):
    """What a page has: its elements, their attributes, its texts, and the cells of its tables."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.attributes, self.text, self.rows = [], [], [], [], []
        self.feed(Path(path).read_text(encoding="ascii"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("img", "meta"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open and data.strip():
            self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)

    def values(self, name):
        return [value for key, value in self.attributes if key == name]


def test_a_run_leaves_a_page_that_needs_nothing_else(two):
    folder, _, _ = two
    page = Page(folder / "more/report.html")
    assert {"script", "link", "iframe", "object", "base"}.isdisjoint(page.tags)
    pictures = [base64.b64decode(source.partition("base64,")[2]) for source in page.values("src")]
    names = ("density.png", "power_spectrum.png")
    assert pictures == [(folder / "more" / name).read_bytes() for name in names]
    assert all(link[0] == "#" and link[1:] in page.values("id") for link in page.values("href"))
    assert "url(" not in Path(folder / "more/report.html").read_text()
    shown = dict(row for row in page.rows if len(row) == 2)
    assert (shown["done"], shown["steps"], shown["shape"]) == ("3/3 steps", "3", '"row:1,col:1"')
    assert (shown["command"], shown["seed"], shown["numpy"]) == ("simulate", "1", np.__version__)
    timings = json.loads((folder / "more/timings.json").read_text())
    assert shown["compile [s]"] == f"{timings['compile']:.5g}"
    paint = page.text.index("paint")
    assert page.text[paint + 1].startswith(f"{sum(timings['phases']['paint']):.3g} s, ")
    with open(folder / "more/power_spectrum.csv") as file:
        head, *rows = csv.reader(file)
    first = page.rows.index(head) + 1
    assert np.array(page.rows[first : first + len(rows)], float) == pytest.approx(
        np.array(rows, float), rel=1e-4
    )
    assert "Warnings" not in page.text
    assert "4,096 particles, 3 steps, mesh row:1,col:1" in page.text[:6]
    assert "The density of a slab through the box, relative to the mean. (density.png)" in page.text


def test_a_page_that_compares_has_what_differs_side_by_side(two, here):
    folder, _, _ = two
    (folder / "more/power_spectrum.csv").rename(folder / "more/other.csv")
    try:
        done, loaded = flowpm_and_loaded("report", str(folder / "one"), str(folder / "more"))
    finally:
        (folder / "more/other.csv").rename(folder / "more/power_spectrum.csv")
    assert done.stdout.startswith("Report in comparison.html"), done.stderr
    assert not loaded
    page = Page("comparison.html")
    assert ["evolution.steps", "2", "3"] in page.rows
    assert ["initial.seed", "1"] in page.rows  # the same in both
    assert ["initial.seed", "1", "1"] not in page.rows
    assert [str(folder / "one"), str(folder / "more")] in page.rows
    sources = page.values("src")
    for at, name in enumerate(("density.png", "power_spectrum.png")):
        data = [(folder / run / name).read_bytes() for run in ("one", "more")]
        assert [base64.b64decode(s.partition(",")[2]) for s in sources[2 * at :][:2]] == data
    assert page.text.count("none") == 2  # tables that one run has alone
    again = flowpm_here("report", str(folder), "--output", "all.html")
    assert again.returncode == 0 and "2 runs" in Page("all.html").text


def test_what_a_user_names_is_text_in_a_page(two, here):
    folder, _, _ = two
    named = "<b>\"&'<script>"
    shutil.copytree(folder / "more", named)
    shutil.copy(folder / "more/density.png", f"{named}/{named}.png")
    Path(named, f"{named}.csv").write_text("<i>a</i>,b\n<u>&amp;,\u03c3\n")
    Path(named, "run.toml").write_text("[box]\nnote = '<img src=x onerror=alert(1)>'\n")
    about = {"warnings": ["</ul><script>alert(1)</script>"], "versions": {"<b>": "<i>"}}
    Path(named, "provenance.json").write_text(json.dumps(about))
    timings = {"steps": [1.0], "phases": {"<hr>": [1.0]}, "<em>": "<q>", "units": 5}
    Path(named, "timings.json").write_text(json.dumps(timings))
    done = flowpm_here("report", named, "more", "--output", "page.html")
    assert done.returncode == 2  # "more" is not here
    done = flowpm_here("report", named)
    assert done.returncode == 0, done.stderr
    page = Page(Path(named, "report.html"))
    usual = Page(folder / "more/report.html")
    assert set(page.tags) - set(usual.tags) == {"ul", "li"}
    assert "onerror" not in dict(page.attributes) and named in page.values("alt")
    names = (
        named,
        f"{named}.png",
        f"{named}.csv",
        "<i>a</i>",
        "<u>&amp;",
        "\u03c3",
        "<hr>",
        "<em>",
    )
    values = ("<q>", '"<img src=x onerror=alert(1)>"', about["warnings"][0], "<b>", "<i>")
    for text in (*names, *values):
        assert text in page.text, text


def test_damaged_files_are_named_in_a_page(two, here):
    folder, _, _ = two
    shutil.copytree(folder / "more", "cut")
    picture = Path("cut/density.png").read_bytes()
    Path("cut/density.png").write_bytes(picture[: len(picture) // 2])
    Path("cut/power_spectrum.csv").write_bytes(b"\xff\x00")
    Path("cut/other.csv").mkdir()
    Path("cut/provenance.json").write_text("[")
    done = flowpm_here("report", "cut")
    assert done.returncode == 0, done.stderr
    page = Page("cut/report.html")
    assert len(page.values("src")) == 1
    for text in ("damaged: not a whole PNG", "damaged: not a table of comma-separated values",
                 "cannot be read: must be a regular file"):  # fmt: skip
        assert text in page.text, text


def test_a_page_keeps_the_first_row_of_a_long_table_and_the_last(here):
    folder = TrainingFolder(here / "net")
    folder.begin(resume=False)
    folder.write_mark(complete=False)
    folder.release()
    folder.metrics.write_text("step,loss\n" + "".join(f"{n},0.123456789\n" for n in range(500)))
    assert flowpm_here("report", "net").returncode == 0
    page = Page("net/report.html")
    first = page.rows.index(["step", "loss"]) + 1
    assert [page.rows[first], page.rows[first + 15]] == [["0", "0.12346"], ["499", "0.12346"]]
    assert "16 of 500 rows" in page.text and page.text[2].startswith("training, stopped; ")


def test_warnings_of_a_job_are_in_its_page(here, capsys):
    folder = TrainingFolder(here / "net")
    folder.begin(resume=False)
    folder.write_mark(complete=True)
    with pytest.warns(UserWarning, match="no theory"), Progress() as progress:
        progress.warn("a small sample")
        for _ in range(2):
            warnings.warn("no theory", stacklevel=1)
        leave_report(folder.path, "train", "row:1", progress, folder.record, {})
    page = Page(folder.path / "report.html")
    assert {"a small sample", "no theory"} <= set(page.text) and page.text.count("no theory") == 1
    assert "training, complete" in page.text[2]  # though it still holds the lock


@pytest.mark.parametrize("missing", ["report.html", "provenance.json"])
def test_a_page_that_cannot_be_written_is_a_warning(here, capsys, missing):
    folder = TrainingFolder(here / "net")
    folder.begin(resume=False)
    folder.write_mark(complete=True)
    (folder.path / missing).mkdir()
    with Progress() as progress:
        leave_report(folder.path, "train", "row:1", progress, folder.record, {})
    assert "warning: no report: " in capsys.readouterr().err
    assert (folder.path / missing).is_dir() and folder.is_complete


def test_pages_that_cannot_be_made(two, here):
    folder, _, _ = two
    Path("mine.html").write_text("<title>mine</title>")
    stopped = TrainingFolder(here / "stopped")
    stopped.begin(resume=False)
    stopped.write_mark(complete=False, step=3, steps=8)
    stopped.release()
    shutil.copytree(folder / "more", "cut")
    Path("cut/timings.json").write_text('{"steps": [')
    one = str(folder / "one")
    for words, status, message in (
        (["none"], 2, "none: there is no such folder"),
        (["."], 2, "cut is damaged: timings.json is damaged"),
        (
            ["stopped"],
            2,
            "stopped holds no results yet, as its training is stopped after 3/8 steps",
        ),
        ([one, "--output", "mine.html"], 2, "mine.html is no report of flowpm-dist: give another"),
        ([one, "--output", "mine.html/page.html"], 1, "cannot write mine.html/page.html: "),
    ):
        done = flowpm_here("report", *words)
        assert (done.returncode, message in done.stderr) == (status, True), done
    assert Path("mine.html").read_text() == "<title>mine</title>"


def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "work/flowpm_dist/__init__.py"
    package.parent.mkdir(parents=True)
    monkeypatch.setattr(fpm, "__file__", str(package))
    assert commit.__wrapped__() is None
    log = tmp_path / "git/logs/HEAD"
    log.parent.mkdir(parents=True)
    log.write_text(f"{'0' * 40} {'1' * 40} me\tbegin\n{'1' * 40} {'2' * 40} me\tmore\n")
    (tmp_path / "work/.git").write_text("gitdir: ../git\n")
    assert commit.__wrapped__() == "2" * 40
    (tmp_path / "work/.git").unlink()
    (tmp_path / "git").rename(tmp_path / "work/.git")
    assert commit.__wrapped__() == "2" * 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none: there is no such folder"),
        (["."], "no runs in .: give the folders that commands wrote"),
    ],
)
def test_folders_without_runs(here, words, message):
    done = flowpm_here("runs", *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_sections_say_the_command():
    for name, command in (("demo", "simulate"), ("train", "train"), ("reconstruct", "reconstruct"),
                          ("sample", "reconstruct"), ("sigma8", "reconstruct"),
                          ("cosmoflow", "train")):  # fmt: skip
        path = Path(__file__).parents[2] / "examples" / f"{name}.toml"
        assert command_of(set(tomllib.loads(path.read_text()))) == command, name


def test_a_run_from_python_is_that_of_the_command(two, here):
    folder, _, _ = two
    table = {**tomllib.loads(RUN), "box": {"grid": np.int64(16), "size": np.array([64.0] * 3)}}
    found = fpm.run(table, here / "again", settings={"evolution.steps": 3}, quiet=True)
    assert found == read_record(here / "again")
    assert (found.kind, found.state, found.steps) == ("simulation", "complete", "3/3 steps")
    power = [name for name in found.results if name.startswith("P/linear")]
    assert found.results[power[0]] == pytest.approx(read_record(folder / "more").results[power[0]])
    assert sorted(os.listdir()) == ["again", "run.toml"]
    with pytest.raises(UserError, match="again holds a finished run: add --overwrite"):
        fpm.run("run.toml", "again", settings={"evolution.steps": 3})


def test_mistakes_from_python_are_exceptions_and_load_no_tensorflow(here):
    script = (
        "import sys, flowpm_dist as fpm\n"
        "try: fpm.run({'box': {'grid': 15, 'size': 64.0}}, 'out')\n"
        "except ValueError as error: print(error)\n"
        "print('tensorflow' in sys.modules)"
    )
    done = python(script)
    assert done.stdout.startswith("the run: "), done.stderr
    assert "box.grid = 15: must be an even whole number" in done.stdout
    assert done.stdout.endswith("False\n")
    with pytest.raises(UserError, match="output is missing"):
        fpm.run({"box": {}})


def test_an_interrupted_run_still_tells_how_it_ended(here, monkeypatch, capfd):
    command = here / "command"
    command.write_text("""#!/bin/sh
        trap 'echo stopping after this step >&2
            echo "error: stopped by SIGINT; a checkpoint of $3 is kept" >&2; exit 130' INT
        sleep 0.5
        kill -INT $PPID
        while :; do sleep 0.05; done
    """)
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT; a checkpoint of simulate"):
            fpm.run("run.toml", "out")
    finally:
        signal.signal(signal.SIGINT, before)
    assert "stopping after this step" in capfd.readouterr().err
