"""Lightning's callbacks, in real trainings of two epochs on the CPU, with both packages."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fmwc
from fmwc.checks import Echo
from fmwc.errors import UsageError

pytest.importorskip("lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch
    import pytorch_lightning

    from fmwc.integrations.lightning import ConfidenceCallback, FitNoise
    from tests.integrations.lightning_processes import Flow

pytestmark = pytest.mark.filterwarnings(
    "ignore::Warning:lightning", "ignore::Warning:pytorch_lightning", "ignore:.*isinstance.*LeafSpec"
)

PACKAGES = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
CENTRES = torch.tensor([[2.0, 0.0], [-2.0, 0.0]])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, x, t, y=None):
        y = torch.zeros_like(t) if y is None else y.to(t)
        return self.layers(torch.cat([x, t[:, None], y[:, None]], 1))


def module(package, lr=1e-2):
    class Flow(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def loss(self, batch):
            x, *y = batch
            return fmwc.flow_matching_loss(self.net, (2,), x, cond={"y": y[0]} if y else {})

        def training_step(self, batch, _):
            return self.loss(batch)

        def validation_step(self, batch, _):
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=lr)

    torch.manual_seed(0)
    return Flow()


def loader(rows=256, labelled=True):
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(2, (rows,), generator=generator)
    x = CENTRES[y] + 0.2 * torch.randn(rows, 2, generator=generator)
    return DataLoader(TensorDataset(x, y) if labelled else TensorDataset(x), 64, shuffle=False)


def pair(batch):
    return batch[0], {"y": batch[1]}


def train(package, callbacks, folder, epochs=2, data=None, flow=None, **options):
    data, flow = data or loader(), flow or module(package)
    options = {"logger": package.loggers.CSVLogger(folder), "enable_checkpointing": False, **options}
    trainer = package.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(flow, data, data)
    return trainer, flow


@pytest.mark.parametrize("name", PACKAGES)
def test_the_log_has_the_confidence_of_each_epoch(name, tmp_path):
    package, seen = PACKAGES[name], []
    callback = ConfidenceCallback(
        "net",
        batch=pair,
        count=40,
        steps=5,
        labels=lambda x, cond: (x - CENTRES[cond["y"]]).norm(dim=1) > 1.0,
        show=lambda trainer, flow, run: seen.append((trainer.current_epoch, run)),
    )
    trainer, flow = train(package, [callback], tmp_path)
    rows = [line.split(",") for line in Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()]
    columns = {name: [row[i] for row in rows[1:] if row[i]] for i, name in enumerate(rows[0])}
    for key in ("mean", "doubtful", "score", "data_score", "failed"):
        assert len(columns[f"confidence/{key}"]) == 2
    assert 0 <= float(columns["confidence/mean"][-1]) <= 1
    assert [epoch for epoch, _ in seen] == [0, 1]  # and not in the sanity check
    run = seen[-1][1]
    assert run.default_score == "contest"
    assert run.x.shape == (40, 2)
    assert torch.equal(run.cond["y"], loader().dataset.tensors[1][:40])
    assert float(trainer.callback_metrics["confidence/score"]) == pytest.approx(run.evidence["contest"].mean().item())
    assert not any(isinstance(part, fmwc.Field) for part in flow.modules())


def test_confidence_rises_as_the_model_learns(tmp_path):
    """Samples of the untrained network are unlike the data; after training they are alike."""
    callback = ConfidenceCallback("net", batch=pair, count=100, steps=20, check=Echo((0.7, 0.8), 4))
    flow, (x, y) = module(lightning.pytorch), loader().dataset.tensors
    first = callback._compared(flow.net, x[:100], {"y": y[:100]})
    train(lightning.pytorch, [], tmp_path, epochs=40, flow=flow, logger=False)
    last = callback._compared(flow.net, x[:100], {"y": y[:100]})
    assert last["data_score"] < first["data_score"]
    assert 0.3 < last["mean"] < 0.7
    assert last["doubtful"] < 0.3


@pytest.mark.parametrize("name", PACKAGES)
def test_noise_is_fitted_when_the_training_ends(name, tmp_path):
    package = PACKAGES[name]
    fit = FitNoise("net", steps=10, batch=pair, path=tmp_path / "field", confidence=False, lr=1e-2)
    _, flow = train(package, [fit], tmp_path, logger=False)
    weights = {k: v.clone() for k, v in flow.net.state_dict().items()}
    assert fit.field.network is flow.net
    loaded = fmwc.load(tmp_path / "field", network=Net())
    x, t, y = torch.randn(5, 2), torch.rand(5), torch.tensor([0, 1, 0, 1, 1])
    assert torch.equal(loaded(x, t, y=y), flow.net(x, t, y=y))
    expected = fit.field.moments(x, t, cond={"y": y}).var
    assert torch.allclose(loaded.moments(x, t, cond={"y": y}).var, expected)
    fresh = fmwc.attach(flow.net, space=(2,)).moments(x, t, cond={"y": y}).var
    assert not torch.allclose(expected, fresh, rtol=0.01)  # the noise was trained
    assert all(torch.equal(weights[k], v) for k, v in flow.net.state_dict().items())
    assert all(p.requires_grad for p in flow.net.parameters())
    assert fmwc.checkpoint.about(tmp_path / "field")["recipe"]["epochs"] == 2


def test_two_processes_fit_the_noise_of_the_whole_dataset(tmp_path):
    """Each process passes over all rows in batches of both, and all end with the noise that one process would fit."""
    words = [sys.executable, "-m", "tests.integrations.lightning_processes", str(tmp_path)]
    done = subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    noise, seen = ([load_file(tmp_path / f"{name}.{rank}") for rank in (0, 1)] for name in ("noise", "seen"))
    assert all(torch.equal(noise[0][name], value) for name, value in noise[1].items())
    passes = [torch.cat([batches[str(i)] for i in range(5)]) for batches in seen]  # 3 batches of 2 * 8, the last of 6
    assert torch.equal(*passes)
    assert len(passes[0]) == 38  # one of 37 rows is repeated
    data = torch.randn(37, 2, generator=torch.Generator().manual_seed(1))
    assert torch.equal(passes[0].unique(dim=0), data.unique(dim=0))
    told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in (0, 1)]
    assert [(one["replicas"], one["rank"]) for one in told] == [(2, 0), (2, 1)]  # the sampler is restored
    logged = [one["logged"] for one in told]
    assert logged[0] == pytest.approx(logged[1])
    assert logged[0]["confidence/failed"] == pytest.approx(3 / 16)  # 3 of 8 in one process, none in the other
    assert 0 <= logged[0]["confidence/auroc"] <= 1
    field = fmwc.load(tmp_path / "field", network=Flow().net)
    for name, value in field.noise.state_dict().items():
        assert torch.equal(value, noise[0][name])
    alone = fmwc.attach(field.network, space=(2,))
    batches = [torch.cat([seen[0][str(5 * i + k)] for k in pair]) for i in (0, 1) for pair in ((0, 1), (2, 3), (4,))]
    fmwc.fit_noise(alone, _Again(batches), 6, confidence=False, conventions=False, lr=1e-2)
    for name, value in alone.noise.state_dict().items():
        torch.testing.assert_close(value, noise[0][name], rtol=1e-4, atol=1e-5)


class _Again:
    """An iterable that is no list of rows."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_errors_name_what_to_do(tmp_path):
    with pytest.raises(UsageError, match="network"):
        train(lightning.pytorch, [ConfidenceCallback("network", batch=pair)], tmp_path)
    with pytest.raises(UsageError, match="batch="):
        train(lightning.pytorch, [ConfidenceCallback("net")], tmp_path)
