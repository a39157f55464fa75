"""Sphinx settings: pages in Markdown (MyST), the API reference from docstrings."""

import damex.registry  # mmdet must be importable before autodoc asks

project = "damex"
author = "the damex authors"
release = damex.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings name shapes, which types do not
add_module_names = False
default_role = "code"

html_theme = "furo"
html_title = "damex"
exclude_patterns = ["_build"]
suppress_warnings = [
    "myst.xref_missing",  # links to files outside of docs/
    "myst.header",  # the studies' tables, written by the studies, start at level 2
]
