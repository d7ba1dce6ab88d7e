"""The zoo: failure rules accept data and refuse noise, and a small run ends with a table and a picture."""

import json

import pytest
import torch

from benchmarks.zoo import run as zoo
from benchmarks.zoo.flows import FLOWS
from fmwc.randomness import Stream


@pytest.mark.parametrize("name", FLOWS)
def test_rule_accepts_data_and_refuses_noise(name):
    flow = FLOWS[name]
    drawn = flow.data(2000, torch.Generator().manual_seed(0))
    data, *labels = drawn if flow.classes else (drawn,)
    flow.space.check(data)
    assert float(flow.failed(data, *labels).float().mean()) < 0.03
    noise = flow.space.noise(1000, Stream(torch.Generator().manual_seed(0)))
    asked = [torch.arange(1000) % flow.classes] if labels else []
    assert float(flow.failed(noise, *asked).float().mean()) > 0.5


def test_flows_are_trained_scored_and_shown(monkeypatch, tmp_path):
    few = {name: FLOWS[name]._replace(steps=20, batch=64) for name in ("gears", "discs-ot")}
    few["gears"] = few["gears"]._replace(failed=lambda x, y: x.sum((1, 2)) > 0)  # after 20 steps all samples fail
    for name, value in {"FLOWS": few, "NOISE_STEPS": 5, "STEPS": 10, "PILOT": 50}.items():
        monkeypatch.setattr(zoo, name, value)
    for task in (("gears", 0), ("gears", 1), ("discs-ot", 0)):
        zoo.one(task, "cpu", tmp_path, 60)
    flows = zoo.collected(tmp_path)
    assert flows.keys() == few.keys()
    runs = [json.loads((tmp_path / f"gears-{seed}.json").read_text())["scores"] for seed in (0, 1)]
    assert flows["gears"]["scores"]["echo"]["auroc"] == pytest.approx(sum(run["echo"]["auroc"] for run in runs) / 2)
    assert {"contest", "nearest", "default", "default, no data", "integrated"} <= flows["gears"]["scores"].keys()
    assert "| gears | fresh3 | 2 |" in zoo.table(flows)
    assert zoo.picture(flows).axes
