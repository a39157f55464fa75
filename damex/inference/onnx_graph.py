"""A detector as an ONNX graph, from the pixels of images to boxes in pixels.

What mmdet does before and after the network is in the graph, too: normalisation, the
masks of what lies outside of an image, and the choice of the best answers. Numbers of
images may change from run to run, and what a canvas holds; its size is fixed.

Axes: B images, C classes, D model width, G dataset groups, H and W rows and columns of
the canvas, K answers per image, L levels of features, Q queries, V tokens.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from mmdet.models.detectors import DINO, DeformableDETR
from torch import Tensor, nn
from torch.jit import TracerWarning
from torch.nn import functional

from damex.errors import ConfigError
from damex.inference.onnx_routing import ImageVotes

OPSET = 17  # the first that has both GridSample (16) and LayerNormalization (17)
INPUTS, OUTPUTS = ("images", "sizes"), ("boxes", "scores", "labels")
PROBABILITIES = "datasets"  # the fourth output where experts are in the graph
PACKAGES = ("onnx", "onnxruntime")
DETECTORS = (DINO, DeformableDETR)
# A graph takes images that were loaded and resized, and does the rest by itself.
STEPS = ("LoadImageFromFile", "Resize", "PackDetInputs")


def check_packages() -> None:
    """Refuse to begin without the packages that write and run ONNX.

    Raises:
        ConfigError: If one of them is missing.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a .onnx file needs {' and '.join(missing)}; pip install 'damex[onnx]'."
        )


@dataclass(frozen=True)
class Canvas:
    """How images come to a graph.

    Attributes:
        width: In pixels, of the tensor that each image lies in, at its upper left.
        height: The same.
        keep_ratio: Whether images of the training were resized without distortion.
        is_rgb: Whether the detector wants red first.
    """

    width: int
    height: int
    keep_ratio: bool
    is_rgb: bool

    @classmethod
    def of(
        cls,
        pipeline: Sequence[Mapping[str, Any]],
        preprocessor: Mapping[str, Any],
        size: Sequence[int] | None = None,
    ) -> Canvas:
        """What the evaluation of a training did with images, at one size.

        Args:
            pipeline: Steps from ``LoadImageFromFile`` on.
            preprocessor: Config of mmdet's ``DetDataPreprocessor``.
            size: Width and height; by default those of ``Resize``. Rounded up to what
                the preprocessor pads to.

        Raises:
            ConfigError: If there is no size, or a step that no graph does.
        """
        steps = {step["type"]: step for step in pipeline}
        others = [kind for kind in steps if kind not in STEPS]
        if others:
            raise ConfigError(
                f"the evaluation of the training does {', '.join(others)} with images, "
                f"which a .onnx file cannot; it can follow {', '.join(STEPS)}."
            )
        resize = steps.get("Resize", {})
        size = size or resize.get("scale")
        if not isinstance(size, Sequence):
            raise ConfigError(
                "a .onnx file is made for one size of images, and the evaluation of "
                "the training names none; say --image-size WIDTH HEIGHT."
            )
        divisor = preprocessor.get("pad_size_divisor", 1)
        width, height = (math.ceil(side / divisor) * divisor for side in size)
        is_rgb = pipeline[0].get("channel_order", "bgr") == "rgb"
        if preprocessor.get("bgr_to_rgb") or preprocessor.get("rgb_to_bgr"):
            is_rgb = not is_rgb
        # mmcv's Resize stretches unless it is told otherwise.
        return cls(width, height, resize.get("keep_ratio", not resize), is_rgb)


@dataclass(frozen=True)
class Routing:
    """How the experts of a graph are chosen, and what follows.

    Attributes:
        votes: What its FFNs share.
        labels: For each dataset group the classes to look for in its images.
    """

    votes: ImageVotes
    labels: Sequence[Sequence[int]]


