"""The kinds of input that are fuzzed.

To add a kind, write a function that makes a valid source, a function that changes it
at random and reads it, and a row of `KINDS`.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

import fmwc
from tests.fuzz.mutations import (
    NUMBERS,
    WORDS,
    change_bytes,
    change_json,
    change_lines,
    change_tensors,
    json_text,
    reseal,
)

__all__ = ["KINDS", "Kind"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        name: The name of the test.
        prepare: Makes a valid source in a folder, once.
        case: Writes a randomly changed copy to a scratch folder, and reads it.
        share: The number of cases, relative to other kinds: slow ones get fewer.
    """

    name: str
    prepare: Callable[[Path], Any]
    case: Callable[[random.Random, Any, Path], Any]
    share: float = 1.0


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# ---- checkpoints -------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path) -> Path:
    torch.manual_seed(0)
    from fmwc.networks import MLP

    field = fmwc.attach(MLP(2, 4, 1), space=(2,), width=4)
    field.reference = fmwc.sampling.Reference(
        "temporal_ratio", fmwc.sampling.read_with("linearised", 10, "euler"), torch.linspace(0, 1, 11)
    )
    fmwc.save(field, folder / "checkpoint", recipe={"name": "checkerboard", "iterations": 3})
    return folder / "checkpoint"


def fuzz_record(rng: random.Random, source: Path, folder: Path) -> Any:
    shutil.copytree(source, emptied(folder), dirs_exist_ok=True)
    record = change_json(rng, json.loads((source / "recipe.json").read_text()))
    record = reseal(record) if rng.random() < 0.8 else record
    (folder / "recipe.json").write_bytes(json_text(rng, record))
    return fmwc.load(folder)


def fuzz_weights(rng: random.Random, source: Path, folder: Path) -> Any:
    shutil.copytree(source, emptied(folder), dirs_exist_ok=True)
    path = next(folder.glob("*.safetensors"))
    if rng.random() < 0.5:
        path.write_bytes(change_bytes(rng, path.read_bytes()))
    else:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        path.write_bytes(save({k: v.contiguous() for k, v in change_tensors(rng, tensors).items()}))
    record = json.loads((folder / "recipe.json").read_text())
    if rng.random() < 0.7 and "files" in record:
        from fmwc.identity import digest_file

        record["files"] = {path.name: digest_file(path)}
        (folder / "recipe.json").write_text(json.dumps(reseal(record)))
    return fmwc.sample(fmwc.load(folder), 2, steps=3).x


# ---- samples -----------------------------------------------------------------------------------------------------


def make_samples(folder: Path) -> Path:
    field = fmwc.load(make_checkpoint(folder))
    run = fmwc.sample(field, 12, steps=10, seed=0)
    run.save(folder / "samples.safetensors")
    return folder / "samples.safetensors"


def fuzz_samples(rng: random.Random, source: Path, folder: Path) -> Any:
    path = emptied(folder) / "samples.safetensors"
    _changed(rng, source, path)
    run = fmwc.Trajectory.load(path)
    run.score()
    return run.confidence, run.take(torch.arange(1)), run.surest(0.5)


