# Leyline. `make serve` to talk to it, `make test` to check it.
#
#   make serve ARGS="--port 8001"     any flag of `leyline serve`
#   make test  PYTHON=python3.12      any Python from 3.10 on

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -c constraints.txt

.PHONY: help serve test clients clean
.DEFAULT_GOAL := help

help:
	@echo "make serve   install into $(VENV) and serve the embedded model"
	@echo "make test    install into $(VENV) and run scripts/check"
	@echo "make clients try real clients against a server, and write docs/clients.md"
	@echo "make clean   remove $(VENV) and every cache of the tools"

serve: $(VENV)/.installed
	$(BIN)/leyline serve $(ARGS)

test: $(VENV)/.installed-dev
	VENV=$(VENV) scripts/check

clients: $(VENV)/.installed
	$(BIN)/python scripts/clients

# The stamps stand for what is installed: only a changed requirement makes pip run again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

# The development set holds the run-time set, so `make serve` after it has nothing to do.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .clients leyline.egg-info build .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find leyline tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
