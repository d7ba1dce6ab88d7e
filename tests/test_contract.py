"""The parts of the library import in one direction (the contract is in pyproject.toml)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_each_layer_imports_only_from_lower_layers():
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports_command as f; sys.exit(f())",
    ]
    found = subprocess.run(
        command,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    said = found.stdout + found.stderr
    if "Missing layer" in said:
        pytest.skip(said.strip().splitlines()[-1])
    assert found.returncode == 0, said
