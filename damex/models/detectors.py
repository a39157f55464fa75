"""mmdet's DETR family with mixture-of-experts layers: one line per detector."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

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
from torch.optim import Optimizer

from damex.errors import ConfigError
from damex.models.activation_checkpointing import checkpoint_layers, take_num_cp
from damex.models.blocks import MoEFFN
from damex.models.channels import ChannelGating, ChannelReport, insert_channels
from damex.models.config import MoEConfig, read_moe
from damex.models.context import RoutingContext
from damex.models.dataset_awareness import build_awareness
from damex.models.dense_phase import InRunUpcycling
from damex.models.initialization import (
    ffns_in_place,
    own_random_stream,
    take_draws,
)
from damex.models.insertion import (
    InsertionReport,
    counts_foreground,
    insert_moe,
    moe_blocks,
)
from damex.models.outputs import add_dataset_instances, attach_routing, routing_losses
from damex.models.queries import (
    encoder_foreground,
    ground_truth_of,
    group_ids_of,
    query_foreground,
    real_query_mask,
    valid_ratio_of,
)
from damex.models.schedule import RouterWarmup, check_losses
from damex.models.timm_backbone import check_neck
from damex.models.told_dataset import choose_datasets, group_posterior
from damex.moe import RoutingTally, gathered_experts

if TYPE_CHECKING:
    from mmdet.models.detectors import DetectionTransformer as _Detector
else:
    _Detector = object


class RoutedDetector(_Detector):
    """Mixin that puts experts into a DETR of mmdet and threads the routing context.

    It stands before a detector class of mmdet in the list of bases and changes no
    computation of it: FFNs are replaced after the detector is built, and each public
    step runs inside of a routing step.

    Args:
        *args: As for the mmdet detector.
        moe: See :class:`damex.models.config.MoEConfig`; None keeps the detector dense.
        num_groups: Number of dataset groups; filled in from the mixture.
        ignore_unannotated_classes: Whether classes that the dataset of an image does
            not annotate are left out of the training on it, instead of being negatives.
        label_prior: See :mod:`damex.models.dataset_awareness`, as for the next two.
        dataset_head: See there.
        dataset_conditioning: See there.
        label_coverage: See :class:`damex.models.label_prior.LabelCoverage`; filled in
            from the mixture where one of the last four asks for it.
        **kwargs: As for the mmdet detector. ``encoder.num_cp`` and ``decoder.num_cp``
            are the numbers of layers to recompute in the backward pass, to save memory.

    Attributes:
        routing: What its layers share during a forward pass.
        chooses_queries_by_class: Whether it can be aware of datasets: DINO can.
        awareness: What it does with the dataset of an image, beside experts.
        counts_tokens: Whether predictions tell where their tokens went; off, as it
            takes time, until :class:`damex.engine.schedule.TrainingStepHook` or a
            caller wants it.
        tally: What the routers choose in training is added to it; None for nothing.
    """

    chooses_queries_by_class = False

    def __init__(
        self,
        *args: Any,
        moe: Mapping[str, Any] | None = None,
        num_groups: int | None = None,
        ignore_unannotated_classes: bool = False,
        label_prior: Mapping[str, Any] | None = None,
        dataset_head: Mapping[str, Any] | None = None,
        dataset_conditioning: Mapping[str, Any] | None = None,
        label_coverage: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs, num_cp = take_num_cp(kwargs)
        super().__init__(*args, **kwargs)
        check_neck(self.backbone, kwargs.get("neck"))
        self.routing = RoutingContext()
        self.counts_tokens = False
        self.tally: RoutingTally | None = None
        self.channel_gating: ChannelGating | None = None
        self._moe = None if moe is None else read_moe(moe)
        self._warmup: RouterWarmup | None = None
        self.upcycling: InRunUpcycling | None = None
        options = dict(
            ignore_unannotated_classes=ignore_unannotated_classes,
            label_prior=label_prior,
            dataset_head=dataset_head,
            dataset_conditioning=dataset_conditioning,
        )
        with own_random_stream():
            if self._moe is not None:
                self._insert(self._moe, num_groups)
            self.awareness = build_awareness(self, options, label_coverage)
        checkpoint_layers(self, num_cp, context=self.routing)

    def _insert(self, moe: MoEConfig, num_groups: int | None) -> None:
        """Replace layers by experts, or gate their channels, and say so."""
        report: InsertionReport | ChannelReport
        where: dict[str, Any] = dict(context=self.routing, num_groups=num_groups)
        if moe.channels is not None:
            self.channel_gating, report = insert_channels(
                self, moe.layers, moe.channels, **where
            )
        else:
            report = insert_moe(self, moe, **where)
            layers = [block.moe for block in moe_blocks(self)]
            if moe.router_warmup is None:
                check_losses(layers)
            else:
                self._warmup = RouterWarmup(moe.router_warmup, layers)
            if moe.upcycling is not None:
                blocks = [b for b in moe_blocks(self) if isinstance(b, MoEFFN)]
                self.upcycling = InRunUpcycling(moe.upcycling, blocks)
        print_log(str(report), logger="current", level=logging.INFO)
        for note in report.notes:
            print_log(note, logger="current", level=logging.WARNING)

    @property
    def trains_in_stages(self) -> bool:
        """Whether some parameters are not trained in each step."""
        return self._warmup is not None or self.upcycling is not None

    def resolved_moe(self) -> dict[str, Any]:
        """The ``moe`` tree with its defaults, as plain dicts; empty if it is dense."""
        return {} if self._moe is None else self._moe.resolved()

    def begin_step(
        self, *, iteration: int, max_iters: int, optimizer: Optimizer | None = None
    ) -> None:
        """Begin a training step; a hook of the trainer calls this before each.

        The schedules of gates begin with the experts, after a dense phase.

        Args:
            iteration: From 0, by the trainer's count.
            max_iters: Iterations of the whole training.
            optimizer: That of the training, whose moments are copied where an FFN
                becomes experts.

        Raises:
            ConfigError: If the training is shorter than the routers' warm-up or the
                dense phase.
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

    def end_step(self) -> None:
        """End the forward of a training step: gates sum their loads over processes.

        Before the backward pass, which may compute layers again: that does not count.
        """
        for block in moe_blocks(self):
            block.moe.gate.end_step()

    def init_weights(self) -> None:
        """Initialise as mmdet does, then the experts one by one.

        mmdet draws with FFNs in the places of their experts (stacked experts it would
        draw as one matrix, at a wrong scale), and the experts have random numbers of
        their own; see :mod:`damex.models.initialization`. Experts of the backbone are
        not drawn again: they may hold pretrained kernels.
        """
        with gathered_experts([self]):
            with ffns_in_place(self) as places:
                super().init_weights()
            with own_random_stream():
                for block, ffn in places:
                    block.reset_parameters()
                    take_draws(block, ffn)

    def loss(self, batch_inputs: Tensor, batch_data_samples: list) -> dict:
        """Losses of the detector, and ``loss_moe_*`` as the mean over MoE layers."""
        groups = group_ids_of(batch_data_samples, batch_inputs.device)
        truth = None
        if self.training and counts_foreground(moe_blocks(self)):
            truth = ground_truth_of(batch_data_samples)
        with self._step(
            batch_inputs, batch_data_samples, group_ids_B=groups, ground_truth=truth
        ):
            losses = super().loss(batch_inputs, batch_data_samples)
            losses = {**losses, **routing_losses(self.routing.records)}
            if self.training and self.tally is not None:
                self.tally.add(self.routing.records)
            if self.awareness is not None:
                losses.update(self.awareness.losses(groups))
            gates = self.routing.gates
            if self.channel_gating is not None and gates is not None:
                found = self.channel_gating.losses(gates, batch_data_samples, groups)
                losses.update(found)
        if not self.training:
            return losses
        self.end_step()
        return losses if self._warmup is None else self._warmup.choose_losses(losses)

    def predict(
        self, batch_inputs: Tensor, batch_data_samples: list, rescale: bool = True
    ) -> list:
        """Detections; with ``counts_tokens`` samples tell where their tokens went.

        No dataset id is read here (but for ``moe.oracle``). Where a sample comes from
        an evaluation's mixture, ``dataset_instances`` are the detections of its
        dataset's classes alone; where it has ``labels_by_group``, those of the group
        that it looks like, and ``group_posterior`` how probable each group is.
        """
        outputs: list[tuple[Tensor, Tensor]] = []
        with (
            self._predicting_step(batch_inputs, batch_data_samples),
            self.bbox_head.register_forward_hook(lambda *call: outputs.append(call[2])),
        ):
            samples = super().predict(batch_inputs, batch_data_samples, rescale)
            if all("labels_by_group" in sample for sample in samples):
                choose_datasets(samples, group_posterior(self))
            add_dataset_instances(samples, outputs[-1], self.bbox_head, rescale)
            if self.counts_tokens:
                attach_routing(samples, self.routing.records)
            return samples

    def _forward(
        self, batch_inputs: Tensor, batch_data_samples: list | None = None
    ) -> tuple:
        """Raw outputs; tokens are routed and channels gated as in a prediction."""
        with self._predicting_step(batch_inputs, batch_data_samples):
            outputs = super()._forward(batch_inputs, batch_data_samples)
            if self.awareness is not None:  # mmdet calls its head past all hooks
                outputs = (self.awareness.adjust(outputs[0]), *outputs[1:])
            return outputs

    def _predicting_step(
        self, images: Tensor, samples: list | None
    ) -> AbstractContextManager[None]:
        """A step that knows datasets only where ``moe.oracle`` asks for them."""
        groups = None
        if not self.training and any(
            block.moe.group_choice.oracle for block in moe_blocks(self)
        ):
            groups = group_ids_of(samples or (), images.device)
            if groups is None or groups.min() < 0:
                raise ConfigError(
                    "moe.oracle asks for the dataset of each image, and a sample has "
                    "no group_id; evaluate on a MixtureDataset, or set "
                    "moe.oracle=False."
                )
        return self._step(images, samples, group_ids_B=groups)

    @contextmanager
    def _step(
        self, images: Tensor, samples: list | None, **known: Any
    ) -> Iterator[None]:
        """Open a routing step, with the gates of its images where there are any."""
        gates = None
        if self.channel_gating is not None:
            gates = self.channel_gating(images, samples)
        ratio_B2 = valid_ratio_of(images, samples)
        awareness = self.awareness
        with (
            self.routing.step(valid_ratio_B2=ratio_B2, gates=gates, **known),
            awareness.step(self.bbox_head, samples) if awareness else nullcontext(),
        ):
            yield

    def forward_encoder(
        self, feat: Tensor, feat_mask: Tensor | None, **kwargs: Any
    ) -> dict:
        """Run the encoder; padded features are no tokens."""
        truth, foreground = self.routing.ground_truth, None
        if truth is not None:
            foreground = encoder_foreground(truth, kwargs["spatial_shapes"])
        with self.routing.component(
            None if feat_mask is None else ~feat_mask, foreground
        ):
            return super().forward_encoder(feat=feat, feat_mask=feat_mask, **kwargs)

    def forward_decoder(
        self, *, query_mask: Tensor | None = None, num_auxiliary: int = 0, **kwargs: Any
    ) -> dict:
        """Run the decoder; fillers and auxiliary queries are no tokens to count."""
        count = kwargs["query"].shape[1] - num_auxiliary
        truth, foreground = self.routing.ground_truth, None
        if truth is not None:
            points = kwargs["reference_points"][:, :count]
            foreground = query_foreground(truth, points)
        if query_mask is not None:
            query_mask = query_mask[:, :count]
        with self.routing.component(
            query_mask, foreground, num_auxiliary=num_auxiliary
        ):
            return super().forward_decoder(**kwargs)


