#!/usr/bin/env python
"""Compare the seven small datasets with the list of their files.

    python tools/seven_files.py data/seven

``data/seven.txt`` has a line per annotation file, with its SHA-256, and below it one
per image: its name, the first 10 digits of the SHA-256 of the file, and 6 of that of
its boxes, at 0.1 pixels, for any layout of the JSON. An image that another version
of Pillow has resized differs in the first number alone. ``--write`` rewrites the list.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

LIST = Path(__file__).parents[1] / "data/seven.txt"
PARTS = ("the name", "the file", "the boxes")  # of a line


def lines_of(folder: Path) -> Iterator[str]:
    """The lines of all datasets in a folder."""
    for file in sorted(folder.glob("*/*.json")):
        if file.stem not in ("train", "val"):
            continue
        content = json.loads(file.read_bytes())
        yield f"{file.parent.name}/{file.name} {_sha256(file.read_bytes())}"
        names = {one["id"]: one["name"] for one in content["categories"]}
        boxes: dict[int, list[str]] = {one["id"]: [] for one in content["images"]}
        for one in content["annotations"]:
            sides = " ".join(f"{side:.1f}" for side in one["bbox"])
            boxes[one["image_id"]].append(f"{names[one['category_id']]} {sides}")
        for image in sorted(content["images"], key=lambda one: one["file_name"]):
            path = file.parent / "images" / Path(image["file_name"]).name
            pixels = _sha256(path.read_bytes()) if path.is_file() else "missing"
            labels = _sha256("\n".join(sorted(boxes[image["id"]])).encode())
            yield f"{path.name} {pixels[:10]} {labels[:6]}"


def differences(folder: Path, listed: list[str]) -> Iterator[str]:
    """What a folder has that the list has not, and the reverse, for each image."""
    here = {line.split()[0]: line for line in lines_of(folder)}
    there = {line.split()[0]: line for line in listed}
    for name in sorted({*here, *there}):
        if name not in here:
            yield f"{name}: not in {folder}"
            continue
        if name not in there:
            yield f"{name}: not in the list"
            continue
        pairs = zip(here[name].split(), there[name].split(), strict=True)
        wrong = [part for part, (a, b) in zip(PARTS, pairs, strict=False) if a != b]
        if wrong:
            yield f"{name}: {' and '.join(wrong)} changed"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="rewrite the list")
    options = parser.parse_args()
    if options.write:
        LIST.write_text("".join(f"{line}\n" for line in lines_of(options.folder)))
        return 0
    listed = LIST.read_text().splitlines()
    found = [*differences(options.folder, listed)]
    print("\n".join([*found[:20], f"{len(found)} of {len(listed)} entries differ"]))
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
