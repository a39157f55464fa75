"""The fields of COCO documents, and what a config expects of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from damex.errors import ConfigError

BAD_BOX_POLICIES = ("error", "drop")
NUMBERS = frozenset({int, float})
# The lists of a document, and what one of their records is called.
LISTS: Mapping[str, str] = MappingProxyType(
    {"images": "image", "annotations": "annotation", "categories": "category"}
)


class Field(NamedTuple):
    """Types and values of a field; a record with a faulty link is not read."""

    types: tuple[type, ...]
    words: str
    test: Callable[[Any], bool] | None = None
    is_link: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether the field may hold a value."""
        return type(value) in self.types and (self.test is None or self.test(value))


def flag_of(value: Any) -> bool | None:
    """The truth of a flag, as exporters write it; None if it is neither true nor false.

    Flags are 0, 1, whole numbers above, truth values, and texts of these: ``iscrowd``,
    ``difficult``. No value, and VOC's word *Unspecified*, are false.
    """
    if isinstance(value, str):
        word = value.strip().casefold()
        if word in _WORDS:
            return _WORDS[word]
        try:
            value = float(word)
        except ValueError:
            return None
    if value is None:
        return False
    if not isinstance(value, (int, float)):
        return None
    is_level = value == 0 or (value >= 1 and value % 1 == 0)
    return bool(value) if is_level else None


_WORDS: Mapping[str, bool] = MappingProxyType(
    {
        **dict.fromkeys(("", "false", "f", "no", "n", "off", "none", "null"), False),
        "unspecified": False,
        **dict.fromkeys(("true", "t", "yes", "y", "on"), True),
    }
)
ID = Field((int, str, float), "an integer or a text")
_FLAG = Field(
    (type(None), bool, int, float, str),
    "0, 1, true or false",
    lambda value: flag_of(value) is not None,
)
_LINK = ID._replace(is_link=True)
_PATH = Field((str,), "a path", bool)
_NAME = Field((int, str), "a text", lambda value: value != "")
PIXELS = Field(
    (int, float), "a number of pixels above 0", lambda value: 0 < value < math.inf
)
FIELDS: Mapping[str, Mapping[str, Field]] = MappingProxyType(
    {
        "images": dict(id=_LINK, file_name=_PATH, width=PIXELS, height=PIXELS),
        "annotations": dict(
            image_id=_LINK, category_id=_LINK, id=ID, iscrowd=_FLAG, ignore=_FLAG
        ),
        "categories": dict(id=_LINK, name=_NAME),
    }
)


def is_box(box: Any) -> bool:
    """Whether a JSON value is a list of four numbers."""
    return isinstance(box, list) and len(box) == 4 and {*map(type, box)} <= NUMBERS


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number, including NaN and infinity."""
    return type(value) in NUMBERS


@dataclass(frozen=True)
class Expectations:
    """What a config expects of the data; defaults are those of ``MixtureDataset``.

    Args:
        classes: Names of the used classes; None for all.
        is_choice: Whether the mixture entry names them.
        filter_empty: Whether training leaves out images without boxes.
        scales: Sizes that images may be resized to.
        kept_scales: Those of them for whole images with their aspect ratio kept.
        tile: Side of the windows that the dataset is seen through, if any.
        num_queries: Number of objects that the detector can find in an image.
        applies_exif: Whether images are rotated by their EXIF orientation.
    """

    classes: tuple[str, ...] | None = None
    is_choice: bool = False
    on_bad_box: str = "error"
    filter_empty: bool = True
    scales: tuple[tuple[float, float], ...] = ()
    kept_scales: tuple[tuple[float, float], ...] = ()
    tile: int | None = None
    num_queries: int | None = None
    applies_exif: bool = True

    def __post_init__(self) -> None:
        if self.on_bad_box not in BAD_BOX_POLICIES:
            raise ConfigError(
                f"on_bad_box must be one of {BAD_BOX_POLICIES}, got "
                f"{self.on_bad_box!r}."
            )

    def uses(self, name: str) -> bool:
        """Whether training uses the class."""
        return self.classes is None or name in self.classes
