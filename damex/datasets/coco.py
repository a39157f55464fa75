"""NamedCocoDataset: COCO files with labels by class name and checked boxes."""

from __future__ import annotations

import contextlib
import io
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mmdet.datasets import CocoDataset
from mmdet.datasets.api_wrappers import COCO
from mmdet.registry import DATASETS
from mmengine.logging import print_log

from damex.datasets.coco_checks import DROPPED, check_coco, usable_boxes
from damex.datasets.coco_records import Records, read_json
from damex.datasets.coco_schema import Expectations, flag_of, is_number
from damex.datasets.findings import RULES, Finding, Location, raise_first


class _NamedCoco(COCO):
    """COCO index with category ids in the order of requested names, not of the file."""

    def __init__(self, document: dict[str, Any]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
            super().__init__()
            self.dataset = document
            self.createIndex()
        self.cat_img_map, self.img_ann_map = self.catToImgs, self.imgToAnns

    def get_cat_ids(self, cat_names: Any = (), *_: Any, **__: Any) -> list[int]:
        ids = {str(c["name"]): c["id"] for c in self.dataset["categories"]}
        return [ids[name] for name in cat_names]


@DATASETS.register_module()
class NamedCocoDataset(CocoDataset):
    """mmdet's ``CocoDataset`` with labels by name and with checked boxes.

    Label ``i`` is ``metainfo['classes'][i]`` for any order of categories in the file.
    The file must pass the checks of ``damex data check``; the first error is raised and
    warnings are counted in one log line. Boxes that cross the border are clipped.
    Headings (Roboflow's first category) are not classes, unless the classes name them.

    Args:
        name: Name of the dataset in messages.
        split: Name of the split in messages.
        root: Folder that the file was converted from; messages then name its files.
        on_bad_box: ``error``, or ``drop`` boxes outside the image or with a negative
            side.
        check: Called with the document, its location, expectations and image folder; it
            returns what ``check_coco``, the default, does.
        **kwargs: As for ``CocoDataset``.
    """

    def __init__(
        self,
        *,
        name: str = "",
        split: str = "train",
        root: str = "",
        on_bad_box: str = "error",
        check: Callable[..., tuple[Records | None, list[Finding]]] | None = None,
        **kwargs: Any,
    ) -> None:
        self.name, self.split, self.root = name, split, root
        self.on_bad_box = Expectations(on_bad_box=on_bad_box).on_bad_box
        self._check = check
        kwargs.setdefault("data_prefix", dict(img=""))  # mmdet's default lacks img
        super().__init__(**kwargs)

    def COCOAPI(self, path: str) -> COCO:
        """Open an annotation file; DataError if it has an error."""
        filter_cfg = {} if self.test_mode else self.filter_cfg or {}
        expected = Expectations(
            classes=tuple(self.metainfo["classes"]),
            on_bad_box=self.on_bad_box,
            filter_empty=filter_cfg.get("filter_empty_gt", False),
        )
        location = Location.of(self.name, path, split=self.split, root=self.root)
        records = None
        check, self._check = self._check, None  # it may hold all that it has seen
        document, findings = read_json(path, location)
        if not findings:
            given = (document, location, expected)
            folder = Path(self.data_prefix["img"])
            records, findings = check(*given, folder) if check else check_coco(*given)
        raise_first(findings)
        assert records is not None
        self._log(findings, location)
        positions = usable_boxes(records, expected).tolist()
        usable = [records.annotations[position] for position in positions]
        for record in usable:
            if not is_number(record.get("area")):
                record["area"] = record["bbox"][2] * record["bbox"][3]
            # mmdet takes a text such as "0" for true.
            for flag in ("iscrowd", "ignore"):
                record[flag] = int(bool(flag_of(record.get(flag))))
        known = records.categories
        categories = [c for c in document["categories"] if c["id"] in known]
        self._predicted = [c["id"] for c in categories if flag_of(c.get("predicted"))]
        return _NamedCoco({**document, "annotations": usable, "categories": categories})

    def _log(self, findings: Iterable[Finding], location: Location) -> None:
        """Log the number of warnings, and facts in a line that the screen omits."""
        for name, level in (("warning", logging.WARNING), ("info", logging.INFO)):
            counts: Counter[str] = Counter()
            for finding in findings:
                if finding.level == name:
                    counts[finding.kind] += finding.count
            found = ", ".join(
                f"{count} {kind} ({RULES[kind].meaning})"
                + " dropped" * (kind in DROPPED)
                for kind, count in counts.items()
            )
            if found:
                message = f"dataset {self.name!r}: {location.file}: {found}."
                print_log(message, logger="current", level=level)

    def parse_data_info(self, raw_data_info: dict) -> dict:
        """Parse one image; adds COCO's ``ground_truth`` and ``predicted_labels``."""
        image = raw_data_info["raw_img_info"]
        info = super().parse_data_info(raw_data_info)
        w, h = float(image["width"]), float(image["height"])
        for instance in info["instances"]:
            x1, y1, x2, y2 = instance["bbox"]
            instance["bbox"] = [max(x1, 0.0), max(y1, 0.0), min(x2, w), min(y2, h)]
        info["predicted_labels"] = [
            self.cat2label[key] for key in self._predicted if key in self.cat2label
        ]
        if self.test_mode:
            info["ground_truth"] = [
                dict(
                    bbox=[float(v) for v in record["bbox"]],
                    label=self.cat2label[record["category_id"]],
                    area=float(record["area"]),
                    iscrowd=record["iscrowd"],
                )
                for record in raw_data_info["raw_ann_info"]
            ]
        return info
