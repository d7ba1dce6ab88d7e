PYTHON ?= python3
BIN := .venv/bin

INTEROP := .venv-interop/bin

.PHONY: install demo test fuzz test-interop interop lint reproduce study evaluate bench report documents zoo clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/fmwc demo

test: install lint
	$(BIN)/pytest -n 2

# The readers, given files and options that were changed at random. Another seed: make fuzz FMWC_FUZZ_SEED=1
fuzz: export FMWC_FUZZ_CASES ?= 10000
fuzz: install
	$(BIN)/pytest tests/fuzz

# Other libraries' networks, in an environment of their own: nothing else needs them.
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
	$(BIN)/ruff check src experiments tests benchmarks
	$(BIN)/ruff format --check src experiments tests benchmarks
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

# The paper: make reproduce EXPERIMENT=checkerboard (or mnist, crystals), and likewise the others. More options: OPTIONS=…
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

# The tables in docs/ and results/, from the committed numbers.
documents: install
	$(BIN)/python -m experiments.documents

# Small flows that nothing was tuned on: scores against failure rules. MNIST is read from FMWC_DATA, or downloaded.
zoo: export OMP_NUM_THREADS = 1
zoo: install
	$(BIN)/python -m benchmarks.zoo --out runs/zoo --jobs 2

clean:
	rm -rf .venv .venv-interop demo runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