def mmdet_class(detector: RoutedDetector) -> type:
    """The class of mmdet that the mixin stands before.

    Args:
        detector: Of damex.
    """
    kinds = type(detector).__mro__
    return kinds[kinds.index(RoutedDetector) + 1]


@MODELS.register_module()
class MoEDINO(RoutedDetector, DINO):
    """DINO (Zhang et al. 2023) with experts: the detector of the DAMEX paper."""

    chooses_queries_by_class = True

    def pre_decoder(
        self, memory: Tensor, memory_mask: Tensor | None, **kwargs: Any
    ) -> tuple[dict, dict]:
        """Prepare the decoder's queries; filled-up denoising queries are no tokens."""
        aware = self.awareness
        if aware is not None:
            memory = aware.condition_memory(memory, memory_mask, self.routing.records)
        inputs, head_inputs = super().pre_decoder(memory, memory_mask, **kwargs)
        if self.training:
            inputs["query_mask"] = real_query_mask(inputs["query"])
        if aware is not None:
            inputs["query"] = aware.condition_query(inputs["query"])
        return inputs, head_inputs


@MODELS.register_module()
class MoEDDQDETR(RoutedDetector, DDQDETR):
    """DDQ DETR (Zhang et al. 2023) with experts.

    In training DDQ decodes a second, denser set of queries for an auxiliary loss, and
    no other query sees these. They pass the experts as they pass the FFN of a dense
    detector, or the loss would be that of another network, but in a call of their own:
    routing losses and metrics are about the queries of which detections are made.
    """

    def pre_decoder(self, *args: Any, **kwargs: Any) -> tuple[dict, dict]:
        """Prepare the decoder's queries; fillers are no tokens."""
        inputs, head_inputs = super().pre_decoder(*args, **kwargs)
        inputs["query_mask"] = real_query_mask(inputs["query"])
        meta = head_inputs.get("dn_meta")
        if meta is not None:
            inputs["num_auxiliary"] = meta["num_dense_queries"]
        return inputs, head_inputs


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
