"""How a detector uses the dataset that an image is (probably) from.

Axes: B images, N tokens or queries, D channels, C classes, S datasets, G dataset
groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from damex.errors import ConfigError
from damex.models.config import (
    BELOW_ONE,
    FLAG_OR_SHARE,
    NON_NEGATIVE,
    branch,
    one_of,
    read_config,
)
from damex.models.dataset_classifier import (
    DatasetHead,
    annotated_classes,
    class_log_prior,
    class_scores,
    dataset_loss,
    ignore_unannotated,
    router_posterior,
    unannotated_classes,
)
from damex.models.insertion import moe_blocks
from damex.models.queries import ids_of
from damex.moe import RoutingRecord


@dataclass(frozen=True, kw_only=True)
class LabelPriorConfig:
    """The field ``label_prior`` of a detector.

    Attributes:
        source: Predicts the dataset: 'head', or 'router', that of the last encoder MoE.
        floor: Minimum probability of a class; with 0, classes can be excluded entirely.
    """

    source: Annotated[str, one_of("head", "router")] = "head"
    floor: Annotated[float, BELOW_ONE] = 1e-4


@dataclass(frozen=True, kw_only=True)
class DatasetHeadConfig:
    """The field ``dataset_head`` of a detector: the factor of ``loss_dataset``."""

    loss_weight: Annotated[float, NON_NEGATIVE] = 0.1


@dataclass(frozen=True, kw_only=True)
class DatasetAwarenessConfig:
    """Arguments of a detector about the datasets of images; all off by default.

    Attributes:
        ignore_unannotated_classes: What an image teaches of classes that its dataset
            does not annotate. False: no object is one. A probability: no object is
            one, except where the detector finds it with more than that; in every
            detector. True: nothing; they take no part in training on that image.
        label_prior: Adjust class scores at inference.
        dataset_head: Dataset classifier; added automatically if ``label_prior`` needs
            it.
    """

    ignore_unannotated_classes: Annotated[bool | float, FLAG_OR_SHARE] = False
    label_prior: Annotated[
        LabelPriorConfig | None, branch(LabelPriorConfig, "dict(source='head')")
    ] = None
    dataset_head: Annotated[
        DatasetHeadConfig | None, branch(DatasetHeadConfig, "dict(loss_weight=0.1)")
    ] = None

    @property
    def changes_scores(self) -> bool:
        """Whether class scores are changed, or whole classes ignored."""
        others = (self.label_prior, self.dataset_head)
        return self.ignore_unannotated_classes is True or others != (None, None)

    @property
    def head(self) -> DatasetHeadConfig | None:
        """The classifier that is set, or that the prior needs."""
        if self.label_prior is None or self.label_prior.source != "head":
            return self.dataset_head
        return self.dataset_head or DatasetHeadConfig()


class DatasetAwareness(nn.Module):
    """Uses the dataset of an image, with or without experts.

    In training the dataset is known, and classes that it does not annotate can be
    ignored. At inference a posterior over dataset groups takes its place. Class scores
    are changed where DINO selects its queries and at the output of the head, by forward
    hooks that live for one step. Denoising needs no special care: its losses use the
    same outputs, and its flipped labels, perhaps of other datasets, are inputs only.
    """

    annotated_SC: Tensor
    annotated_GC: Tensor

    def __init__(
        self,
        config: DatasetAwarenessConfig,
        coverage: Mapping[str, Any],
        *,
        num_classes: int,
        embed_dims: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.is_told = False  # whether the dataset is given, at inference
        masks = annotated_classes(**coverage, num_classes=num_classes)
        for name, mask in zip(("annotated_SC", "annotated_GC"), masks, strict=True):
            # Derived from the config, so not in checkpoints.
            self.register_buffer(name, mask, persistent=False)
        self.head: DatasetHead | None = None
        if config.head is not None:
            self.head = DatasetHead(embed_dims, len(self.annotated_GC))
        self._clear()

    def _clear(self) -> None:
        """Forget the step; None for adjustments that are not made."""
        self._dataset_ids_B: Tensor | None = None
        self._group_logits_BG: Tensor | None = None
        self._log_prior_BC: Tensor | None = None

    @contextmanager
    def step(self, head: Any, samples: Sequence[Any] | None) -> Iterator[None]:
        """Adjust class scores during one forward pass.

        The last classifier of DINO's ``head`` selects the queries. The samples' dataset
        is read in training only.
        """
        if not self.config.changes_scores:
            yield
            return
        if self.training and self.config.ignore_unannotated_classes is True and samples:
            device = self.annotated_SC.device
            self._dataset_ids_B = ids_of(samples, "dataset_id", device)
        with class_scores([head.cls_branches[-1], head], self.adjust):
            try:
                yield
            finally:
                self._clear()

    def ignored_if_found(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Arguments of :func:`damex.models.detection_losses.ignoring` for a batch."""
        above = self.config.ignore_unannotated_classes
        if isinstance(above, bool):
            return {}
        ids_B = ids_of(samples, "dataset_id", self.annotated_SC.device)
        unannotated_BC = unannotated_classes(ids_B, self.annotated_SC)
        for image, sample in enumerate(samples):
            unannotated_BC[image, sample.get("predicted_labels", [])] = True
        return dict(unannotated_BC=unannotated_BC, above=above)

    def adjust(self, logits: Tensor) -> Tensor:
        """Adjust class scores (..., B, N, C) as set for this step."""
        if self._dataset_ids_B is not None:
            logits = ignore_unannotated(logits, self._dataset_ids_B, self.annotated_SC)
        if self._log_prior_BC is not None:
            logits = logits + self._log_prior_BC.unsqueeze(1)
        return logits

    def predict_datasets(
        self,
        memory_BND: Tensor,
        padding_BN: Tensor | None,
        records: Mapping[str, RoutingRecord],
    ) -> None:
        """Predict the datasets and, at inference, set the prior. True is padding."""
        if self.head is not None:
            self._group_logits_BG = self.head(memory_BND, padding_BN)
        prior = self.config.label_prior
        if prior is not None and not self.training and not self.is_told:
            self._log_prior_BC = self._log_prior(prior, records)

    def _log_prior(
        self, config: LabelPriorConfig, records: Mapping[str, RoutingRecord]
    ) -> Tensor | None:
        """Return the prior of all classes; None in a dense phase (no records)."""
        with torch.autocast(self.annotated_GC.device.type, enabled=False):
            if config.source == "head":
                posterior_BG = self.posterior()
            elif records:
                *_, last = records.values()  # the decoder has not run yet
                posterior_BG = router_posterior(last)
            else:
                return None
            return class_log_prior(posterior_BG, self.annotated_GC, floor=config.floor)

    def posterior(self) -> Tensor:
        """Return the head's probabilities (B, G), detached: only its loss trains it.

        Call it within a step, after :meth:`predict_datasets`.
        """
        assert self._group_logits_BG is not None
        return self._group_logits_BG.detach().softmax(dim=1)

    def losses(self, group_ids_B: Tensor) -> dict[str, Tensor]:
        """Compute ``loss_dataset``, weighted, and ``dataset_accuracy`` in [0, 1].

        Groups are -1 where unknown. Empty without a head.
        """
        logits_BG, config = self._group_logits_BG, self.config.head
        if logits_BG is None or config is None:
            return {}
        loss, accuracy = dataset_loss(logits_BG, group_ids_B)
        return dict(loss_dataset=config.loss_weight * loss, dataset_accuracy=accuracy)


