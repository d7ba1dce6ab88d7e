"""Imports are lazy, and the core imports only torch, numpy and safetensors."""

import subprocess
import sys

import pytest

OPTIONAL = {"sklearn", "scipy", "matplotlib", "typer", "rich", "pandas"}
SLOW = {"torch", "sklearn", "scipy", "matplotlib", "pandas", "pymatgen", "ase", "pyarrow"}


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(['', *sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {line.split(".")[0] for line in found.stdout.splitlines()}


def test_import_loads_no_slow_or_optional_modules():
    assert not modules_after("import fmwc") & (SLOW | OPTIONAL)
    assert not modules_after("import fmwc.errors, fmwc.files, fmwc.identity, fmwc.readers") & (SLOW | OPTIONAL)


VERBS = (
    *("demo", "report", "train", "retrofit", "sample", "check", "filter"),
    *("edit", "judge", "screen", "studio"),
)


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_loads_no_slow_modules(words):
    run = (
        f"sys.argv[1:] = {words}\nfrom fmwc.__main__ import main\n"
        "try: main()\nexcept SystemExit as stop: assert not stop.code"
    )
    assert not modules_after(run) & SLOW


@pytest.mark.parametrize(
    "statement", ["import fmwc; fmwc.sample", "import fmwc.sampling, fmwc.training, fmwc.checkpoint, fmwc.data"]
)
def test_core_imports_no_optional_modules(statement):
    loaded = modules_after(statement)
    assert "torch" in loaded
    assert not loaded & OPTIONAL


def test_public_names_exist():
    import fmwc

    for name in fmwc.__all__:
        assert getattr(fmwc, name) is not None
        assert name in dir(fmwc)
    assert fmwc.__version__
    namespace: dict = {}
    exec("from fmwc import *", namespace)
    assert set(fmwc.__all__) <= namespace.keys()
