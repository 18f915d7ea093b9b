"""The public CosmoFlow layout: gzip or not, one sample a file, indexed by all ranks together."""

import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from public_layout import NAMES, scaled, write_public

from flowpm_dist.cosmoflow.volumes import public_files
from flowpm_dist.cosmoflow.volumes.public_files import public_index, samples_of_names
from flowpm_dist.cosmoflow.volumes.record_files import RecordError
from flowpm_dist.cosmoflow.volumes.record_writer import stage
from flowpm_dist.cosmoflow.volumes.records import RecordDataset, global_order
from flowpm_dist.cosmoflow.volumes.tfrecords import record_bounds

MANY = 1000


def read_all(data: RecordDataset) -> tuple[np.ndarray, ...]:
    [batch] = data.batches(len(data), shuffle=False, steps=1)
    return batch


def poisson(samples: int, side: int, channels: int = 4) -> np.ndarray:
    shape = (samples, side, side, side, channels)
    return np.random.default_rng(2).poisson(3.0, shape)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """A thousand packed files; not to be changed."""
    folder = tmp_path_factory.mktemp("public")
    write_public(folder / "train", poisson(MANY, 2), packed=True)
    return folder


@pytest.fixture
def opened(monkeypatch) -> list[Path]:
    """The files that are opened for their records."""
    paths: list[Path] = []

    def noted(path, *rest):
        paths.append(path)
        return record_bounds(path, *rest)

    monkeypatch.setattr(public_files, "record_bounds", noted)
    return paths


@pytest.mark.parametrize(("channels", "packed"), [(1, False), (4, True)])
def test_the_public_layout_is_read_with_its_grid_inferred(tmp_path, channels, packed):
    counts = poisson(4, 8, channels)
    write_public(tmp_path / "train", counts, packed, last=2)
    data = RecordDataset(tmp_path, "train", parameters=NAMES, grid=(8, 8, 8), block=(1, 2, 0, 1))
    assert data.header.grid == (8, 8, 8) and data.block_shape == (4, 8, 8, channels)
    volume, y, index = read_all(data)
    np.testing.assert_array_equal(volume, counts[:, 4:])
    np.testing.assert_array_equal(y, scaled(np.arange(4)))
    assert index.tolist() == [0, 1, 2, 3]
    with pytest.raises(RecordError, match="names of the parameters"):
        RecordDataset(tmp_path, "train")
    with pytest.raises(RecordError, match=r"univ_000000.*\(8, 8, 8\).*\(4, 4, 4\)"):
        RecordDataset(tmp_path, "train", parameters=NAMES, grid=(4, 4, 4))
    with pytest.raises(RecordError, match="no split 'validation'; .*train"):
        RecordDataset(tmp_path, "validation", parameters=NAMES)


def test_a_wrong_number_of_public_parameters_is_named(tmp_path):
    write_public(tmp_path / "train", np.ones((2, 4, 4, 4)), packed=False)
    with pytest.raises(RecordError, match="univ_000000.*with 4 parameters"):
        read_all(RecordDataset(tmp_path, "train", parameters=(*NAMES, "h")))


def test_packed_files_are_unpacked_by_staging(tmp_path):
    counts = poisson(3, 4)
    write_public(tmp_path / "public/train", counts, packed=True, last=2)
    for path in (tmp_path / "public/train").iterdir():
        path.rename(path.with_name(path.name + ".gz"))
    calls = []
    local = stage(
        tmp_path / "public", tmp_path / "local", "train", progress=lambda *now: calls.append(now)
    )
    assert calls == [(0, 2), (1, 2), (2, 2)]
    assert [p.suffix for p in (local / "train").iterdir()] == [".tfrecord"] * 2
    for folder in (local, tmp_path / "public"):
        volume, _, _ = read_all(RecordDataset(folder, "train", parameters=NAMES))
        np.testing.assert_array_equal(volume, counts)


