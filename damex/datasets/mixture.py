"""MixtureDataset: several detection datasets as one, with one label space."""

from __future__ import annotations

import bisect
import gc
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmdet.registry import DATASETS
from mmengine.dataset import BaseDataset, Compose
from mmengine.logging import print_log
from torch.utils.data import Dataset

from damex.datasets.findings import raise_first
from damex.datasets.image_files import (
    ImageRecord,
    check_image_file,
    check_scales,
    same_size,
)
from damex.datasets.label_space import LabelSpace
from damex.datasets.mmdet_configs import (
    applies_exif,
    check_transforms,
    image_scales,
    map_leaves,
)
from damex.datasets.spec import DatasetSpec, parse_mixture
from damex.datasets.tiles import tiled
from damex.datasets.windows import Window, windows_of
from damex.errors import ConfigError, DataError


class SeededIndex(int):
    """An ``int`` index with the seed for everything random about this sample.

    Augmentation then depends on the position of a sample in the run, not on the number
    and history of workers or on resumption (but for transforms with a cache of images,
    such as mmdet's ``CachedMosaic``).
    """

    seed: int

    def __new__(cls, index: int, seed: int) -> SeededIndex:
        """Make an index with its seed."""
        value = super().__new__(cls, index)
        value.seed = seed
        return value

    def __reduce__(self) -> tuple[type[SeededIndex], tuple[int, int]]:
        return SeededIndex, (int(self), self.seed)


def mix_seed(*parts: int) -> int:
    """Hash several integers into one 32-bit seed."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


@contextmanager
def local_seed(seed: int) -> Iterator[None]:
    """Seed random, numpy and torch temporarily, then restore their states."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    # torch.manual_seed would also reseed every GPU, whose states are not restored.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@DATASETS.register_module()
