"""CHGNet, in batches, without forces; its weights come with its package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fmwc.errors import DataError
from fmwc.metrics.crystals.candidates import Candidate, plain
from fmwc.metrics.crystals.extras import need, quiet, said
from fmwc.metrics.crystals.graphs import graph

__all__ = ["Chgnet"]

BATCH = {"cpu": 10_000, "cuda": 300_000}  # bonds and angles that go through the network together
WEIGHTS = "pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar"


class _Converter(nn.Module):
    """Our graphs in place of the package's converter, for its ASE calculator."""

    def __init__(self, cutoff: float, bond_cutoff: float) -> None:
        super().__init__()
        self.atom_graph_cutoff, self.bond_graph_cutoff = cutoff, bond_cutoff

    def forward(self, structure: Any, graph_id: Any = None, mp_id: Any = None) -> Any:
        made = graph(plain(structure, ""), self.atom_graph_cutoff, self.bond_graph_cutoff)
        made.atom_frac_coord.requires_grad_()  # forces and stress are its derivatives
        made.lattice.requires_grad_()
        return made

    def set_isolated_atom_response(self, on_isolated_atoms: str) -> None:
        """They are always an error."""


class Chgnet:
    """CHGNet by its own batches: energies alone, without forces. Its output needs no correction."""

    name = "chgnet"
    highest = 94

    def __init__(self, device: str) -> None:
        package = need("chgnet")
        with quiet():
            # What `CHGNet.load()` does, but without unpickling.
            state = torch.load(Path(package.__file__).parent / WEIGHTS, map_location="cpu", weights_only=True)
            model = need("chgnet.model.model").CHGNet.from_dict(state["model"], mlp_out_bias=False, version="0.3.0")
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self._cutoffs = model.graph_converter.atom_graph_cutoff, model.graph_converter.bond_graph_cutoff
        model.graph_converter = _Converter(*self._cutoffs)

    def ase(self) -> Any:
        with quiet():
            make = need("chgnet.model.dynamics").CHGNetCalculator
            return make(self.model, use_device=self.device, on_isolated_atoms="error")

    def batches(self, those: Sequence[Candidate]) -> Iterator[list[float | str]]:
        found: list[float | str] = []
        waiting: list[tuple[int, Any]] = []  # place in `found`, graph
        size = 0
        for candidate in those:
            try:
                made = graph(candidate, *self._cutoffs)
            except (DataError, ValueError, MemoryError) as error:
                found.append(str(error) if isinstance(error, DataError) else f"no graph: {said(error)}")
                continue
            cost = len(made.atom_graph) + len(made.bond_graph)
            if waiting and size + cost > BATCH["cuda" if self.device.startswith("cuda") else "cpu"]:
                self._fill(found, waiting)
                yield found
                found, waiting, size = [], [], 0
            waiting.append((len(found), made))
            found.append("")
            size += cost
        self._fill(found, waiting)
        yield found

    def _fill(self, found: list[float | str], waiting: list[tuple[int, Any]]) -> None:
        if not waiting:
            return
        try:
            with torch.no_grad():
                values = self.model([made.to(self.device) for _, made in waiting], task="e")["e"].cpu().tolist()
        except (RuntimeError, MemoryError, IndexError, ValueError) as error:
            if len(waiting) == 1:
                found[waiting[0][0]] = f"chgnet failed: {said(error)}"
                return
            for one in waiting:  # so that only the culprit goes without
                self._fill(found, [one])
            return
        for (place, _), value in zip(waiting, values, strict=True):
            found[place] = value
