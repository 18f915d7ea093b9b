"""Public files: ranks open them in shares, find the same, and fail together; a training on them."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from public_layout import NAMES, write_public
from ranks import RANK, SIZE, process_mesh, shared_folder
from tiny_network import TINY

from flowpm_dist.cosmoflow.evaluation import summaries
from flowpm_dist.cosmoflow.evaluation.evaluation import evaluate
from flowpm_dist.cosmoflow.evaluation.meshes import common_mesh
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.saved import read_training
from flowpm_dist.cosmoflow.training.session import TrainingSession
from flowpm_dist.cosmoflow.volumes import public_files, record_writer
from flowpm_dist.cosmoflow.volumes.record_files import RecordError
from flowpm_dist.cosmoflow.volumes.record_writer import stage_files
from flowpm_dist.cosmoflow.volumes.records import RecordDataset
from flowpm_dist.cosmoflow.volumes.tfrecords import record_bounds
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import read_rows

RUN = f"""
[box]
grid = 16
size = 128.0
[network]
name = "{TINY.name}"
gather_below = 2
[training]
preset = "mlperf"
batch = 2
epochs = 5
[data]
source = "files"
folder = "."
parameters = ["Omega_m", "sigma8", "n_s"]
"""
MANY = 1000


@pytest.mark.ranks(1, 2)
def test_ranks_share_the_files_to_open(tmp_path_factory, monkeypatch):
    """Each opens its part and the first; then the first alone; all ranks report damage."""
    folder, mesh = shared_folder(tmp_path_factory), process_mesh(f"row:{SIZE}")
    monkeypatch.setenv("FLOWPM_CACHE", str(folder / "cache"))
    counts = np.random.default_rng(1).poisson(2.0, (MANY, 2, 2, 2, 4))
    if RANK == 0:
        write_public(folder / "train", counts, packed=True, last=3)
    mesh.barrier()
    opened = []

    def noted(path, *rest):
        opened.append(path)
        return record_bounds(path, *rest)

    monkeypatch.setattr(public_files, "record_bounds", noted)
    data = RecordDataset(folder, "train", parameters=NAMES, mesh=mesh)
    assert len(data) == MANY and len(opened) == 2 + (MANY - 2) // SIZE
    opened.clear()
    again = RecordDataset(folder, "train", parameters=NAMES, mesh=mesh)
    assert len(again) == MANY and len(opened) == 2
    [(volume, *_, index)] = again.batches(4, (RANK, 1), steps=1, start_step=249, shuffle=False)
    assert index.tolist() == [996 + RANK]
    np.testing.assert_array_equal(volume, counts[index])
    mesh.barrier()
    if RANK == 0:
        path = folder / "train/univ_000990.tfrecord"
        path.write_bytes(path.read_bytes()[:-7])
    mesh.barrier()
    with pytest.raises(RecordError, match="univ_000990.*damaged"):
        RecordDataset(folder, "train", parameters=NAMES, mesh=mesh)


@pytest.mark.ranks(2)
def test_no_rank_reads_before_files_are_staged(tmp_path_factory, monkeypatch):
    folder, mesh = shared_folder(tmp_path_factory), process_mesh(f"row:{SIZE}")

    def slow(source, into, split, progress):
        time.sleep(0.3)
        (into / split).touch()

    monkeypatch.setattr(record_writer, "stage", slow)
    requested = SimpleNamespace(data=SimpleNamespace(source="files", folder=folder, staging=folder))
    stage_files(requested, mesh, Progress(rank=1))
    assert sorted(path.name for path in folder.iterdir()) == ["train", "validation"]


@pytest.mark.ranks(2)
@pytest.mark.long
def test_the_preset_trains_on_packed_files_judged_on_validation(tmp_path_factory, monkeypatch):
    """As there is no test set; validation after each epoch, in the table and in the log."""
    folder, mesh = shared_folder(tmp_path_factory), process_mesh(f"replica:{SIZE}")
    if RANK == 0:
        counts = np.random.default_rng(1).poisson(2.0, (10, 16, 16, 16, 4))
        write_public(folder / "train", counts[:6], packed=True)
        write_public(folder / "validation", counts[6:], packed=True)
        (folder / "run.toml").write_text(RUN)
    mesh.barrier()
    plan, work = TrainingPlan.load(folder / "run.toml"), TrainingFolder(folder / "training")
    if RANK == 0:
        work.begin(resume=False)
    mesh.barrier()
    outcome = TrainingSession(plan, mesh, work, Progress(rank=1)).run(resume=False)
    work.release()
    assert outcome.step == 15
    mesh.barrier()
    read = read_training(work.path)
    assert common_mesh([read], SIZE, None) == f"replica:{SIZE}"
    found = evaluate([read], mesh, Progress(rank=1))
    monkeypatch.setattr(summaries, "MOST", 2)
    if RANK == 0:
        work.statistics("validation").unlink()
    mesh.barrier()
    part = evaluate([read], mesh, Progress(rank=1))
    if found is None:
        return
    assert part.differences == {} and "bootstrap" not in part.markdown()
    assert "on 2 of the 4 volumes" in "".join(part.notes)
    (note,) = (note for note in found.notes if "no split 'test'" in note)
    assert "the volumes of validation" in note and len(found.predictions["network"].truth) == 4
    lines = work.mlperf_log.read_text().splitlines()
    message = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    errors = [line["value"] for line in message if line["key"] == "eval_error"]
    rows = read_rows(work.path / "metrics.csv")
    assert [float(row["validation_mae"]) for row in rows[2::3]] == pytest.approx(errors)
    assert [float(row["rate"]) for row in rows[::3]] == pytest.approx(
        [1e-3 + epoch * (1e-3 / 32 - 1e-3) / 4 for epoch in range(5)]
    )
    assert message[-1]["key"] == "run_stop" and message[-1]["metadata"]["status"] == "success"
    predicted = found.predictions["network"]
    error = np.abs(predicted.mean - predicted.truth).mean() / (2 / np.sqrt(12))  # not bounded
    assert errors[-1] == pytest.approx(error, rel=1e-5)
