"""Two datasets of one kind: halves of a dataset, each with half of its labels.

    python -m studies.split_labels data/toy/digits data/toy/shapes --out data/halves_toy

Nothing in an image of ``digits_a`` says that it is not of ``digits_b``. In training,
objects of the other half's classes have no label; in validation every image is in both
halves, with the labels of each (docs/results/split-labels.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from damex.errors import ConfigError
from damex.files import write_json
from damex.workbench.cli.run import program, run_command

app = program(
    "python -m studies.split_labels",
    "Split COCO datasets into halves that label other classes.",
    "python -m studies.split_labels data/toy/digits --out data/halves_toy",
)


@app.default
def split_labels(
    *folders: Path, out: Path, classes: tuple[str, ...] = (), all_labels: bool = False
) -> None:
    """Write halves ``NAME_a`` and ``NAME_b`` of datasets.

    Args:
        folders: Datasets, with train.json, val.json and a folder of images.
        out: Output folder.
        classes: Classes to keep (default: all).
        all_labels: Keep the labels of both halves in the training images of each.
    """
    for folder in folders:
        for split in ("train", "val"):
            path = folder / f"{split}.json"
            if not path.is_file():
                raise ConfigError(f"{path} is missing; name folders in COCO format.")
            document = json.loads(path.read_text("utf-8"))
            if classes:
                document = _with_classes(document, classes)
            for part, letter in enumerate("ab"):
                half = out / f"{folder.name}_{letter}"
                half.mkdir(parents=True, exist_ok=True)
                images = half / "images"
                if not images.exists():
                    images.symlink_to((folder / "images").resolve())
                keeps_labels = all_labels and split == "train"
                content = half_of(document, part, split, all_labels=keeps_labels)
                write_json(half / f"{split}.json", content)
        print(f"{out}: {folder.name}_a and {folder.name}_b")


def _with_classes(document: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A document with the categories of some names alone."""
    kept = [one for one in document["categories"] if one["name"] in names]
    if missing := sorted({*names} - {one["name"] for one in kept}):
        raise ConfigError(f"--classes: there is no class {missing[0]!r}.")
    return {**document, "categories": kept}


def half_of(
    document: dict[str, Any], part: int, split: str, *, all_labels: bool = False
) -> dict[str, Any]:
    """Every second class; of training also every second image."""
    every = document["categories"]
    categories = every if all_labels else every[part::2]
    images = document["images"][part::2] if split == "train" else document["images"]
    labels = {one["id"] for one in categories}
    shown = {one["id"] for one in images}
    annotations = [
        one
        for one in document["annotations"]
        if one["category_id"] in labels and one["image_id"] in shown
    ]
    return {
        **document,
        "categories": categories,
        "images": images,
        "annotations": annotations,
    }


if __name__ == "__main__":
    sys.exit(run_command(app))
