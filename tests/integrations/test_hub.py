"""Fields in folders and repositories of the Hugging Face hub; nothing is downloaded."""

import re
import shutil

import pytest
import torch
from torch import nn

import fmwc
from fmwc import checkpoint
from fmwc.errors import CheckpointError
from fmwc.networks import MLP

hub = pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, t):
        return self.layer(torch.cat([x, t[:, None]], 1))


@pytest.fixture(scope="module")
def field():
    torch.manual_seed(0)
    field = fmwc.attach(MLP(dim=2, hidden=16, depth=2), space=(2,))
    on_circle = torch.nn.functional.normalize(torch.randn(2_000, 2), dim=1)
    fmwc.fit_confidence(field, on_circle, pilot=64, steps=5, conventions=False)
    return field


@pytest.fixture(scope="module")
def folder(field, tmp_path_factory):
    return fmwc.save_pretrained(
        field,
        tmp_path_factory.mktemp("hub") / "model",
        repo_id="lab/points",
        licence="mit",
        recipe={"name": "points", "iterations": 20},
        metrics={"failure": 0.25},
    )


@pytest.fixture
def cache(folder, tmp_path):
    """A cache of the hub with the repository lab/points."""
    root = tmp_path / "models--lab--points"
    shutil.copytree(folder, root / "snapshots" / COMMIT)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    return tmp_path


def same_samples(a, b):
    runs = [fmwc.sample(field, 4, steps=5, seed=1) for field in (a, b)]
    return torch.equal(runs[0].x, runs[1].x) and torch.equal(runs[0].confidence, runs[1].confidence)


def test_a_folder_holds_the_whole_field(field, folder):
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors", "recipe.json"}
    assert same_samples(fmwc.from_pretrained(folder), field)
    assert same_samples(fmwc.load(folder), field)  # one format


def test_the_example_of_a_card_runs(tmp_path, capsys):
    name = "checkerboard"
    folder = fmwc.save_pretrained(name, tmp_path / name)
    assert checkpoint.identity(folder) == checkpoint.identity(name)
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)[1]
    exec(code.replace("path/to/this/folder", str(folder)), {})
    assert "tensor" in capsys.readouterr().out


def test_networks_of_other_libraries_come_from_the_user(tmp_path, monkeypatch):
    field = fmwc.attach(Foreign(), space=(2,))
    folder = fmwc.save_pretrained(field, tmp_path / "foreign")
    (folder / "modeling.py").write_text("raise SystemExit('code of a repository was run')")
    with pytest.raises(CheckpointError, match="network"):
        fmwc.from_pretrained(folder)
    (tmp_path / "mine.py").write_text(
        "from tests.integrations.test_hub import Foreign\n\ndef build():\n    return Foreign()\n"
    )
    monkeypatch.chdir(tmp_path)
    x, t = torch.randn(3, 2), torch.rand(3)
    for network in (Foreign(), Foreign, "mine:build"):
        assert torch.equal(fmwc.from_pretrained(folder, network)(x, t), field(x, t))


def test_a_cached_repository_is_read_offline(cache, field):
    options = {"cache_dir": cache, "local_files_only": True}
    assert same_samples(fmwc.from_pretrained("lab/points", **options), field)
    assert same_samples(fmwc.from_pretrained("lab/points", revision=COMMIT, **options), field)
    with pytest.raises(CheckpointError, match="lab/other"):
        fmwc.from_pretrained("lab/other", **options)


def test_push_uploads_what_from_pretrained_reads(field, monkeypatch, tmp_path):
    done = []

    class Api:
        def __init__(self, token):
            done.append(token)

        def create_repo(self, repo_id, *, private, exist_ok):
            done.append((repo_id, private, exist_ok))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            shutil.copytree(folder_path, tmp_path / "uploaded")
            return f"https://huggingface.co/{repo_id}/commit/{COMMIT}"

    monkeypatch.setattr(hub, "HfApi", Api)
    assert fmwc.push_to_hub(field, "lab/points", token="t", private=True, licence="mit").endswith(COMMIT)
    assert done == ["t", ("lab/points", True, True)]
    assert same_samples(fmwc.from_pretrained(tmp_path / "uploaded"), field)
    assert 'from_pretrained("lab/points"' in (tmp_path / "uploaded" / "README.md").read_text()
