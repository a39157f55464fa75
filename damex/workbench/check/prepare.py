"""``damex data prepare uodb`` and ``damex data convert``: write datasets as COCO files.

Of UODB's eleven datasets (Wang et al. 2019, arXiv 1904.04402), nine are on its project
page, in VOC layout with custom splits; COCO and VOC are from their websites. Sizes are
approximate, licenses indicative: check the datasets' websites.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from damex.config_files import CONFIGS
from damex.datasets.coco_records import read_coco
from damex.datasets.entries import Options, problem_of_names
from damex.datasets.spec import coco_paths, parse_mixture
from damex.errors import ConfigError, check_known, printable
from damex.files import atomic_write, check_free, write_json
from damex.workbench.formats.conversion import convert_tree, open_root

SPLITS = ("train", "val")


class Recipe(NamedTuple):
    """One dataset of the benchmark, from ``configs/uodb/datasets.json``."""

    size: str  # number of images and disk space
    licence: str  # in a few words
    source: str  # website that hosts it
    classes: str  # used ones, in lower case and separated by spaces; empty for all
    train: list[str]  # lists of training images, below the folder of the dataset
    val: list[str]  # the same for evaluation
    folders: list[str]  # needed in addition to the lists


def read_recipes() -> dict[str, Recipe]:
    """The datasets of UODB by name."""
    content = json.loads((CONFIGS / "uodb" / "datasets.json").read_text("utf-8"))
    return {name: Recipe(**values) for name, values in content.items()}


def prepare(benchmark: str, names: Sequence[str], *, root: str) -> int:
    """Prepare the datasets of a benchmark; 0 if all are ready, 1 if not."""
    recipes = read_recipes()
    for name in names:
        check_known(name, recipes, f"UODB has no dataset {name!r}")
    ready = [_prepare(n, recipes[n], Path(root) / n) for n in names or recipes]
    print(f"{sum(ready)} of {len(ready)} datasets are ready")
    return 0 if all(ready) else 1


def _prepare(name: str, recipe: Recipe, root: Path) -> bool:
    """Convert one dataset, or print its missing files; returns whether it is ready."""
    if all((root / f"{split}.json").is_file() for split in SPLITS):
        print(f"{name}: ready; remove {root}/train.json to convert it again")
        return True
    needed = dict.fromkeys((*recipe.train, *recipe.val, *recipe.folders))
    if lacks := [path for path in needed if not (root / path).exists()]:
        print(
            f"{name}: {recipe.size}; license: {recipe.licence}.\n"
            f"  From {recipe.source}; unpack it into {root}/, which lacks"
        )
        print("\n".join(f"    {path}" for path in lacks))
        return False
    made = coco_documents(root) if name == "coco" else voc_documents(name, recipe, root)
    for split, document in made.items():
        kept = recipe.classes.split()
        dropped = keep_classes(document, kept) if kept else 0
        write_json(root / f"{split}.json", document)
        other = f", {dropped} boxes of other classes left out" if dropped else ""
        print(
            f"{name}: {split}.json: {len(document['images'])} images, "
            f"{len(document['annotations'])} boxes of {len(document['categories'])} "
            f"classes{other}"
        )
    return True


def voc_documents(name: str, recipe: Recipe, root: Path) -> dict[str, dict[str, Any]]:
    """COCO documents of a dataset in VOC layout; DataError if it cannot be read."""
    entry = dict(name=name, root=str(root), format="voc")
    (spec,) = parse_mixture([dict(entry, train=recipe.train, val=recipe.val)])
    paths = {s: coco_paths(spec.dataset_config(s))[0] for s in SPLITS}
    return {s: read_coco(path, name) for s, path in paths.items()}


def coco_documents(root: Path) -> dict[str, dict[str, Any]]:
    """COCO documents of the benchmark's two parts of val2014.

    val2017 is its ``minival``; the other images are for training. ``root`` contains
    ``annotations`` and ``val2014``. DataError if a file cannot be read.
    """
    whole = read_coco(root / "annotations" / "instances_val2014.json", "coco")
    held = read_coco(root / "annotations" / "instances_val2017.json", "coco")
    minival = {image["id"] for image in held["images"]}
    for image in whole["images"]:
        image["file_name"] = f"val2014/{image['file_name']}"
    for record in whole["annotations"]:
        record.pop("segmentation", None)
    train = {image["id"] for image in whole["images"]} - minival
    return {
        split: dict(
            images=[one for one in whole["images"] if one["id"] in ids],
            annotations=[one for one in whole["annotations"] if one["image_id"] in ids],
            categories=whole["categories"],
        )
        for split, ids in dict(train=train, val=minival).items()
    }


def keep_classes(document: dict[str, Any], classes: Sequence[str]) -> int:
    """Reduce a COCO document to ``classes`` (lower case); return how many boxes go."""
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


def convert(
    root: str,
    *,
    out: str,
    format: str | None,  # noqa: A002
    val_share: float | None,
    classes: Sequence[str],
    **splits: Sequence[str],
) -> None:
    """``damex data convert``: write COCO files into a folder, and print a summary."""
    if val_share is not None and not 0.0 <= val_share < 1.0:
        raise ConfigError(f"--val-share must be from 0 to below 1, got {val_share}.")
    if (problem := problem_of_names(classes)) is not None:
        raise ConfigError(f"--classes: {problem}.")
    lists = dict(splits, classes=classes)
    chosen = {key: tuple(words) for key, words in lists.items() if words}
    options = Options(format=format, val_share=val_share, **chosen)
    tree, folder = open_root(root), Path(out)
    if folder.resolve().is_relative_to(tree.root):
        raise ConfigError(
            f"--out {out} lies inside of {root}, whose annotations it would then be; "
            "choose a folder outside."
        )
    with tempfile.TemporaryDirectory() as draft:
        conversion = convert_tree(tree, options, Path(draft))
        files = sorted(Path(draft).iterdir())
        for file in files:
            check_free(folder / file.name)
        with ExitStack() as stack:  # all files or none
            for file in files:
                part = stack.enter_context(atomic_write(folder / file.name))
                shutil.copyfile(file, part)
    name = tree.root.name
    print(printable(conversion.summary.text(name)))
    named = ", ".join(f'{s}="{s}.json"' for s in conversion.summary.splits)
    print(
        f"\nfor a mixture:\n    dict(name={name!r}, "
        f"data_root={str(folder.resolve())!r}, {named}, img={str(tree.root)!r}),"
    )