def _changed(rng: random.Random, source: Path, path: Path) -> None:
    """Write a changed copy of a file of tensors: with changed bytes, or with changed content and matching hashes."""
    if rng.random() < 0.3:
        path.write_bytes(change_bytes(rng, source.read_bytes()))
    else:
        with safe_open(source, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            about = json.loads(file.metadata()["fmwc"])
        if rng.random() < 0.5:
            tensors = change_tensors(rng, tensors)
        if rng.random() < 0.6:
            about = change_json(rng, about)
        if rng.random() < 0.8 and isinstance(about, dict):
            about.pop("sha256", None)
            about = {**about, **_seal_of(tensors, about)}
        text = json_text(rng, about).decode("utf-8", "replace")
        path.write_bytes(save({k: v.contiguous() for k, v in tensors.items()}, {"fmwc": text}))


def _seal_of(tensors: dict[str, Any], about: Any) -> dict[str, str]:
    try:
        from fmwc.identity import digest_tensors

        return {"sha256": digest_tensors(tensors, about)}
    except Exception:  # content that cannot be hashed gets no hash
        return {}


def make_filter(folder: Path) -> Path:
    make_samples(folder)
    (folder / "samples.csv").write_text(
        "name,x_0,x_1,metastable\n" + "".join(f"{i:05d},0.1,0.2,{i % 2}\n" for i in range(12))
    )
    return folder


def fuzz_options(rng: random.Random, source: Path, folder: Path) -> Any:
    from fmwc.cli.filter import filter_samples
    from fmwc.cli.verbs import Filter

    names = ("keep", "budget", "max_risk", "probability", "labels", "score", "column", "good", "bad")
    options: dict[str, Any] = {}
    for name in rng.sample(names, rng.choice([1, 1, 2, 3])):
        if name in ("keep", "max_risk", "probability"):
            options[name] = float(rng.choice([*NUMBERS, 0.5, 0.3]))
        elif name == "budget":
            options[name] = rng.choice([n for n in NUMBERS if isinstance(n, int)])
        else:
            options[name] = rng.choice(
                [*WORDS, "metastable", "x_0 <= 0.1", "> nan", "peak", "integrated@0.1-0.9", "peak@9-1", "peak@nan-1"]
            )
    return filter_samples(Filter(source, emptied(folder) / "out", **options))


def fuzz_labels(rng: random.Random, source: Path, folder: Path) -> Any:
    from fmwc.cli.filter import filter_samples
    from fmwc.cli.verbs import Filter

    text = rng.choice(["name,bad\n", "name,good\n", "id,bad\n", "bad\n", ""]) + "".join(
        f"{i:05d},{rng.randrange(2)}\n" for i in range(12)
    )
    (emptied(folder) / "labels.csv").write_bytes(change_lines(rng, text))
    return filter_samples(Filter(source, folder / "out", keep=0.5, labels=str(folder / "labels.csv")))


def fuzz_table(rng: random.Random, source: Path, folder: Path) -> Any:
    from fmwc.cli.filter import filter_samples
    from fmwc.cli.verbs import Filter

    shutil.copytree(source, emptied(folder), dirs_exist_ok=True)
    (folder / "samples.csv").write_bytes(change_lines(rng, (source / "samples.csv").read_text()))
    return filter_samples(Filter(folder, folder / "out", keep=0.5, labels=rng.choice(["", "metastable"])))


def make_certificate(folder: Path) -> tuple[Path, Any]:
    """Return samples and a certificate made from them."""
    from fmwc.cli.filter import filter_samples
    from fmwc.cli.verbs import Filter

    field = fmwc.load(make_checkpoint(folder))
    run = fmwc.sample(field, 60, steps=10, seed=0)
    run.save(folder / "samples.safetensors")
    (folder / "labels.csv").write_text("bad\n" + "0\n" * 60)
    filter_samples(Filter(folder, folder / "kept", max_risk=0.5, labels=str(folder / "labels.csv")))
    return folder, json.loads((folder / "kept" / "promise.json").read_text())


def fuzz_certificate(rng: random.Random, source: tuple[Path, Any], folder: Path) -> Any:
    from fmwc.cli.filter import filter_samples
    from fmwc.cli.verbs import Filter

    content = change_json(rng, source[1])
    content = reseal(content) if rng.random() < 0.8 else content
    (emptied(folder) / "promise.json").write_bytes(json_text(rng, content))
    return filter_samples(Filter(source[0], folder / "out", certificate=folder / "promise.json"))


# ---- data --------------------------------------------------------------------------------------------------------


def make_data(folder: Path) -> dict[str, bytes]:
    from PIL import Image

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (40, 8, 8), np.uint8), (np.arange(40) % 10).astype(np.uint8)

    def numpy(write: Callable[..., Any], *args: Any, **arrays: Any) -> bytes:
        content = io.BytesIO()
        write(content, *args, **arrays)
        return content.getvalue()

    crystals = {
        "num_atoms": np.array([2, 1], np.uint8),
        "atomic_numbers": np.array([11, 17, 26], np.uint8),
        "frac_coords": rng.random((3, 3)).astype(np.float32),
        "lengths": np.array([[3.99] * 3, [2.48] * 3], np.float32),
        "angles": np.array([[60.0] * 3, [109.47] * 3], np.float32),
        "material_id": np.array([b"mp-22862", b"mp-13"]),
    }
    return {
        "own.npz": numpy(np.savez_compressed, x=x, y=y),
        "plain.npz": numpy(np.savez, x=x[:5], y=y[:5]),
        "x.npy": numpy(np.save, x.astype(np.float32)),
        "x.pt": numpy(lambda to: torch.save({"x": torch.randn(5, 2), "y": torch.arange(5)}, to)),
        "x.safetensors": save({"x": torch.randn(5, 2), "y": torch.arange(5)}),
        "train-images-idx3-ubyte.gz": gzip.compress(struct.pack(">IIII", 0x803, 40, 8, 8) + x.tobytes()),
        "train-images-idx3-ubyte": struct.pack(">IIII", 0x803, 40, 8, 8) + x.tobytes(),
        "train-labels-idx1-ubyte": struct.pack(">II", 0x801, 40) + y.tobytes(),
        "picture.png": numpy(lambda to: Image.fromarray(x[0]).save(to, "png")),
        "picture.gif": numpy(lambda to: Image.fromarray(x[0]).save(to, "gif")),
        "picture.tif": numpy(lambda to: Image.fromarray(x[0]).save(to, "tiff")),
        "train.npz": numpy(np.savez_compressed, **crystals),
        "chgnet_energies.npz": numpy(np.savez, material_id=np.array([b"a", b"b"]), energy_per_atom=np.ones(2)),
        "hull.npz": numpy(
            np.savez,
            model=np.array("m"),
            elements=np.array([1, 2], np.uint8),
            numbers=np.array([11, 11, 17], np.uint8),
            counts=np.array([1, 1, 1], np.uint16),
            energies=np.array([-1.0, -2.0], np.float32),
        ),
    }  # fmt: skip


