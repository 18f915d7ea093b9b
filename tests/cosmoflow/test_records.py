"""Volumes in TFRecord files: any ranks read what was written, in one order; damage is named."""

import gzip
import json
import os
import shutil
import tracemalloc
import zlib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from commands import python

from flowpm_dist.cosmoflow.volumes import record_writer
from flowpm_dist.cosmoflow.volumes.draws import Lanes
from flowpm_dist.cosmoflow.volumes.record_files import (
    Block,
    DatasetHeader,
    RecordError,
    finish_dataset,
    read_header,
    record_bounds,
)
from flowpm_dist.cosmoflow.volumes.record_writer import RecordWriter, clear_split, stage
from flowpm_dist.cosmoflow.volumes.records import RecordDataset, global_order
from flowpm_dist.cosmoflow.volumes.sources import DummySource, PhaseClock
from meshimpl.process_mesh import ProcessMesh

NAMES = ("Omega_m", "sigma8", "n_s")
GRID = (8, 4, 6)
SAMPLES = 7


def header(**changes) -> DatasetHeader:
    return DatasetHeader(**({"grid": GRID, "parameters": NAMES, "samples_per_file": 3} | changes))


def make_volumes(channels=1, samples=SAMPLES, grid=GRID) -> np.ndarray:
    rng = np.random.default_rng(3)
    return rng.lognormal(size=(samples, *grid, channels)).astype(np.float32)


def parameters_of(index) -> np.ndarray:
    return np.stack([0.3 + index / 1000, 0.8 + index / 100, index / 7.0], -1).astype(np.float32)


def write(folder: Path, volumes, head: DatasetHeader, split="train", replicas=1, **options) -> None:
    """Written as by `replicas` x rows x columns ranks."""
    rows, cols = head.blocks
    for replica, row, col in product(range(replicas), range(rows), range(cols)):
        block = Block(row, rows, col, cols)
        x, y = block.cut(head.grid)
        place = {"block": block, "first_file": replica, "file_stride": replicas}
        with RecordWriter(folder, split, head, **place, **options) as writer:
            for i in range(replica, len(volumes), replicas):
                writer.write(volumes[i][x, y], parameters_of(i), seed=100 + i, index=i)
    finish_dataset(folder, head)


