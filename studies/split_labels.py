"""Two datasets of one kind: halves of a dataset, each with half of its labels.

    python -m studies.split_labels data/toy/digits data/toy/shapes --out data/halves

Nothing in an image of ``digits_a`` says that it is not of ``digits_b``. In training,
objects of the other half's classes have no label; in validation every image is in both
halves, with the labels of each (docs/results/split-labels.md).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from damex.errors import ConfigError
from damex.files import write_json
from damex.workbench.cli.run import program, run_command

app = program(
    "python -m studies.split_labels",
    "Split COCO datasets into halves that label other classes.",
    "python -m studies.split_labels data/toy/digits --out data/halves",
)


@app.default
def split_labels(*folders: Path, out: Path) -> None:
    """Write halves ``NAME_a`` and ``NAME_b`` of datasets.

    Args:
        folders: Datasets, with train.json, val.json and a folder of images.
        out: Output folder.
    """
    for folder in folders:
        for split in ("train", "val"):
            path = folder / f"{split}.json"
            if not path.is_file():
                raise ConfigError(f"{path} is missing; name folders in COCO format.")
            document = json.loads(path.read_text("utf-8"))
            for part, letter in enumerate("ab"):
                half = out / f"{folder.name}_{letter}"
                half.mkdir(parents=True, exist_ok=True)
                images = half / "images"
                if not images.exists():
                    images.symlink_to((folder / "images").resolve())
                write_json(half / f"{split}.json", half_of(document, part, split))
        print(f"{out}: {folder.name}_a and {folder.name}_b")


def half_of(document: dict[str, Any], part: int, split: str) -> dict[str, Any]:
    """Every second class; of training also every second image."""
    categories = document["categories"][part::2]
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
