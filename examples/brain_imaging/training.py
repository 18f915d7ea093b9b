"""Volumes on disk, batches of a mesh, the training and its checkpoints."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sampling
from adam import CHECKPOINT, Adam
from network import Reconstructor
from settings import SETTINGS, TRAINING, VALIDATION, Settings

from meshimpl import ProcessMesh

LOSSES = "losses.csv"
COLUMNS = ("step", "loss", "validation_loss", "rate", "seconds")


def made_volumes(
    mesh: ProcessMesh, settings: Settings, folder: Path, kind: int, count: int
) -> np.ndarray:
    """Makes volumes, each rank some of them, in a file that all ranks map into memory.

    Args:
        mesh: all ranks.
        settings: the settings.
        folder: folder that all ranks see.
        kind: TRAINING, VALIDATION or HELD_OUT.
        count: number of volumes.

    Returns:
        complex64 [volume, x, y, z]; a rank reads only what it uses.
    """
    path = folder / f"volumes-{kind}.npy"
    if mesh.rank == 0:
        np.lib.format.open_memmap(path, "w+", np.complex64, (count, *settings.sides))
    mesh.barrier("file of volumes")
    volumes = np.load(path, mmap_mode="r+")
    for number in range(mesh.rank, count, mesh.size):
        volumes[number] = settings.made(kind, number)
    volumes.flush()
    mesh.barrier("volumes made")
    return np.load(path, mmap_mode="r")


def scans(
    reconstructor: Reconstructor,
    settings: Settings,
    volumes: np.ndarray,
    kind: int,
    numbers: Sequence[tuple[int, int]],
    acceleration: float | None = None,
) -> dict[str, np.ndarray]:
    """Returns this rank's blocks of a batch: image, seeds, maps and mask.

    Args:
        reconstructor: the mesh and the shapes.
        settings: the settings.
        volumes: see `made_volumes`.
        kind: TRAINING, VALIDATION or HELD_OUT.
        numbers: the number of each volume of the batch, and of its scan.
        acceleration: the factor of undersampling; by default each scan draws its own.
    """
    mine, *space, _ = reconstructor.block(reconstructor.image)
    _, *modes = reconstructor.block(reconstructor.mask)
    images, maps, masks = [], [], []
    for volume, scan in numbers[mine]:
        images.append(volumes[volume][tuple(space)])
        seed = [settings.seed, kind, scan]
        maps.append(sampling.coil_maps(settings.sides, settings.coils, seed, tuple(space)))
        mask = settings.sampled(kind, scan, acceleration)
        masks.append(sampling.mesh_order(mask, settings.side, reconstructor.modes)[tuple(modes)])
    return {
        "image": _pairs(images),
        "seeds": np.array([kind * 2**40 + settings.seed * 2**42 + s for _, s in numbers[mine]]),
        "maps": _pairs(maps),
        "mask": np.stack(masks),
    }


def _pairs(values: Sequence[np.ndarray]) -> np.ndarray:
    stacked = np.stack(values)
    return np.stack([stacked.real, stacked.imag], axis=-1)


class PeakMemory:
    """The largest resident memory of this process since `begin`, on Linux."""

    @staticmethod
    def _status(name: str) -> int:
        text = Path("/proc/self/status").read_text()
        (line,) = (line for line in text.splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    def begin(self) -> None:
        """Forgets the peak so far."""
        self.before = self.growth = None
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self._status("VmRSS")

    def end(self) -> int | None:
        """Returns by how much the peak exceeds the memory at the beginning [bytes]."""
        return None if self.before is None else self._status("VmHWM") - self.before


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Writes a JSON file, which appears when it is complete."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(facts, indent=1) + "\n")
    os.replace(half, path)


@dataclass
class Training:
    """A training, from its first step or from a checkpoint.

    Attributes:
        mesh: all ranks.
        settings: the settings.
        folder: folder of the results.
        adam: weights and moments, equal on all ranks.
        every: steps between validations and checkpoints.
        validation: number of validation scans.
    """

    mesh: ProcessMesh
    settings: Settings
    folder: Path
    adam: Adam
    every: int = 25
    validation: int = 4

    def run(self) -> None:
        """Trains to the last step; writes losses, checkpoints, facts and a plot."""
        settings, mesh = self.settings, self.mesh
        if mesh.rank == 0:
            self._prepare()
        mesh.barrier("folder of the training")
        begin, rows = time.perf_counter(), self._rows()
        network = Reconstructor(
            mesh,
            settings.design,
            settings.sides,
            batch=settings.batch,
            coils=settings.coils,
            noise=settings.noise,
        )
        groups = -(-self.validation // settings.batch)
        training = made_volumes(mesh, settings, self.folder, TRAINING, settings.volumes)
        held = made_volumes(mesh, settings, self.folder, VALIDATION, groups * settings.batch)
        memory, peak = PeakMemory(), None
        for step in range(self.adam.step, settings.steps):
            started = time.perf_counter()
            batch = self._batch(network, training, step)
            memory.begin()
            loss, *gradients = network.step(**batch, **self.adam.weights)
            peak = peak or memory.end()
            rate = self.adam.rate(settings.rate, settings.steps)
            self.adam.update([gradient.numpy() for gradient in gradients], rate)
            row = {"step": step + 1, "loss": float(loss), "rate": rate}
            row["seconds"] = time.perf_counter() - started
            if self.adam.step % self.every == 0 or self.adam.step == settings.steps:
                row["validation_loss"] = self._validated(network, held, groups)
            rows.append(row)
            if mesh.rank == 0:
                self._record(rows, peak, time.perf_counter() - begin)
        if mesh.rank == 0:
            plot_losses(rows, self.folder / "losses.png")

    def _prepare(self) -> None:
        """Makes the folder; a training from its first step removes what an older one left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.adam.step == 0:
            for name in (SETTINGS, CHECKPOINT, LOSSES):
                (self.folder / name).unlink(missing_ok=True)

    def _batch(self, network: Reconstructor, volumes: np.ndarray, step: int) -> dict[str, Any]:
        first = step * self.settings.batch
        numbers = range(first, first + self.settings.batch)
        order = [np.random.default_rng([self.settings.seed, n // len(volumes)]) for n in numbers]
        places = [
            rng.permutation(len(volumes))[n % len(volumes)]
            for rng, n in zip(order, numbers, strict=True)
        ]
        pairs = list(zip(places, numbers, strict=True))
        return scans(network, self.settings, volumes, TRAINING, pairs)

    def _validated(self, network: Reconstructor, volumes: np.ndarray, groups: int) -> float:
        losses, batch = [], self.settings.batch
        for group in range(groups):
            numbers = [(n, n) for n in range(group * batch, (group + 1) * batch)]
            given = scans(network, self.settings, volumes, VALIDATION, numbers)
            losses.append(float(network.step(**given, **self.adam.weights)[0]))
        return float(np.mean(losses))

    def _rows(self) -> list[dict[str, float]]:
        path = self.folder / LOSSES
        if self.adam.step == 0 or not path.exists():
            return []
        with path.open() as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        return [row for row in rows if row["step"] <= self.adam.step]

    def _record(self, rows: list[dict[str, float]], peak: int | None, seconds: float) -> None:
        done, row = self.adam.step, rows[-1]
        with (self.folder / LOSSES).open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows({**row, "step": int(row["step"])} for row in rows)
        saving = done % self.every == 0 or done == self.settings.steps
        if saving:
            self.adam.save(self.folder / CHECKPOINT)
            facts = {"settings": asdict(self.settings), "mesh": str(self.mesh), "steps": done}
            facts["seconds of this run"] = round(seconds, 1)
            facts["processor seconds of rank 0"] = round(time.process_time(), 1)
            if peak is not None:
                facts["memory of a step on rank 0 [MiB]"] = round(peak / 2**20)
            write_json(self.folder / SETTINGS, facts)
        left = (self.settings.steps - done) * np.median([r["seconds"] for r in rows[-20:]])
        words = f"step {done}/{self.settings.steps}: loss {row['loss']:.5f}"
        if "validation_loss" in row:
            words += f", validation {row['validation_loss']:.5f}"
        end = "\n" if saving or not sys.stderr.isatty() else "\r"
        print(f"{words}, about {left / 60:.0f} min left", file=sys.stderr, end=end, flush=True)


def plot_losses(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draws the losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in (("loss", "-"), ("validation_loss", "o-")):
        found = [(row["step"], row[name]) for row in rows if name in row]
        if found:
            axes.semilogy(*zip(*found, strict=True), style, label=name.replace("_", " "))
    axes.set(xlabel="step", ylabel="squared error / squared image")
    axes.legend()
    figure.savefig(path, dpi=120)
