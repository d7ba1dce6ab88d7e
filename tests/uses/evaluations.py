"""Count the evaluations of a network, in samples."""

from torch import nn


class Counter:
    """Count the samples that pass through a network."""

    def __init__(self, network: nn.Module) -> None:
        self.rows = 0
        network.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs):
        x = args[0]
        self.rows += len(next(iter(x.values())) if isinstance(x, dict) else x)
