r"""A loss in which several of the encoder's tokens learn each object.

As an option of ``damex train``; the new heads serve the loss alone:

    damex train configs/real/seven_datasets.py --cfg-options moe=dense \
        custom_imports.imports=[damex.registry,studies.template_probes] \
        model.type=OneToManyDINO
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from mmdet.registry import MODELS
from mmdet.structures.bbox import bbox_cxcywh_to_xyxy
from torch import Tensor

from damex.models.detection_losses import DenseQueryLoss, image_weights
from damex.models.detectors import MoEDINO


@MODELS.register_module()
class OneToManyDINO(MoEDINO):
    """DINO whose encoder also learns with several tokens per object, in training.

    Linear heads of their own on all tokens of the encoder, and the auxiliary loss of
    DDQ DETR (Zhang et al. 2023, arXiv 2303.12776): each object is matched with
    ``positives`` tokens, whose targets are scaled by how well they score and overlap.
    ``image_balance`` weights its images, too.
    """

    def __init__(self, *args: Any, positives: int = 4, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dense_cls = copy.deepcopy(self.bbox_head.cls_branches[-1])
        self.dense_reg = copy.deepcopy(self.bbox_head.reg_branches[-1])
        assigner = dict(type="TopkHungarianAssigner", topk=positives)
        settings = dict(assigner=assigner, alpha=1, beta=6)
        self.dense_loss = DenseQueryLoss(train_cfg=settings)
        self._dense: tuple[Tensor, Tensor] | None = None

    def init_weights(self) -> None:
        """Start the new heads from the weights of the encoder's heads."""
        super().init_weights()
        head = self.bbox_head
        self.dense_cls.load_state_dict(head.cls_branches[-1].state_dict())
        self.dense_reg.load_state_dict(head.reg_branches[-1].state_dict())

    def pre_decoder(
        self, memory: Tensor, memory_mask: Tensor | None, **kwargs: Any
    ) -> tuple[dict, dict]:
        """Choose queries as before; keep the predictions of all tokens."""
        if self.training:
            tokens, proposals = self.gen_encoder_output_proposals(
                memory, memory_mask, kwargs["spatial_shapes"]
            )
            boxes = (self.dense_reg(tokens) + proposals).sigmoid()
            self._dense = self.dense_cls(tokens).sigmoid(), boxes
        return super().pre_decoder(memory, memory_mask, **kwargs)

    def loss(self, batch_inputs: Tensor, batch_data_samples: list) -> dict:
        """Compute the losses of DINO and ``many_aux_loss_*``."""
        losses = super().loss(batch_inputs, batch_data_samples)
        if self._dense is None:
            return losses
        scores, boxes = self._dense
        self._dense = None
        samples, shapes = batch_data_samples, [s.img_shape for s in batch_data_samples]
        scale_B4 = scores.new_tensor([[width, height] * 2 for height, width in shapes])
        found = self.dense_loss.loss(
            scores,
            bbox_cxcywh_to_xyxy(boxes) * scale_B4[:, None],
            [one.gt_instances.bboxes for one in samples],
            [one.gt_instances.labels for one in samples],
            [one.metainfo for one in samples],
        )
        counts_B = scores.new_tensor([len(one.gt_instances) for one in samples])
        weights_B = image_weights(counts_B, self.image_balance)
        for name, losses_B in found.items():
            losses[f"many_{name}"] = torch.stack(losses_B).mul(weights_B).sum()
        return losses
