"""Package metadata of flowpm_dist and meshimpl; tool settings are in pyproject.toml."""

import re
import runpy
import tomllib
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

# meshimpl can also be installed alone; what it needs stands there.
MESHIMPL = tomllib.loads((Path(__file__).parent / "meshimpl" / "pyproject.toml").read_text())[
    "project"
]
TUNE = ["optuna>=4"]
# Compiles the kernels of GPUs, without one.
NVRTC = "nvidia-cuda-nvrtc-cu12>=12.4"
TEST = ["hypothesis", NVRTC, *TUNE, "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6"]
LINT = ["import-linter>=2.3", "mypy>=1.10", "ruff>=0.6"]
# Builds the documentation: `make docs`. ziamath has the font of the equations.
DOCS = [
    "griffelib>=2",
    "ipykernel>=6.29",
    "jupytext>=1.16",
    "latex2mathml>=3.77",
    "mdx-truly-sane-lists>=1.3",
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.6,<10",
    "mkdocstrings-python>=2",
    "nbclient>=0.10",
    "ziamath>=0.12",
]


NATIVE = Path(__file__).resolve().parent / "flowpm_dist" / "particle_mesh" / "kernels"
SOURCES = [f"flowpm_dist/particle_mesh/kernels/{path.name}" for path in sorted(NATIVE.glob("*.cc"))]
HEADERS = [f"flowpm_dist/particle_mesh/kernels/{path.name}" for path in sorted(NATIVE.glob("*.h"))]


class BuildKernels(build_ext):
    """Build the library of TensorFlow operations; without it the portable kernels are used."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without Python's version, on which the library does not depend."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Build it, or print in one line why not and go on."""
        builder = runpy.run_path(str(NATIVE / "build.py"))
        try:
            builder["build"](Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp))
        except (builder["BuildError"], OSError) as error:
            # What an earlier build left would not be of these sources.
            (NATIVE / "_kernels.so").unlink(missing_ok=True)
            print(f"flowpm_dist: without compiled kernels: {error}", flush=True)


def read(name: str) -> str:
    """Text of a file next to this one, or an empty text if a source archive left the file out."""
    path = Path(__file__).parent / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="flowpm-dist",
    version=re.findall('^__version__ = "(.*)"$', read("flowpm_dist/__init__.py"), re.MULTILINE)[0],
    description="Differentiable particle-mesh simulations on many ranks of Mesh TensorFlow",
    long_description=read("README.md"),
    long_description_content_type="text/markdown",
    author="the flowpm_dist developers",
    license="MIT",
    keywords="cosmology n-body particle-mesh differentiable-programming tensorflow horovod lensing",
    packages=find_packages(
        include=["flowpm_dist", "flowpm_dist.*", "meshimpl", "meshimpl.*"],
    ),
    package_data={
        "flowpm_dist": ["py.typed"],
        "flowpm_dist.cli": ["job.sbatch"],
        "flowpm_dist.cosmoflow.planning": ["mlperf.toml"],
        "flowpm_dist.jobs": ["report.css"],
        "flowpm_dist.evolution.corrections": ["default.json", "default-2.json", "network.json"],
        "meshimpl": ["py.typed"],
        # What `flowpm-dist build` builds from.
        "flowpm_dist.particle_mesh.kernels": ["*.cc", "*.cu", "*.h"],
        "meshimpl.horovod_wheel": ["exchange.cc", "patches.toml", "requirements-*.txt"],
    },
    ext_modules=[
        Extension(
            "flowpm_dist.particle_mesh.kernels._kernels", SOURCES, depends=HEADERS, optional=True
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    zip_safe=False,
    # TensorFlow 2.21 has wheels for these Python versions.
    python_requires=">=3.11,<3.14",
    install_requires=[
        *MESHIMPL["dependencies"],
        "arviz-stats>=0.6",
        "astropy>=6",
        "camb>=1.5",
        "getdist>=1.7",
        "h5py>=3",
        "healpy>=1.17",
        "zarr>=3",
        "psutil>=5.9",
        "pydantic>=2.7",
        "rich>=13",
        "tomli-w>=1",
        "typer>=0.12",
        "typing-extensions>=4.6",
        "matplotlib>=3.8",
        "scikit-learn>=1.5",
        "scipy>=1.11",
        "tensorboard>=2.18",
    ],
    extras_require={
        **MESHIMPL["optional-dependencies"],
        "docs": DOCS,
        # transfer = "class", which is compiled at its installation.
        "class": ["classy>=3.2"],
        # The example examples/brain_imaging: the template of the brain, scores, a classical method.
        "brain": ["nilearn>=0.10", "scikit-image>=0.22", "sigpy>=0.1.26"],
        # Other people's tables and chains, see docs/howto/take_away.md.
        "interchange": [
            "arviz-base>=0.6",
            "arviz-stats[xarray]>=0.6",
            "pandas>=2",
            "pyarrow>=15",
            "xarray>=2024.10",
        ],
        # Tables, labelled arrays and progress bars of notebooks.
        "notebook": ["ipywidgets>=8", "pandas>=2", "xarray>=2024.1"],
        "tune": TUNE,
        "test": TEST,
        "dev": [*TEST, *LINT],
    },
    entry_points={"console_scripts": ["flowpm-dist = flowpm_dist.cli:start"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Astronomy",
        "Topic :: Scientific/Engineering :: Physics",
        "Typing :: Typed",
    ],
)
