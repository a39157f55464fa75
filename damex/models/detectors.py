"""mmdet's DETR family with mixture-of-experts layers: one line per detector."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from mmdet.models.detectors import (
    DABDETR,
    DDQDETR,
    DETR,
    DINO,
    ConditionalDETR,
    DeformableDETR,
)
from mmdet.registry import MODELS
from mmengine.logging import print_log
from torch import Tensor

from damex.models.checkpointing import checkpoint_layers, take_num_cp
from damex.models.context import RoutingContext
from damex.models.denoising import denoising_query_mask
from damex.models.gate_progress import prepare_gates, training_progress
from damex.models.insertion import insert_moe, moe_blocks
from damex.models.routing_summary import attach_routing, routing_losses
from damex.models.timm_backbone import check_neck

if TYPE_CHECKING:
    from mmdet.models.detectors import DetectionTransformer as _Detector
else:
    _Detector = object

__all__ = [
    "MoEConditionalDETR",
    "MoEDABDETR",
    "MoEDDQDETR",
    "MoEDETR",
    "MoEDINO",
    "MoEDeformableDETR",
    "RoutedDetector",
]


class RoutedDetector(_Detector):
    """Mixin that puts experts into a DETR of mmdet and threads the routing context.

    It stands before a detector class of mmdet in the list of bases and changes no
    computation of it: FFNs are replaced after the detector is built, and each public
    step runs inside of a routing step.

    Args:
        *args: As for the mmdet detector.
        moe: See :func:`damex.models.insertion.insert_moe`; None keeps the detector
            dense.
        num_groups: Number of dataset groups; filled in from the mixture.
        **kwargs: As for the mmdet detector. ``encoder.num_cp`` and ``decoder.num_cp``
            are the numbers of layers to recompute in the backward pass, to save memory.
    """

    def __init__(
        self,
        *args: Any,
        moe: Mapping[str, Any] | None = None,
        num_groups: int | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs, num_cp = take_num_cp(kwargs)
        super().__init__(*args, **kwargs)
        check_neck(self.backbone, kwargs.get("neck"))
        self.routing = RoutingContext()
        if moe is not None:
            report = insert_moe(self, moe, context=self.routing, num_groups=num_groups)
            print_log(str(report), logger="current", level=logging.INFO)
        checkpoint_layers(self, num_cp, context=self.routing)

    def init_weights(self) -> None:
        """Initialise as mmdet does, then the experts one by one.

        mmdet draws every tensor of the transformer as if it were one matrix, which
        gives stacked experts a wrong scale.
        """
        super().init_weights()
        for block in moe_blocks(self):
            block.moe.reset_parameters()

    def loss(self, batch_inputs: Tensor, batch_data_samples: list) -> dict:
        """Losses of the detector, and ``loss_moe_*`` as the mean over MoE layers."""
        if self.training:
            prepare_gates(moe_blocks(self), training_progress())
        with self.routing.step(_group_ids(batch_data_samples, batch_inputs.device)):
            losses = super().loss(batch_inputs, batch_data_samples)
            return {**losses, **routing_losses(self.routing.records)}

    def predict(
        self, batch_inputs: Tensor, batch_data_samples: list, rescale: bool = True
    ) -> list:
        """Detections; every sample also tells where its tokens went.

        No dataset id is read here.
        """
        with self.routing.step():
            samples = super().predict(batch_inputs, batch_data_samples, rescale)
            return attach_routing(samples, self.routing.records)

    def forward_encoder(
        self, feat: Tensor, feat_mask: Tensor | None, **kwargs: Any
    ) -> dict:
        """Run the encoder; padded features are no tokens."""
        with self.routing.part(None if feat_mask is None else ~feat_mask):
            return super().forward_encoder(feat=feat, feat_mask=feat_mask, **kwargs)

    def forward_decoder(
        self, *, query_mask: Tensor | None = None, **kwargs: Any
    ) -> dict:
        """Run the decoder; filled-up denoising queries are no tokens."""
        with self.routing.part(query_mask):
            return super().forward_decoder(**kwargs)


class _DenoisingDetector(RoutedDetector):
    """Adds the mask of real denoising queries, for DINO and its descendants."""

    def pre_decoder(
        self, *args: Any, batch_data_samples: list | None = None, **kwargs: Any
    ) -> tuple[dict, dict]:
        """Prepare the decoder's queries and the mask of those that are real."""
        inputs, head_inputs = super().pre_decoder(
            *args, batch_data_samples=batch_data_samples, **kwargs
        )
        meta = head_inputs.get("dn_meta")
        if meta is not None and batch_data_samples is not None:
            query = inputs["query"]
            inputs["query_mask"] = denoising_query_mask(
                [len(sample.gt_instances) for sample in batch_data_samples],
                num_denoising=meta["num_denoising_queries"],
                num_matching=query.shape[1] - meta["num_denoising_queries"],
                device=query.device,
            )
        return inputs, head_inputs


@MODELS.register_module()
class MoEDINO(_DenoisingDetector, DINO):
    """DINO (Zhang et al. 2023) with experts: the detector of the DAMEX paper."""


@MODELS.register_module()
class MoEDDQDETR(_DenoisingDetector, DDQDETR):
    """DDQ DETR (Zhang et al. 2023) with experts."""


@MODELS.register_module()
class MoEDeformableDETR(RoutedDetector, DeformableDETR):
    """Deformable DETR (Zhu et al. 2021) with experts."""


@MODELS.register_module()
class MoEDABDETR(RoutedDetector, DABDETR):
    """DAB-DETR (Liu et al. 2022) with experts."""


@MODELS.register_module()
class MoEConditionalDETR(RoutedDetector, ConditionalDETR):
    """Conditional DETR (Meng et al. 2021) with experts."""


@MODELS.register_module()
class MoEDETR(RoutedDetector, DETR):
    """DETR (Carion et al. 2020) with experts."""


def _group_ids(batch_data_samples: list, device: torch.device) -> Tensor | None:
    """Group of every image; None where no sample comes from a mixture."""
    ids = [sample.metainfo.get("group_id", -1) for sample in batch_data_samples]
    if all(value < 0 for value in ids):
        return None
    return torch.tensor(ids, device=device)
