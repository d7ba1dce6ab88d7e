"""Atomic writes, and output folders that are owned by one run.

A run claims its output folder (:func:`claimed`). While it holds the claim, no other run can write there, and every file
is listed in a manifest before it is written. A killed run can therefore resume in its folder, and only files that a run
wrote are ever deleted.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from filelock import FileLock, Timeout

from fmwc.errors import CheckpointError, FmwcError, NotFiniteError, OutputError
from fmwc.identity import SEAL, difference, digest_tensors, plain
from fmwc.readers import Check, check, parse_json, read_bytes, read_safetensors, read_text, shown

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Folder",
    "cache_folder",
    "claimed",
    "note",
    "read_tensors",
    "write_bytes",
    "write_json",
    "write_tensors",
    "write_text",
    "written",
]

MANIFEST = ".fmwc-manifest"  # one JSON object per line: the run, then its files
LOCK = ".fmwc-lock"
TEMPORARY = ".fmwc-tmp-"
_TEMPORARY = re.compile(f"{re.escape(TEMPORARY)}[0-9a-f]{{12}}")
WORK = ".fmwc-work"  # files that an interrupted run resumes from; deleted when it has finished
LONGEST_MANIFEST = 1 << 26  # bytes

_CLAIM: ContextVar[Folder | None] = ContextVar("fmwc_claim", default=None)  # the innermost claim, if claims are nested


# ---- files -------------------------------------------------------------------------------------------------------


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end, so that readers never see partial content."""
    note(path)
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


def note(*paths: Path) -> None:
    """List files in the manifest of every claimed folder that contains them, before they are written."""
    folder = _CLAIM.get()
    while folder is not None:
        folder.note(*paths)
        folder = folder.outer


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


class Folder:
    """Output folder owned by a run.

    Attributes:
        path: The folder.
        resumed: Whether an interrupted run with the same identity left its files here.
        finished: Whether a run with the same identity has finished, so that nothing is left to do.
    """

    def __init__(self, path: Path, by: str, identity: Mapping[str, Any] | None, outer: Folder | None = None) -> None:
        self.path, self.by, self.identity = path, by, None if identity is None else plain(identity)
        self.outer = outer  # the enclosing claim
        self.resumed = self.finished = False
        self.files: set[str] = set()
        self.before: set[str] = set()  # files of an earlier run, which this run replaces
        self.spared: set[str] = set()  # files that no run wrote, which must not be replaced

    @property
    def work(self) -> Path:
        """Folder of files from which an interrupted run resumes; deleted at the end."""
        return self.path / WORK

    def note(self, *paths: Path) -> None:
        """Add files to the manifest, before they are written."""
        for path in paths:
            self._require_inside(path)
        names = [_relative(path, self.path) for path in paths]
        fresh = [name for name in names if name is not None and name not in self.files]
        for name in fresh:
            if PurePosixPath(name).parts[0] in self.spared and (self.path / name).exists():
                raise OutputError(
                    f"{shown(self.path / name)} was not written by fmwc {self.by} and was not changed; choose another "
                    "--out, or add --force"
                )
        if not fresh:
            return
        self.files.update(fresh)
        with (self.path / MANIFEST).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps({"file": name}) + "\n" for name in fresh))
            file.flush()
            os.fsync(file.fileno())

    def _require_inside(self, path: Path) -> None:
        """Raise if a file of this folder would be written elsewhere, through a link to a folder."""
        if _relative(path, self.path) is not None and not _below(path.parent, self.path):
            raise OutputError(
                f"{shown(path.parent)} leads out of {shown(self.path)} through a link, and nothing was written there; "
                "delete the link, or choose another --out"
            )

    def discard(self, names: Iterable[str]) -> None:
        """Delete files that runs wrote in this folder, and the subfolders that become empty."""
        for name in names:
            path = self.path / name
            if not _below(path.parent, self.path):
                continue  # through a link
            with suppress(OSError):
                path.unlink()
            for parent in path.relative_to(self.path).parents[:-1]:
                with suppress(OSError):  # not empty
                    (self.path / parent).rmdir()
            self.files.discard(name)

    def finish(self) -> None:
        """Mark the run as finished; then delete its work files and the remaining files of the replaced run."""
        stale = {*(self.before - self.files), *(name for name in self.files if name.startswith(f"{WORK}/"))}
        self.files = {name for name in self.files - stale if os.path.lexists(self.path / name)}
        self.finished = True
        self._begin(finished=True, stale=stale)
        if stale:  # if the run is killed here, the next one deletes the rest
            self.discard(stale)
            self._begin(finished=True)

    def _begin(self, finished: bool = False, stale: Iterable[str] = ()) -> None:
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": " ".join(shown(word)[:200] for word in sys.argv),
            "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        head = {
            "by": self.by,
            "identity": self.identity,
            "owner": owner,
            "finished": finished,
            "stale" if finished else "before": sorted(stale if finished else self.before),
        }
        lines = [head, *({"file": name} for name in sorted(self.files))]
        token = _CLAIM.set(self.outer)  # the manifest does not list itself
        try:
            write_text(self.path / MANIFEST, "".join(json.dumps(line) + "\n" for line in lines))
        finally:
            _CLAIM.reset(token)


