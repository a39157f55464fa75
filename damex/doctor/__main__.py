"""Runs the doctor: ``python -m damex.doctor``."""

from __future__ import annotations

import argparse
import sys

from damex.doctor.probe import examine
from damex.doctor.table import render


def main() -> int:
    """Prints the table.

    Returns:
        The exit code: 0 if there is no problem, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m damex.doctor",
        description="Check the installation and print how to mend each problem.",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing unless there is a problem"
    )
    quiet = parser.parse_args().quiet
    findings = examine()
    problems = any(row.problem for row in findings)
    if problems or not quiet:
        sys.stdout.write(render(findings) + "\n")
    return int(problems)


if __name__ == "__main__":
    sys.exit(main())