def read_all(data: RecordDataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The samples in the order of the files."""
    [batch] = data.batches(len(data), shuffle=False, steps=1)
    return batch


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Seven samples in three files; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder, make_volumes(), header())
    return folder


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("compressed", [False, True])
def test_float32_volumes_come_back_bit_equal(tmp_path, compressed, channels):
    volumes = make_volumes(channels)
    write(tmp_path, volumes, header(channels=channels, compressed=compressed))
    volume, y, index = read_all(RecordDataset(tmp_path, "train", grid=GRID, parameters=NAMES))
    np.testing.assert_array_equal(volume, volumes)
    np.testing.assert_array_equal(y, parameters_of(np.arange(SAMPLES)))
    np.testing.assert_array_equal(index, np.arange(SAMPLES))


@pytest.mark.parametrize("compressed", [False, True])
def test_int16_volumes_come_back_within_half_a_step(tmp_path, compressed):
    volumes, scale = make_volumes(), 128.0
    write(tmp_path, volumes, header(dtype="int16", scale=scale, compressed=compressed))
    volume, _, _ = read_all(RecordDataset(tmp_path, "train"))
    error = np.abs(volume - volumes).max()
    assert 0.25 / scale < error <= 0.5 / scale * (1 + 1e-6)


def test_compression_makes_files_of_counts_smaller(tmp_path):
    counts = np.random.default_rng(1).poisson(1.0, (4, *GRID))
    for name, compressed in (("plain", False), ("packed", True)):
        write(tmp_path / name, counts, header(dtype="int16", scale=1.0, compressed=compressed))
    size = {p.parent.name: p.stat().st_size for p in tmp_path.glob("*/train-00000.tfrecord")}
    assert size["packed"] < 0.8 * size["plain"]
    np.testing.assert_array_equal(
        read_all(RecordDataset(tmp_path / "packed", "train"))[0][..., 0], counts
    )


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [((1, 1), (2, 2)), ((2, 1), (1, 2)), ((2, 2), (2, 2)), ((2, 4), (4, 1))],
)
def test_any_rank_reads_its_block_whatever_blocks_were_written(tmp_path, stored, wanted):
    volumes = make_volumes()
    write(tmp_path, volumes, header(blocks=stored), replicas=2)
    for row, col in product(range(wanted[0]), range(wanted[1])):
        block = Block(row, wanted[0], col, wanted[1])
        data = RecordDataset(tmp_path, "train", block=block)
        volume, y, index = read_all(data)
        x, y_range = block.cut(GRID)
        assert data.block_shape == volume.shape[1:]
        assert sorted(index) == list(range(SAMPLES))
        np.testing.assert_array_equal(volume, volumes[index][:, x, y_range])
        np.testing.assert_array_equal(y, parameters_of(index))


def test_a_grid_of_three_blocks_read_in_two_joins_across_their_edge(tmp_path):
    grid = (6, 6, 2)
    volumes = make_volumes(samples=2, grid=grid)
    write(tmp_path, volumes, header(grid=grid, blocks=(3, 1)))
    volume, _, _ = read_all(RecordDataset(tmp_path, "train", block=(1, 2, 2, 3)))
    np.testing.assert_array_equal(volume, volumes[:, 3:, 4:])


def test_a_rank_opens_only_the_files_of_its_block(tmp_path):
    write(tmp_path, make_volumes(), header(blocks=(2, 1)))
    for path in tmp_path.glob("*block-1-0*"):
        path.write_bytes(b"not records")
    assert len(RecordDataset(tmp_path, "train", block=(0, 2, 0, 1))) == SAMPLES


def test_the_header_comes_back(tmp_path):
    priors = {name: (0.1, 0.9) for name in NAMES}
    head = header(
        box_size=512.0, priors=priors, attributes={"toml": "[box]", "cosmology": {"h": 0.7}}
    )
    write(tmp_path, make_volumes(), head, replicas=2)
    write(tmp_path, make_volumes(samples=2), head, split="test")
    found, splits = read_header(tmp_path)
    assert found == head and found.box_size == (512.0, 512.0, 512.0)
    assert splits == {"test": {"samples": 2, "files": 1}, "train": {"samples": 7, "files": 3}}


def test_a_record_tells_what_it_is(whole):
    [serialized] = tf.data.TFRecordDataset(str(whole / "train-00002.tfrecord"))
    found = tf.train.Example.FromString(serialized.numpy()).features.feature
    assert list(found["parameters"].bytes_list.value) == [name.encode() for name in NAMES]
    assert found["unit"].bytes_list.value == [b"mean density 1"]
    assert found["seed"].int64_list.value == [106] and found["index"].int64_list.value == [6]
    assert tuple(found["shape"].int64_list.value) == (*GRID, 1)


def test_equal_records_are_equal_bytes(whole):
    """Their parts are in the order of the names; protobuf's own order differs between processes."""
    raw = (whole / "train-00002.tfrecord").read_bytes()
    names = [b"compression", b"index", b"parameters", b"seed", b"shape", b"unit", b"x", b"y"]
    places = [raw.index(b"\n" + bytes([len(name)]) + name + b"\x12") for name in names]
    assert places == sorted(places)


def sequence(data: RecordDataset, batch: int, replicas: int, start: int, steps: int) -> np.ndarray:
    """Indices of the samples of each global step, read by replicas."""
    count = batch // replicas
    lanes = [
        data.batches(batch, (r * count, count), seed=5, start_step=start, steps=steps)
        for r in range(replicas)
    ]
    return np.array(
        [np.concatenate([part[2] for part in step]) for step in zip(*lanes, strict=True)]
    )


def test_the_order_does_not_depend_on_replicas_or_the_starting_step(whole):
    data = RecordDataset(whole, "train")
    expected = np.concatenate([global_order(len(data), 5, epoch) for epoch in range(4)])
    once = sequence(data, 4, 1, 0, 7)
    np.testing.assert_array_equal(once.ravel(), expected)
    np.testing.assert_array_equal(sequence(data, 4, 2, 0, 7), once)
    np.testing.assert_array_equal(sequence(data, 4, 4, 3, 4), once[3:])


def test_each_epoch_holds_each_sample_once_in_another_order(whole):
    data = RecordDataset(whole, "train")
    keys = product(range(2), range(3))
    orders = [tuple(global_order(len(data), seed, epoch)) for seed, epoch in keys]
    assert all(sorted(order) == list(range(SAMPLES)) for order in orders)
    assert len(set(orders)) == 6


def test_batches_are_the_same_again_and_have_no_end_by_default(whole):
    data = RecordDataset(whole, "train")
    first, again = (
        [batch[2].tolist() for _, batch in zip(range(6), data.batches(3), strict=False)]
        for _ in range(2)
    )
    assert len(first) == 6 and first == again


def test_a_truncated_file_is_named_with_its_whole_records(copy):
    path = copy / "train-00001.tfrecord"
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(RecordError, match=r"train-00001.*truncated.* 2 whole records"):
        RecordDataset(copy, "train")
    os.truncate(path, record_bounds(copy / "train-00000.tfrecord")[1] + 3)
    with pytest.raises(RecordError, match=r"train-00001.*truncated.* 1 whole records"):
        RecordDataset(copy, "train")


def test_a_flipped_byte_names_the_file_after_the_whole_batches(copy):
    data = RecordDataset(copy, "train")
    path = copy / "train-00001.tfrecord"
    content = bytearray(path.read_bytes())
    content[record_bounds(path)[1] + 300] ^= 1
    path.write_bytes(content)
    batches = iter(data.batches(2, shuffle=False))
    assert [next(batches)[2].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(RecordError, match="train-00001.*corrupt"):
        next(batches)


def test_a_file_that_vanishes_while_reading_is_named(copy):
    data = RecordDataset(copy, "train")
    (copy / "train-00002.tfrecord").unlink()
    with pytest.raises(RecordError, match="train-00002"):
        read_all(data)


def test_blocks_of_different_simulations_are_not_joined(tmp_path):
    head = header(blocks=(2, 1))
    for row, start in ((0, 0), (1, 1)):
        with RecordWriter(tmp_path, "train", head, block=(row, 2, 0, 1)) as writer:
            for i in range(3):
                writer.write(np.ones((4, 4, 6)), parameters_of(i), seed=0, index=i + start)
    finish_dataset(tmp_path, head)
    with pytest.raises(RecordError, match="different simulations.*block-0-0.*block-1-0"):
        read_all(RecordDataset(tmp_path, "train"))


def test_another_grid_is_refused_with_both_shapes(whole, copy, tmp_path):
    with pytest.raises(RecordError, match=r"\(8, 4, 6\).*\(8, 8, 8\)"):
        RecordDataset(whole, "train", grid=(8, 8, 8))
    other = header(grid=(4, 4, 6))
    write(tmp_path / "other", make_volumes(samples=3, grid=(4, 4, 6)), other)
    shutil.copy(tmp_path / "other/train-00000.tfrecord", copy / "train-00001.tfrecord")
    with pytest.raises(RecordError, match=r"train-00001.*\(4, 4, 6, 1\).*\(8, 4, 6, 1\)"):
        RecordDataset(copy, "train")


def test_another_grid_in_compressed_records_is_found_when_it_is_read(tmp_path):
    for name, grid in (("a", GRID), ("b", (4, 4, 6))):
        head = header(grid=grid, compressed=True)
        write(tmp_path / name, make_volumes(samples=3, grid=grid), head)
    shutil.copy(tmp_path / "b/train-00000.tfrecord", tmp_path / "a/train-00000.tfrecord")
    with pytest.raises(RecordError, match=r"train-00000.*\(4, 4, 6, 1\).*\(8, 4, 6, 1\)"):
        read_all(RecordDataset(tmp_path / "a", "train"))


def test_a_split_that_is_missing_lists_those_there_are(whole, tmp_path):
    with pytest.raises(RecordError, match="no split 'test'; .*train"):
        RecordDataset(whole, "test")
    with pytest.raises(RecordError, match="no split 'test'; there is none"):
        RecordDataset(tmp_path, "test")


def test_a_file_cut_between_records_is_named(copy):
    path = copy / "train-00001.tfrecord"
    os.truncate(path, record_bounds(path)[2])
    with pytest.raises(RecordError, match="hold 6 samples, must be 7; .*train-00001"):
        RecordDataset(copy, "train")


def test_a_damaged_length_is_corrupt_even_where_the_lengths_still_add_up(tmp_path):
    grid = (16, 16, 16)
    write(tmp_path, make_volumes(grid=grid), header(grid=grid))
    path = tmp_path / "train-00000.tfrecord"
    bounds, content = record_bounds(path), bytearray(path.read_bytes())
    content[:8] = int(bounds[2] - 16).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(RecordError, match="train-00000.*byte 0 is corrupt"):
        RecordDataset(tmp_path, "train")


def test_tensorflow_is_not_imported_before_it_is_needed():
    done = python(
        "import sys, flowpm_dist.cosmoflow.volumes.records; sys.exit('tensorflow' in sys.modules)"
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [("train-00002.tfrecord", "2 files .* lists 3"), ("dataset.json", "not finished")],
)
def test_a_file_that_is_missing_is_an_error(copy, name, message):
    (copy / name).unlink()
    with pytest.raises(RecordError, match=message):
        RecordDataset(copy, "train")


def test_a_block_that_is_missing_is_named(tmp_path):
    write(tmp_path, make_volumes(), header(blocks=(2, 1)))
    (tmp_path / "train-00001.block-1-0-of-2-1.tfrecord").unlink()
    with pytest.raises(RecordError, match=r"file 1 .*\(1, 2, 0, 1\)"):
        RecordDataset(tmp_path, "train")
    with pytest.raises(RecordError, match="file 1 .* 2 blocks"):
        finish_dataset(tmp_path, header(blocks=(2, 1)))


def test_dataset_json_of_another_kind_is_refused(copy):
    content = json.loads((copy / "dataset.json").read_text())
    (copy / "dataset.json").write_text(json.dumps(content | {"version": 99}))
    with pytest.raises(RecordError, match="version 1"):
        RecordDataset(copy, "train")
    (copy / "dataset.json").write_text(json.dumps(content)[:50])
    with pytest.raises(RecordError, match="damaged"):
        RecordDataset(copy, "train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": [float("inf"), 4, 6]}, "grid.0: .*finite"),
        ({"box_size": [1.0, float("nan"), 1.0]}, "box_size.*finite"),
        ({"priors": {name: [0, float("inf")] for name in NAMES}}, "priors.*finite"),
        ({"scale": float("inf")}, "scale: .*finite"),
        ({"splits": {"train": {}}}, "train.samples: .*required"),
        ({"splits": {"train": {"samples": 7, "files": "x"}}}, "train.files: .*integer"),
        ({"splits": {"train": {"samples": -7, "files": 3}}}, "train.samples: .*greater"),
        ({"splits": []}, "dictionary"),
        ({"parameters": [["Omega_m"]]}, "parameters.0: .*string"),
        ({"grid": [8, 0, 6]}, "grid .8, 0, 6."),
    ],
)
def test_wrong_entries_of_dataset_json_are_named(copy, changes, message):
    content = json.loads((copy / "dataset.json").read_text()) | changes
    (copy / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(RecordError, match=f"dataset.json.*{message}"):
        RecordDataset(copy, "train")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "3", "null", "{}"])