class DetectorGraph(nn.Module):
    """What the graph does: a detector of mmdet without mmdet's data samples.

    Args:
        detector: Ready to predict, on the CPU.
        canvas: How images come.
        routing: Where its FFNs are experts; None for a dense one.

    Raises:
        ConfigError: If it is no detector that a graph can be made of.
    """

    mean_311: Tensor
    std_311: Tensor
    foreign_GC: Tensor

    def __init__(
        self, detector: Any, canvas: Canvas, routing: Routing | None = None
    ) -> None:
        super().__init__()
        if type(detector) not in DETECTORS:
            names = " and ".join(kind.__name__ for kind in DETECTORS)
            raise ConfigError(
                f"the detector is a {type(detector).__name__}; as ONNX {names} can be "
                "written. With --dataset NAME and --out FILE.pth it can be exported "
                "for mmdet."
            )
        if not detector.bbox_head.loss_cls.use_sigmoid:
            raise ConfigError(
                "the detector's classes exclude each other (a softmax); as ONNX those "
                "with a sigmoid can be written."
            )
        self.detector, self.canvas, self.routing = detector, canvas, routing
        self.answers: int = detector.test_cfg.get("max_per_img", detector.num_queries)
        mean, std = self.normalization()
        self.register_buffer("mean_311", torch.tensor(mean)[:, None, None])
        self.register_buffer("std_311", torch.tensor(std)[:, None, None])
        groups = routing.labels if routing else []
        foreign_GC = torch.ones(
            len(groups), detector.bbox_head.num_classes, dtype=torch.bool
        )
        for foreign_C, labels in zip(foreign_GC, groups, strict=True):
            foreign_C[labels] = False
        self.register_buffer("foreign_GC", foreign_GC)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what :meth:`forward` returns."""
        return OUTPUTS if self.routing is None else (*OUTPUTS, PROBABILITIES)

    def normalization(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of red, green and blue."""
        of = self.detector.data_preprocessor
        if not of._enable_normalize:
            return [0.0] * 3, [1.0] * 3
        order = 1 if self.canvas.is_rgb else -1
        # One number stands for all channels.
        mean_3, std_3 = (tensor.flatten().expand(3) for tensor in (of.mean, of.std))
        return mean_3.tolist()[::order], std_3.tolist()[::order]

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """Detect objects.

        Args:
            images: Canvases, each with an image at its upper left, uint8 in RGB
                (B, 3, H, W). What lies outside of the image makes no difference.
            sizes: Height and width of each image in pixels, (B, 2).

        Returns:
            Boxes as x1, y1, x2, y2 in pixels (B, K, 4), scores (B, K) and labels
            (B, K), best first. With experts the classes are those of the dataset group
            that an image looks like, and the probabilities of the groups (B, G) follow.
        """
        height, width = self.canvas.height, self.canvas.width
        below_BH1 = torch.arange(height)[None, :, None] >= sizes[:, :1, None]
        beside_B1W = torch.arange(width)[None, None] >= sizes[:, 1:, None]
        outside_BHW = below_BH1 | beside_B1W
        pixels = (images.float() - self.mean_311) / self.std_311
        pixels = pixels if self.canvas.is_rgb else pixels.flip(1)
        padding = float(self.detector.data_preprocessor.pad_value)
        pixels = pixels.masked_fill(outside_BHW[:, None], padding)
        maps = self.detector.extract_feat(pixels)
        if self.routing is None:
            logits_BQC, boxes_BQ4 = self._transform(maps, outside_BHW)
            return self._best(logits_BQC, boxes_BQ4, sizes)
        self.routing.votes.begin()
        logits_BQC, boxes_BQ4 = self._transform(maps, outside_BHW)
        probabilities_BG = self.routing.votes.probabilities()
        foreign_BC = self.foreign_GC[probabilities_BG.argmax(1)]
        logits_BQC = logits_BQC.masked_fill(foreign_BC[:, None], -torch.inf)
        return *self._best(logits_BQC, boxes_BQ4, sizes), probabilities_BG

    def _transform(
        self, maps: Sequence[Tensor], outside_BHW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Transformer and head: logits (B, Q, C), and boxes in shares of the image.

        Stands for ``pre_transformer`` of mmdet's DeformableDETR, which makes its masks
        of numbers where a graph has tensors.
        """
        detector = self.detector
        sizes = [(int(one.shape[-2]), int(one.shape[-1])) for one in maps]
        lengths = [height * width for height, width in sizes]
        starts = [sum(lengths[:level]) for level in range(len(lengths))]
        masks = [
            functional.interpolate(outside_BHW[:, None].float(), size=size)[:, 0].bool()
            for size in sizes
        ]
        positions = [
            _tokens(detector.positional_encoding(mask)) + embedding_D
            for mask, embedding_D in zip(masks, detector.level_embed, strict=True)
        ]
        mask_BV = torch.cat([mask.flatten(1) for mask in masks], 1)
        levels = dict(
            spatial_shapes=torch.tensor(sizes),
            level_start_index=torch.tensor(starts),
            valid_ratios=torch.stack([*map(detector.get_valid_ratio, masks)], 1),
        )
        self._set_real_tokens(~mask_BV[..., None])
        encoded = detector.forward_encoder(
            feat=torch.cat([*map(_tokens, maps)], 1),
            feat_mask=mask_BV,
            feat_pos=torch.cat(positions, 1),
            **levels,
        )
        inputs, _ = detector.pre_decoder(**encoded)
        self._set_real_tokens(None)  # all queries are
        decoded = detector.forward_decoder(**inputs, memory_mask=mask_BV, **levels)
        logits_LBQC, boxes_LBQ4 = detector.bbox_head(**decoded)
        return logits_LBQC[-1], boxes_LBQ4[-1]

    def _set_real_tokens(self, real_BV1: Tensor | None) -> None:
        """Say which tokens vote on the experts from here on."""
        if self.routing is not None:
            self.routing.votes.real_BN1 = real_BV1

    def _best(
        self, logits_BQC: Tensor, boxes_BQ4: Tensor, sizes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best answers of each image, as mmdet's DETRHead chooses them."""
        num_classes = logits_BQC.shape[-1]
        scores_BK, places_BK = logits_BQC.sigmoid().flatten(1).topk(self.answers)
        queries_BK = places_BK // num_classes
        chosen_BK4 = boxes_BQ4.gather(1, queries_BK[..., None].expand(-1, -1, 4))
        center, size = chosen_BK4.split(2, -1)
        corners_BK4 = torch.cat([center - size / 2, center + size / 2], -1)
        limits_B14 = sizes.flip(1).repeat(1, 2)[:, None].to(corners_BK4.dtype)
        boxes_BK4 = corners_BK4.clamp(0.0, 1.0) * limits_B14
        return boxes_BK4, scores_BK, places_BK % num_classes


def _tokens(map_BDHW: Tensor) -> Tensor:
    """The places of a map as a sequence, (B, V, D)."""
    return map_BDHW.flatten(2).transpose(1, 2)


def to_onnx(graph: DetectorGraph, about: Mapping[str, Any]) -> bytes:
    """Write a graph down as ONNX, with what one has to know to use it.

    Args:
        graph: In evaluation.
        about: More for the model's ``metadata_props``, beside ``image_size`` (width,
            height), ``keep_ratio``, ``mean`` and ``std``; written as JSON.

    Returns:
        Content of a file.

    Raises:
        ConfigError: If ONNX has no name for what the detector computes.
    """
    import onnx

    mean, std = graph.normalization()
    canvas = graph.canvas
    size = (canvas.width, canvas.height)
    known = dict(image_size=size, keep_ratio=canvas.keep_ratio, mean=mean, std=std)
    model = onnx.load_from_string(_traced(graph))
    for output in model.graph.output:  # the trace does not say how many answers
        if output.name in OUTPUTS:
            output.type.tensor_type.shape.dim[1].dim_value = graph.answers
    onnx.helper.set_model_props(
        model, {key: json.dumps(value) for key, value in {**known, **about}.items()}
    )
    onnx.checker.check_model(model)
    return model.SerializeToString()


def _traced(graph: DetectorGraph) -> bytes:
    """What torch's exporter makes of a graph.

    mmdet reads the sizes of its maps out of tensors, ``for height, width in
    spatial_shapes``. They are constants of a canvas, and a trace writes them down as
    such; torch's other exporter (``dynamo=True``) refuses them, as it does not know
    what is in a tensor.

    Raises:
        ConfigError: If ONNX has no name for what the detector computes.
    """
    canvas = graph.canvas
    file: Any = io.BytesIO()  # which torch takes, but does not declare
    images = torch.zeros(2, 3, canvas.height, canvas.width, dtype=torch.uint8)
    sizes = torch.tensor([[canvas.height, canvas.width]] * 2)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", TracerWarning)  # of the sizes of maps
        warnings.simplefilter("ignore", DeprecationWarning)  # of this exporter
        warnings.filterwarnings("ignore", module="torch.onnx")
        try:
            torch.onnx.export(
                graph,
                (images, sizes),
                file,
                input_names=INPUTS,
                output_names=graph.outputs,
                dynamic_axes={n: {0: "batch"} for n in (*INPUTS, *graph.outputs)},
                opset_version=OPSET,
                dynamo=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"the detector cannot be written as ONNX (opset {OPSET}): {reason}"
            ) from error
    return file.getvalue()
