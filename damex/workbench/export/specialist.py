"""Specialist: a dense mmdet detector of one dataset, from a mixture of experts."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmcv.cnn.bricks.transformer import FFN
from mmdet.registry import MODELS, TRANSFORMS
from mmengine.config import ConfigDict
from torch import Tensor, nn

from damex.config_files import PlainConfig
from damex.engine.config import DATASET_OPTIONS
from damex.errors import ConfigError
from damex.inference.stored import DetectorCheckpoint, write_checkpoint
from damex.models.blocks import MoEFFN
from damex.models.detectors import mmdet_class
from damex.models.queries import selects_by_first_class
from damex.models.sites import COMPONENTS
from damex.models.timm_backbone import TimmBackbone
from damex.workbench.export.dense_experts import dense_ffn, pad_hidden, reject

OF_DAMEX = ("moe", "num_groups", "label_coverage", "image_balance", *DATASET_OPTIONS)
PACKAGES = ("mmdet", "mmcv", "mmengine", "torch", "timm")  # of an exported detector
TIMM = "timm.create_model"  # mmengine imports and calls a type with a dot


@dataclass(frozen=True)
class Specialist:
    """A detector of one dataset's classes that mmdet runs without damex."""

    classes: tuple[str, ...]
    config: PlainConfig
    state: Mapping[str, Tensor]
    library = "mmdet"

    @property
    def needs(self) -> str:
        """Requirements other than mmdet, as part of a sentence."""
        return " (with timm)" if self.config.model.backbone.type == TIMM else ""

    def build(self) -> Any:
        """Build the mmdet detector on the CPU, in eval mode."""
        detector = MODELS.build(ConfigDict(copy.deepcopy(self.config.model)))
        detector.load_state_dict(dict(self.state))
        return detector.eval()

    def write(self, path: Path) -> Path:
        """Write the checkpoint and its config, and return the path of the config."""
        write_checkpoint(
            path,
            self.state,
            config=self.config.pretty_text,
            dataset_meta=dict(classes=self.classes),
        )
        return path.with_suffix(".py")


def extract(stored: DetectorCheckpoint, dataset: str) -> Specialist:
    """Extract a dense detector that equals a mixture of experts given its dataset.

    From a dense detector, only classes are removed. ConfigError if the dataset is
    unknown, or no mmdet detector is equal.
    """
    number = stored.space.dataset_id(dataset)
    labels = stored.space.valid_labels(number)
    detector = stored.build()
    awareness = detector.awareness
    problems = {
        "a Transformers model": not hasattr(detector, "encoder"),
        "label_prior": awareness is not None and awareness.config.label_prior,
        "as_two_stage (queries selected by class 0)": selects_by_first_class(detector),
    }
    reject(detector, stored.path, problems, "which no dense detector of mmdet has")
    state = _without_experts(detector, stored.space.group_id(number))
    model = _plain_model(stored.model, detector, len(labels), state)
    plain = MODELS.build(ConfigDict(copy.deepcopy(model)))
    _check_types(plain, stored.pipeline)
    state = of_classes(state, plain.state_dict(), labels, detector.bbox_head)
    plain.load_state_dict(state)
    classes = tuple(stored.space.classes[label] for label in labels)
    return Specialist(classes, _whole_config(model, stored.pipeline, classes), state)


def _without_experts(detector: Any, group: int) -> dict[str, Tensor]:
    """State dict with an FFN in place of each mixture of experts."""
    state = detector.state_dict()
    state = {k: v for k, v in state.items() if not k.startswith("awareness.")}
    for part in COMPONENTS:
        for name, ffn in _ffns(detector, part, group).items():
            old = (f"{name}.moe.", f"{name}.dense_phase.", f"{name}.layers.")
            state = {k: v for k, v in state.items() if not k.startswith(old)}
            state |= {f"{name}.layers.{k}": v.clone() for k, v in ffn.items()}
    if isinstance(detector.backbone, TimmBackbone):
        state = {
            re.sub(r"^backbone\.net\.", "backbone.", k): v for k, v in state.items()
        }
    return state


def _ffns(detector: Any, part: str, group: int) -> dict[str, dict[str, Tensor]]:
    """FFN tensors by FFN name, all as wide as the widest (mmdet's layers are alike)."""
    modules = dict(getattr(detector, part).named_modules(prefix=part))
    if not any(isinstance(module, MoEFFN) for module in modules.values()):
        return {}
    found = {}
    for name, module in modules.items():
        if isinstance(module, MoEFFN):
            found[name] = dense_ffn(module, group)
        elif isinstance(module, FFN):
            found[name] = module.layers.state_dict()
    most = max(ffn["0.0.bias"].shape[0] for ffn in found.values())
    return {name: pad_hidden(ffn, most) for name, ffn in found.items()}


