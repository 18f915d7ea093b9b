"""A job is added in two files and a line: `counting` has options, work, and the line."""

import gzip
import json
import os
import sys
from functools import partial
from pathlib import Path

import commands
import pytest
from commands import ROOT, plain
from rank_jobs import needs_horovod

from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.emulate.folder import EmulationFolder
from flowpm_dist.jobs.folder import OutputError
from meshimpl.launch import host_memory

PATH = os.pathsep.join([ROOT, str(Path(__file__).parent)])
flowpm = partial(commands.flowpm, program=[sys.executable, "-m", "counting"], path=PATH)


@pytest.mark.budget(60)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_job_in_two_files(tmp_path, monkeypatch, ranks):
    """It is planned, refused, checked, stopped, listed and resumed, and replaced only if asked."""
    needs_horovod(ranks)
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[count]\nsteps = 4\n")
    count = ["count", "run.toml", "--ranks", str(ranks)]
    wrong = flowpm(*count, "--set", "count.signal_after=5")
    assert wrong.returncode == 2
    assert "count.signal_after = 5: must be at most 4" in wrong.stderr
    checked = flowpm(*count, "--check")
    assert "[count]\nsteps = 4" in checked.stdout and "# memory: about" in checked.stdout
    stopped = flowpm(*count, "--set", "count.signal_after=2")
    assert stopped.returncode == 128 + 15, stopped.stderr
    assert "stopped by SIGTERM after step 2 of 4; go on with --resume" in plain(stopped.stderr)
    assert "run-count count stopped" in plain(flowpm("runs").stdout)
    other = flowpm(*count, "--set", "count.steps=9", "--resume")
    assert "count.steps = 9: the count in run-count has 4" in plain(other.stderr)
    assert "add --resume to go on with it" in plain(flowpm(*count).stderr)
    done = flowpm(*count, "--resume", "--trace", "1")  # the last step, with its collectives
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"counted {4 * ranks}\n"
    page = Path("run-count/report.html").read_text()
    assert "<h1>run-count</h1>" in page and "count, complete" in page and "running" not in page
    about = json.loads(Path("run-count/provenance.json").read_text())
    assert about["ranks"] == ranks
    # More than Python and TensorFlow take, less than the machine has.
    assert 2**27 < about["peak memory of a rank [bytes]"] < host_memory().limit
    assert "peak memory of a rank [bytes]" in page
    assert_traced(Path("run-count/trace.json.gz"), ranks)
    assert "trace_summary.csv" in page
    assert "run-count is complete." in flowpm(*count, "--resume").stdout


def assert_traced(path, ranks):
    """The last step has two collectives, which all ranks take part in at the same time.

    They are the count, and whether a signal came.
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == {*range(ranks)}
    events.sort(key=lambda event: event.get("ts", 0))
    # Small tensors are gathered, and each rank adds them.
    met = [event for event in events if event["name"].startswith("ALLGATHER ")]
    assert len(met) == (2 if ranks > 1 else 0) and {event["pid"] for event in met} <= {0}
    for rank in range(ranks if met else 0):
        of_rank = [event for event in events if event["pid"] == rank]
        calls = [e for e in of_rank if e["name"].startswith("Communicator.allreduce (")]
        for call, own in zip(calls, met, strict=True):
            assert call["ts"] < own["ts"] + own["dur"] and own["ts"] < call["ts"] + call["dur"]
            if rank == 0:
                assert call["ts"] < own["ts"] < own["ts"] + own["dur"] < call["ts"] + call["dur"]


def test_its_help_and_its_batch_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[count]\nsteps = 4\n")
    assert "Count on all ranks." in flowpm("--help").stdout
    size = ["--nodes", "1", "--ranks-per-node", "2", "--time", "01:00:00", "--dry-run"]
    Path("site.toml").write_text('[site]\nprogram = "flowpm-dist"\n')
    written = flowpm("submit", "count", "run.toml", *size, "--site", "site.toml")
    assert written.returncode == 0, written.stderr
    assert "compgen -G count.json" in Path("run-count.sbatch").read_text()


def test_kinds_have_their_article(tmp_path):
    for folder, text in ((EmulationFolder, "an emulation"), (TrainingFolder, "a training")):
        path = tmp_path / folder.kind
        path.mkdir()
        folder(path).write_mark(complete=False)
        with pytest.raises(OutputError, match=f"{path} holds {text}: add --resume"):
            folder(path).check(needed=0)
