"""The files of a dataset folder: listed once, found by any spelling of a path."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath

IMAGE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp"),
        *(".gif", ".ppm", ".pgm", ".jp2"),
    }
)
SPLITS = ("train", "val", "test")
_SPLITS = {
    **{name: name for name in SPLITS},
    **dict(training="train", valid="val", validation="val", dev="val", testing="test"),
}
_SKIPPED_FOLDERS = frozenset({"__MACOSX", "__pycache__"})
# Sibling folders of a folder of label files that may hold the images, likely first.
_IMAGE_FOLDERS = ("JPEGImages", "images", "image", "Images", "img", "")


def split_name(word: str) -> str | None:
    """``train``, ``val`` or ``test`` for words like ``Validation`` or ``train2017``."""
    return _SPLITS.get(re.sub(r"(19|20)\d\d$", "", word.lower()))


def split_of_folder(folder: str) -> str | None:
    """The split that a relative folder belongs to; its last matching part decides."""
    for part in reversed(folder.split("/")):
        for word in re.split(r"[^A-Za-z0-9]+", part):
            if (split := split_name(word)) is not None:
                return split
    return None


def split_of_file(path: str) -> str | None:
    """The split of an annotation file: by its name, else by its folders."""
    name = path.rpartition("/")[2].split(".")[0]
    return split_of_folder(name) or split_of_folder(parent(path))


def split_of_table(path: str, tables: Sequence[str]) -> str | None:
    """Split of one of several files with many images each.

    Files of one split, such as train2014 and train2017, may overlap: they keep their
    paths.
    """
    split = split_of_file(path)
    if split is not None and [*map(split_of_file, tables)].count(split) == 1:
        return split
    return path if split is not None or len(tables) > 1 else None


class Tree:
    """All visible files below a folder, with sizes and times; links are followed.

    Paths are strings relative to the folder, with ``/``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = dict(sorted(_walk(str(root), "", set())))

    def digest(self) -> str:
        """Hash of the list of files with their sizes and times."""
        lines = (
            f"{path}\0{size}\0{time}\n" for path, (size, time) in self.files.items()
        )
        return hashlib.sha256("".join(lines).encode("utf-8", "replace")).hexdigest()

    def with_suffix(self, *suffixes: str) -> list[str]:
        """Sorted files whose name ends with a suffix, in any case."""
        return [path for path in self.files if path.lower().endswith(suffixes)]

    def text(self, path: str, limit: int = -1) -> str:
        """The text of a file up to ``limit``; bytes that are not UTF-8 become ``?``."""
        with open(  # noqa: PTH123 - a Path per file would double the time
            f"{self.root}/{path}", encoding="utf-8-sig", errors="replace"
        ) as file:
            return file.read(limit)

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
            index.setdefault(stem(path).lower(), []).append(path)
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
        key = (pure.stem if has_suffix else pure.name).lower()
        found = self.images_by_stem.get(key, [])
        if split is not None:
            found = [p for p in found if split_of_folder(parent(p)) in (split, None)]
        ranks = [_agreement(path, pure, near) for path in found]
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
        split = split_of_folder(folder)
        found = self.locate_image(stem(path), near, split)
        if found is None and stated.strip():
            found = self.locate_image(stated, near, split)
        return found

    def image_finder(self, path: str) -> Callable[[str], str | None]:
        """Find images by the names in ``path``, a file about many images.

        They lie in its folder, in a folder of its split, or in ``images``.
        """
        split, folder = split_of_file(path), parent(path)
        bases, words = (folder, parent(folder)), re.split(r"[._]", stem(path))

        def order(one: str) -> tuple[bool, ...]:
            apart = (not f"{one}/".startswith(f"{base}/") for base in bases if base)
            return (*apart, _last(one) not in words)

        near = [
            one
            for one in self.folders
            if split_of_folder(one) == split is not None
            and (split_of_folder(_last(one)) or _last(one).lower() == "images")
        ]
        others = [join(base, n) for base in bases for n in ("", "images", "Images")]
        near = [folder, *sorted(near, key=order), *others]
        return lambda name: self.locate_image(name, near, split) if name else None

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


def _last(folder: str) -> str:
    return folder.rpartition("/")[2]


def _agreement(
    path: str, name: PurePosixPath, near: Sequence[str]
) -> tuple[int, int, bool]:
    """Sort key of images of the right stem: equal folders, rank in ``near``, suffix."""
    folder = parent(path)
    wanted = [*reversed(name.parts[:-1])]
    common = len(posixpath.commonprefix([folder.split("/")[::-1], wanted]))
    rank = len(near) - near.index(folder) if folder in near else 0
    return common, rank, path.endswith(name.name)


def _clean(name: str) -> str:
    return name.strip().replace("\\", "/").removeprefix("./")


def _walk(
    root: str, folder: str, entered: set[str]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Relative path, size and time of files below a folder; link cycles are cut."""
    real = os.path.realpath(f"{root}/{folder}")
    if real in entered:
        return
    entered.add(real)
    with os.scandir(real) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in shown:
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_file():
            stat = entry.stat()
            yield path, (stat.st_size, stat.st_mtime_ns)
        elif entry.is_dir() and entry.name not in _SKIPPED_FOLDERS:
            yield from _walk(root, path, entered)


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
