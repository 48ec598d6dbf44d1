# Works in a fresh clone on Linux with git, make and Python 3.11 or newer. Outside the clone only two caches
# are written: pip's, and the models' (`outrider models list` says where).
#   make serve ARGS="--port 9000"        make test ARGS="-k rollback"        make PYTHON=python3.12 serve

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test lint format types clean

help:
	@echo 'make serve    install what is needed, fetch the default model, serve on 127.0.0.1:8800'
	@echo 'make test     install what is needed, then lint, types and all tests'
	@echo 'make lint     ruff: rules and format          make format   put both right'
	@echo 'make types    mypy, strict'
	@echo 'make clean    remove the environment and everything built (models stay)'

serve: $(VENV)/serve.stamp
	@exec $(BIN)/outrider serve $(ARGS)

test: $(VENV)/test.stamp lint types
	@$(BIN)/outrider models pull
	$(BIN)/pytest $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy runs no import hooks: it sees the root as `outrider` through a symlink.
types: $(VENV)/test.stamp
	@mkdir -p build/ns && ln -sfn ../.. build/ns/outrider
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build kernels/cpu/_native.*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A broken or missing interpreter (an upgraded system Python) makes a new environment, without stamps.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "Making $(VENV) with $$($$python --version)."; exec $$python -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo 'Outrider needs Python 3.11 or newer with its venv module: install it (Debian, Ubuntu: apt install' \
	     'python3 python3-venv) or name one: make PYTHON=/path/to/python3.12 serve' >&2; exit 1

# Installing builds the native kernels too; where that fails it succeeds without them, and `outrider serve` tells.
INSTALLED := pyproject.toml setup.py constraints.txt $(wildcard kernels/cpu/native/*.cpp kernels/cpu/native/*.h)

$(VENV)/serve.stamp: $(INSTALLED) | $(BIN)/python
	@echo 'Installing the pinned dependencies into $(VENV); the first time takes a few minutes.'
	@$(INSTALL) setuptools pybind11
	@$(INSTALL) --editable .
	@touch $@

# It has all that serving needs: nothing is built twice.
$(VENV)/test.stamp: $(INSTALLED) clients/python/pyproject.toml | $(BIN)/python
	@echo "Installing the pinned dependencies and the tests' into $(VENV); the first time takes a few minutes."
	@$(INSTALL) setuptools pybind11
	@$(INSTALL) --editable '.[test]' --editable clients/python
	@touch $(VENV)/serve.stamp $@
