"""Fields in folders and repositories of the Hugging Face hub; nothing is downloaded."""

import ast
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from markdown_it import MarkdownIt
from torch import nn

import fmwc
from fmwc import checkpoint
from fmwc.errors import CheckpointError, UsageError
from fmwc.files import write_json
from fmwc.identity import seal
from fmwc.integrations.hub import model_card
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
        datasets=["lab/data"],
        recipe={"name": "points", "iterations": 20},
        metrics={"failure": 0.25},
        provenance={"commit": "abc", "device": "CPU"},
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
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "recipe.json",
    ]
    assert same_samples(fmwc.from_pretrained(folder), field)
    assert same_samples(fmwc.load(folder), field)  # one format


def test_the_model_card_is_valid_and_complete(folder, field):
    card = hub.ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.license, card.data.datasets) == ("fmwc", "mit", ["lab/data"])
    assert "flow-matching" in card.data.tags
    for told in ("# points", "| iterations | 20 |", "| failure | 0.25 |", "| device | CPU |", field.reference.score):
        assert told in card.text
    points = len(field.reference.checks["nearest"].points)
    assert (f"contain {points:,} training points" in card.text) == ("nearest" in field.reference.checks)
    assert "for runs with 5 steps" in card.text or field.reference.read_with is None


@pytest.mark.parametrize("name", ["checkerboard", "mnist", "crystals"])
def test_the_example_of_a_card_runs(name, tmp_path, capsys):
    folder = fmwc.save_pretrained(name, tmp_path / name)
    assert checkpoint.identity(folder) == checkpoint.identity(name)
    text = (folder / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    assert len(code.splitlines()) <= 5
    assert str(checkpoint.about(name)["provenance"]["commit"]) in text
    if name == "checkerboard":
        exec(code.replace("path/to/this/folder", str(folder)), {})
        assert "tensor" in capsys.readouterr().out


def test_a_card_quotes_the_record_safely():
    content = {"network": {"kind": "A", "config": None}, "recipe": {"name": "a|b\n# big", "x": "<script>"}}
    card = model_card(content)
    assert "\n# big" not in card
    assert "\\<script\\>" in card
    assert "a\\|b # big" in card
    assert "from my_code import network" in card
    assert "no reference" in card


def test_a_card_shows_the_record_as_text():
    """Values of a record make no links, images or code, wherever they appear."""
    evil = (
        "`![t](https://e.example/t.png)` <b>[click](javascript:x) <https://e.example> a\\\\| ![](//e) www.e.example $x$"
    )
    content = {
        "network": {"kind": evil, "config": {}},
        "recipe": {"name": evil, evil: evil},
        "data": {"name": evil, "fingerprint": "0"},
        "reference": {
            "score": evil,
            "reason": evil,
            "withheld": evil,
            "read_with": {"steps": "5); import os #", "stepper": evil, "estimator": evil, "times": [0.0]},
            "candidates": [{"score": evil, "why": evil}],
            "classes": {"y": [0, "1]}); import os #"]},
        },
    }
    card = model_card(content).split("---\n", 2)[2]
    page = MarkdownIt("commonmark").enable("table").parse(card)
    kinds = {token.type for block in page for token in (block, *(block.children or ()))}
    assert not kinds & {"image", "link_open", "html_inline", "html_block", "code_inline"}
    assert not re.search(r"https?:|www\.|(?<!\\)\$", card)  # which GitHub or the hub would show as a link or formula
    told = [block.content for block in page if block.type == "inline"]
    assert sum("javascript" in text for text in told) == 12
    (code,) = [block.content for block in page if block.type == "fence"]
    tree = ast.parse(code)
    assert sum(isinstance(node, ast.Import) for node in ast.walk(tree)) == 1  # import fmwc
    content["reference"]["classes"] = {'y"}); import os #': [0]}
    with pytest.raises(CheckpointError, match="not the name of an argument"):
        model_card(content)


def test_networks_of_other_libraries_come_from_the_user(tmp_path, monkeypatch):
    field = fmwc.attach(Foreign(), space=(2,))
    folder = fmwc.save_pretrained(field, tmp_path / "foreign")
    (folder / "modeling.py").write_text("raise SystemExit('code of a repository was run')")
    with pytest.raises(CheckpointError, match="Foreign, which is not a network of fmwc"):
        fmwc.from_pretrained(folder)
    (tmp_path / "mine.py").write_text(
        "from tests.integrations.test_hub import Foreign\n\ndef build():\n    return Foreign()\n"
    )
    monkeypatch.chdir(tmp_path)
    x, t = torch.randn(3, 2), torch.rand(3)
    for network in (Foreign(), Foreign, "mine:build"):
        assert torch.equal(fmwc.from_pretrained(folder, network)(x, t), field(x, t))


# ---- the hub ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_cached_repository_is_read_offline(how, cache, field, monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", how == "environment")
    options = {"cache_dir": cache, "local_files_only": how == "argument"}
    assert same_samples(fmwc.from_pretrained("lab/points", **options), field)
    assert same_samples(fmwc.from_pretrained("lab/points", revision=COMMIT, **options), field)
    with pytest.raises(CheckpointError, match=r"recipe.json of lab/other is not in the cache"):
        fmwc.from_pretrained("lab/other", **options)


def test_a_new_process_reads_the_cache_offline(cache):
    code = f"import fmwc; print(fmwc.from_pretrained('lab/points', cache_dir={str(cache)!r}).reference.score)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split()


@pytest.fixture
def server(folder, tmp_path, monkeypatch):
    """A stand-in for the hub: a folder per commit, and the list of requested files."""
    repository = tmp_path / "snapshots" / COMMIT
    shutil.copytree(folder, repository)
    (repository / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    state = SimpleNamespace(folder=repository, asked=[], sizes={})

    def download(repo_id, name, *, revision, **options):
        assert repo_id == "lab/points"
        state.asked.append((name, revision))
        return str(repository / name)

    def metadata(url, token=None):
        name = url.rpartition("/")[2]
        return SimpleNamespace(size=state.sizes.get(name, (repository / name).stat().st_size))

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    return state


def test_only_the_record_and_its_weights_are_downloaded_from_one_commit(server, field):
    assert same_samples(fmwc.from_pretrained("lab/points"), field)
    assert server.asked == [("recipe.json", None), ("model.safetensors", COMMIT)]


@pytest.mark.parametrize("name", ["recipe.json", "model.safetensors"])
def test_files_that_are_too_large_are_not_downloaded(server, name):
    server.sizes[name] = 1 << 40
    with pytest.raises(CheckpointError, match=f"{name} of lab/points has {1 << 40} bytes"):
        fmwc.from_pretrained("lab/points")
    assert name not in [asked for asked, _ in server.asked]


def test_many_files_that_are_too_large_together_are_not_downloaded(server, field, monkeypatch):
    sizes = [(server.folder / name).stat().st_size for name in ("recipe.json", "model.safetensors")]
    monkeypatch.setattr(checkpoint, "LARGEST_TOTAL", sum(sizes))
    assert same_samples(fmwc.from_pretrained("lab/points"), field)
    monkeypatch.setattr(checkpoint, "LARGEST_TOTAL", sum(sizes) - 1)
    server.asked.clear()
    with pytest.raises(CheckpointError, match="the files of lab/points have more than"):
        fmwc.from_pretrained("lab/points")
    assert [name for name, _ in server.asked] == ["recipe.json"]
    monkeypatch.setattr(checkpoint, "LARGEST_TOTAL", sizes[1] - 1)
    with pytest.raises(CheckpointError, match=r"the weights files of .* have more than"):
        fmwc.load(server.folder)


@pytest.mark.parametrize("evil", ["../../secret.safetensors", "weights.bin"])
def test_a_record_cannot_name_other_files(server, evil):
    content = checkpoint.about(server.folder)
    content.pop("sha256")
    write_json(server.folder / "recipe.json", seal({**content, "files": {evil: "0" * 64}}))
    with pytest.raises(CheckpointError, match="not the name of a weights file"):
        fmwc.from_pretrained("lab/points")
    assert [name for name, _ in server.asked] == ["recipe.json"]


def test_changed_weights_are_refused(server):
    path = server.folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="its hash differs"):
        fmwc.from_pretrained("lab/points")


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
    address = fmwc.push_to_hub(field, "lab/points", token="t", private=True, licence="mit")
    assert address.endswith(COMMIT)
    assert done == ["t", ("lab/points", True, True)]
    assert same_samples(fmwc.from_pretrained(tmp_path / "uploaded"), field)
    assert 'from_pretrained("lab/points")' in (tmp_path / "uploaded" / "README.md").read_text()


def test_errors_name_what_to_do(field, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="nor a repository such as organisation/name"):
        fmwc.from_pretrained("no such thing")
    with pytest.raises(UsageError, match="metrics belongs to a field's record"):
        fmwc.save_pretrained("checkerboard", tmp_path / "copy", metrics={})
    with pytest.raises(CheckpointError, match="nor a repository"):
        fmwc.push_to_hub(field, "points")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=re.escape("pip install 'fmwc[hub]'")):
        fmwc.from_pretrained("lab/points")
    assert fmwc.save_pretrained(field, tmp_path / "without").is_dir()  # needs no library