def test_a_dataset_json_that_is_no_table_is_damaged(copy, text):
    (copy / "dataset.json").write_text(text)
    with pytest.raises(RecordError, match="dataset.json is damaged"):
        RecordDataset(copy, "train")


def write_foreign(path: Path, x: bytes, y) -> None:
    """A file of one record, as another program may write it."""
    features = {
        "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[x])),
        "y": tf.train.Feature(float_list=tf.train.FloatList(value=y)),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(example.SerializeToString())


def test_values_that_are_not_finite_are_named_by_file_record_and_place(tmp_path):
    write(tmp_path, make_volumes(samples=1), header())
    path, volume, y = tmp_path / "train-00000.tfrecord", make_volumes()[0], parameters_of(0)
    volume[1, 2, 3, 0] = np.nan
    write_foreign(path, volume.tobytes(), y)
    with pytest.raises(RecordError, match=r"train-00000.*byte 0: .*\[1, 2, 3, 0\] is nan"):
        read_all(RecordDataset(tmp_path, "train"))
    y[1] = np.inf
    write_foreign(path, make_volumes()[0].tobytes(), y)
    with pytest.raises(RecordError, match="train-00000.*byte 0: sigma8 = inf"):
        read_all(RecordDataset(tmp_path, "train"))


def test_a_record_does_not_unpack_to_more_than_its_volume(tmp_path):
    write(tmp_path, make_volumes(samples=1), header(compressed=True))
    packed = zlib.compress(bytes(2**28))
    write_foreign(tmp_path / "train-00000.tfrecord", packed, parameters_of(0))
    data = RecordDataset(tmp_path, "train")
    tracemalloc.start()
    with pytest.raises(RecordError, match="train-00000.*no volume of shape"):
        data.read(0)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_a_compressed_volume_that_was_cut_off_is_named(tmp_path):
    write(tmp_path, make_volumes(samples=1), header(compressed=True))
    packed = zlib.compress(make_volumes()[0].tobytes())[:-3]
    write_foreign(tmp_path / "train-00000.tfrecord", packed, parameters_of(0))
    with pytest.raises(RecordError, match="train-00000.*no volume of shape"):
        read_all(RecordDataset(tmp_path, "train"))


def test_pipes_and_pages_are_no_records(copy):
    path = copy / "train-00000.tfrecord"
    path.write_text("<!DOCTYPE html><title>Sign in</title>" + " " * 500)
    with pytest.raises(RecordError, match="train-00000.* is no TFRecord file"):
        RecordDataset(copy, "train")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordError, match="train-00000.*must be a regular file"):
        RecordDataset(copy, "train")


