# `make train` and `make test` need nothing but Python 3.11+; both make .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/quickstart.toml

.PHONY: help train test test-slow oracle lint clean
help: ## this text
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

# pip's resolver keeps to constraints.txt, the one pin file. Stamps make later runs start at once.
$(VENV)/.train: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11+ needed, this is {sys.version.split()[0]}; make PYTHON=python3.11"'
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[report,envs]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

train: $(VENV)/.train ## make the tiny policy, train it with GRPO + R3, write a report
	$(BIN)/onepolicy make-policy
	$(BIN)/onepolicy train $(RECIPE)

test: $(VENV)/.dev ## lint, types, fast tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow and not gpu and not oracle"

test-slow: $(VENV)/.dev ## the long ones: kills and resumes, several seeds
	$(BIN)/pytest -m slow --timeout 7200

# verl, TRL and OpenRLHF pin what clashes with ours, so they live in a venv of their own (1.6 GB), without their pins.
.venv-oracle/.ready: tests/oracle/requirements.txt tests/oracle/requirements-no-deps.txt
	test -d .venv-oracle || $(PYTHON) -m venv .venv-oracle
	.venv-oracle/bin/pip install -q -r tests/oracle/requirements.txt
	.venv-oracle/bin/pip install -q --no-deps -r tests/oracle/requirements-no-deps.txt
	touch $@

oracle: $(VENV)/.dev .venv-oracle/.ready ## our corrections and objectives beside verl's, TRL's and OpenRLHF's own code
	$(BIN)/pytest -m oracle

clean: ## remove the venv and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
