# Everything runs in a virtual environment of its own; python3 >= 3.10 and make are all you need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow lint bench clean

demo: $(INSTALLED)  ## evaluate DPKL on the features shipped with the repository
	$(BIN)/python scripts/eval_episodes.py --head nn --head dpkl

test: $(INSTALLED) lint  ## the whole test suite, a few minutes on two cores
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)  ## reproductions that take longer (needs FEWSHOT_DPKL_DATA)
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## how fast, as ratios measured in one run
	$(BIN)/python benchmarks/bench_heads.py

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
