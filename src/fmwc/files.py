"""Atomic writes, and folders that commands write to.

Most commands write to a temporary folder that is renamed at the end (:func:`fresh`). Commands that resume own their
folder while they run, and keep their identity in it (:func:`resumed`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from filelock import FileLock, Timeout

from fmwc.errors import CheckpointError, FmwcError, NotFiniteError, OutputError
from fmwc.identity import SEAL, difference, digest_tensors, plain
from fmwc.readers import Check, anything, boolean, check, parse_json, read_json, read_safetensors, record, shown

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Folder",
    "cache_folder",
    "fresh",
    "locked",
    "moved",
    "read_tensors",
    "resumed",
    "write_bytes",
    "write_json",
    "write_tensors",
    "write_text",
    "written",
]

RUN = ".fmwc-run"  # the identity of the run that fills a folder
LOCK = ".fmwc-lock"
WORK = ".fmwc-work"  # files that an interrupted run resumes from; deleted when it has finished
TEMPORARY = ".fmwc-tmp-"
_TEMPORARY = re.compile(f"{re.escape(TEMPORARY)}[0-9a-f]{{12}}")
KEPT = ("recipe.json", "campaign.json", ".git")  # folders that hold one of these are never replaced by other results


# ---- files -------------------------------------------------------------------------------------------------------


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end, so that readers never see partial content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(6)}"
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)  # the error of a full disk does not name the file
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make a rename durable, if possible: Windows cannot open folders, and some file systems cannot sync them."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_bytes(path: Path, content: bytes) -> Path:
    """Write bytes atomically; return the path."""
    with written(path) as file:
        file.write(content)
    return path


def write_text(path: Path, content: str) -> Path:
    """Write UTF-8 text atomically; return the path."""
    return write_bytes(path, content.encode())


def write_json(path: Path, content: Any) -> Path:
    """Write JSON atomically; raise if it holds NaN or infinity."""
    return write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def cache_folder(name: str) -> Path:
    """Return a folder below `FMWC_CACHE`, or below the user's cache folder."""
    home = os.environ.get("FMWC_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fmwc")
    return Path(os.path.expanduser(home)) / name


# ---- files of tensors --------------------------------------------------------------------------------------------

DESCRIPTION = "fmwc"  # metadata key of a JSON object in a safetensors file


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write tensors, a JSON description, and a hash of both; return the path."""
    from safetensors.torch import save

    sealed = {**about, SEAL: digest_tensors(tensors, about)}
    return write_bytes(path, save(dict(tensors), {DESCRIPTION: json.dumps(sealed, allow_nan=False)}))


def read_tensors(path: Path, schema: Check, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the description from a file of :func:`write_tensors`.

    Arguments:
        path: The file.
        schema: The check of the description, with its hash.
        what: The expected kind of file, for messages.
    """
    try:
        tensors, metadata = read_safetensors(path, error=CheckpointError)
        about = check(parse_json(metadata.get(DESCRIPTION, ""), "its description"), schema, "its description")
        if about.pop(SEAL) != digest_tensors(tensors, about):
            raise CheckpointError("its hash does not match its content")
    except FmwcError as error:
        raise CheckpointError(f"{shown(path)} is not {what}, or is truncated or modified ({error})") from error
    return tensors, about


# ---- folders -----------------------------------------------------------------------------------------------------


