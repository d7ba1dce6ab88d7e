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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.adapters import SCHEDULES, path_along
from fmwc.crystals.structures import Crystals, candidates, need, one_line, pad
from fmwc.errors import CheckpointError, DataError, ShapeError, UsageError, pick
from fmwc.flow import CellVectors, Channel, FlatTorus, Space
from fmwc.readers import (
    Check,
    anything,
    array,
    boolean,
    check,
    choice,
    mapping,
    number,
    read_pt,
    read_text,
    record,
    shown,
    text,
    whole,
)
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

    def rows(self, x: Any, t: Any, *, atoms: Tensor, types: Tensor) -> list[Tensor]:
        """Return the crystal of each atom and of each ordered pair of atoms, an atom with itself included."""
        kinds = [_owners(atoms), _owners(atoms.square())]
        return kinds[: 1 + (len(kinds[0]) < len(kinds[1]))]  # equal if each crystal has one atom

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

CONFIG_LIMIT = 1 << 20  # bytes
DEEPEST = 50  # levels of nesting
INSTALL = "git+https://github.com/FERMat-ML/OMatG"
INTERPOLANTS = {
    "pos": {"PeriodicLinearInterpolant": "linear", "PeriodicTrigonometricInterpolant": "cosine"},
    "cell": {"LinearInterpolant": "linear", "TrigonometricInterpolant": "cosine"},
}
MODULES = {"model": "model", "encoder": "encoders.cspnet_full", "head": "heads.pass_through", "time": "model_utils"}
MOST_WEIGHTS = 1 << 30


def _made(*names: str) -> Check:
    """Check for a class of OMatG, as text or with arguments; return its name and its arguments."""

    def run(value: Any, where: str) -> tuple[str, dict[str, Any]]:
        found = {"class_path": value} if isinstance(value, str) else value
        found = record({"class_path": text(200, r"omg(\.\w+)+")}, {"init_args": mapping(anything, 100)})(found, where)
        name = found["class_path"].rpartition(".")[2]
        return choice(*names)(name, f"{where}.class_path"), found.get("init_args") or {}

    return run


_NOTHING = choice()  # passes only if it is optional, and null
_EQUATION = record(
    {"interpolant": anything, "differential_equation_type": choice("ODE")},
    {
        "gamma": _NOTHING,
        "epsilon": _NOTHING,
        "integrator_kwargs": record({"method": choice("euler")}),
        "velocity_annealing_factor": number(0, 1e3),
        "correct_center_of_mass_motion": boolean,
    },
)
_IDENTITY, _SINGLE = "SingleStochasticInterpolantIdentity", "SingleStochasticInterpolant"
_INTEGRATION = record(
    {
        "stochastic_interpolants": array(_made(_IDENTITY, _SINGLE), 3, 3),
        "data_fields": array(choice("species", "pos", "cell"), 3, 3),
        "integration_time_steps": whole(2, 10**6),
    },
    more=True,
)
_SAMPLER = record(
    {
        "species_distribution": _made("MirrorSpecies"),
        "pos_distribution": _made("UniformPositionDistribution"),
        "cell_distribution": _made("InformedLatticeDistribution"),
    }
)
_LENGTHS = record({"dataset_name": choice("alex_mp_20", "carbon_24", "mp_20", "mpts_52", "perov_5")})
_SIZE = whole(1, 1 << 14)
_ENCODER = record(
    {},
    {
        **dict.fromkeys(("hidden_dim", "latent_dim", "num_layers", "max_atoms", "num_freqs"), _SIZE),
        **dict.fromkeys(("ln", "ip", "pred_type"), boolean),
        "act_fn": choice("silu"),
        "dis_emb": choice("sin", "none"),
        "edge_style": choice("fc"),
    },
)
_MODEL = record(
    {"encoder": _made("CSPNetFull"), "head": _made("PassThrough"), "time_embedder": _made("SinusoidalTimeEmbeddings")}
)
_CONFIG = record(
    {
        "model": record(
            {
                "si": _made("StochasticInterpolants"),
                "model": _made("Model"),
                "sampler": _made("IndependentSampler"),
                "relative_si_costs": record({"pos_loss_b": number(0, 1), "cell_loss_b": number(0, 1)}, more=True),
            },
            more=True,
        )
    },
    more=True,
)


