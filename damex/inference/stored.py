"""Contents of a checkpoint: config, classes, weights, and preprocessing of images."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from mmdet.registry import MODELS
from mmengine.config import Config, ConfigDict
from mmengine.dataset import Compose, pseudo_collate
from mmengine.evaluator import Evaluator
from mmengine.logging import print_log
from mmengine.registry import init_default_scope
from mmengine.runner import CheckpointLoader, Runner
from PIL import Image
from torch import Tensor

import damex.registry  # noqa: F401  (first: it keeps mmdet silent)
from damex.config_files import import_modules
from damex.datasets.coco_records import read_coco
from damex.datasets.geometry import set_image_size
from damex.datasets.label_space import LabelSpace
from damex.datasets.pixels import Pixels, to_8_bits
from damex.datasets.spec import parse_mixture
from damex.engine.checkpoint import check_finite, check_tensors
from damex.engine.summary import class_scores, scores_of, summarise
from damex.errors import ConfigError, DataError, did_you_mean, printable
from damex.evaluation import MAX_DETS, MixtureMetric
from damex.files import atomic_write, write_text
from damex.inference.literal_config import read_literals
from damex.inference.media import fault_of, frames_of, is_video
from damex.inference.trust import check_parts, forget_pretrained
from damex.models.detectors import RoutedDetector
from damex.progress import Bar

Picture = str | os.PathLike | np.ndarray | Image.Image
# Pipeline steps that need annotations.
ANNOTATION_STEPS = ("LoadAnnotations", "FilterAnnotations", "LoadEmptyAnnotations")
NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class StoredDetector:
    """A checkpoint of a training on a mixture of datasets.

    Attributes:
        path: Path or URL of the checkpoint.
        config: The whole config as plain values; build only what `checked` returns.
        model: Config of the detector.
        pipeline: Test pipeline without annotations.
        meta: Metadata of the checkpoint, such as ``epoch``.
        trust: Whether the user trusts the checkpoint: everything in it may be built.
        forgotten: Places in the config of initial weights that were left out.
    """

    path: str
    config: dict[str, Any]
    model: dict[str, Any]
    pipeline: list[dict[str, Any]]
    space: LabelSpace
    state: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    trust: bool = False
    forgotten: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str, *, trust: bool = False) -> StoredDetector:
        """Read a checkpoint (a file or URL) as data, without running code from it.

        With ``trust``, its ``custom_imports`` are imported, and all classes allowed.

        Raises:
            DataError: If it cannot be read, holds more than data, or needs ``trust``.
            ConfigError: If it is not of a training on a mixture of datasets.
        """
        checkpoint = CheckpointLoader.load_checkpoint(path, "cpu")
        meta = checkpoint.get("meta") or {}
        state = checkpoint.get("state_dict")
        if not isinstance(state, Mapping) or not isinstance(meta.get("cfg"), str):
            raise ConfigError(
                f"the checkpoint {path} holds no config to build its detector from; "
                "use one that a training with damex wrote."
            )
        if "datasets" not in (meta.get("dataset_meta") or {}):
            raise ConfigError(
                f"the checkpoint {path} is of a training without a mixture and lists "
                "no datasets with their classes; use mmdet's own tools."
            )
        config = read_literals(meta["cfg"], where=path)
        model = config.get("model")
        if not isinstance(model, dict):
            raise DataError(f"the config in {path} has no model.")
        disable_expert_parallel(model)
        pipeline = _test_pipeline(config, path)
        forgotten: tuple[str, ...] = ()
        if trust:
            _import_modules(config, path)
        else:
            forgotten = (*forget_pretrained(model, keep_published=True),)
            check_parts(dict(model=model, pipeline=pipeline), where=path)
        _check_names([*state], path)
        check_finite(state, path=path)
        space = LabelSpace.from_metainfo(meta["dataset_meta"])
        _check_names(_names_of(space), path)
        return cls(path, config, model, pipeline, space, state, meta, trust, forgotten)

    def checked(self, key: str) -> Any:
        """A copy of a part of the config, which can be built.

        Raises:
            DataError: If the user does not trust it, and it is not in the allow-list.
        """
        part = copy.deepcopy(self.config.get(key))
        if not self.trust:
            check_parts({key: part}, where=self.path)
        return part

    @property
    def mixture(self) -> list[dict[str, Any]]:
        """The checked ``mixture`` entries of the config; empty if it has none."""
        entries = self.checked("mixture")
        return entries if isinstance(entries, list) else []

    def build(self, device: str = "cpu") -> RoutedDetector:
        """Build the detector with its weights, in eval mode.

        Raises:
            ConfigError: If it is not damex's, its weights do not fit, or the device is
                missing.
        """
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:  # not compiled in; missing
            reason = str(error).splitlines()[0].partition(". ")[0]
            others = " or cuda:0" * torch.cuda.is_available()
            raise ConfigError(
                f"--device {device}: {reason}; use cpu{others}."
            ) from error
        init_default_scope("mmdet")
        kind = MODELS.get(self.model.get("type", ""))
        if not isinstance(kind, type) or not issubclass(kind, RoutedDetector):
            raise ConfigError(
                f"the checkpoint {self.path} is of a {self.model.get('type')!r}, which "
                "is not a detector of damex; use mmdet's DetInferencer."
            )
        detector = MODELS.build(ConfigDict(copy.deepcopy(self.model)))
        check_tensors(self.state, detector, path=self.path)
        detector.load_state_dict(dict(self.state))
        detector.eval()
        return detector.to(device)

    def evaluate(
        self,
        detector: RoutedDetector,
        loader: Mapping[str, Any],
        *,
        label: str,
        classwise: bool = False,
    ) -> dict[str, Any]:
        """Evaluate a detector on a dataloader config; scores as in ``summary.json``.

        The config must have been checked. `label` stands before the progress bar.
        """
        images = Runner.build_dataloader(ConfigDict(loader))
        metric = self.config.get("val_evaluator")
        known = metric if isinstance(metric, dict) else {}
        most = known.get("max_dets", MAX_DETS)
        evaluator = Evaluator(MixtureMetric(classwise=classwise, max_dets=most))
        evaluator.dataset_meta = self.space.to_metainfo()
        with Bar() as bar, torch.inference_mode():
            bar.begin(label, len(images))
            for batch in images:
                evaluator.process(detector.test_step(batch), batch)
                bar.step()
        scores = scores_of(evaluator.evaluate(len(images.dataset)))
        return {**summarise(scores), **class_scores(scores, self.space)}

    def resized(self, size: tuple[int, int]) -> StoredDetector:
        """The same for images of another size (width, height) in pixels.

        Raises:
            ConfigError: If it is no size, or the test pipeline does not resize.
        """
        model, pipeline = copy.deepcopy((self.model, self.pipeline))
        loader = dict(dataset=dict(pipeline=pipeline))
        set_image_size(dict(image_size=size, model=model, test_dataloader=loader))
        return replace(self, model=model, pipeline=pipeline)

    def dataset_id(self, name: str) -> int:
        """Index of a dataset; ConfigError if it is unknown."""
        if name not in self.space.dataset_names:
            raise ConfigError(
                f"the checkpoint {self.path} knows no dataset {name!r}; "
                f"{did_you_mean(name, self.space.dataset_names)}"
            )
        return self.space.dataset_id(name)

    def validation_images(self, name: str, *, count: int) -> list[Path]:
        """Sample ``count`` validation images of a dataset, evenly over its COCO file.

        Paths of the config are relative to the working directory.

        Raises:
            ConfigError: If its entry does not name a COCO file.
            DataError: If the file, or all of its images, are missing.
        """
        try:
            specs = {spec.name: spec for spec in parse_mixture(self.mixture)}
        except ConfigError:
            specs = {}
        source = specs[name].coco_source("val") if name in specs else None
        if source is None:
            raise ConfigError("the checkpoint names no COCO file; see --images.")
        images = read_coco(source.annotations, name)["images"]
        paths = [source.images / str(image.get("file_name")) for image in images]
        found = [path for path in paths if path.is_file()]
        if not found:
            raise DataError(f"none of them are in {source.images}.")
        step = max(len(found) / count, 1.0)
        return [found[int(i * step)] for i in range(min(count, len(found)))]


class Inputs:
    """Test pipeline of a training for images; starts with ``LoadImageFromFile``."""

    def __init__(self, pipeline: Sequence[Mapping[str, Any]]) -> None:
        load, *rest = pipeline
        self._load, self._prepare = Compose([load]), Compose(rest)
        self._is_depth_said = False

    def each(self, image: Picture) -> Iterator[dict[str, Any]]:
        """Preprocess an image, or all frames of a video."""
        if isinstance(image, str | os.PathLike) and is_video(Path(image)):
            for number, bgr in enumerate(frames_of(Path(image))):
                yield self._prepared(_loaded(bgr, path=str(image), number=number))
        else:
            yield self(image)

    def __call__(self, image: Picture) -> dict[str, Any]:
        """Preprocess one image into mmdet's ``inputs`` and ``data_samples``.

        ``pixels`` is the loaded image, in BGR; `detect` leaves it out.

        Raises:
            DataError: If it cannot be read, or the pipeline rejects it.
        """
        if not isinstance(image, str | os.PathLike):
            rgb, levels = _checked(image)
            bgr = np.ascontiguousarray(rgb[..., ::-1])
            array = _loaded(bgr, path=None, number=0)
            return self._prepared(array | dict(levels=levels))
        fault = fault_of(Path(image))
        try:
            loaded = None if fault else self._load(dict(img_path=str(image), img_id=0))
        except Exception:  # readers raise anything
            loaded = None
        if loaded is None:
            raise DataError(f"{image} {fault or 'is not an image that can be read'}.")
        return self._prepared(loaded)

    def _prepared(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """Apply the rest of the pipeline."""
        if (levels := loaded.pop("levels", None)) is not None:
            self._say_depth(loaded["img_path"] or "an image", levels)
        pixels, (height, width) = loaded["img"], loaded["img_shape"][:2]
        try:
            return dict(self._prepare(loaded), pixels=pixels)
        except Exception as error:  # steps raise anything
            reason = error.err if isinstance(error, cv2.error) else error
            raise DataError(
                f"{loaded['img_path'] or 'the array'} ({width} x {height} px) cannot "
                f"be resized as in the training ({reason}); crop or pad it."
            ) from error

    def _say_depth(self, name: str, levels: Sequence[float]) -> None:
        """Say once how values of more than 8 bits are shown to the detector."""
        if not self._is_depth_said:
            text = (
                f"{name} has more than 8 bits per channel: the range of its values, "
                "{:g} to {:g}, is shown to the detector as 0 to 255, as in training; "
                "the same holds for other such images."
            )
            text = printable(text.format(*levels))
            print_log(text, logger="current", level=logging.WARNING)
        self._is_depth_said = True


def as_several(images: Picture | Iterable[Picture]) -> Iterable[Picture]:
    """One image as a list of one; several images as they are."""
    one: Any = images
    is_one = isinstance(images, Picture | bytes) or hasattr(images, "shape")
    return [one] if is_one or not isinstance(images, Iterable) else images


def _checked(image: Any) -> Pixels:
    """Pixels of an array or PIL image, uint8 (height, width, 3) in RGB."""
    found = type(image).__name__
    if isinstance(image, Image.Image):
        return _pixels_of(image)
    if isinstance(image, np.ndarray):
        is_rgb = image.ndim == 3 and image.shape[2] == 3
        if image.dtype == np.uint8 and is_rgb and image.size > 0:
            return Pixels(image)
        found = f"{image.dtype} of shape {image.shape}"
    raise DataError(
        "an image must be a path, a PIL image, or a uint8 array (height, width, 3) in "
        f"RGB, got {found}."
    )


def _pixels_of(image: Image.Image) -> Pixels:
    """Pixels of a PIL image in RGB as they are: EXIF is not applied."""
    try:
        if image.mode[0] in "IF":  # more than 8 bits, which convert would cut off
            values, levels = to_8_bits(np.asarray(image))
            return Pixels(np.stack([values] * 3, axis=2), levels)
        return Pixels(np.asarray(image.convert("RGB")))
    except Exception as error:  # Pillow decodes late, and its readers raise anything
        raise DataError(f"the PIL image cannot be decoded ({error}).") from error


def as_rgb(pixels: np.ndarray) -> np.ndarray:
    """Output of ``LoadImageFromFile``, also gray or of floats, as uint8 RGB."""
    pixels_HWC = np.atleast_3d(pixels).clip(0, 255).astype(np.uint8)
    if pixels_HWC.shape[2] < 3:
        pixels_HWC = pixels_HWC[..., :1].repeat(3, 2)
    return pixels_HWC[..., 2::-1]


def _loaded(bgr: np.ndarray, *, path: str | None, number: int) -> dict[str, Any]:
    """Pixels in the output format of ``LoadImageFromFile``."""
    size = bgr.shape[:2]
    return dict(img=bgr, img_path=path, img_id=number, img_shape=size, ori_shape=size)


@torch.inference_mode()
def detect(detector: Any, batch: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Run a detector on outputs of `Inputs`; returns mmdet's data samples."""
    keys = ("inputs", "data_samples")
    images = [{key: one[key] for key in keys} for one in batch]
    return detector.test_step(pseudo_collate(images))


