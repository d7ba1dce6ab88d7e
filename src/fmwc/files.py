"""Files are written whole or not at all, and never over somebody's work."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fmwc.errors import OutputError

__all__ = ["check_folder", "new_folder", "write_bytes", "write_json", "write_text", "written"]


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file under a temporary name beside `path`, flushed and renamed at the end: a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes) -> Path:
    with written(path) as file:
        file.write(content)
    return path


def write_text(path: Path, content: str) -> Path:
    return write_bytes(path, content.encode())


def write_json(path: Path, content: Any) -> Path:
    return write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def check_folder(path: Path, *, force: bool = False) -> None:
    """Raises where results must not be written: asked before long work whose end makes the folder."""
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file; give --out a folder")
    if not force and path.is_dir() and any(path.iterdir()):
        raise OutputError(f"{path} is not empty and nothing in it was touched; choose another --out, or add --force")


def new_folder(path: Path, *, force: bool = False) -> Path:
    """A folder to write results into: new or empty, unless `force` allows files of the same name to be replaced."""
    check_folder(path, force=force)
    path.mkdir(parents=True, exist_ok=True)
    return path