def fuzz_data(rng: random.Random, source: dict[str, bytes], folder: Path) -> Any:
    from fmwc.crystals import Hull, mp20
    from fmwc.data import arrays
    from fmwc.mnist import data as mnist

    name = rng.choice(list(source))
    content = change_bytes(rng, source[name])
    path = emptied(folder) / name
    if name.startswith("picture"):
        path = folder / "0" / name
        path.parent.mkdir()
    if name.startswith("train-"):
        for other in ("train-labels-idx1-ubyte", "train-images-idx3-ubyte"):
            if not name.startswith(other):
                (folder / other).write_bytes(source[other])
    path.write_bytes(content)
    if name == "train.npz":
        return mp20.load(folder)
    if name == "chgnet_energies.npz":
        return mp20.energies(folder)
    if name == "hull.npz":
        return Hull.load(path)
    if name.startswith(("picture", "train-")):
        return mnist.load(folder, own=True)
    if name == "own.npz" and rng.random() < 0.5:
        return mnist.load(path, own=True)
    return arrays.load(path)


TYPES = ["u1", "i8", "f4", "f8", ">f8", "f2", "c8", "?", "S3", "U2", "M8[s]", "O", "i4,f4", "g", ">i2", "u4"]
SHAPES = [(), (0,), (3,), (4, 8, 8), (4, 8, 8, 1), (4, 1, 8, 8), (4,), (2, 3), (1,) * 20, (0, 8, 8), (4, 0)]
NAMES = ["x", "y", "x_train", "y_train", "images", "labels", "x.a", "x.", "", "a/b", "é", "num_atoms", "atomic_numbers"]
NAMES += ["frac_coords", "lengths", "angles", "material_id", "energy_per_atom", "model", "elements", "energies"]


def _array(rng: random.Random) -> np.ndarray:
    shape, kind = rng.choice(SHAPES), np.dtype(rng.choice(TYPES))
    found = np.zeros(shape, kind)
    if kind.kind in "fgc" and rng.random() < 0.3 and found.size:
        found.flat[0] = rng.choice([np.nan, np.inf, -1, 300])
    return np.asfortranarray(found) if rng.random() < 0.2 else found


