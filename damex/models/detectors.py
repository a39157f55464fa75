"""mmdet's DETR family with mixture-of-experts layers: one class per detector."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mmdet.models.dense_heads import DDQDETRHead
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
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.optim import Optimizer

from damex.errors import ConfigError
from damex.models.blocks import ffns_in_place
from damex.models.build import resolved_moe
from damex.models.config import MoEConfig, read_moe
from damex.models.context import RoutingContext, checkpoint_layers, take_num_cp
from damex.models.dataset_awareness import build_awareness
from damex.models.dataset_classifier import class_scores, restrict_to_predicted_group
from damex.models.detection_losses import DenseQueryLoss, balanced_images, ignoring
from damex.models.expert_parallel import missing_passes
from damex.models.insertion import EXTENSIONS, counts_foreground, insert_moe, moe_blocks
from damex.models.outputs import add_dataset_instances, attach_routing, routing_losses
from damex.models.queries import (
    batches_of_one_shape,
    boxes_of,
    check_cells,
    encoder_foreground,
    ids_of,
    naming_images,
    query_foreground,
    real_query_mask,
    valid_ratio_of,
)
from damex.models.sites import check_widths
from damex.models.starts import copy_draws, fork_rng
from damex.models.timm_backbone import check_neck
from damex.moe import LayerTally, add_tallies, gathered_experts

if TYPE_CHECKING:
    from mmdet.models.detectors import DetectionTransformer as _Detector
else:
    _Detector = object


class RoutedDetector(_Detector):
    """Mixin that adds experts to a DETR of mmdet and opens the routing context.

    Precedes the mmdet class in the bases and changes none of its computation: FFNs are
    replaced after the detector is built, and each public step runs in a routing step.

    Args:
        moe: See :class:`damex.models.config.MoEConfig`; None keeps the detector dense.
        num_groups: Number of dataset groups; filled in from the mixture.
        image_balance: Weight of images with few objects, from 0 (objects weigh alike,
            as in mmdet) to 1 (images weigh alike); see
            :func:`damex.models.detection_losses.image_weights`.
        ignore_unannotated_classes, label_prior, dataset_head: See
            :class:`damex.models.dataset_awareness.DatasetAwarenessConfig`.
        label_coverage: Arguments of
            :func:`damex.models.dataset_classifier.annotated_classes`; filled in from
            the mixture if dataset awareness needs it.
        **kwargs: Arguments of the mmdet detector. ``encoder.num_cp`` and
            ``decoder.num_cp`` are the numbers of layers with activation checkpointing.

    Attributes:
        chooses_queries_by_class: Whether dataset awareness is supported (by DINO).
        counts_tokens: Whether predictions report where their tokens went. Off, as it
            takes time; set by :class:`damex.engine.hooks.TrainingStepHook` or a
            caller.
        tally: Collects the routers' choices in training; None for nothing.
    """

    chooses_queries_by_class = False

    def __init__(
        self,
        *args: Any,
        moe: Mapping[str, Any] | None = None,
        num_groups: int | None = None,
        image_balance: float = 0.0,
        ignore_unannotated_classes: bool | float = False,
        label_prior: Mapping[str, Any] | None = None,
        dataset_head: Mapping[str, Any] | None = None,
        label_coverage: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs, num_cp = take_num_cp(kwargs)
        super().__init__(*args, **kwargs)
        check_neck(self.backbone, kwargs.get("neck"))
        check_widths(self, kwargs.get("neck") or {})
        self.routing = RoutingContext()
        self.image_balance = image_balance
        if image_balance:
            if not getattr(self.bbox_head.loss_cls, "use_sigmoid", False):
                raise ConfigError(
                    "model.image_balance needs a loss_cls with use_sigmoid=True, whose "
                    "sum is divided by the number of objects; remove image_balance."
                )
            self.bbox_head.sync_cls_avg_factor = True  # over all processes
        self.counts_tokens = False
        self.tally: dict[str, LayerTally] | None = None
        self.channel_gating: Any = None
        self._moe = None if moe is None else read_moe(moe)
        self._warmup: Any = None
        self.upcycling: Any = None
        options = dict(
            ignore_unannotated_classes=ignore_unannotated_classes,
            label_prior=label_prior,
            dataset_head=dataset_head,
        )
        with fork_rng():
            if self._moe is not None:
                report = self._insert(self._moe, num_groups)
                print_log(str(report), logger="current", level=logging.INFO)
                for note in report.notes:
                    print_log(note, logger="current", level=logging.WARNING)
            self.awareness = build_awareness(self, options, label_coverage)
        checkpoint_layers(self, num_cp, context=self.routing)

    def _insert(self, moe: MoEConfig, num_groups: int | None) -> Any:
        where: dict[str, Any] = dict(context=self.routing, num_groups=num_groups)
        report: Any
        if moe.channels is not None:
            gated = EXTENSIONS["channels"](self, moe.layers, moe.channels, **where)
            self.channel_gating, report = gated
        else:
            report, blocks = insert_moe(self, moe, **where), moe_blocks(self)
            if (warmup := moe.router_warmup) is not None:
                self._warmup = EXTENSIONS["router_warmup"](warmup, blocks[0].moe)
            if moe.upcycling is not None:
                self.upcycling = EXTENSIONS["upcycling"](moe.upcycling, blocks)
        return report

    @property
    def trains_in_stages(self) -> bool:
        """Whether some steps do not train all parameters."""
        return self._warmup is not None or self.upcycling is not None

    def resolved_moe(self) -> dict[str, Any]:
        """Return the ``moe`` tree with defaults as plain dicts; empty if dense."""
        return {} if self._moe is None else resolved_moe(self._moe)

    def begin_step(
        self, *, iteration: int, max_iters: int, optimizer: Optimizer | None = None
    ) -> None:
        """Begin a training step, counted from 0; a hook calls this before each.

        Gate schedules start with the experts, after a dense phase. Moments of the
        optimizer are copied when an FFN becomes experts.

        Raises:
            ConfigError: If the training is shorter than the router warm-up or dense
                phase.
        """
        start = 0
        if self.upcycling is not None:
            start = self.upcycling.begin_step(
                iteration=iteration, max_iters=max_iters, optimizer=optimizer
            )
        steps, last = max(iteration - start, 0), max_iters - 1 - start
        progress = min(steps / max(last, 1), 1.0)
        for block in moe_blocks(self):
            block.moe.gate.begin_step(progress)
        if self._warmup is not None:
            self._warmup.begin_step(self, iteration=iteration, max_iters=max_iters)

    def init_weights(self) -> None:
        """Initialize as mmdet does, then the experts one by one.

        mmdet draws with FFNs in place of the experts, as stacked experts would get a
        wrong scale. Backbone experts may hold pretrained kernels and are not drawn
        again.
        """
        with gathered_experts([self]):
            with ffns_in_place(self) as places:
                super().init_weights()
            with fork_rng():
                for block, ffn in places:
                    block.reset_parameters()
                    copy_draws(block, ffn)

    def loss(self, batch_inputs: Tensor, batch_data_samples: list) -> dict:
        """Compute the detector's losses and ``loss_moe_*``, means over MoE layers."""
        groups = ids_of(batch_data_samples, "group_id", batch_inputs.device)
        boxes = None
        if self.training and self.upcycling is not None:
            self.upcycling.check_begun()
        if self.training and counts_foreground(moe_blocks(self)):
            boxes = boxes_of(batch_data_samples)
        ignored: dict[str, Any] = {}
        if self.awareness is not None:
            ignored = self.awareness.ignored_if_found(batch_data_samples)
        with (
            self._float32_scores(batch_inputs),
            self._step(batch_inputs, batch_data_samples, groups, boxes),
            balanced_images(self, batch_data_samples, self.image_balance),
            ignoring(self, batch_data_samples, **ignored),
        ):
            losses = super().loss(batch_inputs, batch_data_samples)
            losses = {**losses, **routing_losses(self.routing.records)}
            if self.training and self.tally is not None:
                records = self.routing.records.items()
                add_tallies(self.tally, {n: LayerTally.of(one) for n, one in records})
            if self.awareness is not None:
                losses.update(self.awareness.losses(groups))
            if (gates := self.routing.gates) is not None:
                found = self.channel_gating.losses(gates, batch_data_samples, groups)
                losses.update(found)
        if not self.training:
            return losses
        # Before the backward pass, where recomputed layers must not count.
        for block in moe_blocks(self):
            block.moe.gate.end_step()
        return losses if self._warmup is None else self._warmup.choose_losses(losses)

    def _float32_scores(self, images: Tensor) -> AbstractContextManager[None]:
        """Class scores in float32 under autocast: float16's end mmdet's matching."""
        if not torch.is_autocast_enabled(images.device.type):
            return nullcontext()
        head, none = self.bbox_head, nn.Identity()
        layers = getattr(head, "cls_branches", None) or [getattr(head, "fc_cls", none)]
        return class_scores(layers, Tensor.float)

    def predict(
        self, batch_inputs: Tensor, batch_data_samples: list, rescale: bool = True
    ) -> list:
        """Predict detections; with ``counts_tokens``, samples report their routing.

        No dataset id is read (except with ``moe.oracle``). Samples of an evaluation
        mixture get ``dataset_instances``, detections among their dataset's classes;
        samples with ``labels_by_group`` those of the ``predicted_group``, and
        ``group_posterior``, the probabilities of all groups. The result of an image
        does not depend on the other images of the batch.
        """
        batches = [*batches_of_one_shape(batch_inputs, batch_data_samples)]
        more = missing_passes(self, len(batches))
        for images, samples in batches:
            self._predict(images, samples, rescale)
        for _ in range(more):
            self._predict(images, copy.deepcopy(samples), rescale)
        return batch_data_samples

    def _predict(
        self, batch_inputs: Tensor, batch_data_samples: list, rescale: bool
    ) -> None:
        """Predict detections in images of one shape, in place."""
        outputs: list[tuple[Tensor, Tensor]] = []
        with (
            self._predicting_step(batch_inputs, batch_data_samples),
            self.bbox_head.register_forward_hook(lambda *call: outputs.append(call[2])),
        ):
            samples = super().predict(batch_inputs, batch_data_samples, rescale)
            if all("labels_by_group" in sample for sample in samples):
                restrict_to_predicted_group(samples, self)
            add_dataset_instances(samples, outputs[-1], self.bbox_head, rescale)
            if self.counts_tokens:
                attach_routing(samples, self.routing.records)

    def _forward(
        self, batch_inputs: Tensor, batch_data_samples: list | None = None
    ) -> tuple:
        """Return raw outputs, routed and gated as in a prediction."""
        with self._predicting_step(batch_inputs, batch_data_samples):
            outputs = super()._forward(batch_inputs, batch_data_samples)
            if self.awareness is not None:  # mmdet bypasses forward hooks here
                outputs = (self.awareness.adjust(outputs[0]), *outputs[1:])
            return outputs

    def _predicting_step(
        self, images: Tensor, samples: list | None
    ) -> AbstractContextManager[None]:
        """Open a step that knows dataset groups only for ``moe.oracle``."""
        groups = None
        if not self.training and any(
            block.moe.group_choice.oracle for block in moe_blocks(self)
        ):
            groups = ids_of(samples or (), "group_id", images.device)
            if not samples or groups.min() < 0:
                raise ConfigError(
                    "moe.oracle asks for the dataset of each image, and a sample has "
                    "no group_id; evaluate on a MixtureDataset, or set "
                    "moe.oracle=False."
                )
        return self._step(images, samples, groups)

    @contextmanager
    def _step(
        self,
        images: Tensor,
        samples: list | None,
        groups_B: Tensor | None,
        boxes: list[Tensor] | None = None,
    ) -> Iterator[None]:
        """Open a routing step, with the gates of its images if channels are gated."""
        gates = None
        if self.channel_gating is not None:
            gates = self.channel_gating(images, samples)
        ratio_B2, awareness = valid_ratio_of(images, samples), self.awareness
        with (
            self.routing.step(
                groups_B, boxes=boxes, valid_ratio_B2=ratio_B2, gates=gates
            ),
            awareness.step(self.bbox_head, samples) if awareness else nullcontext(),
            naming_images(samples),
        ):
            yield

    def forward_encoder(
        self, feat: Tensor, feat_mask: Tensor | None, **kwargs: Any
    ) -> dict:
        """Run the encoder; padded features are not routed."""
        boxes, foreground = self.routing.boxes, None
        if boxes is not None:
            foreground = encoder_foreground(
                boxes, kwargs["spatial_shapes"], self.routing.valid_ratio_B2
            )
        real = None if feat_mask is None else ~feat_mask
        with self.routing.component(real, foreground):
            return super().forward_encoder(feat=feat, feat_mask=feat_mask, **kwargs)

    def pre_decoder(self, memory: Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Prepare the decoder's queries, which two-stage detectors select by score.

        Raises:
            DataError: If the feature maps have fewer cells than there are queries.
        """
        fills_up = isinstance(self, DDQDETR)  # with zeros
        if getattr(self, "as_two_stage", False) and not fills_up:
            check_cells(memory.shape[1], self.num_queries)
        return super().pre_decoder(memory, *args, **kwargs)

    def forward_decoder(
        self, *, query_mask: Tensor | None = None, num_auxiliary: int = 0, **kwargs: Any
    ) -> dict:
        """Run the decoder; fillers are not routed, auxiliary queries not counted."""
        count = kwargs["query"].shape[1] - num_auxiliary
        boxes, foreground = self.routing.boxes, None
        if boxes is not None:
            points = kwargs["reference_points"][:, :count]
            foreground = query_foreground(boxes, points)
        if query_mask is not None:
            query_mask = query_mask[:, :count]
        with self.routing.component(
            query_mask, foreground, num_auxiliary=num_auxiliary
        ):
            return super().forward_decoder(**kwargs)


def mmdet_class(detector: RoutedDetector) -> type:
    """Return the mmdet class that a detector of damex extends."""
    kinds = type(detector).__mro__
    return kinds[kinds.index(RoutedDetector) + 1]


@MODELS.register_module()
class MoEDINO(RoutedDetector, DINO):
    """DINO (Zhang et al. 2023) with experts: the detector of the DAMEX paper."""

    chooses_queries_by_class = True

    def pre_decoder(
        self, memory: Tensor, memory_mask: Tensor | None, **kwargs: Any
    ) -> tuple[dict, dict]:
        """Prepare the decoder's queries; denoising fillers are masked out."""
        if self.awareness is not None:
            self.awareness.predict_datasets(memory, memory_mask, self.routing.records)
        inputs, head_inputs = super().pre_decoder(memory, memory_mask, **kwargs)
        if self.training:
            inputs["query_mask"] = real_query_mask(inputs["query"])
        return inputs, head_inputs


@MODELS.register_module()
class MoEDDQDETR(RoutedDetector, DDQDETR):
    """DDQ DETR (Zhang et al. 2023) with experts.

    In training DDQ decodes a second, denser set of queries for an auxiliary loss. They
    pass the experts as they would pass the dense FFN, but in a separate call: routing
    losses and metrics cover only the queries that produce detections.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        head = self.bbox_head
        dense = head.aux_loss_for_dense
        head.aux_loss_for_dense = DenseQueryLoss(train_cfg=dense.train_cfg)
        head._predict_by_feat_single = partial(_all_distinct, head)

    def pre_decoder(self, *args: Any, **kwargs: Any) -> tuple[dict, dict]:
        """Prepare the decoder's queries; fillers are masked out."""
        inputs, head_inputs = super().pre_decoder(*args, **kwargs)
        inputs["query_mask"] = real_query_mask(inputs["query"])
        meta = head_inputs.get("dn_meta")
        if meta is not None:
            inputs["num_auxiliary"] = meta["num_dense_queries"]
        return inputs, head_inputs


def _all_distinct(head: DDQDETRHead, scores_QC: Tensor, *args: Any) -> InstanceData:
    """The detections of an image, where fewer queries than ``max_per_img`` are left."""
    asked, most = head.test_cfg, scores_QC.numel()
    limit = min(asked.get("max_per_img", len(scores_QC)), most)
    head.test_cfg = {**asked, "max_per_img": limit}
    try:
        return type(head)._predict_by_feat_single(head, scores_QC, *args)
    finally:
        head.test_cfg = asked


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
