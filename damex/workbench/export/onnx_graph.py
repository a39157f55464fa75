"""A detector as an ONNX graph, from the pixels of an image file to boxes in its pixels.

The graph resizes, normalizes and pads images of any size as `damex predict` does.

Axes: B images, C classes, D model width, G dataset groups, H and W rows and columns of
an image, K detections per image, L feature levels, Q queries, V tokens.
"""

from __future__ import annotations

import json
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np
import torch
from mmdet.models.detectors import DINO, DeformableDETR
from packaging.version import Version
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from damex.errors import ConfigError
from damex.workbench.export.dense_experts import ImageVotes
from damex.workbench.export.symbolic_sizes import UnitLinspace, size_tensor, unroll

OPSET = 18  # in which torch's exporter writes; others are converted
INPUT, OUTPUTS = "images", ("boxes", "scores", "labels")
PROBABILITIES = "datasets"  # fourth output, if the graph has experts
# As in pyproject.toml. torch 2.6 cannot export sizes that depend on the image.
PACKAGES = dict(onnx="1.17", onnxruntime="1.20", onnxscript="0.7", torch="2.9")
_ONE_EXPORT = Lock()  # it silences the log of the whole process
# Pipeline steps that a graph supports, in their order.
STEPS = ("LoadImageFromFile", "Resize", "Pad", "PackDetInputs")


def check_packages() -> None:
    """Raise a ConfigError if a package that writes or runs ONNX is missing or old."""
    for name, oldest in PACKAGES.items():
        found = import_module(name).__version__ if find_spec(name) else None
        # Without what marks builds before a release, as those of GPU vendors do.
        if found is None or Version(found).release < Version(oldest).release:
            raise ConfigError(
                f"a .onnx file needs {name} {oldest} or newer, and "
                f"{'it is not installed' if found is None else f'this is {found}'}; "
                "pip install 'damex[onnx]'."
            )