def _saved(rng: random.Random) -> Any:
    """Return an object as users save it with torch: tensors of every kind, and other objects."""
    x = torch.zeros(3, 2)
    tensors: list[Any] = [x, x.double(), x.bool(), x.half(), x.to_sparse(), x * 1j, torch.tensor(1.0), x[:0], None, 3]
    tensors += [
        torch.zeros(2).expand(3, 2),
        torch.zeros(3, 2, device="meta"),
        torch.nn.Parameter(x),
        "a",
        b"bytes",
        1e400,
    ]
    tensors += [x.to(torch.float8_e4m3fn), torch.quantize_per_tensor(x, 1, 0, torch.qint8), {"x": x}, [x], (x,), {1: x}]
    keys: list[Any] = [*NAMES[:9], 1, None, (1, 2)]
    whole = {rng.choice(keys): rng.choice(tensors) for _ in range(rng.choice([1, 2, 3]))}
    return rng.choice([whole, whole, rng.choice(tensors)])


def fuzz_arrays(rng: random.Random, source: Any, folder: Path) -> Any:
    from fmwc.crystals import Hull, mp20
    from fmwc.data import arrays
    from fmwc.mnist import data as mnist

    emptied(folder)
    if rng.random() < 0.4:
        torch.save(_saved(rng), folder / "x.pt")
        return arrays.load(folder / "x.pt")
    if rng.random() < 0.2:
        np.save(folder / "x.npy", _array(rng))
        return arrays.load(folder / "x.npy")
    some = rng.sample(NAMES, rng.randrange(5))
    names = rng.choice([some, ["x", "y"], ["x_train", "y_train"], NAMES[11:17], NAMES[17:]])
    with zipfile.ZipFile(folder / "train.npz", "w") as archive:
        for name in names:
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, _array(rng))
    path = folder / "train.npz"
    readers: list[Callable[[], Any]] = [lambda: arrays.load(path), lambda: mnist.load(path, own=True)]
    readers += [lambda: mp20.load(folder), lambda: Hull.load(path)]
    return rng.choice(readers)()


# ---- structures --------------------------------------------------------------------------------------------------

CIF = """data_NaCl
_cell_length_a 4.0
_cell_length_b 4.0
_cell_length_c 4.0
_cell_angle_alpha 90
_cell_angle_beta 90
_cell_angle_gamma 90
_symmetry_space_group_name_H-M 'P 1'
_chemical_formula_sum 'Na1 Cl1'
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
Na1 Na 0 0 0
Cl1 Cl 0.5 0.5 0.5
"""
STRUCTURES = {
    "a.cif": CIF,
    "a.poscar": "salt\n1.0\n4 0 0\n0 4 0\n0 0 4\nNa Cl\n1 1\ndirect\n0 0 0\n0.5 0.5 0.5\n",
    "a.xyz": '2\nLattice="4 0 0 0 4 0 0 0 4" Properties=species:S:1:pos:R:3\nNa 0 0 0\nCl 2 2 2\n' * 2,
    "train.csv": f'material_id,cif,e_above_hull\nmp-1,"{CIF}",0.1\nmp-2,"{CIF}",\n',
}


def fuzz_structures(rng: random.Random, source: Any, folder: Path) -> Any:
    import warnings

    from fmwc.crystals import mp20, read
    from fmwc.crystals.structures import refusal

    name = rng.choice(list(STRUCTURES))
    (emptied(folder) / name).write_bytes(change_lines(rng, STRUCTURES[name]))
    if name == "train.csv":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return mp20.load(folder)
    return [(refusal(one), one.formula) for one in read(folder)]


# ---- options -----------------------------------------------------------------------------------------------------


def make_recipes(folder: Path) -> list[Any]:
    from fmwc.checkerboard.recipe import PRESETS as board
    from fmwc.crystals.recipe import PRESETS as crystals
    from fmwc.mnist.recipe import PRESETS as mnist

    return [presets[name] for presets in (board, mnist, crystals) for name in presets if name != "judge"]


def fuzz_set(rng: random.Random, source: list[Any], folder: Path) -> Any:
    from dataclasses import fields

    from fmwc.recipes import override

    recipe = rng.choice(source)
    names = [f.name for f in fields(recipe)]
    changes = [
        rng.choice([f"{rng.choice(names)}={rng.choice([*NUMBERS, *WORDS, 'true', '1_0', '１'])}", rng.choice(WORDS)])
        for _ in range(rng.choice([1, 1, 2]))
    ]
    made = override(recipe, changes)
    made.plan  # noqa: B018
    if not hasattr(made, "data") and made.hidden * made.depth <= 4096:  # others read files, or take memory on purpose
        made.attach(made.network())
    return made


