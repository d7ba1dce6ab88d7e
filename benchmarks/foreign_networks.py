"""Check the variance on small random networks of other libraries.

    python -m benchmarks.foreign_networks [--only NAME …] [--out results/interop/exactness.json]

For each network, the linearised variance (one probe per output: exact to first order) and, where its rules apply, the
diagonal one are compared with 1024 posterior draws, at a noise level where first order holds and at larger ones. Writes
the numbers, and the table of docs/networks.md. The tests in tests/interop use the same networks.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import math
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fmwc
from fmwc.adapters import Denoised, adapt, timestepped
from fmwc.errors import NoRuleError
from fmwc.estimators import Linearised, MonteCarlo
from fmwc.files import write_json
from fmwc.networks import MLP
from fmwc.provenance import Clock, provenance

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results/interop/exactness.json"
DOCS = ROOT / "docs/networks.md"
ALPHAS = (1e-4, 1e-3, 1e-2, math.exp(-3))  # the last is what attach begins with
DRAWS, SAMPLES, ABREAST = 1024, 8, 64


# ---- timm without torchvision ----------------------------------------------------------------------------------------


class _Name(type):
    """The type of names that cannot be used: they may only be inherited from, listed and compared."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(f"{cls.__name__} is torchvision's, which is not installed")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer that lets timm import `torchvision` if it is not installed. No name in it can be used.

    On import, timm imports image transforms and one class of frozen norms, which a vision transformer never calls. The
    registry's torchvision is a CUDA build, which does not import with a CPU torch ("operator torchvision::nms does not
    exist"). Only the tests and this script use this, and only if torchvision is not installed.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def name_of(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Name(name, (), {})

        module.__getattr__ = name_of  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_timm() -> types.ModuleType:
    """Import timm, without torchvision if that is not installed."""
    if "timm" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    absent = _Absent()
    sys.meta_path.append(absent)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(absent)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


# ---- the networks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Foreign:
    """A network of another library.

    Arguments:
        build: Returns the network, small and random, as a velocity network.
        shape: The shape of a state.
        needs: The module that must be installed.
        call: The call as in its library.
        adapter: The adapter that it needs.
        cond: Returns the conditions of a number of samples.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    needs: str
    call: str
    adapter: str = "none"
    cond: Callable[[int], dict[str, Tensor]] = lambda count: {}

    @property
    def missing(self) -> bool:
        return importlib.util.find_spec(self.needs) is None

    def field(self, alpha: float = ALPHAS[0], seed: int = 0) -> fmwc.Field:
        """Return the network with noise around a level α that depends on the input, as after training."""
        torch.manual_seed(seed)
        network = self.build().eval()
        wake(network)
        field = fmwc.attach(network, space=self.shape, width=8, initial_log_alpha=math.log(alpha))
        for layer in field.noise.layers:
            nn.init.normal_(layer.inference.out.weight, std=0.3)
        return field

    def inputs(self, count: int = SAMPLES) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        torch.manual_seed(1)
        return torch.randn(count, *self.shape), torch.rand(count), self.cond(count)


def wake(network: nn.Module) -> None:
    """Draw the weights that start at zero (last layers, gates of transformers), so that the output is random."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1 and not parameter.any():
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)


def _waves(t: Tensor, count: int) -> Tensor:  # (B,) -> (B, count)
    return torch.cos(math.pi * t[:, None] * torch.arange(count, device=t.device))


class Tokens(nn.Module):
    """The transformer encoder of torch as a velocity network of token states."""

    def __init__(self, features: int = 3, width: int = 16) -> None:
        super().__init__()
        self.into = nn.Linear(features + 8, width)
        layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.out = nn.Linear(width, features)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (B, N, F), (B,)
        when = _waves(t, 8)[:, None].expand(-1, x.shape[1], -1)
        return self.out(self.encoder(self.into(torch.cat([x, when], -1))))