def build_awareness(
    detector: Any, options: Mapping[str, Any], label_coverage: Mapping[str, Any] | None
) -> DatasetAwareness | None:
    """Build the dataset awareness of a detector; None if all options are off.

    Args:
        detector: The detector, experts inserted.
        options: Its arguments named in :class:`DatasetAwarenessConfig`.
        label_coverage: ``labels`` and ``groups`` as in
            :func:`damex.models.dataset_classifier.annotated_classes`; None without a
            mixture.

    Raises:
        ConfigError: If an option is unknown or invalid, or needs a mixture, a DINO with
            sigmoid scores, or a router that a loss teaches the datasets.
    """
    config = read_config(DatasetAwarenessConfig, options, "model")
    if config == DatasetAwarenessConfig():
        return None
    head = detector.bbox_head
    supports = not config.changes_scores or (
        detector.chooses_queries_by_class and head.loss_cls.use_sigmoid
    )
    if label_coverage is None or not supports:
        raise ConfigError(
            "model: ignore_unannotated_classes, label_prior and dataset_head need a "
            "mixture to take the classes of each dataset from and, except for "
            "ignore_unannotated_classes=0.15, a MoEDINO with a sigmoid loss (here "
            f"{type(detector).__name__} "
            f"{'without' if label_coverage is None else 'with'} a mixture); change "
            "model.type and the data, or leave these options out."
        )
    prior = config.label_prior
    if prior is None and config.ignore_unannotated_classes is True:
        text = (
            "model.ignore_unannotated_classes leaves the scores of such classes "
            "untrained, and nothing keeps them from an image at inference; set "
            "model.label_prior=dict(source='head'), unless such objects are in the "
            "images and should be detected there: a prior would hide them."
        )
        print_log(text, logger="current", level=logging.WARNING)
    routers = [b.moe for b in moe_blocks(detector) if b.name.startswith("encoder.")]
    is_trained = any(loss.needs_groups for moe in routers[-1:] for loss in moe.losses)
    if prior is not None and prior.source == "router" and not is_trained:
        raise ConfigError(
            "model.label_prior.source is 'router', but no router of the encoder is "
            "trained to classify datasets; set moe.layers.encoder and a "
            "DatasetRoutingLoss in moe.losses, or source='head'."
        )
    sizes = dict(num_classes=head.num_classes, embed_dims=detector.embed_dims)
    return DatasetAwareness(config, label_coverage, **sizes)