@contextmanager
def fresh(path: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, which becomes `path` at the end.

    Raise :class:`OutputError` at once if another run is writing to `path`, or if it is a file, a link, or, without
    `force`, a folder that is not empty. With `force`, that folder is deleted at the end. After an error nothing has
    changed. A killed run leaves only its temporary folder, which the next run deletes.
    """
    path = Path(path)
    _require_folder(path)
    if path.is_dir():
        _require_replaceable(path)
    if path.is_dir() and any(path.iterdir()):
        if not force:
            raise OutputError(f"{shown(path)} is not empty and was not changed; choose another --out, or add --force")
        _require_none(path, KEPT)
    path = Path(os.path.abspath(path))
    temporary, old = (path.with_name(f".{path.name}.fmwc-{name}") for name in ("tmp", "old"))
    with _lock(path.with_name(f".{path.name}{LOCK}"), path):
        if old.exists() and not path.exists():  # a run was killed between two renames
            os.rename(old, path)
        _delete(temporary, old)
        try:
            temporary.mkdir()
            yield temporary
            if path.exists():
                if not force:
                    _require_empty(path)
                os.rename(path, old)
            os.rename(temporary, path)
        finally:
            if old.exists() and not path.exists():  # the new folder could not take its place
                os.rename(old, path)
            _delete(temporary, old)
        _sync(path.parent)


def moved(paths: Iterable[Path], folder: Path, out: Path) -> list[Path]:
    """Return where files of the temporary folder of :func:`fresh` are at the end."""
    return [out / path.relative_to(folder) for path in paths]


class Folder(NamedTuple):
    """Folder of a run that resumes.

    Attributes:
        path: The folder.
        finished: Whether the same run has finished before, so that nothing is left to do.
    """

    path: Path
    finished: bool

    @property
    def work(self) -> Path:
        """Folder of files from which an interrupted run resumes; deleted at the end."""
        return self.path / WORK


@contextmanager
def locked(path: str | Path) -> Iterator[Path]:
    """Hold the lock of a folder, and delete the temporary files of killed runs in it."""
    path = Path(path)
    _require_folder(path)
    with _lock(path / LOCK, path):
        for folder, _, names in os.walk(path):
            for name in filter(_TEMPORARY.fullmatch, names):
                Path(folder, name).unlink(missing_ok=True)
        yield path


_RUN = record({"identity": anything, "finished": boolean})


@contextmanager
def resumed(path: str | Path, identity: Mapping[str, Any], *, force: bool = False) -> Iterator[Folder]:
    """Own a folder that a run fills, and fills further if it is started again after it was interrupted.

    Raise :class:`OutputError` if the folder is not empty, unless a run of the same identity wrote it. With `force`,
    what is in the folder is deleted, unless that run can resume.

    Arguments:
        path: The folder.
        identity: All that determines the result.
        force: Whether to replace other content.
    """
    with locked(path) as path:
        for name in (RUN, WORK):
            if (path / name).is_symlink():
                raise OutputError(f"{shown(path / name)} is a link; delete it, or choose another --out")
        identity, before = plain(identity), None
        if (path / RUN).exists():
            before = read_json(path / RUN, _RUN, error=OutputError)
        same = before is not None and before["identity"] == identity
        if before is not None and same and before["finished"] and not force:
            yield Folder(path, True)
            return
        present = [one for one in path.iterdir() if one.name != LOCK]
        if present and not (before is not None and same and not before["finished"]):
            if not force:
                rows = difference(before["identity"], identity) if before is not None else ""
                holds = f"holds another run ({rows})" if rows else "is not empty"
                raise OutputError(f"{shown(path)} {holds} and was not changed; choose another --out, or add --force")
            _require_replaceable(path)
            _require_none(path, ("campaign.json", ".git"))
            _delete(*present)
        write_json(path / RUN, {"identity": identity, "finished": False})
        try:
            yield Folder(path, False)
            _delete(path / WORK)
            write_json(path / RUN, {"identity": identity, "finished": True})
        except BaseException as error:
            if isinstance(error, NotFiniteError):  # resuming with the same settings would fail again
                _delete(path / WORK)
            if {one.name for one in path.iterdir()} <= {RUN, LOCK}:
                _delete(path / RUN)
            raise


def _require_folder(path: Path) -> None:
    """Raise unless a path is a folder, or nothing."""
    with suppress(OSError, ValueError):
        if path.is_symlink():
            raise OutputError(f"{shown(path)} is a link; give the folder itself")
        if path.exists() and not path.is_dir():
            raise OutputError(f"{shown(path)} is a file; give --out a folder")


def _require_empty(path: Path) -> None:
    """Raise if a folder was filled by another program during the run."""
    if not path.is_symlink() and any(path.iterdir()):
        raise OutputError(f"{shown(path)} was filled while this ran, and was not changed; choose another --out")


def _require_none(path: Path, names: Iterable[str]) -> None:
    """Raise if a folder holds one of these files or folders."""
    if found := [name for name in names if (path / name).exists()]:
        raise OutputError(f"{shown(path)} holds {found[0]} and was not changed; choose another --out")


def _require_replaceable(path: Path) -> None:
    """Raise if the user works in a folder, or if it is the root of a disk."""
    if path.is_mount() or any(one.is_relative_to(path.resolve()) for one in (Path.cwd(), Path.home())):
        raise OutputError(f"{shown(path)} cannot be replaced; choose a folder inside it")


@contextmanager
def _lock(file: Path, path: Path) -> Iterator[None]:
    """Hold a lock; create its folder, and delete it again if it stays empty."""
    made = []
    lock = FileLock(file, timeout=0)
    try:
        for parent in file.parents:
            if parent.exists():
                break
            made.append(parent)
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise OutputError(f"{shown(path)} is in use by another run; wait for it, or choose another --out") from error
    except (OSError, ValueError, NotImplementedError) as error:  # the last on a file system without locks
        reason = getattr(error, "strerror", "") or error
        raise OutputError(f"{shown(path)} cannot be written to ({reason}); choose another --out") from error
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # while locked, so that no other process locks a deleted file
        lock.release()
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def _delete(*paths: Path) -> None:
    """Delete files and folders, if they exist. Links are deleted, not followed."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
