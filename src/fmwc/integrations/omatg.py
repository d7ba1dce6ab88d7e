"""OMatG (Open Materials Generation): confidence for its crystal structure prediction.

OMatG predicts the structures of given compositions. Its model is called as `model(batch, t)` on a batch of crystals
whose atoms are concatenated, and returns the velocities `pos_b` and `cell_b`. :class:`OMatG` makes it a velocity
network with the channels `coord` and `lattice`; the number of atoms and the species are conditions. Samples equal those
of OMatG's own integration, up to rounding.

| | OMatG | here |
|---|---|---|
| time | 0.001 (noise) to 0.999 (data) | 0 to 1; velocities are multiplied by 0.998 |
| positions | fractional, `(ΣA, 3)` | `coord`, `(B, width, 3)`, zero in unused rows |
| cell | vectors in ångström as rows, `(B, 3, 3)` | `lattice`, the same |
| species | atomic numbers, `(ΣA,)` | condition `types`, `(B, width)`, 0 in unused rows |
| sizes | `n_atoms`, `batch`, `ptr` | condition `atoms`, `(B,)` |
| velocity annealing | 1 + s·t, without a limit | method `speeds`; noise is fitted without it |
| steps | `integration_time_steps` − 1 | `steps` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.adapters import SCHEDULES, path_along
from fmwc.crystals.structures import Crystals, candidates, need, one_line, pad
from fmwc.errors import CheckpointError, DataError, ShapeError, UsageError, pick
from fmwc.flow import CellVectors, Channel, FlatTorus, Space
from fmwc.readers import read_pt, read_text, shown
from fmwc.sampling import Trajectory

__all__ = ["UNUSED", "Batch", "OMatG", "as_crystals", "load", "states"]

UNUSED = ("*_out_2", "*.type_out")  # layers of OMatG's encoder that its ODE does not use

FIRST, LAST = 1e-3, 1 - 1e-3  # OMatG's times of noise and data
MOST_ATOMS = 20  # per cell, in MP-20


@dataclass(frozen=True)
class Batch:
    """Crystals as OMatG's models read them.

    Attributes:
        species: Atomic numbers, `(ΣA,)`.
        pos: Fractional coordinates, `(ΣA, 3)`.
        cell: The cell vectors as rows, `(B, 3, 3)`.
        n_atoms: The number of atoms of each crystal, `(B,)`.
        batch: The crystal of each atom, `(ΣA,)`.
        ptr: The index of each crystal's first atom, and the number of all atoms, `(B + 1,)`.
    """

    species: Tensor
    pos: Tensor
    cell: Tensor
    n_atoms: Tensor
    batch: Tensor
    ptr: Tensor


class OMatG(nn.Module):
    """Adapter of a model of OMatG, called as `(x, t, atoms=…, types=…)`.

    Arguments:
        network: A model of OMatG for given species, called as `network(batch, t)`, which returns an object with the
            velocities `pos_b` and `cell_b`. Its encoder must connect all pairs of atoms (`edge_style="fc"`).
        coord, lattice: The interpolants: `linear` or `cosine` (OMatG's trigonometric one). Coordinates are periodic.
        annealing: OMatG's velocity annealing factors of `coord` and `lattice`.
        costs: The weights of `coord` and `lattice` in OMatG's loss.
        centred: Whether the loss ignores a common motion of the atoms (`correct_center_of_mass_motion`).
        noise: The distribution of the lengths of the cell vectors at t = 0.
        steps: The number of steps of OMatG's own integration.
        width: The largest number of atoms in a cell.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        coord: str = "linear",
        lattice: str = "linear",
        annealing: tuple[float, float] = (0.0, 0.0),
        costs: tuple[float, float] = (1.0, 1.0),
        centred: bool = False,
        noise: CellVectors | None = None,
        steps: int = 209,
        width: int = MOST_ATOMS,
    ) -> None:
        super().__init__()
        encoder = getattr(network, "encoder", None)
        if (style := getattr(encoder, "edge_style", "fc")) != "fc":
            raise UsageError(f"the encoder must connect all pairs of atoms (edge_style='fc'), got edge_style='{style}'")
        if getattr(network, "property_keys", None) is not None:
            raise UsageError(
                "models with property_keys are not supported; give one that was trained without properties"
            )
        self.network, self.centred, self.steps, self.width = network, centred, steps, width
        self.schedules = {
            name: pick(SCHEDULES, schedule, "interpolant")
            for name, schedule in (("coord", coord), ("lattice", lattice))
        }
        self.annealing = dict(zip(self.schedules, annealing, strict=True))
        self.space = Space(
            {
                "coord": Channel((width, 3), FlatTorus(), "uniform", rows="atoms", weight=costs[0]),
                "lattice": Channel((3, 3), noise or CellVectors(), "own", weight=costs[1]),
            }
        )

    def forward(self, x: dict[str, Tensor], t: Tensor, *, atoms: Tensor, types: Tensor) -> dict[str, Tensor]:
        """Return the velocity towards data."""
        used = torch.arange(self.width, device=atoms.device) < atoms[:, None]
        if types.shape != used.shape or types.is_floating_point():
            raise ShapeError(
                f"types must hold the atomic number of each atom, integers of shape {tuple(used.shape)}, got "
                f"{types.dtype} of shape {tuple(types.shape)}"
            )
        crystal = _owners(atoms)
        first = torch.cat([atoms.new_zeros(1), atoms.cumsum(0)])
        batch = Batch(types[used], x["coord"][used], x["lattice"], atoms, crystal, first)
        v = self.network(batch, _their_time(t))
        coord = v.pos_b.new_zeros(used.numel(), 3).index_add(0, used.flatten().nonzero()[:, 0], v.pos_b)
        return {"coord": (LAST - FIRST) * coord.unflatten(0, used.shape), "lattice": (LAST - FIRST) * v.cell_b}

    def rows(self, x: Any, t: Any, *, atoms: Tensor, types: Tensor) -> dict[str, Tensor | int]:
        """Return the crystal of each ordered pair of atoms (an atom with itself included), or of each atom."""
        return {"*edge*": _owners(atoms.square()), "*lattice_out*": 1, "*": _owners(atoms)}

    def speeds(self, t: Tensor) -> dict[str, Tensor]:
        """Return the factor 1 + s·t of each channel. OMatG does not limit it, so its last steps may overshoot."""
        return {name: 1 + slope * _their_time(t) for name, slope in self.annealing.items() if slope}

    def path(self, x0: Any, x1: Any, t: Tensor) -> tuple[Any, Any]:
        """Return OMatG's interpolant at t and its velocity. Rows that are zero in x0 and x1 are unused."""
        time, torus = _their_time(t), self.space.channels["coord"].manifold
        nearest = x0["coord"] + torus.logmap(x0["coord"], x1["coord"])
        coord, moving = path_along(self.schedules["coord"], x0["coord"], nearest, time)
        lattice, growing = path_along(self.schedules["lattice"], x0["lattice"], x1["lattice"], time)
        if self.centred:
            used = ((x0["coord"] != 0) | (x1["coord"] != 0)).any(-1, keepdim=True)
            moving = (moving - moving.sum(1, keepdim=True) / used.sum(1, keepdim=True).clamp_min(1)) * used
        span = LAST - FIRST
        return {"coord": torus.projx(coord), "lattice": lattice}, {"coord": span * moving, "lattice": span * growing}


