# lmpool: every command that a developer or a newcomer needs. `make` lists them.
#
#   PYTHON=python3.12   the interpreter that .venv is made of (3.11 or newer)
#   ARGS="-k flight"    more arguments for pytest, the demo or the measurements

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.installed
GENLM_TESTS := tests/engines/test_genlm.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-server test-genlm chaos check format format-check lint types \
        unit bench clean distclean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

install: $(READY) ## Make the environment in .venv, or bring it up to date
	@echo "lmpool is installed in .venv. See it work: make demo"

demo: $(READY) ## See lmpool work: a private server, two workers and a small model
	@$(BIN)/lmpool demo $(ARGS)

test: $(READY) ## The tests
	$(BIN)/python -m pytest -m "not chaos and not genlm" $(ARGS)

test-server: $(READY) ## The tests of a server again, on LMPOOL_TEST_SERVER=/usr/bin/redis-server
	$(BIN)/python -m pytest -m "server and not chaos and not genlm" $(ARGS)

test-genlm: .venv-genlm/.installed ## The tests with the real genlm libraries, in .venv-genlm
	@test -f $(GENLM_TESTS) || { echo "$(GENLM_TESTS) is missing: nothing to run" >&2; exit 1; }
	.venv-genlm/bin/python -m pytest -m genlm $(GENLM_TESTS) $(ARGS)

chaos: $(READY) ## The long fault-injection tests
	$(BIN)/python -m pytest -m chaos $(ARGS)

check: format-check lint types unit ## Format, lint, types and the fast tests, in seconds

format: $(READY) ## Format the code, and mend what the linter can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

format-check: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY)
	$(BIN)/ruff check .

# mypy knows folders, not setuptools' package-dir, so it reads a copy laid out by import name; what
# it prints then names this checkout's files again.
types: $(READY)
	@rm -rf build/types && mkdir -p build/types
	@cp -Rp lmpool build/types/lmpool && cp -Rp producer worker backends build/types/lmpool/
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml \
	    --cache-dir ../../.mypy_cache -p lmpool >report; status=$$?; \
	sed -E 's#^lmpool/(producer|worker|backends)/#\1/#' report; exit $$status

unit: $(READY)
	$(BIN)/python -m pytest -q -m "not slow and not server and not engine" tests/unit $(ARGS)

bench: $(READY) ## The measurements
	$(BIN)/python -m tests.benchmarks $(ARGS)

# An environment's stamp is newer than pyproject.toml once all that it asks for is installed. torch
# comes first and alone, so that pip takes the build which this machine's configuration provides.
.venv/.installed: WHAT = '.[embedded,hf,dev]'
.venv-genlm/.installed: WHAT = '.[embedded,hf,genlm,dev]' genlm-backend==0.3.1 genlm-control==0.4.1
%/.installed: pyproject.toml
	@$*/bin/python -m pip --version >/dev/null 2>&1 || { \
	    command -v $(PYTHON) >/dev/null || { \
	        echo "There is no $(PYTHON). Name a Python 3.11 or newer: make install PYTHON=python3.12" >&2; \
	        exit 1; }; \
	    $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("lmpool needs Python 3.11 or newer; $(PYTHON) is %d.%d. Name another: make install PYTHON=python3.12" % sys.version_info[:2])' && \
	    echo "Making $*, which takes a few minutes the first time" && \
	    $(PYTHON) -m venv $*; }
	@echo '  torch==2.13.0'
	@$*/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@echo ' ' $(WHAT)
	@PYTHONWARNINGS=ignore $*/bin/python -m pip install --quiet --disable-pip-version-check \
	    --editable $(WHAT)
	@touch $@

clean: ## Remove what was built and every cache
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lmpool producer worker backends tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## The same, and the environments
	rm -rf .venv .venv-genlm
