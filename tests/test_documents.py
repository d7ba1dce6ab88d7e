"""Every snippet and every command of every document runs.

Fenced blocks run as printed, each in a new folder. An HTML comment before a block may change how the test runs it:

    <!-- needs: diffusers -->                             skipped if the package is not installed
    <!-- test: given net, data; steps=500 -> steps=2; parse only: python -m experiments study (takes minutes) -->

`given` lists variables that the reader already has; `a -> b` makes a run smaller; `needs package` skips as above; of a
`parse only` command, only the options are checked. Code in sentences is also checked: names exist, calls accept the
arguments, commands have the options.
"""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.foreign_networks import import_timm
from tests.command import call
from tests.integrations.pipelines import clip, sd3

ROOT = Path(__file__).parents[1]
PAGES = [path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "_results"} & set(path.parts)]
DOCUMENTS = sorted([ROOT / "README.md", *PAGES])
FENCE = re.compile(r"(?:^<!-- (needs|test): (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


class Block(NamedTuple):
    document: Path
    line: int
    note: str
    said: str
    language: str
    code: str

    @property
    def id(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(document, text.count("\n", 0, m.start(4)), m[1] or "", m[2] or "", m[3], m[4])
        for m in FENCE.finditer(text)
    ]


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [block for block in BLOCKS if block.language in ("", "sh", "bash")]
OUTPUT = [block for block in BLOCKS if block.language == "text"]  # the output of a command


def test_every_block_is_found():
    fences = sum(len(re.findall(r"^```", document.read_text(), re.M)) for document in DOCUMENTS)
    assert 2 * len(BLOCKS) == fences
    assert len(PYTHON) + len(COMMANDS) + len(OUTPUT) == len(BLOCKS)


def changed(block: Block) -> tuple[str, list[str], list[str]]:
    """Return the code with smaller sizes, the variables that it needs, and the commands that are only parsed."""
    code, given, parsed = block.code, [], []
    for part in block.said.split("; ") if block.note == "test" else []:
        if part.startswith("needs "):
            continue
        if part.startswith("given "):
            given = part.removeprefix("given ").split(", ")
        elif part.startswith("parse only: "):
            assert "(" in part, f"{block.id}: say why {part}"
            parsed.append(part.removeprefix("parse only: ").partition(" (")[0])
        else:
            old, arrow, new = part.partition(" -> ")
            assert arrow, f"{block.id}: {part}"
            assert old in code, f"{block.id}: nothing to replace for '{part}'"
            code = code.replace(old, new)
    return code, given, parsed


# ---- Python ------------------------------------------------------------------------------------------------------


class Small(torch.nn.Module):
    """The network of the reader: a velocity network for points."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.SiLU(), torch.nn.Linear(16, 2))

    def forward(self, x, t):
        return self.layers(torch.cat([x, t[:, None]], 1))


@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
@pytest.mark.parametrize("block", PYTHON, ids=[block.id for block in PYTHON])
def test_a_python_block_runs(block, tmp_path, monkeypatch, capsys):
    parts = [block.said] if block.note == "needs" else re.findall(r"(?:^|; )needs (\w+)", block.said)
    for needed in parts:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed (make test-interop has all but flow_matching)")
        if needed == "timm":
            import_timm()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    code, given, _ = changed(block)
    known = {
        "net": Small,
        "data": lambda: torch.randn(200, 2),
        "pipe": lambda: sd3(clip(tmp_path)),
        "prompts": lambda: ["a red cat", "a blue dog"],
    }
    names = {"__name__": "example", **{name: known[name]() for name in given}}
    exec(compile("\n" * block.line + code, str(block.document), "exec"), names)
    if "print(" in code:
        assert capsys.readouterr().out.strip()


# ---- commands ----------------------------------------------------------------------------------------------------

MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x, t):
        return self.layer(torch.cat([x, t[:, None]], 1))

def build():
    return Net()
"""
CIF = """data_NaCl
_cell_length_a 3.49
_cell_length_b 3.49
_cell_length_c 3.49
_cell_angle_alpha 90
_cell_angle_beta 90
_cell_angle_gamma 90
_symmetry_space_group_name_H-M 'P 1'
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
Na1 Na 0 0 0
Cl1 Cl 0.5 0.5 0.5
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that the commands in the documents read."""
    (tmp_path / "my_module.py").write_text(MODULE)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "module.py").write_text(MODULE)
    save_file({"layer.weight": torch.randn(2, 3), "layer.bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    np.savez(tmp_path / "samples.npz", x=np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32))
    (tmp_path / "a_folder").mkdir()
    for path in (tmp_path / "their.cif", tmp_path / "a_folder" / "b.cif"):
        path.write_text(CIF)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_module", "my", "my.module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def the_command(module: str = "fmwc.cli") -> Any:
    """Import the command here, because the environment of make test-interop has no command line."""
    import typer

    return typer.main.get_command(importlib.import_module(module).app)


def lines_of(code: str) -> list[list[str]]:
    """Return the commands of a block, without comments and without torchrun."""
    lines = [words for line in code.splitlines() if (words := shlex.split(line, comments=True))]
    # One process suffices here; tests/distributed runs several.
    return [words[words.index("-m") + 1 :] if words[0] == "torchrun" else words for words in lines]


def parse(words: list[str]) -> None:
    """Parse a command and its options without running it."""
    command = the_command()
    context = command.make_context("fmwc", [words[1], "--help"], resilient_parsing=True)
    command.get_command(context, words[1]).make_context(words[1], words[2:], parent=context)


@pytest.mark.parametrize("block", COMMANDS, ids=[block.id for block in COMMANDS])
def test_the_commands_of_a_block_run(block, folder):
    code, _, parsed = changed(block)
    if "structures" in code and "--out structures" not in code:
        call("sample", "crystals", "-n", 2, "--steps", 3, "--device", "cpu", "--out", "structures")
    for words in lines_of(code):
        if words[0] == "make":
            assert shutil.which("make"), "make is needed to check its targets"
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
            continue
        assert words[0] == "fmwc", words
        if any(" ".join(words).startswith(start) for start in parsed):
            parse(words)
        else:
            call(*words[1:])
            assert "--out" not in words or Path(words[words.index("--out") + 1]).is_dir()


# ---- code within sentences ---------------------------------------------------------------------------------------

INLINE = [
    (f"{document.relative_to(ROOT)}: {span}", span)
    for document in DOCUMENTS
    for span in dict.fromkeys(SPAN.findall(FENCE.sub("", document.read_text())))
]
VERBS = [
    (name, span)
    for name, span in INLINE
    if re.match(r"((\.venv/bin/)?fmwc|(\.venv/bin/)?python -m experiments)( |$)", span) and "|" not in span
]


@pytest.mark.parametrize("span", [span for _, span in VERBS], ids=[name for name, _ in VERBS])
def test_commands_in_sentences_exist_with_their_options(span):
    _, *words = shlex.split(re.sub("python -m experiments", "experiments", span))
    command = the_command("experiments.cli" if "experiments" in span.partition(" --")[0] else "fmwc.cli")
    context = command.make_context("fmwc", ["sample", "--help"], resilient_parsing=True)
    if words and not words[0].startswith("-"):
        verb = command.get_command(context, words[0])
        assert verb is not None, span
        known = {option for parameter in verb.params for option in getattr(parameter, "opts", [])}
        assert {word for word in words if re.match("-+[a-z]", word)} <= known


# ---- tables and links --------------------------------------------------------------------------------------------


def test_tables_match_the_results():
    from experiments import documents

    assert list(documents.outdated()) == []


def anchors_of(document: Path) -> set[str]:
    """Return the anchors that GitHub and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_linked_files_and_headings_exist():
    for document in DOCUMENTS:
        for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?[^)]*\)", FENCE.sub("", document.read_text())):
            if link.startswith("http"):
                continue
            target = document.parent / link if link else document
            place = f"{document.relative_to(ROOT)}: {link}#{anchor}"
            assert target.exists(), place
            assert not anchor or anchor in anchors_of(target), place
