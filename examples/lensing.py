"""Weak lensing from Python: maps, their power compared with theory, and a gradient to sigma8.

The convergence is painted during the run, and the gradient is propagated back through the run. Runs
as `python lensing.py`, and on two ranks as `mpirun -np 2 python lensing.py`.
"""

import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.cosmology import Halofit, LinearPower
from flowpm_dist.observables.lensing import SmailDistribution, SourcePlane, convergence_power
from flowpm_dist.observables.light_cone import FlatField, LightCone
from flowpm_dist.statistics.angular_spectra import angular_power, binned_angular_power

cosmology = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.97, sigma8=0.81)
simulation = fpm.Simulation(
    cosmology, grid=64, box_size=200.0, steps=fpm.scale_factor_steps(0.1, 1.0, 10)
)
cone = LightCone(FlatField(field_of_view=4.5, pixels=64, z_max=1.0))
sources = [SourcePlane(1.0), SmailDistribution(z0=0.5, z_max=1.0)]
mesh = simulation.box.mesh

maps = cone.convergence(simulation, sources, seed=1)
gamma1, gamma2 = maps.shear()
edges = [80.0, 250.0, 500.0, 1000.0]  # of bins in l
measured = angular_power(maps.kappa, maps.sky.fov, edges, window="bilinear")
halofit = Halofit(LinearPower(cosmology))
expected = convergence_power(measured.ell, sources, cosmology, halofit)

# The maps are whole on every rank, so each rank's part of the loss is a share of it.
sigma8 = tf.Variable(0.81, dtype=tf.float64)
with tf.GradientTape() as tape:
    varied = cosmology.replace(sigma8=sigma8)
    kappa = cone.convergence(simulation, sources, seed=1, cosmology=varied).kappa
    power = binned_angular_power(kappa, maps.sky.fov, edges, window="bilinear")
    loss = tf.reduce_sum(tf.math.log(power[0]))
    part = loss / mesh.size
slope = float(tape.gradient(part, sigma8))


def loss_of(sigma8):
    """Returns the same loss by theory alone."""
    varied = cosmology.replace(sigma8=sigma8)
    power = convergence_power(measured.ell, sources, varied, Halofit(LinearPower(varied)))
    return float(tf.reduce_sum(tf.math.log(power[0, 0])))


theory = (loss_of(0.82) - loss_of(0.80)) / 0.02

if mesh.rank == 0:
    print("sources at z = 1   rms convergence", float(tf.math.reduce_std(maps.kappa[0])))
    print("    l   C_l        C_l by halofit")
    for ell, found, known in zip(measured.ell, measured.power[0], expected[0, 0], strict=True):
        print(f"{ell:5.0f}   {found:.3e}  {float(known):.3e}")
    print(f"d(sum of ln C_l)/d sigma8 = {slope:.2f} by the run, {theory:.2f} by theory")