def test_fewer_samples_than_a_batch_and_lanes_outside_are_refused(whole):
    data = RecordDataset(whole, "train")
    with pytest.raises(RecordError, match="7 samples .* batch of 8"):
        data.batches(8)
    with pytest.raises(RecordError, match="2 to 5 of a batch of 4"):
        data.batches(4, (2, 3))


def test_existing_files_are_overwritten_only_on_request(copy):
    with pytest.raises(RecordError, match="train-00000.*exists: remove it"):
        RecordWriter(copy, "train", header())
    volumes = make_volumes(samples=2) + 1
    clear_split(copy, "train")
    write(copy, volumes, header(blocks=(1, 2)))
    np.testing.assert_array_equal(read_all(RecordDataset(copy, "train"))[0], volumes)
    assert len(list(copy.glob("train*"))) == 2


def test_files_can_be_added_after_the_last(copy):
    with RecordWriter(copy, "train", header(), first_file=3) as writer:
        writer.write(make_volumes()[0], parameters_of(7), seed=1, index=7)
    finish_dataset(copy, header())
    assert read_all(RecordDataset(copy, "train"))[2].tolist() == list(range(8))


def test_a_split_of_another_kind_does_not_join_a_dataset(whole):
    with pytest.raises(RecordError, match="grid .8, 4, 6., not .8, 8, 8."):
        RecordWriter(whole, "test", header(grid=(8, 8, 8)))