def _plain_model(
    model: Mapping[str, Any],
    detector: Any,
    num_classes: int,
    state: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Config of the mmdet detector that the damex detector extends."""
    plain = copy.deepcopy({k: v for k, v in model.items() if k not in OF_DAMEX})
    plain["type"] = mmdet_class(detector).__name__
    for part in COMPONENTS:
        plain.get(part, {}).pop("num_cp", None)  # saves memory in training only
        bias = state.get(f"{part}.layers.0.ffn.layers.0.0.bias")
        if bias is not None:  # merged FFNs are wider
            ffn = plain[part]["layer_cfg"].setdefault("ffn_cfg", {})
            ffn["feedforward_channels"] = bias.shape[0]
    if isinstance(detector.backbone, TimmBackbone):
        divisor = detector.data_preprocessor.pad_size_divisor
        plain["backbone"] = plain_backbone(detector.backbone, divisor)
    else:
        plain["backbone"].pop("init_cfg", None)  # the checkpoint has the weights
    plain["bbox_head"]["num_classes"] = num_classes
    clamp_max_per_img(plain, detector, num_classes)
    return plain


def clamp_max_per_img(model: dict[str, Any], detector: Any, num_classes: int) -> None:
    """Lower ``max_per_img`` of a model config, in place, to what fewer classes allow.

    ``detector`` has all classes; ``num_classes`` remain.
    """
    most = detector.num_queries
    if detector.bbox_head.loss_cls.use_sigmoid:  # one detection per query and class
        most *= num_classes
    settings = model.setdefault("test_cfg", {})
    if settings.get("max_per_img", detector.num_queries) > most:
        settings["max_per_img"] = most


@torch.no_grad()
def plain_backbone(backbone: TimmBackbone, divisor: int) -> dict[str, Any]:
    """Config of timm's network that returns the same features as a TimmBackbone.

    A TimmBackbone pads images to whole strides; so does a data preprocessor whose
    ``pad_size_divisor`` (``divisor``) is a multiple of them. ConfigError if the
    features would differ.
    """
    step = max(32, *backbone.reductions)
    if divisor % step:
        raise ConfigError(
            f"the detector's TimmBackbone pads images to multiples of {step}, unlike "
            f"backbones of mmdet; train with data_preprocessor.pad_size_divisor={step} "
            f"instead of {divisor} to export it."
        )
    config = dict(
        type=TIMM,
        model_name=backbone.name,
        features_only=True,
        pretrained=False,
        out_indices=backbone.out_indices,
        **backbone.options,
    )
    noise = torch.rand(1, 3, step, 2 * step, generator=torch.Generator().manual_seed(0))
    try:
        plain = MODELS.build(dict(config)).eval()
        plain.load_state_dict(backbone.net.state_dict())
        is_equal = all(
            one.shape == other.shape and torch.allclose(one, other, atol=1e-4)
            for one, other in zip(backbone(noise), plain(noise), strict=True)
        )
    except (AssertionError, RuntimeError, TypeError, ValueError):
        is_equal = False  # e.g. fixed input size
    if not is_equal:
        raise ConfigError(
            f"the detector's TimmBackbone {backbone.name!r} needs damex: timm's "
            "network alone does not give the same maps. Convolutional networks "
            "(EfficientNet, ConvNeXt, ResNet) can be exported."
        )
    return config


def _check_types(detector: nn.Module, pipeline: Sequence[Mapping[str, Any]]) -> None:
    """Reject parts that mmdet alone cannot build."""
    kinds = {type(module) for module in detector.modules()}
    # The first step loads: damex's loader is registered in the place of mmcv's.
    kinds |= {TRANSFORMS.get(step["type"]) for step in pipeline[1:]}
    for kind in kinds:
        if kind.__module__.split(".")[0] not in PACKAGES:
            raise ConfigError(
                f"the detector has a {kind.__name__} of {kind.__module__}, which mmdet "
                "alone cannot build; it cannot be exported."
            )


def of_classes(
    state: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    labels: Sequence[int],
    head: Any,
) -> dict[str, Tensor]:
    """State dict reduced to rows of ``labels`` where shapes differ from ``plain``."""
    found = {}
    for key, target in plain.items():
        tensor = state[key]
        if tensor.shape != target.shape:
            # With softmax, the background is the last row.
            rows = [*labels, *range(head.num_classes, tensor.shape[0])]
            tensor = tensor[rows].clone()
        found[key] = tensor
    return found


def _whole_config(
    model: Mapping[str, Any], pipeline: Sequence[Any], classes: Sequence[str]
) -> PlainConfig:
    """Config for mmdet's ``init_detector`` and ``DetInferencer``."""
    meta, backends = dict(classes=tuple(classes)), [dict(type="LocalVisBackend")]
    dataset = dict(type="CocoDataset", metainfo=meta, pipeline=pipeline)
    draw = dict(type="DetLocalVisualizer", vis_backends=backends, name="visualizer")
    loader = dict(batch_size=1, num_workers=0, dataset=dataset)
    config = dict(default_scope="mmdet", model=dict(model), test_dataloader=loader)
    return PlainConfig(dict(**config, visualizer=draw))
