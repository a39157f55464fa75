"""The files of a dataset folder: listed once, found by any spelling of a path."""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import permutations
from pathlib import Path, PurePosixPath
from unicodedata import normalize

from damex.datasets.entries import SPLITS
from damex.datasets.image_files import IMAGE_SUFFIXES, list_files
from damex.files import decode, glance

_SPLITS = {
    **{name: name for name in SPLITS},
    **dict(training="train", valid="val", validation="val", dev="val", testing="test"),
    "trainval": "trainval",
}
# Splits of the folders that may hold the images of a split.
_ALIKE = {
    "train": ("train", "trainval", None),
    "val": ("val", "trainval", None),
    "trainval": ("trainval", "train", "val", None),
    "test": ("test", None),
}
# Words behind that of a split that say nothing else, as in train_images.
_NEUTRAL = re.compile(
    r"images?|imgs?|jpe?gs?|pngs?|photos?|pictures?|frames?|jpegimages|masks?|"
    r"labels?|labeltxt|ann|anns|annos?|annotations?|instances|gt|bbx|bbox|bboxes|boxes|"
    r"objects?|det|detection|datas?|datasets?|sets?|splits?|subset|list|files?|parts?|"
    r"train|val|valid|test|coco|voc|yolo|kitti|dota|json|xml|csv|txt|new|old|final|full|all|small|clean|"
    r"raw|original|resized|(v|part|set|fold)?\d+"
)
# Words in folders of images, and of other pictures with the names of the images.
_PHOTOS = re.compile(r"jpegimages|images?|imgs?|rgb|photos?|pictures?|frames?")
_LABELS = re.compile(r"labels?|ann(otation)?s?|gt|jsons?")
_MASKS = re.compile(rf"{_LABELS.pattern}|masks?|depths?|seg[a-z]*|panoptic")
# Sibling folders of a folder of label files that may hold the images, likely first.
_IMAGE_FOLDERS = ("JPEGImages", "images", "image", "Images", "img", "")


def split_name(word: str) -> str | None:
    """``train``, ``val``, ``test``, ``trainval`` for words such as ``train2017``."""
    return _SPLITS.get(re.sub(r"(19|20)\d\d$", "", word.lower()))


