PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint bench clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/fmwc demo

test: install lint
	$(BIN)/pytest -n 2

lint: install
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/fmwc bench --out runs/bench

clean:
	rm -rf .venv demo runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