def _their_time(t: Tensor) -> Tensor:
    return FIRST + (LAST - FIRST) * t


def _owners(counts: Tensor) -> Tensor:  # (B,) -> (Σ,)
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


# ---- structures ------------------------------------------------------------------------------------------------------


def states(
    structures: Crystals | Sequence[Any], width: int = MOST_ATOMS
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return structures as data x1 and conditions, to fit the noise: `fit_noise(field, x1, cond=cond)`.

    Cells are turned as in OMatG's data, which come from CIF files: c along z, and a in the plane of x and z.

    Arguments:
        structures: Crystals, pymatgen structures or ASE atoms.
        width: The largest number of atoms in a cell.
    """
    found = candidates(structures)
    for one in found:
        if one.problem or not 0 < len(one) <= width:
            raise DataError(f"structure '{one.name}' {one.problem or f'has {len(one)} atoms; give 1 to {width}'}")
    atoms = torch.tensor([len(one) for one in found])
    numbers, coords = (
        torch.cat([torch.as_tensor(getattr(one, name)) for one in found]) for name in ("numbers", "coords")
    )
    cells = torch.stack([torch.as_tensor(one.cell) for one in found])
    x1 = {"coord": pad(atoms, coords.remainder(1.0), width).float(), "lattice": _turned(cells).float()}
    return x1, {"atoms": atoms, "types": pad(atoms, numbers.long(), width)}


def as_crystals(run: Trajectory) -> Crystals:
    """Return the structures of a run, to judge them or to write files."""
    cell = run.x["lattice"].detach().cpu()
    lengths = cell.norm(dim=-1)
    angles = torch.rad2deg(_cosines(cell).clamp(-1, 1).arccos())
    return Crystals(run.cond["types"].cpu(), run.x["coord"].detach().cpu(), lengths, angles, tuple(run.names))


def _cosines(cell: Tensor) -> Tensor:  # (B, 3, 3) -> (B, 3)
    """Return the cosines of α, β and γ."""
    unit = cell / cell.norm(dim=-1, keepdim=True)
    return (unit.roll(-1, 1) * unit.roll(-2, 1)).sum(-1)


def _turned(cell: Tensor) -> Tensor:  # (B, 3, 3) -> (B, 3, 3)
    """Turn cells so that c lies along z and a in the plane of x and z, with a positive x."""
    lengths, (alpha, beta, gamma) = cell.norm(dim=-1), _cosines(cell).unbind(-1)
    width, zero = (1 - beta.square()).sqrt(), torch.zeros_like(alpha)
    x = (gamma - alpha * beta) / width
    y = (1 - alpha.square() - x.square()).clamp_min(0).sqrt()
    rows = [width, zero, beta, x, y, alpha, zero, zero, torch.ones_like(alpha)]
    return lengths[..., None] * torch.stack(rows, -1).unflatten(-1, (3, 3))


# ---- OMatG's files ---------------------------------------------------------------------------------------------------

INSTALL = "git+https://github.com/FERMat-ML/OMatG"
SUPPORTED = ("CSPNetFull", "UniformPositionDistribution", "InformedLatticeDistribution")
INTERPOLANTS = {
    "PeriodicLinearInterpolant": "linear",
    "PeriodicTrigonometricInterpolant": "cosine",
    "LinearInterpolant": "linear",
    "TrigonometricInterpolant": "cosine",
}


def load(config: str | Path, checkpoint: str | Path | None = None, *, width: int = MOST_ATOMS) -> OMatG:
    """Return the adapter of a model that OMatG trained. Needs OMatG, which is installed from its repository.

    Configurations that the adapter does not reproduce (de novo generation, latent noise, SDEs) are refused.

    Arguments:
        config: OMatG's YAML configuration of the run.
        checkpoint: The Lightning checkpoint, of which only tensors are read; without it, the weights are random.
        width: The largest number of atoms in a cell.
    """
    yaml = need("yaml", "pyyaml")
    try:
        model = yaml.safe_load(read_text(config, 1 << 20))["model"]
        options, cells = _options(model), model["sampler"]["init_args"]["cell_distribution"]
        network, lengths = _built(model["model"]), _built(cells)
    except (yaml.YAMLError, LookupError, TypeError, ValueError, RecursionError) as problem:
        if isinstance(problem, UsageError):
            raise
        raise DataError(f"{shown(config)} is no configuration that can be loaded: {one_line(problem)}") from problem
    if checkpoint is not None:
        _fill(network, checkpoint)
    noise = CellVectors(tuple(lengths._length_log_means), tuple(lengths._length_log_stds))
    return OMatG(network, noise=noise, width=width, **options)


def _options(model: Any) -> dict[str, Any]:
    """Return the options of the adapter."""
    si, found = model["si"]["init_args"], {}
    made = dict(zip(si["data_fields"], si["stochastic_interpolants"], strict=True))
    if _name(made["species"]) != "SingleStochasticInterpolantIdentity":
        raise ValueError("the species change, but only models for given species (structure prediction) are supported")
    sampler, parts = model["sampler"]["init_args"], model["model"]["init_args"]
    classes = (parts["encoder"], sampler["pos_distribution"], sampler["cell_distribution"])
    if (names := tuple(map(_name, classes))) != SUPPORTED:
        raise ValueError(f"it has {', '.join(names)}; supported are {', '.join(SUPPORTED)}")
    for name, channel in (("pos", "coord"), ("cell", "lattice")):
        given = made[name]["init_args"]
        kind = _name(given["interpolant"])
        solver = (given.get("integrator_kwargs") or {}).get("method", "euler")
        if kind.startswith("Periodic") != (name == "pos") or kind not in INTERPOLANTS:
            raise ValueError(f"the interpolant of {name}, {kind}, is not supported")
        if (given["differential_equation_type"], solver) != ("ODE", "euler") or given.get("gamma"):
            raise ValueError(f"{name} is not integrated as an ODE by Euler steps without latent noise (gamma)")
        found[channel] = INTERPOLANTS[kind]
    terms = [made[name]["init_args"] for name in ("pos", "cell")]
    costs = model["relative_si_costs"]
    return {
        **found,
        "annealing": tuple(float(given.get("velocity_annealing_factor") or 0.0) for given in terms),
        "costs": (costs["pos_loss_b"], costs["cell_loss_b"]),
        "centred": bool(terms[0].get("correct_center_of_mass_motion")),
        "steps": int(si["integration_time_steps"]) - 1,
    }


def _name(node: Any) -> str:
    """Return the name of the class of an entry, which is a path or has one."""
    return str(node if isinstance(node, str) else node["class_path"]).rpartition(".")[2]


def _built(node: Any) -> Any:
    """Build an object of OMatG from its entry."""
    module, _, name = node["class_path"].rpartition(".")
    if not module.startswith("omg."):
        raise ValueError(f"class_path {node['class_path']} is not one of omg")
    given = node.get("init_args") or {}
    nested = {k: _built(v) if isinstance(v, dict) and "class_path" in v else v for k, v in given.items()}
    return getattr(need(module, INSTALL), name)(**nested)


def _fill(network: nn.Module, path: str | Path) -> None:
    """Load the weights of a Lightning checkpoint."""
    content = read_pt(path, error=CheckpointError)
    weights = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError(f"{shown(path)} has no state_dict; give a checkpoint that Lightning saved")
    inner = {str(name).removeprefix("model."): weight for name, weight in weights.items()}
    try:
        network.load_state_dict(inner)
    except (RuntimeError, TypeError, AttributeError) as problem:
        raise CheckpointError(
            f"{shown(path)} does not fit the network of the configuration: {one_line(problem)}"
        ) from problem
