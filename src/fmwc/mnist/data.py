"""MNIST, verified by checksums, and other data sets of labelled greyscale images."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor

from fmwc.errors import DataError, UsageError, pick
from fmwc.files import cache_folder, write_bytes
from fmwc.readers import open_regular, read_arrays, read_bytes, unpacked

__all__ = ["FILES", "MIRRORS", "Images", "load", "pictures", "unit"]

FILES = {  # split: images, labels
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
SUMS = {
    "train-images-idx3-ubyte.gz": "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
}
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
ARRAYS = {  # split: the names that images and labels may have in an npz file
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
    "none": (("x", "y"), ("images", "labels")),
}
LIMIT = 1 << 30  # maximum bytes of images; MNIST has 47 million, EMNIST 640 million
PICTURE = 1 << 24  # maximum bytes of an image file, and maximum pixels of an image
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
PLACES = (".", "mnist", "MNIST/raw")  # subfolders to search; the last is torchvision's
TIMEOUT = 30.0  # seconds
LARGEST = 1 << 24  # maximum bytes accepted from a mirror; the largest of the four files has 9.9 million
TOGETHER = 1000  # images converted at a time, because float64 copies take eight times the memory
TENTH = 10  # in data without splits, every tenth image is a test image
BY_HAND = f"{', '.join(name for name in SUMS if name.endswith('.gz'))} from {' or '.join(MIRRORS)}"
OWN = (
    "your own data must be a folder of idx files with MNIST's names, an .npz file, or a folder of images with one "
    "subfolder per class, named by its label (0, 1, …)"
)
AS_OWN = "use own=True (--own) to read your own data"
GET = f"omit --data and FMWC_DATA to download MNIST (download=True), put {BY_HAND} there, or {AS_OWN}"


class Images(NamedTuple):
    """Greyscale images with labels."""

    x: Tensor  # (N, 1, H, W) uint8, 0 = background, 255 = full ink
    y: Tensor  # (N,) int64


class _Arrays(NamedTuple):
    """Arrays as read from files, and the names of their sources for error messages."""

    x: np.ndarray
    y: np.ndarray
    x_from: str
    y_from: str
    split: bool = True  # whether they are one split instead of all data
    names: tuple[str, ...] = ()  # of image files, with their folders


def unit(x: Tensor) -> Tensor:
    """Scale pixels to [0, 1] (App. dataset-metrics).

    >>> unit(torch.tensor([0, 51, 255], dtype=torch.uint8))
    tensor([0.0000, 0.2000, 1.0000])
    """
    if x.dtype != torch.uint8:
        raise UsageError(f"pixels must be uint8, 0 to 255, not {x.dtype}; use the x of load(...)")
    return x.to(torch.float32) / 255


def load(
    path: str | Path | None = None, split: str = "train", *, own: bool = False, classes: int = 10, download: bool = True
) -> Images:
    """Read one split of MNIST, or of another data set.

    Arguments:
        path: The folder (or .npz file) of the data; by default `FMWC_DATA`, or else `mnist` in `FMWC_CACHE` or in the
            user's cache folder.
        split: `"train"` or `"test"`.
        own: Read your own data: idx files with MNIST's names, an .npz file, or a folder of images with one subfolder
            per class. If there are no splits, every tenth image, in order of the labels, is a test image. If `own` is
            false, every file must have MNIST's checksum.
        classes: The number of classes; labels are 0 to `classes` − 1.
        download: Download MNIST into the cache if it is not there and no path is given.
    """
    pick(FILES, split, "split")
    if classes < 1:
        raise UsageError(f"classes must be at least 1, not {classes}")
    given = path if path is not None else os.environ.get("FMWC_DATA") or None
    if own and given is None:
        raise DataError(f"give the path of your own data with --data or FMWC_DATA; {OWN}")
    place = cache_folder("mnist") if given is None else Path(os.path.expanduser(given))
    with _one_line_errors(place):
        arrays = _own(place, split, classes) if own else _official(place, split, download and given is None)
    images = _checked(arrays, classes)
    return images if arrays.split else _part(images, split, place)


def pictures(folder: str | Path, classes: int = 10) -> tuple[Images, tuple[str, ...]]:
    """Read all images of a folder with one subfolder per class; also return the names of the files."""
    place = Path(os.path.expanduser(folder))
    with _one_line_errors(place):
        arrays = _pictures(place, "train", classes)
    return _checked(arrays, classes), arrays.names


@contextmanager
def _one_line_errors(place: Path) -> Iterator[None]:
    """Convert an OSError, such as missing permissions or a full disk, to a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or place} cannot be read or written ({error.strerror or error})") from error


def _official(place: Path, split: str, download: bool) -> _Arrays:
    home = _home(place) or place
    for name in FILES[split]:
        if download and _held(home, name) is None:
            _fetch(home, f"{name}.gz")
    return _idx_pair(home, split, GET, verify=True)


