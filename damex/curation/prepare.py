"""``tools/data.py prepare uodb``: what is missing, and COCO files of what is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from damex.curation.uodb import RECIPES, Recipe
from damex.datasets.coco import read_coco
from damex.datasets.spec import parse_mixture
from damex.engine.cli import Parser
from damex.errors import ConfigError, did_you_mean

SPLITS = ("train", "val")


def prepare(arguments: Sequence[str]) -> int:
    """Prepare the datasets of a benchmark.

    Args:
        arguments: Command line after the name of the command.

    Returns:
        0 if all are ready, 1 if something is missing.

    Raises:
        ConfigError: If there is no such dataset.
        DataError: If the files of a dataset cannot be read.
    """
    parser = Parser(
        prog="tools/data.py prepare",
        description="Write COCO files for the configs of a benchmark. Nothing is "
        "downloaded, and no file of the datasets is changed.",
    )
    parser.add_argument("benchmark", choices=["uodb"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--root", type=Path, default=Path("data/uodb"))
    args = parser.parse_args(arguments)
    for name in args.names:
        if name not in RECIPES:
            raise ConfigError(
                f"UODB has no dataset {name!r}; {did_you_mean(name, RECIPES)}"
            )
    names = args.names or list(RECIPES)
    ready = [_prepare(name, args.root / name) for name in names]
    print(f"{sum(ready)} of {len(ready)} datasets are ready")
    return 0 if all(ready) else 1


def _prepare(name: str, root: Path) -> bool:
    """Convert one dataset, or say what it lacks; whether it is ready."""
    recipe = RECIPES[name]
    if all((root / f"{split}.json").is_file() for split in SPLITS):
        print(f"{name}: ready; remove {root}/train.json to convert it anew")
        return True
    lacks = missing(recipe, root)
    if lacks:
        print(
            f"{name}: {recipe.size}; licence: {recipe.licence}.\n"
            f"  From {recipe.source}; unpack it into {root}/, which lacks"
        )
        print("\n".join(f"    {path}" for path in lacks))
        return False
    made = coco_documents(root) if name == "coco" else voc_documents(name, root)
    for split, document in made.items():
        dropped = keep_classes(document, recipe.classes) if recipe.classes else 0
        (root / f"{split}.json").write_text(json.dumps(document), encoding="utf-8")
        other = f", {dropped} boxes of other classes left out" if dropped else ""
        print(
            f"{name}: {split}.json: {len(document['images'])} images, "
            f"{len(document['annotations'])} boxes of {len(document['categories'])} "
            f"classes{other}"
        )
    return True


def missing(recipe: Recipe, root: Path) -> list[str]:
    """Files and folders of a dataset that are not there.

    Args:
        recipe: The dataset.
        root: Its folder.
    """
    return [path for path in recipe.needed if not (root / path).exists()]


def voc_documents(name: str, root: Path) -> dict[str, dict[str, Any]]:
    """COCO documents of a dataset in VOC's layout, by the reader of that format.

    Args:
        name: Of the dataset.
        root: Its folder, which file names are relative to.

    Raises:
        DataError: If it cannot be read.
    """
    recipe = RECIPES[name]
    entry = dict(name=name, root=str(root), format="voc")
    lists = dict(train=list(recipe.train), val=list(recipe.val))
    (spec,) = parse_mixture([{**entry, **lists}])
    found = {}
    for split in SPLITS:
        source = spec.coco_source(split)
        if source is not None:
            found[split] = read_coco(source.annotations, name)
    return found


def coco_documents(root: Path) -> dict[str, dict[str, Any]]:
    """COCO documents of the benchmark's two parts of val2014.

    val2017 is its ``minival``; the other images are for training.

    Args:
        root: Folder with ``annotations`` and ``val2014``.

    Raises:
        DataError: If a file cannot be read.
    """
    whole = read_coco(root / "annotations" / "instances_val2014.json", "coco")
    held = read_coco(root / "annotations" / "instances_val2017.json", "coco")
    minival = {image["id"] for image in held["images"]}
    return {
        split: dict(
            images=[
                {**image, "file_name": f"val2014/{image['file_name']}"}
                for image in whole["images"]
                if (image["id"] in minival) == (split == "val")
            ],
            annotations=[
                {key: value for key, value in record.items() if key != "segmentation"}
                for record in whole["annotations"]
                if (record["image_id"] in minival) == (split == "val")
            ],
            categories=whole["categories"],
        )
        for split in SPLITS
    }


def keep_classes(document: dict[str, Any], classes: Sequence[str]) -> int:
    """Leave the classes of the benchmark in a COCO document, all of them, in order.

    Args:
        document: Changed in place; names are compared without case.
        classes: In lower case.

    Returns:
        The number of boxes that were taken out.
    """
    names = {c["id"]: str(c["name"]).lower() for c in document["categories"]}
    number = {name: place for place, name in enumerate(classes, start=1)}
    before = document["annotations"]
    document["annotations"] = [
        {**record, "category_id": number[names[record["category_id"]]]}
        for record in before
        if names.get(record["category_id"]) in number
    ]
    document["categories"] = [dict(id=i, name=name) for name, i in number.items()]
    return len(before) - len(document["annotations"])
