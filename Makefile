# `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
FOLDERS := labels dataset collect eval cards
CODE := torchtraceap $(FOLDERS) tests benchmarks

# No test and no target may reach for weights or data on a hub.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo '  make env PYTHON=python3.12 picks the interpreter; make test JOBS=8 the number of test processes'

.PHONY: env
env: $(VENV)/.installed ## create .venv from pyproject.toml and requirements.lock

# The stamp is written last: an interrupted installation is taken up again. pip keeps what is in place.
$(VENV)/.installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		found=$$($(PYTHON) --version 2>/dev/null || echo missing); \
		echo "make env: needs Python 3.11 or newer, but $(PYTHON) is $$found; try PYTHON=python3.12" >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo 'make env: installing into $(VENV); PyTorch is large, the first time takes minutes'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[collect,dev]'
	@touch $@

.PHONY: test
test: env ## run the tests, without the slow ones
	$(BIN)/python -m pytest -m 'not slow' -n $(JOBS)

SAMPLE ?= 20

.PHONY: verify
verify: env ## check what dataset/ promises: its files, all traces, and the events of SAMPLE of them
	$(BIN)/traceap verify dataset --sample $(SAMPLE) --jobs $(JOBS)

.PHONY: test-all
test-all: env ## run all tests (inductor, Ray, kill tests: minutes), and verify all of dataset/
	@$(BIN)/python -c 'import ray' 2>/dev/null || { \
		echo 'make test-all: adding Ray to $(VENV)'; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[collect,dev,scale]'; }
	$(BIN)/python -m pytest -n $(JOBS)
	$(BIN)/traceap verify dataset --jobs $(JOBS)

.PHONY: lint
lint: env types ## check style, format and types
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	@echo 'mypy -p torchtraceap'
	@$(BIN)/mypy | sed -E 's#^build/types/torchtraceap/($(subst $() ,|,$(FOLDERS)))/#\1/#; s#^build/types/##'

# The folders under the names that they are imported by: type checkers read a tree of links, not pyproject.
.PHONY: types
types:
	@rm -rf build/types && mkdir -p build/types/torchtraceap
	@cd build/types/torchtraceap && \
		ln -s $(addprefix ../../../,$(filter-out %__pycache__,$(wildcard torchtraceap/*)) $(FOLDERS)) .

.PHONY: format
format: env ## rewrite the code in the project's format
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

.PHONY: docs
docs: env ## write docs/patterns.md and docs/zoo.md, and the counts in README.md
	$(BIN)/traceap patterns list --markdown > docs/patterns.md
	$(BIN)/traceap zoo list --markdown $(addprefix --check ,$(sort $(wildcard docs/measurements/zoo-*.json))) > docs/zoo.md
	$(BIN)/python -m torchtraceap.collect.listing README.md

.PHONY: demo
demo: env ## collect, label, build, detect and score on this machine (minutes)
	$(BIN)/traceap demo --resume

.PHONY: bench
bench: env ## run every program in benchmarks/ and print its ratios
	@$(BIN)/python -c 'import hta' 2>/dev/null || { \
		echo 'make bench: adding the peer (TraceInsight, with plotly and jupyterlab) to $(VENV)'; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[collect,dev,bench]'; }
	@for program in benchmarks/*.py; do \
		case $$program in benchmarks/_*) continue;; esac; \
		echo "== $$program"; $(BIN)/python $$program; \
	done

BUNDLE_PYTHON ?=
BUNDLE_MACHINE ?= x86_64
BUNDLE_HAVE ?=
BUNDLE ?= dist/torchtraceap-bundle.pyz

.PHONY: bundle
bundle: env ## write one file that collects on a machine without internet (docs/new_hardware.md)
	$(BIN)/python -P -m torchtraceap.collect.bundle $(if $(BUNDLE_PYTHON),--python $(BUNDLE_PYTHON)) \
		--machine $(BUNDLE_MACHINE) $(if $(BUNDLE_HAVE),--have $(BUNDLE_HAVE)) -o $(BUNDLE)

.PHONY: clean
clean: ## remove what was built; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find torchtraceap $(FOLDERS) tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
