"""Network for images: a UNet conditioned on time and class in every residual block (App. architectures)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.errors import ShapeError, UsageError
from fmwc.modes import compiling
from fmwc.networks.mlp import TimeEmbedding

GROUPS = 8  # of every GroupNorm


class Block(nn.Module):
    """Residual block: norm, SiLU and convolution, twice, with the condition added in between."""

    def __init__(self, inputs: int, outputs: int, cond: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, inputs), nn.GroupNorm(GROUPS, outputs)
        self.act1, self.act2 = nn.SiLU(), nn.SiLU()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.cond = nn.Linear(cond, outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:  # (B, C, H, W), (B, E)
        h = self.conv1(self.act1(self.norm1(x))) + self.cond(e)[:, :, None, None]
        return self.skip(x) + self.conv2(self.act2(self.norm2(h)))


class UNet(nn.Module):
    """UNet velocity network v(x, t, y) for images: stages of residual blocks, each at half the resolution.

    Arguments:
        channels: The number of channels of an image.
        base: The number of channels of the first stage.
        stages: The channels of each stage, in multiples of `base`; the last one is the bottleneck.
        blocks: The number of residual blocks per stage.
        cond: The size of the embedding of time and class.
        classes: The number of classes; 0 for an unconditional network.
        outputs: The number of output channels; `channels` unless a second head is needed.
    """

    def __init__(
        self,
        channels: int = 1,
        base: int = 32,
        stages: Sequence[int] = (1, 2, 4),
        blocks: int = 1,
        cond: int = 128,
        classes: int = 10,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        if base % GROUPS:
            raise UsageError(f"base must be a multiple of {GROUPS}, the number of groups of each GroupNorm; got {base}")
        if cond % 2:
            raise UsageError(f"cond must be even, for sines and cosines; got {cond}")
        self.config: dict[str, Any] = {
            "channels": channels, "base": base, "stages": list(stages), "blocks": blocks, "cond": cond,
            "classes": classes, "outputs": outputs,
        }  # fmt: skip
        self.embed = TimeEmbedding(cond)
        self.time = nn.Linear(cond, cond)
        self.label = nn.Embedding(classes, cond) if classes else None
        self.act = nn.SiLU()

        widths = [base * multiple for multiple in stages]
        self.first = nn.Conv2d(channels, base, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        before = base
        for width in widths[:-1]:
            self.down.append(self._stage(before, width, blocks, cond))
            self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
            before = width
        self.middle = self._stage(before, widths[-1], blocks + 1, cond)
        self.grow, self.up = nn.ModuleList(), nn.ModuleList()
        before = widths[-1]
        for width in reversed(widths[:-1]):
            self.grow.append(nn.Conv2d(before, width, 3, padding=1))
            self.up.append(self._stage(2 * width, width, blocks, cond))
            before = width
        self.norm, self.last = nn.GroupNorm(GROUPS, before), nn.SiLU()
        self.out = nn.Conv2d(before, outputs or channels, 3, padding=1)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, cond: int) -> nn.ModuleList:
        return nn.ModuleList(Block(inputs if i == 0 else outputs, outputs, cond) for i in range(blocks))

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:  # (B, C, H, W), (B,) or (), (B,)
        self._check(x, y)
        e = self.time(self.embed(t.expand(x.shape[0]).to(x.dtype)))
        if self.label is not None:
            e = e + self.label(y)
        e = self.act(e)
        h = self.first(x)
        skipped = []
        for blocks, shrink in zip(self.down, self.shrink, strict=True):
            for block in blocks:  # type: ignore[attr-defined]
                h = block(h, e)
            skipped.append(h)
            h = shrink(h)
        for block in self.middle:
            h = block(h, e)
        for grow, blocks in zip(self.grow, self.up, strict=True):
            h = torch.cat([grow(F.interpolate(h, scale_factor=2.0, mode="nearest")), skipped.pop()], 1)
            for block in blocks:  # type: ignore[attr-defined]
                h = block(h, e)
        return self.out(self.last(self.norm(h)))

    def _check(self, x: Tensor, y: Tensor | None) -> None:
        step = 2 ** len(self.down)
        if x.shape[-1] % step or x.shape[-2] % step:
            raise ShapeError(f"this UNet takes images whose sides are multiples of {step}, got {tuple(x.shape[-2:])}")
        if (y is None) != (self.label is None):
            needed = "needs the class of every image, y" if y is None else "has no classes; omit y"
            raise UsageError(f"this UNet {needed}")
        if y is None:
            return
        if y.is_floating_point() or y.shape != x.shape[:1]:
            raise ShapeError(f"y must be one integer per image ({len(x)}), got {y.dtype} of shape {tuple(y.shape)}")
        if y.is_cuda or compiling():  # reading values would wait for the GPU or break the graph
            return
        classes = self.config["classes"]
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
            raise UsageError(f"y must lie between 0 and {classes - 1}, got {int(y.min())} to {int(y.max())}")
