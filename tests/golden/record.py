"""Record the results of every case: `python -m tests.golden.record [case …]` writes golden.json.

The record of a value has its type, its shape and a digest of its bytes, which shows any change. For numbers it also has
the mean and the first three, which show the size of a change.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden.cases import CASES, quietly

__all__ = ["GOLDEN", "found", "machine"]

GOLDEN = Path(__file__).with_name("golden.json")
FIRST = 3  # values that are kept


def machine() -> dict[str, str]:
    """Return what the bits of a result depend on besides the code: the version of torch, the CPU, and its arithmetic.

    Two CPUs with the same capabilities may still use different kernels. A digest of some results of torch alone
    distinguishes them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        a, b = torch.randn(67, 129, generator=generator), torch.randn(129, 70, generator=generator)
        image, kernel = torch.randn(2, 8, 14, 14, generator=generator), torch.randn(6, 8, 3, 3, generator=generator)
        results = [
            a @ b,
            a.exp(),
            a.softmax(1),
            a.sum(1),
            torch.nn.functional.conv2d(image, kernel),
            a.double() @ a.T.double(),
        ]
        digest = hashlib.sha256(b"".join(r.contiguous().numpy().tobytes() for r in results)).hexdigest()
    finally:
        torch.set_num_threads(threads)
    version = torch.__version__.partition("+")[0]
    return {"torch": version, "capability": torch.backends.cpu.get_cpu_capability(), "arithmetic": digest[:16]}


def described(value: Any) -> dict[str, Any]:
    """Return the record of a tensor, an array, a number or a text."""
    if isinstance(value, str):
        return {"dtype": "text", "length": len(value), "sha256": hashlib.sha256(value.encode()).hexdigest()}
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().numpy()
    array = np.ascontiguousarray(value)
    if array.dtype == object:
        raise TypeError(f"a case gives tensors, arrays, numbers and texts, not {value!r:.80}")
    array = array.reshape(np.shape(value))
    record: dict[str, Any] = {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
    }
    if array.dtype.kind == "f" and array.size:
        wide = array.astype(np.float64).ravel()
        # NaN is written as None, so that the file is JSON, and infinities as texts.
        record["mean"] = _plain(wide[np.isfinite(wide)].mean() if np.isfinite(wide).any() else np.nan)
        record["first"] = [_plain(v) for v in wide[:FIRST]]
    return record


def _plain(number: float) -> float | str | None:
    if np.isnan(number):
        return None
    return float(number) if np.isfinite(number) else str(number)


def found(name: str) -> dict[str, dict[str, Any]]:
    """Return the records of the results of a case."""
    with quietly():
        return {key: described(value) for key, value in CASES[name]().items()}


def main(names: list[str]) -> None:
    """Record some of the cases, or all."""
    recorded = json.loads(GOLDEN.read_text()) if names and GOLDEN.exists() else {}
    if recorded and recorded["machine"] != machine():
        raise SystemExit("the other cases were recorded on another machine; record all of them, or none")
    kept = recorded.get("cases", {})
    whole = time.monotonic()
    for name in names or CASES:
        start = time.monotonic()
        kept[name] = found(name)
        print(f"{name}: {len(kept[name])} values in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    print(f"{len(kept)} cases, {time.monotonic() - whole:.1f} s", file=sys.stderr)
    cases = {name: kept[name] for name in CASES if name in kept}
    lines = []
    for name, values in cases.items():  # one line per value, so that differences are readable
        rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
        lines.append(f" {json.dumps(name)}: {{\n{rows}\n }}")
    body = ",\n".join(lines)
    GOLDEN.write_text(f'{{"machine": {json.dumps(machine())}, "cases": {{\n{body}\n}}}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
