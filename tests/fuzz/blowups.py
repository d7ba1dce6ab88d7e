"""Small files that would exhaust memory or time if a reader trusted them. Run in a process with limited memory:

    FMWC_BLOWUP=9000000000 python -m tests.fuzz.blowups FOLDER [NAME ...]

prints one line of JSON per file: the result, the seconds, and the peak of memory in MiB.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["BLOWUPS", "main"]

SIZE = int(os.environ.get("FMWC_BLOWUP", 1 << 29))  # bytes that a file unpacks to
LEVEL = 1  # of compression: 200 times is enough, and quick


def big_npz(folder: Path) -> Any:
    """A small archive of images and labels that unpacks to `SIZE` bytes of zeros."""
    from fmwc.mnist import data as mnist

    with zipfile.ZipFile(folder / "own.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive:
        for name, shape in (("x_train", (SIZE // 784, 28, 28)), ("y_train", (10,))):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": shape})
                left = int(np.prod(shape))
                while left:
                    left -= member.write(bytes(min(left, 1 << 24)))
    return lambda: mnist.load(folder / "own.npz", own=True)


def big_gz(folder: Path) -> Any:
    """A small gzip file of images that unpacks to `SIZE` bytes of zeros."""
    from fmwc.mnist import data as mnist

    (folder / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 1) + b"\0")
    left = SIZE // 784 * 784
    with gzip.open(folder / "train-images-idx3-ubyte.gz", "wb", LEVEL) as file:
        file.write(struct.pack(">IIII", 0x803, left // 784, 28, 28))
        while left:
            left -= file.write(bytes(min(left, 1 << 24)))
    return lambda: mnist.load(folder, own=True)


def stride_pt(folder: Path) -> Any:
    """A tensor of `SIZE` bytes with stride 0, stored as four bytes."""
    from fmwc.data import arrays

    torch.save(torch.zeros(1).expand(SIZE // 4, 1), folder / "x.pt")
    return lambda: arrays.load(folder / "x.pt")


def many_parts(folder: Path) -> Any:
    """A checkpoint that declares 30 million files."""
    import fmwc
    from fmwc.networks import MLP

    fmwc.save(fmwc.attach(MLP(2, 4, 1), space=(2,), width=4), folder / "c")
    record = json.loads((folder / "c" / "recipe.json").read_text())
    record = {k: v for k, v in record.items() if k not in ("files", "sha256")} | {"format": 1, "parts": 30_000_000}
    (folder / "c" / "recipe.json").write_text(json.dumps(record))
    return lambda: fmwc.load(folder / "c")


def many_atoms(folder: Path) -> Any:
    """A POSCAR that declares 10⁹ atoms."""
    from fmwc.crystals import read

    text = "x\n1\n4 0 0\n0 4 0\n0 0 4\nNa Cl\n1 1000000000\ndirect\n0 0 0\n0.5 0.5 0.5\n"
    (folder / "POSCAR").write_text(text)
    return lambda: _problem(read(folder))


def long_cif(folder: Path) -> Any:
    """A CIF of 100,000 atoms."""
    from fmwc.crystals import read

    rng, head = random.Random(0), "data_x\n"
    head += "".join(f"_cell_length_{edge} 400\n" for edge in "abc")
    head += "".join(f"_cell_angle_{angle} 90\n" for angle in ("alpha", "beta", "gamma"))
    head += "_symmetry_space_group_name_H-M 'P 1'\nloop_\n_atom_site_label\n_atom_site_type_symbol\n"
    head += "".join(f"_atom_site_fract_{axis}\n" for axis in "xyz")
    sites = (f"Na{i} Na {rng.random():.5f} {rng.random():.5f} {rng.random():.5f}\n" for i in range(100_000))
    (folder / "a.cif").write_text(head + "".join(sites))
    return lambda: _problem(read(folder))


def device(folder: Path) -> Any:
    """A link to an endless device."""
    from fmwc.data import arrays

    os.symlink("/dev/zero", folder / "x.npy")
    return lambda: arrays.load(folder / "x.npy")


def fifo(folder: Path) -> Any:
    """A pipe without a writer."""
    from fmwc.data import arrays

    os.mkfifo(folder / "x.npz")
    return lambda: arrays.load(folder / "x.npz")


def _problem(found: list[Any]) -> None:
    if problems := [one.problem for one in found if one.problem]:
        from fmwc.errors import DataError

        raise DataError(problems[0])


BLOWUPS: dict[str, Callable[[Path], Any]] = {
    "npz of zeros": big_npz,
    "gz of zeros": big_gz,
    "pt of stride 0": stride_pt,
    "30,000,000 parts": many_parts,
    "POSCAR of 10⁹ atoms": many_atoms,
    "CIF of 100,000 atoms": long_cif,
    "link to /dev/zero": device,
    "fifo": fifo,
}


def peak() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(folder: Path, names: list[str]) -> None:
    from fmwc.errors import FmwcError

    for place, name in enumerate(names or BLOWUPS):
        (folder / str(place)).mkdir(parents=True)
        read = BLOWUPS[name](folder / str(place))
        before, begin, said = peak(), time.perf_counter(), "read"
        try:
            read()
        except FmwcError as error:
            said = f"refused: {error}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"[:200]
        row = {"name": name, "said": said, "seconds": time.perf_counter() - begin, "more": peak() - before}
        print(json.dumps({**row, "peak": peak()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
