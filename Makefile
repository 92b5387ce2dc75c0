# Every target sets up what it needs in $(VENV); a bare machine needs only make and Python 3.10-3.14.
VENV ?= .venv
# The first interpreter that runs, is of a version that ExecuTorch has wheels for, and can make a venv.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10 \
	/usr/bin/python3; do "$$p" -c 'import sys, venv, ensurepip; \
	sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1 && echo "$$p" && break; done)
# Each worker imports torch, and some tests hold a model: a few workers, whatever the machine.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist worksteal

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt
STAMPS := $(VENV)/.stamps

.PHONY: help demo test test-slow bench lint types layers docs docs-serve check clean

help:
	@echo "make demo       export a real model through a store, run it, show what it cost"
	@echo "make test       all tests but the slow ones"
	@echo "make test-slow  the tests that take minutes or gigabytes"
	@echo "make bench      memory and throughput against stock ExecuTorch and cp"
	@echo "make lint types layers docs    ruff, mypy, import contracts, the documentation"
	@echo "make check      everything that CI runs, but the slow tests"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) PYTEST_ARGS=$(PYTEST_ARGS)"

demo: $(STAMPS)/demo
	$(BIN)/python examples/minilm.py

test: $(STAMPS)/dev
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMPS)/dev
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS) || test $$? -eq 5  # 5: none is marked slow

bench: $(STAMPS)/dev
	$(BIN)/python bench/throughput.py
	$(BIN)/python bench/memory.py

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMPS)/dev
	$(BIN)/mypy

layers: $(STAMPS)/dev
	$(BIN)/lint-imports

docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(STAMPS)/docs
	$(BIN)/mkdocs serve

check: lint types layers docs test

clean:
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "no Python 3.10-3.14 with venv found; say make PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: $(STAMPS)/venv pyproject.toml constraints.txt
	$(INSTALL) -e ".[demo]"
	@touch $@

# What the tests, ruff, mypy and the import contracts need.
$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml constraints.txt
	$(INSTALL) -e ".[demo,dev]"
	@touch $@

$(STAMPS)/docs: $(STAMPS)/venv pyproject.toml constraints.txt
	$(INSTALL) -e ".[docs]"
	@touch $@