@contextmanager
def claimed(
    path: str | Path,
    by: str,
    identity: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
    resumes: bool = False,
    again: bool = False,
    adds: Sequence[str] = (),
) -> Iterator[Folder]:
    """Own a folder while a run writes to it; raise :class:`OutputError` at once if that is impossible.

    The folder must be new or empty, unless `force`, `again` or `adds` apply, or a run of the same verb and identity
    wrote there. If that run was interrupted, its files are kept with `resumes` (`Folder.resumed`) and deleted without.
    If it has finished (`Folder.finished`), the caller has nothing left to do. Files that no run wrote are kept, and
    never overwritten without `force`.

    Arguments:
        path: The folder.
        by: The verb (subcommand) that writes.
        identity: All settings that affect the result; `None` if runs are not distinguished.
        force: Whether to write into a folder that holds other files. Files of an earlier run are deleted at the end
            unless they were written again; other files are kept.
        resumes: Whether to resume from the files of an interrupted run.
        again: Whether to replace the files of an earlier run of the same verb, finished or not.
        adds: Patterns of files. If given, the run adds to the files of earlier runs of the same verb, or to a folder
            with a file that matches a pattern (results copied without their manifest).
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{shown(path)} is a file; give --out a folder")
    made = _make(path)
    lock = FileLock(path / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise OutputError(f"{shown(path)} is in use by {_owner(path)}; wait for it, or choose another --out") from error
    except (OSError, NotImplementedError) as error:  # NotImplementedError on a file system without locks
        reason = getattr(error, "strerror", "") or error
        raise OutputError(f"{shown(path)} cannot be written to ({reason}); choose another --out") from error
    folder, earlier, unchanged = Folder(path, by, identity, _CLAIM.get()), None, True
    token = _CLAIM.set(folder)
    try:
        earlier = _content(path / MANIFEST)
        unchanged = False
        _take_over(folder, force, resumes, again, adds)
        if folder.outer:
            folder.outer.note(*(path / name for name in folder.files))
        yield folder
        if not folder.finished:
            folder.finish()
    except NotFiniteError:  # resuming with the same settings would fail again
        folder.discard([*folder.files])
        raise
    finally:
        _CLAIM.reset(token)
        if not unchanged and not folder.finished and not any((path / name).exists() for name in folder.files):
            folder.discard([*folder.files])  # nothing was written; restore the folder
            _restore(path / MANIFEST, earlier)
        with suppress(OSError):
            (path / LOCK).unlink()  # while locked, so that no other process locks a deleted file
        lock.release()
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def _content(path: Path) -> bytes | None:
    """Return the content of the manifest; raise if it is not a regular file."""
    return read_bytes(path, LONGEST_MANIFEST, OutputError) if os.path.lexists(path) else None


def _restore(path: Path, content: bytes | None) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True) if content is None else write_bytes(path, content)


def _make(path: Path) -> list[Path]:
    """Create a folder and its parents; return the created folders, innermost first."""
    missing = []
    try:
        for parent in (path, *path.parents):
            if parent.exists():
                break
            missing.append(parent)
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or error
        raise OutputError(f"{shown(path)} cannot be created ({reason}); choose another --out") from error
    return missing


def _take_over(folder: Folder, force: bool, resumes: bool, again: bool, adds: Sequence[str]) -> None:
    """Resume, replace or extend the files in the folder; raise if none of these is allowed."""
    path, earlier = folder.path, _read_manifest(folder.path / MANIFEST)
    present = sorted(
        p.name for p in path.iterdir() if p.name not in (MANIFEST, LOCK) and not _TEMPORARY.fullmatch(p.name)
    )
    foreign = [name for name in present if name not in earlier.roots]
    same_verb = earlier.by == folder.by
    same = same_verb and earlier.identity == folder.identity
    kept: set[str] = set()
    replaced: set[str] = set()
    if adds and (not present or same_verb or force or any(any(path.glob(pattern)) for pattern in adds)):
        folder.resumed, kept = True, earlier.files
    elif again and same_verb:
        folder.spared, replaced = set() if force else {*foreign}, earlier.files | earlier.before
    elif earlier.unfinished and same:
        folder.spared, folder.resumed = set() if force else {*foreign}, resumes
        kept, replaced = earlier.files if resumes else set(), earlier.before - earlier.files
        if not resumes:
            folder.discard(earlier.files)
    elif earlier.unfinished and not force:
        raise OutputError(
            f"{shown(path)} holds an unfinished fmwc {earlier.by}{_difference(earlier, folder, ' (', ')')} and was not "
            "changed; repeat that command to resume it, choose another --out, or add --force to start over"
        )
    elif same and folder.identity is not None and not force and all((path / name).exists() for name in earlier.files):
        _clear_temporaries(path, earlier.files)
        folder.discard(earlier.stale)  # of a run that was killed at its end
        folder.files, folder.finished = earlier.files, True
        return
    elif present and not force:
        content = shown((foreign or present)[0])
        if earlier.by is not None and not foreign:
            content = f"fmwc {earlier.by} was finished there{_difference(earlier, folder, ': ')}"
        raise OutputError(
            f"{shown(path)} is not empty ({content}) and nothing in it was changed; choose another --out, or add "
            "--force"
        )
    else:
        work = {name for name in earlier.files if name.startswith(f"{WORK}/")}
        folder.discard(work)
        replaced = earlier.files - work | earlier.before
    _clear_temporaries(path, earlier.files | earlier.before)
    folder.discard(earlier.stale)
    folder.files, folder.before = kept, replaced
    folder._begin()


@dataclass(frozen=True)
class _Manifest:
    """Manifest of an earlier run. `by` is `None` if there is no readable manifest."""

    by: Any = None
    identity: Any = None
    owner: Any = None
    finished: bool = False
    files: set[str] = field(default_factory=set)
    before: set[str] = field(default_factory=set)  # files of the run before
    stale: set[str] = field(default_factory=set)  # files that the run was deleting when it finished

    @property
    def unfinished(self) -> bool:
        return self.by is not None and not self.finished

    @property
    def roots(self) -> set[str]:
        """The top-level names in the folder that belong to runs."""
        return {PurePosixPath(name).parts[0] for name in self.files | self.before | self.stale}


def _read_manifest(path: Path) -> _Manifest:
    try:
        lines = read_text(path, LONGEST_MANIFEST).splitlines()
        head = json.loads(lines[0])
        by, before, stale = head["by"], head.get("before") or [], head.get("stale") or []
    except (FmwcError, ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError):
        return _Manifest()
    if not isinstance(before, list) or not isinstance(stale, list):
        return _Manifest()
    files = set()
    for line in lines[1:]:
        with suppress(ValueError, TypeError, KeyError, RecursionError):  # the last line may be cut off
            files.add(json.loads(line)["file"])
    names = ({name for name in group if _inside(name)} for group in (files, before, stale))
    return _Manifest(by, head.get("identity"), head.get("owner"), bool(head.get("finished")), *names)


def _difference(earlier: _Manifest, folder: Folder, begin: str, end: str = "") -> str:
    """Describe the difference from the folder's earlier run, if both have the same verb and an identity."""
    if earlier.by != folder.by or not isinstance(earlier.identity, dict) or folder.identity is None:
        return ""
    return begin + (difference(earlier.identity, folder.identity) or "some of its files are gone") + end


