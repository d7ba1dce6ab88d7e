"""Which commit of fmwc runs. It is written into a package when that is built (hatch_build.py); nothing is executed.

In a checkout of fmwc the commit is read from git's files. Git itself is not asked: it runs what the configuration of
the repository around it says, and answers for whatever repository that is. Whether files were edited since the commit
is told by :func:`code`, a hash of what runs. This module imports nothing of fmwc, so that the build can use it.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache
from pathlib import Path

__all__ = ["BAKED", "code", "commit", "commit_of"]

BAKED = "_commit.py"  # beside the package's own files, where it was built
UNKNOWN = "unknown"
SHORT = 12
_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REF = re.compile(r"refs/[A-Za-z0-9._/+-]+")
_OURS = re.compile(r"^\[project\]\s*$(?:(?!^\[).)*?^name\s*=\s*[\"']fmwc[\"']\s*$", re.MULTILINE | re.DOTALL)
PACKAGE = Path(__file__).resolve().parents[1]


@cache
def commit() -> str:
    """Return the commit of the code that runs; `FMWC_COMMIT` if whoever copied the code said so; else "unknown"."""
    if given := os.environ.get("FMWC_COMMIT"):
        return "".join(c if c.isprintable() else "?" for c in given)[:100]
    found = re.fullmatch(r'COMMIT = "([0-9a-f]{7,64})"\s*', _text(PACKAGE / BAKED))
    if found:
        return found[1]
    root = PACKAGE.parents[1]
    ours = root / "src" / "fmwc" == PACKAGE and _OURS.search(_text(root / "pyproject.toml"))
    return commit_of(root) if ours else UNKNOWN


def commit_of(root: Path) -> str:
    """Return the commit that a checkout is at, from the files of its repository; "unknown" if there is none."""
    git = root / ".git"
    if git.is_file():  # of a worktree, or a submodule
        there = re.fullmatch(r"gitdir: (.+)\s*", _text(git))
        if not there:
            return UNKNOWN
        git = root / there[1].strip()
    shared = _text(git / "commondir").strip()
    places = [git, git / shared] if shared else [git]
    head = _text(git / "HEAD").strip()
    if head.startswith("ref: "):
        name = head.removeprefix("ref: ")
        if not _REF.fullmatch(name) or ".." in name:
            return UNKNOWN
        head = next((text for place in places if (text := _text(place / name).strip())), "") or _packed(places, name)
    return head[:SHORT] if _HASH.fullmatch(head) else UNKNOWN


def _packed(places: list[Path], name: str) -> str:
    for place in places:
        for line in _text(place / "packed-refs").splitlines():
            found, _, ref = line.partition(" ")
            if ref == name:
                return found
    return ""


def _text(path: Path) -> str:
    """A short text file; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size < 1 << 24 else ""
    except (OSError, ValueError):
        return ""


@cache
def code() -> str:
    """Return a hash of the package's Python files as they are."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != BAKED:
            content = path.read_bytes()
            found.update(f"{path.relative_to(PACKAGE).as_posix()}|{len(content)}|".encode() + content)
    return found.hexdigest()[:SHORT]
