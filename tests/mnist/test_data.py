"""MNIST and other labelled images: search, download, checks, and one-line errors."""

import gzip
import hashlib
import http.client
import io
import os
import struct
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch

from fmwc.errors import DataError, UsageError
from fmwc.mnist import data as mnist

SPLITS = ("train", "test")
COUNT = 60
REAL = [Path(os.environ.get("FMWC_DATA") or "nowhere"), Path(__file__).parents[3] / "shared" / "data" / "mnist"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, no data given, and no network."""
    monkeypatch.delenv("FMWC_DATA", raising=False)
    monkeypatch.delenv("FMWC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mnist, "urlopen", Mirrors({}))
    return tmp_path / "cache" / "fmwc" / "mnist"


@pytest.fixture(scope="module")
def digits():
    """Real handwritten digits, 8×8."""
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    x = np.rint(bunch.images[:COUNT] * (255 / 16)).astype(np.uint8)
    return x, bunch.target[:COUNT].astype(np.int64)


@pytest.fixture
def folder(tmp_path, digits):
    """A user's data set in idx files: two thirds to train, one third to test."""
    x, y = digits
    for split, part in zip(SPLITS, (slice(None, 40), slice(40, None)), strict=True):
        write_pair(tmp_path / "data", split, x[part], y[part])
    return tmp_path / "data"


@pytest.fixture
def official(folder, monkeypatch):
    """Replace MNIST by these few digits, with their checksums, packed and unpacked."""
    for name in [name for pair in mnist.FILES.values() for name in pair]:
        packed = (folder / f"{name}.gz").read_bytes()
        monkeypatch.setitem(mnist.SUMS, f"{name}.gz", "sha256:" + hashlib.sha256(packed).hexdigest())
        monkeypatch.setitem(
            mnist.SUMS, name, "md5:" + hashlib.md5(gzip.decompress(packed), usedforsecurity=False).hexdigest()
        )
    return folder


class Mirrors:
    """A stand-in for urlopen: returns bytes, raises an exception, or creates a stream, by address."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def __call__(self, url, timeout):
        assert timeout > 0
        self.asked.append(url)
        answer = self.answers.get(url, urllib.error.URLError("no network in tests"))
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer) if isinstance(answer, bytes) else answer()


class Hangup(io.BytesIO):
    def read(self, *args):
        raise http.client.IncompleteRead(b"some")


def idx(array, *, magic=None):
    magic = 0x800 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.astype(np.uint8).tobytes()


def write_pair(folder, split, x, y, *, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(mnist.FILES[split], (x, y), strict=True):
        content = gzip.compress(idx(array), mtime=0) if packed else idx(array)
        (folder / f"{name}{'.gz' * packed}").write_bytes(content)


def write_pictures(folder, x, y, kind="png", **options):
    image = pytest.importorskip("PIL.Image")
    for at, (pixels, label) in enumerate(zip(x, y, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels).save(folder / str(label) / f"{at:03}.{kind}", **options)
    return folder


def by_label(x, y):
    order = np.argsort(y, kind="stable")
    return x[order], y[order]


def refused(match, *args, **options):
    with pytest.raises(DataError, match=match) as raised:
        mnist.load(*args, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def same(images, x, y):
    assert images.x.dtype == torch.uint8
    assert images.x.is_contiguous()
    assert images.y.dtype == torch.int64
    assert torch.equal(images.x, torch.from_numpy(np.ascontiguousarray(x))[:, None])
    assert torch.equal(images.y, torch.from_numpy(np.ascontiguousarray(y)))
    return True


# The real data


@pytest.mark.parametrize(
    ("split", "per_digit", "first", "mean", "std"),
    [
        ("test", [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009], "7210414959", 0.132515, 0.310480),
    ],
)
def test_statistics_of_mnist(split, per_digit, first, mean, std):
    here = next((place for place in REAL if mnist._home(place)), None)
    if here is None:
        pytest.skip("MNIST itself is not on this machine: set FMWC_DATA to its folder")
    images = mnist.load(here, split)
    assert images.x.shape == (sum(per_digit), 1, 28, 28)
    assert images.y.bincount().tolist() == per_digit
    assert "".join(map(str, images.y[:10].tolist())) == first
    pixels = mnist.unit(images.x)
    assert pixels.dtype == torch.float32
    assert (float(pixels.min()), float(pixels.max())) == (0, 1)
    assert pixels.double().mean().item() == pytest.approx(mean, abs=1e-6)
    assert pixels.double().std(correction=0).item() == pytest.approx(std, abs=1e-6)
    if split == "test":
        assert len(images.x.unique(dim=0)) == len(images.x)


# Where it is found


@pytest.mark.parametrize(("how", "packed"), [("path", True), ("variable", False), ("cache", True)])
@pytest.mark.parametrize("place", mnist.PLACES)
def test_mnist_is_found(official, digits, cache, tmp_path, monkeypatch, packed, place, how):
    x, y = digits
    root = cache if how == "cache" else tmp_path / "root"
    write_pair(root / place, "train", x[:40], y[:40], packed=packed)
    write_pair(root / place, "test", x[40:], y[40:], packed=packed)
    if how == "variable":
        monkeypatch.setenv("FMWC_DATA", str(root))
    path = {"path": root, "text": str(root)}.get(how)
    assert same(mnist.load(path), x[:40], y[:40])
    assert same(mnist.load(path, "test"), x[40:], y[40:])
    assert mnist.urlopen.asked == []


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"])
@pytest.mark.parametrize(
    "fault", [lambda b: b[:-9], lambda b: b"", lambda b: b[:30] + b"!" + b[31:], lambda b: b + b"!"]
)
def test_a_wrong_checksum(official, name, fault):
    (official / name).write_bytes(fault((official / name).read_bytes()))
    message = refused("damaged", official)
    assert str(official / name) in message


# Download


def served(official, mirror):
    return {f"{mirror}{file.name}": file.read_bytes() for file in official.iterdir()}


def test_download(official, cache, digits, monkeypatch):
    mirrors = Mirrors(served(official, mnist.MIRRORS[0]))
    monkeypatch.setattr(mnist, "urlopen", mirrors)
    assert same(mnist.load(), digits[0][:40], digits[1][:40])
    assert mirrors.asked == [f"{mnist.MIRRORS[0]}{name}.gz" for name in mnist.FILES["train"]]
    assert sorted(os.listdir(cache)) == sorted(f"{name}.gz" for name in mnist.FILES["train"])
    mnist.load()
    assert len(mirrors.asked) == 2
    assert len(mnist.load(split="test").x) == 20
    assert len(mirrors.asked) == 4


@pytest.mark.parametrize(
    "failure",
    [
        urllib.error.URLError("no route"),
        Hangup,
        b"<html>please log in</html>",
    ],
    ids=lambda f: type(f).__name__,
)
def test_the_next_mirror_is_tried(official, digits, monkeypatch, failure):
    names = [f"{name}.gz" for name in mnist.FILES["train"]]
    answers = {mnist.MIRRORS[0] + name: failure for name in names} | served(official, mnist.MIRRORS[1])
    mirrors = Mirrors(answers)
    monkeypatch.setattr(mnist, "urlopen", mirrors)
    assert same(mnist.load(), digits[0][:40], digits[1][:40])
    assert mirrors.asked == [mirror + name for name in names for mirror in mnist.MIRRORS]


# Idx files of the user


@pytest.mark.parametrize("packed", [True, False])
def test_own_idx(tmp_path, digits, packed):
    x, y = digits
    write_pair(tmp_path / mnist.PLACES[0], "train", x, y, packed=packed)
    assert same(mnist.load(tmp_path, own=True), x, y)
    refused("t10k", tmp_path, "test", own=True)


# Npz files


@pytest.mark.parametrize(
    "names",
    [("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels")],
)
def test_npz_with_splits(tmp_path, digits, names):
    x, y = digits
    file = tmp_path / "own.NPZ"
    with file.open("wb") as stream:
        np.savez_compressed(stream, **dict(zip(names, (x[:40], y[:40], x[40:], y[40:]), strict=True)), extra=y)
    assert same(mnist.load(file, own=True), x[:40], y[:40])
    assert same(mnist.load(file, "test", own=True), x[40:], y[40:])


@pytest.mark.parametrize("names", [("x", "y"), ("images", "labels")])
def test_npz_without_a_split(tmp_path, digits, names):
    x, y = digits
    np.savez(tmp_path / "own.npz", **dict(zip(names, digits, strict=True)))
    train, test = (mnist.load(tmp_path / "own.npz", split, own=True) for split in SPLITS)
    ranked = np.argsort(y, kind="stable")
    chosen = np.zeros(COUNT, bool)
    chosen[ranked[9::10]] = True
    assert same(test, x[chosen], y[chosen])
    assert same(train, x[~chosen], y[~chosen])


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        (lambda x: x / 254, None, "outside"),
        (lambda x: x.astype(str), None, "greyscale"),
        (lambda x: np.stack([x] * 3, -1), None, "greyscale"),
        (None, lambda y: y[:, None], "integers"),
        (None, lambda y: y / 1, "float64"),
        (None, lambda y: y - 1, "outside"),
    ],
)
def test_bad_arrays(tmp_path, digits, x, y, match):
    keep = lambda a: a  # noqa: E731
    np.savez(tmp_path / "own.npz", x_train=(x or keep)(digits[0]), y_train=(y or keep)(digits[1]))
    assert "own.npz" in refused(match, tmp_path / "own.npz", own=True)


@pytest.mark.parametrize("which", ["x_train", "y_train"])
def test_pickle_is_refused(tmp_path, digits, which):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    arrays = dict(zip(("x_train", "y_train"), digits, strict=True))
    arrays[which] = np.array([Trap()] * COUNT, dtype=object)
    np.savez(tmp_path / "own.npz", **arrays)
    refused("objects", tmp_path / "own.npz", own=True)
    assert not (tmp_path / "sprung").exists()


# Folders of images


@pytest.mark.parametrize("kind", ["png", "PNG"])
def test_pictures_with_splits(tmp_path, digits, kind):
    x, y = digits
    write_pictures(tmp_path / "train", x[:40], y[:40], kind)
    write_pictures(tmp_path / "test", x[40:], y[40:], kind)
    assert same(mnist.load(tmp_path, own=True), *by_label(x[:40], y[:40]))
    assert same(mnist.load(tmp_path, "test", own=True), *by_label(x[40:], y[40:]))


# Pixels


def test_unit():
    x = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    assert mnist.unit(x).dtype == torch.float32
    assert torch.equal(mnist.unit(x), x / 255)
    with pytest.raises(UsageError, match="uint8"):
        mnist.unit(mnist.unit(x))
