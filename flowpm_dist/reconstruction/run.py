"""A reconstruction from its plan to its results: everything that `reconstruct` does."""

from __future__ import annotations

import json
from dataclasses import replace

import tensorflow as tf

from flowpm_dist.jobs.progress import Progress
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.plan import ReconstructionPlan, search_mesh
from flowpm_dist.reconstruction.sampling_session import SamplingSession
from flowpm_dist.reconstruction.search_session import ReconstructionOutcome, SearchSession
from meshimpl.process_mesh import ProcessMesh, initialise


def reconstruct(
    plan: ReconstructionPlan,
    shape: str,
    folder: ReconstructionFolder,
    progress: Progress,
    *,
    run_text: str,
    resume: bool,
) -> ReconstructionOutcome:
    """Does all that a plan asks for: the search, and chains if it wants draws.

    Args:
        plan: checked.
        shape: of the mesh; the search uses all its ranks for one universe.
        folder: begun on rank 0.
        progress: of this rank.
        run_text: the run file with all defaults, which the results keep.
        resume: go on from the latest checkpoint, if there is one.

    Returns:
        How it ended, when all ranks have.

    Raises:
        VolumeError, HaloError, NoProgressError, CheckpointError, WriteError: see `SearchSession`
            and `SamplingSession`.
    """
    initialise([search_mesh(shape), shape])
    mesh = ProcessMesh(search_mesh(shape))
    searched = bool(mesh.world.broadcast(tf.constant(resume and folder.is_searched)))
    if searched:
        facts = json.loads(folder.result.read_text())
        outcome = ReconstructionOutcome(facts["iterations"], facts["evaluations"], None, facts)
    else:
        outcome = SearchSession(plan, mesh, folder, progress, run_text).run(resume=resume)
    if plan.sampler.draws and outcome.stopped_by is None:
        outcome = _sample(plan, ProcessMesh(shape), folder, progress, outcome)
    mesh.barrier()  # all is written
    return outcome


def _sample(
    plan: ReconstructionPlan,
    mesh: ProcessMesh,
    folder: ReconstructionFolder,
    progress: Progress,
    searched: ReconstructionOutcome,
) -> ReconstructionOutcome:
    session = SamplingSession(plan, mesh, folder, progress)
    facts = session.run()
    if session.stopped_by is not None:
        at = f"after move {session.chains.progress.iteration} of {session.chains.moves}"
        return replace(searched, stopped_by=session.stopped_by, stopped_at=at)
    if mesh.rank == 0:
        folder.write_mark(complete=True, searched=True)
    return replace(searched, facts={**searched.facts, "sampling": facts})
