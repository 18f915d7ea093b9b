"""Damaged checkpoints and full disks: what is whole is used, and what is not is named."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from full_disk import disk_of

from flowpm_dist.cosmoflow.network.optimisers import Momentum, Schedule
from flowpm_dist.cosmoflow.planning.folder import TrainedError, TrainingFolder
from flowpm_dist.cosmoflow.training.checkpoints import Checkpoints, Restored, restore_weights
from flowpm_dist.cosmoflow.training.logs import TrainingLogs
from flowpm_dist.cosmoflow.training.trainer import StepReport
from flowpm_dist.io.files import WriteError
from flowpm_dist.jobs.checkpoints import CheckpointStore
from meshimpl.process_mesh import ProcessMesh

MESH = ProcessMesh("replica:1")
DATA = ".data-00000-of-00001"


def checkpoints(folder: Path) -> tuple[Checkpoints, tf.Variable]:
    weights = tf.Variable(np.arange(2000.0, dtype=np.float32))
    optimiser = Momentum(Schedule(0.1))
    optimiser.build([weights])
    return Checkpoints(folder, MESH, [weights], optimiser, 3), weights


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Checkpoints after 2, 6 and 12 steps; the weights are step / 2 times the weights of step 2."""
    folder = tmp_path_factory.mktemp("three")
    kept, weights = checkpoints(folder)
    first = weights.numpy()
    for step in (2, 6, 12):
        weights.assign(first * step / 2)
        kept.save(step)
    return folder


def cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


DAMAGE = {
    "truncated data": lambda stem: cut(Path(f"{stem}{DATA}"), 5000),
    "truncated index": lambda stem: cut(Path(f"{stem}.index"), -20),
    "empty index": lambda stem: cut(Path(f"{stem}.index"), 0),
    "altered data": lambda stem: alter(Path(f"{stem}{DATA}")),
    "altered index": lambda stem: alter(Path(f"{stem}.index")),
    "missing data": lambda stem: Path(f"{stem}{DATA}").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(three, tmp_path, kind, capfd):
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    DAMAGE[kind](tmp_path / "step-12")
    kept, weights = checkpoints(tmp_path)
    found = kept.restore()
    assert found.step == 6
    assert "step-12 is damaged (" in found.note
    assert found.note.endswith("): continuing from step-6 before it")
    np.testing.assert_array_equal(weights, 3 * np.arange(2000.0))
    with pytest.raises(TrainedError, match=r"step-12 is damaged .* --resume continues from step-6"):
        restore_weights(tmp_path, MESH, [weights])
    del kept
    assert capfd.readouterr().err == ""


def test_whole_checkpoints_need_no_words(three):
    kept, _ = checkpoints(three)
    found = kept.restore()
    assert (found.step, found.note) == (12, "")


def test_copies_and_other_files_are_no_checkpoints(three, tmp_path):
    assert len(CheckpointStore(three, "step").numbered()) == 3
    names = ("step-000010.zarr", "step-000002.zarr", "step-000002-copy.zarr", "step-000003.old")
    for name in (*names, "iteration-000004.zarr", ".step-5.partial"):
        (tmp_path / "fields" / name).mkdir(parents=True)
    assert list(CheckpointStore(tmp_path / "fields", "step").numbered()) == [2, 10]
    assert CheckpointStore(tmp_path / "missing", "step").last is None
    kept = [*names[2:], "step-000003.zarr.damaged", "step-1.txt", "step-12.damaged.index"]
    for name in kept[2:]:
        (tmp_path / "fields" / name).touch()
    with CheckpointStore(tmp_path / "fields", "step").written(20, 1) as aside:
        (aside / "step-000020.zarr").mkdir()
    assert {path.name for path in (tmp_path / "fields").glob("step-*")} == {
        "step-000020.zarr", *kept,
    }  # fmt: skip


def test_a_save_of_the_same_number_replaces_it_as_a_whole(tmp_path, monkeypatch):
    """A save that is killed between its files leaves no index with data of another save."""
    store = CheckpointStore(tmp_path, "step")
    for text in ("old", "new"):
        with store.written(5, 2) as aside:
            for name in (f"step-5{DATA}", "step-5.index"):
                (aside / name).write_text(text)
        assert (tmp_path / f"step-5{DATA}").read_text() == text
        assert (tmp_path / "step-5.index").read_text() == text
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), store.written(5, 2) as aside:
        for name in (f"step-5{DATA}", "step-5.index"):
            (aside / name).write_text("third")
    assert store.last is None and (tmp_path / f"step-5{DATA}").read_text() == "new"


