"""The documentation site: ``make docs``. Pages are Markdown, as they are read in the repository."""

from __future__ import annotations

from varuna import __version__

project = "Varuna"
author = "The Varuna authors"
copyright = "The Varuna authors, Apache-2.0"
release = version = __version__

# The source is the whole repository, so that links between pages are the same here and there.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "README.md", "CHANGELOG.md", "LOG.md", "benchmarks/README.md"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinxcontrib.mermaid",
]

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
myst_enable_extensions = ["colon_fence"]
highlight_language = "text"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"Varuna {release}"
html_copy_source = False

linkcheck_ignore = [r"http://127\.0\.0\.1.*", r"http://169\.254\.169\.254.*"]
