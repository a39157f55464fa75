"""Command line of the bundled mixture: `python -m damex.datasets.minimix`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from damex.datasets.minimix import contact_sheet, generate_minimix


def main(arguments: list[str] | None = None) -> int:
    """Generate the mixture and write a table of its sizes to the screen.

    Args:
        arguments: Words of the command line, by default those of the process.

    Returns:
        Exit status: 0, or 2 if the folder is refused.
    """
    parser = argparse.ArgumentParser(
        prog="python -m damex.datasets.minimix",
        description="Generate the bundled mixture of small detection datasets.",
    )
    parser.add_argument("--out", type=Path, default=Path("data/minimix"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an earlier mixture; other files in the folder stay",
    )
    parser.add_argument(
        "--sheet", type=Path, metavar="PNG", help="also write a picture of samples"
    )
    args = parser.parse_args(arguments)
    try:
        report = generate_minimix(args.out, seed=args.seed, force=args.force)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{args.out}\n{report.table()}\n")
    if args.sheet is not None:
        contact_sheet(args.out).save(args.sheet, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