def test_an_interrupted_writer_leaves_only_whole_files(tmp_path):
    with pytest.raises(KeyboardInterrupt), RecordWriter(tmp_path, "train", header()) as writer:
        for i, volume in enumerate(make_volumes()[:5]):
            writer.write(volume, parameters_of(i), seed=0, index=i)
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["train-00000.tfrecord"]


def test_an_error_beside_a_writer_is_told_as_it_is(tmp_path):
    """Not as one of the file that was being written."""
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        with RecordWriter(tmp_path, "train", header()) as writer:
            writer.write(make_volumes()[0], parameters_of(0), seed=0, index=0)
            (tmp_path / "elsewhere").read_text()
    assert not list(tmp_path.iterdir())


def test_records_are_not_written_through_links(tmp_path, whole):
    """At the names of the files, and of temporary ones; copies of a dataset neither."""
    victim, folder, into = (tmp_path / name for name in ("thesis.tex", "records", "into"))
    victim.write_text("years of work")
    for place in (folder, into):
        place.mkdir()
        for name in ("train-00000.tfrecord", "dataset.json"):
            (place / name).symlink_to(tmp_path / "missing")
            (place / f".{name}.partial").symlink_to(victim)
    write(folder, make_volumes()[:3], header())
    stage(whole, into, "train")
    assert victim.read_text() == "years of work" and not (tmp_path / "missing").exists()
    for place in (folder, into):
        assert (place / "train-00000.tfrecord").is_file()
        assert not (place / "train-00000.tfrecord").is_symlink()


