"""The API reference and the CLI reference, made from the package itself.

Every module without a leading underscore has its public names documented: those in `__all__`, or those that it
defines. A name that several modules offer is documented once, under its shortest path, and the others link to it.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

PACKAGE = "fmwc"
MODULES = "reference/modules"


# ---- the API ---------------------------------------------------------------------------------------------------------


def modules() -> dict[str, ModuleType]:
    """Return the public modules of the package by name."""
    package = import_module(PACKAGE)
    found = [PACKAGE, *(m.name for m in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."))]
    return {name: import_module(name) for name in sorted(found) if not re.search(r"\._", name)}


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module, in the order of its source."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [name for name in listed if not inspect.ismodule(getattr(module, name))]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def homes(found: dict[str, ModuleType]) -> dict[tuple[str, int], str]:
    """Return the shortest path of each public object."""
    paths = defaultdict(list)
    for name, module in found.items():
        for word in names_of(module):
            paths[word, id(getattr(module, word))].append(name)
    return {key: min(owners, key=lambda name: (name.count("."), name)) for key, owners in paths.items()}


def directive(module: ModuleType, name: str) -> str:
    """Return the autodoc directive of a name."""
    value, path = getattr(module, name), f"{module.__name__}.{name}"
    if inspect.isclass(value):
        bases = "" if value.__bases__ == (object,) else "   :show-inheritance:\n"
        return f".. autoclass:: {path}\n   :members:\n{bases}"
    if inspect.isroutine(value):
        return f".. autofunction:: {path}\n"
    return f".. autodata:: {path}\n"


def section(module: ModuleType, home: dict[tuple[str, int], str]) -> Iterator[str]:
    """Yield the paragraphs of a module: its docstring, its names, and links to names that are documented elsewhere."""
    yield f"{module.__name__}\n{'=' * len(module.__name__)}\n"
    package, _, last = module.__name__.rpartition(".")
    shadowed = package and not inspect.ismodule(getattr(import_module(package), last))  # crystals.judge is a function
    yield f".. automodule:: {module.__name__}\n{'   :no-index:' if shadowed else ''}\n"
    elsewhere = []
    for name in names_of(module):
        owner = home[name, id(getattr(module, name))]
        if owner == module.__name__:
            yield directive(module, name)
        else:
            elsewhere.append(f"``{module.__name__}.{name}`` (:py:obj:`{owner}.{name}`)")
    if elsewhere:
        yield f"Documented elsewhere: {', '.join(elsewhere)}.\n"


def pages() -> dict[str, str]:
    """Return the reference pages, one per module or package directly below the top one, as reStructuredText."""
    found = modules()
    home = homes(found)
    parts = defaultdict(list)
    for name, module in found.items():
        top = ".".join(name.split(".")[:2])
        text = "\n".join(section(module, home))
        parts[top].append(text if name == top else text.replace("=" * len(name), "-" * len(name), 1))
    return {top: "\n".join(texts) for top, texts in parts.items()}


def write_pages(app: Sphinx) -> None:
    """Write the pages that changed, and delete those of modules that are gone."""
    folder = Path(app.srcdir) / MODULES
    folder.mkdir(parents=True, exist_ok=True)
    current = pages()
    for path in folder.glob("*.rst"):
        if path.stem not in current:
            path.unlink()
    for name, text in current.items():
        path = folder / f"{name}.rst"
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def _first(value: Any) -> str:
    """Return the first sentence of a docstring, for a cell of a Markdown table."""
    text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", inspect.getdoc(value) or "")
    return re.split(r"(?<=\.)\s|:?\n\n", text)[0].replace("\n", " ").replace("|", r"\|")


def summary() -> str:
    """Return a table of the names of the package with the first sentences of their docstrings."""
    package = import_module(PACKAGE)
    rows = [f"| {{py:obj}}`{PACKAGE}.{name}` | {_first(getattr(package, name))} |" for name in names_of(package)]
    return "\n".join(["| name | |", "| --- | --- |", *rows])


def index() -> str:
    """Return a table of the modules with the first sentences of their docstrings."""
    tops = {name: module for name, module in modules().items() if name.count(".") <= 1}
    rows = [f"| [{name}](modules/{name}.rst) | {_first(module)} |" for name, module in tops.items()]
    return "\n".join(["| module | |", "| --- | --- |", *rows])


# ---- the commands ----------------------------------------------------------------------------------------------------


def _cell(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    text = " ".join(text.split()).replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")
    return re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", text)


def _row(parameter: Any, context: Any) -> str:
    """Return the row of an argument or option."""
    default, flag = parameter.default, getattr(parameter, "is_flag", False)
    if parameter.param_type_name == "argument":
        spelled = f"`{parameter.name.upper()}`"
    else:
        kind = "" if flag else " " + re.sub(r"<(list\[)?(\w+).*", r"\2", parameter.display_type(context)).upper()
        spelled = ", ".join(f"`{name}{kind}`" for name in (*parameter.opts, *parameter.secondary_opts))
    shown = "required" if parameter.required else "" if flag or default in (None, "", [], ()) else f"`{default}`"
    return f"| {spelled} | {_cell(parameter.help or '')} | {shown} |"


def commands() -> str:
    """Return the reference of all commands as Markdown, from their declarations."""
    import typer

    from fmwc.cli.verbs import app

    lines = []
    group = typer.main.get_command(app)
    for name, command in {"COMMAND": group, **group.commands}.items():
        context = command.make_context(name, [], resilient_parsing=True)
        parameters = [p for p in command.params if not p.hidden]
        arguments = [p.name.upper() for p in parameters if p.param_type_name == "argument"]
        usage = " ".join(["fmwc", name, *arguments, "[OPTIONS]"])
        lines += [f"## fmwc {name}", "", f"`{usage}`", "", inspect.cleandoc(command.help), ""]
        lines += ["| argument or option | meaning | default |", "| --- | --- | --- |"]
        lines += [*(_row(p, context) for p in parameters), ""]
    return "\n".join(lines)


MARKS = {"<!-- names -->": summary, "<!-- modules -->": index, "<!-- commands -->": commands}


def insert(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the marks of a page by what they stand for."""
    for mark, text in MARKS.items():
        if mark in source[0]:
            source[0] = source[0].replace(mark, text())


def adapt(app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Convert Markdown tables, and drop the docstring of a constant, which is that of its type."""
    if kind == "data":
        lines.clear()
    converted: list[str] = []
    for number, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and number + 1 < len(lines) and lines[number + 1].startswith("|---"):
            converted += [".. list-table::", "   :header-rows: 1", ""]
        elif line.startswith("|---"):
            continue
        if line.startswith("|") and line.endswith("|"):
            converted += [f"   {'-' if i else '* -'} {cell}".replace("   -", "     -") for i, cell in enumerate(cells)]
        else:
            converted.append(line)
    lines[:] = converted


def dashes(app: Sphinx, tree: nodes.document) -> None:
    """Write the dash between a parameter and its meaning, which Sphinx leaves to smartquotes."""
    for text in tree.findall(nodes.Text):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", insert)
    app.connect("autodoc-process-docstring", adapt)
    app.connect("doctree-read", dashes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
