"""NamedCocoDataset: COCO files with labels by class name, and checked boxes."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmdet.datasets import CocoDataset
from mmdet.datasets.api_wrappers import COCO
from mmdet.registry import DATASETS
from mmengine.logging import print_log

from damex.datasets.formats.coco import without_dummies
from damex.errors import ConfigError, DataError, did_you_mean

BAD_BOX_POLICIES = ("error", "drop")
IMAGE_FIELDS: Mapping[str, Any] = MappingProxyType(
    {"file_name": str, "width": (int, float), "height": (int, float)}
)
BAD_BOXES = MappingProxyType(
    {
        "lies outside of the image": "boxes outside of their image dropped",
        "has a negative width or height": "boxes with a negative side dropped",
    }
)


class _NamedCoco(COCO):
    """COCO index that answers category ids in the order of the names asked for.

    mmdet numbers labels by the order of ``get_cat_ids``; pycocotools answers in file
    order, so that a union class list mislabels without a word.
    """

    def __init__(self, document: dict[str, Any], where: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
            super().__init__()
            self.dataset = document
            self.createIndex()
        self.cat_img_map, self.img_ann_map = self.catToImgs, self.imgToAnns
        self._where = where

    def get_cat_ids(
        self, cat_names: Any = (), sup_names: Any = (), cat_ids: Any = ()
    ) -> list[int]:
        ids = {str(c["name"]): c["id"] for c in self.dataset["categories"]}
        for name in cat_names:
            if name not in ids:
                raise DataError(
                    f"{self._where} has no class {name!r}; {did_you_mean(name, ids)} "
                    "Correct 'classes' in the mixture entry, or the file."
                )
        return [ids[name] for name in cat_names]


@DATASETS.register_module()
class NamedCocoDataset(CocoDataset):
    """mmdet's ``CocoDataset`` with labels by name and with every box accounted for.

    Label ``i`` is ``metainfo['classes'][i]``, whatever the order of categories in the
    file. Boxes are looked at while they are read: boxes that reach over the border are
    clipped, boxes thinner than one pixel are left out of training, and one line per
    file says how many. A box that lies wholly outside its image, or has a negative
    side, is an error, since it usually means another box format or other image sizes. A
    category that is only a heading of the others (Roboflow's first) is no class, unless
    the classes name it.

    Args:
        name: Name of the dataset in messages.
        on_bad_box: ``error`` or ``drop`` for boxes wholly outside of their image, or
            with a negative side.
        **kwargs: As for ``CocoDataset``.
    """

    def __init__(
        self, *, name: str = "", on_bad_box: str = "error", **kwargs: Any
    ) -> None:
        if on_bad_box not in BAD_BOX_POLICIES:
            raise ConfigError(
                f"on_bad_box must be one of {BAD_BOX_POLICIES}, got {on_bad_box!r}."
            )
        self.name = name
        self.on_bad_box = on_bad_box
        self._counts: Counter[str] = Counter()
        kwargs.setdefault("data_prefix", dict(img=""))  # mmdet's own default has no img
        super().__init__(**kwargs)

    def COCOAPI(self, path: str) -> COCO:
        """Open an annotation file; called by ``CocoDataset.load_data_list``.

        Raises:
            DataError: If the file is missing or does not hold what COCO promises.
        """
        document = read_coco(Path(path), self.name)
        where = f"dataset {self.name!r}: {path}"
        self._set_aside_dummies(document)
        category_names(document["categories"], where)
        self._names = {c["id"]: str(c["name"]) for c in document["categories"]}
        image_ids = {image["id"] for image in document["images"]}
        lost = sum(a.get("image_id") not in image_ids for a in document["annotations"])
        if lost:
            self._counts["annotations of images that the file does not list"] += lost
        return _NamedCoco(document, where)

    def _set_aside_dummies(self, document: dict[str, Any]) -> None:
        """Take headings without boxes out of the categories, and say so."""
        used = {record["category_id"] for record in document["annotations"]}
        kept = without_dummies(document["categories"], used, key="id")
        names = [category.get("name") for category in kept]
        for category in document["categories"]:
            name = category.get("name")
            if category in kept:
                continue
            if name in self.metainfo["classes"] and name not in names:
                kept.append(category)
            else:
                self._counts[f"category without boxes, {name!r}, left out"] += 1
        document["categories"] = kept

    def filter_data(self) -> list[dict]:
        """Filter as mmdet does, then report everything that was left out or changed."""
        kept = super().filter_data()
        if len(kept) < len(self.data_list):
            lost = len(self.data_list) - len(kept)
            self._counts["images without boxes left out of training"] = lost
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self._counts.items()))
        if counts:
            message = f"dataset {self.name!r}: {self.ann_file}: {counts}."
            print_log(message, logger="current", level=logging.WARNING)
        return kept

    def parse_data_info(self, raw_data_info: dict) -> dict:
        """Parse one image; adds ``ground_truth`` in COCO's own terms for evaluation.

        Raises:
            DataError: If a record is incomplete or its box is outside of the image.
        """
        image = raw_data_info["raw_img_info"]
        for key, kind in IMAGE_FIELDS.items():
            found = image.get(key)
            if not isinstance(found, kind):
                fault = f"has no {key!r}; add it to"
                if found is not None:
                    fault = f"has {found!r} in {key!r}; correct it in"
                raise DataError(
                    f"dataset {self.name!r}: {self.ann_file}: image {image['id']!r} "
                    f"{fault} the file."
                )
        records = [
            record
            for record in raw_data_info["raw_ann_info"]
            if self._is_wanted(record) and self._box_is_usable(record, image)
        ]
        info = super().parse_data_info({**raw_data_info, "raw_ann_info": records})
        for instance in info["instances"]:
            instance["bbox"] = self._clip(instance["bbox"], image)
        if self.test_mode:
            info["ground_truth"] = [
                dict(
                    bbox=[float(v) for v in record["bbox"]],
                    label=self.cat2label[record["category_id"]],
                    area=float(record["area"]),
                    iscrowd=int(bool(record.get("iscrowd"))),
                )
                for record in records
            ]
        return info

    def _is_wanted(self, record: dict) -> bool:
        """Whether a record is of a class in use; counts the others by class."""
        category = record.get("category_id")
        if category in self.cat2label:
            return True
        if category in self._names:
            what = f"boxes of {self._names[category]!r}, which is not in use"
        else:
            what = "boxes of a category that the file does not list"
        self._counts[what] += 1
        return False

    def _box_is_usable(self, record: dict, image: dict) -> bool:
        """Whether a record stays; sorts the others out by reason."""
        box = record.get("bbox")
        if (
            not isinstance(box, list)
            or len(box) != 4
            or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in box)
        ):
            raise DataError(
                f"{self._where(record, image)}: bbox must be [x, y, width, height] in "
                f"pixels, got {box!r}."
            )
        x, y, w, h = box
        beyond = x >= image["width"] or y >= image["height"]
        # A box without a side at the corner (0, 0) is thin and not outside.
        outside = beyond or x + max(w, 1) <= 0 or y + max(h, 1) <= 0
        if w < 0 or h < 0:
            self._drop_bad(record, image, "has a negative width or height")
            return False
        if outside:
            self._drop_bad(record, image, "lies outside of the image")
            return False
        if not isinstance(record.get("area"), (int, float)):
            record["area"] = w * h
        if w < 1 or h < 1:
            self._counts["boxes thinner than 1 px left out of training"] += 1
        elif record["area"] <= 0:
            self._counts["boxes with area 0 left out of training"] += 1
        elif record.get("ignore"):
            self._counts["boxes marked 'ignore' left out of training"] += 1
        return True

    def _drop_bad(self, record: dict, image: dict, fault: str) -> None:
        """Count a box that cannot be right.

        Raises:
            DataError: If boxes may not be dropped.
        """
        if self.on_bad_box == "error":
            raise DataError(
                f"{self._where(record, image)}: the box [x, y, width, height] = "
                f"{record['bbox']} {fault} ({image['width']} x {image['height']} px). "
                "Correct the file (is it [x1, y1, x2, y2], or made for another image "
                "size?), or set on_bad_box='drop' in the MixtureDataset to go on "
                "without such boxes."
            )
        self._counts[BAD_BOXES[fault]] += 1

    def _where(self, record: dict, image: dict) -> str:
        """File and record for a message; written for a fault only, not for each box."""
        return (
            f"dataset {self.name!r}: {self.ann_file}: annotation {record.get('id')} of "
            f"image {image['file_name']!r}"
        )

    def _clip(self, box: list[float], image: dict) -> list[float]:
        """An (x1, y1, x2, y2) box cut off at the image border."""
        x1, y1, x2, y2 = box
        right, bottom = float(image["width"]), float(image["height"])
        if x1 >= 0 and y1 >= 0 and x2 <= right and y2 <= bottom:
            return box
        clipped = [max(x1, 0.0), max(y1, 0.0), min(x2, right), min(y2, bottom)]
        if max(abs(a - b) for a, b in zip(box, clipped, strict=True)) > 1.0:
            self._counts["boxes clipped at the image border"] += 1
        return clipped


def read_class_names(path: Path, dataset: str) -> tuple[str, ...]:
    """Names of the categories of a COCO file, in file order.

    Only this list of the file is parsed: the rest of a large one takes many seconds,
    and is read once, when the dataset is built. A category without boxes that is only a
    heading of the others is left out.

    Raises:
        DataError: If the file is missing, is not JSON, or has no proper categories.
    """
    text = _read_text(path, dataset)
    keys = list(re.finditer(r'(?<!\\)"categories"\s*:\s*', text))
    categories = None
    if len(keys) == 1:  # otherwise one may be inside of another record
        with contextlib.suppress(json.JSONDecodeError):
            categories, _ = json.JSONDecoder().raw_decode(text, keys[0].end())
    if not isinstance(categories, list):
        categories = read_coco(path, dataset)["categories"]
    real = without_dummies(categories, (), key="id")
    headings = [c["id"] for c in categories if c not in real and "id" in c]
    used = {
        number
        for number in headings
        if re.search(rf'"category_id"\s*:\s*{re.escape(json.dumps(number))}\b', text)
    }
    categories = without_dummies(categories, used, key="id")
    return category_names(categories, f"dataset {dataset!r}: {path}")


def category_names(
    categories: Sequence[Mapping[str, Any]], where: str
) -> tuple[str, ...]:
    """Names of COCO's category records; ``where`` is their file, for the message.

    Raises:
        DataError: If a category has no name, or two have the same.
    """
    for category in categories:
        if "name" not in category:
            raise DataError(f"{where}: a category has no 'name': {category}.")
    names = tuple(str(category["name"]) for category in categories)
    if len(set(names)) != len(names):
        double = sorted({name for name in names if names.count(name) > 1})
        raise DataError(
            f"{where} has the category names {double} twice; every name must belong to "
            "one category id."
        )
    return names


def read_coco(path: Path, dataset: str) -> dict[str, Any]:
    """Load a COCO file with the three lists of records that COCO promises.

    Returns:
        The document. Records are dicts, each with an id that no other of its list has;
        annotations have ``image_id`` and ``category_id``. Nothing else is looked at.

    Raises:
        DataError: If the file is missing, is not JSON, or holds anything else.
    """
    try:
        document = json.loads(_read_text(path, dataset))
    except json.JSONDecodeError as error:
        raise DataError(
            f"dataset {dataset!r}: {path} is not a JSON file ({error})."
        ) from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            raise DataError(
                f"dataset {dataset!r}: {path} has no list {key!r}; a COCO file has "
                "'images', 'annotations' and 'categories'."
            )
    _check_records(document, f"dataset {dataset!r}: {path}")
    return document


def _read_text(path: Path, dataset: str) -> str:
    if not path.is_file():
        is_toy = path.as_posix().startswith("data/toy/")
        advice = (
            "Make the toy datasets here: python -m damex.toydata --out data/toy"
            if is_toy
            else "Correct data_root, train or val in its mixture entry."
        )
        raise DataError(
            f"dataset {dataset!r}: there is no annotation file {path} (seen from "
            f"{Path.cwd()}). {advice}"
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"dataset {dataset!r}: {path} is not a JSON file ({error})."
        ) from error


def _check_records(document: dict[str, Any], where: str) -> None:
    """Refuse ids that would make one record of the file replace another."""
    for key in ("images", "annotations", "categories"):
        seen: set[Any] = set()
        for record in document[key]:
            found = record.get("id") if isinstance(record, dict) else None
            is_id = found is not None and not isinstance(found, (list, dict))
            if not is_id or found in seen:
                fault = f"id {found!r}, already in use" if is_id else "no id"
                raise DataError(
                    f"{where}: a record of {key!r} has {fault}: {record!r:.200}. Give "
                    "every record its own id."
                )
            seen.add(found)
    for record in document["annotations"]:
        for key in ("image_id", "category_id"):
            if isinstance(record.get(key, []), (list, dict)):
                raise DataError(f"{where}: annotation {record['id']} has no {key!r}.")