def test_a_thousand_packed_files_are_opened_once(packed, opened, tmp_path, monkeypatch):
    """Then the first alone, until one of them has another size or name."""
    monkeypatch.setenv("FLOWPM_CACHE", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(packed, tmp_path / "set", copy_function=os.link))
    data = RecordDataset(folder, "train", parameters=NAMES)
    assert len(data) == MANY and len(opened) == 2 + MANY
    [batch] = data.batches(8, steps=1, seed=3)
    volume, y, index = batch
    assert index.tolist() == global_order(len(data), 3, 0)[:8].tolist()
    np.testing.assert_array_equal(volume, poisson(MANY, 2)[index])
    np.testing.assert_array_equal(y, scaled(index))
    opened.clear()
    again = RecordDataset(folder, "train", parameters=NAMES)
    assert len(again) == MANY and len(opened) == 2
    np.testing.assert_array_equal(again._starts, data._starts)
    (folder / "train/univ_000999.tfrecord").unlink()
    assert len(RecordDataset(folder, "train", parameters=NAMES)) == MANY - 1
    last = folder / "train/univ_000500.tfrecord"
    last.unlink()
    last.write_bytes(gzip.compress(b"".join(gzip.decompress(p.read_bytes()) for p in two(folder))))
    grown = RecordDataset(folder, "train", parameters=NAMES)
    assert len(grown) == MANY
    np.testing.assert_array_equal(read_all(grown)[1][499:503], scaled(np.array([499, 0, 1, 501])))


def two(folder: Path) -> list[Path]:
    return sorted((folder / "train").iterdir())[:2]


def test_a_cache_that_cannot_be_read_or_written_does_no_harm(packed, opened, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("FLOWPM_CACHE", str(tmp_path / "cache"))
    public_index(packed, "train", 64)
    (kept,) = (tmp_path / "cache" / "indexes").iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    opened.clear()
    assert len(public_index(packed, "train", 64)[1]) == MANY and len(opened) == 1 + MANY
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLOWPM_CACHE", str(tmp_path / "file"))
    assert len(public_index(packed, "train", 64)[1]) == MANY


def test_of_plain_files_only_the_first_is_opened(tmp_path, opened):
    write_public(tmp_path / "train", poisson(20, 2), packed=False)
    assert len(public_index(tmp_path, "train", 64)[1]) == 20
    assert len(opened) == 1
    assert samples_of_names(tmp_path, "train") == 20


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-9], "univ_000002.*damaged"),
        (lambda data: gzip.decompress(data), "univ_000002.*not packed with gzip, but the first"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-3]), "univ_000002.*within a record"),
        (lambda data: gzip.compress(b"\xff" * 64), "univ_000002.*damaged"),
        (lambda data: gzip.compress(gzip.decompress(data) * 2 + b"12345678"), "within a record"),
    ],
)
def test_a_damaged_packed_file_is_named(tmp_path, damage, message):
    write_public(tmp_path / "train", poisson(4, 2), packed=True)
    path = tmp_path / "train/univ_000002.tfrecord"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RecordError, match=message):
        RecordDataset(tmp_path, "train", parameters=NAMES)


def test_a_file_with_other_volumes_is_named(tmp_path):
    for packed in (True, False):
        folder = tmp_path / str(packed)
        write_public(folder / "train", poisson(3, 12, 1), packed=packed)
        write_public(folder / "other", poisson(1, 16, 1), packed=packed)
        (folder / "other/univ_000000.tfrecord").replace(folder / "train/univ_000001.tfrecord")
        with pytest.raises(RecordError, match="univ_000001.*record 0 .* must have 3456"):
            RecordDataset(folder, "train", parameters=NAMES)


def test_a_flipped_byte_of_a_packed_file_is_named_when_it_is_read(tmp_path):
    write_public(tmp_path / "train", poisson(3, 4), packed=True)
    path = tmp_path / "train/univ_000001.tfrecord"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[100] ^= 1
    path.write_bytes(gzip.compress(content))
    with pytest.raises(RecordError, match="univ_000001.*corrupt"):
        read_all(RecordDataset(tmp_path, "train", parameters=NAMES))


def test_names_alone_do_not_tell_the_samples_of_files_with_several(tmp_path):
    write_public(tmp_path / "train", poisson(3, 2), packed=True, last=3)
    assert samples_of_names(tmp_path, "train") is None
    assert samples_of_names(tmp_path, "test") is None
