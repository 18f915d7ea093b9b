"""The numbered checkpoints of a job. Nothing here imports TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowpm_dist.io.files import WriteError, remove


class CheckpointStore:
    """The numbered checkpoints in a folder; each appears when it is complete.

    A checkpoint is a zarr group with fields, such as `step-000005.zarr`, or the files of `tf.train`
    about one step, such as `step-5.data-00000-of-00001` and `step-5.index`.

    Args:
        path: the folder, on a file system that all ranks see; it may be missing.
        unit: what the work is counted in, such as "iteration"; checkpoints are named after it.
    """

    def __init__(self, path: Path, unit: str) -> None:
        self.path, self.unit = path, unit

    def numbered(self) -> dict[int, Path]:
        """Returns the checkpoints by their numbers, which increase: zarr groups or index files."""
        files = self._files(r"\.(?:zarr|index)")
        return dict(sorted((number, path) for path, number in files.items()))

    @property
    def last(self) -> int | None:
        """The number of the latest checkpoint; None if there is none."""
        return max(self.numbered(), default=None)

    def aside(self, number: int) -> Path:
        """Returns the folder in which a checkpoint is written before it is moved into place."""
        return self.path / f".{self.unit}-{number}.partial"

    def remove_unfinished(self) -> None:
        """Removes checkpoints whose writing was cut short. On rank 0."""
        for path in self.path.glob(f".{self.unit}-*.partial"):
            remove(path, ignore_errors=True)

    @contextmanager
    def written(self, number: int, keep: int) -> Iterator[Path]:
        """A context in which a checkpoint is written, and at whose end it is in place. On rank 0.

        Checkpoints of other numbers are removed, but for the `keep` latest up to this one: if there
        are later ones, the work was resumed from before them.

        Args:
            number: number of the iteration or step that the checkpoint follows.
            keep: the number of checkpoints that are kept.

        Yields:
            The folder to write in, see `aside`.

        Raises:
            WriteError: an OSError was raised inside or by the moving. Earlier checkpoints are not
                changed.
        """
        aside = self.aside(number)
        try:
            self.remove_unfinished()
            aside.mkdir(parents=True, exist_ok=True)
            yield aside
            files = sorted(aside.iterdir())  # the index of a checkpoint comes after its data
            for new in files:
                if new.suffix == ".index":  # of other data with this number
                    (self.path / new.name).unlink(missing_ok=True)
            for new in files:
                final = self.path / new.name
                if final.is_dir():
                    remove(final, ignore_errors=True)
                new.replace(final)
            remove(aside, ignore_errors=True)
            latest = [other for other in self.numbered() if other <= number][-keep:]
            for path, other in self._files(r"\.(?:zarr|index|data-\d+-of-\d+)").items():
                if other not in latest:
                    remove(path, ignore_errors=True)
        except OSError as error:
            where = Path(error.filename or self.path / f"{self.unit}-{number}")
            raise WriteError.of(where, error) from error

    def _files(self, ending: str) -> dict[Path, int]:
        """Returns the numbers of the files and folders whose names match `unit-NUMBER` + ending."""
        names = re.compile(rf"{self.unit}-(\d+){ending}")
        matches = ((path, names.fullmatch(path.name)) for path in self.path.glob(f"{self.unit}-*"))
        return {path: int(match[1]) for path, match in matches if match}
