"""The head of a Transformers detector: outputs and scores as mmdet's heads show them.

Axes: L layers, B images, Q queries, R queries of all images, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from mmdet.models.dense_heads import DeformableDETRHead
from mmdet.utils import reduce_mean
from mmengine.dist import get_world_size
from torch import Tensor, nn

from damex.models.detection_losses import IGNORED_LOGIT

CLASSIFICATION = ("vfl", "mal", "labels")  # names of Transformers' losses
# RF-DETR's takes log(sigmoid(x)), which IGNORED_LOGIT would make infinite, and -30 in
# float16, too. At this score its loss is below 1e-19.
FINITE_LOGIT = -15.0
_ONE_STEP = RLock()  # a step replaces a method of a class


class ScoresOfLoss(nn.Module):
    """Where damex ignores classes of unmatched queries, as in mmdet's ``loss_cls``."""

    use_sigmoid = True

    def forward(self, scores_RC: Tensor, labels_R: Tensor) -> Tensor:
        """Return the scores as the hooks of damex's ``ignoring`` leave them."""
        return scores_RC.float()  # RF-DETR's log(1 - p) is -inf in bfloat16


class TransformersHead(nn.Module):
    """The outputs of a detector in mmdet's layout; the weights are the detector's.

    Attributes:
        cls_branches: The classifiers, the one that selects the queries last.
    """

    predict_by_feat: Callable[..., Any] = DeformableDETRHead.predict_by_feat
    _predict_by_feat_single = DeformableDETRHead._predict_by_feat_single

    def __init__(self, num_classes: int, test_cfg: Mapping[str, Any]) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.test_cfg = test_cfg
        self.loss_cls = ScoresOfLoss()
        self.cls_branches: tuple[nn.Module, ...] = ()

    def forward(self, logits_LBQC: Tensor, boxes_LBQ4: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, and boxes (centre and size, relative to the image)."""
        return logits_LBQC, boxes_LBQ4

    def get_targets(self, logits_BQC: Tensor, boxes_BQ4: Sequence[Tensor]) -> None:
        """Called before each loss: damex's ``ignoring`` reads the boxes."""


def share_of_boxes(num_boxes: int, *, images: Tensor) -> float:
    """Return the mean number of boxes of all processes relative to that of this one.

    ``images`` has the device of the process. Numbers are at least 1, in all processes
    together and in this one.
    """
    mean = reduce_mean(images.new_tensor(float(num_boxes))).item()
    return max(mean, 1 / get_world_size()) / max(num_boxes, 1)


@contextmanager
def adjusted_losses(
    criterion: Any, head: Any, ratio_B4: Tensor, share: float
) -> Iterator[None]:
    """Divide losses by the boxes of all processes, and show scores to a head.

    The head may change all scores of classification losses. The number of boxes that
    Transformers divides by is multiplied by ``share``. It creates its criterion in each
    step and has no place for a hook, so the method of the class is replaced for the
    step.
    """

    def see(
        self: Any, loss: str, outputs: Any, targets: Any, indices: Any, boxes: float
    ) -> Any:
        if loss in CLASSIFICATION:
            logits_BQC = outputs["logits"]
            labels_BQ = logits_BQC.new_full(
                logits_BQC.shape[:2], head.num_classes, dtype=torch.long
            )
            for labels_Q, (query, _) in zip(labels_BQ, indices, strict=True):
                labels_Q[query] = 0  # any class: the query is matched
            boxes_BQ4 = outputs["pred_boxes"] / ratio_B4.unsqueeze(1)
            head.get_targets(logits_BQC, [*boxes_BQ4])
            scores_RC = head.loss_cls(logits_BQC.flatten(0, 1), labels_BQ.flatten())
            if loss == "labels":
                is_ignored_RC = scores_RC == IGNORED_LOGIT
                scores_RC = scores_RC.masked_fill(is_ignored_RC, FINITE_LOGIT)
            outputs = {**outputs, "logits": scores_RC.view_as(logits_BQC)}
        return get_loss(self, loss, outputs, targets, indices, boxes * share)

    with _ONE_STEP:
        get_loss = criterion.get_loss
        criterion.get_loss = see
        try:
            yield
        finally:
            criterion.get_loss = get_loss
