# make demo   train a translator on real text, score it, draw what it attends to (about 10 minutes on 2 cores)
# make test   the tests, without those marked slow
# make test-all  all tests
# make lint   formatter, linter, type checker
# make bench  the benchmarks behind the figures of docs/results.md (installs PyTorch and tokamax)
# make conformance  who keeps which promise: our backends and other libraries (installs PyTorch and tokamax)
# make parity  pretrained families here and in transformers, number for number (installs PyTorch)
# make accelerators  memory and traffic of a step on 16 TPUs and 16 GPUs, by their compilers (installs them, 6 GB)
# make gpu    what the kernels of an NVIDIA GPU compute, on one that is here (installs CUDA 13 for JAX)
# make zoo    every architecture in small, trained and held to baselines and a blind model: one table
# make docs   the site of docs/ in build/site; a dead link or a public name without a docstring fails
# make wheel  the library as a wheel and an sdist, in dist/
# make fuzz   many random calls, damaged files and hostile settings, drawn anew each time (installs PyTorch)
# make mutants  mistakes made one at a time in a copy of the tree, each of which a test must notice (20 minutes)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKDIR ?= runs/demo

.PHONY: demo test test-all lint format bench conformance parity zoo accelerators gpu docs wheel fuzz mutants clean

demo: $(VENV)/.demo
	$(BIN)/python -m experiments.demo --workdir=$(WORKDIR)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "not slow"

test-all: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist=worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright --pythonpath $(abspath $(BIN)/python) --project tests/typed

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.bench
	$(BIN)/python -m experiments.bench.attend --json=runs/bench/attend.json
	$(BIN)/python -m experiments.bench.translation_step
	$(BIN)/python -m experiments.bench.decode

conformance: $(VENV)/.conformance
	$(BIN)/python -m experiments.bench.conformance

parity: $(VENV)/.bench
	$(BIN)/python -m experiments.parity

zoo: $(VENV)/.zoo
	$(BIN)/python -m experiments.zoo --table=runs/zoo.json

accelerators: $(VENV)-accelerators/.accelerators
	JAX_PLATFORMS=cpu $(VENV)-accelerators/bin/python -m pytest -n 2 --dist=loadgroup tests/accelerators

gpu: $(VENV)-gpu/.gpu
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(VENV)-gpu/bin/python -m pytest -n 4 -v tests/gpu

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/python -m mkdocs build --strict

wheel: $(VENV)/.wheel
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m build --outdir dist

fuzz: $(VENV)/.test $(VENV)/.bench
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -n 2 --dist=worksteal tests/properties

mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "crossattn needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# The extras of each stamp.
EXTRAS.demo := train,viz
EXTRAS.zoo := train,speech,pages,summaries,baselines,retrieval
EXTRAS.test := test
EXTRAS.dev := dev
EXTRAS.bench := train,viz,bench,tokamax
EXTRAS.conformance := bench,tokamax
EXTRAS.docs := train,docs
EXTRAS.accelerators := test,plan-tpu,plan-gpu
EXTRAS.gpu := test,tokamax,cuda13
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(VENV)/.wheel: | $(BIN)/python
	$(PIP) build
	touch $@

$(VENV)/.%: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[$(EXTRAS.$*)]'
	touch $@

# An environment of its own, since JAX looks for the devices of all installed compilers.
$(VENV)-accelerators/.accelerators: pyproject.toml
	$(MAKE) VENV=$(VENV)-accelerators $@

$(VENV)-gpu/.gpu: pyproject.toml
	$(MAKE) VENV=$(VENV)-gpu $@

clean:
	rm -rf $(VENV) $(VENV)-accelerators $(VENV)-gpu build *.egg-info .pytest_cache .ruff_cache
