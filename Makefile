# lmpool: every command that a developer or a newcomer needs. `make` lists them.
#
#   PYTHON=python3.12   the interpreter that .venv is made of (3.11 or newer)
#   ARGS="-k flight"    more arguments for pytest, the demo or the benchmarks

PYTHON ?= python3
TORCH  := torch==2.13.0
EXTRAS := embedded,hf,dev
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test check format format-check lint types unit chaos test-genlm bench \
        clean distclean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## Make the environment in .venv, or bring it up to date

demo: $(STAMP) ## See lmpool work: a private server, two workers and a small model
	@$(BIN)/lmpool demo $(ARGS)

test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest -m "not chaos and not genlm" $(ARGS)

check: format-check lint types unit ## Format, lint, types and the fast tests, in seconds

format: $(STAMP) ## Format the code and fix what the linter can fix
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

format-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

# mypy knows folders, not setuptools' package-dir, so it reads a copy that is laid out by import
# name; the last step turns what it prints back into this checkout's paths.
types: $(STAMP)
	@rm -rf build/types && mkdir -p build/types
	@cp -Rp lmpool build/types/lmpool
	@cp -Rp producer worker backends build/types/lmpool/
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml \
	    --cache-dir ../../.mypy_cache -p lmpool >mypy.txt; \
	status=$$?; sed -E 's#^lmpool/(producer|worker|backends)/#\1/#' mypy.txt; exit $$status

unit: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow and not server and not engine" tests/unit $(ARGS)

chaos: $(STAMP) ## Run the long fault-injection tests
	$(BIN)/python -m pytest -m chaos $(ARGS)

bench: $(STAMP) ## Measure, and write tests/benchmarks/results
	$(BIN)/python -m tests.benchmarks $(ARGS)

# The stamp is newer than pyproject.toml once everything that it asks for is installed. torch comes
# first and alone, so that pip takes the build that this machine's configuration provides.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	    echo "There is no $(PYTHON) here. Name a Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("lmpool needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name another: make $(MAKECMDGOALS) PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Setting up $(VENV), which takes a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  $(TORCH)"
	@$(PIP) install $(TORCH)
	@echo "  lmpool[$(EXTRAS)]"
	@$(PIP) install --editable '.[$(EXTRAS)]'
	@touch $@

clean: ## Remove what was built and every cache
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lmpool producer worker backends tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## The same, and the environments
	rm -rf .venv .venv-*
