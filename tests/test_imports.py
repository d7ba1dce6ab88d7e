"""What an import costs: torch, numpy and safetensors only."""

import subprocess
import sys

import pytest

HEAVY = ("sklearn", "scipy", "matplotlib", "typer", "rich", "pandas")


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {line.split(".")[0] for line in found.stdout.splitlines()}


@pytest.mark.parametrize(
    "statement", ["import fmwc", "import fmwc.sampling, fmwc.training, fmwc.checkpoint, fmwc.data"]
)
def test_the_core_needs_nothing_optional(statement):
    loaded = modules_after(statement)
    assert "torch" in loaded
    assert not loaded & set(HEAVY)


def test_the_public_names_are_there():
    import fmwc

    for name in fmwc.__all__:
        assert getattr(fmwc, name) is not None
    assert fmwc.__version__
