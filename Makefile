# make demo | test | test-vllm | bench | lock      Each installs what it needs into .venv, with uv if it is there.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$p && break; done)
UV := $(shell command -v uv 2>/dev/null)
BIN := .venv/bin

.PHONY: demo test lint test-vllm bench lock clean

demo: .venv/.runtime
	@$(BIN)/kvlane demo

test: .venv/.dev lint
	$(BIN)/pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-vllm: .venv/.dev
	$(BIN)/python tests/vllm/run.py

bench: .venv/.dev
	@for b in schedule index refresh micro; do $(BIN)/python bench/$$b.py || exit 1; done

# The lock files name versions and hashes for every supported Python; this target needs uv.
lock:
	uv pip compile pyproject.toml --universal --generate-hashes --no-header --no-annotate -q -o requirements.lock
	uv pip compile pyproject.toml --group dev --universal --generate-hashes --no-header --no-annotate -q -o requirements-dev.lock

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/.python:
	@test -n "$(PYTHON)" || { echo "kvlane needs Python 3.11 to 3.14 on the PATH, or PYTHON=/path/to/python"; exit 1; }
ifdef UV
	uv venv -q --python $(PYTHON) .venv
else
	$(PYTHON) -m venv .venv
endif
	@touch $@

.venv/.runtime: .venv/.python pyproject.toml requirements.lock
	$(call install,requirements.lock)
	@touch $@

.venv/.dev: .venv/.python pyproject.toml requirements-dev.lock
	$(call install,requirements-dev.lock)
	@touch $@ .venv/.runtime

ifdef UV
define install
	uv pip install -q --python $(BIN)/python -r $(1)
	uv pip install -q --python $(BIN)/python --no-deps -e .
endef
else
define install
	$(BIN)/python -m pip install -q --disable-pip-version-check -r $(1)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
endef
endif
