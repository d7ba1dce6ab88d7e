"""A training with Lightning in two processes on the CPU, with both callbacks. Each process writes its results."""

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import fmwc
from fmwc.networks import MLP

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch

    from fmwc.integrations.lightning import ConfidenceCallback, FitNoise

ROWS, BATCH = 37, 8  # an odd number, so that Lightning repeats a row


class Flow(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = MLP(2, 16, 2, 8)
        self.net.register_buffer("seen", torch.zeros(2))  # differs between processes, as in a batch norm

    def training_step(self, batch, _):
        self.net.seen += batch[0].sum(0)
        return fmwc.flow_matching_loss(self.net, (2,), batch[0])

    def validation_step(self, batch, _):
        pass

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(out):
    torch.manual_seed(0)
    x = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(1))
    flow, data = Flow(), DataLoader(TensorDataset(x), BATCH, shuffle=True)
    rank = lambda: flow.global_rank  # noqa: E731
    report = ConfidenceCallback(
        "net",
        batch=lambda batch: batch[0],
        count=8,
        steps=2,
        # The second process has no failures, so its AUROC is not defined.
        labels=lambda x, cond: torch.arange(len(x)) < (3 if rank() == 0 else 0),
    )
    seen = []

    def rows(batch):
        seen.append(batch[0].clone())
        return batch[0]

    fit = FitNoise("net", 6, batch=rows, path=out / "field", confidence=False, conventions=False, lr=1e-2)
    trainer = lightning.pytorch.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[report, fit],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(flow, data, DataLoader(TensorDataset(x), BATCH))
    save_file({k: v.contiguous() for k, v in fit.field.noise.state_dict().items()}, out / f"noise.{rank()}")
    save_file({str(i): batch for i, batch in enumerate(seen)}, out / f"seen.{rank()}")
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    sampler = trainer.train_dataloader.sampler
    (out / f"told.{rank()}").write_text(
        json.dumps({"logged": logged, "replicas": sampler.num_replicas, "rank": sampler.rank})
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
