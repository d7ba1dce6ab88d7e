"""Formulas as MathML, which browsers display without scripts. docutils converts them from TeX."""

from docutils import nodes
from docutils.utils.math.latex2mathml import MathError, tex2mathml
from docutils.utils.math.unichar2tex import uni2tex_table
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator

TEX = uni2tex_table | {ord("·"): r"\cdot "}


def write(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write a formula, or the formulas of a block that are separated by blank lines."""
    block = isinstance(node, nodes.math_block)
    try:
        for formula in node.astext().strip().split("\n\n"):
            mathml = tex2mathml(formula.translate(TEX), as_block=block)
            translator.body.append(f'<div class="math">{mathml}</div>' if block else mathml)
    except MathError as error:
        raise ExtensionError(f"{node.source}: cannot write '{node.astext()}' as MathML: {error}") from error
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (write, None), (write, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
