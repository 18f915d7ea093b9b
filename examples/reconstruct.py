"""Reconstructs the initial conditions of a mock universe.

The mock has 32^3 cells of 2 Mpc/h. The search finds the white noise that most probably led to its
density. Runs as `python reconstruct.py`, and on two ranks as `mpirun -np 2 python reconstruct.py`.
For larger boxes use the command `flowpm-dist reconstruct examples/reconstruct.toml`.
"""

import flowpm_dist as fpm
from flowpm_dist import reconstruction as rec
from flowpm_dist.observables import ForwardModel

simulation = fpm.Simulation(
    fpm.Cosmology.planck18(), grid=32, box_size=64.0, steps=fpm.scale_factor_steps(0.1, 1.0, 3)
)
box = simulation.box
model = ForwardModel(simulation, "pm")
model.hold_halo()

truth = simulation.run(seed=1)
likelihood = rec.Gaussian(box, truth.density().block, sigma=0.2)  # each rank's block
posterior = rec.Posterior(model, likelihood)


def tell(row, point):
    """Prints a line for every tenth iteration."""
    if row.iteration % 10 == 0 and box.mesh.rank == 0:
        print(f"{row.evaluations:3d} gradients  loss {row.loss:10.1f}", flush=True)


stages = rec.default_stages(posterior, evaluations=60)
point = rec.Search(posterior, rec.LBFGS(), stages).run(tell)

found = model.run(point.field, {})
k, r_initial = fpm.correlation_coefficient(found.linear_delta, truth.linear_delta)
_, r_final = fpm.correlation_coefficient(found.density(), truth.density())
if box.mesh.rank == 0:
    print("k [h/Mpc]  r(k) of the initial and of the final fields")
    for row in zip(k, r_initial, r_final, strict=True):
        print("{:9.3f}  {:6.3f}  {:6.3f}".format(*row))
