"""Converted data sets, kept in a folder of the user's until their files change."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

from damex.datasets.formats.conversion import (
    SUMMARY_FILE,
    Conversion,
    convert_tree,
    open_root,
)
from damex.datasets.formats.records import Options
from damex.datasets.formats.summary import Summary
from damex.errors import ConfigError


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/damex/datasets``, by default below ``~/.cache``.

    Nothing in it is lost when it is deleted.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "damex" / "datasets"


def convert_cached(root: str | Path, options: Options) -> Conversion:
    """Convert a data set, or find the files of an earlier conversion.

    An earlier one serves as long as the names, sizes and times of all files below the
    root, the options and the readers are the same. Files are written into a folder of
    their own that gets its name when it is complete: of several processes that convert
    the same at once, one is first, and the others take its files.

    Raises:
        ConfigError: If an option cannot work, or the cache cannot be written.
        DataError: If the data cannot be read.
    """
    tree = open_root(root)
    key = json.dumps([str(tree.root), asdict(options), tree.digest(), _version()])
    name = f"{tree.root.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder = cache_folder() / name
    existed = folder.exists()
    found = _read(folder)
    if found is not None:
        return found
    if existed:  # and is incomplete: somebody took files out of it
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"the converted files of {tree.root} cannot be written to {folder.parent} "
            f"({error}); set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    try:
        conversion = convert_tree(tree, options, draft)
        try:
            draft.rename(folder)
        except OSError:  # another process was first
            return _read(folder) or conversion
        return conversion._replace(folder=folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _read(folder: Path) -> Conversion | None:
    """A complete conversion in a folder; None if there is none."""
    try:
        text = (folder / SUMMARY_FILE).read_text(encoding="utf-8")
        conversion = Conversion(folder, Summary.from_dict(json.loads(text)))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    files = [folder / f"{split}.json" for split in conversion.summary.splits]
    return conversion if all(file.is_file() for file in files) else None


@cache
def _version() -> str:
    """A hash of the code of this room: other readers, other files."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
