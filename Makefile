# Two commands set everything up on a machine that has only Python 3.11, pip and make:
#   make train   runs the main job on the embedded corpus
#   make test    passes the checks and tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test lint format clean

train: $(STAMP)
	$(BIN)/python -m train.main --config=configs/default.py

test: $(STAMP) lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[train]' --group dev
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs
