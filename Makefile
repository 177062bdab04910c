# `make demo` and `make test` need only Python >= 3.11 and make: they build their own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo parity test lint bench bench-peers clean

demo: .venv/ready
	rm -rf build/demo
	$(BIN)/flaxen demo --out build/demo

parity: .venv/ready
	$(BIN)/python examples/parity.py

test: .venv/ready
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python benchmarks/run.py all

bench-peers: .venv-peers/ready

clean:
	rm -rf .venv .venv-peers .pytest_cache .mypy_cache .ruff_cache

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv-peers/ready: benchmarks/peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --requirement benchmarks/peers.txt
	touch $@
