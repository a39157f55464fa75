"""Plain detectors of Transformers, from a mixture of experts: of one dataset, or all.

Axes: B images, C classes, D channels, G dataset groups, H hidden units of an FFN, U new
ones, L rank, Q queries.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex import __version__
from damex.datasets.label_space import LabelSpace
from damex.errors import ConfigError
from damex.hf.detector import TransformersDetector
from damex.hf.families import plain_config
from damex.hf.folder import ADAPTERS, Adapters, image_processor, probes, write_folder
from damex.inference.stored import DetectorCheckpoint
from damex.moe import LinearRouter, LowRankExperts
from damex.workbench.export.dense_experts import (
    linear_map,
    linear_units,
    voted_detector,
)
from damex.workbench.export.onnx_graph import DetectorGraph
from damex.workbench.export.specialist import clamp_max_per_img, of_classes
from damex.workbench.export.symbolic_sizes import size_tensor

KEPT = ("config", "backbone", "test_cfg", "data_preprocessor")  # of the model's config
OPEN = 32.0  # silu(32) is 32, exactly, also in float16


@dataclass(frozen=True)
class PlainTransformers:
    """A detector of one dataset's or all classes, for Transformers without damex."""

    classes: tuple[str, ...]
    model: Mapping[str, Any]
    pipeline: Sequence[Mapping[str, Any]]
    state: Mapping[str, Tensor]
    adapters: Adapters | None = None  # experts of all datasets, not in the detector
    library = "Transformers"

    @property
    def needs(self) -> str:
        """What a user has to do, as part of a sentence."""
        return f"; its experts are in {ADAPTERS[1]}" if self.adapters else ""

    def build(self) -> TransformersDetector:
        """Build the detector on the CPU, in eval mode."""
        detector = TransformersDetector(**copy.deepcopy(dict(self.model)))
        detector.load_state_dict(dict(self.state))
        return detector.eval()

    def write(self, folder: Path) -> Path:
        """Write a folder for ``from_pretrained``; see `damex.hf.folder`."""
        if "backbone" in self.model:
            raise ConfigError(
                "Transformers cannot read a model whose backbone is a TimmBackbone of "
                "damex; export a .onnx file."
            )
        detector = self.build()
        write_folder(
            folder,
            detector,
            classes=self.classes,
            processor=image_processor(detector, self.pipeline),
            adapters=self.adapters,
        )
        return folder


def extract_plain(stored: DetectorCheckpoint, dataset: str) -> PlainTransformers:
    """Extract the plain detector that equals a mixture of experts given its dataset.

    From a detector without experts, only classes are removed. ConfigError if the
    dataset is unknown, or no plain detector is equal.
    """
    number = stored.space.dataset_id(dataset)
    labels = stored.space.valid_labels(number)
    detector: Any = stored.build()
    model = _kept(stored)
    model["bbox_head"] = dict(num_classes=len(labels))
    clamp_max_per_img(model, detector, len(labels))
    config, ffns = _without_experts(detector, stored.space.group_id(number))
    values = config.to_dict()
    if "backbone" in model:  # of timm
        del values["backbone_config"]
    model["config"] = plain_config(values)
    plain = TransformersDetector(**copy.deepcopy(model)).state_dict()
    state = {**detector.state_dict(), **ffns}
    state = of_classes(state, plain, labels, detector.bbox_head)
    classes = tuple(stored.space.classes[label] for label in labels)
    return PlainTransformers(classes, model, stored.pipeline, state)


def extract_shared(stored: DetectorCheckpoint) -> PlainTransformers:
    """Extract the shared detector with all classes, and the experts separately.

    ConfigError if the tokens of an image do not vote for one dataset, or experts and
    routers are not linear maps.
    """
    detector: Any = stored.build()
    model = _kept(stored) | dict(bbox_head=dict(num_classes=stored.space.num_classes))
    state = {k: v for k, v in detector.state_dict().items() if ".adapter." not in k}
    adapters = None if stored.model.get("moe") is None else _adapters(stored, detector)
    classes = (*stored.space.classes,)
    return PlainTransformers(classes, model, stored.pipeline, state, adapters)


