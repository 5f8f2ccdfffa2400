# Two commands matter on a fresh machine: `make demo` and `make test`. Both make .venv first.
#
#   PYTHON=python3.12    the interpreter that makes .venv (3.11 to 3.13)
#   SYSTEM_TORCH=1       let .venv see the packages of PYTHON, and keep its torch if in range
#   TORCH_INDEX=URL      where pip finds torch, for example PyTorch's index of CPU builds
#   TESTS=tests/host     what `make test` and `make soak` run
#   MODEL=demo ARGS=...  what `make serve` and `make bench` run

PYTHON ?= python3
VENV ?= .venv
SYSTEM_TORCH ?= 0
TORCH_INDEX ?=
TESTS ?= tests
MODEL ?= demo
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# With another torch kept, the pin of torch gives way to the version that is there.
CONSTRAINTS := $(VENV)/constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' constraints-cpu.txt)

.PHONY: demo test soak lint bench serve install install-test clean distclean help
.DELETE_ON_ERROR:

demo: $(VENV)/.core  ## load the embedded model, score, generate, print the memory plan
	$(BIN)/seawall demo

test: $(VENV)/.test  ## the whole suite
	@VENV=$(VENV) scripts/test $(TESTS)

soak: $(VENV)/.test  ## the whole suite at full counts (long)
	@VENV=$(VENV) SEAWALL_SOAK=1 scripts/test $(TESTS)

lint: $(VENV)/.dev  ## format, ruff, mypy, layering and sizes
	@VENV=$(VENV) scripts/check

bench: $(VENV)/.core  ## offline throughput of MODEL
	$(BIN)/seawall bench offline --model-path $(MODEL) $(ARGS)

serve: $(VENV)/.server  ## HTTP server for MODEL on 127.0.0.1:30000
	$(BIN)/seawall serve $(MODEL) $(ARGS)

install: $(VENV)/.core  ## .venv with the package and what it needs to run

install-test: $(VENV)/.test  ## .venv with what the tests need too

clean:  ## remove builds and caches
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find seawall tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	rm -rf $(VENV)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# Each stamp is one finished step of the installation; it is redone when what it read changes.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v < (3, 14))' \
	  || { echo "$(PYTHON) is not Python 3.11 to 3.13; use make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(if $(filter 1,$(SYSTEM_TORCH)),--system-site-packages) $(VENV)
	@touch $@

# torch comes first and alone: it is large, and it is the only package with builds to choose from.
$(CONSTRAINTS): $(VENV)/.made constraints-cpu.txt scripts/torch_version.py
	@$(BIN)/python scripts/torch_version.py \
	  || $(if $(TORCH_INDEX),PIP_INDEX_URL=$(TORCH_INDEX)) $(PIP) install torch==$(TORCH)
	@sed '/^torch==/d' constraints-cpu.txt > $@
	@echo "torch==$$($(BIN)/python scripts/torch_version.py)" >> $@

$(VENV)/.core: $(CONSTRAINTS) pyproject.toml
	$(PIP) install -q -c $(CONSTRAINTS) -e .
	@touch $@

# One installation of a wider extra is one of the narrower ones too.
$(VENV)/.test: $(CONSTRAINTS) pyproject.toml
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[test]'
	@touch $(VENV)/.core $@

$(VENV)/.dev: $(CONSTRAINTS) pyproject.toml
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[dev]'
	@touch $(VENV)/.core $(VENV)/.test $@

$(VENV)/.server: $(CONSTRAINTS) pyproject.toml
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[server]'
	@touch $(VENV)/.core $@
