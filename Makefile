# The same verbs for people, hooks and CI. `make` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check
READY  := $(VENV)/.ready
TOOLS  := $(VENV)/.tools
CLIENTS := .clients
# kimi-cli needs Python 3.13; its last release that works is 1.44 (later ones only point to its successor)
PYTHON313 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.13.*/bin/python) $(shell command -v python3.13))
OURS   := app chat engine model kernels cluster deployments autoscaling

.DEFAULT_GOAL := help
.PHONY: help setup serve demo-kill test clients test-gpu lint types size lock clean

help:  ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# What serving needs, at the locked versions; the tests' own tools (Triton alone is a gigabyte) come with the first `make test`.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, found " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c requirements.lock setuptools
	$(PIP) -c requirements.lock --no-build-isolation -e .
	touch $(READY)

$(TOOLS): $(READY)
	$(PIP) -r requirements.lock
	touch $(TOOLS)

setup: $(TOOLS)  ## virtual environment from the lock file

serve: $(READY)  ## serve on http://127.0.0.1:8000 (the embedded tiny K3; ARGS="model=DIR tp=2 ep=2 …")
	$(BIN)/k3 serve $(ARGS)

demo-kill: $(TOOLS)  ## a stream goes on while a shard, then the whole engine replica is killed
	$(BIN)/python -m examples.demo_kill

test: $(TOOLS)  ## everything that runs on a CPU
	$(BIN)/python -m pytest -q -m "not gpu"

clients:  ## kimi-cli and litellm, each in its own environment, for tests/clients; one that cannot be installed says why
	-$(PYTHON) -m venv $(CLIENTS)/litellm && $(CLIENTS)/litellm/bin/pip install --quiet --disable-pip-version-check litellm
	-$(PYTHON313) -m venv $(CLIENTS)/kimi-cli && $(CLIENTS)/kimi-cli/bin/pip install --quiet --disable-pip-version-check kimi-cli==1.44.0

test-gpu: $(TOOLS)  ## the kernels' and engine's GPU tests
	$(BIN)/python -m pytest -q -m gpu

lint: $(TOOLS)  ## ruff: style and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TOOLS)  ## mypy
	$(BIN)/mypy

size: $(READY)  ## lines per package against the budget
	@$(BIN)/python -m benchmarks.size $(OURS)

lock: $(TOOLS)  ## write requirements.lock from the environment
	$(BIN)/pip freeze --all --exclude pip --exclude-editable | sed -E 's/^(torch==[0-9.]+)\+.*/\1/' > requirements.lock

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis
