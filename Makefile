.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real dev down lint format types test chromium
AGENTRL := .venv/bin/agentrl
ARGS ?=
SHARE := -n auto --maxprocesses 4 --dist loadfile

help:  ## Show what there is to run
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup:  ## Build both Python environments (nothing to do the second time)
	@scripts/setup.sh

demo: setup  ## Teach a tiny model addition: SFT, then GRPO through SGLang (ARGS=--exit stops at the end)
	@$(AGENTRL) demo $(ARGS)

demo-real: setup  ## GRPO on a real chat model; MODEL=folder and TASKS=file to use your own
	@$(AGENTRL) demo --real $(if $(MODEL),--model "$(MODEL)") $(if $(TASKS),--tasks "$(TASKS)") $(ARGS)

dev: setup  ## Start the stores and the Dagster web UI; Ctrl-C stops them
	@$(AGENTRL) dev $(ARGS)

down: setup  ## Stop the embedded stores
	@$(AGENTRL) down

format: setup  ## Rewrite the sources in the house's format
	@.venv/bin/ruff format . && .venv/bin/ruff check --fix .

lint: setup types  ## Lint, format and types
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

types: setup  ## Type check
	@.venv/bin/mypy

# One process a room: the database client of a long-lived server belongs to one event loop. The first two rooms
# are shared out over the cores, each worker with stores of its own.
test: chromium setup lint  ## Lint, types and every test
	@set -e; for room in "unit $(SHARE)" "integration $(SHARE)" sglang browser demo; do \
	  echo "== tests/$$room"; OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q tests/$$room $(ARGS); done

# Root on Debian and Ubuntu gets it installed; anyone else is told how.
chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q chromium; } || { \
	  echo "error: the browser tests need chromium" >&2; echo "mend: sudo apt-get install chromium" >&2; exit 1; }
