"""Numbers of the shipped weights, recorded once: `python -m tests.golden.values` writes values.safetensors.

The inputs are stored beside the results, so nothing depends on the layout of random numbers: states and times,
conditions, start states and structures. `ask` below is the only function that calls the library. Where an interface
changes, change it; the file stays.

Recorded of each shipped flow: the velocity, the linearised variance (one probe per coordinate), the moments of the
diagonal estimator, and the KL with activations that carry no noise. Of runs from recorded start states: endpoints,
the scores of the variance, the dispersion of the endpoint, the critical time, and the endpoint after an edit that is
given as a new state. Of recorded structures: validity, energy and energy above the shipped hull.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fmwc
from fmwc.estimators import Diagonal, Linearised
from fmwc.noise import Pass, kl
from fmwc.sampling import SamplingConfig, Schedule, noise
from fmwc.uses.continuation import continue_from
from fmwc.uses.edit import critical_time

VALUES = Path(__file__).with_name("values.safetensors")
FLOWS = ("checkerboard", "checkerboard-joint", "mnist", "mnist-joint", "crystals")
SCORES = ("endpoint", "integrated", "temporal_ratio", "peak", "geometric", "integrated@0.3-0.8")
SIZES = {  # states, and runs
    "checkerboard": (1000, 200),
    "checkerboard-joint": (1000, 200),
    "mnist": (64, 6),
    "mnist-joint": (64, 6),
    "crystals": (64, 4),
}
EXACT = {"mnist": 2, "mnist-joint": 2, "crystals": 4}  # samples with an exact variance; all of them elsewhere
STEPS = 20  # of a run
EDITED_AT = 8  # the step before which the recorded edit happens


def named(prefix: str, value: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the channels of a state by name."""
    channels = value if isinstance(value, dict) else {"x": value}
    return {f"{prefix} {name}": channel.detach().contiguous().clone() for name, channel in channels.items()}


def state(stored: dict[str, Tensor], prefix: str) -> Tensor | dict[str, Tensor]:
    """Return the state that `named` stored."""
    found = {k.removeprefix(f"{prefix} "): v.float() for k, v in stored.items() if k.startswith(f"{prefix} ")}
    return found["x"] if list(found) == ["x"] else found


def conditions(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix("cond "): v for k, v in stored.items() if k.startswith("cond ")}


def first(value, count):
    """Return the first samples of a state, a tensor or a mapping of them."""
    return {k: v[:count] for k, v in value.items()} if isinstance(value, dict) else value[:count]


# ---- the library -----------------------------------------------------------------------------------------------------


class Levels(Pass):
    """Record log α at activations without noise."""

    def __init__(self) -> None:
        self.log_alphas: list[Tensor] = []
        self.owners: list[Tensor | None] = []

    def after(self, noisy, layer, h, y):
        self.log_alphas.append(noisy.log_alpha(h))
        self.owners.append(noisy.owner(h))
        return y