NETWORK = "import torch; from torch.nn import *; made = "
MODULES = [
    "raise SystemExit(3)", "raise BaseException", "def made(", "from . import x", "1 / 0", "import nowhere_at_all",
    "made = 3", "made = lambda x: x", "def made(): yield 1", "async def made(): pass", "def made(): raise SystemExit",
    "def made(): return None", "def made(): return ((), ())", "raise ValueError('a\\nb')", "made = int", "made = input",
    "def __getattr__(name): raise ValueError(name)", "class made:\n    def __new__(cls): raise KeyError", "\0", "x = 1",
    *(NETWORK + made for made in (
        "Linear", "Identity", "lambda: LazyLinear(3)", "lambda: (Linear(2, 2), (0,))", "lambda: (Linear(2, 2), '')",
        "lambda: Linear(2, 2).half()", "lambda: (Linear(2, 2), 10**30)", "lambda: (Linear(2, 2), (10**30,))",
        "lambda: Linear(2, 2, device='meta')", "Linear(2, 2)", "lambda: Bilinear(2, 1, 2)", "lambda: Bilinear(2, 1, 3)",
    )),
    *["from fmwc.networks import MLP\ndef made(): return MLP(2, 4, 1)"] * 3,
]  # fmt: skip


def fuzz_entry(rng: random.Random, source: Any, folder: Path) -> Any:
    from fmwc.crystals.energy import calculator
    from fmwc.entry import build, try_once

    name = f"fuzzed_{rng.randrange(10**9)}"
    (emptied(folder) / f"{name}.py").write_text(rng.choice(MODULES))
    odd = [f"{name}:made.x", f"{name}", f".{name}:made", f"{name}.:made", f"..{name}:x", f"{name}:", ":made", "a:b:c"]
    odd += [
        f"{name}/:made",
        f"{name}\0:made",
        f"{name}:made\n",
        "é:ü",
        "sys:exit",
        "os:getcwd",
        "json:loads",
        "a b:c",
        "::",
    ]
    entry = rng.choice([f"{name}:made"] * 2 + [rng.choice(odd)])
    sys.path.insert(0, str(folder))
    try:
        if rng.random() < 0.2:
            return calculator(entry)
        network, _ = build(entry)
        return try_once(network, torch.zeros(3, 2), {})
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


def nothing(folder: Path) -> None:
    return None


def _fit(resume: Path) -> Any:
    from fmwc.networks import MLP

    field = fmwc.attach(MLP(dim=2, hidden=8, depth=1), space=(2,), width=4)
    data = torch.zeros(8, 2)
    return fmwc.fit_noise(field, data, 2, batch=4, resume=resume)


def make_point(folder: Path) -> Path:
    _fit(folder / "noise.resume")
    return folder / "noise.resume"


def fuzz_point(rng: random.Random, source: Path, folder: Path) -> Any:
    path = emptied(folder) / "noise.resume"
    _changed(rng, source, path)
    return _fit(path)


KINDS = [
    Kind("checkpoint records", make_checkpoint, fuzz_record, 2.0),
    Kind("checkpoint weights", make_checkpoint, fuzz_weights),
    Kind("samples", make_samples, fuzz_samples, 2.0),
    Kind("resume points", make_point, fuzz_point, 0.15),
    Kind("data files", make_data, fuzz_data, 2.0),
    Kind("data arrays", nothing, fuzz_arrays, 2.0),
    Kind("tables", make_filter, fuzz_table, 0.5),
    Kind("labels", make_filter, fuzz_labels, 0.5),
    Kind("certificates", make_certificate, fuzz_certificate, 0.5),
    Kind("structures", nothing, fuzz_structures),
    Kind("--set", make_recipes, fuzz_set),
    Kind("module:function", nothing, fuzz_entry),
    Kind("filter options", make_filter, fuzz_options, 0.5),
]
