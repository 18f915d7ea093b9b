"""Volumes to train on, painted from snapshots of any code, with the table of their parameters.

Nothing here imports TensorFlow before the work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmoflow.volumes.arrays import TableError, read_table, texts_of
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import GENERATOR, read_json, remove_unfinished, write_json, write_text
from flowpm_dist.io.particle_readers import find_particles
from flowpm_dist.jobs.folder import check_foreign, check_ground
from flowpm_dist.simulate.snapshots import Choices, Source, asked, place_of, sources_of

if TYPE_CHECKING:
    from flowpm_dist.jobs.progress import Progress
    from meshimpl.process_mesh import ProcessMesh

VOLUMES, TABLE, RUN_FILE, RECORD = "volumes", "parameters.csv", "run.toml", "snapshots.json"
TEXTS = (".txt", ".csv", ".dat", ".toml", ".json")
"""Endings of files that are no snapshots, such as the table."""
SHARE = 8
"""One of so many volumes is for validation, and one for the test."""
MATTER, ROUNDING = ("omegam", "omega0"), 5e-3
"""Names of the label Omega_m, and how much rounding may change it, relatively."""
LEAST = 4
"""Fewer volumes cannot be divided."""
RUN = """# Train on {count} volumes that were painted from snapshots.
[box]
grid = {grid}
size = {size}  # [Mpc/h]

[training]
batch = {batch}
epochs = 50