def _below(path: Path, folder: Path) -> bool:
    """Return whether a path lies within a folder after links are resolved."""
    with suppress(OSError, RuntimeError):
        return path.resolve().is_relative_to(folder.resolve())
    return False


def _inside(name: Any) -> bool:
    """Return whether a name in a manifest, which may be forged, refers to a file below its folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    parts = PurePosixPath(name)
    return not parts.is_absolute() and ".." not in parts.parts and parts.parts[:1] not in ((), (MANIFEST,), (LOCK,))


def _relative(path: Path, folder: Path) -> str | None:
    """Return the name of a file relative to a folder; `None` if it lies elsewhere."""
    try:
        return PurePosixPath(*path.absolute().relative_to(folder.absolute()).parts).as_posix()
    except ValueError:
        return None


def _clear_temporaries(folder: Path, files: Iterable[str]) -> None:
    """Delete temporary files of killed runs, which are next to the files in the manifest."""
    for parent in {folder, *((folder / name).parent for name in files)}:
        if not _below(parent, folder):
            continue
        with suppress(OSError):
            for path in [*parent.iterdir()]:
                if _TEMPORARY.fullmatch(path.name):
                    path.unlink(missing_ok=True)


def _owner(path: Path) -> str:
    owner = _read_manifest(path / MANIFEST).owner
    if not isinstance(owner, dict):
        return "another process"
    pid, host, command, since = (shown(str(owner.get(name)))[:200] for name in ("pid", "host", "command", "since"))
    return f"process {pid} on {host} ({command}, since {since})"
