"""Prints findings as plain text, without any package for tables."""

from __future__ import annotations

from collections.abc import Sequence

from damex.doctor.checks import Finding

HEADER = ("component", "found", "needed", "status")


def render(findings: Sequence[Finding]) -> str:
    """Lays out the table and, below it, each problem with its mending command.

    Args:
        findings: In the order of the rows.

    Returns:
        Lines of text without a newline at the end.
    """
    rows = [HEADER]
    rows += [(row.name, row.found, row.needed, _status(row)) for row in findings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths[:3]) + "  ------")
    problems = [row for row in findings if row.problem]
    if not problems:
        return "\n".join([*lines, "", "All is well."])
    lines += ["", "To mend:" if len(problems) == 1 else "To mend, from the top:"]
    for row in problems:
        lines += [f"  {row.name}: {row.problem}", f"      {row.mend}"]
    missing = [f'"{row.name}{row.needed}"' for row in problems if row.missing]
    if len(missing) > 1:
        lines += ["All that is not installed at once:"]
        lines += [f"      pip install {' '.join(missing)}"]
    return "\n".join(lines)


def _status(row: Finding) -> str:
    if row.problem:
        return "PROBLEM"
    if row.untried:
        return "not tried (see above)"
    return f"ok ({row.note})" if row.note else "ok"
