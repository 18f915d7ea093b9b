"""A trained network, the zero-filled image and a classical method, on held-out volumes.

All ranks scan and reconstruct each volume together. The classical method and the scores are then
shared: each rank works on some of the scans alone.
"""

from __future__ import annotations

import csv
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sampling
import tensorflow as tf
from classical import SCORES, classical, scores, tuned
from network import Reconstructor
from settings import HELD_OUT, VALIDATION, Settings
from training import made_volumes, scans

from meshimpl import ProcessMesh

ZERO_FILLED, NETWORK = "zero-filled", "network"
NAMES = ("PSNR [dB]", "PSNR in the brain [dB]", "SSIM", "SSIM in the brain")
REGIONS = {"brain": "psnr_brain", "volume": "psnr"}
"""Where a classical method is tuned -> the score that is made best."""
SCANNED = ("anatomy", "side", "voxel", "coils", "noise", "mask", "seed")
"""The settings that determine a scan."""


@dataclass(frozen=True)
class Case:
    """A scan, on every rank.

    Attributes:
        kind: VALIDATION or HELD_OUT.
        number: the number of the volume and of its scan.
        acceleration: the factor of undersampling.
        truth: complex64 [x, y, z].
        spectrum: complex64 [coil, kx, ky, kz], zero frequency in the middle.
        images: the zero-filled image and the network's.
    """

    kind: int
    number: int
    acceleration: float
    truth: np.ndarray
    spectrum: np.ndarray
    images: dict[str, np.ndarray]


