# make demo   fit the embedded digits on the CPU
# make test   run the whole test suite
# make cover  the same with the lines that no test reaches, in half as much time again
# make check  lint, format and type check
# make soak   the long tests: 200 fits and 50 resumes in one process, 100,000 damaged files for every reader (about 1 h)
# Everything is installed into .venv; the versions are those of constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test cover check soak clean

demo: .venv/demo
	$(BIN)/semclust fit digits -k 10 --device cpu

test: .venv/dev
	$(BIN)/python -m pytest

cover: .venv/dev
	$(BIN)/python -m pytest --cov --cov-report=term

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/fuzz.py

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "semclust needs Python 3.10 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Say: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/demo: .venv/made pyproject.toml constraints.txt
	@echo "installing semclust into .venv (PyTorch is large: this can take some minutes)"
	$(INSTALL) -e .
	@touch $@

.venv/dev: .venv/made pyproject.toml constraints.txt
	@echo "installing semclust and its development tools into .venv (PyTorch is large: this can take some minutes)"
	$(INSTALL) -e ".[dev]"
	@touch $@ .venv/demo

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
