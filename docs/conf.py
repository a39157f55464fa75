"""Sphinx settings: pages in Markdown (MyST), API and commands from their docstrings."""

import functools
import operator
import re

import damex.registry  # mmdet must be importable before autodoc asks
from damex.workbench.cli.commands import app as program

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


def commands() -> str:
    """Examples, arguments and options of all commands, in Markdown."""
    sections = []
    name = program.name[0]
    parts = re.split(rf"(?m)^#+ (?={re.escape(name)})", program.generate_docs())
    for part in parts[1:]:
        title, _, text = part.partition("\n")
        words = title.removeprefix(name).split()
        command = functools.reduce(operator.getitem, words, program)
        if command.default_command is None:
            continue  # the program and its groups
        lines = [line.strip() for line in command.help_epilogue.splitlines()[1:]]
        examples = "\n".join(["```bash", *lines, "```\n\n"])
        text = re.sub(r"(?s)```console.*?```\s+", "", text)  # usage, without names
        text = text.replace("**Parameters**", "**Options**")
        start = text.find("**")
        sections.append(f"## {title}\n{text[:start]}{examples}{text[start:]}")
    return "\n".join(sections)


def _insert_commands(_: object, page: str, source: list[str]) -> None:
    if page == "reference/commands":
        source[0] = source[0].replace("<!-- commands -->", commands())


def setup(sphinx: object) -> None:
    """Insert what is generated into its page."""
    sphinx.connect("source-read", _insert_commands)