class MixtureDataset(Dataset):
    """Concatenation of named datasets with a common list of classes.

    ``dataset_id``, ``dataset_name``, ``group_id`` and ``predicted_labels`` (classes
    that a detector labeled) are in the metainfo of each data sample. Labels are mapped
    by name. ``metainfo`` is one dict and goes into the checkpoint.

    In evaluation, each window of a dataset with ``tile`` is a sample of its own, with
    its place in the image as ``window`` in the metainfo.

    Args:
        datasets: The entries of ``mixture``; see ``DatasetSpec``.
        split: ``train``, ``val`` or ``test``.
        pipeline: mmdet transforms for every dataset without its own; copied per
            dataset, so that CachedMosaic mixes images of one dataset only.
        label_space: ``union``, ``partitioned``, the path of a label file or its
            content, or the metainfo of the mixture that the detector was trained on.
        filter_empty: Leave images without boxes out of training.
        on_bad_box: ``error``, or ``drop`` boxes outside the image or with a negative
            side.
        max_refetch: How many other images of the dataset to try if the pipeline rejects
            one.
        test_mode: Whether samples are for evaluation; follows ``split`` by default.
        check: Check of COCO documents, as in ``NamedCocoDataset``.

    Raises:
        ConfigError: If the mixture or an option is invalid.
        DataError: If a file contradicts the config.
    """

    def __init__(
        self,
        *,
        datasets: Sequence[Mapping[str, Any]] = (),
        split: str = "train",
        pipeline: Sequence[dict | Callable] = (),
        label_space: str | Mapping[str, Any] = "union",
        filter_empty: bool = True,
        on_bad_box: str = "error",
        max_refetch: int = 100,
        test_mode: bool | None = None,
        check: Callable | None = None,
    ) -> None:
        self.specs = parse_mixture(datasets)
        self.split = split
        self.test_mode = split != "train" if test_mode is None else test_mode
        self._filters = filter_empty and not self.test_mode  # images without boxes
        self.on_bad_box = on_bad_box
        self.max_refetch = max_refetch
        self.label_space = LabelSpace.from_specs(self.specs, mode=label_space)
        self._identities = [self._identity(spec) for spec in self.specs]
        pipelines = [self._steps(spec, pipeline) for spec in self.specs]
        self.pipelines = [Compose(transforms) for transforms in pipelines]
        self._scales = [image_scales(steps, keep_ratio=True) for steps in pipelines]
        self._applies_exif = [applies_exif(steps) for steps in pipelines]
        self.sources: list[BaseDataset] = []
        self._check = check
        self.full_init()

    @property
    def metainfo(self) -> dict[str, Any]:
        """Classes, datasets and groups, as plain values."""
        return self.label_space.to_metainfo()

    @property
    def sizes(self) -> list[int]:
        """Number of images per dataset."""
        return [len(source) for source in self.sources]

    def full_init(self) -> None:
        """Load the annotations, once."""
        if self.sources:
            return
        freezes = gc.get_freeze_count() == 0
        if freezes:  # mmengine's gc after each dataset takes seconds
            gc.freeze()
        try:
            self.sources = [self._build(spec) for spec in self.specs]
        finally:
            if freezes:
                gc.unfreeze()
        self._check = None  # it may hold all that it has seen
        self._locations = [spec.location(self.split) for spec in self.specs]
        self._windows = [*map(self._windows_of, self.specs, self.sources)]
        rows = zip(self._windows, self.sources, strict=True)
        self._ends = [*accumulate(len(windows or source) for windows, source in rows)]
        self._labels = [
            self.label_space.local_to_global(
                identity["dataset_id"], source.metainfo["classes"]
            )
            for identity, source in zip(self._identities, self.sources, strict=True)
        ]

    def __len__(self) -> int:
        """Number of samples: images, and windows in evaluation."""
        return self._ends[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Index of a sample's dataset and of its image there, or IndexError."""
        source, place = self._place(index)
        windows = self._windows[source]
        return source, place if windows is None else windows[place][0]

    def _place(self, index: int) -> tuple[int, int]:
        """Index of a sample's dataset and of the sample there, or IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {int(index)} of a mixture of {len(self)} samples.")
        source = bisect.bisect_right(self._ends, index)
        return source, int(index) - (self._ends[source - 1] if source else 0)

    def _windows_of(
        self, spec: DatasetSpec, source: BaseDataset
    ) -> list[tuple[int, Window]] | None:
        """Image and place of all windows of a dataset; None if it has none."""
        if not isinstance(spec.tile, int) or not self.test_mode:
            return None
        found = []
        for inner in range(len(source)):
            info = source.get_data_info(inner)
            if info.get("width") is None or info.get("height") is None:
                raise DataError(
                    f"dataset {spec.name!r}: {info['img_path']} has no width and "
                    f"height in its annotation, which tile={spec.tile} needs."
                )
            width, height = round(info["width"]), round(info["height"])
            windows = windows_of(width, height, spec.tile)
            found += [(inner, window) for window in windows]
        return found

    def get_data_info(self, index: int) -> dict[str, Any]:
        """Annotation of one image with mixture labels and its dataset's identity."""
        source, inner = self.locate(index)
        info = self.sources[source].get_data_info(inner)
        if (windows := self._windows[source]) is not None:
            info["image_number"], info["window"] = windows[self._place(index)[1]]
        labels = self._labels[source]
        for key, field in (("instances", "bbox_label"), ("ground_truth", "label")):
            for instance in info.get(key, ()):
                instance[field] = labels[instance[field]]
        info["predicted_labels"] = [labels[i] for i in info.get("predicted_labels", ())]
        info.update(self._identities[source], sample_idx=int(index))
        return info

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not isinstance(index, SeededIndex):
            return self._fetch(index)
        with local_seed(index.seed):
            return self._fetch(index)

    def _fetch(self, index: int) -> dict[str, Any]:
        """Run the pipeline; in training, try the dataset's next image if it fails."""
        source, inner = self.locate(index)  # IndexError ends "for sample in dataset"
        size = self.sizes[source]
        others = 0 if self.test_mode else min(self.max_refetch, size - 1)
        for attempt in range(others + 1):
            shift = (inner + attempt) % size - inner
            packed = self._run_pipeline(index + shift)
            if packed is not None:
                return packed
        info = self.get_data_info(index)
        raise DataError(
            f"the {self.split} pipeline refused {info['img_path']} of dataset "
            f"{info['dataset_name']!r}"
            + (f" and {others} other images of it." if others else ".")
        )

    def _run_pipeline(self, index: int) -> dict[str, Any] | None:
        source, _ = self.locate(index)
        info = self.get_data_info(index)
        keys = {"predicted_labels", "sample_idx", "window", "image_number"} & {*info}
        identity = {**self._identities[source], **{key: info[key] for key in keys}}
        if self.test_mode:
            identity["ground_truth"] = info.get("ground_truth") or _as_ground_truth(
                info["instances"]
            )
        name, image = info["dataset_name"], self._image_record(info, source)
        raise_first(check_scales([image], self._scales[source]))
        try:
            packed = self.pipelines[source](info)
        except Exception:
            raise_first(check_image_file(image))
            text = f"dataset {name!r}: the {self.split} pipeline failed on "
            print_log(f"{text}{image.path}:", logger="current", level=logging.ERROR)
            raise  # a bug in a transform: keep its traceback
        if packed is None:
            return None
        if "data_samples" not in packed:
            raise ConfigError(
                f"dataset {name!r}: the {self.split} pipeline has to end with "
                "dict(type='PackDetInputs')."
            )
        loaded = packed["data_samples"].metainfo.get("ori_shape")
        if loaded and image.size and not same_size(loaded[1::-1], image.size):
            raise_first(check_image_file(image))
            raise DataError(
                f"dataset {name!r}: {image.path} is {loaded[1]} x {loaded[0]} px as "
                f"loaded, and {image.size[0]} x {image.size[1]} px by its annotation. "
                "Correct width and height, and boxes for another size."
            )
        packed["data_samples"].set_metainfo(identity)
        return packed

    def _image_record(self, info: Mapping[str, Any], source: int) -> ImageRecord:
        """The image of a sample, for messages about its file."""
        location, path = self._locations[source], Path(info["img_path"])
        name = path.relative_to(location.root) if location.root else info.get("img_id")
        width, height = info.get("width"), info.get("height")
        size = None if width is None or height is None else (width, height)
        return ImageRecord(
            location, f"image {name}", path, size, self._applies_exif[source]
        )

    def _steps(self, spec: DatasetSpec, common: Sequence[Any]) -> Sequence[Any]:
        """Pipeline of a dataset, checked."""
        where = f"dataset {spec.name!r}, {self.split}"
        # Evaluation on training images is without their augmentation.
        augments = self.test_mode and self.split == "train"
        steps = common if augments else spec.pipeline(self.split) or common
        check_transforms(steps, where)
        return tiled(steps, spec.tile, test_mode=self.test_mode, where=where)

    def _identity(self, spec: DatasetSpec) -> dict[str, Any]:
        """Metainfo of every sample of a dataset."""
        dataset_id = self.label_space.dataset_id(spec.name)
        identity: dict[str, Any] = dict(
            dataset_id=dataset_id,
            dataset_name=spec.name,
            group_id=self.label_space.group_id(dataset_id),
        )
        if self.test_mode:
            identity["annotated_labels"] = self.label_space.valid_labels(dataset_id)
        return identity

    def _build(self, spec: DatasetSpec) -> BaseDataset:
        dataset_id = self.label_space.dataset_id(spec.name)
        own = tuple(self.label_space.dataset_classes[dataset_id])
        if isinstance(spec.train, Mapping) and len(own) < len(spec.own_classes):
            spec = replace(spec, classes=own)  # a label file leaves the others out
        if self.test_mode and spec.root is not None:
            # Another folder than the one of the training may lack objects of a class.
            found = {*spec.conversion.summary.classes}
            if found <= {*own}:
                own = tuple(name for name in own if name in found)
        complete = partial(self._complete, spec=spec, own=own)
        try:
            dataset = DATASETS.build(
                map_leaves(spec.dataset_config(self.split), complete)
            )
            dataset.full_init()
            empty = len(dataset) == 0
        except OSError as error:
            raise DataError(
                f"dataset {spec.name!r}: {error}. Correct data_root or the paths of "
                f"{self.split} in its mixture entry."
            ) from error
        except ValueError as error:
            # mmengine fails like this on an empty list of records.
            if "need at least one array" not in str(error):
                raise
            empty = True
        if empty:
            why = f"no image has a box of {list(own)}"
            why = why if self._filters else "it lists none"
            raise DataError(
                f"dataset {spec.name!r}: no image of {spec.source(self.split)} is left "
                f"for {self.split}: {why}. Check 'classes' and the file."
            )
        if spec.root is not None and self.split == "train":
            summary = spec.conversion.summary
            is_odd = summary.dropped or summary.noted
            level = logging.WARNING if is_odd else logging.INFO
            print_log(summary.text(spec.name), logger="current", level=level)
        text = f"{self.split}: {spec.name}: {len(dataset)} images"
        print_log(text, logger="current", level=logging.INFO)
        return dataset

    def _complete(
        self, leaf: Mapping[str, Any], *, spec: DatasetSpec, own: tuple[str, ...]
    ) -> dict[str, Any]:
        """Settings that the mixture adds to the config of a plain dataset."""
        config = {**leaf, "pipeline": [], "test_mode": self.test_mode}
        if self._filters and config.get("filter_cfg") is None:
            config["filter_cfg"] = dict(filter_empty_gt=True)
        if spec.classes is not None or leaf["type"] == "NamedCocoDataset":
            config["metainfo"] = dict(classes=own)
        if leaf["type"] == "NamedCocoDataset":
            config.update(name=spec.name, split=self.split, root=spec.converted_root)
            config.update(on_bad_box=self.on_bad_box, check=self._check)
        return config


def _as_ground_truth(instances: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ground truth in COCO format for datasets that only have mmdet's instances."""
    rows = []
    for instance in instances:
        x1, y1, x2, y2 = (float(value) for value in instance["bbox"])
        rows.append(
            dict(
                bbox=[x1, y1, x2 - x1, y2 - y1],
                label=instance["bbox_label"],
                area=(x2 - x1) * (y2 - y1),
                iscrowd=int(instance.get("ignore_flag", 0)),
            )
        )
    return rows