[data]
source = "arrays"
volumes = "{volumes}/{{}}.npy"
dtype = "float32"
unit = "density"
table = "{table}"
validation = {held}
test = {held}
augment = true  # these boxes are whole and periodic
"""


@dataclass(frozen=True)
class SnapshotVolumes:
    """Volumes to paint.

    Attributes:
        sources: the snapshots, in the order of the rows of the table.
        choices: how they are painted.
        names: names of the parameters.
        parameters: [volume, parameter].
        folder: folder of the results.
    """

    sources: list[Source]
    choices: Choices
    names: tuple[str, ...]
    parameters: np.ndarray
    folder: Path

    @property
    def record(self) -> dict[str, Any]:
        """What the volumes are made of; JSON can take it."""
        each = [asked(source, self.choices, density=True) for source in self.sources]
        return {"generator": GENERATOR, "snapshots": each}

    def path(self, number: int) -> Path:
        """The file of a volume."""
        return self.folder / VOLUMES / f"{number}.npy"

    @property
    def missing(self) -> list[int]:
        """The numbers of the volumes that are not there yet."""
        return [n for n in range(len(self.sources)) if not self.path(n).exists()]


def plan_volumes(
    snapshots: str,
    table: Path,
    columns: Sequence[str] | None,
    wanted: Sequence[str] | None,
    folder: Path,
    choices: Choices,
) -> SnapshotVolumes:
    """Returns the volumes to paint, after all checks that need no particles.

    Args:
        snapshots: a folder with a snapshot for each row of the table: the one that a column of the
            table names, or else in the order of their names, in which numbers count as numbers. Or
            a path with "{}" for the number of the row, or with "{NAME}" for its text in a column.
        table: the labels, see `read_table`.
        columns: names of its columns, if its first line does not name them.
        wanted: names of the columns that are parameters; by default all with numbers.
        folder: folder of the results.
        choices: how they are painted.

    Raises:
        UserError: there are more or fewer snapshots than rows, one cannot be opened, their boxes
            differ, or a snapshot has the name or the Omega_m of another row.
    """
    try:
        names, parameters = read_table(table, columns, wanted)
        texts = texts_of(table, columns)
    except TableError as error:
        raise UserError(
            str(error).replace("data.columns, a list of names", "--columns A,B")
        ) from error
    if "{" in snapshots:
        paths = [_filled(snapshots, row, texts) for row in range(len(parameters))]
    else:
        paths = _snapshots_in(Path(snapshots), choices)
    if len(paths) != len(parameters):
        raise UserError(
            f"{snapshots} holds {len(paths)} snapshots, and {table} has {len(parameters)} rows: "
            "there must be one for each row"
        )
    for name, column in texts.items():
        paths = _in_order_of(column, paths, f"{table}: {name}", "{" in snapshots)
    if len(paths) < LEAST:
        raise UserError(f"{len(paths)} snapshots: at least {LEAST} are needed, to train and judge")
    sources = sources_of(paths, choices)
    if len(sources) < len(paths):
        raise UserError(f"{snapshots}: two rows have the same snapshot")
    first = sources[0]
    for row, source in enumerate(sources):
        _check_matter(source, dict(zip(names, parameters[row].tolist(), strict=True)), row)
        if source.grid != first.grid or not np.allclose(
            source.files.box_size, first.files.box_size, rtol=1e-6
        ):
            raise UserError(
                f"{source.path} has a box of {source.files.box_size} Mpc/h and {source.grid} cells,"
                f" {first.path} one of {first.files.box_size} and {first.grid}: all must be alike; "
                "--grid sets the cells"
            )
    return SnapshotVolumes(sources, choices, names, parameters, folder)


def _filled(snapshots: str, row: int, texts: Mapping[str, Sequence[str]]) -> Path:
    """Returns the path of a row's snapshot, from a path with "{}" or with names of columns.

    Raises:
        UserError: there is no such column of texts.
    """
    path = snapshots.replace("{}", str(row))
    for name in re.findall(r"\{(.*?)\}", path):
        if name not in texts:
            held = ", ".join(texts) or "none"
            raise UserError(f"{snapshots}: {{{name}}} is no column of texts; those are: {held}")
        path = path.replace(f"{{{name}}}", texts[name][row])
    return Path(path)


def _in_order_of(column: Sequence[str], paths: list[Path], what: str, given: bool) -> list[Path]:
    """Returns the snapshots in the order of the names in a column of texts.

    Args:
        column: a text for each row, which may be the name of its snapshot, or of a folder of it.
        paths: the snapshots.
        what: the column, for messages.
        given: whether each row has its snapshot already.

    Raises:
        UserError: some rows name a snapshot and others do not, or a row has another one already.
    """
    parts = [{*path.parts, re.sub(r"(\.\d+)?\.(hdf5|h5)$", "", path.name)} for path in paths]
    rows = [
        [path for path, names in zip(paths, parts, strict=True) if text in names] for text in column
    ]
    if not any(len(named) == 1 for named in rows):
        return paths  # texts about something else
    for text, named, path in zip(column, rows, paths, strict=True):
        if len(named) != 1 or (given and named[0] != path):
            instead = f"the snapshot of its row is {path}" if given else f"{len(named)} have it"
            raise UserError(f"{what} has {text}, which must be the name of one snapshot: {instead}")
    return [named[0] for named in rows]


def _check_matter(source: Source, labels: Mapping[str, float], row: int) -> None:
    """Checks that a row has the label Omega_m of its snapshot.

    Raises:
        UserError: it has another.
    """
    there = source.files.cosmology_facts.get("Omega_m")
    for name, value in labels.items():
        if name.lower().replace("_", "") not in MATTER or not there:
            continue
        if abs(value - there) > ROUNDING * there:
            raise UserError(
                f"row {row + 1} has {name} = {value:g}, and its snapshot {source.path} has Omega_m "
                f"= {there:g}: rows and snapshots must be in the same order"
            )


def _snapshots_in(folder: Path, choices: Choices) -> list[Path]:
    """Returns the snapshots in a folder, by their names; other files in it are left out.

    Raises:
        UserError: there is no such folder, or a snapshot in it is damaged.
    """
    if not folder.is_dir():
        raise UserError(f'{folder} is no folder: give one, or a path with "{{}}" for the row')
    there, snapshots = sorted(folder.iterdir(), key=_natural), []
    places: set[Path] = set()
    for path in there:
        if path.name.startswith(".") or path.suffix in TEXTS:
            continue
        if (files := find_particles(path, choices.units)) is None:
            continue
        # One of several files stands for all of them.
        if (place := place_of(path, files)) not in places:
            places.add(place)
            snapshots.append(path)
    return snapshots


def _natural(path: Path) -> list[tuple[int, float | str]]:
    """Returns a key in which numbers count as numbers: 2 is before 10, and 0.25 before 0.3."""
    parts = re.split(r"(\d+(?:\.\d+)?)", path.name)
    return [(n % 2, float(part) if n % 2 else part) for n, part in enumerate(parts)]


def check_volumes(plan: SnapshotVolumes, *, overwrite: bool) -> None:
    """Checks that the results can be written; volumes of the same plan are kept.

    Raises:
        UserError: the folder holds volumes of another plan, or files from elsewhere.
    """
    folder = plan.folder
    check_ground(folder)
    for path in (folder, folder / VOLUMES):
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link: give another --output, or remove it")
    older = read_json(folder / RECORD)
    if not older:
        check_foreign(folder, [VOLUMES, TABLE, RUN_FILE])
        return
    if older != plan.record and not overwrite:
        raise UserError(
            f"{folder} has volumes of other snapshots or options: add --overwrite to replace them, "
            "or give another --output"
        )


def write_volumes(
    plan: SnapshotVolumes, mesh: ProcessMesh, progress: Progress, *, overwrite: bool
) -> None:
    """Paints the volumes that are missing, then writes the table and a run file. On all ranks.

    Raises:
        SnapshotError: a snapshot cannot be read.
        WriteError: a file cannot be written. Only the rank that cannot write raises it.
    """
    import tensorflow as tf

    from flowpm_dist.grid.box import Box
    from flowpm_dist.simulate.snapshot_results import particles_of, write_volume

    if mesh.rank == 0:
        folder = plan.folder / VOLUMES
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        for path in folder.glob("*.npy") if overwrite else ():
            path.unlink()
        write_json(plan.folder / RECORD, plan.record)
    missing = mesh.array_from_root(np.array(plan.missing, np.int64)).tolist()
    for done, number in enumerate(missing):
        source = plan.sources[number]
        particles = particles_of(source, plan.choices, mesh)
        box = Box(source.grid, particles.box_size, mesh, tf.float64)
        density = particles.density(box, weights=plan.choices.weights, scheme=plan.choices.scheme)
        write_volume(plan.path(number), density)
        progress("volumes", done + 1, len(missing))
    if mesh.rank == 0:
        _write_texts(plan, overwrite=overwrite)
    mesh.barrier()


def _write_texts(plan: SnapshotVolumes, *, overwrite: bool) -> None:
    """Writes the table of parameters, with their names, and a run file to train on the volumes."""
    rows = [
        ",".join([os.path.abspath(source.path).replace(",", "_"), *map(repr, row)])
        for source, row in zip(plan.sources, plan.parameters.tolist(), strict=True)
    ]
    names = ",".join(["snapshot", *plan.names])
    write_text(plan.folder / TABLE, "\n".join([f"# {names}", *rows]) + "\n")
    count, source = len(plan.sources), plan.sources[0]
    held = max(1, count // SHARE)
    batch = max(n for n in (1, 2, 4, 8) if n <= min(held, (count - 2 * held)))
    grid, size = (
        sides[0] if len(set(sides)) == 1 else list(sides)
        for sides in (source.grid, source.files.box_size)
    )
    text = RUN.format(
        count=count, grid=grid, size=size, batch=batch, held=held, volumes=VOLUMES, table=TABLE
    )
    if overwrite or not os.path.lexists(plan.folder / RUN_FILE):  # a user may have changed it
        write_text(plan.folder / RUN_FILE, text)
