"""`python -m meshimpl.launch 4 script.py --its options`: a Python script on several ranks here."""

import argparse
import sys
from pathlib import Path

from meshimpl.launch.job import relaunch


def main() -> int:
    """Reads the command line, starts the job, and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m meshimpl.launch",
        usage="%(prog)s [-h] RANKS SCRIPT [ARGUMENTS ...]",
        description="Start a Python script on several ranks of this machine by mpirun. The ranks "
        "share the cores; there may be more ranks than cores. On a cluster, start the script by "
        "srun or mpirun.",
        epilog="example: python -m meshimpl.launch 4 script.py --steps 10",
    )
    parser.add_argument("ranks", type=int, metavar="RANKS", help="number of ranks")
    parser.add_argument("script", metavar="SCRIPT", help="path of the script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="arguments of the script"
    )
    options = parser.parse_args()
    if not Path(options.script).is_file():
        parser.error(f"there is no script {options.script}")
    program = [sys.executable, options.script]
    return relaunch(options.ranks, options.arguments, program=program)


if __name__ == "__main__":
    sys.exit(main())