def check_steps(pipeline: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ConfigError if a graph cannot follow a test pipeline."""
    kinds = [step["type"] for step in pipeline]
    if kinds != [kind for kind in STEPS if kind in kinds] or "Resize" not in kinds:
        raise ConfigError(
            f"the evaluation of the training applies {', '.join(kinds)} to images, "
            f"which a .onnx file cannot; it can follow {', '.join(STEPS)}, in this "
            "order, with or without Pad."
        )
    steps = {step["type"]: step for step in pipeline}
    if "scale" not in steps["Resize"]:
        raise ConfigError(
            "a .onnx file resizes images to one size, which the evaluation of the "
            "training does not: its Resize has no scale=(width, height)."
        )
    pad = steps.get("Pad", {})
    if pad.get("padding_mode", "constant") != "constant" or np.ndim(_value_of(pad)):
        raise ConfigError(
            f"a .onnx file pads with one number, and the evaluation by {dict(pad)}; "
            "export a .pth with --dataset NAME."
        )


class DetectorGraph(nn.Module):
    """Exportable forward of an mmdet detector, without mmdet's data samples.

    ConfigError if the detector cannot be expressed as a graph.

    Args:
        detector: In eval mode, on the CPU. Some layers are replaced in place.
        pipeline: Test pipeline that passes `check_steps`.
        votes: Shared by its `VotedLayer`; None for a dense detector.
    """

    foreign_GC: Tensor

    def __init__(
        self,
        detector: Any,
        pipeline: Sequence[Mapping[str, Any]],
        votes: ImageVotes | None = None,
    ) -> None:
        super().__init__()
        self.detector, self.pipeline, self.votes = detector, pipeline, votes
        self._adopt()
        most = detector.num_queries
        self.max_per_img: int = detector.bbox_head.test_cfg.get("max_per_img", most)
        steps = {step["type"]: step for step in pipeline}
        scale = steps["Resize"]["scale"]
        self.scale = (scale, scale) if isinstance(scale, int) else tuple(scale)
        # mmcv's Resize stretches images by default.
        self.keep_ratio: bool = steps["Resize"].get("keep_ratio", False)
        self.border: Mapping[str, Any] = steps.get("Pad", {})
        groups = votes.labels if votes else []
        shape = len(groups), detector.bbox_head.num_classes
        foreign_GC = torch.ones(shape, dtype=torch.bool)
        for foreign_C, labels in zip(foreign_GC, groups, strict=True):
            foreign_C[labels] = False
        self.register_buffer("foreign_GC", foreign_GC)
        self.outputs = OUTPUTS if votes is None else (*OUTPUTS, PROBABILITIES)

    def _adopt(self) -> None:
        """Replace layers in place; ConfigError if the detector is not supported."""
        detector = self.detector
        if type(detector) not in (DINO, DeformableDETR):
            raise ConfigError(
                f"the detector is a {type(detector).__name__}; as ONNX DINO and "
                "DeformableDETR can be written. For mmdet: --dataset NAME --out F.pth."
            )
        if not detector.bbox_head.loss_cls.use_sigmoid:
            raise ConfigError(
                "the detector's classes exclude each other (a softmax); as ONNX those "
                "with a sigmoid can be written."
            )
        unroll(detector)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Detect objects in images of one size, uint8 in RGB (B, H, W, 3).

        Returns:
            Boxes as x1, y1, x2, y2 in pixels (B, K, 4), scores (B, K) and labels (B,
            K), best first. With experts, only classes of the predicted dataset group
            are detected, and the group probabilities (B, G) follow.
        """
        pixels_B3HW, image, padded, file_2 = self.prepare(images)
        if self.votes is not None:
            self.votes.begin()
        logits_BQC, boxes_BQ4 = self._transform(pixels_B3HW, image, padded)
        if self.votes is None:
            return self._best(logits_BQC, boxes_BQ4, file_2, images)
        probabilities_BG = self.votes.probabilities()
        foreign_BC = self.foreign_GC[self.votes.elected()]
        logits_BQC = logits_BQC.masked_fill(foreign_BC[:, None], -torch.inf)
        return *self._best(logits_BQC, boxes_BQ4, file_2, images), probabilities_BG

    def prepare(
        self, images: Tensor
    ) -> tuple[Tensor, Sequence[int], Sequence[int], Tensor]:
        """Resize, pad and normalize images as mmdet's test pipeline does.

        Returns:
            Pixels for the backbone (B, 3, H, W), height and width of the images in it,
            its own, and those of the file that the images cover (2,).
        """
        file_2 = size_tensor(images.shape[1:3])
        size = self._new_size(file_2)
        pixels_B3HW = resized(images, size)
        image = self._with_border(size)  # mmcv's Pad makes the border image
        pixels_B3HW = _padded(pixels_B3HW, image, _value_of(self.border))
        file_2 = (file_2 * size_tensor(image) / size_tensor(size)).float()
        of = self.detector.data_preprocessor
        if not of._channel_conversion:  # mmcv loads blue first
            pixels_B3HW = pixels_B3HW.flip(1)
        if of._enable_normalize:
            pixels_B3HW = (pixels_B3HW - of.mean) / of.std
        padded = [_whole(side, of.pad_size_divisor) for side in image]
        return _padded(pixels_B3HW, padded, of.pad_value), image, padded, file_2

    def _new_size(self, file_2: Tensor) -> Sequence[int]:
        """Height and width after mmcv's Resize."""
        if not self.keep_ratio:
            return self.scale[::-1]
        limits_2 = size_tensor(sorted(self.scale))
        sides_2 = torch.stack([file_2.min(), file_2.max()])
        size = (file_2 * (limits_2 / sides_2).min() + 0.5).long().tolist()
        for side in size:
            torch._check(side >= 1)
            torch._check(side <= max(self.scale))
        return size

    def _with_border(self, size: Sequence[int]) -> Sequence[int]:
        """Height and width after mmcv's Pad."""
        if self.border.get("pad_to_square"):
            largest: Any = torch.sym_max(*size)
            size = [largest, largest]  # mmcv then rounds up to size_divisor
        divisor, least = self.border.get("size_divisor"), self.border.get("size")
        if divisor is not None:
            return [_whole(side, divisor) for side in size]
        if least is not None:
            return [*map(_at_least, size, least[::-1])]
        return size

    def _transform(
        self, pixels_B3HW: Tensor, size: Sequence[int], padded: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, Q, C) and relative boxes; replaces mmdet's ``pre_transformer``."""
        detector = self.detector
        maps = detector.extract_feat(pixels_B3HW)
        shapes = [one.shape[2:] for one in maps]
        masks = [_mask(shape, size, padded) for shape in shapes]
        positions = [
            _tokens(detector.positional_encoding(mask_1HW)) + embedding_D
            for mask_1HW, embedding_D in zip(masks, detector.level_embed, strict=True)
        ]
        mask_BV = torch.cat([mask_1HW.flatten(1) for mask_1HW in masks], 1)
        mask_BV = mask_BV.expand(maps[0].shape[0], -1)
        levels = dict(
            spatial_shapes=shapes,
            level_start_index=None,  # for GPUs
            valid_ratios=torch.stack([*map(detector.get_valid_ratio, masks)], 1),
        )
        if self.votes is not None:
            self.votes.real_BN1 = ~mask_BV[..., None]
        encoded = detector.forward_encoder(
            feat=torch.cat([*map(_tokens, maps)], 1),
            feat_mask=mask_BV,
            feat_pos=torch.cat(positions, 1),
            **levels,
        )
        inputs, _ = detector.pre_decoder(**encoded)
        if self.votes is not None:
            self.votes.real_BN1 = None  # all queries are real
        # Not by DINO.forward_decoder, whose len(query) fixes the number of images.
        head, first_BQ = detector.bbox_head, inputs["reference_points"]
        inputs["self_attn_mask"] = inputs.pop("dn_mask", None)
        states_LBQD, references = detector.decoder(
            value=inputs.pop("memory"),
            key_padding_mask=mask_BV,
            reg_branches=head.reg_branches if detector.with_box_refine else None,
            **inputs,
            **levels,
        )
        if not isinstance(detector, DINO):
            references = [first_BQ, *references]
        logits_LBQC, boxes_LBQ4 = head(states_LBQD, references)
        return logits_LBQC[-1], boxes_LBQ4[-1]

    def _best(
        self, logits_BQC: Tensor, boxes_BQ4: Tensor, file_2: Tensor, images: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Top detections, selected like mmdet's DETRHead; boxes end at the images."""
        num_classes = logits_BQC.shape[-1]
        scores_BK, places_BK = logits_BQC.sigmoid().flatten(1).topk(self.max_per_img)
        queries_BK = places_BK // num_classes
        chosen_BK4 = boxes_BQ4.gather(1, queries_BK[..., None].expand(-1, -1, 4))
        center, size = chosen_BK4.split(2, -1)
        corners_BK4 = torch.cat([center - size / 2, center + size / 2], -1)
        boxes_BK4 = corners_BK4.clamp(0.0, 1.0) * file_2.flip(0).repeat(2)
        ends_2 = size_tensor(images.shape[1:3]).flip(0).float()
        boxes_BK4 = torch.minimum(boxes_BK4, ends_2.repeat(2))
        return boxes_BK4, scores_BK, places_BK % num_classes


def _at_least(side: int, least: int) -> Any:
    """The larger side: a constant if ``least`` is the canvas of all images."""
    return least if statically_known_true(side <= least) else torch.sym_max(side, least)


def _whole(side: int, divisor: int) -> int:
    """Round up to a multiple: a constant if ``divisor`` is the canvas of all images."""
    if statically_known_true(side <= divisor):
        return divisor
    return (side + divisor - 1) // divisor * divisor


def _value_of(pad: Mapping[str, Any]) -> Any:
    """What mmcv's Pad puts into the border of images."""
    value = pad.get("pad_val", 0)
    return value.get("img", 0) if isinstance(value, Mapping) else value


def _padded(pixels_B3HW: Tensor, size: Sequence[int], value: float) -> Tensor:
    """Pad images at the bottom and right."""
    below, right = map(operator.sub, size, pixels_B3HW.shape[2:])
    return functional.pad(pixels_B3HW, (0, right, 0, below), value=float(value))


def _tokens(map_BDHW: Tensor) -> Tensor:
    """Flatten a feature map to tokens (B, V, D)."""
    return map_BDHW.flatten(2).transpose(1, 2)


def _mask(shape: Sequence[int], size: Sequence[int], padded: Sequence[int]) -> Tensor:
    """Padding mask of a feature map, (1, H, W), interpolated like mmdet's."""
    steps_2 = (size_tensor(padded) / size_tensor(shape)).float()
    below_H, right_W = (
        (torch.arange(places) * step).floor() >= side
        for places, step, side in zip(shape, steps_2, size, strict=True)
    )
    return (below_H[:, None] | right_W)[None]


def resized(images: Tensor, size: Sequence[int]) -> Tensor:
    """Resize uint8 images (B, H, W, 3) exactly as OpenCV: bilinear, 11-bit weights.

    ``size`` is height and width. Returns integer values (B, 3, H, W).
    """
    (rows_2H, vertical_2H), ((left_W, right_W), horizontal_2W) = map(
        _neighbors, images.shape[1:3], size
    )
    lines = images[:, rows_2H]  # the upper and the lower one of each new row
    left, right = (
        lines[:, :, :, side_W].permute(0, 4, 1, 2, 3).float()
        for side_W in (left_W, right_W)
    )
    across = left * horizontal_2W[0] + right * horizontal_2W[1]  # (B, 3, 2, H, W)
    across = (across * 2.0**-4).floor().double()
    both = (across * (vertical_2H.double() * 2.0**-16)[..., None]).floor().sum(2)
    return ((both + 2.0) * 2.0**-2).floor().float()


def _neighbors(old: int, new: int) -> tuple[Tensor, Tensor]:
    """Both source positions of each new one along a side, and their weights of 2048."""
    old_1, new_1 = size_tensor([old, new])
    place = ((torch.arange(new).double() + 0.5) * (old_1 / new_1) - 0.5).float()
    first = place.floor()
    share = place - first
    both_2N = torch.stack([first, first + 1]).long().clamp(0, old - 1)
    weights_2N = torch.stack([1 - share, share]) * 2048
    return both_2N, weights_2N.round()


def to_onnx(graph: DetectorGraph, about: Mapping[str, Any]) -> bytes:
    """Serialize a graph in eval mode to ONNX.

    The metadata holds ``image_size`` (width, height), ``keep_ratio`` and ``about`` as
    JSON. ConfigError if ONNX lacks an operator of the detector.
    """
    import onnx

    known = dict(image_size=graph.scale, keep_ratio=graph.keep_ratio)
    try:
        with _ONE_EXPORT, _silence(), torch.no_grad():
            model = _exported(graph)
    except Exception as error:  # modules run with symbols as sizes; any may fail
        reason = _root(error)
        if "k not in range" in reason:  # fewer tokens than queries
            width, height = graph.scale
            reason += f" with {width} x {height} pixels; try a larger --image-size."
        raise ConfigError(
            f"the detector cannot be written as ONNX (opset {OPSET}, torch "
            f"{torch.__version__}): {reason}"
        ) from error
    for node in model.graph.node:
        del node.metadata_props[:]  # lines of code, with paths of this machine
    props = {key: json.dumps(value) for key, value in {**known, **about}.items()}
    onnx.helper.set_model_props(model, props)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def _exported(graph: DetectorGraph) -> Any:
    """Return a graph as an ``onnx.ModelProto``, for images of any number and size."""
    from onnxscript import optimizer

    width, height = graph.scale  # plus 1: equal sides could become one symbol
    free = dict.fromkeys(range(3), torch.export.Dim.DYNAMIC)
    with UnitLinspace():
        program = torch.export.export(
            graph,
            (torch.zeros(2, height, width + 1, 3, dtype=torch.uint8),),
            dynamic_shapes=(free,),
            strict=False,
        )
    made: Any = torch.onnx.export(
        program,
        input_names=(INPUT,),
        output_names=graph.outputs,
        dynamic_shapes=({0: "batch", 1: "height", 2: "width"},),
        opset_version=OPSET,
        dynamo=True,
        optimize=False,
        verbose=False,
    )
    # What a runtime cannot do itself. onnxscript's rewriting takes as long again, gains
    # nothing, and loses a constant of a Deformable DETR that refines boxes.
    optimizer.inline(made.model)
    optimizer.fold_constants(made.model)
    optimizer.remove_unused_nodes(made.model)
    optimizer.remove_unused_functions(made.model)
    return made.model_proto


@contextmanager
def _silence() -> Iterator[None]:
    """Hide what torch and onnxscript report about their own work, in all threads."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # errors are raised, too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _root(error: BaseException) -> str:
    """First line of the first cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
