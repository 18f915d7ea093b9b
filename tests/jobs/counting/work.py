"""The work of a job that counts: each step, every rank adds one."""

import json
import os
import signal
from pathlib import Path

from counting.options import CountOptions
from flowpm_dist.jobs.folder import WorkFolder
from flowpm_dist.jobs.job import Command, Costs, Job
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.run_file import write_run_file
from flowpm_dist.simulation.cost import process_bytes
from flowpm_dist.simulation.demand import Demand


class CountFolder(WorkFolder):
    kind = "count"
    contents = ("count.json", "run.toml", "total.json")
    begun = "count.json"
    resumed_keys = ("step", "total")

    def last_checkpoint(self) -> tuple[Path, str] | None:
        step = self.mark().get("step")
        return None if step is None else (self.path, f"step {step}")


class CountJob(Job[CountOptions, int]):
    command = Command("count", "Count on all ranks.", example="flowpm-dist count run.toml")
    options_type, folder_type = CountOptions, CountFolder

    @property
    def costs(self) -> Costs:
        def memory(grid, axes):
            return process_bytes(axes)

        return Costs(Demand("counting", (8, 8, 8), self.mesh, memory, "row:{}".format))

    def describe(self) -> str:
        return f"{self.options.count.steps} steps"

    def work(self, progress: Progress) -> int:
        import tensorflow as tf

        from flowpm_dist.jobs.job import StopError
        from flowpm_dist.jobs.session import StopRequest
        from meshimpl import ProcessMesh

        mesh, requested = ProcessMesh(self.mesh), self.options.count
        mark = self.folder.mark()
        total, first = int(mark.get("total", 0)), int(mark.get("step", 0))
        if mesh.rank == 0:
            write_run_file(self.folder.run_file, self.options.resolved())
        mesh.barrier()
        request = StopRequest(mesh, self.folder, "step", progress.say)
        with request.heard():
            for step in range(first + 1, requested.steps + 1):
                total += int(mesh.world.allreduce(tf.constant(1)))
                progress("count", step, requested.steps)
                if mesh.rank == 0 and step == requested.signal_after:
                    os.kill(os.getpid(), signal.SIGTERM)
                stopped = request.name()
                if mesh.rank == 0:
                    done = step == requested.steps and not stopped
                    self.folder.write_mark(complete=done, step=step, total=total)
                if stopped:
                    raise StopError(stopped, f"after step {step} of {requested.steps}")
        if mesh.rank == 0:
            (self.folder.path / "total.json").write_text(json.dumps(total))
        return total

    def report(self, result: int) -> str:
        return f"counted {result}"