def _fetch(folder: Path, name: str) -> None:
    failures = []
    for mirror in MIRRORS:
        try:
            with urlopen(mirror + name, timeout=TIMEOUT) as answer:
                content = answer.read(LARGEST)
        except (OSError, HTTPException) as error:
            failures.append(f"{mirror}: {error}")
            continue
        if hashlib.sha256(content).hexdigest() == SUMS[name].removeprefix("sha256:"):
            write_bytes(folder / name, content)
            return
        failures.append(f"{mirror}: {len(content)} bytes with a wrong checksum")
    raise DataError(
        f"{name} could not be downloaded ({'; '.join(failures)}); try again later, or download {BY_HAND} into "
        f"{folder}, or into the folder given by --data or FMWC_DATA"
    )


def _held(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / f"{name}.gz", folder / name) if file.is_file()), None)


def _home(folder: Path) -> Path | None:
    """Return the subfolder to read all idx files from, so that two data sets are never mixed."""
    names = [name for pair in FILES.values() for name in pair]
    return next((folder / part for part in PLACES if any(_held(folder / part, name) for name in names)), None)


def _idx_pair(home: Path, split: str, remedy: str, *, verify: bool = False) -> _Arrays:
    files = {name: _held(home, name) for name in FILES[split]}
    for name, file in files.items():
        if file is None:
            raise DataError(f"{home}{'' if home.is_dir() else ' is not a folder and'} holds no {name}.gz; {remedy}")
    images, labels = (file for file in files.values() if file)
    for file in (images, labels) if verify else ():
        _verify(file)
    return _Arrays(_idx(images, "images", 3), _idx(labels, "labels", 1), str(images), str(labels))


def _verify(file: Path) -> None:
    kind, wanted = SUMS[file.name].split(":")
    if hashlib.new(kind, read_bytes(file, LIMIT), usedforsecurity=False).hexdigest() != wanted:
        raise DataError(
            f"{file} is truncated, damaged or from another data set ({kind} differs); download it again, or {AS_OWN}"
        )


