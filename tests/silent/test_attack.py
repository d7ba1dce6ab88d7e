"""Guards section 4 of issue 30: small files with large content, links out of `--out`, the studio, damaged campaigns."""

from __future__ import annotations

import pickle
import signal
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fmwc.cli.labels import read_labels
from fmwc.cli.verbs import Filter
from fmwc.data import arrays
from fmwc.errors import DataError
from fmwc.files import LOCK, RUN, WORK

MEBIBYTE = 1 << 20


@contextmanager
def bounded(seconds: int = 10, mebibytes: int = 300) -> Iterator[None]:
    """Raise if the block takes longer, or more memory above what the process has now."""

    def late(*_: object) -> None:
        raise AssertionError(f"took more than {seconds} s")

    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    earlier = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)
    assert _memory("VmHWM") - before < mebibytes


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) // 1024


# ---- small files -----------------------------------------------------------------------------------------------------


class _Call:
    """Is pickled as a call of a function."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call[0], self.call[1:]


def _pt(path: Path, content: object) -> Path:
    """Write what torch.save would write, also of content that torch.save does not support."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return path


@pytest.mark.parametrize("call", [(bytearray, 1 << 30), (torch.Tensor, 1 << 28)])
def test_a_small_state_dict_cannot_allocate_what_it_likes(tmp_path, call):
    path = _pt(tmp_path / "x.pt", {"x": _Call(*call)})
    assert path.stat().st_size < 1000
    with bounded(), pytest.raises(DataError):
        arrays.read(path)


def test_a_small_state_dict_cannot_take_exponential_time(tmp_path):
    lists: list[object] = [0]
    tuples: tuple[object, ...] = (0, 0)
    for _ in range(32):
        lists, tuples = [lists, lists], (tuples, tuples)
    for name, content in (("lists", {"x": lists}), ("tuples", pickle.dumps(tuples, protocol=2))):
        path = _pt(tmp_path / f"{name}.pt", content)
        if name == "tuples":  # Python itself cannot hash them to pickle a dict
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("archive/data.pkl", b"\x80\x02}" + content[2:-1] + b"K\x01s.")
                archive.writestr("archive/version", "3\n")
        with bounded(), pytest.raises(DataError):
            arrays.read(path)


def test_state_dicts_still_load(tmp_path):
    network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    network[2].bias = network[0].weight  # tied
    torch.save(network.state_dict(), tmp_path / "x.pt")
    found = arrays.read(tmp_path / "x.pt")
    assert found.keys() == network.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in network.state_dict().items())


def _repeated(rows: int, text: str) -> pa.Table:
    return pa.table({"bad": pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))})


@pytest.mark.parametrize(
    "table",
    [
        _repeated(20_000, "x" * 300_000),  # 6 GB from 51 kB
        pa.table({"bad": pa.nulls(19_000_000)}),  # more than a minute from 33 kB
        pa.table({"bad": ["x" * 200_000_000]}),  # one cell of 200 MB from 6 kB
    ],
    ids=["text", "cells", "cell"],
)
def test_a_small_table_of_labels_cannot_unpack_to_gigabytes(tmp_path, table):
    path = tmp_path / "labels.parquet"
    pq.write_table(table, path, compression="zstd", store_schema=False, write_statistics=False)
    assert path.stat().st_size < 100_000
    names = [f"{i:05d}" for i in range(10)]
    with bounded(), pytest.raises(DataError):
        read_labels(Filter(tmp_path, tmp_path, labels=str(path)), names, None)


def test_long_tables_of_labels_are_read(tmp_path):
    names = [f"{i:05d}" for i in range(20_000)]
    pq.write_table(pa.table({"name": names, "bad": [True, False] * 10_000}), tmp_path / "labels.parquet")
    options = Filter(tmp_path, tmp_path, labels=str(tmp_path / "labels.parquet"))
    assert read_labels(options, names, None).bad.tolist() == [1.0, 0.0] * 10_000


# ---- links out of the output folder ----------------------------------------------------------------------------------


def test_planted_links_do_not_lead_a_run_to_write_elsewhere(run, tmp_path):
    out, elsewhere, secret = tmp_path / "out", tmp_path / "elsewhere", tmp_path / "secret"
    out.mkdir()
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("mine")
    secret.write_text("mine")
    words = ("sample", "checkerboard", "--count", 5, "--steps", 2, "--device", "cpu", "--out", out, "--force")
    (out / WORK).symlink_to(elsewhere)
    (out / "samples.csv").symlink_to(secret)
    for name in ("tmp", "old"):
        (tmp_path / f".out.fmwc-{name}").symlink_to(elsewhere)
    assert run(*words)[0] == 0
    assert sorted(p.name for p in out.iterdir()) == ["samples.csv", "samples.safetensors"]
    (tmp_path / f".out{LOCK}").symlink_to(secret)
    run(*words)
    assert secret.read_text() == "mine"
    (out / "link").symlink_to(elsewhere)
    code, _, err = run(*words[:-2], out / "link", "--force")
    assert code == 2
    assert "link" in err
    for name in (WORK, RUN):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).symlink_to(elsewhere)
        assert run("train", "checkerboard", "--preset", "quick", "--out", tmp_path / "model", "--force")[0] == 2
    assert [p.name for p in elsewhere.iterdir()] == ["thesis.tex"]


# ---- damaged campaigns -----------------------------------------------------------------------------------------------


def _without(table: pa.Table, column: str) -> pa.Table:
    return table.drop_columns([column])


def _as_text(table: pa.Table, column: str) -> pa.Table:
    return table.set_column(table.column_names.index(column), column, pa.array(["a"] * len(table)))


@pytest.mark.parametrize(
    "damage",
    [lambda t: _without(t, "index"), lambda t: _as_text(t, "x"), lambda t: t.slice(0, 3)],
    ids=["column", "type", "rows"],
)
def test_damaged_blocks_are_computed_again(run, tmp_path, damage):
    out = tmp_path / "out"
    words = ("screen", "checkerboard", "-n", 20, "--batch", 10, "--block", 10, "--keep", 10, "--device", "cpu")
    assert run(*words, "--out", out)[0] == 0
    expected = (out / "ranked.csv").read_bytes()
    for name in ("ranked.csv", "results.parquet"):
        (out / name).unlink()
    block = out / "blocks" / "judge-00000.parquet"
    rows = pq.read_table(block)
    damaged = damage(rows).replace_schema_metadata(rows.schema.metadata)
    pq.write_table(damaged, block, use_compliant_nested_type=False)
    code, _, err = run(*words, "--out", out)
    assert code == 0, err
    assert (out / "ranked.csv").read_bytes() == expected
