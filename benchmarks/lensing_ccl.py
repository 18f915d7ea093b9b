"""C_l of the lensing tutorial by CCL, the library of the LSST Dark Energy Science Collaboration.

    pip install pyccl==3.3.6        in an environment of its own
    python benchmarks/lensing_ccl.py

It prints the rows that docs/tutorials/lensing.py holds: l, and C_l of the near and of the far
population, by Limber's approximation with halofit and the transfer function of Eisenstein and Hu.
There are no photons and no neutrinos, as in this project.
"""

import numpy as np

ELL = [80.0, 150.0, 300.0, 600.0, 1000.0, 1400.0]


def main() -> None:
    """Print the rows."""
    import pyccl

    cosmology = pyccl.Cosmology(
        Omega_c=0.31 - 0.049,
        Omega_b=0.049,
        h=0.68,
        n_s=0.97,
        sigma8=0.81,
        Omega_g=0.0,
        Neff=0.0,
        transfer_function="eisenstein_hu",
        matter_power_spectrum="halofit",
    )
    z = np.linspace(0.0, 0.8, 41)
    near, far = z**2 * np.exp(-((z / 0.25) ** 2)), np.exp(-0.5 * ((z - 0.6) / 0.06) ** 2)
    tracers = [pyccl.WeakLensingTracer(cosmology, dndz=(z, n)) for n in (near, far)]
    powers = [pyccl.angular_cl(cosmology, tracer, tracer, ELL) for tracer in tracers]
    for row in zip(ELL, *powers, strict=True):
        print("[" + ", ".join(f"{value:.5g}" for value in row) + "],")


if __name__ == "__main__":
    main()
