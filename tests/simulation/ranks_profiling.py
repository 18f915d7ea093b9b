"""The profile mode: every part is found, and the parts make up the evolution."""

import pytest
from ranks import process_mesh

import flowpm_dist as fpm
from flowpm_dist.grid.decomposition import StepTraffic
from flowpm_dist.simulation.profiling import PARTS, profile
from tests.simulation.ranks_simulation import MESHES


@pytest.mark.ranks(1, 2)
def test_profile_accounts_for_the_evolution():
    mesh = process_mesh(MESHES[-1])
    sim = fpm.Simulation(
        fpm.Cosmology.planck18(), 32, 64.0, fpm.scale_factor_steps(0.1, 1.0, 3), mesh=mesh
    )
    message = []
    found = profile(sim, seed=1, progress=lambda *step: message.append(step))
    assert set(found.seconds) == set(PARTS)
    assert sum(found.seconds.values()) == pytest.approx(found.total, rel=0.2)
    for part in ("paint", "FFT", "filter", "read", "update"):
        assert found.seconds[part] > 0, part
    for part in ("exchange", "transposes"):  # one rank needs none of them
        assert (found.seconds[part] > 0) == (mesh.size > 1), part
    assert "ns/particle/step" in str(found)
    assert [step[:2] for step in message] == [(n + 1, 3) for n in range(3)]
    rows, cols = mesh.axis_size("row"), mesh.axis_size("col")
    assert found.traffic == StepTraffic((32,) * 3, rows, cols, sim.run(seed=1).halo).tally
    assert ("MiB sent" in str(found)) == (mesh.size > 1)
