# Everything runs in a virtual environment of its own; python3 >= 3.10 and make are all you need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow lint docs picture bench clean

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

docs: $(INSTALLED)  ## the documentation site, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

picture: $(INSTALLED)  ## the picture of the start page: the report of four heads (needs chromium)
	$(BIN)/fewshot-dpkl eval --head nn --head logreg --head dpkl --head dpkl-calibrated --report site/report.html
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,690 \
	  --screenshot=docs/results/report.png file://$(CURDIR)/site/report.html

bench: $(INSTALLED)  ## how fast, as ratios measured in one run
	$(BIN)/python benchmarks/bench_heads.py

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test,docs]'
	touch $@

clean:
	rm -rf $(VENV) site dist .pytest_cache .mypy_cache .ruff_cache
