"""The truth of an emulation: converged runs that are made here, or snapshots of other codes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from flowpm_dist.corrections import LearningError, Pair
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.emulate.folder import EmulationFolder
from flowpm_dist.emulate.options import EmulationOptions, PairFiles, Size
from flowpm_dist.evolution.integrators import BullFrog
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.files import checksum, remove
from flowpm_dist.io.other_codes import particle_files
from flowpm_dist.io.snapshot import VECTORS, is_whole
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State

SAME_TIME = 1e-4
"""Relative difference of scale factors that are the same."""


def check_held_out(pairs: Sequence[Pair], count: int) -> None:
    """Checks that no universe that is held out is also learned from.

    Args:
        pairs: all pairs.
        count: the number of pairs that are held out.

    Raises:
        LearningError: a true state of theirs is one that is learned from, whatever its file.
    """
    learned = {
        checksum(state.displacement.block.numpy()): pair.name
        for pair in pairs[:-count]
        for state in pair.truth
    }
    for pair in pairs[-count:]:
        for state in pair.truth:
            if other := learned.get(checksum(state.displacement.block.numpy())):
                raise LearningError(
                    f"{pair.name} is held out, and has the same particles as {other}, which is "
                    "learned from: give another universe"
                )


class Truth:
    """The universes of an emulation, on all ranks together.

    Args:
        options: the checked run file.
        simulations: the cheap runs, by the size of the box.
        folder: the emulation's folder, which keeps converged runs for sessions to come.
        progress: the progress of this rank.
        after_step: called after each step of a converged run; an exception from it ends the work.

    Attributes:
        seconds: the median of the durations of the converged runs that were made [s]; None if none
            was.
    """

    seconds: float | None = None

    def __init__(
        self,
        options: EmulationOptions,
        simulations: Mapping[Size, Simulation],
        folder: EmulationFolder,
        progress: Progress,
        after_step: Callable[[], None],
    ) -> None:
        self._options, self._folder = options, folder
        self._simulations = [simulations[size] for size in options.sizes()]
        self._progress, self._after_step = progress, after_step
        self._laps: list[float] = []

    def pairs(self, cosmologies: Sequence[Cosmology]) -> list[Pair]:
        """Returns the cheap run and the truth of each cosmology, in their order.

        Raises:
            LearningError: a pair that does not fit the box or the steps.
            SnapshotError: a snapshot that cannot be read.
            HaloError: a particle of a converged run left the halo that was asked for.
            WriteError: a converged run cannot be written.
        """
        each = list(zip(self._simulations, cosmologies, strict=True))
        if files := self._options.truth.pairs:
            pairs = [self._paired(pair, *both) for pair, both in zip(files, each, strict=True)]
            check_held_out(pairs, self._options.emulate.validation)
            return pairs
        return [self._made(number, *both) for number, both in enumerate(each)]

    def _paired(self, pair: PairFiles, simulation: Simulation, cosmology: Cosmology) -> Pair:
        self._progress.note(f"reading {pair.final[-1]}")
        start = self._read(pair.initial, simulation.box, cosmology)
        first, last = float(simulation.edges[0]), float(simulation.edges[-1])
        if abs(start.a - first) > SAME_TIME * first:
            raise LearningError(
                f"{pair.initial} is of a = {start.a:g}: the steps begin at {first:g}"
            )
        truth: list[State] = []
        for path in pair.final:
            state = self._read(path, simulation.box, cosmology)
            a = min(state.a, last) if state.a < last * (1 + SAME_TIME) else state.a
            if not first < a <= last:
                raise LearningError(
                    f"{path} is of a = {a:g}: the steps go from {first:g} to {last:g}"
                )
            if any(abs(a - other.a) <= SAME_TIME * a for other in truth):
                raise LearningError(f"{path} is of a = {a:g}, as another one of truth.pairs.final")
            truth.append(dataclasses.replace(state, a=a))
        return Pair(simulation, start, truth, cosmology, str(pair.final[-1]))

    def _read(self, path: Path, box: Box, cosmology: Cosmology) -> State:
        files = particle_files(path)
        has_own = files is None or files.written is not None
        assumed = None if has_own else cosmology
        state = State.from_snapshot(path, mesh=box.mesh, cosmology=assumed)
        if state.box.grid != box.grid or not np.allclose(state.box.size, box.size):
            raise LearningError(
                f"{path} has a grid {state.box.grid} in {state.box.size} Mpc/h: box.grid is "
                f"{box.grid}, and box.size, or truth.pairs.size, {box.size}"
            )
        if has_own:
            ours, theirs = cosmology.numbers(), state.cosmology.numbers()
            if state.cosmology.power != cosmology.power:
                raise LearningError(
                    f"{path} has power = {state.cosmology.power}: truth.pairs.cosmology has "
                    f"{cosmology.power}"
                )
            for name, value in ours.items():
                if isinstance(value, float) and not math.isclose(value, theirs.get(name, value)):
                    raise LearningError(
                        f"{path} has {name} = {theirs[name]:g}: truth.pairs.cosmology has {value:g}"
                    )
        displacement, velocity = (
            Field(tf.cast(field.block, box.dtype), box)
            for field in (state.displacement, state.velocity)
        )
        return dataclasses.replace(state, displacement=displacement, velocity=velocity)

    def _made(self, number: int, simulation: Simulation, cosmology: Cosmology) -> Pair:
        """Returns a pair made here; its converged run is on the disk, or is made now."""
        times, box = self._options.times, simulation.box
        mesh, total = box.mesh, len(self._simulations)
        seed = self._options.truth.seed + number
        paths = self._folder.states(number, times)
        # Rank 0 alone looks for each chunk.
        missing = mesh.rank == 0 and not all(is_whole(path) for path in paths.values())
        if bool(mesh.world.broadcast(tf.constant(missing))):
            if mesh.rank == 0:  # what a killed session has left
                for path in paths.values():
                    remove(path, ignore_errors=True)
            mesh.barrier()
            name = f"converged run {number + 1}"
            self._progress.note(f"{name} of {total}")

            def save(state: State) -> tf.Tensor:
                a = min(times, key=lambda a: abs(a - state.a))
                state.save(paths[a], fields=VECTORS)
                return tf.zeros([])

            def shown(step: int, steps: int, a: float, seconds: float) -> None:
                self._progress(name, step, steps, f"a = {a:.3f}")
                self._after_step()

            run = self._converged(box, cosmology).run
            begin = time.perf_counter()
            run(seed=seed, outputs=times, on_output=save, progress=shown)
            self._laps.append(time.perf_counter() - begin)
            self.seconds = float(np.median(self._laps))
        truth = [
            dataclasses.replace(self._read(path / "snapshot.zarr", box, cosmology), a=a)
            for a, path in paths.items()
        ]
        return Pair(simulation, seed, truth, cosmology, f"universe {number}")

    def _converged(self, box: Box, cosmology: Cosmology) -> Simulation:
        options = self._options
        changes = {
            "integrator": BullFrog(),
            "mesh_factor": options.truth.mesh_factor,
            "correction": None,
        }
        edges = options.truth_steps.edges_of(cosmology)
        solver = {**dict(options.solver), **changes}
        return Simulation(cosmology, box.grid, box.size, edges, mesh=box.mesh, **solver)
