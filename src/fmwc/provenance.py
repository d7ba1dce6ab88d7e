"""The provenance of a result: commit, code, device, versions and time.

The commit is written into a package when it is built (`hatch_build.py`), and read from git's files in a checkout. Git
itself is never run, because the configuration of a surrounding repository could make it execute commands.
:func:`code` hashes the running files, which reveals edits since the commit.

`hatch_build.py` loads this file without the package, so torch and the rest of fmwc are imported inside functions only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import time
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "BAKED",
    "Clock",
    "code",
    "commit",
    "commit_of",
    "describe_device",
    "pick_device",
    "provenance",
    "runtime",
]

BAKED = "_commit.py"  # the file in a built package that holds its commit
UNKNOWN = "unknown"
SHORT = 12
_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REF = re.compile(r"refs/[A-Za-z0-9._/+-]+")
_OURS = re.compile(r"^\[project\]\s*$(?:(?!^\[).)*?^name\s*=\s*[\"']fmwc[\"']\s*$", re.MULTILINE | re.DOTALL)
PACKAGE = Path(__file__).resolve().parent


# ---- code --------------------------------------------------------------------------------------------------------


@cache
def commit() -> str:
    """Return the commit of the running code, from `FMWC_COMMIT`, the build or the checkout, or "unknown"."""
    if given := os.environ.get("FMWC_COMMIT"):
        return "".join(c if c.isprintable() else "?" for c in given)[:100]
    if match := re.fullmatch(r'COMMIT = "([0-9a-f]{7,64})"\s*', _text(PACKAGE / BAKED)):
        return match[1]
    root = PACKAGE.parents[1]
    ours = root / "src" / "fmwc" == PACKAGE and _OURS.search(_text(root / "pyproject.toml"))
    return commit_of(root) if ours else UNKNOWN


def commit_of(root: Path) -> str:
    """Return the commit of a checkout, from the files of its repository, or "unknown"."""
    git = root / ".git"
    if git.is_file():  # in a worktree or a submodule
        match = re.fullmatch(r"gitdir: (.+)\s*", _text(git))
        if not match:
            return UNKNOWN
        git = root / match[1].strip()
    shared = _text(git / "commondir").strip()
    folders = [git, git / shared] if shared else [git]
    head = _text(git / "HEAD").strip()
    if head.startswith("ref: "):
        name = head.removeprefix("ref: ")
        if not _REF.fullmatch(name) or ".." in name:
            return UNKNOWN
        packed = [line for folder in folders for line in _text(folder / "packed-refs").splitlines()]
        hashes = [_text(folder / name).strip() for folder in folders]
        hashes += [line.removesuffix(f" {name}") for line in packed if line.endswith(f" {name}")]
        head = next(filter(None, hashes), "")
    return head[:SHORT] if _HASH.fullmatch(head) else UNKNOWN


def _text(path: Path) -> str:
    """Return the content of a short text file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size < 1 << 24 else ""
    except (OSError, ValueError):
        return ""


@cache
def code() -> str:
    """Return a hash of the current Python files of the package."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != BAKED:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(PACKAGE).as_posix()}|{len(content)}|".encode() + content)
    return digest.hexdigest()[:SHORT]


# ---- device and time ---------------------------------------------------------------------------------------------


def pick_device(name: str | torch.device) -> torch.device:
    """Return a device by name; `auto` is the GPU if there is one."""
    import torch

    from fmwc.errors import UsageError

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device '{name}'; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device '{name}' is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("CUDA is not available; use --device cpu")
    return device


def describe_device(device: torch.device) -> str:
    """Return the name of a GPU, or the number of threads on a CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


class Clock:
    """A stopwatch for work on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.start = device, time.perf_counter()
        commit(), code()  # cache them now, because the files may change during the run

    @property
    def seconds(self) -> float:
        """Wall time since the clock was created, including work that the GPU has not finished yet."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self.start


def runtime(device: torch.device) -> dict[str, str]:
    """Return the device type and versions, which are part of the identity of every run that can resume."""
    import torch

    version = sys.modules["fmwc"].__version__  # not imported, to avoid a cycle
    return {"device": device.type, "torch": torch.__version__, "fmwc": version}


def provenance(device: torch.device, seconds: float, **more: Any) -> dict[str, Any]:
    """Return what is recorded with every result: commit, code, device, versions, date, wall time and processes."""
    import torch
    import torch.distributed as dist

    several = dist.is_available() and dist.is_initialized()
    return {
        "commit": commit(),
        "code": code(),
        "device": describe_device(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        **({"processes": dist.get_world_size()} if several else {}),
        **more,
    }
