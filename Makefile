PYTHON ?= python3
BIN := .venv/bin

INTEROP := .venv-interop/bin

.PHONY: install demo test test-browser fuzz test-interop interop lint reproduce study evaluate bench report documents docs docs-links notebooks zoo wheel clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt requirements-tables.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pins in constraints.txt need Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps -r requirements-tables.txt
	touch $@

demo: install
	$(BIN)/fmwc demo --force

# All tests but those of networks of other libraries (make test-interop). Three processes, because many tests wait for others.
test: install lint docs
	$(BIN)/pytest -n 3 --ignore tests/interop

# The studio in a real browser. Part of `make test` where a Chromium is found; here, one that is missing is an error.
test-browser: export FMWC_BROWSER = 1
test-browser: install
	$(BIN)/pytest tests/studio/test_browser.py

# Give randomly changed files and options to every reader. For other cases: make fuzz FMWC_FUZZ_SEED=1
fuzz: export FMWC_FUZZ_CASES ?= 10000
fuzz: install
	$(BIN)/pytest tests/fuzz

# Build the wheel, and install and test it in a new environment of the Python that FMWC_WHEEL names.
wheel: export FMWC_WHEEL ?= $(PYTHON)
wheel: install
	$(BIN)/pytest tests/test_wheel.py

# A separate environment for the tests with networks of other libraries.
.venv-interop/installed: pyproject.toml constraints.txt requirements-interop.txt
	$(PYTHON) -m venv .venv-interop
	$(INTEROP)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[interop]' pytest hypothesis
	$(INTEROP)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps -r requirements-interop.txt
	touch $@

test-interop: .venv-interop/installed
	$(INTEROP)/pytest tests/interop tests/test_documents.py -k "interop or python_block"

interop: .venv-interop/installed
	$(INTEROP)/python benchmarks/foreign_networks.py

lint: install
	$(BIN)/ruff check src experiments tests benchmarks examples docs
	$(BIN)/ruff format --check src experiments tests benchmarks examples docs
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

# Experiments of the paper. EXPERIMENT is checkerboard, mnist or crystals; OPTIONS=… passes more options.
EXPERIMENT ?= checkerboard

reproduce: install
	$(BIN)/python -m experiments reproduce $(EXPERIMENT) --out runs/$(EXPERIMENT) $(OPTIONS)

study: install
	$(BIN)/python -m experiments study $(EXPERIMENT) --out runs/uses-$(EXPERIMENT) $(OPTIONS)

evaluate: install
	$(BIN)/python -m experiments evaluate $(EXPERIMENT) $(OPTIONS)

bench: install
	$(BIN)/python -m experiments bench --out runs/bench $(OPTIONS)

report: install
	$(BIN)/python -m experiments report runs/$(EXPERIMENT)

# Update the tables in docs/ and results/ from the committed numbers.
documents: install
	$(BIN)/python -m experiments.documents

# Execute the notebooks of the documentation and store their outputs. NOTEBOOK=doubt executes one of them.
notebooks: export OMP_NUM_THREADS = 1
notebooks: install
	$(BIN)/python -m experiments.notebooks $(NOTEBOOK)

# The documentation, in docs/_build/html. Warnings are errors; nothing is fetched.
docs: install
	rm -rf docs/_build/html
	$(BIN)/sphinx-build -q -W --keep-going -j auto docs docs/_build/html

# Check the external links of the documentation. Needs a network.
docs-links: install
	$(BIN)/sphinx-build -q -b linkcheck docs docs/_build/links

# Evaluate the scores on small flows with failure rules.
zoo: export OMP_NUM_THREADS = 1
zoo: install
	$(BIN)/python -m benchmarks.zoo --out runs/zoo --jobs 2

clean:
	rm -rf .venv .venv-interop demo runs docs/_build docs/_results docs/reference/modules .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