def _idx(file: Path, what: str, dims: int) -> np.ndarray:
    """Read an array of bytes with `dims` dimensions. No more bytes are unpacked than the header declares."""
    size = 4 + 4 * dims
    with open_regular(file, LIMIT) as raw:
        try:
            stream: Any = gzip.open(raw) if file.suffix == ".gz" else raw  # noqa: SIM115  closed with `raw`
            head = stream.read(size)
            if len(head) < size or head[:4] != struct.pack(">I", 0x800 + dims):
                raise DataError(
                    f"{file} starts with 0x{head.hex()}: truncated, or not an idx file of {what}; copy it again"
                )
            shape = struct.unpack(f">{dims}I", head[4:])
            expected, most = math.prod(shape), unpacked(os.fstat(raw.fileno()).st_size, LIMIT)
            if expected > most:
                raise DataError(
                    f"{file} declares {expected:,} bytes; at most {most:,} are read from a file of this size"
                )
            body = stream.read(expected + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{file} is truncated, damaged or not a gzip file; copy it again") from error
    if len(body) != expected:
        came = "more" if len(body) > expected else len(body)
        raise DataError(f"{file} declares {expected} bytes after its header but holds {came}; copy it again")
    return np.frombuffer(body, np.uint8).reshape(shape)


def _own(place: Path, split: str, classes: int) -> _Arrays:
    if not place.exists():
        raise DataError(f"{place} does not exist; {OWN}")
    if place.is_dir():
        home = _home(place)
        return _idx_pair(home, split, "put it there") if home else _pictures(place, split, classes)
    if place.suffix.lower() == ".npz":
        return _npz(place, split)
    raise DataError(f"{place} is a file of an unknown type; {OWN}")


def _npz(file: Path, split: str) -> _Arrays:
    try:
        arrays = read_arrays(file, LIMIT)
    except DataError as error:
        raise DataError(f"{error}; save plain arrays with numpy.savez") from error
    held = {kind: [pair for pair in pairs if set(pair) <= set(arrays)] for kind, pairs in ARRAYS.items()}
    whole = not held["train"] and not held["test"]
    pairs = held["none" if whole else split]
    if not pairs:
        wanted = " or ".join(" and ".join(pair) for pair in (*ARRAYS[split], *ARRAYS["none"]))
        names = ", ".join(sorted(arrays)) or "no arrays"
        raise DataError(f"{file} has no {split} split: it holds {names[:200]}, but needs {wanted}")
    x_name, y_name = pairs[0]
    return _Arrays(arrays[x_name], arrays[y_name], f"{file}: {x_name}", f"{file}: {y_name}", not whole)


def _pictures(folder: Path, split: str, classes: int) -> _Arrays:
    root = folder / "mnist" if (folder / "mnist").is_dir() else folder
    parts = [name for name in FILES if (root / name).is_dir()]
    if parts and split not in parts:
        raise DataError(f"{root} holds {parts[0]}/ but no {split}/; add it, or use neither")
    top = root / split if parts else root
    folders = {inner.name: inner for inner in top.iterdir() if inner.is_dir() and not inner.name.startswith(".")}
    if not folders:
        raise DataError(f"{top} holds neither idx files nor class folders; {OWN}")
    if odd := sorted(folders.keys() - {str(label) for label in range(classes)}):
        raise DataError(f"{folders[odd[0]]} is not named by a label, 0 to {classes - 1}; rename or move it")
    x: list[np.ndarray] = []
    y: list[int] = []
    names: list[str] = []
    for label in sorted(map(int, folders)):
        inside = sorted(folders[str(label)].iterdir(), key=lambda file: file.name)
        files = [file for file in inside if file.suffix.lower() in PICTURES and not file.name.startswith(".")]
        if not files:
            raise DataError(f"{folders[str(label)]} holds no images ({' '.join(PICTURES)}); fill it or remove it")
        for file in files:
            x.append(_grey(file))
            y.append(label)
            names.append(f"{label}/{file.name}")
            if len(x) * x[0].size > LIMIT:
                raise DataError(f"{top} holds more than {LIMIT:,} pixels; use smaller or fewer images")
            if x[-1].shape != x[0].shape:
                raise DataError(
                    f"{file} is {x[-1].shape} but earlier images are {x[0].shape}; make all images the same size"
                )
    return _Arrays(np.stack(x), np.array(y), str(top), str(top), bool(parts), tuple(names))


def _grey(file: Path) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("image files need Pillow; install it with: pip install pillow") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with open_regular(file, PICTURE) as raw, Image.open(raw, formats=FORMATS) as image:
                if math.prod(image.size) > PICTURE:
                    raise DataError(f"{file} has {image.size[0]} × {image.size[1]} pixels; make it smaller")
                deep, full = image.mode[0] in "IF", image.convert("RGBA")
    except DataError:
        raise
    except Exception as error:  # Pillow may raise anything
        raise DataError(f"{file} cannot be read as an image; it is damaged or has another format") from error
    if deep or full.getchannel("A").getextrema() != (255, 255):  # Pillow would clip at 255 and drop transparency
        raise DataError(f"{file} has transparent pixels or more than 8 bits per pixel; save it as 8-bit greyscale")
    return np.asarray(full.convert("L"))


def _checked(arrays: _Arrays, classes: int) -> Images:
    x, y, x_from, y_from = arrays[:4]
    if x.ndim == 4 and x.shape[1] != 1 and x.shape[3] == 1:
        x = x.transpose(0, 3, 1, 2)
    x = x[:, None] if x.ndim == 3 else x
    scale = {"u": 1, "i": 1, "f": 255, "b": 255}.get(x.dtype.kind)
    if x.ndim != 4 or x.shape[1] != 1 or x.size == 0 or scale is None:
        raise DataError(f"{x_from} is {x.dtype} {arrays.x.shape}; images must be greyscale numbers (N, H, W), N ≥ 1")
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"{y_from} is {y.dtype} {y.shape}; labels must be integers (N,), one per image")
    if len(x) != len(y):
        raise DataError(f"{x_from} has {len(x)} images and {y_from} {len(y)} labels; they must have the same number")
    if not (x.min() >= 0 and x.max() <= 255 // scale):  # NaN is neither
        raise DataError(f"{x_from} has {x.dtype} values outside 0 to {255 // scale}; scale them, or save uint8")
    outside = (y < 0) | (y >= classes)
    if outside.any():
        first = int(outside.argmax())
        raise DataError(
            f"{y_from}: label {y[first]} at index {first} is outside 0 to {classes - 1}; correct it, or set classes"
        )
    pixels = np.empty(x.shape, np.uint8)
    for rows in (slice(i, i + TOGETHER) for i in range(0, len(x), TOGETHER)):
        pixels[rows] = x[rows] if scale == 1 else np.rint(x[rows].astype(np.float64) * scale)
    return Images(torch.from_numpy(pixels), torch.from_numpy(y.astype(np.int64)))


def _part(images: Images, split: str, place: Path) -> Images:
    """Return one split of all data: every tenth image, in order of the labels, is a test image."""
    # Not in file order, because labels may repeat with a period of ten.
    rank = images.y.argsort(stable=True).argsort()
    chosen = (rank % TENTH == TENTH - 1) == (split == "test")
    if not chosen.any():
        raise DataError(
            f"{place} has {len(rank)} images, too few for a test split; give at least {TENTH} images, or a test split"
        )
    return Images(images.x[chosen], images.y[chosen])
