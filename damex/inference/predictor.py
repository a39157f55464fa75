"""Predictor: detections from a checkpoint alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dataset import pseudo_collate
from mmengine.device import get_device

from damex.datasets.label_space import LabelSpace
from damex.errors import DataError, check_number, check_sizes
from damex.inference.images import Inputs, Picture, is_video
from damex.inference.stored import StoredDetector
from damex.models.told_dataset import can_tell_datasets, told_dataset


@dataclass(frozen=True)
class Prediction:
    """What was found in one image, best first.

    Attributes:
        path: The image or video file; None for an array.
        width: Of the image in pixels.
        height: The same.
        boxes: (n, 4) as x1, y1, x2, y2 in pixels of the image.
        scores: (n,) in [0, 1].
        labels: (n,) numbers of classes, as in ``Predictor.classes``.
        names: The n names of these classes.
        dataset: The dataset whose classes were looked for; None for all classes.
        probabilities: How probable the detector takes each dataset of its training to
            be, as it looks at the image; they add up to 1. Datasets that share experts
            are one, by the name of their group. Empty where the detector cannot tell,
            or was told.
        frame: Of a video, from 0; None for an image.
    """

    path: Path | None
    width: int
    height: int
    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]
    dataset: str | None
    probabilities: Mapping[str, float]
    frame: int | None = None

    @property
    def likeness(self) -> float | None:
        """Probability of the most probable dataset; None where there is none."""
        return max(self.probabilities.values(), default=None)


@dataclass(frozen=True)
class _Choice:
    """Whose classes are looked for.

    Attributes:
        meta: What the data sample of each image gets.
        labels: Classes to which the detector is kept; None for the dataset's that it
            takes an image to be of.
        dataset: Name, where a dataset is named.
    """

    meta: Mapping[str, Any]
    labels: Sequence[int] | None
    dataset: str | None = None


class Predictor:
    """A trained detector with its classes and preprocessing, from a checkpoint alone.

    Checkpoints from strangers are safe: weights and config are read as data, and of the
    config only classes are built that are registered in mmdet.

    Args:
        checkpoint: A .pth file that a training with damex wrote.
        device: Such as ``cpu`` or ``cuda:0``; by default a GPU where there is one.

    Attributes:
        classes: Names of the classes of all datasets.
        datasets: For each dataset of the training its classes.
        can_tell: Whether it can tell which dataset an image looks like.
        auto_note: Why ``dataset="auto"`` means ``all``; None if it does not.

    Raises:
        DataError: If the checkpoint cannot be read, or holds more than data.
        ConfigError: If it is not of a detector that damex trained on a mixture, or
            there is no such device.
    """

    def __init__(self, checkpoint: str | Path, *, device: str | None = None) -> None:
        self._stored = StoredDetector.read(str(checkpoint))
        self._detector = self._stored.build(device or get_device())
        space = self._stored.space
        self.classes = space.classes
        self.datasets = {
            name: tuple(space.classes[label] for label in space.valid_labels(number))
            for number, name in enumerate(space.dataset_names)
        }
        self.can_tell = can_tell_datasets(self._detector)
        self.auto_note = None
        if not self.can_tell and len(self.datasets) > 1:
            self.auto_note = (
                f"the detector in {checkpoint} was not trained to tell datasets, so "
                "all classes are looked for; name a dataset to keep to its classes: "
                f"{', '.join(self.datasets)}."
            )
        self._inputs = Inputs(self._stored.pipeline)

    def __call__(
        self,
        images: Picture | Sequence[Picture],
        *,
        dataset: str = "auto",
        min_score: float = 0.3,
        batch_size: int = 8,
    ) -> list[Prediction]:
        """Detect objects.

        Args:
            images: Files of images or videos, or uint8 arrays (height, width, 3) in
                RGB; one or several.
            dataset: Whose classes to look for. ``auto``: those of the dataset that an
                image looks like; if the detector cannot tell, of its only dataset or
                of all. A name: those of that dataset, with its experts whatever the
                image looks like. ``all``: those of all datasets.
            min_score: Detections below it are left out.
            batch_size: Images in a row that are computed together, if they are of one
                shape.

        Returns:
            One prediction per image and frame, in order.

        Raises:
            ConfigError: If there is no such dataset.
            DataError: If an image cannot be read.
            ValueError: If a number is out of its range.
        """
        several: Any = images
        if isinstance(images, Picture) or not isinstance(images, Iterable):
            several = [images]
        return [*self.stream(several, dataset, min_score, batch_size)]

    def stream(
        self,
        images: Sequence[Picture],
        dataset: str = "auto",
        min_score: float = 0.3,
        batch_size: int = 8,
        *,
        skip: Callable[[DataError], Any] | None = None,
    ) -> Iterator[Prediction]:
        """Detect objects, image by image, as :meth:`__call__` does.

        Args:
            images: See there.
            dataset: See there.
            min_score: See there.
            batch_size: See there.
            skip: Called with the error of an image that cannot be read, which is then
                left out; by default the error is raised.

        Returns:
            Predictions in the order of the images.

        Raises:
            ConfigError: If there is no such dataset.
            ValueError: If a number is out of its range.
        """
        check_number("Predictor", "in [0, 1]", min_score=min_score)
        check_sizes("Predictor", batch_size=batch_size)
        if dataset == "auto" and self.auto_note:
            warnings.warn(self.auto_note, stacklevel=3)
        choice = self._choose(dataset)
        packed = self._packed(images, choice, skip)
        return self._detect(packed, choice, min_score, batch_size)

    def _detect(
        self,
        packed: Iterator[dict[str, Any]],
        choice: _Choice,
        min_score: float,
        batch_size: int,
    ) -> Iterator[Prediction]:
        """What is found in images that are prepared."""
        # Images of different shapes would be padded to one, which changes scores.
        for _, alike in groupby(packed, lambda one: one["inputs"].shape):
            while batch := list(islice(alike, batch_size)):
                with torch.inference_mode(), self._told(choice):
                    samples = self._detector.test_step(pseudo_collate(batch))
                for sample in samples:
                    yield self._prediction(sample, choice, min_score)

    def _choose(self, dataset: str) -> _Choice:
        """What ``dataset`` means.

        Raises:
            ConfigError: If there is no such dataset.
        """
        space = self._stored.space
        every = list(range(space.num_classes))
        if dataset == "auto" and not self.can_tell:
            dataset = "all" if self.auto_note else next(iter(self.datasets))
        if dataset == "all":
            groups = len(space.group_names) if self.can_tell else 0
            return _Choice(dict(labels_by_group=[every] * groups or None), every)
        if dataset != "auto":
            number = self._stored.dataset_id(dataset)
            meta = dict(group_id=space.group_id(number))
            return _Choice(meta, space.valid_labels(number), dataset)
        return _Choice(dict(labels_by_group=labels_by_group(space)), None)

    @contextmanager
    def _told(self, choice: _Choice) -> Iterator[None]:
        """Keep the detector to a dataset, where one is named."""
        if choice.dataset is None or choice.labels is None:
            yield
            return
        with told_dataset(self._detector, choice.labels):
            yield

    def _packed(
        self,
        images: Sequence[Picture],
        choice: _Choice,
        skip: Callable[[DataError], Any] | None,
    ) -> Iterator[dict[str, Any]]:
        """Inputs of the detector."""
        meta = {key: value for key, value in choice.meta.items() if value is not None}
        for image in images:
            try:
                for packed in self._inputs.each(image):
                    packed["data_samples"].set_metainfo(meta)
                    yield packed
            except DataError as error:
                if skip is None:
                    raise
                skip(error)

    def _prediction(self, sample: Any, choice: _Choice, min_score: float) -> Prediction:
        """What was found in one image."""
        space = self._stored.space
        posterior = sample.metainfo.get("group_posterior", ())
        probabilities = dict(zip(space.group_names, posterior, strict=False))
        dataset, found = choice.dataset, sample.pred_instances
        if choice.labels is None:
            dataset = max(probabilities, key=probabilities.__getitem__)
            found = sample.dataset_instances
        allowed = choice.labels or sample.annotated_labels
        labels, scores = found.labels.cpu().numpy(), found.scores.cpu().numpy()
        # A head answers as often as it may, with score 0 where classes are shut out.
        keep = (scores >= min_score) & np.isin(labels, allowed)
        height, width = sample.ori_shape[:2]
        name = sample.metainfo.get("img_path")
        path = None if name is None else Path(name)
        return Prediction(
            path=path,
            width=int(width),
            height=int(height),
            boxes=found.bboxes.cpu().numpy()[keep],
            scores=scores[keep],
            labels=labels[keep],
            names=tuple(space.classes[label] for label in labels[keep]),
            dataset=dataset,
            probabilities=probabilities,
            frame=sample.img_id if path is not None and is_video(path) else None,
        )


def labels_by_group(space: LabelSpace) -> list[list[int]]:
    """For each dataset group the labels of its datasets.

    Args:
        space: The datasets and their classes.
    """
    return [
        sorted(
            {
                label
                for number, group in enumerate(space.groups)
                if group == name
                for label in space.valid_labels(number)
            }
        )
        for name in space.group_names
    ]
