"""Tables in documents are made from `results/`, and links lead to files. Code is run by test_documents.py."""

import re
from pathlib import Path

import pytest

from experiments import documents

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_tables_are_those_of_the_results():
    assert list(documents.outdated()) == []


def test_a_changed_table_is_found_and_mended(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- table: cost -->\n\n| a |\n| - |\n| 1 |\n\nafter\n")
    monkeypatch.setattr(documents, "DOCUMENTS", (page,))
    monkeypatch.setattr(documents, "SUMMARIES", {})
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["documents", "--check"])
    with pytest.raises(SystemExit, match=r"out of date: page\.md"):
        documents.main()
    assert "| 1 |" in page.read_text()
    monkeypatch.setattr("sys.argv", ["documents"])
    documents.main()
    assert "the default ÷ plain sampling" in page.read_text()
    assert page.read_text().endswith("|\n\nafter\n")
    assert not documents.outdated()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link
