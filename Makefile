# Pass-through variables:
#   PYTEST_ARGS  more arguments for pytest, such as PYTEST_ARGS="-n 2 -k heap"
#   DEMO_ARGS, BENCH_ARGS, REPORT_ARGS  arguments for the demo, a benchmark and the report of all
#   JAX_VERSION  pins JAX, in an environment of its own
#   VENV, PYTHON  where the environment goes, and the Python that makes it
JAX_VERSION ?=
VENV ?= .venv$(if $(JAX_VERSION),-jax$(JAX_VERSION))
# On GPUs one test at a time: each may fill them.
PYTEST_ARGS ?= $(if $(filter cpu,$(BACKEND)),-n auto --dist worksteal)
DEMO_ARGS ?=
BENCH_ARGS ?=
REPORT_ARGS ?=
export JAX_VERSION

PY := $(VENV)/bin/python
BACKEND := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda13 || echo cpu)
# One stamp per backend, so that a driver installed later brings the CUDA libraries in.
STAMP := $(VENV)/.ready-$(BACKEND)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick soak lint format bench report doctor clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | awk -F '\t' '{ printf "  make %-11s %s\n", $$1, $$2 }'

$(STAMP): pyproject.toml scripts/setup.sh
	@bash scripts/setup.sh $(VENV) $(BACKEND)
	@touch $@

setup: $(STAMP) ## make the virtual environment (the other targets do it as needed)

demo: $(STAMP) ## run the decode loop example (DEMO_ARGS)
	$(PY) examples/decode_loop.py $(DEMO_ARGS)

test: $(STAMP) ## run every test; tests that need more GPUs than there are skip themselves
	$(PY) -m pytest -m "not soak" $(PYTEST_ARGS)

test-quick: $(STAMP) ## run the tests not marked slow
	$(PY) -m pytest -m "not slow and not soak" $(PYTEST_ARGS)

soak: $(STAMP) ## run the tests that take many minutes and repeat what shorter ones do
	$(PY) -m pytest -m soak $(PYTEST_ARGS)

lint: $(STAMP) ## check style, format and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(VENV)/bin/pyrefly check --python-interpreter-path $(PY)

format: $(STAMP) ## format and fix what ruff can fix
	$(PY) -m ruff format
	$(PY) -m ruff check --fix

bench: $(STAMP) ## run the benchmarks (BENCH_ARGS)
	$(PY) benchmarks/run.py $(BENCH_ARGS)

report: $(STAMP) ## measure every operation on these GPUs, with tables and plots (REPORT_ARGS)
	$(PY) benchmarks/report.py $(REPORT_ARGS)

doctor: $(STAMP) ## say what works on this machine
	$(PY) -m jaxtaxfree doctor

clean: ## remove environments, caches and build output
	rm -rf .venv .venv-jax* build dist *.egg-info *.png .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
