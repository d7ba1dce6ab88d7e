"""Every example of docs/five_minutes.md runs as it is printed."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from benchmarks.foreign_networks import import_timm

PAGE = (Path(__file__).parents[2] / "docs/five_minutes.md").read_text()
EXAMPLES = re.findall(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)```", PAGE, re.M | re.S
)


def test_every_family_has_an_example():
    assert len(EXAMPLES) == PAGE.count("```python") - 1  # the first, of three lines, is the idea
    assert {needs for _, needs, _ in EXAMPLES} == {
        "", "torchcfm", "diffusers", "torch_geometric", "timm", "azula", "flow_matching"
    }  # fmt: skip


@pytest.mark.parametrize(("title", "needs", "code"), EXAMPLES, ids=[title for title, _, _ in EXAMPLES])
def test_an_example_runs(title, needs, code, capsys):
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed" + ("; make test-interop has it" if needs != "flow_matching" else ""))
    if needs == "timm":
        import_timm()
    torch.manual_seed(0)
    exec(compile(code, f"five_minutes.md, {title}", "exec"), {"__name__": "example"})
    assert "tensor(" in capsys.readouterr().out  # a confidence was printed
