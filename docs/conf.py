"""Configuration of the documentation. `make docs` builds it without network access, and warnings are errors."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

import fmwc  # noqa: E402

project = "fmwc"
author = "the fmwc authors"
copyright = "the fmwc authors, MIT licence"
version = release = fmwc.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "reference",
    "measurements",
    "mathml",
    "offline",
]
exclude_patterns = ["_build", "_ext", "**.ipynb_checkpoints"]
templates_path = []
default_role = "literal"
smartquotes = False  # would change options such as --out
highlight_language = "sh"

# Markdown and notebooks. Notebooks keep their outputs; tests run them.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
suppress_warnings = ["ref.python"]  # names of types that occur in two modules

# The API reference
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"
add_module_names = False

html_theme = "furo"
html_title = "fmwc"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_favicon = "../src/fmwc/web/icon.svg"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5fa5", "color-brand-content": "#0b5fa5"},
    "dark_css_variables": {"color-brand-primary": "#7cc0ff", "color-brand-content": "#7cc0ff"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

linkcheck_timeout = 20
linkcheck_anchors = False