class Graphs(nn.Module):
    """A graph network over complete graphs of `nodes` nodes, whose batch is one large graph."""

    def __init__(self, network: nn.Module, nodes: int) -> None:
        super().__init__()
        self.network = network
        pairs = [(i, j) for i in range(nodes) for j in range(nodes) if i != j]
        self.register_buffer("pairs", torch.tensor(pairs).T, persistent=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (B, N, F), (B,)
        count, nodes, _ = x.shape
        edges = (self.pairs[:, None] + nodes * torch.arange(count, device=x.device)[None, :, None]).flatten(1)
        h = torch.cat([x, _waves(t, 4)[:, None].expand(-1, nodes, -1)], -1).flatten(0, 1)
        return self.network(h, edges).unflatten(0, (count, nodes))


class Patches(nn.Module):
    """The features of a vision transformer as the velocity of an image; the time is an additional channel."""

    def __init__(self, vit: nn.Module, patch: int, channels: int = 1) -> None:
        super().__init__()
        self.vit = vit
        self.head = nn.Linear(vit.embed_dim, channels * patch**2)  # type: ignore[arg-type]
        self.patch = patch

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (B, C, H, W), (B,)
        side = x.shape[-1] // self.patch
        when = t[:, None, None, None].expand(-1, 1, *x.shape[2:])
        h = self.head(self.vit.forward_features(torch.cat([x, when], 1)))  # type: ignore[operator]
        h = h.unflatten(1, (side, side)).unflatten(-1, (-1, self.patch, self.patch))
        return h.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class Modulated(nn.Module):
    """A backbone of azula, which takes the time as a vector."""

    def __init__(self, network: nn.Module, features: int) -> None:
        super().__init__()
        self.network, self.features = network, features

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.network(x, _waves(t, self.features))


class StandInWrapper(nn.Module):
    """A stand-in for flow_matching's ModelWrapper with the documented call `wrapper(x, t, **extras)`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, t: Tensor, **extras: Any) -> Tensor:
        return self.model(x, t, **extras)


def torchcfm_unet() -> nn.Module:
    from torchcfm.models.unet import UNetModel

    net = UNetModel(dim=(1, 8, 8), num_channels=32, num_res_blocks=1, channel_mult=(1, 2), attention_resolutions="4")
    return adapt(net, time_first=True)


def diffusers(name: str, sizes: dict[str, Any], **options: Any) -> Callable[[], nn.Module]:
    """Return the builder of a network of diffusers, by name; `options` are those of `timestepped`."""
    return lambda: timestepped(getattr(importlib.import_module("diffusers"), name)(**sizes), **options)


IMAGE = {"sample_size": 8, "in_channels": 1, "out_channels": 1}
UNET = {**IMAGE, "block_out_channels": (16, 32), "layers_per_block": 1, "attention_head_dim": 8, "norm_num_groups": 8}
HEADS = {"attention_head_dim": 8, "num_attention_heads": 2}
PROMPT = {"joint_attention_dim": 16, "pooled_projection_dim": 16}

unet_2d = diffusers(
    "UNet2DModel",
    {
        **UNET,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
)
unet_2d_condition = diffusers(
    "UNet2DConditionModel",
    {
        **UNET,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 16,
    },
)
dit = diffusers(
    "DiTTransformer2DModel", {**IMAGE, **HEADS, "num_layers": 2, "patch_size": 2, "num_embeds_ada_norm": 10}
)
sd3 = diffusers(
    "SD3Transformer2DModel",
    {
        **IMAGE,
        **HEADS,
        **PROMPT,
        "num_layers": 2,
        "patch_size": 2,
        "caption_projection_dim": 16,
        "pos_embed_max_size": 8,
    },
    backwards=True,
)
flux = diffusers(
    "FluxTransformer2DModel",
    {**HEADS, **PROMPT, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (2, 2, 4)},
    backwards=True,
    scale=1.0,
    img_ids=torch.tensor([(0, i, j) for i in range(4) for j in range(4)]).float(),
    txt_ids=torch.zeros(3, 3),
)


def graph_sage() -> nn.Module:
    from torch_geometric.nn import GraphSAGE

    return Graphs(GraphSAGE(2 + 4, 16, num_layers=3, out_channels=2, act="silu"), nodes=5)


def graph_attention() -> nn.Module:
    from torch_geometric.nn import GAT

    return Graphs(GAT(2 + 4, 16, num_layers=2, out_channels=2, heads=2, v2=True, act="elu"), nodes=5)


def timm_vit() -> nn.Module:
    vit = import_timm().models.VisionTransformer(
        img_size=8,
        patch_size=2,
        in_chans=2,
        num_classes=0,
        embed_dim=16,
        depth=2,
        num_heads=2,
        class_token=False,
        global_pool="",
    )
    return Patches(vit, patch=2)


def azula_denoiser() -> nn.Module:
    from azula.denoise import KarrasDenoiser
    from azula.nn.unet import UNet
    from azula.noise import RectifiedSchedule

    backbone = Modulated(UNet(1, 1, mod_features=8, hid_channels=(8, 16), hid_blocks=(1, 1), groups=4), features=8)
    return Denoised(KarrasDenoiser(backbone, RectifiedSchedule()))


def model_wrapper() -> nn.Module:
    """Return a network in flow_matching's wrapper if that package is installed.

    Its licence (CC BY-NC) rules it out as a dependency.
    """
    if importlib.util.find_spec("flow_matching") is None:
        return StandInWrapper(MLP(2, 32, 2, 16))
    from flow_matching.utils import ModelWrapper

    class Mine(ModelWrapper):
        def forward(self, x: Tensor, t: Tensor, **extras: Any) -> Tensor:
            return self.model(x, t, **extras)

    return Mine(MLP(2, 32, 2, 16))


def _text(count: int) -> dict[str, Tensor]:
    return {"encoder_hidden_states": torch.randn(count, 3, 16)}


def _prompt(count: int) -> dict[str, Tensor]:
    return {**_text(count), "pooled_projections": torch.randn(count, 16)}


def _classes(count: int) -> dict[str, Tensor]:
    return {"class_labels": torch.arange(count) % 10}


NETWORKS = {
    "torchcfm UNet": Foreign(torchcfm_unet, (1, 8, 8), "torchcfm", "net(t, x)", "adapt(net, time_first=True)"),
    "diffusers UNet2DModel": Foreign(unet_2d, (1, 8, 8), "diffusers", "net(x, 1000t).sample", "timestepped(net)"),
    "diffusers UNet2DConditionModel": Foreign(
        unet_2d_condition, (1, 8, 8), "diffusers", "net(x, 1000t, text).sample", "timestepped(net)", _text
    ),
    "diffusers DiTTransformer2DModel": Foreign(
        dit, (1, 8, 8), "diffusers", "net(x, 1000t, class).sample", "timestepped(net)", _classes
    ),
    "diffusers SD3Transformer2DModel": Foreign(
        sd3,
        (1, 8, 8),
        "diffusers",
        "net(x, text, pooled, 1000(1−t)).sample",
        "timestepped(net, backwards=True)",
        _prompt,
    ),
    "diffusers FluxTransformer2DModel": Foreign(
        flux,
        (16, 4),
        "diffusers",
        "net(x, text, pooled, 1−t, places).sample",
        "timestepped(net, backwards=True, scale=1.0, …)",
        _prompt,
    ),
    "torch TransformerEncoder": Foreign(Tokens, (5, 3), "torch", "net(x, t)"),
    "torch_geometric GraphSAGE": Foreign(graph_sage, (5, 2), "torch_geometric", "net(nodes, edges)", "own module"),
    "torch_geometric GAT (v2)": Foreign(graph_attention, (5, 2), "torch_geometric", "net(nodes, edges)", "own module"),
    "timm VisionTransformer": Foreign(timm_vit, (1, 8, 8), "timm", "net.forward_features(image)", "own module"),
    "azula KarrasDenoiser": Foreign(azula_denoiser, (1, 8, 8), "azula", "net(x, 1−t).mean", "Denoised(net)"),
    "flow_matching ModelWrapper": Foreign(model_wrapper, (2,), "torch", "net(x, t, **extras)"),
}


# ---- the measurement -------------------------------------------------------------------------------------------------


def spearman(a: Tensor, b: Tensor) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(a.flatten().numpy(), b.flatten().numpy())[0])


def compare(
    field: fmwc.Field, x: Tensor, t: Tensor, cond: dict[str, Tensor], draws: int = DRAWS, ceiling: bool = True
) -> dict[str, Any]:
    """Compare linearised and diagonal variance with posterior draws: ratio of means, median ratio, Spearman."""

    def drawn(seed: int) -> Tensor:
        return field.moments(x, t, MonteCarlo(draws, ABREAST), seed=seed, cond=cond).var

    truth = drawn(0)
    exact = field.moments(x, t, cond=cond).var
    probed = field.moments(x, t, Linearised(16), seed=0, cond=cond).var
    found: dict[str, Any] = {
        "ratio": float(exact.mean() / truth.mean()),
        "median": float((exact / truth).median()),
        "spearman": spearman(exact, truth),
        "16 probes": float(probed.mean() / truth.mean()),
    }
    if ceiling:
        found["spearman of draws with other draws"] = spearman(drawn(1), truth)
    try:
        diagonal = field.moments(x, t, "diagonal", cond=cond).var
        found["diagonal"] = {"ratio": float(diagonal.mean() / truth.mean()), "spearman": spearman(diagonal, truth)}
    except NoRuleError as error:
        found["diagonal"] = {"refused": refused(str(error))}
    return found


def refused(message: str) -> str:
    """Return the name of the operation without a rule, from an error message."""
    match = re.search(r"through ([\w.]+)|^([\w.]+)\(", message)
    return next((group for group in match.groups() if group), message) if match else message


def version_of(name: str) -> str:
    """Return the version of the library that a network's name begins with."""
    library = name.split()[0]
    return importlib.metadata.version(library) if importlib.util.find_spec(library) else "stand-in"


def measure(name: str, alphas: tuple[float, ...] = ALPHAS, draws: int = DRAWS) -> dict[str, Any]:
    """Measure one network."""
    foreign = NETWORKS[name]
    x, t, cond = foreign.inputs()
    field = foreign.field()
    return {
        "version": version_of(name),
        "call": foreign.call,
        "adapter": foreign.adapter,
        "outputs": math.prod(foreign.shape),
        "layers": len(field.noise.names),
        "parameters": sum(p.numel() for p in field.network.parameters()),
        "alpha": {f"{a:.2g}": compare(foreign.field(a), x, t, cond, draws, a == alphas[0]) for a in alphas},
    }


# ---- the table -------------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- made from results/interop/exactness.json -->", "<!-- end -->"


def table(networks: dict[str, Any]) -> str:
    """Return the table of docs/networks.md from the numbers."""
    small, *larger = next(iter(networks.values()))["alpha"]

    def row(name: str, entry: dict[str, Any]) -> dict[str, str]:
        compared = entry["alpha"][small]
        diagonal = compared["diagonal"]
        return {
            "network": f"{name} {entry['version']}",
            "noisy layers": str(entry["layers"]),
            f"linearised ÷ draws, α = {small}": f"{compared['ratio']:.3f}",
            "median": f"{compared['median']:.3f}",
            "16 random probes": f"{compared['16 probes']:.2f}",
            "Spearman (of draws with other draws)": (
                f"{compared['spearman']:.3f} ({compared['spearman of draws with other draws']:.3f})"
            ),
            **{f"α = {a}": f"{entry['alpha'][a]['ratio']:.2f}" for a in larger},
            f"diagonal ÷ draws, α = {small}": (
                f"refused: `{diagonal['refused']}`" if "refused" in diagonal else f"{diagonal['ratio']:.2f}"
            ),
        }

    rows = [row(name, entry) for name, entry in networks.items()]
    heads = list(rows[0])
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 2) + ["---"], *(list(row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put(table: str, page: str) -> str:
    """Return the page with its table replaced."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", help="measure only these networks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock(torch.device("cpu"))
    kept = json.loads(arguments.out.read_text())["networks"] if arguments.only and arguments.out.exists() else {}
    found = {}
    for name, foreign in NETWORKS.items():
        if arguments.only and name not in arguments.only:
            found |= {name: kept[name]} if name in kept else {}
        elif foreign.missing:
            print(f"{name}: {foreign.needs} is not installed (make test-interop)")
        else:
            found[name] = measure(name)
            shown = {a: round(v["ratio"], 3) for a, v in found[name]["alpha"].items()}
            print(f"{name}: {shown}, {clock.seconds:.0f} s", flush=True)
    about = provenance(clock.device, clock.seconds, samples=SAMPLES, draws=DRAWS)
    write_json(arguments.out, {"provenance": about, "networks": found})
    if arguments.out.resolve() == RESULTS:
        DOCS.write_text(put(table(found), DOCS.read_text()))


if __name__ == "__main__":
    main()