def load(config: str | Path, checkpoint: str | Path | None = None, *, width: int = MOST_ATOMS) -> OMatG:
    """Return the adapter of a model that OMatG trained. Needs OMatG, which is installed from its repository.

    Configurations that the adapter does not reproduce (de novo generation, latent noise, SDEs, other encoders) are
    refused.

    Arguments:
        config: OMatG's YAML configuration of the run.
        checkpoint: The Lightning checkpoint, of which only tensors are read; without it, the weights are random.
        width: The largest number of atoms in a cell.
    """
    options, build, dataset = check(_read_yaml(config), _options, shown(config))
    network = build()
    if checkpoint is not None:
        _fill(network, checkpoint)
    lengths = need("omg.sampler.cell_distributions", INSTALL).InformedLatticeDistribution(dataset)
    noise = CellVectors(tuple(lengths._length_log_means), tuple(lengths._length_log_stds))
    return OMatG(network, noise=noise, width=width, **options)


def _read_yaml(path: str | Path) -> Any:
    yaml, content = need("yaml", "pyyaml"), read_text(path, CONFIG_LIMIT)
    depth = 0
    try:
        for event in yaml.parse(content):  # one at a time: aliases and nesting could take memory and time without bound
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:
                raise DataError(f"{shown(path)} holds aliases (*name), or more than {DEEPEST} levels; write values out")
        return yaml.safe_load(content)
    except (yaml.YAMLError, ValueError) as problem:
        raise DataError(f"{shown(path)} is not YAML ({one_line(problem)})") from problem


def _options(content: Any, where: str) -> tuple[dict[str, Any], Callable[[], nn.Module], str]:
    """Return the options of the adapter, a function that builds the network, and the dataset of the cells."""
    model = _CONFIG(content, where)["model"]
    integration = _INTEGRATION(model["si"][1], "model.si")
    made = dict(zip(integration["data_fields"], integration["stochastic_interpolants"], strict=True))
    for name, (kind, _) in made.items():
        choice(_IDENTITY if name == "species" else _SINGLE)(kind, f"the interpolant of {name}")
    equations = {name: _EQUATION(made[name][1], f"the interpolant of {name}") for name in INTERPOLANTS}
    sampler, costs = _SAMPLER(model["sampler"][1], "model.sampler"), model["relative_si_costs"]
    schedules = [
        known[_made(*known)(equations[name]["interpolant"], f"the interpolant of {name}")[0]]
        for name, known in INTERPOLANTS.items()
    ]
    options = {
        "coord": schedules[0],
        "lattice": schedules[1],
        "annealing": tuple(equations[name].get("velocity_annealing_factor") or 0.0 for name in INTERPOLANTS),
        "costs": (costs["pos_loss_b"], costs["cell_loss_b"]),
        "centred": bool(equations["pos"].get("correct_center_of_mass_motion")),
        "steps": integration["integration_time_steps"] - 1,
    }
    dataset = _LENGTHS(sampler["cell_distribution"][1], "model.sampler.cell_distribution")["dataset_name"]
    return options, _builder(_MODEL(model["model"][1], "model.model")), dataset


def _builder(parts: dict[str, tuple[str, dict[str, Any]]]) -> Callable[[], nn.Module]:
    """Return a function that builds the network, if it has a reasonable size."""
    sizes = {k: v for k, v in _ENCODER(parts["encoder"][1], "the encoder").items() if v is not None}
    times = record({"dim": whole(latent := sizes.get("latent_dim", 256), latent)})(
        parts["time_embedder"][1], "the time embedder"
    )

    def build() -> nn.Module:
        modules = {name: need(f"omg.model.{module}", INSTALL) for name, module in MODULES.items()}

        def make() -> nn.Module:
            return modules["model"].Model(
                encoder=modules["encoder"].CSPNetFull(**sizes),
                head=modules["head"].PassThrough(),
                time_embedder=modules["time"].SinusoidalTimeEmbeddings(**times),
            )

        with torch.device("meta"):  # without memory
            count = sum(weight.numel() for weight in make().parameters())
        if count > MOST_WEIGHTS:
            raise DataError(f"the network has {count:,} weights; at most {MOST_WEIGHTS:,} are allocated")
        return make()

    return build


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
