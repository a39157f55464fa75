"""``damex data prepare uodb``: report missing files, and convert the rest to COCO.

UODB (Wang et al. 2019, arXiv 1904.04402) publishes ten of its eleven datasets in VOC
layout with custom splits; COCO is from its website. Sizes are approximate, licenses
indicative: check the datasets' websites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import damex.registry  # noqa: F401  (keeps mmdet's import silent)
from damex.datasets.coco_records import read_coco
from damex.datasets.spec import parse_mixture
from damex.errors import ConfigError, did_you_mean
from damex.files import write_json

SPLITS = ("train", "val")
SITE = "the UODB project page of SVCL, UC San Diego"
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair"),
    *("cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant"),
    *("sheep", "sofa", "train", "tvmonitor"),
)
SIX_CLASSES = ("bicycle", "bird", "car", "cat", "dog", "person")


@dataclass(frozen=True)
class Recipe:
    """One dataset of the benchmark.

    Args:
        classes: Used classes, in lower case; empty for all in the files.
        train: Lists of training images, below the dataset's folder.
        val: The same for evaluation.
        size: Number of images and disk space.
        licence: In a few words.
        source: Website that hosts it.
        also: Folders that are needed besides the lists.
    """

    classes: tuple[str, ...]
    train: tuple[str, ...]
    val: tuple[str, ...]
    size: str
    licence: str
    source: str = SITE
    also: tuple[str, ...] = ("Annotations", "JPEGImages")

    @property
    def needed(self) -> tuple[str, ...]:
        """All required files and folders."""
        return tuple(dict.fromkeys((*self.train, *self.val, *self.also)))


def _voc(train: str, val: str, **facts: str | tuple[str, ...]) -> dict:
    """Options of a dataset in VOC layout with one list per split."""
    train, val = (f"ImageSets/Main/{name}.txt" for name in (train, val))
    return {"train": (train,), "val": (val,), **facts}


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "clipart": Recipe(
            VOC_CLASSES,
            **_voc("train", "test", size="1,000 images", licence="research; see site"),
        ),
        "coco": Recipe(
            (),
            train=("annotations/instances_val2014.json",),
            val=("annotations/instances_val2017.json",),
            also=("val2014",),
            size="40,504 images, 6.2 GB",
            licence="annotations CC BY 4.0; images: Flickr's terms",
            source="cocodataset.org",
        ),
        "deeplesion": Recipe(
            ("lesion",),
            **_voc(
                "trainval",
                "test",
                size="32,120 key slices; all slices are 220 GB",
                licence="NIH Clinical Center: open, cite the paper",
            ),
        ),
        "dota": Recipe(
            (
                *("plane", "baseball-diamond", "bridge", "ground-track-field"),
                *("small-vehicle", "large-vehicle", "ship", "tennis-court"),
                *("basketball-court", "storage-tank", "soccer-ball-field"),
                *("roundabout", "harbor", "swimming-pool", "helicopter"),
            ),
            **_voc(
                "train",
                "val",
                size="1,869 large images before the benchmark's crops",
                licence="academic use; images: Google Earth's terms",
            ),
        ),
        "kitchen": Recipe(
            (
                *("coca_cola_glass_bottle", "coffee_mate_french_vanilla"),
                *("honey_bunches_of_oats_honey_roasted", "hunts_sauce"),
                "mahatma_rice",
                "nature_valley_soft_baked_oatmeal_squares_cinnamon_brown_sugar",
                *("nature_valley_sweet_and_salty_nut_almond", "palmolive_orange"),
                *("pop_secret_light_butter", "pringles_bbq", "red_bull"),
            ),
            **_voc(
                "train",
                "test",
                size="GMU Kitchens, 6,700 images",
                licence="none stated; ask its authors",
            ),
        ),
        "lisa": Recipe(
            ("warning", "noturn", "speedlimit", "stop"),
            **_voc(
                "train",
                "test",
                size="6,610 frames, 7.7 GB",
                licence="LISA Traffic Sign Dataset: its own, academic use",
            ),
        ),
        "watercolor": Recipe(
            SIX_CLASSES,
            **_voc("train", "test", size="2,000 images", licence="research; see site"),
        ),
        "widerface": Recipe(
            ("face",),
            **_voc(
                "train",
                "val",
                size="16,106 images, 1.8 GB",
                licence="research, not commercial; see site",
            ),
        ),
        "kitti": Recipe(
            ("pedestrian", "cyclist", "car"),
            **_voc(
                "trainval",
                "test",
                size="7,481 images, 12 GB as PNG",
                licence="CC BY-NC-SA 3.0",
            ),
        ),
        "voc": Recipe(
            VOC_CLASSES,
            train=tuple(
                f"VOC{year}/ImageSets/Main/trainval.txt" for year in (2007, 2012)
            ),
            val=("VOC2007/ImageSets/Main/test.txt",),
            also=tuple(
                f"VOC{year}/{folder}"
                for year in (2007, 2012)
                for folder in ("Annotations", "JPEGImages")
            ),
            size="21,503 images, 2.8 GB",
            licence="research; images: Flickr's terms",
            source="the PASCAL VOC pages of host.robots.ox.ac.uk",
        ),
        "comic": Recipe(
            SIX_CLASSES,
            **_voc("train", "test", size="2,000 images", licence="research; see site"),
        ),
    }
)


def prepare(benchmark: str, names: Sequence[str], *, root: str) -> int:
    """Prepare the datasets of a benchmark.

    Returns:
        0 if all are ready, 1 if something is missing.

    Raises:
        ConfigError: If a dataset is unknown.
        DataError: If the files of a dataset cannot be read.
    """
    for name in names:
        if name not in RECIPES:
            raise ConfigError(
                f"UODB has no dataset {name!r}; {did_you_mean(name, RECIPES)}"
            )
    ready = [_prepare(name, Path(root) / name) for name in names or RECIPES]
    print(f"{sum(ready)} of {len(ready)} datasets are ready")
    return 0 if all(ready) else 1


def _prepare(name: str, root: Path) -> bool:
    """Convert one dataset, or print its missing files; returns whether it is ready."""
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
        write_json(root / f"{split}.json", document)
        other = f", {dropped} boxes of other classes left out" if dropped else ""
        print(
            f"{name}: {split}.json: {len(document['images'])} images, "
            f"{len(document['annotations'])} boxes of {len(document['categories'])} "
            f"classes{other}"
        )
    return True


def missing(recipe: Recipe, root: Path) -> list[str]:
    """Missing files and folders of a dataset in folder ``root``."""
    return [path for path in recipe.needed if not (root / path).exists()]


def voc_documents(name: str, root: Path) -> dict[str, dict[str, Any]]:
    """COCO documents of a dataset in VOC layout.

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

    val2017 is its ``minival``; the other images are for training. ``root`` contains
    ``annotations`` and ``val2014``.

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
    """Reduce a COCO document, in place, to ``classes`` (lower case) in that order.

    Returns:
        Number of removed boxes.
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
