"""UODB: what the eleven datasets are, where they are had, and what lies where.

The benchmark (Wang et al. 2019, arXiv 1904.04402) publishes ten of them in VOC's layout
with its own splits; COCO comes from its own site. Sizes are approximate, and licences
are for orientation: read them on the datasets' sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
        classes: Those that are used, in lower case; empty for all in the files.
        train: Lists of training images, below the dataset's folder.
        val: The same for evaluation.
        size: Images of the release and what they take on a disk.
        licence: In a few words.
        source: Name of the site that has it.
        also: Folders that are needed beside the lists.
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
        """All files and folders of the tree."""
        return tuple(dict.fromkeys((*self.train, *self.val, *self.also)))


def _voc(train: str, val: str, **facts: str | tuple[str, ...]) -> dict:
    """The options of a dataset in VOC's layout with a list for each split."""
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