def millions(state: Mapping[str, Tensor]) -> str:
    """Number of parameters in millions; statistics of batch norms are none."""
    kept = [v.numel() for key, v in state.items() if not key.endswith(NORM_STATISTICS)]
    return f"{sum(kept) / 1e6:.2f}"


def _import_modules(config: Mapping[str, Any], path: str) -> None:
    """Import the ``custom_imports`` of a trusted config."""
    try:
        import_modules(Config(dict(custom_imports=config.get("custom_imports"))))
    except ImportError as error:
        raise ConfigError(
            f"custom_imports of the checkpoint {path} cannot be imported ({error}); "
            "set PYTHONPATH to the folder of the module."
        ) from error


def _check_names(names: Iterable[str], path: str) -> None:
    """Reject names that a terminal would not show as they are."""
    for name in names:
        if printable(str(name)) != str(name):
            raise DataError(
                f"the checkpoint {path} has the name {name!r:.80}, whose characters "
                "control a terminal; it was not used."
            )


def _names_of(space: LabelSpace) -> Iterator[str]:
    yield from (*space.classes, *space.dataset_names, *space.groups)
    for classes in space.dataset_classes:
        yield from classes


def disable_expert_parallel(model: Mapping[str, Any]) -> None:
    """Set a model config, in place, to hold all experts in one process."""
    if isinstance(model.get("moe"), dict):
        model["moe"].pop("expert_parallel", None)


