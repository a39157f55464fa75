"""Write what the pages of commands and of the Python API say of the code.

    python docs/reference/update.py

``commands.md`` has the help of all commands. ``api.md`` has directives of autodoc in
comments, each with a list of their names for readers of the repository; the built site
shows the docstrings in place of a list.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import pkgutil
import re
from pathlib import Path

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
from damex.workbench.cli.commands import app as program

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMANDS = re.compile(r"(?<=<!-- commands -->\n).*(?=<!-- end of commands -->)", re.S)
NAMES = re.compile(
    r"<!-- names\n(?P<directives>.*?)-->\n.*?<!-- end of names -->\n", re.S
)
DIRECTIVE = re.compile(r"^\.\. auto\w+:: ([\w.]+)$", re.M)


def with_commands(page: str) -> str:
    """The page of commands with examples, arguments and options of each."""
    name = program.name[0]
    help_text = program.generate_docs().replace("\\[", "[")
    sections = []
    for part in re.split(rf"(?m)^#+ (?={re.escape(name)})", help_text)[1:]:
        title, _, text = part.partition("\n")
        words = title.removeprefix(name).split()
        command = functools.reduce(operator.getitem, words, program)
        if command.default_command is None:
            continue  # the program and its groups
        lines = [line.strip() for line in command.help_epilogue.splitlines()[1:]]
        examples = "\n".join(["```bash", *lines, "```\n\n"])
        text = re.sub(r"(?s)```console.*?```\s+", "", text)  # usage, without names
        text = text.replace("**Parameters**", "**Options**").strip()
        start = text.find("**")
        sections.append(f"\n## {title}\n\n{text[:start]}{examples}{text[start:]}\n")
    return COMMANDS.sub(lambda _: "".join(sections) + "\n", page)


def with_names(page: str) -> str:
    """The page of the API with a list behind each comment of directives."""

    def listed(found: re.Match) -> str:
        lines = "\n".join(map(_line, DIRECTIVE.findall(found["directives"])))
        comment = f"<!-- names\n{found['directives']}-->"
        return f"{comment}\n\n{lines}\n\n<!-- end of names -->\n"

    return NAMES.sub(listed, page)


def with_docstrings(page: str) -> str:
    """The page of the API for the built site."""
    return NAMES.sub(r"```{eval-rst}\n\g<directives>```\n", page)


def _line(name: str) -> str:
    """A list item: the name, a link to its file, and its first sentence."""
    value = pkgutil.resolve_name(name)
    summary = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    file = Path(os.path.relpath(inspect.getfile(inspect.unwrap(value)), HERE))
    return f"- [`{name.rpartition('.')[2]}`]({file.as_posix()}): {summary}"


WRITERS = {"commands.md": with_commands, "api.md": with_names}


def main() -> None:
    """Write the pages."""
    for name, write in WRITERS.items():
        page = HERE / name
        page.write_text(write(page.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
