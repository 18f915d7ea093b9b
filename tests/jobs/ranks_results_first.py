"""What fails while rank 0 draws complete results holds up no rank."""

from ranks import SIZE, process_mesh, shared_folder
from run_files import RUN

from flowpm_dist.jobs.progress import Progress
from flowpm_dist.simulate.folder import SimulationFolder
from flowpm_dist.simulate.options import SimulationOptions
from flowpm_dist.simulate.session import SimulationSession


def test_figures_that_cannot_be_drawn(tmp_path, tmp_path_factory, monkeypatch):
    mesh, out = process_mesh(f"row:{SIZE}"), shared_folder(tmp_path_factory) / "out"
    (tmp_path / "run.toml").write_text(RUN.replace("grid = 16", "grid = 8"))
    options = SimulationOptions.load(tmp_path / "run.toml").with_mesh(f"row:{SIZE},col:1")
    folder, tried = SimulationFolder(out), []

    def fail(figure, path):
        tried.append((path.name, folder.is_complete))
        raise OSError("out of ink")

    monkeypatch.setattr("flowpm_dist.io.figures.save_figure", fail)
    if mesh.rank == 0:
        folder.begin()
    with Progress() as progress:
        summary = SimulationSession(options, folder, progress).run(resume=False)
    mesh.barrier()
    names = ["density.png", "power_spectrum.png"] if mesh.rank == 0 else []
    assert tried == [(name, True) for name in names] and (summary is None) == bool(mesh.rank)
    assert [text.partition(":")[0] for text in progress.warnings] == [f"no {n}" for n in names]
    assert folder.is_finished() and not folder.partial.exists()