def ask(name: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the library says of a flow at recorded states."""
    field, cond = fmwc.load(name), conditions(stored)
    x, t = state(stored, "state"), stored["t"]
    exact, runs = EXACT.get(name, len(t)), SIZES[name][1]
    with torch.no_grad():
        found = named("velocity", field(x, t, **cond))
        levels = Levels()
        field.run(levels, x, t, cond=cond)
        found["kl"] = kl(levels.log_alphas, field.prior_rate, field.kl_factor, levels.owners, len(t))
    diagonal = field.moments(x, t, Diagonal(), cond=cond)
    found |= named("diagonal mean", diagonal.mean) | named("diagonal var", diagonal.var)
    few = field.moments(first(x, exact), t[:exact], Linearised(), cond=first(cond, exact))
    found |= named("linearised var", few.var)

    x0, cond = state(stored, "start"), first(cond, runs)
    read = {"confidence": Linearised(), "schedule": Schedule.every(1), "check": False} if "checker" in name else {}
    plain = {"confidence": None, "check": False}
    config = SamplingConfig(keep_states=True)
    run = fmwc.sample(field, x0=x0, steps=STEPS, cond=cond, transport=bool(read), config=config, **(read or plain))
    found |= named("end", run.x)
    again, _ = continue_from(
        field, run, state(stored, "again"), torch.full((len(run),), EDITED_AT), confidence=None, together=True
    )
    found |= named("edited end", again.x)
    if read:
        found |= {f"score {score}": run.score(score) for score in (*SCORES, "dispersion")}
        found |= {"critical time": critical_time(run)}
    return found


def judged() -> dict[str, Tensor]:
    """Return validity, energies and energies above the shipped hull of some structures."""
    from fmwc.crystals import judge

    table = judge(structures())
    columns = ("valid", "structure_ok", "energy", "energy_per_atom", "e_above_hull", "density")
    return {
        f"judged {name}": torch.tensor(np.array(table[name], dtype=float)) for name in columns if name in table.columns
    }


def structures():
    """Return rock salt, caesium chloride, potassium chloride, a cell of MgO and one with atoms too close."""
    from fmwc.crystals import Candidate

    faces = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    coords = np.concatenate([faces, faces + 0.5]) % 1
    two = np.array([[0, 0, 0], [0.5, 0.5, 0.5]])
    return [
        Candidate("salt", np.array([11] * 4 + [17] * 4), coords, np.eye(3) * 5.64),
        Candidate("caesium", np.array([55, 17]), two, np.eye(3) * 4.1),
        Candidate("potassium", np.array([19] * 4 + [17] * 4), coords, np.eye(3) * 6.3),
        Candidate("magnesia", np.array([12, 8]), two, (np.ones((3, 3)) - np.eye(3)) * 2.1),
        Candidate("close", np.array([11, 17]), two / 10, np.eye(3) * 4),
    ]


# ---- recording -------------------------------------------------------------------------------------------------------


def inputs(name: str) -> dict[str, Tensor]:
    """Return states, times, conditions and start states of a flow."""
    field = fmwc.load(name)
    count, runs = SIZES[name]
    generator = torch.Generator().manual_seed(0)
    cond = {}
    if name.startswith("mnist"):
        cond = {"y": torch.arange(count) % 10}
    if name == "crystals":
        sizes = field.network.draw_sizes(2000, 0)
        cond = {"atoms": sizes[sizes <= 6][:count]}
    t = torch.rand(count, generator=generator)
    x0 = noise(field.space, count, 1, cond=cond)
    ends = fmwc.sample(field, x0=x0, steps=10, cond=cond, confidence=None, check=False).x
    x = field.space.given(cond).path(x0, ends, t)[0]
    if name != "crystals":  # states that half precision holds, so that the file is small
        x, x0 = x.half().float(), x0.half().float()
    stored = {f"cond {k}": v for k, v in cond.items()} | {"t": t} | named("state", x)
    start = first(x0, runs)
    stored |= named("start", start)
    config = SamplingConfig(keep_states=True)
    run = fmwc.sample(field, x0=start, steps=STEPS, cond=first(cond, runs), confidence=None, check=False, config=config)
    there = run.states[EDITED_AT]
    moved = {k: v.clone() for k, v in there.items()} if isinstance(there, dict) else there.clone()
    part = moved["lattice"] if isinstance(moved, dict) else moved
    part += 0.1 * torch.randn(part.shape, generator=generator)
    return stored | named("again", moved if isinstance(moved, dict) else moved.half().float())


def main() -> None:
    torch.set_num_threads(2)
    stored: dict[str, Tensor] = {}
    for name in FLOWS:
        given = inputs(name)
        small = {k: v.half() if v.ndim > 1 and name != "crystals" else v for k, v in given.items()}
        stored |= {f"{name}: {k}": v for k, v in small.items()}
        found = ask(name, given)
        stored |= {f"{name}: = {k}": v for k, v in found.items()}
        print(name, len(found), file=sys.stderr)
    stored |= {f"structures: = {k}": v for k, v in judged().items()}
    save_file(stored, VALUES)


def recorded(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the recorded inputs and results of a flow, or of the structures."""
    stored = {k.removeprefix(f"{name}: "): v for k, v in load_file(VALUES).items() if k.startswith(f"{name}: ")}
    results = {k.removeprefix("= "): v for k, v in stored.items() if k.startswith("= ")}
    return {k: v for k, v in stored.items() if not k.startswith("= ")}, results


if __name__ == "__main__":
    main()
