"""What an entry of a mixture may say about a folder in any format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from damex.datasets.formats.cache import convert_cached
from damex.datasets.formats.conversion import FORMATS, Conversion
from damex.datasets.formats.records import Options
from damex.errors import ConfigError, DataError, did_you_mean

_SPLITS = ("train", "val", "test")


def convert_entry(entry: Mapping[str, Any]) -> Conversion:
    """Convert the ``root`` of an entry, or find the files of an earlier conversion.

    Args:
        entry: ``name``, ``root`` and the options beside it.

    Raises:
        ConfigError: If it is not clear what lies there.
        DataError: If it cannot be read.
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
    """Refuse keys that contradict ``root``, or that mean nothing without it.

    Args:
        entry: As the config has it.
        where: Its place and name, for the message.

    Raises:
        ConfigError: If there is such a key, or a value cannot be one.
    """
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
    """One word or several as a tuple; None for nothing, empty if it is neither."""
    if told is None:
        return None
    words = [told] if isinstance(told, str) else told
    if not isinstance(words, (list, tuple)):
        return ()
    return tuple(words) if all(isinstance(word, str) for word in words) else ()
