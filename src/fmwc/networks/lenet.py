"""LeNet-style image classifier (App. dataset-metrics)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fmwc.errors import ShapeError


class LeNet(nn.Module):
    """LeNet-style classifier: two convolutions with pooling, hidden layers of 120 and 84 units, and the classes.

    Arguments:
        classes: The number of classes.
        side: The side of the square images, in pixels.
    """

    def __init__(self, classes: int = 10, side: int = 28) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"classes": classes, "side": side}
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.dense = nn.Sequential(nn.Linear(32 * (side // 4) ** 2, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
        self.out = nn.Linear(84, classes)

    def features(self, x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B, 84)
        """Return the penultimate layer, in which the Fréchet distance is computed."""
        side = self.config["side"]
        if tuple(x.shape[1:]) != (1, side, side):
            raise ShapeError(f"this classifier takes images of shape (1, {side}, {side}), got {tuple(x.shape[1:])}")
        return self.dense(torch.flatten(self.convolutions(x), 1))

    def forward(self, x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B, classes)
        return self.out(self.features(x))
