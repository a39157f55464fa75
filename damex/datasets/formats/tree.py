"""The files of a dataset folder: listed once, found by any spelling of a path."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath

IMAGE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp"),
        *(".gif", ".ppm", ".pgm", ".jp2"),
    }
)
_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
_SKIPPED_FOLDERS = frozenset({"__MACOSX", "__pycache__"})


def split_name(word: str) -> str | None:
    """``train``, ``val`` or ``test`` for words like ``Validation`` or ``train2017``."""
    return _SPLITS.get(re.sub(r"(19|20)\d\d$", "", word.lower()))


def split_of_folder(folder: str) -> str | None:
    """The split that a relative folder belongs to; its last matching part decides."""
    for part in reversed(PurePosixPath(folder).parts):
        for word in re.split(r"[^A-Za-z0-9]+", part):
            if (split := split_name(word)) is not None:
                return split
    return None


def split_of_file(path: str) -> str | None:
    """The split of an annotation file: by its name, else by its folders."""
    pure = PurePosixPath(path)
    stem = pure.name.split(".")[0]
    return split_of_folder(stem) or split_of_folder(str(pure.parent))


class Tree:
    """All visible files below a folder, with sizes and times; links are followed.

    Paths are strings relative to the folder, with ``/``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = dict(sorted(_walk(str(root), "", set())))
        self._holds: dict[tuple[str, tuple[str, ...]], bool] = {}

    def digest(self) -> str:
        """Hash of the list of files with their sizes and times."""
        lines = (f"{path}\0{size}\0{time}\n" for path, (size, time) in self)
        return hashlib.sha256("".join(lines).encode("utf-8", "replace")).hexdigest()

    def __iter__(self) -> Iterator[tuple[str, tuple[int, int]]]:
        return iter(self.files.items())

    def with_suffix(self, *suffixes: str) -> list[str]:
        """Sorted files whose name ends with a suffix, in any case."""
        return [path for path in self.files if path.lower().endswith(suffixes)]

    def text(self, path: str, limit: int = -1) -> str:
        """The text of a file up to ``limit``; bytes that are not UTF-8 become ``?``."""
        with open(  # noqa: PTH123 - a Path per file would double the time
            f"{self.root}/{path}", encoding="utf-8-sig", errors="replace"
        ) as file:
            return file.read(limit)

    def holds(self, path: str, *words: str) -> bool:
        """Whether a file contains all of some words."""
        if (path, words) not in self._holds:
            content = (self.root / path).read_bytes()
            found = all(word.encode() in content for word in words)
            self._holds[path, words] = found
        return self._holds[path, words]

    def lines(self, path: str) -> list[str]:
        """The lines of a file, stripped."""
        return [line.strip() for line in self.text(path).splitlines()]

    @cached_property
    def images(self) -> list[str]:
        """Files with the suffix of an image."""
        return [
            path
            for path in self.files
            if PurePosixPath(path).suffix.lower() in IMAGE_SUFFIXES
        ]

    @cached_property
    def folders(self) -> frozenset[str]:
        """Folders with files in or below them; the root is the empty string."""
        found = {""}
        for path in self.files:
            parts = path.split("/")[:-1]
            found.update("/".join(parts[: n + 1]) for n in range(len(parts)))
        return frozenset(found)

    @cached_property
    def images_by_stem(self) -> dict[str, list[str]]:
        """Images by their lower-case name without folder and suffix."""
        index: dict[str, list[str]] = {}
        for path in self.images:
            index.setdefault(PurePosixPath(path).stem.lower(), []).append(path)
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
        exact = [join(folder, name) for folder in near]
        for path in (*exact, name):
            if path in self.files:
                return path
        pure = PurePosixPath(name)
        has_suffix = pure.suffix.lower() in IMAGE_SUFFIXES
        key = (pure.stem if has_suffix else pure.name).lower()
        found = self.images_by_stem.get(key, [])
        if split is not None:
            found = [p for p in found if split_of_folder(parent(p)) in (split, None)]
        if not found:
            return None
        ranks = [_agreement(path, pure, near) for path in found]
        best = max(ranks)
        return found[ranks.index(best)] if ranks.count(best) == 1 else None

    def locate_folder(self, name: str, near: Sequence[str] = ("",)) -> str | None:
        """Find a folder by a path that may begin with parts of another machine."""
        parts = [part for part in _clean(name).split("/") if part not in ("", ".")]
        while parts and parts[0] == "..":
            parts = parts[1:]
        if not parts:
            return near[0]
        for start in range(len(parts)):
            for folder in near:
                path = join(folder, "/".join(parts[start:]))
                if path in self.folders:
                    return path
        return None

    def below(self, folder: str, paths: Iterable[str]) -> list[str]:
        """The paths inside a folder, at any depth."""
        return [path for path in paths if not folder or path.startswith(f"{folder}/")]

    def describe(self) -> str:
        """File counts by suffix, for messages: ``142 .jpg, 3 .txt``."""
        kinds = Counter(
            PurePosixPath(path).suffix.lower() or "without suffix"
            for path in self.files
        )
        shown = ", ".join(f"{n} {suffix}" for suffix, n in kinds.most_common(6))
        return shown or "no files"


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


def replace_part(folder: str, old: str, new: str) -> str | None:
    """Replace the last folder named ``old``; None if there is none."""
    parts = folder.split("/")
    for n in range(len(parts) - 1, -1, -1):
        if parts[n].lower() == old.lower():
            return "/".join([*parts[:n], *([new] if new else []), *parts[n + 1 :]])
    return None


def _agreement(
    path: str, name: PurePosixPath, near: Sequence[str]
) -> tuple[int, int, bool]:
    """Sort key of images of the right stem: equal folders, rank in ``near``, suffix."""
    folders, wanted = path.split("/")[:-1], name.parts[:-1]
    common = 0
    for one, other in zip(reversed(folders), reversed(wanted), strict=False):
        if one != other:
            break
        common += 1
    rank = [len(near) - n for n, one in enumerate(near) if one == "/".join(folders)]
    return common, max(rank, default=0), path.endswith(name.name)


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
