"""Command line of the toy mixture: `python -m damex.toydata`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from damex.errors import ConfigError, DataError
from damex.toydata import contact_sheet, generate_toy_mixture


def main(arguments: list[str] | None = None) -> int:
    """Generate the mixture, show its sizes and return 0, or 2 if that is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m damex.toydata",
        description="Generate the toy mixture of five small detection datasets.",
    )
    parser.add_argument("--out", type=Path, default=Path("data/toy"))
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
        report = generate_toy_mixture(args.out, seed=args.seed, force=args.force)
    except (ConfigError, DataError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{args.out}\n{report.table()}\n")
    if args.sheet is not None:
        contact_sheet(args.out).save(args.sheet, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
