"""MNIST and other labelled images: search, download, checks, and one-line errors."""

import gzip
import hashlib
import http.client
import io
import os
import struct
import sys
import tracemalloc
import urllib.error
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fmwc.errors import DataError, UnknownNameError, UsageError
from fmwc.mnist import data as mnist

SPLITS = ("train", "test")
COUNT = 60
REAL = [Path(os.environ.get("FMWC_DATA") or "nowhere"), Path(__file__).parents[3] / "shared" / "data" / "mnist"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, no data given, and no network."""
    monkeypatch.delenv("FMWC_DATA", raising=False)
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
        ("train", [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], "5041921314", 0.130660, 0.308108),
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


def test_every_file_has_a_checksum():
    names = [name for pair in mnist.FILES.values() for name in pair]
    assert set(mnist.SUMS) == {*names, *(f"{name}.gz" for name in names)}
    lengths = {"sha256": 64, "md5": 32}
    for name, total in mnist.SUMS.items():
        kind, value = total.split(":")
        assert kind == ("sha256" if name.endswith(".gz") else "md5")
        assert len(value) == lengths[kind]


# Where it is found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", mnist.PLACES)
@pytest.mark.parametrize("how", ["path", "text", "variable", "cache"])
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


def test_the_path_comes_before_the_variable_and_the_variable_before_the_cache(official, tmp_path, monkeypatch):
    monkeypatch.setenv("FMWC_DATA", str(tmp_path / "nowhere"))
    assert len(mnist.load(official).x) == 40
    assert "nowhere" in refused("is not a folder and holds no train-images")
    monkeypatch.setenv("FMWC_DATA", "")  # the same as unset
    refused("could not be downloaded")


def test_home_folder_is_expanded(official, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert len(mnist.load("~/data").x) == 40
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(tmp_path / ".cache" / "fmwc" / "mnist") in refused("could not be downloaded")


def test_only_the_requested_split_is_needed(official):
    for name in mnist.FILES["test"]:
        (official / f"{name}.gz").unlink()
    assert len(mnist.load(official, "train").x) == 40
    message = refused(r"t10k-images-idx3-ubyte\.gz", official, "test")
    assert str(official) in message
    assert "omit --data" in message
    for said in (*mnist.MIRRORS, *(f"{name}.gz" for pair in mnist.FILES.values() for name in pair)):
        assert said in message
    assert mnist.urlopen.asked == []


@pytest.mark.parametrize("download", [True, False])
def test_nothing_is_downloaded_to_a_given_path(tmp_path, download):
    for place in (tmp_path / "nowhere", tmp_path):
        assert str(place) in refused("holds no train-images", place, download=download)
    assert mnist.urlopen.asked == []
    assert not (tmp_path / "nowhere").exists()


def test_download_can_be_switched_off(cache):
    assert str(cache) in refused("download=True", download=False)
    assert mnist.urlopen.asked == []


def test_mnist_is_not_read_from_a_file(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"")
    refused("is not a folder.*--own", tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"])
@pytest.mark.parametrize(
    "fault", [lambda b: b[:-9], lambda b: b"", lambda b: b[:30] + b"!" + b[31:], lambda b: b + b"!"]
)
def test_a_wrong_checksum(official, name, fault):
    (official / name).write_bytes(fault((official / name).read_bytes()))
    message = refused("truncated, damaged or from another data set.*own=True.*--own", official)
    assert str(official / name) in message


def test_a_wrong_checksum_of_an_unpacked_file(official, digits):
    for name in mnist.FILES["train"]:
        (official / f"{name}.gz").unlink()
    write_pair(official, "train", digits[0][1:], digits[1][1:], packed=False)
    refused(r"train-images-idx3-ubyte is truncated.*\(md5 differs\)", official)


def test_own_data_needs_the_option_own(folder):
    refused("own=True", folder)
    assert len(mnist.load(folder, own=True).x) == 40


@pytest.mark.parametrize("split", ["", "Train", "validation", "none"])
def test_an_unknown_split(folder, split):
    with pytest.raises(UnknownNameError, match="Known: test, train"):
        mnist.load(folder, split, own=True)


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
        urllib.error.HTTPError("", 403, "Forbidden", None, None),
        TimeoutError("timed out"),
        http.client.RemoteDisconnected("gone"),
        http.client.BadStatusLine("?"),
        Hangup,
        b"<html>please log in</html>",
        b"",
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


def test_a_wrong_checksum_everywhere_writes_nothing(official, cache, monkeypatch):
    wrong = {mirror + name.name: name.read_bytes()[:-1] for mirror in mnist.MIRRORS for name in official.iterdir()}
    monkeypatch.setattr(mnist, "urlopen", Mirrors(wrong))
    message = refused("could not be downloaded.*wrong checksum.*wrong checksum")
    for said in (str(cache), "--data", "FMWC_DATA", *mnist.MIRRORS, *(n for n in mnist.SUMS if n.endswith(".gz"))):
        assert said in message
    assert not cache.exists()


def test_download_without_a_network(cache):
    assert "no network in tests" in refused("could not be downloaded")
    assert mnist.urlopen.asked == [f"{mirror}train-images-idx3-ubyte.gz" for mirror in mnist.MIRRORS]
    assert not cache.exists()


def test_downloaded_files_are_kept_if_the_next_download_fails(official, cache, monkeypatch):
    answers = served(official, mnist.MIRRORS[0])
    labels = f"{mnist.MIRRORS[0]}{mnist.FILES['train'][1]}.gz"
    monkeypatch.setattr(mnist, "urlopen", Mirrors({k: v for k, v in answers.items() if k != labels}))
    refused("train-labels-idx1-ubyte.gz could not be downloaded")
    assert os.listdir(cache) == ["train-images-idx3-ubyte.gz"]
    monkeypatch.setattr(mnist, "urlopen", Mirrors({labels: answers[labels]}))
    assert len(mnist.load().x) == 40


def test_a_cache_that_cannot_be_written(official, cache, monkeypatch):
    monkeypatch.setattr(mnist, "urlopen", Mirrors(served(official, mnist.MIRRORS[0])))
    cache.parent.parent.mkdir()
    cache.parent.write_text("in the way")
    refused("cannot be read or written")
    assert cache.parent.read_text() == "in the way"


# Idx files of the user


@pytest.mark.parametrize("place", mnist.PLACES)
@pytest.mark.parametrize("packed", [True, False])
def test_own_idx(tmp_path, digits, place, packed):
    x, y = digits
    write_pair(tmp_path / place, "train", x, y, packed=packed)
    assert same(mnist.load(tmp_path, own=True), x, y)
    refused(r"holds no t10k-images-idx3-ubyte\.gz", tmp_path, "test", own=True)


IMAGES, LABELS = mnist.FILES["train"]


def test_idx_files_of_two_places_are_not_mixed(folder):
    (folder / "mnist").mkdir()
    (folder / f"{LABELS}.gz").rename(folder / "mnist" / f"{LABELS}.gz")
    refused(rf"holds no {LABELS}", folder, own=True)


@pytest.mark.parametrize("name", [IMAGES, LABELS])
@pytest.mark.parametrize("keep", [0, 5, 15, -20, -1])
def test_a_truncated_gz(folder, name, keep):
    file = folder / f"{name}.gz"
    file.write_bytes(file.read_bytes()[:keep])
    assert str(file) in refused("truncated", folder, own=True)


def test_a_damaged_gz(folder):
    file = folder / f"{IMAGES}.gz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    refused("damaged", folder, own=True)
    file.write_bytes(b"this is not a gzip file")
    refused("not a gzip file", folder, own=True)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (lambda b: b[:-1], r"declares 2560 bytes after its header but holds 2559;"),
        (lambda b: b[:16], "holds 0;"),
        (lambda b: b + b"\0", "declares 2560 bytes after its header but holds more"),
        (lambda b: b[:9], "truncated, or not an idx file of images"),
        (lambda b: b"", "truncated, or not an idx file of images"),
        (lambda b: b"\0\0\x08\x01" + b[4:], "starts with 0x00000801.*not an idx file of images"),
        (lambda b: b"\0\0\x0d\x03" + b[4:], "starts with 0x00000d03"),
        (lambda b: b[:4] + b"\xff" * 12 + b[16:], f"declares {(2**32 - 1) ** 3:,} bytes"),
        (lambda b: b[:4] + bytes(4) + b[8:], "declares 0 bytes"),
        (lambda b: b[:4] + bytes(4) + b[8:16], r"\(0, 8, 8\).*N ≥ 1"),
    ],
)
def test_a_bad_idx_body(folder, packed, fault, match):
    content = fault(gzip.decompress((folder / f"{IMAGES}.gz").read_bytes()))
    (folder / f"{IMAGES}.gz").unlink()
    file = folder / (f"{IMAGES}.gz" if packed else IMAGES)
    file.write_bytes(gzip.compress(content) if packed else content)
    assert str(file) in refused(match, folder, own=True)


def test_images_and_labels_swapped(folder):
    images, labels = folder / f"{IMAGES}.gz", folder / f"{LABELS}.gz"
    images.rename(folder / "x")
    labels.rename(images)
    (folder / "x").rename(labels)
    refused("not an idx file of images", folder, own=True)


def test_gzip_bombs_are_not_unpacked(folder, digits):
    bomb = gzip.compress(idx(digits[0]) + bytes(1 << 26))
    assert len(bomb) < 1 << 17
    (folder / f"{IMAGES}.gz").write_bytes(bomb)
    tracemalloc.start()
    try:
        refused("holds more", folder, own=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_numbers_of_images_and_labels_must_agree(folder, digits):
    write_pair(folder, "train", digits[0][:40], digits[1][:39])
    refused(rf"{IMAGES}\.gz has 40 images and .*{LABELS}\.gz 39 labels", folder, own=True)


def test_labels_outside_the_classes_are_refused(folder, digits):
    y = digits[1][:40].copy()
    y[7] = 12
    write_pair(folder, "train", digits[0][:40], y)
    assert f"{LABELS}.gz" in refused("label 12 at index 7 is outside 0 to 9", folder, own=True)
    assert len(mnist.load(folder, own=True, classes=13).x) == 40
    refused("outside 0 to 4", folder, "test", own=True, classes=5)
    with pytest.raises(UsageError, match="at least 1"):
        mnist.load(folder, own=True, classes=0)


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


def test_npz_from_the_environment_variable(tmp_path, digits, monkeypatch):
    np.savez(tmp_path / "own.npz", x_train=digits[0], y_train=digits[1])
    monkeypatch.setenv("FMWC_DATA", str(tmp_path / "own.npz"))
    assert same(mnist.load(own=True), *digits)


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


def test_a_derived_split_has_every_class(tmp_path, digits):
    """Labels that cycle through 0 to 9, or come in blocks: in both cases, the test split has all classes."""
    for y in (np.arange(1000) % 10, np.arange(1000) // 100):
        np.savez(tmp_path / "own.npz", x=digits[0][np.zeros(1000, int)], y=y)
        for split, count in zip(SPLITS, (90, 10), strict=True):
            assert mnist.load(tmp_path / "own.npz", split, own=True).y.bincount().tolist() == [count] * 10


def test_too_few_for_a_split(tmp_path, digits):
    np.savez(tmp_path / "own.npz", x=digits[0][:9], y=digits[1][:9])
    assert len(mnist.load(tmp_path / "own.npz", own=True).x) == 9
    refused("9 images, too few for a test split", tmp_path / "own.npz", "test", own=True)


@pytest.mark.parametrize("shape", [(COUNT, 8, 8), (COUNT, 1, 8, 8), (COUNT, 8, 8, 1)])
@pytest.mark.parametrize("dtype", ["uint8", "int64", ">i2", "float16", "float32", ">f8"])
def test_npz_shapes_and_types(tmp_path, digits, shape, dtype):
    x, y = digits
    own = (x / 255 if "f" in dtype else x).astype(dtype).reshape(shape)
    np.savez(tmp_path / "own.npz", x_train=np.asfortranarray(own), y_train=y.astype(">u2"))
    assert same(mnist.load(tmp_path / "own.npz", own=True), x, y)


def test_npz_of_booleans(tmp_path, digits):
    x, y = digits
    np.savez(tmp_path / "own.npz", x_train=x > 99, y_train=y)
    assert same(mnist.load(tmp_path / "own.npz", own=True), (x > 99) * np.uint8(255), y)


def test_images_need_not_be_square(tmp_path, digits):
    np.savez(tmp_path / "own.npz", x_train=digits[0][:, :5], y_train=digits[1])
    assert mnist.load(tmp_path / "own.npz", own=True).x.shape == (COUNT, 1, 5, 8)


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        (lambda x: x / 254, None, "x_train has float64 values outside 0 to 1;"),
        (lambda x: x / 255 - 0.01, None, "outside 0 to 1;"),
        (lambda x: np.where(x > 200, np.nan, x / 255), None, "outside 0 to 1;"),
        (lambda x: np.where(x > 200, np.inf, x / 255), None, "outside 0 to 1;"),
        (lambda x: x.astype(int) + 1, None, "int64 values outside 0 to 255;"),
        (lambda x: x.astype(int) - 1, None, "outside 0 to 255;"),
        (lambda x: x.astype(complex), None, "complex128"),
        (lambda x: x.astype(str), None, "images must be greyscale numbers"),
        (lambda x: x.reshape(COUNT, -1), None, rf"\({COUNT}, 64\).*images must be"),
        (lambda x: np.stack([x] * 3, -1), None, "greyscale"),
        (lambda x: x[:, :0], None, "images must be"),
        (lambda x: x[:0], lambda y: y[:0], "images must be"),
        (lambda x: x[0, 0, 0], None, "images must be"),
        (lambda x: x[1:], None, "59 images and .*y_train 60 labels"),
        (None, lambda y: y[:, None], r"labels must be integers \(N,\)"),
        (None, lambda y: y / 1, "y_train is float64"),
        (None, lambda y: np.eye(10, dtype=int)[y], "labels must be integers"),
        (None, lambda y: y - 1, "y_train: label -1 at index 0 is outside 0 to 9"),
        (None, lambda y: y.astype(np.uint64) + np.uint64(2**63), f"label {2**63} at index 0"),
    ],
)
def test_bad_arrays(tmp_path, digits, x, y, match):
    keep = lambda a: a  # noqa: E731
    np.savez(tmp_path / "own.npz", x_train=(x or keep)(digits[0]), y_train=(y or keep)(digits[1]))
    assert "own.npz" in refused(match, tmp_path / "own.npz", own=True)


def test_npz_without_the_arrays(tmp_path, digits):
    x, y = digits
    file = tmp_path / "own.npz"
    np.savez(file, x_train=x, y_train=y)
    refused("has no test split: it holds x_train, y_train, but needs x_test and y_test or", file, "test", own=True)
    np.savez(file, pixels=x, digit=y)
    refused("has no train split: it holds digit, pixels", file, own=True)
    np.savez(file, x_train=x)
    refused("it holds x_train, but needs", file, own=True)
    np.savez(file)
    refused("no arrays", file, own=True)


@pytest.mark.parametrize("which", ["x_train", "y_train"])
def test_pickle_is_refused(tmp_path, digits, which):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    arrays = dict(zip(("x_train", "y_train"), digits, strict=True))
    arrays[which] = np.array([Trap()] * COUNT, dtype=object)
    np.savez(tmp_path / "own.npz", **arrays)
    refused("Python objects", tmp_path / "own.npz", own=True)
    assert not (tmp_path / "sprung").exists()


def test_damaged_npz(tmp_path, digits):
    file = tmp_path / "own.npz"
    np.savez_compressed(file, x_train=digits[0], y_train=digits[1])
    whole = file.read_bytes()
    npy = io.BytesIO()
    np.save(npy, digits[0])
    middle = bytearray(whole)
    middle[200:300] = bytes(100)
    for content in (b"", whole[:-30], whole[: len(whole) // 2], bytes(middle), npy.getvalue(), b"hello"):
        file.write_bytes(content)
        refused(r"not an \.npy or \.npz file, or is truncated|no train split", file, own=True)


# Folders of images


@pytest.mark.parametrize("kind", ["png", "bmp", "gif", "tiff", "tif", "PNG"])
def test_pictures_with_splits(tmp_path, digits, kind):
    x, y = digits
    write_pictures(tmp_path / "train", x[:40], y[:40], kind)
    write_pictures(tmp_path / "test", x[40:], y[40:], kind)
    assert same(mnist.load(tmp_path, own=True), *by_label(x[:40], y[:40]))
    assert same(mnist.load(tmp_path, "test", own=True), *by_label(x[40:], y[40:]))


@pytest.mark.parametrize(("kind", "options"), [("webp", {"lossless": True}), ("jpg", {"quality": 100}), ("jpeg", {})])
def test_compressed_pictures(tmp_path, digits, kind, options):
    x, y = by_label(*digits)
    images = mnist.load(write_pictures(tmp_path / "train", x, y, kind, **options).parent, own=True)
    assert torch.equal(images.y, torch.from_numpy(y))
    assert np.abs(images.x[:, 0].numpy().astype(int) - x).mean() < 6


def test_pictures_without_a_split(tmp_path, digits):
    x, y = by_label(*digits)
    write_pictures(tmp_path / "mnist", x, y)  # as in FMWC_DATA
    (tmp_path / "mnist" / "3" / ".DS_Store").write_text("")
    (tmp_path / "mnist" / "3" / "._000.png").write_text("")
    (tmp_path / "mnist" / "README.txt").write_text("about")
    test = np.arange(COUNT) % 10 == 9
    for path in (tmp_path, tmp_path / "mnist"):
        assert same(mnist.load(path, "test", own=True), x[test], y[test])
        assert same(mnist.load(path, own=True), x[~test], y[~test])


def test_labels_are_sorted_as_numbers(tmp_path, digits):
    y = np.arange(COUNT) // 5
    write_pictures(tmp_path / "train", digits[0], y)
    assert same(mnist.load(tmp_path, own=True, classes=12), digits[0], y)


def test_colour_is_read_as_grey(tmp_path, digits):
    x, y = by_label(*digits)
    opaque = np.stack([x, x, x, np.full_like(x, 255)], -1)
    for pixels in (np.stack([x] * 3, -1), opaque):
        write_pictures(tmp_path / "train", pixels, y)
        assert same(mnist.load(tmp_path, own=True), x, y)


def test_transparent_or_deep_pictures(tmp_path, digits):
    x, y = by_label(*digits)
    ink_as_alpha = np.stack([0 * x, 0 * x, 0 * x, x], -1)
    for pixels in (ink_as_alpha, x.astype(np.uint16) * 257):
        write_pictures(tmp_path / "train", pixels, y)
        assert "000.png" in refused("transparent pixels or more than 8 bits", tmp_path, own=True)


def test_a_huge_picture_is_refused(tmp_path, digits, monkeypatch):
    write_pictures(tmp_path / "train", *digits)
    image = pytest.importorskip("PIL.Image")
    for limit in (40, 10):  # Pillow warns above this size, and raises above twice this size
        monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", limit)
        refused("cannot be read as an image", tmp_path, own=True)


def test_pictures_of_different_sizes(tmp_path, digits):
    write_pictures(tmp_path / "train", *by_label(*digits))
    image = pytest.importorskip("PIL.Image")
    for at in (20, 30):
        odd = next((tmp_path / "train").glob(f"*/{at:03}.png"))
        image.fromarray(digits[0][0][:, :7]).save(odd)
    assert f"{os.sep}020.png is (8, 7)" in refused(
        r"earlier images are \(8, 8\); make all images the same size", tmp_path, own=True
    )


@pytest.mark.parametrize("fault", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b"no image at all"])
def test_an_unreadable_picture(tmp_path, digits, fault):
    write_pictures(tmp_path, *by_label(*digits))
    file = next(tmp_path.glob("*/033.png"))
    file.write_bytes(fault(file.read_bytes()))
    assert str(file) in refused("cannot be read as an image", tmp_path, own=True)


def test_bad_folders(tmp_path, digits):
    refused("holds neither idx files nor class folders", tmp_path, own=True)
    (tmp_path / "loose.png").write_bytes(b"")
    refused("holds neither", tmp_path, own=True)
    write_pictures(tmp_path, *digits)
    (tmp_path / "4" / "note.txt").write_text("not an image")
    for file in (tmp_path / "4").glob("*.png"):
        file.unlink()
    assert str(tmp_path / "4") in refused(r"holds no images \(\.bmp", tmp_path, own=True)
    for name in ("cats", "10", "01", "-1", "²"):
        (tmp_path / name).mkdir()
        assert str(tmp_path / name) in refused("is not named by a label, 0 to 9", tmp_path, own=True)
        (tmp_path / name).rmdir()
    (tmp_path / "train").mkdir()
    refused("holds train/ but no test/", tmp_path, "test", own=True)
    refused("holds neither", tmp_path, own=True)


def test_images_without_pillow(tmp_path, digits, monkeypatch):
    write_pictures(tmp_path, *digits)
    monkeypatch.setitem(sys.modules, "PIL", None)
    refused("pip install pillow", tmp_path, own=True)


# Neither


def test_own_data_must_be_there_and_of_a_known_type(tmp_path):
    refused("give the path of your own data", own=True)
    refused("nowhere does not exist", tmp_path / "nowhere", own=True)
    refused("nowhere.npz does not exist", tmp_path / "nowhere.npz", own=True)
    for name in ("a.csv", "a.npy", "a"):
        (tmp_path / name).write_text("0,1,2")
        refused(rf"{name} is a file of an unknown type.*\.npz", tmp_path / name, own=True)


def test_a_file_that_cannot_be_opened(folder, monkeypatch):
    def fail(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(mnist.gzip, "open", fail)
    refused("cannot be read or written .Permission denied", folder, own=True)


def test_small_files_that_unpack_to_gigabytes_are_refused(tmp_path):
    tracemalloc.start()
    try:
        with zipfile.ZipFile(tmp_path / "own.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("x_train", "y_train"):
                with archive.open(f"{name}.npy", "w") as member:
                    shape = {"descr": "|u1", "fortran_order": False, "shape": (1 << 18, 28, 28)}
                    np.lib.format.write_array_header_1_0(member, shape)
                    for _ in range(28 * 28 >> 2):
                        member.write(bytes(1 << 20))
        assert (tmp_path / "own.npz").stat().st_size < 1 << 20
        refused("unpacks to .* bytes; at most", tmp_path / "own.npz", own=True)
        (tmp_path / f"{LABELS}.gz").write_bytes(gzip.compress(struct.pack(">II", 0x801, 4)))
        (tmp_path / f"{IMAGES}.gz").write_bytes(gzip.compress(struct.pack(">IIII", 0x803, 1 << 22, 28, 28)))
        refused("declares 3,288,334,336 bytes", tmp_path, own=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", ["device", "fifo"])
def test_devices_and_pipes_are_refused(folder, what):
    file = folder / f"{IMAGES}.gz"
    file.unlink()
    os.symlink("/dev/zero", file) if what == "device" else os.mkfifo(file)
    refused(f"holds no {IMAGES}", folder, own=True)
    file = folder / "own.npz"
    os.symlink("/dev/zero", file) if what == "device" else os.mkfifo(file)
    refused("is a device, pipe or socket, not a file", file, own=True)


def test_a_picture_of_too_many_pixels(tmp_path):
    from PIL import Image

    (tmp_path / "0").mkdir()
    Image.new("L", (8192, 4096)).save(tmp_path / "0" / "a.png")
    refused("8192 × 4096 pixels", tmp_path, own=True)


# Pixels


def test_unit():
    x = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    assert mnist.unit(x).dtype == torch.float32
    assert torch.equal(mnist.unit(x), x / 255)
    with pytest.raises(UsageError, match=r"uint8.*torch\.float32"):
        mnist.unit(mnist.unit(x))
