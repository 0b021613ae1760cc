# The commands of the README. `make demo` and `make test` set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[media]'
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet -c requirements.lock -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m glmflash.demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/reference.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
