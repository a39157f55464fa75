"""Folders of images, and what damex reads from them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from damex.datasets.entries import Options, Summary
from damex.workbench.formats.conversion import convert_tree, open_root
from tests.test_headroom.conftest import config  # noqa: F401

ORIENTATION = 0x0112


class Read(NamedTuple):
    """A conversion, opened: boxes as (label, (x1, y1, x2, y2)), in file order."""

    summary: Summary
    splits: dict[str, dict[str, list[tuple[str, tuple[float, ...]]]]]
    documents: dict[str, dict[str, Any]]

    @property
    def dropped(self) -> dict[str, int]:
        return {what: entry.times for what, entry in self.summary.dropped.items()}

    @property
    def noted(self) -> dict[str, int]:
        return {what: entry.times for what, entry in self.summary.noted.items()}

    def boxes(self) -> dict[str, list[tuple[str, tuple[float, ...]]]]:
        """Boxes by image, over all splits."""
        return {k: v for images in self.splits.values() for k, v in images.items()}


def _write_image(
    path: Path,
    size: tuple[int, int] = (40, 20),
    *,
    orientation: int | None = None,
    mode: str = "RGB",
    kind: str | None = None,
) -> None:
    """An image whose colour follows from its path, so that no two are equal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shade = tuple(sum(str(path).encode()) * k % 256 for k in (1, 3, 7, 11))
    image = Image.new(mode, size, shade[: len(mode)])
    mark = zlib.crc32(str(path).encode())
    image.putpixel((0, 0), tuple(mark >> 8 * k & 255 for k in range(len(mode))))
    exif = Image.Exif()
    if orientation is not None:
        exif[ORIENTATION] = orientation
    image.save(path, format=kind, exif=exif)


def _read(root: Path, out: Path, **options: Any) -> Read:
    conversion = convert_tree(open_root(root), Options(**options), out)
    documents = {
        split: json.loads((out / f"{split}.json").read_text())
        for split in conversion.summary.splits
    }
    splits = {}
    for split, document in documents.items():
        names = {c["id"]: c["name"] for c in document["categories"]}
        files = {i["id"]: i["file_name"] for i in document["images"]}
        images = splits[split] = {name: [] for name in files.values()}
        for record in document["annotations"]:
            x, y, w, h = record["bbox"]
            box = (names[record["category_id"]], (x, y, x + w, y + h))
            images[files[record["image_id"]]].append(box)
    return Read(conversion.summary, splits, documents)


@pytest.fixture
def write_image() -> Callable[..., None]:
    """``write_image(path, size=(40, 20), orientation=None, mode="RGB", kind=None)``."""
    return _write_image


@pytest.fixture
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Read]:
    """``read(root, **options)``: convert a folder and open the result."""
    out = tmp_path_factory.mktemp("converted")
    return lambda root, **options: _read(root, out, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """``folder(images, files)``: the folder with images and text or JSON files."""

    def make(
        images: str | Collection[str] = "", files: Mapping[str, Any] | None = None
    ) -> Path:
        for name in images.split() if isinstance(images, str) else images:
            _write_image(tmp_path / name)
        for name, content in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return make


@pytest.fixture(autouse=True)
def cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An empty cache of converted data sets."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "damex" / "datasets"
