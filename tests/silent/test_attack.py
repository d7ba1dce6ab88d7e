"""Guards section 4 of issue 30: small files with large content, links out of `--out`, the studio, damaged campaigns."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import socket
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fmwc
from fmwc.cli.labels import read_labels
from fmwc.cli.verbs import Filter
from fmwc.crystals.domain import EDITS
from fmwc.data import arrays
from fmwc.errors import DataError
from fmwc.files import LOCK, RUN, WORK
from fmwc.mnist import data as mnist

WEB = Path(fmwc.__file__).parent / "web"


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


# ---- the studio ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    pytest.importorskip("uvicorn")
    from fmwc.studio import server
    from tests.studio.shared import serving

    opened: list[str] = []
    folder = tmp_path_factory.mktemp("studio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "PATIENCE", 0.3, raising=False)
        patch.setattr(server.webbrowser, "open", opened.append)
        with serving(folder / "studio", browser=True) as client:
            client.until(lambda: opened)
            yield client, opened[0], folder / "studio"


def test_the_command_line_of_the_browser_does_not_show_a_secret_that_lasts(studio):
    client, opened, _ = studio
    path = opened.removeprefix(client.pages)
    assert client.token not in opened
    answer = client.request("GET", path, Cookie=None)
    assert answer.status == 303
    cookie = answer.headers["Set-Cookie"]
    assert "httponly" in cookie.lower()
    assert "samesite=strict" in cookie.lower()
    assert answer.headers["Location"] == "/"  # nothing secret stays in the address bar
    assert client.request("GET", "/api/runs/0", Cookie=cookie.partition(";")[0]).status == 404
    assert client.request("GET", path, Cookie=None).status == 401  # it works once
    assert client.request("GET", "/api/runs/0", Cookie=client.cookie(path.rpartition("/")[2])).status == 401


def test_the_printed_address_makes_browsers_known(studio):
    client = studio[0]
    for _ in range(2):
        assert client.request("GET", client.address.removeprefix(client.pages), Cookie=None).status == 303


def test_runs_of_the_studio_are_for_this_user_only(studio):
    client, _, folder = studio
    run = client.draw(count=3, steps=2)
    made = folder / "runs" / run["id"]
    assert (made / "run.json").is_file()
    assert made.stat().st_mode & 0o077 == 0


def test_connections_without_whole_headers_are_closed(studio):
    client = studio[0]
    host, port = client.host.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert connection.recv(100) == b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:  # nor after a first request
        connection.sendall(f"GET / HTTP/1.1\r\nHost: {client.host}\r\n\r\n".encode())
        assert connection.recv(10) == b"HTTP/1.1 2"
        connection.sendall(b"GET /")
        while connection.recv(1 << 16):
            pass


def _in_the_page(expression: str) -> object:
    """Return the value of an expression of the page's modules, in Node."""
    node = shutil.which("node") or pytest.skip("needs node")
    code = f"import * as ranking from {json.dumps(str(WEB / 'ranking.js'))};console.log(JSON.stringify({expression}))"
    words = [node, "--experimental-default-type=module", "--input-type=module", "-e", code]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize(
    ("text", "found"),
    [("O", ["SiO2"]), ("Dy", ["Ca3Dy"]), ("co", ["Co2"]), ("00001", ["Ca3Dy"]), ("cubic", []), ("Ca3", ["Ca3Dy"])],
)
def test_the_search_by_formula_or_name_searches_these(text, found):
    columns = {
        "name": ["00000", "00001", "00002", "00003"],
        "formula": ["SiO2", "Ca3Dy", "Co2", "Os"],
        "problem": ["", "No reference", "", ""],
        "crystal_system": ["cubic"] * 4,
    }
    run = f"{{count: 4, order: [0, 1, 2, 3], bad: null, columns: {json.dumps(columns)}}}"
    shown = _in_the_page(
        f"(() => {{ const r = new ranking.Ranking({run}); r.show('all', {text!r}); return r.shown; }})()"
    )
    assert [columns["formula"][i] for i in shown] == found


def test_edits_of_crystals_start_from_what_was_measured_to_work():
    from fmwc.studio.models import Model

    edits = {one["name"]: one for one in Model("crystals", "crystals", torch.device("cpu")).edits()}
    channel = edits["channel"]
    assert channel["default"] == "type"
    assert edits["scale"]["default"] == 0.3
    assert {one["value"]: (one["at"], one["scale"]) for one in channel["choices"]} == {
        name or "": tuple(default) for name, default in EDITS.items()
    }


@pytest.mark.parametrize("shape", [(2,), (2, 64), (64, 2), (5, 3), (16, 16), (1, 28, 28), (3, 32, 32), (3, 4), (100,)])
def test_the_studio_draws_samples_as_their_report_does(shape):
    from fmwc.report.reports import kind_of as of_report
    from fmwc.studio.samples import kind_of as of_studio

    kind = of_report(shape)
    assert of_studio(torch.zeros(3, *shape)) == (kind if kind in ("points", "images") else "vectors")


def test_mnist_is_cached_where_everything_is(tmp_path, monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path / "here"))
    with pytest.raises(DataError, match="here"):
        mnist.load(download=False)
