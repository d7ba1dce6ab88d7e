"""Pages for the notes, tables and pictures of `results/`, which are copied to `docs/_results`."""

import re
import shutil
from collections import defaultdict
from pathlib import Path

from sphinx.application import Sphinx

FOLDER = "_results"
MARK = "<!-- measurements -->"


def copy(app: Sphinx) -> None:
    """Copy the pages and their pictures, because Markdown can only link to pages in the folder of the documentation."""
    root, out = Path(app.srcdir).parent / "results", Path(app.srcdir) / FOLDER
    shutil.rmtree(out, ignore_errors=True)
    for path in (path for pattern in ("*.md", "*.png") for path in root.rglob(pattern)):
        target = out / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def index(folder: Path) -> str:
    """Return a list of the folders of results with links to their pages."""
    pages = defaultdict(list)
    for path in sorted(folder.rglob("*.md")):
        pages[str(path.parent.relative_to(folder))].append(path)
    return "\n".join(
        f"- {name}: " + ", ".join(f"[{path.stem.lower()}]({FOLDER}/{path.relative_to(folder)})" for path in paths)
        for name, paths in pages.items()
    )


def adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """Point links at the pages of the site: those to `results/`, and those from its notes to the documentation."""
    text, up = source[0], "../" * page.count("/")
    if page.startswith(f"{FOLDER}/"):
        text = text.replace(f"]({up}docs/", f"]({up}")
        folder = page.removeprefix(f"{FOLDER}/").rpartition("/")[0]
        text = re.sub(r"\]\((?=[\w-]+\.json\))", f"](../{up}results/{folder}/", text)
        heading = "" if re.search("^# ", text, re.M) else f"# {' '.join(page.split('/')[1:])}\n\n"
        text = f"---\norphan: true\n---\n\n{heading}{text}"
    else:
        text = re.sub(rf"\]\(\.\./{up}results/(?=[^)]*\.(md|png))", f"]({up}{FOLDER}/", text)
    if MARK in text:
        text = text.replace(MARK, index(Path(app.srcdir) / FOLDER))
    source[0] = text


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", copy)
    app.connect("source-read", adapt)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
