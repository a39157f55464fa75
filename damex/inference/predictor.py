"""Predictor: detections from a checkpoint alone."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from mmengine.device import get_device

from damex.config_files import mixture_datasets
from damex.datasets.spec import TYPES, is_tile
from damex.datasets.tiles import joined
from damex.errors import ConfigError, DataError, check_number, check_sizes, printable
from damex.inference.media import Inputs, Picture, as_rgb, as_several, detect, is_video
from damex.inference.stored import DetectorCheckpoint
from damex.models.dataset_classifier import classifies_datasets, condition_on_dataset


@dataclass(frozen=True)
class Prediction:
    """Detections in one image, best first.

    Attributes:
        path: The image or video file; None for an array.
        width: Image width in pixels.
        height: Image height in pixels.
        boxes: (n, 4) as x1, y1, x2, y2 in pixels.
        scores: (n,) in [0, 1].
        labels: (n,) indices into ``Detector.classes``.
        names: Class names of the labels.
        dataset: Dataset, or predicted group, whose classes were detected; None for all.
        probabilities: Predicted probability of each dataset group; they sum to 1. Empty
            if the dataset was given or cannot be predicted.
        frame: Frame number from 0; None for an image.
        image: uint8 (height, width, 3) in RGB; None unless ``keep_images`` was set.
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
    image: np.ndarray | None = field(default=None, repr=False)

    @property
    def confidence(self) -> float | None:
        """Probability of ``dataset``, or of the most probable one; None if unknown."""
        most = max(self.probabilities.values(), default=None)
        return self.probabilities.get(self.dataset or "", most)

    def to_supervision(self) -> Any:
        """Return ``supervision.Detections``, with ``class_name`` in ``data``.

        Raises:
            ConfigError: If supervision is not installed.
        """
        try:
            from supervision import Detections
        except ImportError as error:
            raise ConfigError(
                "to_supervision needs supervision; install it: pip install supervision."
            ) from error
        return Detections(
            xyxy=self.boxes.astype(np.float32).reshape(-1, 4),
            confidence=self.scores,
            class_id=self.labels.astype(int),
            data=dict(class_name=np.array(self.names, dtype=str)),
        )


Skip = Callable[[DataError], Any] | None
Tile = int | Literal["auto"] | None  # side of windows; that of the training; none


@dataclass(frozen=True)
class _Choice:
    """Classes to detect; ``labels=None``: those of the dataset predicted per image.

    ``tile`` is the side of the windows of the training, in pixels of the image.
    """

    meta: Mapping[str, Any]
    labels: Sequence[int] | None
    dataset: str | None = None
    tile: int | None = None