@dataclass
class Evaluation:
    """An evaluation.

    Attributes:
        mesh: all ranks.
        settings: the volumes and scans; as many volumes as are held out.
        folder: folder of the results; classical images in it are used again.
        weights: the network's weights.
        method: see `classical`, or "none".
        iterations: iterations of the classical method.
        region: where its strength is tuned, one of `REGIONS`; comparisons elsewhere favour others.
    """

    mesh: ProcessMesh
    settings: Settings
    folder: Path
    weights: dict[str, np.ndarray]
    method: str
    iterations: int
    region: str = "brain"

    def run(self) -> None:
        """Writes `scores.csv`, `summary.md` and a picture for each acceleration."""
        settings = self.settings
        if self.mesh.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.mesh.barrier("folder of the evaluation")
        network = Reconstructor(
            self.mesh,
            settings.design,
            settings.sides,
            batch=settings.batch,
            coils=settings.coils,
            noise=settings.noise,
        )
        held = self._cases(network, HELD_OUT, settings.volumes)
        strengths = {}
        if self.method != "none":
            tuning = self._cases(network, VALIDATION, settings.batch)[:: settings.batch]
            found = self._shared(tuning, lambda case: [self._tuned(case)], 1)
            strengths = {case.acceleration: row[0] for case, row in zip(tuning, found, strict=True)}
        methods = [ZERO_FILLED, NETWORK]
        if self.method != "none":
            methods.insert(1, self.method)

        def judged(case: Case) -> list[float]:
            images = dict(case.images)
            if self.method != "none":
                images[self.method] = self._classical(case, strengths[case.acceleration])
            if case.number == 0:
                path = self.folder / f"slices-{case.acceleration:g}x.png"
                draw(case.truth, {name: images[name] for name in methods}, path)
            return [score for name in methods for score in scores(images[name], case.truth)]

        rows = self._shared(held, judged, len(methods) * len(SCORES))
        if self.mesh.rank == 0:
            table = rows.reshape(len(held), len(methods), len(SCORES))
            self._write(held, methods, table, strengths)

    def _cases(self, network: Reconstructor, kind: int, count: int) -> list[Case]:
        """Returns scans with each acceleration, in the order of the volumes."""
        settings, cases = self.settings, []
        volumes = made_volumes(self.mesh, settings, self.folder, kind, count)
        _, ny, nz = settings.sides
        for first in range(0, count, settings.batch):
            numbers = [(n, n) for n in range(first, first + settings.batch)]
            for factor in settings.acceleration:
                given = scans(network, settings, volumes, kind, numbers, factor)
                begin = time.perf_counter()
                spectrum, zero_filled = network.measure(**given)
                scan = {name: given[name] for name in ("maps", "mask")}
                image = network.reconstruct(zero_filled, **scan, **self.weights)
                image.numpy()
                seconds = time.perf_counter() - begin
                if self.mesh.rank == 0:
                    words = f"volume {first}, {factor:g}x: reconstructed in {seconds:.1f} s"
                    print(words, file=sys.stderr, flush=True)
                wholes = [
                    network.measure.gather(spectrum)[:, :, :nz, :ny],
                    network.measure.gather(zero_filled, 1),
                    network.reconstruct.gather(image),
                ]
                for n, (k, z, x) in enumerate(zip(*wholes, strict=True), first):
                    images = {ZERO_FILLED: _joined(z), NETWORK: _joined(x)}
                    truth = np.array(volumes[n])
                    cases.append(Case(kind, n, factor, truth, sampling.centred(k), images))
        return cases

    def _shared(
        self, cases: Sequence[Case], work: Callable[[Case], list[float]], width: int
    ) -> np.ndarray:
        """Returns a row of numbers for each case; the cases are dealt to the ranks."""
        rows = np.zeros((len(cases), width))
        for place, case in enumerate(cases):
            if place % self.mesh.size == self.mesh.rank:
                begin = time.perf_counter()
                rows[place] = work(case)
                seconds = time.perf_counter() - begin
                words = f"volume {case.number}, {case.acceleration:g}x: {seconds:.0f} s"
                print(f"{words} for {self.method} and scores", file=sys.stderr, flush=True)
        return self.mesh.world.allreduce(tf.constant(rows)).numpy()

    def _classical(self, case: Case, strength: float) -> np.ndarray:
        """Returns the classical image of a scan, from a file if it was made before."""
        settings, about = self.settings, (case.kind, case.number, case.acceleration)
        scanned = [getattr(settings, name) for name in SCANNED]
        if settings.mask is not None:
            scanned.append(hashlib.sha256(Path(settings.mask).read_bytes()).hexdigest())
        facts = repr([scanned, about, self.method, strength, self.iterations])
        path = self.folder / "classical" / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.npy"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            half = path.with_suffix(".half.npy")
            np.save(half, self._made_classical(case, strength))
            os.replace(half, path)
        found: np.ndarray = np.load(path)
        return found

    def _made_classical(self, case: Case, strength: float) -> np.ndarray:
        settings = self.settings
        seed = [settings.seed, case.kind, case.number]
        maps = sampling.coil_maps(settings.sides, settings.coils, seed)
        mask = settings.sampled(case.kind, case.number, case.acceleration)
        given = case.spectrum, maps, mask, strength, self.iterations
        return classical(self.method, *given)

    def _tuned(self, case: Case) -> float:
        judge = SCORES.index(REGIONS[self.region])
        return tuned(lambda s: scores(self._classical(case, s), case.truth)[judge])

    def _write(
        self,
        cases: Sequence[Case],
        methods: Sequence[str],
        table: np.ndarray,
        strengths: dict[float, float],
    ) -> None:
        with (self.folder / "scores.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["volume", "acceleration", "method", *SCORES])
            for case, rows in zip(cases, table, strict=True):
                for method, row in zip(methods, rows, strict=True):
                    writer.writerow([case.number, case.acceleration, method, *row])
        lines = [f"{self.settings.volumes} held-out volumes: mean and standard deviation.", ""]
        for factor in self.settings.acceleration:
            chosen = table[[case.acceleration == factor for case in cases]]
            lines += [f"| {factor:g}x | {' | '.join(NAMES)} |", "|---" * (len(NAMES) + 1) + "|"]
            for method, rows in zip(methods, np.moveaxis(chosen, 1, 0), strict=True):
                lines.append(f"| {method} | {' | '.join(map(_spread, rows.T))} |")
            ours = chosen[:, methods.index(NETWORK)]
            for method, rows in zip(methods, np.moveaxis(chosen, 1, 0), strict=True):
                if method != NETWORK:
                    cells = [f"{_spread(d)}, least {d.min():.3g}" for d in (ours - rows).T]
                    lines.append(f"| network - {method} | {' | '.join(cells)} |")
            if factor in strengths:
                words = f"{self.method} has the strength {strengths[factor]:g}"
                lines += ["", f"{words}, the best in the {self.region} of a validation scan."]
            lines.append("")
        text = "\n".join(lines)
        (self.folder / "summary.md").write_text(text)
        print(text)


def _spread(values: np.ndarray) -> str:
    digits = 2 if np.abs(values).max() > 1 else 3
    return f"{values.mean():.{digits}f} ± {values.std(ddof=min(1, len(values) - 1)):.{digits}f}"


def _joined(pairs: np.ndarray) -> np.ndarray:
    return pairs[..., 0] + 1j * pairs[..., 1]


def draw(truth: np.ndarray, images: dict[str, np.ndarray], path: Path) -> None:
    """Draws three slices of the truth and of each image, and five times their errors."""
    from matplotlib.figure import Figure

    truth, names = np.abs(truth), list(images)
    middle, top = [side // 2 for side in truth.shape], truth.max()
    columns = 1 + 2 * len(names)
    figure = Figure(figsize=(1.7 * columns, 5.3), layout="constrained")
    axes = figure.subplots(3, columns)
    for across, (row, place) in enumerate(zip(axes, middle, strict=True)):
        shown = [truth, *[np.abs(images[name]) for name in names]]
        slices = [np.take(image, place, axis=across).T for image in shown]
        slices += [5 * np.abs(found - slices[0]) for found in slices[1:]]
        for axis, image in zip(row, slices, strict=True):
            axis.imshow(image, origin="lower", cmap="gray", vmin=0, vmax=top)
            axis.set_axis_off()
    titles = ["truth", *names, *[f"5 x error,\n{name}" for name in names]]
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    figure.savefig(path, dpi=110)
