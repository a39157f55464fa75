"""``damex data convert``: a folder in any format to COCO files and a summary."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from damex.commandline.data import convert_parser
from damex.datasets.formats.conversion import convert_tree, open_root
from damex.datasets.formats.records import Options, fault_of_names
from damex.errors import ConfigError
from damex.files import atomic_write


def convert(arguments: Sequence[str]) -> None:
    """Write COCO files of a dataset into a folder, and print a summary.

    Raises:
        ConfigError: If an option is invalid, or a file would be overwritten.
        DataError: If the data cannot be read.
    """
    args = convert_parser().parse_args(arguments)
    if args.val_share is not None and not 0.0 <= args.val_share < 1.0:
        raise ConfigError(
            f"--val-share must be from 0 to below 1, got {args.val_share}."
        )
    if (fault := fault_of_names(args.classes or ())) is not None:
        raise ConfigError(f"--classes: {fault}.")
    keys = ("train", "val", "test", "classes")
    chosen = {key: tuple(words) for key in keys if (words := getattr(args, key))}
    options = Options(format=args.format, val_share=args.val_share, **chosen)
    tree, out = open_root(args.root), Path(args.out)
    if out.resolve().is_relative_to(tree.root):
        raise ConfigError(
            f"--out {args.out} lies inside of {args.root}, where the files would be "
            "taken for annotations of it; choose a folder outside."
        )
    with tempfile.TemporaryDirectory() as draft:
        conversion = convert_tree(tree, options, Path(draft))
        files = sorted(Path(draft).iterdir())
        for file in files:
            if (out / file.name).exists():
                raise ConfigError(
                    f"{out / file.name} exists and is not overwritten; remove it, or "
                    "choose another --out."
                )
        with ExitStack() as stack:  # all files or none
            for file in files:
                part = stack.enter_context(atomic_write(out / file.name))
                shutil.copyfile(file, part)
    name = tree.root.name
    print(conversion.summary.text(name))
    named = ", ".join(f'{s}="{s}.json"' for s in conversion.summary.splits)
    print(
        f"\nfor a mixture:\n    dict(name={name!r}, data_root={str(out.resolve())!r}, "
        f"{named}, img={str(tree.root)!r}),"
    )
