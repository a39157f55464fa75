"""Options and cached conversion of an entry's folder.

Converted datasets are kept in the user's cache until their files change.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from damex.datasets.formats.conversion import (
    FORMATS,
    SUMMARY_FILE,
    Conversion,
    convert_tree,
    open_root,
)
from damex.datasets.formats.records import Options
from damex.datasets.formats.summary import Summary
from damex.errors import ConfigError, DataError, did_you_mean

_SPLITS = ("train", "val", "test")


def convert_entry(entry: Mapping[str, Any]) -> Conversion:
    """Convert the ``root`` of an entry, or reuse an earlier conversion.

    Raises:
        ConfigError: If the format is ambiguous.
        DataError: If the data cannot be read.
    """
    keys = (*_SPLITS, "classes")
    options = Options(
        format=entry.get("format"),
        val_share=entry.get("val_share"),
        **{key: _words(entry.get(key)) for key in keys},
    )
    try:
        return convert_cached(entry["root"], options)
    except (ConfigError, DataError) as error:
        raise type(error)(f"dataset {entry['name']!r}: {error}") from error


def check_entry(entry: Mapping[str, Any], where: str) -> None:
    """Reject keys that contradict or need ``root``, and wrong values (ConfigError)."""
    if entry.get("root") is None:
        for key in ("format", "val_share"):
            if entry.get(key) is not None:
                raise ConfigError(
                    f"{where}: {key} is for an entry with root='<folder>'; give root "
                    f"in place of data_root, or remove {key}."
                )
        return
    for key in ("data_root", "img"):
        if entry.get(key):
            raise ConfigError(
                f"{where} has both root and {key}; root alone finds annotations and "
                f"images. Remove {key}, or root to name the files yourself."
            )
    for split in _SPLITS:
        told = entry.get(split)
        if told is not None and not _words(told):
            raise ConfigError(
                f"{where}: beside root, {split} is a split, folder, list of images or "
                f"annotation file inside of it, got {told!r}."
            )
    names = [fmt.name for fmt in FORMATS]
    if entry.get("format") not in (None, *names):
        raise ConfigError(
            f"{where}: format={entry['format']!r} is unknown; "
            f"{did_you_mean(str(entry['format']), names)}"
        )
    share = entry.get("val_share")
    is_share = isinstance(share, (int, float)) and 0.0 <= share < 1.0
    if share is not None and not is_share:
        raise ConfigError(
            f"{where}: val_share must be a number from 0 to below 1, got {share!r}."
        )


def _words(told: Any) -> tuple[str, ...] | None:
    """One word or several as a tuple; None for None, empty for other types."""
    if told is None:
        return None
    words = [told] if isinstance(told, str) else told
    if not isinstance(words, (list, tuple)):
        return ()
    return tuple(words) if all(isinstance(word, str) for word in words) else ()


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/damex/datasets`` or below ``~/.cache``; safe to delete."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "damex" / "datasets"


def convert_cached(root: str | Path, options: Options) -> Conversion:
    """Convert a dataset, or reuse a conversion of the same files, options and readers.

    Files are the same if names, sizes and times are. A new folder is renamed when
    complete, so that concurrent processes share the first one.

    Raises:
        ConfigError: If an option is invalid, or the cache cannot be written.
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
    if existed:  # incomplete: files were deleted
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
        except OSError as error:
            if (found := _read(folder)) is not None:
                return found  # another process was first
            raise ConfigError(
                f"the converted files of {tree.root} cannot be moved to {folder} "
                f"({error}); delete that folder."
            ) from error
        return conversion._replace(folder=folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _read(folder: Path) -> Conversion | None:
    """A complete conversion in a folder, or None."""
    try:
        text = (folder / SUMMARY_FILE).read_text(encoding="utf-8")
        conversion = Conversion(folder, Summary.from_dict(json.loads(text)))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    files = [folder / f"{split}.json" for split in conversion.summary.splits]
    return conversion if all(file.is_file() for file in files) else None


@cache
def _version() -> str:
    """Hash of the code of this package, to invalidate the cache."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
