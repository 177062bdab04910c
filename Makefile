# `make demo` and `make test` need only Python >= 3.11 and make: they create their own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

# Tests that take seconds. Run `make check` while editing and `make test` before a commit.
FAST := data metrics hf/test_files.py hf/test_t5.py nn/test_layers.py nn/test_loss.py generate/test_options.py \
	generate/test_batches.py generate/test_processors.py tasks/test_denoise.py tasks/test_language.py tasks/test_sheet.py \
	train/test_checkpoint.py train/test_run.py train/test_tracking.py cli/test_recipe.py cli/test_vocab.py \
	cli/test_bench.py test_imports.py test_recipes.py test_tree.py test_malloc.py

.PHONY: demo parity test check lint bench bench-peers clean

demo: .venv/ready
	rm -rf build/demo
	$(BIN)/flaxen demo --out build/demo

parity: .venv/ready
	$(BIN)/python examples/parity.py

test: .venv/ready
	$(BIN)/python -m pytest

check: lint
	$(BIN)/python -m pytest $(addprefix tests/,$(FAST))

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
