# Every target sets up what it needs: a virtual environment in .venv, made once and again when pyproject.toml or
# constraints.txt change.  make PYTHON=python3.12 …  picks another interpreter; CPU-only torch wheels on Linux:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Test processes of what runs without Prefect: one more than cores, since tests wait for servers and for processes.
TESTERS ?= $(shell expr $(CORES) + 1)
CORES := $(shell $(PYTHON) -c 'import os; print(min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))')
FUZZ_CASES ?= 1000

.DEFAULT_GOAL := help
.PHONY: help install demo unit unit-lowest bare prefect test slow test-and-slow nightly clients benchmarks gpu mutants check docs chaos chaos-pipeline fuzz format clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## Make or renew the virtual environment

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("trainflow needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name a newer one: make PYTHON=python3.12 …" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made: install the venv module of $(PYTHON) (on Debian: apt install python3-venv)."; rm -rf $(VENV); exit 1; }
	@echo "Installing trainflow and its pinned dependencies into $(VENV) (once; a few minutes) …"
	@$(PIP) install -qq --constraint $(CONSTRAINTS) --editable ".[dev]"
	@touch $@

demo: install  ## Train, evaluate, predict and publish the digits example (the second time everything is cached)
	@$(BIN)/trainflow run examples/digits/pipeline.yaml train.launch.processes=$(CORES)

# A file stays on one worker: its imports and its fixtures are paid once.
PYTEST := $(BIN)/pytest --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 1
# Without compiled files each of the suite's processes compiles its modules again.
unit test slow test-and-slow nightly: export PYTHONDONTWRITEBYTECODE =
# In memory where 8 GB are free and files may be run: on a disk, flows wait for what databases and stores sync.
unit test slow test-and-slow nightly: export TMPDIR ?= $(shell grep ' /dev/shm ' /proc/mounts 2>/dev/null | grep -qv noexec && test $$(df -Pk /dev/shm | awk 'END {print $$4}') -gt 8000000 && echo /dev/shm || echo /tmp)
unit: install  ## Run the unit tests of every change (less than two minutes on two quiet cores)
	@$(PYTEST) -n $(CORES) -m "$(or $(MARKERS),not slow and not nightly)" tests/unit

unit-lowest:  ## Run the unit tests on the oldest versions that pyproject.toml allows, in .venv-lowest (Python 3.11 or 3.12)
	@$(MAKE) unit VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt MARKERS="not nightly"

# Two runs: what uses Prefect inside the test process leaves threads there, and forking DataLoader workers beside threads
# may hang. They go on at the same time: while one waits for servers and processes, the other one computes. Rooms with
# the longest files come first, so that no worker is left alone with one at the end.
BARE := tests/services tests/processes tests/distributed tests/resume tests/contracts tests/unit
PREFECT := tests/e2e tests/flows

# $(call run_both,MARKERS)
run_both = $(MAKE) --no-print-directory --keep-going --jobs 2 bare prefect MARKERS="$(1)"

bare:
	@$(PYTEST) -n $(TESTERS) -m "$(MARKERS)" $(BARE)

prefect:
	@shown=$$(mktemp); $(PYTEST) -n $(CORES) -m "$(MARKERS)" $(PREFECT) >$$shown 2>&1; ended=$$?; cat $$shown; rm $$shown; exit $$ended

test: install  ## Run the tests of every change (about four minutes on two quiet cores)
	@$(call run_both,not slow and not nightly)

slow: install  ## Run more: kills, several machines, servers, whole pipelines (some eight minutes; tests/slow.txt)
	@$(call run_both,slow)

test-and-slow: install  ## Run both, as CI does: every test file is imported and every server started once
	@$(call run_both,not nightly)

nightly: install  ## Run what CI leaves out: the longest tests, the lowest versions, client libraries, benchmarks (an hour)
	@failed=0; \
	$(call run_both,nightly) || failed=1; \
	$(MAKE) unit-lowest || failed=1; \
	$(MAKE) clients || failed=1; \
	$(MAKE) benchmarks || failed=1; \
	exit $$failed

mutants: install  ## Put 150 small faults into the product, one after the other: is each still noticed? (hours)
	$(BIN)/python -m tests.support.mutants run

# A Prefect home for each: its server ends when the home is gone.
benchmarks: install  ## Run every benchmark at its smallest size, which shows that it runs (about four minutes)
	@failed=0; \
	for file in benchmarks/[a-z]*.py; do \
		name=$$(basename $$file .py); home=$$(mktemp -d); echo "=== benchmark $$name"; \
		PREFECT_HOME=$$home/prefect $(BIN)/python -m benchmarks.$$name --size smallest || { echo "=== $$name failed"; failed=1; }; \
		rm -rf $$home; \
	done; \
	exit $$failed

# No virtual environment is made: the machine's own Python has the CUDA build of torch.
gpu:  ## Measure on one GPU what is claimed of GPUs (eight minutes; OUT=FOLDER gets a page)
	@$(PYTHON) -m benchmarks.gpu --seconds 480

# Libraries that subclass the Trainer, in a folder of their own. Without a network their tests are skipped.
clients: install  ## Install the client libraries and run their tests (about three minutes)
	@$(BIN)/python -m tests.support.clients
	@$(PYTEST) -n $(CORES) tests/clients

check: install  ## Lint, format check, types, architecture, budget
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.support.budget

docs: install  ## Build the documentation site strictly into build/site
	$(BIN)/python -m docs.site

COUNT ?= 500
SECONDS ?= 900
chaos: install  ## kill -9 a training COUNT times (at most SECONDS): resumed unaided, equal in the end?
	$(BIN)/python -m benchmarks.chaos --count $(COUNT) --seconds $(SECONDS)

# Stopped and started again, it goes on after the last case in the ledger.
N ?= 400
RECIPE ?= small
LEDGER ?= .trainflow/chaos-pipeline.jsonl
chaos-pipeline: SECONDS = 36000
chaos-pipeline: install  ## Faults from outside over whole pipelines, N cases (at most SECONDS): the same command ends right?
	$(BIN)/python -m benchmarks.chaos_pipeline --count $(N) --seconds $(SECONDS) --recipe $(RECIPE) --ledger $(LEDGER) \
		--keep $(basename $(LEDGER)).kept

fuzz: install  ## Feed every reader of checkpoint bytes with damaged and crafted input FUZZ_CASES times
	FUZZ_CASES=$(FUZZ_CASES) SEED=$(or $(SEED),0) $(BIN)/pytest -n0 -q tests/unit/checkpoint/test_checkpoint_damage.py -k no_reader

format: install  ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the virtual environment, caches and the demo's storage
	rm -rf $(VENV) .venv-lowest .trainflow build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
