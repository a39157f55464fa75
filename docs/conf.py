"""Sphinx settings: pages in Markdown (MyST), and the API from its docstrings."""

import runpy
from pathlib import Path

import damex.registry  # mmdet must be importable before autodoc asks

project = "damex"
author = "the damex authors"
release = damex.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_llms_txt",  # llms.txt, and all pages in one file
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings name shapes, which types do not
add_module_names = False
default_role = "code"
smartquotes = False  # `--` of an option stays

html_theme = "furo"
html_title = "damex"
exclude_patterns = ["_build"]
suppress_warnings = [
    "myst.xref_missing",  # links to files outside of docs/
    "myst.header",  # the studies' tables, written by the studies, start at level 2
]


DETAILS = ("results/", "studies/", "research/predictions")  # not in the navigation
reference = runpy.run_path(str(Path(__file__).parent / "reference/update.py"))


def _edit(_: object, page: str, source: list[str]) -> None:
    if page == "reference/api":
        source[0] = reference["with_docstrings"](source[0])
    if page.startswith(DETAILS):
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


def setup(sphinx: object) -> None:
    """Show docstrings in place of lists of names, and details by links alone."""
    sphinx.connect("source-read", _edit)
