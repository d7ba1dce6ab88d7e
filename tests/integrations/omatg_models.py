"""Small models with the interface of OMatG's: a stand-in of our own, and OMatG's CSPNet if it can be imported.

OMatG is not on PyPI. To run its tests: PYTHONPATH=path/to/OMatG pytest tests/integrations/test_omatg.py, with
torch_scatter, torchdiffeq, torchsde and lmdb installed.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmwc.integrations.omatg import Batch


class StandInEncoder(nn.Module):
    """Messages between all ordered pairs of atoms, each with itself included, in the order of the crystals."""

    edge_style = "fc"

    def __init__(self, hidden: int = 16, layers: int = 2, frequencies: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, hidden)
        self.start = nn.Linear(hidden + 8, hidden)
        self.turns = frequencies
        self.edges = nn.ModuleList(nn.Linear(2 * hidden + 9 + 6 * frequencies, hidden) for _ in range(layers))
        self.nodes = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(layers))
        self.coord_out = nn.Linear(hidden, 3, bias=False)
        self.lattice_out = nn.Linear(hidden, 9, bias=False)
        self.coord_out_2 = nn.Linear(hidden, 3, bias=False)  # the denoiser, which an ODE does not use

    def forward(self, x: Batch, t: Tensor) -> SimpleNamespace:
        first = [torch.arange(int(a), int(b)) for a, b in zip(x.ptr[:-1], x.ptr[1:], strict=True)]
        i, j = torch.cat([torch.cartesian_prod(one, one).reshape(-1, 2) for one in first]).T
        h = self.start(torch.cat([self.embedding(x.species - 1), t[x.batch]], 1))
        turn = (x.pos[j] - x.pos[i])[..., None] * 2 * math.pi * torch.arange(1, self.turns + 1)
        waves = torch.cat([turn.sin(), turn.cos()], -1).flatten(1)
        metric = (x.cell @ x.cell.mT).flatten(1)[x.batch[i]]
        for edge, node in zip(self.edges, self.nodes, strict=True):
            message = torch.nn.functional.silu(edge(torch.cat([h[i], h[j], metric / 30, waves], 1)))
            mean = h.new_zeros(h.shape).index_add(0, i, message) / x.n_atoms[x.batch][:, None]
            h = h + torch.nn.functional.silu(node(torch.cat([h, mean], 1)))
        pooled = h.new_zeros(len(x.cell), h.shape[1]).index_add(0, x.batch, h) / x.n_atoms[:, None]
        growth = self.lattice_out(pooled).unflatten(1, (3, 3)) @ x.cell
        eta = self.coord_out_2(h)
        return SimpleNamespace(pos_b=self.coord_out(h), cell_b=growth, pos_eta=eta, cell_eta=growth)


class StandIn(nn.Module):
    """The call of OMatG's Model: a time embedding, then the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = StandInEncoder()

    def forward(self, x: Batch, t: Tensor) -> SimpleNamespace:
        when = t[:, None] * torch.tensor([1.0, 3.0, 9.0, 27.0], dtype=t.dtype)
        return self.encoder(x, torch.cat([when.sin(), when.cos()], 1))


def theirs() -> Any:
    """Return OMatG's own model, small, with random weights."""
    model = pytest.importorskip("omg.model.model", reason="OMatG is not installed")
    from omg.model.encoders.cspnet_full import CSPNetFull
    from omg.model.heads.pass_through import PassThrough
    from omg.model.model_utils import SinusoidalTimeEmbeddings

    encoder = CSPNetFull(hidden_dim=16, latent_dim=8, num_layers=4, num_freqs=3)  # CSPNet has 4 in any case
    return model.Model(encoder=encoder, head=PassThrough(), time_embedder=SinusoidalTimeEmbeddings(8))


MODELS = {"stand-in": StandIn, "OMatG": theirs}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()
