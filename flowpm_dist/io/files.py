"""Files written whole: aside first, then moved into place; and how a write that failed is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowpm_dist.io.errors import WorkError

GENERATOR = "flowpm-dist"
SNAPSHOT = "snapshot.zarr"


class WriteError(WorkError):
    """Results could not be written: the message names the file and the cause."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> WriteError:
        """The system's error, with the file it happened to."""
        return cls(f"cannot write {path}: {error.strerror or error}")


def snapshot_attributes(path: Path) -> dict[str, object] | None:
    """Attributes of a snapshot of ours, whole or not; None when it is not one."""
    try:
        attributes = json.loads((path / "zarr.json").read_text())["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ours = isinstance(attributes, dict) and attributes.get("generator") == GENERATOR
    return attributes if ours else None


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path aside to write a file to, which replaces `path` when all went well.

    Args:
        path: of the file; its folder is made when it is missing.

    Raises:
        WriteError: an OSError, inside or of moving the file into place.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        aside.replace(path)
    except OSError as error:
        raise WriteError.of(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write a small file, see `written_whole`."""
    with written_whole(path) as aside:
        aside.write_text(text)


def human_size(count: int) -> str:
    """A number of bytes as people read it, such as 1.5 GiB."""
    if count < 1024:
        return f"{count} bytes"
    power = min(4, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
