"""Transformers detectors that mmdet trains, evaluates and runs like its own.

Axes: L layers, B images, Q queries, R queries of all images, C classes, K boxes of an
image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from threading import RLock
from typing import Any, cast

import torch
from mmdet.models.dense_heads import DeformableDETRHead
from mmdet.models.detectors import BaseDetector
from mmdet.registry import MODELS
from mmdet.structures.bbox import bbox_xyxy_to_cxcywh
from mmdet.utils import reduce_mean
from mmengine.dist import get_world_size
from torch import Tensor, nn

from damex.errors import ConfigError, DataError
from damex.hf.adapters import insert_adapters
from damex.hf.families import (
    FAMILIES,
    PREFIX,
    backbone_of,
    build_model,
    read_config,
)
from damex.models.build import module_class
from damex.models.config import MoEConfig
from damex.models.dataset_classifier import class_scores
from damex.models.detection_losses import IGNORED_LOGIT
from damex.models.detectors import RoutedDetector
from damex.models.insertion import InsertionReport
from damex.models.queries import check_cells, relative_boxes
from damex.models.timm_backbone import TimmBackbone

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


class TransformersDetector(BaseDetector):
    """A detector of Hugging Face's Transformers, with mmdet's contract.

    Model, loss, matching and denoising are Transformers' own. The losses are returned
    one by one, weighted, so that their sum is Transformers' loss. The model takes no
    padding mask: show it letterboxed images of one size.

    Ignored boxes (crowds) are not objects; a query in one, if no object is matched to
    it, is not taught that its class is absent, as in damex's other detectors.

    Args:
        config: ``model_type`` and the arguments of the Transformers config, see
            :func:`damex.hf.families.build_model`.
        name: A folder, or a name on the hub, to read the config from in place of
            ``config``. The weights come with ``load_from="hf://NAME"``; a config file
            with ``name`` sets it.
        backbone: A :class:`damex.models.timm_backbone.TimmBackbone`, in the place of
            ``config["backbone_config"]``.
        bbox_head: ``num_classes``, filled in from the mixture.
        test_cfg: ``max_per_img``, by default the number of queries.
        data_preprocessor: Scales pixels to [0, 1], if ``backbone`` asks for nothing
            else; ``pad_size_divisor`` must be a multiple of the coarsest stride.
        init_cfg: None; Transformers draws the weights.

    Raises:
        ConfigError: If Transformers is missing, the family is not supported, or an
            argument is wrong.
    """

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
        backbone: Mapping[str, Any] | None = None,
        bbox_head: Mapping[str, Any] | None = None,
        test_cfg: Mapping[str, Any] | None = None,
        data_preprocessor: Mapping[str, Any] | None = None,
        init_cfg: Any = None,
    ) -> None:
        super().__init__(cast(Any, data_preprocessor), cast(Any, init_cfg))
        num_classes = (bbox_head or {}).get("num_classes")
        if num_classes is None or (config is None) == (name is None):
            raise ConfigError(
                "a Transformers detector needs model.bbox_head.num_classes, which a "
                "mixture sets, and one of model.config=dict(model_type=...) and "
                f"model.name=FOLDER, got num_classes={num_classes} and name={name!r}."
            )
        timm = None if backbone is None else _timm_backbone(backbone)
        self.detr = build_model(config or read_config(str(name)), num_classes, timm)
        self.bbox_head = TransformersHead(num_classes, test_cfg or {})
        self.layout = FAMILIES[self.detr.config.model_type]
        self.bbox_head.cls_branches = (*self.layout.class_heads(self.detr),)
        self.num_queries: int = self.detr.config.num_queries  # that make detections
        self.embed_dims: int = self.detr.config.d_model
        self.strides = self.layout.strides(self.detr.config)
        self.windows = getattr(self.detr.config.backbone_config, "num_windows", 1)
        self._check(data_preprocessor or {}, test_cfg or {})

    def _check(
        self, preprocessor: Mapping[str, Any], test_cfg: Mapping[str, Any]
    ) -> None:
        divisor, windows = preprocessor.get("pad_size_divisor", 1), self.windows
        if divisor % (windows * self.strides[-1]):
            raise ConfigError(
                f"model.data_preprocessor.pad_size_divisor is {divisor}, but the "
                f"feature maps have strides up to {self.strides[-1]}, and {windows} "
                f"windows; set a multiple of {windows * self.strides[-1]}."
            )
        most = self.num_queries * self.bbox_head.num_classes
        if test_cfg.get("max_per_img", 0) > most:
            raise ConfigError(
                f"model.config.num_queries={self.num_queries} can make {most} "
                "detections per image, but model.test_cfg.max_per_img="
                f"{test_cfg['max_per_img']} asks for more; set one of them."
            )

    @property
    def backbone(self) -> nn.Module:
        """The backbone of the model."""
        return backbone_of(self.detr)

    def init_weights(self) -> None:
        """Load the weights of a backbone of timm; Transformers drew the others."""
        for module in self.modules():
            if isinstance(module, TimmBackbone):
                module.init_weights()
        self._is_init = True

    def extract_feat(self, batch_inputs: Tensor) -> Any:
        """Not available: the parts of the model run together."""
        raise NotImplementedError("a Transformers detector runs as a whole.")

    def loss(self, batch_inputs: Tensor, batch_data_samples: list) -> dict:
        """Compute Transformers' losses, whose sum is its loss."""
        shape = batch_inputs.shape[-2:]
        labels = [_labels_of(sample, shape) for sample in batch_data_samples]
        ratio_B4 = _image_ratio(batch_data_samples, batch_inputs)
        self._check_cells(batch_inputs)
        num_boxes = sum(len(one["boxes"]) for one in labels)
        share = 1.0
        if not self.layout.counts_all_boxes:  # mean over all processes by that of this
            mean = reduce_mean(batch_inputs.new_tensor(float(num_boxes))).item()
            share = max(mean, 1 / get_world_size()) / max(num_boxes, 1)
        criterion = resolve_name(self.layout.criterion)
        with adjusted_losses(criterion, self.bbox_head, ratio_B4, share):
            found = self.detr(pixel_values=batch_inputs, labels=labels)
        losses = self.layout.weighted(found.loss_dict, self.detr.config)
        unused = getattr(self.detr.model, "denoising_class_embed", None)
        if unused is not None and num_boxes == 0:
            first = next(iter(losses))  # DDP needs a gradient of each parameter
            losses[first] = losses[first] + 0.0 * unused.weight.sum()
        return losses

    def predict(
        self, batch_inputs: Tensor, batch_data_samples: list, rescale: bool = True
    ) -> list:
        """Predict detections, the best of all queries and classes."""
        # Not its _forward, in which a routed detector opens a step of its own.
        outputs = TransformersDetector._forward(self, batch_inputs, batch_data_samples)
        metas = [sample.metainfo for sample in batch_data_samples]
        found = self.bbox_head.predict_by_feat(
            *outputs, batch_img_metas=metas, rescale=rescale
        )
        return self.add_pred_to_datasample(batch_data_samples, found)

    def _forward(
        self, batch_inputs: Tensor, batch_data_samples: list | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits (1, B, Q, C) and boxes (1, B, Q, 4) of the last layer.

        Without samples, boxes are relative to the padded input.
        """
        self._check_cells(batch_inputs)
        found = self.detr(pixel_values=batch_inputs)
        boxes_BQ4 = found.pred_boxes
        if batch_data_samples:
            ratio_B4 = _image_ratio(batch_data_samples, batch_inputs)
            boxes_BQ4 = boxes_BQ4 / ratio_B4.unsqueeze(1)
        return self.bbox_head(found.logits.unsqueeze(0), boxes_BQ4.unsqueeze(0))

    def _check_cells(self, images: Tensor) -> None:
        height, width = images.shape[-2:]
        if self.windows > 1 and height != width:
            raise DataError(
                f"it is padded to {width} x {height} pixels, and the windows of "
                "this backbone need squares; put dict(type='Pad', size=(SIDE, SIDE)) "
                "behind Resize in all pipelines."
            )
        cells = sum(-(-height // one) * -(-width // one) for one in self.strides)
        check_cells(cells, self.num_queries)


@MODELS.register_module()
class MoETransformersDetector(RoutedDetector, TransformersDetector):
    """A detector of Hugging Face's Transformers with experts parallel to its FFNs.

    Of the options of dataset awareness it takes ``ignore_unannotated_classes``.
    """

    chooses_queries_by_class = True
    class_rows = tuple(
        f"detr.{name}." for one in FAMILIES.values() for name in one.class_rows
    )

    def __init__(self, **kwargs: Any) -> None:
        for key in ("label_prior", "dataset_head", "image_balance"):
            if kwargs.get(key) not in (None, 0):
                raise ConfigError(
                    f"model.{key} is not available in a MoETransformersDetector; leave "
                    "it out."
                )
        super().__init__(**kwargs)

    @classmethod
    def complete(cls, cfg: Any) -> None:
        """Replace ``model.name`` by the ``model.config`` that it leads to.

        Its weights become ``load_from``, if that names no others.
        """
        model = cfg["model"]
        name = model.pop("name", None)
        if name is not None:
            model["config"] = read_config(name)
            if cfg.get("load_from") is None and not cfg.get("resume"):
                cfg["load_from"] = f"{PREFIX}{name}"

    def _insert(self, moe: MoEConfig, num_groups: int | None) -> InsertionReport:
        """Insert experts, and return the report."""
        return insert_adapters(
            self.layout.sites(self.detr),
            moe,
            context=self.routing,
            num_groups=num_groups,
            counted=self.layout.counted(self.detr.config),
            windows=self.windows**2,
        )

    @contextmanager
    def _step(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Open a routing step; in a training, classes may be ignored in all layers."""
        with ExitStack() as stack:
            stack.enter_context(super()._step(*args, **kwargs))
            if self.awareness is not None and self.training:
                layers = self.bbox_head.cls_branches[:-1]
                stack.enter_context(class_scores(layers, self.awareness.adjust))
            yield


def _timm_backbone(config: Mapping[str, Any]) -> TimmBackbone:
    if module_class(config) is not TimmBackbone:
        raise ConfigError(
            f"model.backbone is {config.get('type')!r}; a MoETransformersDetector "
            "takes a TimmBackbone there, and its own in model.config.backbone_config."
        )
    return MODELS.build(config)


def _image_ratio(samples: Sequence[Any], images: Tensor) -> Tensor:
    """Sides of each image as shares (B, 4) of those of the padded input."""
    sides = [sample.metainfo["img_shape"][1::-1] for sample in samples]
    height, width = images.shape[-2:]
    size_4 = images.new_tensor([width, height] * 2)
    return images.new_tensor([[*side, *side] for side in sides]) / size_4


def _labels_of(sample: Any, shape: Sequence[int]) -> dict[str, Tensor]:
    """Objects of an image as Transformers takes them; ``shape`` is of the batch."""
    truth = sample.gt_instances
    boxes_K4 = relative_boxes(truth.bboxes, shape)
    return dict(class_labels=truth.labels, boxes=bbox_xyxy_to_cxcywh(boxes_K4))
