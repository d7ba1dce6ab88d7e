"""Completion in a real bash: commands, options, and names of domains and checkpoints."""

import os
import shutil
import subprocess
import sys

import pytest

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")


@pytest.fixture
def bash(tmp_path):
    """Return a function that runs a script in bash, with an own home folder and `fmwc` on the path."""
    program = tmp_path / "bin" / "fmwc"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fmwc "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}

    def run(script):
        found = subprocess.run([str(BASH), "-c", script], capture_output=True, text=True, env=environment)
        assert (found.returncode, found.stderr) == (0, "")
        return found.stdout

    return run


def completed(line):
    """Return the script that asks the completion function for the last word of a line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    return f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _fmwc_completion fmwc; echo "${{COMPREPLY[@]}}"\n'


LINES = {
    "fmwc sam": "sample",
    "fmwc sample crystals --step": "--steps --stepper",
    "fmwc demo m": "mnist",
    "fmwc train ": "checkerboard mnist crystals",
    "fmwc sample checkerboard-": "checkerboard-joint",
    "fmwc sample mnist --device c": "cpu cuda",
    "fmwc sample nothing-like-": "",
}


def test_shown_script_completes_commands_options_and_names(bash):
    found = bash('eval "$(fmwc --show-completion; true)"\n' + "".join(map(completed, LINES)))
    assert found.splitlines() == list(LINES.values())


def test_installed_script_completes(bash):
    assert "completion installed" in bash("fmwc --install-completion; true")
    assert bash(f"source ~/.bashrc\n{completed('fmwc jud')}").strip() == "judge"
