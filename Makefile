# Each target sets up what it needs: a .venv beside this file, made once and reused while setup.py, constraints.txt
# and what is compiled stay as they are. `make PYTHON=python3.12 ...` chooses the Python it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/digits.yaml
READY := $(VENV)/.ready-$(shell cat setup.py constraints.txt vit_scale/kernels/*.c | cksum | cut -d' ' -f1)

.PHONY: help train test lint golden bench clean
.DEFAULT_GOAL := help

help:  ## list these commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "make %-7s %s\n", $$1, $$2}'

train: $(READY)  ## train a small ViT on embedded real images, under two minutes on two cores (RECIPE=... for another)
	@$(BIN)/python launch/train.py $(RECIPE) && $(BIN)/python launch/show_run.py $(RECIPE)

test: $(READY)  ## run all tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)  ## check style, formatting and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

golden: $(READY)  ## record the losses that tests/golden compares with again, after a deliberate change
	@$(BIN)/python tests/golden/record.py

bench: $(READY)  ## run the benchmarks against peers and write docs/benchmarks.md (DATA=, SMALL=: images of your own)
	@$(BIN)/python benchmarks/run_all.py $(if $(DATA),--data $(DATA)) $(if $(SMALL),--small $(SMALL))

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) build *.egg-info vit_scale/kernels/*.so .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY):
	@echo "Setting up $(VENV) (once; downloads several GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f vit_scale/kernels/*.so
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@
