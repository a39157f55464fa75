"""Reads what damex needs and compares versions, with the standard library only."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

COMPARE = MappingProxyType(
    {
        ">=": operator.ge,
        "<=": operator.le,
        "==": operator.eq,
        "!=": operator.ne,
        ">": operator.gt,
        "<": operator.lt,
    }
)


@dataclass(frozen=True)
class Requirement:
    """A distribution and the versions of it that will do.

    Attributes:
        name: Name of the distribution, as pip knows it.
        versions: For example ``>=2.4`` or ``>=2.4,<3``; empty for any.
    """

    name: str
    versions: str

    @classmethod
    def parse(cls, line: str) -> Requirement:
        """Reads one line of a requirements file or of package metadata.

        Raises:
            ValueError: If the line does not start with a name.
        """
        match = re.match(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;#)]*)", line)
        if match is None:
            raise ValueError(
                f"requirement {line!r}: got no package name, expected a line such as "
                "'torch>=2.4'; mend that line of requirements.txt"
            )
        return cls(match[1], match[2].replace(" ", ""))

    def allows(self, version: str) -> bool:
        """Tells whether a version will do; local parts such as +cpu do not count."""
        bounds = re.findall(r"([<>=!]=|[<>])([^,]+)", self.versions)
        return all(
            COMPARE[sign](release(version), release(bound)) for sign, bound in bounds
        )


def declared() -> tuple[Requirement, list[Requirement]]:
    """Reads what damex needs: the Python versions and the distributions.

    Returns:
        From damex's own metadata where it is installed, else from the files that
        this metadata is made of.
    """
    try:
        about = metadata.metadata("damex")
    except metadata.PackageNotFoundError:
        root = Path(__file__).resolve().parents[2]
        project = (root / "pyproject.toml").read_text(encoding="utf-8")
        match = re.search(r'^requires-python = "(.*)"$', project, re.MULTILINE)
        python = match[1] if match else ""
        text = (root / "requirements.txt").read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if re.match(r"\s*\w", line)]
    else:
        python = about["Requires-Python"] or ""
        every = about.get_all("Requires-Dist") or []
        lines = [line for line in every if "extra ==" not in line]
    return Requirement("python", python), [Requirement.parse(line) for line in lines]


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, without what follows them.

    Trailing zeros go, so that 2.4 and 2.4.0 are equal: ``2.15.0+cu130`` is
    ``(2, 15)``.
    """
    match = re.match(r"\d+(?:\.\d+)*", version.strip())
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def version_of(name: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
