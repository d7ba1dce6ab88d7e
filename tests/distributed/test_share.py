"""The losses of the shares of a batch, weighted by their sizes, add up to the loss of the batch."""

import pytest
import torch
from torch import nn

from fmwc.data.batches import select_rows
from fmwc.field import attach
from fmwc.flow import elbo_loss
from fmwc.networks import UNet
from fmwc.randomness import Share, Stream
from fmwc.state import tree_map
from tests import cells
from tests.conftest import awaken, dict_field, mlp_field
from tests.distributed.cases import CHANNELS, ROWS


class Attending(nn.Module):
    """Network with several rows per sample: three tokens."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, t):
        h = self.first(x)
        return self.last(h + self.attention(h, h, h)[0]) * t[:, None, None]


def images():
    return torch.rand(11, 1, 4, 4, generator=torch.Generator().manual_seed(2))


def crystals():
    x, _, atoms = cells.batch(*(1 + i % cells.WIDTH for i in range(11)), dtype=torch.float32)
    return cells.field(torch.float32), x, {"atoms": atoms}


def labelled():
    torch.manual_seed(0)
    return UNet(base=8, stages=(1, 2), cond=8, classes=3)


FIELDS = {
    "points": lambda: (mlp_field(), ROWS[:11], {}),
    "labels": lambda: (attach(labelled(), space=(1, 4, 4), width=8), images(), {"y": torch.arange(11) % 3}),
    "channels": lambda: (dict_field(), {k: v[:11] for k, v in CHANNELS.items()}, {}),
    "tokens": lambda: (attach(Attending(), space=(3, 2), width=8), torch.randn(11, 3, 2), {}),
    "crystals": crystals,
}


def losses(field, x, cond, count, whole):
    """Return the loss and the gradient of a batch, computed in `count` shares."""
    total, loss = 11, 0.0
    parameters = [p for p in field.parameters() if p.requires_grad]
    gradients = [torch.zeros_like(p) for p in parameters]
    for index in range(count):
        stream = Stream(torch.Generator().manual_seed(5))
        rows = torch.arange(index, total, count)
        share = Share(stream, rows, total, lambda: (x, cond))
        own = select_rows((x, cond), rows)
        given = (x, cond, stream) if whole else (*own, share)
        value = elbo_loss(field, given[0], 0.1, seed=given[2], cond=given[1])
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        part = 1.0 if whole else share.part
        gradients = [a if b is None else a + part * b for a, b in zip(gradients, found, strict=True)]
        loss += part * value.item()
    return loss, gradients


@pytest.mark.parametrize("kind", FIELDS)
def test_losses_of_shares_add_up_to_the_loss_of_the_batch(kind):
    field, x, cond = FIELDS[kind]()
    awaken(field).double()
    x = tree_map(torch.Tensor.double, x)
    expected, gradients = losses(field, x, cond, 1, True)
    for count in (1, 2, 3):
        loss, found = losses(field, x, cond, count, False)
        assert loss == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-8)