def _kept(stored: DetectorCheckpoint) -> dict[str, Any]:
    """Return what a plain detector takes of a model's config."""
    return copy.deepcopy({k: stored.model[k] for k in KEPT if k in stored.model})


def _adapters(stored: DetectorCheckpoint, detector: Any) -> Adapters:
    """Describe the experts of all layers and datasets, and return their tensors."""
    space, labels = stored.space, stored.space.labels_by_group()
    detector, _ = voted_detector(detector, labels, stored.path)
    model, layout = detector.detr, detector.layout
    names = {module: name for name, module in model.named_modules()}
    layers, tensors = [], dict[str, Tensor]()
    for site in chain(*layout.sites(model).values()):
        if hasattr(site, "adapter"):
            name, found = names[site.mlp], _linear_experts(site.adapter, space)
            tensors |= {f"{name}.{key}": tensor for key, tensor in found.items()}
            rank = site.adapter.moe.bank.rank
            known = dict(name=name, kind="low-rank", rank=rank, router="linear")
            layers.append(known | dict(windows=site.adapter.windows))
    groups = zip(space.group_names, labels, strict=True)
    about = dict(
        format=1,
        damex=__version__,
        groups=[dict(name=name, labels=of) for name, of in groups],
        datasets={
            name: dict(group=space.group_id(n), labels=[*space.valid_labels(n)])
            for n, name in enumerate(space.dataset_names)
        },
        class_heads=[names[head] for head in layout.class_heads(model)],
        layers=layers,
    )
    return about, tensors


def _linear_experts(adapter: Any, space: LabelSpace) -> dict[str, Tensor]:
    """Return the maps of each dataset group, named as in LoRA, and the router's."""
    voted = adapter.moe
    bank, router, expert_G = voted.bank, voted.router, voted.expert_G.tolist()
    kinds = type(bank), type(router)
    if kinds != (LowRankExperts, LinearRouter) or len({*expert_G}) < bank.num_experts:
        raise ConfigError(
            f"in {adapter.name}, there are {bank.num_experts} {kinds[0].__name__} for "
            f"{len(expert_G)} datasets and a {kinds[1].__name__}; files of adapters "
            "hold LowRankExperts, one for each dataset, and a LinearRouter. Export a "
            ".onnx file, or one --dataset."
        )
    found = {"router.weight": router.weight_ED[expert_G]}
    if router.bias_E is not None:
        found["router.bias"] = router.bias_E[expert_G]
    for name, expert in zip(space.group_names, expert_G, strict=True):
        found[f"{name}.lora_A.weight"] = bank.down_EDL[expert].t()
        found[f"{name}.lora_B.weight"] = bank.up_ELD[expert].t() * voted.weight
    return found


def _without_experts(detector: Any, group: int) -> tuple[Any, dict[str, Tensor]]:
    """The model's config with wider FFNs, and tensors of FFNs that hold experts.

    All layers of encoder and decoder, also those without experts, have one width each.
    """
    model, layout = detector.detr, detector.layout
    names = {module: name for name, module in detector.named_modules()}
    config, state = copy.deepcopy(model.config), dict[str, Tensor]()
    for part, sites in layout.sites(model).items():
        if not sites:
            continue
        activation = layout.activation(config, part)
        layers = [one for one in model.modules() if isinstance(one, type(sites[0]))]
        units = [_units(layer, group, activation) for layer in layers]
        *hidden, last = _linears(sites[0].mlp).values()
        most = last.in_features + max(columns.shape[1] for _, columns in units)
        most = layout.widen(config, part, most, gates=len(hidden))
        for layer, one in zip(layers, units, strict=True):
            ffn = _widened(layer.mlp, *one, most)
            state |= {f"{names[layer.mlp]}.{key}": value for key, value in ffn.items()}
    return config, state


Rows = Sequence[tuple[Tensor, float]]  # weights (U, D) and bias