def test_values_that_do_not_fit_are_refused_with_the_scale_that_does(tmp_path):
    writer = RecordWriter(tmp_path, "train", header(dtype="int16"))
    volume = make_volumes()[0]
    volume[1, 2, 3] = 300.0
    with pytest.raises(RecordError, match="density of 300 .* scale of 64"):
        writer.write(volume, parameters_of(0), seed=0, index=0)
    volume[1, 2, 3] = np.nan
    with pytest.raises(RecordError, match="not finite"):
        writer.write(volume, parameters_of(0), seed=0, index=0)
    with pytest.raises(RecordError, match=r"\(4, 4, 6\); must be \(8, 4, 6, 1\)"):
        writer.write(volume[:4, ..., 0], parameters_of(0), seed=0, index=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": (3, 1)}, "divide"),
        ({"dtype": "float64"}, "float64"),
        ({"priors": {"h": (0, 1)}}, "priors"),
    ],
)
def test_a_header_that_makes_no_dataset_is_refused(changes, message):
    with pytest.raises(RecordError, match=message):
        header(**changes)


def test_a_block_that_no_record_can_hold_is_refused(tmp_path):
    with pytest.raises(RecordError, match="more blocks"):
        RecordWriter(tmp_path, "train", header(grid=(1024, 1024, 1024)))


def test_staging_copies_what_is_not_there_yet(copy, tmp_path):
    local = stage(copy, tmp_path / "local", "train")
    before = {path.name: path.stat().st_ino for path in local.iterdir()}
    assert sorted(before) == sorted(path.name for path in copy.iterdir())
    changed = copy / "train-00001.tfrecord"
    os.utime(changed, (1, 1))
    stage(copy, local, "train")
    after = {path.name: path.stat().st_ino for path in local.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {changed.name}
    np.testing.assert_array_equal(read_all(RecordDataset(local, "train"))[0], make_volumes())


def test_staging_refuses_what_cannot_come_out_whole(copy, tmp_path, monkeypatch):
    with pytest.raises(RecordError, match="no split 'test'"):
        stage(copy, tmp_path / "local", "test")
    local = stage(copy, tmp_path / "local", "train")
    shutil.copy(local / "train-00001.tfrecord", local / "train-00009.tfrecord")
    with pytest.raises(RecordError, match="train-00009.*another dataset"):
        stage(copy, local, "train")
    packed = copy / "train-00002.tfrecord"
    content = bytearray(gzip.compress(packed.read_bytes()))
    content[-8] ^= 1  # of the checksum
    packed.with_suffix(".tfrecord.gz").write_bytes(content)
    packed.unlink()
    with pytest.raises(RecordError, match="train-00002.*damaged"):
        stage(copy, tmp_path / "again", "train")
    assert not list(tmp_path.glob("again/train-00002*"))
    monkeypatch.setattr(
        record_writer.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0)
    )
    with pytest.raises(RecordError, match="0 bytes free.*need"):
        stage(copy, tmp_path / "full", "train")


def test_dummy_data_has_the_shape_of_real_data_and_does_not_change():
    options = {"seed": 3, "augment": False, "clock": PhaseClock()}
    lanes = Lanes(4, 1, 2)
    source = DummySource((4, 4, 6, 2), 3, ProcessMesh("replica:1"), lanes, **options)
    source.start(9)
    first, second, (shown,) = source.batch(9), source.batch(10), source.preview(1)
    assert first.volumes.shape == (2, 4, 4, 6, 2) and first.parameters.shape == (2, 3)
    assert first.volumes.dtype == np.float32 and first.samples.dtype == np.int64
    for batch in (second, shown):
        np.testing.assert_array_equal(first.volumes, batch.volumes)
        np.testing.assert_array_equal(first.parameters, batch.parameters)
