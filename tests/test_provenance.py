"""The commit of a result is that of fmwc's code, not that of a surrounding repository."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from fmwc import provenance as module
from fmwc.provenance import code, commit, commit_of, provenance


def git(folder, *words):
    options = ("-c", "user.email=a@b", "-c", "user.name=a", "-c", "init.defaultBranch=main", "-c", "core.fsmonitor=")
    return subprocess.run(
        ["git", *options, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git makes the repositories of these tests")
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return folder


def installed(package, environment=None):
    """Return the output of a copy of the module in a package of this path, run in that folder."""
    package.mkdir(parents=True, exist_ok=True)
    shutil.copy(module.__file__, package / "provenance.py")
    code = f"import runpy; print(runpy.run_path({str(package / 'provenance.py')!r})['commit']())"
    names = {k: v for k, v in os.environ.items() if k != "FMWC_COMMIT"} | (environment or {})
    return subprocess.run(
        [sys.executable, "-c", code], cwd=package, env=names, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_commit_of_a_checkout_agrees_with_git(repository):
    assert commit_of(repository) == git(repository, "rev-parse", "HEAD")[:12]
    git(repository, "checkout", "-q", "-b", "feature/of-mine")
    git(repository, "commit", "-q", "--allow-empty", "-m", "second")
    second = git(repository, "rev-parse", "HEAD")[:12]
    assert commit_of(repository) == second
    git(repository, "worktree", "add", "-q", "--detach", "../other", "HEAD~1")
    assert commit_of(repository.parent / "other") == git(repository, "rev-parse", "HEAD~1")[:12]
    git(repository, "worktree", "add", "-q", "-b", "third", "../third")
    git(repository, "pack-refs", "--all")
    assert commit_of(repository.parent / "third") == commit_of(repository) == second


def test_a_surrounding_repository_is_not_used(repository):
    """The configuration of a surrounding repository is not executed, and its commit is not used."""
    sprung = repository.parent / "sprung"
    git(repository, "config", "core.fsmonitor", f"touch {sprung}; false")
    package = repository / "venv" / "site-packages" / "fmwc"
    assert installed(package) == "unknown"
    (package / module.BAKED).write_text('COMMIT = "0123456789ab"\n')
    assert installed(package) == "0123456789ab"
    (package / module.BAKED).write_text("import os; os.mkdir('sprung')\n")  # it is read, not run
    assert installed(package) == "unknown"
    assert installed(package, {"FMWC_COMMIT": "told"}) == "told"
    assert not sprung.exists()
    assert not (package / "sprung").exists()


def test_provenance_records_commit_and_code(monkeypatch):
    monkeypatch.setenv("FMWC_COMMIT", "abc")
    commit.cache_clear()
    try:
        found = provenance(torch.device("cpu"), 1.0)
    finally:
        commit.cache_clear()
    assert found["commit"] == "abc"
    assert found["code"] == code()
    assert len(found["code"]) == 12