def _units(layer: Any, group: int, activation: str) -> tuple[Rows, Tensor]:
    """Hidden units that equal a layer's experts: rows and columns (D, U) of its FFN."""
    *hidden, last = _linears(layer.mlp).values()
    adapter = getattr(layer, "adapter", None)
    if adapter is None:
        return [(one.weight[:0], 0.0) for one in hidden], last.weight[:, :0]
    if len(hidden) == 1:
        rows_UD, columns_DU = linear_units(adapter, group, activation=activation)
        return [(rows_UD, 0.0)], columns_DU
    # DEIMv2's silu(gate) * up: gates that stay open are a linear map.
    down_LD, up_DL = linear_map(adapter, group)
    return [(torch.zeros_like(down_LD), OPEN), (down_LD, 0.0)], up_DL / OPEN


def _widened(mlp: Any, rows: Rows, columns_DU: Tensor, most: int) -> dict[str, Tensor]:
    """State dict of an FFN with ``most`` units; the unused ones add nothing."""
    *hidden, (last, linear) = _linears(mlp).items()
    weight_DH = torch.cat([linear.weight, columns_DU], dim=1)
    blank = most - weight_DH.shape[1]
    found = {
        f"{last}.weight": functional.pad(weight_DH, (0, blank)),
        f"{last}.bias": linear.bias,
    }
    for (name, linear), (rows_UD, bias) in zip(hidden, rows, strict=True):
        weight_HD = torch.cat([linear.weight, rows_UD])
        bias_H = torch.cat([linear.bias, linear.bias.new_full([len(rows_UD)], bias)])
        found[f"{name}.weight"] = functional.pad(weight_HD, (0, 0, 0, blank))
        found[f"{name}.bias"] = functional.pad(bias_H, (0, blank))
    return {key: value.detach() for key, value in found.items()}


def _linears(mlp: nn.Module) -> dict[str, nn.Linear]:
    return {n: one for n, one in mlp.named_modules() if isinstance(one, nn.Linear)}


class TransformersGraph(DetectorGraph):
    """Exportable forward of a plain detector of Transformers, as a whole.

    ConfigError if images do not get one canvas, or files were not equal in tests.
    """

    def _adopt(self) -> None:
        if self.votes and self.detector.detr.config.model_type == "deformable_detr":
            raise ConfigError(
                "in a test, a whole Deformable DETR as ONNX found other detections "
                "than damex; export one --dataset, or to a folder."
            )
        _, shown_P3HW = probes(self.detector, self.pipeline)
        _fix_places(self.detector.detr, *shown_P3HW.shape[2:])

    def _transform(
        self, pixels_B3HW: Tensor, size: Sequence[int], padded: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        model = self.detector.detr
        with _symbolic_batch(sys.modules[type(model).__module__]):
            found = model(pixel_values=pixels_B3HW)
        share_2 = (size_tensor(size) / size_tensor(padded)).float()
        return found.logits, found.pred_boxes / share_2.flip(0).repeat(2)


@torch.no_grad()
def _fix_places(model: nn.Module, height: int, width: int) -> None:
    """Interpolate the places of patches once; ONNX runtimes would do it otherwise."""
    for module in model.modules():
        if hasattr(module, "interpolate_pos_encoding"):
            of: Any = module
            patches = (height // of.patch_size) * (width // of.patch_size)
            blank = torch.empty(1, 1 + patches, of.position_embeddings.shape[-1])
            places = of.interpolate_pos_encoding(blank, height, width)
            of.interpolate_pos_encoding = lambda *_, places=places: places


@contextmanager
def _symbolic_batch(module: Any) -> Iterator[None]:
    """Let a module of Transformers take any number of images.

    ``len`` of a tensor would fix it, and ONNX has no assertion for another.
    """
    before = dict(torch_compilable_check=module.torch_compilable_check)
    vars(module).update(len=_length, torch_compilable_check=lambda *_, **__: None)
    try:
        yield
    finally:
        vars(module).update(before)
        del module.len  # which hid the builtin


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) else len(value)
