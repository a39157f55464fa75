"""mmdet's DETR family with mixture-of-experts layers: one line per detector."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
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

from damex.engine.schedule import (
    StagedTraining,
    gather_loads,
    prepare_gates,
    read_router_stage,
    training_progress,
)
from damex.errors import ConfigError
from damex.models.activation_checkpointing import checkpoint_layers, take_num_cp
from damex.models.blocks import MoEFFN, MoEPatchConv
from damex.models.channel_gating import ChannelGating
from damex.models.channel_insertion import insert_channels
from damex.models.context import RoutingContext
from damex.models.insertion import insert_moe, moe_blocks
from damex.models.queries import (
    denoising_query_mask,
    encoder_foreground,
    ground_truth_of,
    query_foreground,
)
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
        moe: See :func:`damex.models.insertion.insert_moe`, and with ``channels`` see
            :func:`damex.models.channel_insertion.insert_channels`; None keeps the
            detector dense.
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
        self.channel_gating: ChannelGating | None = None
        self._staged: StagedTraining | None = None
        if moe is not None and moe.get("channels") is not None:
            self.channel_gating, found = insert_channels(
                self, moe, num_groups=num_groups
            )
            print_log(str(found), logger="current", level=logging.INFO)
        elif moe is not None:
            report = insert_moe(self, moe, context=self.routing, num_groups=num_groups)
            print_log(str(report), logger="current", level=logging.INFO)
            for note in report.notes:
                print_log(note, logger="current", level=logging.WARNING)
            self._check_foreground()
            layers = [block.moe for block in moe_blocks(self)]
            stage = read_router_stage(moe.get("router_stage"), layers)
            self._staged = None if stage is None else StagedTraining(stage)
        gating = self.channel_gating
        gated = () if gating is None else (gating.context,)
        checkpoint_layers(self, num_cp, contexts=(self.routing, *gated))

    @property
    def trains_in_stages(self) -> bool:
        """Whether a part of the parameters is kept still in every training step."""
        return self._staged is not None

    def init_weights(self) -> None:
        """Initialise as mmdet does, then the experts one by one.

        mmdet draws every tensor of the transformer as if it were one matrix, which
        gives stacked experts a wrong scale. Those of the backbone are not drawn again:
        they may hold pretrained kernels.
        """
        super().init_weights()
        for block in moe_blocks(self):
            if isinstance(block, MoEFFN):
                block.reset_parameters()

    def loss(self, batch_inputs: Tensor, batch_data_samples: list) -> dict:
        """Losses of the detector, and ``loss_moe_*`` as the mean over MoE layers."""
        stage_is_open = False
        if self.training and self._staged is not None:
            stage_is_open = self._staged.begin_step(self)
        if self.training:
            prepare_gates(moe_blocks(self), training_progress())
        groups = _group_ids(batch_data_samples, batch_inputs.device)
        wanted = self.training and _counts_foreground(self)
        with (
            self.routing.step(
                groups,
                ground_truth=ground_truth_of(batch_data_samples) if wanted else None,
                image_share_B2=_image_share(batch_inputs, batch_data_samples),
            ),
            self._gates(batch_inputs, batch_data_samples),
        ):
            losses = super().loss(batch_inputs, batch_data_samples)
            losses = {**losses, **routing_losses(self.routing.records)}
            if self.channel_gating is not None:
                losses.update(self.channel_gating.losses(batch_data_samples, groups))
        if self.training:
            gather_loads(moe_blocks(self))
        if self.training and self._staged is not None:
            return self._staged.choose_losses(losses, is_open=stage_is_open)
        return losses

    def predict(
        self, batch_inputs: Tensor, batch_data_samples: list, rescale: bool = True
    ) -> list:
        """Detections; every sample also tells where its tokens went.

        No dataset id is read here. Where a sample comes from an evaluation's mixture,
        ``dataset_instances`` are the detections of its dataset's classes alone.
        """
        outputs: list[tuple[Tensor, Tensor]] = []
        share_B2 = _image_share(batch_inputs, batch_data_samples)
        with (
            self.routing.step(image_share_B2=share_B2),
            self._gates(batch_inputs, batch_data_samples),
            self.bbox_head.register_forward_hook(lambda *call: outputs.append(call[2])),
        ):
            samples = super().predict(batch_inputs, batch_data_samples, rescale)
            _add_dataset_instances(samples, outputs[-1], self.bbox_head, rescale)
            return attach_routing(samples, self.routing.records)

    def _forward(
        self, batch_inputs: Tensor, batch_data_samples: list | None = None
    ) -> tuple:
        """Raw outputs; tokens are routed and channels gated as in a prediction."""
        share_B2 = None
        if batch_data_samples is not None:
            share_B2 = _image_share(batch_inputs, batch_data_samples)
        with (
            self.routing.step(image_share_B2=share_B2),
            self._gates(batch_inputs, batch_data_samples),
        ):
            return super()._forward(batch_inputs, batch_data_samples)

    def _gates(
        self, images: Tensor, samples: list | None
    ) -> AbstractContextManager[None]:
        """A forward pass with the gates of its images, where channels are gated."""
        if self.channel_gating is None:
            return nullcontext()
        return self.channel_gating.step(images, samples)

    def forward_encoder(
        self, feat: Tensor, feat_mask: Tensor | None, **kwargs: Any
    ) -> dict:
        """Run the encoder; padded features are no tokens."""
        truth, foreground = self.routing.ground_truth, None
        if truth is not None:
            foreground = encoder_foreground(truth, kwargs["spatial_shapes"])
        with self.routing.part(None if feat_mask is None else ~feat_mask, foreground):
            return super().forward_encoder(feat=feat, feat_mask=feat_mask, **kwargs)

    def forward_decoder(
        self, *, query_mask: Tensor | None = None, **kwargs: Any
    ) -> dict:
        """Run the decoder; filled-up denoising queries are no tokens."""
        truth, foreground = self.routing.ground_truth, None
        if truth is not None:
            foreground = query_foreground(truth, kwargs["reference_points"])
        with self.routing.part(query_mask, foreground):
            return super().forward_decoder(**kwargs)

    def _check_foreground(self) -> None:
        if _counts_foreground(self) and any(
            isinstance(block, MoEPatchConv) for block in moe_blocks(self)
        ):
            raise ConfigError(
                "moe.losses: tokens='foreground' is for the transformer's experts, and "
                "moe.layers names the backbone; set tokens='all'."
            )
        if _counts_foreground(self) and not isinstance(self, DeformableDETR):
            raise ConfigError(
                f"moe.losses: tokens='foreground' needs queries with reference points, "
                f"which {type(self).__name__} has not; set tokens='all', or use "
                "MoEDINO, MoEDDQDETR or MoEDeformableDETR."
            )


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


def _counts_foreground(detector: torch.nn.Module) -> bool:
    """Whether any routing loss asks which tokens are foreground."""
    losses = [loss for block in moe_blocks(detector) for loss in block.moe.losses]
    return any(loss.tokens == "foreground" for loss in losses)


def _group_ids(batch_data_samples: list, device: torch.device) -> Tensor | None:
    """Group of every image; None where no sample comes from a mixture."""
    ids = [sample.metainfo.get("group_id", -1) for sample in batch_data_samples]
    if all(value < 0 for value in ids):
        return None
    return torch.tensor(ids, device=device)


def _add_dataset_instances(
    samples: list, outputs: tuple[Tensor, Tensor], head: Any, rescale: bool
) -> None:
    """Add detections of the classes alone that the image's dataset annotates.

    A head keeps the best few detections over all classes. Those of other datasets would
    take their places, so their scores go before it chooses.

    Args:
        samples: Predicted data samples; those of a mixture name ``annotated_labels``.
        outputs: Logits (layers, B, queries, classes) and boxes of the head.
        head: A head of mmdet's DETR family.
        rescale: As for ``predict``.
    """
    if not all("annotated_labels" in sample for sample in samples):
        return
    logits_LBQC, boxes = outputs
    foreign_BC = logits_LBQC.new_ones(logits_LBQC.shape[1::2], dtype=torch.bool)
    foreign_BC[:, head.num_classes :] = False  # the background of a softmax
    for foreign_C, sample in zip(foreign_BC, samples, strict=True):
        foreign_C[sample.annotated_labels] = False
    masked_LBQC = logits_LBQC.masked_fill(foreign_BC[:, None], float("-inf"))
    metas = [sample.metainfo for sample in samples]
    found = head.predict_by_feat(
        masked_LBQC, boxes, batch_img_metas=metas, rescale=rescale
    )
    for sample, instances in zip(samples, found, strict=True):
        sample.dataset_instances = instances


def _image_share(batch_inputs: Tensor, batch_data_samples: list) -> Tensor | None:
    """Part of the padded (height, width) that is image; None where all of it is."""
    height, width = batch_inputs.shape[-2:]
    sizes = [sample.metainfo["img_shape"][:2] for sample in batch_data_samples]
    if all(tuple(size) == (height, width) for size in sizes):
        return None
    shares = [(h / height, w / width) for h, w in sizes]
    return torch.tensor(shares, dtype=torch.float64, device=batch_inputs.device)
