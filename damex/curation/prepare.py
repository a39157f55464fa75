"""``damex data prepare uodb`` and ``damex data convert``: write datasets as COCO files.

Of UODB's eleven datasets (Wang et al. 2019, arXiv 1904.04402), nine are on its project
page, in VOC layout with custom splits; COCO and VOC are from their websites. Sizes are
approximate, licenses indicative: check the datasets' websites.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from damex.datasets.coco_records import read_coco
from damex.datasets.formats.conversion import convert_tree, open_root
from damex.datasets.formats.records import Options, fault_of_names
from damex.datasets.spec import parse_mixture
from damex.errors import ConfigError, did_you_mean, printable
from damex.files import atomic_write, write_json

SPLITS = ("train", "val")
SITE = "the UODB project page of SVCL, UC San Diego"
VOC_CLASSES = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse "
    "motorbike person pottedplant sheep sofa train tvmonitor"
)
SIX_CLASSES = "bicycle bird car cat dog person"
DOTA_CLASSES = (
    "plane baseball-diamond bridge ground-track-field small-vehicle large-vehicle ship "
    "tennis-court basketball-court storage-tank soccer-ball-field roundabout harbor "
    "swimming-pool helicopter"
)
KITCHEN_CLASSES = (
    "coca_cola_glass_bottle coffee_mate_french_vanilla "
    "honey_bunches_of_oats_honey_roasted hunts_sauce mahatma_rice "
    "nature_valley_soft_baked_oatmeal_squares_cinnamon_brown_sugar "
    "nature_valley_sweet_and_salty_nut_almond palmolive_orange "
    "pop_secret_light_butter pringles_bbq red_bull"
)
RESEARCH = "research; see site"


@dataclass(frozen=True)
class Recipe:
    """One dataset of the benchmark; paths are below its folder.

    Args:
        words: Used classes, in lower case; empty for all in the files.
        train: Lists of training images.
        val: The same for evaluation.
        size: Number of images and disk space.
        licence: In a few words.
        source: Website that hosts it.
        also: Folders that are needed in addition to the lists.
    """

    words: str
    train: tuple[str, ...]
    val: tuple[str, ...]
    size: str
    licence: str
    source: str = SITE
    also: tuple[str, ...] = ("Annotations", "JPEGImages")

    @property
    def classes(self) -> tuple[str, ...]:
        """Used classes; empty for all in the files."""
        return tuple(self.words.split())

    def missing(self, root: Path) -> list[str]:
        """Missing files and folders in the folder of the dataset."""
        needed = dict.fromkeys((*self.train, *self.val, *self.also))
        return [path for path in needed if not (root / path).exists()]


def _voc(words: str, train: str, val: str, size: str, licence: str) -> Recipe:
    """A dataset in VOC layout with one list per split."""
    train_list, val_list = (f"ImageSets/Main/{name}.txt" for name in (train, val))
    return Recipe(words, (train_list,), (val_list,), size, licence)


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "clipart": _voc(VOC_CLASSES, "train", "test", "1,000 images", RESEARCH),
        "coco": Recipe(
            "",
            train=("annotations/instances_val2014.json",),
            val=("annotations/instances_val2017.json",),
            also=("val2014",),
            size="40,504 images, 6.2 GB",
            licence="annotations CC BY 4.0; images: Flickr's terms",
            source="cocodataset.org",
        ),
        "deeplesion": _voc(
            *("lesion", "trainval", "test"),
            "32,120 key slices; all slices are 220 GB",
            "NIH Clinical Center: open, cite the paper",
        ),
        "dota": _voc(
            *(DOTA_CLASSES, "train", "val"),
            "1,869 large images before the benchmark's crops",
            "academic use; images: Google Earth's terms",
        ),
        "kitchen": _voc(
            *(KITCHEN_CLASSES, "train", "test"),
            "GMU Kitchens, 6,700 images",
            "none stated; ask its authors",
        ),
        "lisa": _voc(
            *("warning noturn speedlimit stop", "train", "test"),
            "6,610 frames, 7.7 GB",
            "LISA Traffic Sign Dataset: its own, academic use",
        ),
        "watercolor": _voc(SIX_CLASSES, "train", "test", "2,000 images", RESEARCH),
        "widerface": _voc(
            *("face", "train", "val"),
            "16,106 images, 1.8 GB",
            "research, not commercial; see site",
        ),
        "kitti": _voc(
            *("pedestrian cyclist car", "trainval", "test"),
            "7,481 images, 12 GB as PNG",
            "CC BY-NC-SA 3.0",
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
        "comic": _voc(SIX_CLASSES, "train", "test", "2,000 images", RESEARCH),
    }
)


def prepare(benchmark: str, names: Sequence[str], *, root: str) -> int:
    """Prepare the datasets of a benchmark; 0 if all are ready, 1 if not."""
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
        print(f"{name}: ready; remove {root}/train.json to convert it again")
        return True
    if lacks := recipe.missing(root):
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


def voc_documents(name: str, root: Path) -> dict[str, dict[str, Any]]:
    """COCO documents of a dataset in VOC layout.

    Raises:
        DataError: If it cannot be read.
    """
    lists = dict(train=list(RECIPES[name].train), val=list(RECIPES[name].val))
    (spec,) = parse_mixture([dict(name=name, root=str(root), format="voc", **lists)])
    sources = {split: spec.coco_source(split) for split in SPLITS}
    return {
        split: read_coco(source.annotations, name)
        for split, source in sources.items()
        if source is not None
    }


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
    if (fault := fault_of_names(classes)) is not None:
        raise ConfigError(f"--classes: {fault}.")
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
            if (folder / file.name).exists():
                raise ConfigError(
                    f"{folder / file.name} exists and is not overwritten; "
                    "remove it, or choose another --out."
                )
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
