r"""Score separate heads and shared classes in one label space.

A detector with ``label_space="partitioned"`` has classes ``dataset/name``; AP averages
over them, so that its pooled AP is not that of a detector whose datasets share names.
:class:`SharedNamesMetric` scores both over the names. With ``data/worlds`` of
``studies.worlds``, a head per world and its evaluation, the dataset not given:

    damex headroom configs/worlds/worlds-8_conflicting.py --baselines partitioned
    damex test work_dirs/headroom/partitioned/config.py \
        work_dirs/headroom/partitioned/seed0/epoch_2.pth --cfg-options \
        custom_imports.imports=[damex.registry,studies.one_label_space] \
        test_evaluator.type=SharedNamesMetric test_evaluator.dataset_known=False
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from mmdet.registry import METRICS

from damex.datasets.label_space import LabelSpace
from damex.evaluation import ImageResult, MixtureMetric


@METRICS.register_module()
class SharedNamesMetric(MixtureMetric):
    """:class:`MixtureMetric` over class names without their datasets.

    All scores, pooled ones too, are of detections that were selected among the classes
    of the image's dataset, or, without ``dataset_known``, among all classes. Of the
    detections of an image with one box and one name, which separate heads make of one
    query, the best counts.
    """

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Compute the scores of :class:`MixtureMetric` in the space of names."""
        space = LabelSpace.from_metainfo(self.dataset_meta)
        shared = shared_names(space)
        labels_C = np.array(
            [shared.classes.index(_name_of(one)) for one in space.classes]
        )
        rows = []
        for row in results:
            found = row.of_dataset if self.dataset_known else row.of_all
            named = _renamed(found, labels_C)
            rows.append(replace(row, of_dataset=named, of_all=named))
        scorer = MixtureMetric(
            backend=self.backend,
            classwise=self.classwise,
            dataset_known=False,  # the selection is made
            max_dets=self.max_dets,
        )
        scorer.dataset_meta = shared.to_metainfo()
        return scorer.compute_metrics(rows)


def shared_names(space: LabelSpace) -> LabelSpace:
    """The label space with each class ``dataset/name`` called by its name."""
    return replace(
        space,
        classes=tuple(dict.fromkeys(_name_of(one) for one in space.classes)),
        dataset_classes=tuple(
            {own: _name_of(name) for own, name in classes.items()}
            for classes in space.dataset_classes
        ),
    )


def _name_of(label: str) -> str:
    return label.rpartition("/")[2]


def _renamed(image: ImageResult, labels_C: np.ndarray) -> ImageResult:
    """The detections with other labels, the best first, none twice."""
    best_first = np.argsort(-image.scores, kind="stable")
    boxes, labels = image.boxes[best_first], labels_C[image.labels[best_first]]
    _, first = np.unique(np.column_stack([boxes, labels]), axis=0, return_index=True)
    kept = np.sort(first)
    return ImageResult(
        boxes=boxes[kept],
        scores=image.scores[best_first][kept],
        labels=labels[kept],
        ground_truth=[
            {**one, "label": int(labels_C[one["label"]])} for one in image.ground_truth
        ],
    )