class Predictor:
    """A trained detector with its classes and preprocessing, from a checkpoint alone.

    `damex.Detector` documents arguments and errors. Threads may share it: they take
    turns at the detector.

    Attributes:
        can_tell: Whether the detector predicts the dataset of an image.
        auto_note: What ``dataset="auto"`` cannot do for this detector, or None.
        stored: The checkpoint.
    """

    def __init__(
        self, checkpoint: str | Path, *, device: str | None = None, trust: bool = False
    ) -> None:
        self.stored = DetectorCheckpoint.read(str(checkpoint), trust=trust)
        self.tile_of = self.stored.tile_of
        self._detector = self.stored.build(device or get_device())
        self.label_space = space = self.stored.space
        self.classes = space.classes
        self.datasets = {
            name: tuple(space.classes[label] for label in space.valid_labels(number))
            for number, name in enumerate(space.dataset_names)
        }
        self.can_tell = classifies_datasets(self._detector)
        self.auto_note = self._auto_note(checkpoint)
        self._inputs = Inputs(self.stored.pipeline)
        self._lock = threading.Lock()  # a step leaves its routes in the detector

    def _auto_note(self, checkpoint: str | Path) -> str | None:
        """Say if all classes are detected, or whole images seen in place of windows."""
        space, notes = self.label_space, []
        groups = [list(self.datasets)]
        if self.can_tell:
            groups = [self._members(g) for g in range(len(space.group_names))]
        elif len(self.datasets) > 1:
            notes.append(
                f"the detector in {checkpoint} was not trained to predict the dataset "
                "of an image, so all classes are detected; name a dataset to detect "
                f"only its classes: {', '.join(self.datasets)}."
            )
        for names in groups:
            seen = [name for name in names if self.tile_of([name])]
            if seen and self.tile_of(names) is None:
                notes.append(
                    f"In training it saw {', '.join(seen)} through windows, and now "
                    "it sees whole images: name the dataset, or the side (tile)."
                )
        return printable(" ".join(notes)) if notes else None

    def __call__(
        self, images: Picture | Iterable[Picture], **options: Any
    ) -> list[Prediction]:
        """Return what :meth:`stream` yields for one image or several."""
        return [*self.stream(as_several(images), **options)]

    def stream(
        self,
        images: Iterable[Picture],
        dataset: str = "auto",
        min_score: float = 0.3,
        batch_size: int = 8,
        *,
        tile: Tile = "auto",
        keep_images: bool = False,
        skip: Skip = None,
    ) -> Iterator[Prediction]:
        """Detect as `damex.Detector.predict` does in files, PIL images or arrays.

        Yields one prediction per image and frame, in order. If the detector cannot
        predict the dataset, ``auto`` means its only one, or all. ``skip`` is
        called with the error of an unusable image, which is then left out; by default
        the error is raised. With ``keep_images``, predictions hold their pixels.
        """
        check_number("Predictor", "in [0, 1]", min_score=min_score)
        check_sizes("Predictor", batch_size=batch_size)
        if not (tile in ("auto", None) or is_tile(tile)):
            raise ConfigError(
                f"tile must be {TYPES['tile'][1]}, or None for whole images, got "
                f"{tile!r}."
            )
        if dataset == "auto" and self.auto_note:
            warnings.warn(self.auto_note, stacklevel=3)
        choice = self._choose(dataset)
        packed = self._packed(images, choice, skip)
        return self._detect(
            packed, choice, tile, min_score, batch_size, keep_images, skip
        )

    def evaluate(
        self,
        entries: Sequence[Mapping[str, Any]] | None = None,
        *,
        split: str = "val",
        batch_size: int = 8,
        classwise: bool = False,
    ) -> dict[str, Any]:
        """Average precision per dataset, as in ``summary.json``.

        As by `damex.Detector.evaluate`, for ``entries`` of a mixture whose names are
        datasets of the detector; by default those of the training. One without ``tile``
        is seen as in it.
        """
        check_sizes("Predictor", batch_size=batch_size)
        entries = entries or self.stored.mixture
        if not entries:
            raise ConfigError(
                f"the config in {self.stored.path} has no mixture to evaluate on; name "
                "the folder of a dataset."
            )
        chosen = [{"tile": self.tile_of([one["name"]]), **one} for one in entries]
        trained = self.stored.config.get(f"{split}_dataloader")
        known, *_ = *mixture_datasets(trained), {}
        dataset = dict(
            type="MixtureDataset",
            datasets=chosen,
            split=split,
            test_mode=True,
            pipeline=self.stored.pipeline,
            label_space=self.label_space.to_metainfo(),
            on_bad_box=known.get("on_bad_box", "error"),
        )
        sampler = dict(type="DefaultSampler", shuffle=False)
        loader = dict(
            batch_size=batch_size, num_workers=0, sampler=sampler, dataset=dataset
        )
        with self._lock:
            self._detector.counts_tokens = classwise
            try:
                return self.stored.evaluate(
                    self._detector, loader, label="evaluation", classwise=classwise
                )
            finally:
                self._detector.counts_tokens = False

    def _detect(
        self,
        packed: Iterator[dict[str, Any]],
        choice: _Choice,
        tile: Tile,
        min_score: float,
        batch_size: int,
        keep_images: bool,
        skip: Skip,
    ) -> Iterator[Prediction]:
        while batch := list(islice(packed, batch_size)):
            side = choice.tile if isinstance(tile, str) else tile
            rows: Iterable[Any] = self._run_each(batch, choice, skip)
            if side is not None and "labels_by_group" not in choice.meta:
                rows = ((one, None) for one in batch)  # only windows are looked at
            for one, whole in rows:
                image = as_rgb(one["pixels"]) if keep_images else None
                chosen, sample = choice, whole
                if choice.labels is None:  # as the image was found to be
                    chosen = self._of_group(whole.predicted_group)
                    side = chosen.tile if isinstance(tile, str) else tile
                    sample.pred_instances = whole.dataset_instances
                if side is not None:
                    try:
                        sample = self._through_windows(one, chosen, side, batch_size)
                    except DataError as error:
                        _refuse(error, skip)
                        continue
                    if whole is not None:  # it tells the dataset, not a window
                        posterior = whole.metainfo.get("group_posterior", ())
                        sample.set_metainfo(dict(group_posterior=posterior))
                yield self._prediction(sample, chosen, min_score, image)

    def _run_each(
        self, batch: list[dict[str, Any]], choice: _Choice, skip: Skip
    ) -> Iterator[tuple[dict[str, Any], Any]]:
        """Images that the detector can take, and their data samples."""
        try:
            yield from zip(batch, self._run(batch, choice), strict=True)
        except DataError as error:  # of an image, for instance one with too few cells
            if len(batch) > 1:
                for one in batch:
                    yield from self._run_each([one], choice, skip)
                return
            _refuse(error, skip)

    def _run(self, batch: Sequence[Mapping[str, Any]], choice: _Choice) -> list[Any]:
        """Run the detector; returns data samples."""
        labels = None if choice.dataset is None else choice.labels
        with self._lock, ExitStack() as stack:
            if labels is not None:
                stack.enter_context(condition_on_dataset(self._detector, labels))
            return detect(self._detector, batch)

    def _through_windows(
        self, one: Mapping[str, Any], choice: _Choice, side: int, batch_size: int
    ) -> Any:
        """Detect in all windows of an image, and return one data sample."""
        windows = self._inputs.windows(one, side, choice.meta)
        parts: list[Any] = []
        while batch := [*islice(windows, batch_size)]:
            parts += self._run(batch, choice)
        return joined(parts)

    def _choose(self, dataset: str) -> _Choice:
        space = self.label_space
        every = list(range(space.num_classes))
        if dataset == "auto" and not self.can_tell:
            dataset = "all" if len(self.datasets) > 1 else next(iter(self.datasets))
        if dataset == "auto":
            return _Choice(dict(labels_by_group=space.labels_by_group()), None)
        if dataset == "all":
            groups = [every] * len(space.group_names)
            several: dict[str, Any] = dict(labels_by_group=groups)
            tile = self.tile_of(space.dataset_names)
            return _Choice(several if self.can_tell else {}, every, tile=tile)
        number = self.label_space.dataset_id(dataset)
        meta, tile = dict(group_id=space.group_id(number)), self.tile_of([dataset])
        return _Choice(meta, space.valid_labels(number), dataset, tile)

    def _of_group(self, group: int) -> _Choice:
        """The choice of a dataset group that an image was found to be of."""
        space, tile = self.label_space, self.tile_of(self._members(group))
        labels, name = space.labels_by_group()[group], space.group_names[group]
        return _Choice(dict(group_id=group), labels, name, tile)

    def _members(self, group: int) -> list[str]:
        rows = enumerate(self.datasets)
        return [name for n, name in rows if self.label_space.group_id(n) == group]

    def _packed(
        self, images: Iterable[Picture], choice: _Choice, skip: Skip
    ) -> Iterator[dict[str, Any]]:
        """Preprocessed inputs of the detector."""
        for image in images:
            try:
                for packed in self._inputs.each(image):
                    packed["data_samples"].set_metainfo(choice.meta)
                    yield packed
            except DataError as error:
                _refuse(error, skip)

    def _prediction(
        self, sample: Any, choice: _Choice, min_score: float, image: np.ndarray | None
    ) -> Prediction:
        space = self.label_space
        posterior = sample.metainfo.get("group_posterior", ())
        probabilities = dict(zip(space.group_names, posterior, strict=False))
        found, allowed = sample.pred_instances, choice.labels or []
        labels, scores = found.labels.cpu().numpy(), found.scores.cpu().numpy()
        height, width = sample.ori_shape[:2]
        # mmdet's heads end boxes at the padded canvas.
        boxes_K4 = found.bboxes.cpu().numpy()
        boxes_K4 = boxes_K4.clip(0, [width, height] * 2).astype(np.float32)
        # The head returns max_per_img boxes, with score 0 for excluded classes.
        keep = (scores >= min_score) & np.isin(labels, allowed)
        keep &= (boxes_K4[:, 2:] > boxes_K4[:, :2]).all(1)
        name = sample.metainfo.get("img_path")
        path = None if name is None else Path(name)
        return Prediction(
            path=path,
            width=int(width),
            height=int(height),
            boxes=boxes_K4[keep],
            scores=scores[keep],
            labels=labels[keep],
            names=tuple(space.classes[label] for label in labels[keep]),
            dataset=choice.dataset,
            probabilities=probabilities,
            frame=sample.img_id if path is not None and is_video(path) else None,
            image=image,
        )


def _refuse(error: DataError, skip: Skip) -> None:
    """Pass the error of an image to `skip`, or raise it."""
    if skip is None:
        raise error
    skip(error)