def test_where_none_is_whole_a_training_begins_anew(three, tmp_path):
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*.index"):
        cut(path, 10)
    with pytest.raises(TrainedError, match="step-12 is damaged .* begin anew with --overwrite"):
        checkpoints(tmp_path)[0].restore()


def test_what_a_training_that_went_back_has_left_is_removed(three, tmp_path):
    """Damaged checkpoints after the one it went back to, and data whose index was not written."""
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    cut(tmp_path / "step-12.index", 10)
    for name in (f"step-4{DATA}", ".step-7.partial"):
        (tmp_path / name).touch()
    kept, _ = checkpoints(tmp_path)
    assert kept.restore().step == 6
    kept.save(8)
    names = {f"step-{step}{ending}" for step in (2, 6, 8) for ending in (DATA, ".index")}
    assert {path.name for path in tmp_path.iterdir()} == {*names, "checkpoint"}
    assert Path(tf.train.latest_checkpoint(tmp_path)).name == "step-8"
    assert checkpoints(tmp_path)[0].restore() == Restored(8, "")


def test_a_training_goes_on_with_what_an_older_version_wrote(tmp_path):
    """Which left the writing to TensorFlow's CheckpointManager, which also wrote a counter."""
    old, weights = checkpoints(tmp_path)
    old._step.assign(5)
    weights.assign(weights + 1)
    manager = tf.train.CheckpointManager(old._checkpoint, tmp_path, 3, checkpoint_name="step")
    manager.save(checkpoint_number=5)
    kept, restored = checkpoints(tmp_path)
    assert kept.restore() == Restored(5, "")
    np.testing.assert_array_equal(restored, weights)


def test_a_checkpoint_of_another_network_is_not_damaged(three):
    weights = tf.Variable(tf.zeros([7]))
    shapes = r"its Variable is float32 \[2000\], the network's is float32 \[7\]"
    with pytest.raises(
        TrainedError, match=rf"it belongs to another network or optimiser \({shapes}\)"
    ):
        restore_weights(three, MESH, [weights])
    with pytest.raises(TrainedError, match="holds 1 tensors of weights, the network has 2"):
        restore_weights(three, MESH, [weights, weights])


def test_the_best_weights_are_kept_and_known_when_a_training_goes_on(tmp_path):
    def session():
        weights = tf.Variable(tf.zeros([3]))
        optimiser = Momentum(Schedule(0.1))
        optimiser.build([weights])
        kept = Checkpoints(tmp_path / "all", MESH, [weights], optimiser, 2, tmp_path / "best")
        return kept, weights

    def best():
        weights = tf.Variable(tf.zeros([3]))
        return restore_weights(tmp_path / "best", MESH, [weights]), weights.numpy()[0]

    kept, weights = session()
    for step, loss in ((2, 0.5), (4, -0.1), (6, np.nan), (8, 0.2)):
        weights.assign(tf.fill([3], float(step)))
        kept.validated(loss, step)
    kept.save(8)
    assert best() == (4, 4.0)
    kept, weights = session()
    assert kept.restore().step == 8
    known = kept.best
    assert (float(known.loss), int(known.step), int(known.waited)) == (-0.1, 4, 2)
    kept.validated(-0.1, 10)
    assert best() == (4, 4.0) and int(known.waited) == 3
    weights.assign([12.0, 12.0, 12.0])
    kept.validated(-0.2, 12)
    assert best() == (12, 12.0) and int(known.waited) == 0
    cut(tmp_path / "best" / "step-12.index", 10)
    with pytest.raises(TrainedError, match="is whole: take the last weights .--checkpoint last"):
        best()


def test_a_full_disk_is_told_in_a_line_by_checkpoints_and_events(tmp_path):
    kept, _ = checkpoints(tmp_path / "checkpoints")
    kept.save(1)
    logs = TrainingLogs(TrainingFolder(tmp_path), 0)
    with disk_of(1000):
        with pytest.raises(WriteError, match="^cannot write .*checkpoints/step-2: File too large$"):
            kept.save(2)
        with pytest.raises(WriteError, match="^cannot write .*board/from-0: File too large$"):
            for step in range(4):
                logs.add(StepReport(step, 0.5, 0.1, 1.0, True, {}), {}, 1.0, None)
            logs.flush()
        logs.close()
    assert checkpoints(tmp_path / "checkpoints")[0].restore().step == 1
