# lmpool: every command that a developer or a newcomer needs. `make` lists them.
#
#   PYTHON=python3.12   the interpreter that .venv is made of (3.11 or newer)
#   ARGS="-k flight"    more arguments for pytest, the demo, the families or the measurements
#   SOAK_SECONDS=600    how long each test of `make soak` goes on (3600)
#   WORKERS=0           how many processes run the tests (4, as they wait a lot; 0: this one alone)

PYTHON  ?= python3
WORKERS ?= 4
BIN     := .venv/bin
READY   := .venv/.installed

TORCH        := torch==2.13.0
# A process that crashes ends the run: pytest-xdist may wait forever for one that it replaces.
TOGETHER     := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# What is never imported need not be compiled: half of an installation's time.
INSTALL      := bin/python -m pip install --quiet --disable-pip-version-check --no-compile
REQUIREMENTS := tests/engines/requirements
OTHERS       := $(patsubst $(REQUIREMENTS)/%.txt,%,$(wildcard $(REQUIREMENTS)/*.txt))
ELSEWHERE    := not chaos and not genlm and not types and not bench and not mutants
# What `make bench ARGS=gpu` needs where nothing is reached, for the Python of that machine.
GPU_WHEELS   := build/gpu-wheels
GPU_PYTHON   ?= 3.12
# With those wheels the GPU is measured by the torch that $(PYTHON) has.
BENCH        := $(if $(and $(filter gpu,$(ARGS)),$(wildcard $(GPU_WHEELS)/*.whl)),.venv-gpu,.venv)
IGNORE       := $(foreach name,$(OTHERS),--ignore-glob='*/engines/test_$(name).py' --ignore-glob='*/engines/test_$(name)_*.py')

# The tests start hundreds of processes, which would each compile all that they import.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-server test-cluster chaos soak mutants families check format format-check lint \
        types unit docs bench bench-check gpu-wheels clean distclean

help: ## This list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

install: $(READY) ## Make the environment in .venv, or bring it up to date
	@echo "lmpool is installed in .venv. See it work: make demo"

demo: $(READY) ## See lmpool work: a private server, two workers and a small model
	@$(BIN)/lmpool demo $(ARGS)

test: $(READY) ## The tests
	$(BIN)/python -m pytest $(TOGETHER) -m "$(ELSEWHERE)" $(IGNORE) $(ARGS)

test-server: $(READY) ## The tests of a server again, on LMPOOL_TEST_SERVER=/usr/bin/redis-server
	$(BIN)/python -m pytest $(TOGETHER) -m "server and not one_server and $(ELSEWHERE)" $(IGNORE) $(ARGS)

test-cluster: $(READY) ## The tests of a shared server again, on a cluster of three primaries and replicas
	LMPOOL_TEST_CLUSTER=1 $(BIN)/python -m pytest $(TOGETHER) -m "cluster and not one_server and $(ELSEWHERE)" tests/integration $(ARGS)

# An engine, or a library to be compatible with, whose packages would not live beside those of
# .venv: its test modules are tests/engines/test_NAME.py and test_NAME_*.py, what it needs
# tests/engines/requirements/NAME.txt (and no-deps/NAME.txt, for packages that ask for more than the
# tests use).
test-%: .venv-%/.installed ## One engine's tests in an environment of its own: make test-genlm
	@test -f tests/engines/test_$*.py || { \
	    echo "tests/engines/test_$*.py is missing: there is nothing to run" >&2; exit 1; }
	.venv-$*/bin/python -m pytest -m "not chaos" $(wildcard tests/engines/test_$*.py tests/engines/test_$*_*.py) $(ARGS)

chaos: $(READY) ## The long fault-injection tests
	$(BIN)/python -m pytest -m chaos $(ARGS)

families: $(READY) ## Every family of transformers on the hf engine, and docs/models.md of it
	$(BIN)/python -m tests.families $(ARGS)

mutants: $(READY) ## That the contract of engines finds out every engine that is broken on purpose
	$(BIN)/python -m pytest --numprocesses 2 tests/engines/test_contract_mutants.py $(ARGS)

SOAK_SECONDS ?= 3600
SOAK = -m pytest --engine-seed random --engine-seconds $(SOAK_SECONDS) --answers 10000 -x

soak: $(READY) ## The contract of engines with random seeds: mock, fed and hf, an hour for each part
	$(BIN)/python $(SOAK) tests/engines/test_exact_answers.py tests/engines/test_contract.py $(ARGS)

# make soak-mlx ARGS="-k rows" SOAK_SECONDS=600
soak-%: .venv-%/.installed
	.venv-$*/bin/python $(SOAK) $(wildcard tests/engines/test_$*_answers.py) tests/engines/test_$*_contract.py $(ARGS)

check: format-check lint types unit ## Format, lint, types and the fast tests, in seconds

format: $(READY) ## Format the code, and mend what the linter can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

format-check: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY) ## Both type checkers, mypy and pyright, and the tests of what they find
	$(BIN)/mypy -p lmpool
	PYRIGHT_PYTHON_CACHE_DIR=.mypy_cache PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(BIN)/python -m pytest -q -m types tests/typing tests/unit/test_new_want.py

unit: $(READY)
	$(BIN)/python -m pytest -q -m "not slow and not server and not engine and not types" tests/unit $(ARGS)

docs: $(READY) ## The documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)

bench: $(BENCH)/.installed ## The measurements
	$(BENCH)/bin/python -m tests.benchmarks $(ARGS)

gpu-wheels: $(READY) ## What bench ARGS=gpu needs on a machine that reaches nothing, in build/gpu-wheels
	$(BIN)/python -m tests.benchmarks.gpu_wheels $(GPU_WHEELS) --python $(GPU_PYTHON)

# Beside the packages of $(PYTHON), which may be those of an environment of its own: torch with CUDA,
# transformers, vLLM. pip comes from there, too.
.venv-gpu/.installed: pyproject.toml $(wildcard $(GPU_WHEELS)/*.whl)
	rm -rf .venv-gpu
	$(PYTHON) -m venv --system-site-packages --without-pip .venv-gpu
	$(PYTHON) -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	    >"$$(.venv-gpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	PYTHONWARNINGS=ignore $(PYTHON) -m pip --python .venv-gpu/bin/python install --quiet \
	    --disable-pip-version-check --no-index --find-links $(GPU_WHEELS) --editable '.[embedded]' psutil
	@touch $@

# An environment's stamp is newer than what asks for its packages once they are all installed. torch
# comes first and alone, so that pip takes the build which this machine's configuration provides.
.venv/.installed: pyproject.toml
	$(call make_environment,.venv)
	@echo "  lmpool[embedded,hf,pages,dev]"
	@PYTHONWARNINGS=ignore .venv/$(INSTALL) --editable '.[embedded,hf,pages,dev]'
	@touch $@

.PRECIOUS: .venv-%/.installed
.venv-%/.installed: pyproject.toml $(REQUIREMENTS)/%.txt $(wildcard $(REQUIREMENTS)/no-deps/*.txt)
	$(call make_environment,.venv-$*)
	@echo "  $(REQUIREMENTS)/$*.txt"
	@for file in $(wildcard $(REQUIREMENTS)/no-deps/$*.txt); do \
	    .venv-$*/$(INSTALL) --no-deps --requirement $$file || exit 1; done
	@PYTHONWARNINGS=ignore .venv-$*/$(INSTALL) --no-warn-conflicts --requirement $(REQUIREMENTS)/$*.txt
	@touch $@

define make_environment
@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { \
    command -v $(PYTHON) >/dev/null || { \
        echo "There is no $(PYTHON). Name a Python 3.11 or newer: make install PYTHON=python3.12" >&2; \
        exit 1; }; \
    $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("lmpool needs Python 3.11 or newer; $(PYTHON) is %d.%d. Name another: make install PYTHON=python3.12" % sys.version_info[:2])' && \
    echo "Making $(1), which takes a few minutes the first time" && \
    $(PYTHON) -m venv $(1); }
@echo "  $(TORCH)"
@$(1)/$(INSTALL) $(TORCH)
endef

bench-%: .venv-%/.installed ## An engine's measurements: make bench-vllm ARGS="vllm_scores --save"
	.venv-$*/bin/python -m tests.benchmarks $(or $(ARGS),$*)

bench-check: $(READY) ## That each measurement runs, in small, and finds its rows right
	$(BIN)/python -m pytest -q -m bench tests/unit/test_benchmarks.py $(ARGS)

clean: ## Remove what was built and every cache
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lmpool producer worker backends tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## The same, and the environments
	rm -rf .venv .venv-*
