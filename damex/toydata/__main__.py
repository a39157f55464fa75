"""``python -m damex.toydata``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from damex.errors import ConfigError, DataError
from damex.toydata import DATASETS, contact_sheet, generate_toy_mixture
from damex.toydata.domains import DatasetSpec
from damex.toydata.worlds import world_specs


def main(arguments: list[str] | None = None) -> int:
    """Generate the mixture and print its sizes; return 0, or 2 on a user error."""
    parser = argparse.ArgumentParser(
        prog="python -m damex.toydata",
        description="Generate the toy mixture of five small detection datasets.",
    )
    parser.add_argument("--out", type=Path, default=Path("data/toy"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--worlds",
        type=int,
        metavar="N",
        help="instead: N worlds that share their objects (see damex.toydata.worlds)",
    )
    parser.add_argument(
        "--names",
        choices=("conflicting", "agreeing"),
        help="whether the worlds agree in what they call things",
    )
    parser.add_argument(
        "--train", dest="num_train", type=int, help="training images of each world"
    )
    parser.add_argument(
        "--val", dest="num_val", type=int, help="validation images of each world"
    )
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
        report = generate_toy_mixture(
            args.out, seed=args.seed, force=args.force, specs=_specs(args)
        )
    except (ConfigError, DataError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{args.out}\n{report.table()}\n")
    if args.sheet is not None:
        contact_sheet(args.out).save(args.sheet, optimize=True)
    return 0


def _specs(args: argparse.Namespace) -> Sequence[DatasetSpec]:
    """The datasets selected on the command line."""
    options = ("names", "num_train", "num_val")
    given = {k: v for k in options if (v := getattr(args, k)) is not None}
    if args.worlds is not None:
        return world_specs(args.worlds, **given)
    if given:
        raise ConfigError("--names, --train and --val are for --worlds; set it, too.")
    return DATASETS


if __name__ == "__main__":
    sys.exit(main())
