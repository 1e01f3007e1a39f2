# Everything a newcomer needs: `make demo` and `make test`. Both set themselves up (a virtual environment in .venv with
# pinned dependencies, the C++ extension) and do only what is not done yet; a second run starts in seconds.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
# Two pytest workers on two cores, at most eight; each keeps to one thread unless a test asks for more.
JOBS   ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && n=8; echo $$n)
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS)

# What `make test` runs, one after the other; `make test-dsa` runs one.
AREAS               := dsa artifact emulator pallas-triton tpu
TESTS_dsa           := test/contracts test/dsa test/packaging
TESTS_artifact      := test/artifact
TESTS_emulator      := test/emulator
TESTS_pallas-triton := test/pallas_triton
TESTS_tpu           := test/tpu

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint docs clean $(AREAS:%=test-%)

help: ## what this file offers
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 24

setup: $(VENV)/.built ## the virtual environment and the C++ extension

# The dependencies, at the versions of requirements/constraints.txt.
$(VENV)/.installed: pyproject.toml requirements/constraints.txt
	@echo "== setting up $(VENV) (pinned dependencies; minutes the first time)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q -c requirements/constraints.txt "setuptools>=77" wheel ninja torch numpy
	@SKIP_EXTENSION=1 $(PY) -m pip install -q -c requirements/constraints.txt --no-build-isolation -e ".[demo,dev,emulator,pallas-triton,tpu-aot]"
	@touch $@

# The C++ extension and the emulator's core, rebuilt when their sources change.
$(VENV)/.built: $(VENV)/.installed setup.py $(wildcard csrc/cpu/*) $(wildcard csrc/emulator/*)
	@echo "== building the C++ extension"
	@$(PY) setup.py -q build_ext --inplace
	@echo "== building the emulator's core"
	@$(PY) -m cute_emulator.build
	@touch $@

demo: setup ## train a small language model whose attention is this operator (about a minute)
	@echo "== demo"
	@$(PY) -m cudnn_dsa demo $(DEMO_FLAGS)

test: lint $(AREAS:%=test-%) ## lint, type checks and every test that is not slow

# One pytest a run: the areas want different frameworks and settings in their processes.
$(AREAS:%=test-%): test-%: setup
	@echo "== tests of $* ($(JOBS) workers)"
	@$(PYTEST) -m "not slow" $(TESTS_$*) $(PYTEST_FLAGS)

test-slow: setup ## the slow tests
	@$(PYTEST) -m slow test $(PYTEST_FLAGS)

lint: setup ## ruff and mypy
	@echo "== ruff, mypy"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

docs: setup ## the user guide and API reference, into docs/_build
	@$(PY) -m pip install -q -c requirements/constraints.txt --no-build-isolation -e ".[docs]"
	@$(PY) -m sphinx -q -W -b html docs docs/_build
	@echo "docs/_build/index.html"

clean: ## remove what was built
	rm -rf build dist docs/_build *.egg-info cudnn_dsa/*.so $(VENV)/.built
