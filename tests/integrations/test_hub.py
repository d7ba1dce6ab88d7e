"""Fields in folders and repositories of the Hugging Face hub; nothing is downloaded."""

import re
import shutil
import sys

import pytest
import torch
from markdown_it import MarkdownIt
from torch import nn

import fmwc
from fmwc import checkpoint
from fmwc.errors import CheckpointError, UsageError
from fmwc.files import write_json
from fmwc.identity import seal
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
        recipe={
            "name": "points",
            "iterations": 20,
            "note": "`![t](https://e.example/t.png)` <b>a|b\n# big www.e.example",
        },
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


def test_the_model_card_tells_the_record_as_text(folder, field):
    card = hub.ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.license) == ("fmwc", "mit")
    for told in ("# points", "| iterations | 20 |", "| failure | 0.25 |", field.reference.score):
        assert told in card.text
    page = MarkdownIt("commonmark").enable("table").parse(card.text)
    kinds = {token.type for block in page for token in (block, *(block.children or ()))}
    assert not kinds & {"image", "link_open", "html_inline", "html_block", "code_inline"}


@pytest.mark.parametrize("name", ["checkerboard", "mnist", "crystals"])
def test_the_example_of_a_card_runs(name, tmp_path, capsys):
    folder = fmwc.save_pretrained(name, tmp_path / name)
    assert checkpoint.identity(folder) == checkpoint.identity(name)
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)[1]
    compile(code, name, "exec")
    if name == "checkerboard":
        exec(code.replace("path/to/this/folder", str(folder)), {})
        assert "tensor" in capsys.readouterr().out


def test_networks_of_other_libraries_come_from_the_user(tmp_path, monkeypatch):
    field = fmwc.attach(Foreign(), space=(2,))
    folder = fmwc.save_pretrained(field, tmp_path / "foreign")
    (folder / "modeling.py").write_text("raise SystemExit('code of a repository was run')")
    with pytest.raises(CheckpointError, match="not a network of fmwc"):
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


def test_only_the_record_and_weights_are_downloaded(folder, field, monkeypatch):
    asked = []

    def download(repo_id, *, allow_patterns, **options):
        asked.append((repo_id, allow_patterns, options))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert same_samples(fmwc.from_pretrained("lab/points", revision="main"), field)
    assert asked == [("lab/points", ["recipe.json", "*.safetensors"], {"revision": "main"})]


@pytest.mark.parametrize("evil", ["../../secret.safetensors", "weights.bin"])
def test_a_record_cannot_name_other_files(folder, tmp_path, evil):
    shutil.copytree(folder, tmp_path / "copy")
    content = checkpoint.about(folder)
    content.pop("sha256")
    write_json(tmp_path / "copy" / "recipe.json", seal({**content, "files": {evil: "0" * 64}}))
    with pytest.raises(CheckpointError):
        fmwc.from_pretrained(tmp_path / "copy")


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


def test_errors_name_what_to_do(field, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no such thing"):
        fmwc.from_pretrained("no such thing")
    with pytest.raises(UsageError, match="metrics"):
        fmwc.save_pretrained("checkerboard", tmp_path / "copy", metrics={})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="pip install"):
        fmwc.from_pretrained("lab/points")
    assert fmwc.save_pretrained(field, tmp_path / "without").is_dir()  # needs no library