def _test_pipeline(config: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Test pipeline without the steps that need annotations."""
    loader = config.get("test_dataloader") or config.get("val_dataloader") or {}
    steps = (loader.get("dataset") or {}).get("pipeline") or config.get("test_pipeline")
    steps = [dict(step) for step in steps or () if isinstance(step, dict)]
    kept = [step for step in steps if step.get("type") not in ANNOTATION_STEPS]
    if not kept or kept[0].get("type") != "LoadImageFromFile":
        raise DataError(
            f"the config in {path} has no test pipeline that begins with "
            "LoadImageFromFile."
        )
    for key in ("backend_args", "file_client_args"):
        kept[0].pop(key, None)  # files are local
    return kept


def check_target(
    path: Path, *, suffixes: Sequence[str] = (".pth",), with_config: bool = True
) -> None:
    """Raise a ConfigError if the suffix is wrong, or a file (or config) exists."""
    if path.suffix not in suffixes:
        raise ConfigError(f"--out must end in {' or '.join(suffixes)}, got {path}.")
    for file in (path, path.with_suffix(".py")):
        if file.exists() and (with_config or file == path):
            raise ConfigError(f"{file} exists; remove it, or name another --out.")


def write_checkpoint(
    path: Path,
    state: Mapping[str, Tensor],
    *,
    config: str,
    with_config: bool = True,
    **meta: Any,
) -> None:
    """Write a checkpoint and its config, each completely or not at all.

    ``meta`` is further metadata of the checkpoint, such as ``dataset_meta``.
    """
    content = dict(meta=dict(cfg=config, **meta), state_dict=dict(state))
    with atomic_write(path) as part:
        with part.open("wb") as file:
            torch.save(content, file)
        if with_config:
            write_text(path.with_suffix(".py"), config)
