# Each target sets up the environment it needs: a .venv next to this file, created once and reused until setup.py,
# constraints.txt or the compiled sources change. `make PYTHON=python3.12 ...` selects the Python version.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/digits.yaml
READY := $(VENV)/.ready-$(shell cat setup.py constraints.txt vit_scale/kernels/*.[ch] | cksum | cut -d' ' -f1)

.PHONY: help train doctor test lint golden bench clean
.DEFAULT_GOAL := help

help:  ## list available commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "make %-7s %s\n", $$1, $$2}'

train: $(READY)  ## train a small ViT on embedded real images, under two minutes on two cores (RECIPE=... to use another recipe)
	@$(BIN)/python launch/train.py $(RECIPE) && $(BIN)/python launch/show_run.py $(RECIPE)

doctor: $(READY)  ## check whether training can be trusted on this machine, in about two minutes
	@$(BIN)/python launch/doctor.py

test: $(READY)  ## run all tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)  ## check style, formatting and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

golden: $(READY)  ## regenerate the reference losses for tests/golden after a deliberate change
	@$(BIN)/python tests/golden/record.py

bench: $(READY)  ## run the benchmarks against the baselines and write docs/benchmarks.md (DATA=, SMALL=: your own images)
	@$(BIN)/python benchmarks/run_all.py $(if $(DATA),--data $(DATA)) $(if $(SMALL),--small $(SMALL))

clean:  ## remove the environment and caches; keep runs/
	rm -rf $(VENV) build *.egg-info vit_scale/kernels/*.so .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY):
	@echo "Setting up $(VENV) (once; downloads several GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f vit_scale/kernels/*.so
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@
