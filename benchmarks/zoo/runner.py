"""Train and score one flow and seed, or many of them in parallel."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save

from benchmarks.zoo.flows import FLOWS, OTHERS
from benchmarks.zoo.scores import score
from fmwc.files import write_bytes


def one(name: str, seed: int, device_name: str, out: Path, only: str, count: int) -> str:
    """Train and score one flow and seed; return a line that describes the result."""
    torch.set_num_threads(1)
    device, flow = torch.device(device_name), FLOWS[name]
    weights = {other: out / f"{name}-{seed}{other and '.'}{other}.safetensors" for other in ("", *OTHERS)}
    scores = out / f"{name}-{seed}.npz"
    begun, said = time.perf_counter(), []
    if missing := [other for other, path in weights.items() if not path.exists()]:
        if only == "scores":
            return f"{name} {seed}: no weights; train it first"
        for other in missing:
            network = flow.train(seed, device, other).network
            write_bytes(
                weights[other], save({k: v.detach().cpu().contiguous() for k, v in network.state_dict().items()})
            )
        said.append(f"trained in {time.perf_counter() - begun:.0f} s")
    if only == "scores" or (only != "train" and not scores.exists()):
        begun = time.perf_counter()
        others = {other: load_file(weights[other]) for other in OTHERS}
        trained = flow.restore(seed, device, load_file(weights[""]), others)
        found = score(trained, seed, count=count)
        file = io.BytesIO()
        np.savez_compressed(file, **found)
        write_bytes(scores, file.getvalue())
        said.append(f"{100 * found['failed'].mean():.1f} % failed, scored in {time.perf_counter() - begun:.0f} s")
    return f"{name} {seed}: {', '.join(said) or 'done already'}"


def run(tasks: Sequence[tuple[str, int]], jobs: int, *arguments: object) -> int:
    """Train and score flows and seeds in parallel, and print a line for each; return the number of errors."""
    errors = 0
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting = {pool.submit(one, name, seed, *arguments): (name, seed) for name, seed in tasks}
        for done, future in enumerate(as_completed(waiting), 1):
            name, seed = waiting[future]
            try:
                said = future.result()
            except Exception as error:  # continue with the others
                said, errors = f"{name} {seed}: ERROR, {type(error).__name__}: {error}", errors + 1
            print(f"[{done}/{len(tasks)}] {said}", flush=True)
    return errors