def _split_word(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The first word of a name that is that of a split, and the words behind it."""
    words = [*filter(None, re.split(r"[^A-Za-z0-9]+", name))]
    for place, word in enumerate(words, start=1):
        if (split := split_name(word)) is not None:
            return split, tuple(word.lower() for word in words[place:])
    return None


class Tree:
    """All visible files below a folder, with sizes and times; links are followed.

    Paths are strings relative to the folder, with ``/``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = dict(sorted(list_files(str(root))))

    def split_of_folder(self, folder: str) -> str | None:
        """The split that a relative folder belongs to; its last matching part decides.

        The word of a split counts at the end (``WIDER_train``) and before words that
        say nothing else (``train_images``). Before others it counts only if another
        split has them, too: ``train_cats`` next to ``val_cats``, not ``train_station``.
        """
        for part in reversed(folder.split("/")):
            if (found := _split_word(part)) is None:
                continue
            split, rest = found
            is_neutral = all(map(_NEUTRAL.fullmatch, rest))
            if is_neutral or len(self._splits_by_rest.get(rest, ())) > 1:
                return split
        return None

    def split_of_file(self, path: str) -> str | None:
        """The split of an annotation file: by its name, else by its folders."""
        name = _name_of_table(path)
        return self.split_of_folder(name) or self.split_of_folder(parent(path))

    def split_of_table(self, path: str, tables: Sequence[str]) -> str | None:
        """Split of one of several files with many images each.

        Files of one split, such as train2014 and train2017, may overlap: they keep
        their paths.
        """
        split = self.split_of_file(path)
        if split is not None and [*map(self.split_of_file, tables)].count(split) == 1:
            return split
        return path if split is not None or len(tables) > 1 else None

    @cached_property
    def _splits_by_rest(self) -> Mapping[tuple[str, ...], set[str]]:
        """Splits in names of folders and tables, by the words behind them."""
        names = {part for folder in self.folders for part in folder.split("/")}
        names |= {*map(_name_of_table, self.with_suffix(".json", ".csv"))}
        found: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for split, rest in filter(None, map(_split_word, names)):
            found[rest].add(split)
        return found

    def digest(self) -> str:
        """Hash of the list of files with their sizes and times."""
        lines = (
            f"{path}\0{size}\0{time}\n" for path, (size, time) in self.files.items()
        )
        return hashlib.sha256("".join(lines).encode("utf-8", "replace")).hexdigest()

    def with_suffix(self, *suffixes: str) -> list[str]:
        """Sorted files whose name ends with a suffix, in any case."""
        return [path for path in self.files if path.lower().endswith(suffixes)]

    def raw(self, path: str, limit: int = -1) -> bytes:
        """The content of a file, up to ``limit`` bytes."""
        # A Path per file would double the time.
        with open(f"{self.root}/{path}", "rb") as file:  # noqa: PTH123
            return file.read(limit)

    def text(self, path: str) -> str:
        """The text of a file; DataError if it is in another encoding than UTF."""
        return decode(self.raw(path), self.root / path)

    def glanced(self, path: str, limit: int = -1) -> list[str]:
        """Lines to recognize a file by, stripped; bytes that are not text become �."""
        return [line.strip() for line in glance(self.raw(path, limit)).splitlines()]

    def lines(self, path: str) -> list[str]:
        """The lines of a file, stripped."""
        return [line.strip() for line in self.text(path).splitlines()]

    def numbered(self, path: str) -> Iterator[tuple[int, str]]:
        """The lines of a file that are not empty, with their numbers from 1."""
        lines = enumerate(self.lines(path), start=1)
        return ((number, line) for number, line in lines if line)

    @cached_property
    def images(self) -> list[str]:
        """Files with the suffix of an image."""
        return self.with_suffix(*IMAGE_SUFFIXES)

    @cached_property
    def folders(self) -> dict[str, None]:
        """Sorted folders with files in or below them; the root is the empty string."""
        found = {""}
        for path in self.files:
            while (path := parent(path)) not in found:
                found.add(path)
        return dict.fromkeys(sorted(found))

    @cached_property
    def images_by_stem(self) -> dict[str, list[str]]:
        """Images by their lower-case name without folder and suffix."""
        index: dict[str, list[str]] = {}
        for path in self.images:
            index.setdefault(normalize("NFC", stem(path)).lower(), []).append(path)
        return index

    def locate_image(
        self, name: str, near: Sequence[str] = (), split: str | None = None
    ) -> str | None:
        """Find the image that an annotation refers to; None if missing or ambiguous.

        Annotations may have paths of other machines, or another suffix or none. An
        exact path wins, then the image with most equal parent folders; folders in
        ``near`` break ties. Images of other splits than ``split``, possibly with equal
        names, are not guessed.
        """
        name = _clean(name)
        for folder in (*near, ""):
            if (path := join(folder, name)) in self.files:
                return path
        pure = PurePosixPath(name)
        has_suffix = pure.suffix.lower() in IMAGE_SUFFIXES
        # Archives of macOS write accents in another way.
        key = normalize("NFC", pure.stem if has_suffix else pure.name).lower()
        found = self.images_by_stem.get(key, [])
        if split is not None:
            fits = _ALIKE[split]
            found = [p for p in found if self.split_of_folder(parent(p)) in fits]
        ranks = [_rank(path, pure, near) for path in found]
        best = max(ranks, default=None)
        return found[ranks.index(best)] if best and ranks.count(best) == 1 else None

    def image_of_label(self, path: str, stated: str = "") -> str | None:
        """The image of a label file: by its own name, else by the ``stated`` one.

        It lies in a sibling of the folder of labels, next to the file, or anywhere.
        """
        folder = parent(path)
        near = [folder]
        for part in folder.split("/"):
            if part.lower() == "label_2":  # of KITTI
                near = [replace_part(folder, part, "image_2"), folder]
            elif re.fullmatch(r"labels?|annotations|labeltxt.*", part.lower()):
                near = [replace_part(folder, part, name) for name in _IMAGE_FOLDERS]
                near.append(folder)
        split, names = self.split_of_folder(folder), [stem(path), stated.strip()]
        if stem(_clean(stated)).lower() == names[0].lower():
            names.reverse()  # its suffix tells a.jpg from a.png
        found = (self.locate_image(name, near, split) for name in names if name)
        return next(filter(None, found), None)

    def image_finder(
        self, path: str, names: Iterable[str]
    ) -> Callable[..., str | None]:
        """Find images by the ``names`` in ``path``, a file about many images.

        They lie in its folder, in a folder of its split, or in ``images``. If several
        names may mean one image, that with most equal folders does: the images of the
        others are missing.
        """
        split, near = self.split_of_file(path), self._near_table(path)
        # A file may divide the images of one folder, such as train/, again.
        searched = split if split in map(self.split_of_folder, self.folders) else None

        @cache
        def guess(name: str, own: str | None) -> str | None:
            if not name:
                return None
            found = self.locate_image(name, near, searched)
            return found if found or not own else self.locate_image(name, near, own)

        best: dict[str, float] = {}
        for name in dict.fromkeys(names):
            if image := guess(name, None):
                best[image] = max(best.get(image, 0), _fit(image, name))

        @cache
        def find(name: str, own: str | None = None) -> str | None:
            image = guess(name, own)
            is_its = image and _fit(image, name) >= best.get(image, 0)
            return image if is_its else None

        return find

    def _near_table(self, path: str) -> list[str]:
        """Folders of the images of a file about many images, likely ones first."""
        split, folder = self.split_of_file(path), parent(path)
        bases, words = (folder, parent(folder)), re.split(r"[._]", stem(path))
        # A dataset of masks has its table in their folder: use the one above.
        top = bases[bool(_LABELS.fullmatch(_last(folder).lower()))]

        def order(one: str) -> tuple[bool, ...]:
            inner = one.removeprefix(f"{top}/") if top else one
            parts = re.split(r"[^a-z]+", inner.lower())
            is_mask = any(map(_MASKS.fullmatch, parts))
            is_photo = any(map(_PHOTOS.fullmatch, parts))
            apart = (not f"{one}/".startswith(f"{base}/") for base in bases if base)
            return (is_mask, *apart, not is_photo, _last(one) not in words)

        near = [
            one
            for one in self.folders
            if self.split_of_folder(one) == split is not None
            and (self.split_of_folder(_last(one)) or _last(one).lower() == "images")
        ]
        others = [join(base, n) for base in bases for n in ("", "images", "Images")]
        return [folder, *sorted(near, key=order), *others]

    def locate(
        self, name: str, near: Sequence[str], among: Container[str]
    ) -> str | None:
        """Find a path that may begin with parts of another machine."""
        parts = [part for part in _clean(name).split("/") if part not in ("", ".")]
        while parts[:1] == [".."]:
            del parts[0]
        trials = (
            join(folder, "/".join(parts[start:]))
            for start in range(max(len(parts), 1))
            for folder in near
        )
        return next((trial for trial in trials if trial in among), None)

    def describe(self) -> str:
        """File counts by suffix, for messages: ``142 .jpg, 3 .txt``."""
        kinds = Counter(
            PurePosixPath(path).suffix.lower() or "without suffix"
            for path in self.files
        )
        return ", ".join(f"{n} {suffix}" for suffix, n in kinds.most_common(6))


def join(folder: str, name: str) -> str:
    """Join two relative paths and resolve ``.`` and ``..`` in them."""
    path = posixpath.normpath(f"{folder}/{name}" if folder else name)
    return "" if path == "." else path


def some(paths: Sequence[str]) -> str:
    """The first paths of a list, for messages."""
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" * (len(paths) > 4))


def parent(path: str) -> str:
    """Folder of a relative path; the empty string for the root."""
    return path.rpartition("/")[0]


def stem(path: str) -> str:
    """File name without its last suffix."""
    return PurePosixPath(path).stem


def replace_part(folder: str, old: str, new: str) -> str:
    """Replace the last folder named ``old``, in any case; unchanged if missing."""
    parts = folder.split("/")
    for n in range(len(parts) - 1, -1, -1):
        if parts[n].lower() == old.lower():
            return "/".join([*parts[:n], *([new] if new else []), *parts[n + 1 :]])
    return folder


def _name_of_table(path: str) -> str:
    """File name up to its first dot."""
    return _last(path).split(".")[0]


def _last(folder: str) -> str:
    return folder.rpartition("/")[2]


def _rank(path: str, name: PurePosixPath, near: Sequence[str]) -> tuple[int, int, bool]:
    """Sort key of images of the right stem: equal folders, rank in ``near``, suffix."""
    folder = parent(path)
    rank = len(near) - near.index(folder) if folder in near else 0
    return _equal_folders(path, str(name)), rank, path.endswith(name.name)


def _equal_folders(path: str, name: str) -> int:
    """Number of parent folders, from the last, that two paths share."""
    both = (parent(one).split("/")[::-1] for one in (path, name))
    return len(posixpath.commonprefix([*both]))


def _fit(path: str, name: str) -> float:
    """Number of equal folders; infinite if those of one path end those of the other."""
    mine = parent(path).lower()
    theirs = parent(join("", _clean(name)).replace("../", "")).lower()
    if any(f"/{a}".endswith(f"/{b}") or not b for a, b in permutations((mine, theirs))):
        return math.inf
    return _equal_folders(f"{mine}/", f"{theirs}/")


def _clean(name: str) -> str:
    return name.strip().replace("\\", "/").removeprefix("./")


def numbers(words: Sequence[str]) -> tuple[float, ...] | None:
    """The words as numbers, NaN and infinity included; None if one is not a number."""
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        return None


def size_of(values: Sequence[float] | None) -> tuple[int, int] | None:
    """Width and height of an annotation; None if missing or 0."""
    if values is None or not all(0 < value < 1e6 for value in values):
        return None
    return round(values[0]), round(values[1])
