# make help lists the targets. Everything runs in .venv, which the first target creates.
VENV := .venv
PYTHON ?= python3.11
ARGS ?=
BIN := $(VENV)/bin
# One OpenMP thread per process: with more, the processes of a mesh fight over the cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup quickstart smollm2 test lint lock build clean

help: ## Show this list
	@sed -n 's/^\([a-z0-9]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## Create .venv and install the pinned requirements into it

$(VENV)/.ready: requirements/cpu.lock requirements/install.sh pyproject.toml
	@PYTHON=$(PYTHON) VENV=$(VENV) bash requirements/install.sh
	@touch $@

quickstart: setup ## PPO on a small task, from nothing to a Hugging Face folder (ARGS=... for options)
	@$(BIN)/python -m examples.quickstart $(ARGS)

smollm2: setup ## PPO on SmolLM2-135M-Instruct (ARGS=... for options)
	@$(BIN)/python -m examples.smollm2 $(ARGS)

test: setup ## Run the tests, without those marked slow or gpu (ARGS=... for pytest)
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

lint: setup ## ruff check, ruff format --check, mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

lock: setup ## Resolve requirements/cpu.in into requirements/cpu.lock
	@$(BIN)/python requirements/lock.py

build: setup ## Build the wheel into dist/
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean: ## Remove build outputs and caches (not .venv, not runs/)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
