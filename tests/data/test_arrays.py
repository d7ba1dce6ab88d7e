"""Samples and conditions from one file."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fmwc.data import arrays
from fmwc.errors import DataError

X = torch.arange(12.0).reshape(4, 3)


def _npz(path):
    np.savez(path, x=X.double().numpy(), y=np.arange(4))


def _safetensors(path):
    save_file({"x": X, "y": torch.arange(4)}, path)


def _pt(path):
    torch.save({"x": X, "y": torch.arange(4)}, path)


@pytest.mark.parametrize(("suffix", "write"), [(".npz", _npz), (".safetensors", _safetensors), (".pt", _pt)])
def test_samples_and_conditions_are_read_from_every_format(tmp_path, suffix, write):
    write(tmp_path / f"d{suffix}")
    found = arrays.load(tmp_path / f"d{suffix}")
    assert found.x.dtype == torch.float32
    assert torch.equal(found.x, X)
    assert torch.equal(found.cond["y"], torch.arange(4))


def test_channels_are_named(tmp_path):
    np.savez(tmp_path / "d.npz", **{"x.a": X.numpy(), "x.b": X.numpy()[:, :1], "atoms": np.arange(4)})
    found = arrays.load(tmp_path / "d.npz")
    assert found.x.keys() == {"a", "b"}
    assert found.cond.keys() == {"atoms"}


class _Trap:
    def __reduce__(self):
        return print, ("this must never run",)


def test_unusable_files_are_refused(tmp_path, capsys):
    def refused(name, match):
        with pytest.raises(DataError, match=match):
            arrays.load(tmp_path / name)

    refused("missing.npz", "cannot be read")
    refused("d.csv", r"one of the extensions \.npz")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and nothing more")
    refused("cut.npz", "truncated")
    (tmp_path / "cut.safetensors").write_bytes(b"\x00" * 4)
    refused("cut.safetensors", "cut.safetensors")
    np.savez(tmp_path / "rows.npz", x=X.numpy(), y=np.arange(3))
    refused("rows.npz", "one row per sample")
    np.savez(tmp_path / "empty.npz", x=X.numpy()[:0])
    refused("empty.npz", "at least one")
    np.savez(tmp_path / "both.npz", **{"x": X.numpy(), "x.a": X.numpy()})
    refused("both.npz", "both x and x.a")
    np.savez(tmp_path / "objects.npz", x=np.array([{"a": 1}], dtype=object))
    refused("objects.npz", "Python objects")
    torch.save({"x": X, "t": _Trap()}, tmp_path / "trap.pt")
    refused("trap.pt", "something other than tensors")
    torch.save(torch.zeros(1).expand(1 << 31), tmp_path / "stride.pt")  # 8 GiB from four bytes
    refused("stride.pt", "overlapping memory")
    torch.save(X.to_sparse(), tmp_path / "sparse.pt")
    refused("sparse.pt", "sparse")
    torch.save([X], tmp_path / "list.pt")
    refused("list.pt", "must hold named tensors only")
    np.save(tmp_path / "complex.npy", X.numpy() * 1j)
    refused("complex.npy", "save numbers")
    os.mkfifo(tmp_path / "fifo.npy")
    refused("fifo.npy", "not a file")
    torch.save({"x": X, "name": "word"}, tmp_path / "word.pt")
    refused("word.pt", "must hold named tensors only")
    assert "must never run" not in capsys.readouterr().out
