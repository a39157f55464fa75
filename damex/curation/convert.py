"""``damex data convert``: a folder in any format to COCO files and a summary."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from damex.datasets.formats.conversion import convert_tree, open_root
from damex.datasets.formats.records import Options, fault_of_names
from damex.errors import ConfigError
from damex.files import atomic_write


def convert(
    root: str,
    *,
    out: str,
    format: str | None,  # noqa: A002
    val_share: float | None,
    classes: Sequence[str],
    **splits: Sequence[str],
) -> None:
    """Write COCO files of a dataset into a folder, and print a summary."""
    if val_share is not None and not 0.0 <= val_share < 1.0:
        raise ConfigError(f"--val-share must be from 0 to below 1, got {val_share}.")
    if (fault := fault_of_names(classes)) is not None:
        raise ConfigError(f"--classes: {fault}.")
    lists = dict(splits, classes=classes)
    chosen = {key: tuple(words) for key, words in lists.items() if words}
    options = Options(format=format, val_share=val_share, **chosen)
    tree, folder = open_root(root), Path(out)
    if folder.resolve().is_relative_to(tree.root):
        raise ConfigError(
            f"--out {out} lies inside of {root}, whose annotations it would then be; "
            "choose a folder outside."
        )
    with tempfile.TemporaryDirectory() as draft:
        conversion = convert_tree(tree, options, Path(draft))
        files = sorted(Path(draft).iterdir())
        for file in files:
            if (folder / file.name).exists():
                raise ConfigError(
                    f"{folder / file.name} exists and is not overwritten; "
                    "remove it, or choose another --out."
                )
        with ExitStack() as stack:  # all files or none
            for file in files:
                part = stack.enter_context(atomic_write(folder / file.name))
                shutil.copyfile(file, part)
    name = tree.root.name
    print(conversion.summary.text(name))
    named = ", ".join(f'{s}="{s}.json"' for s in conversion.summary.splits)
    print(
        f"\nfor a mixture:\n    dict(name={name!r}, "
        f"data_root={str(folder.resolve())!r}, {named}, img={str(tree.root)!r}),"
    )
