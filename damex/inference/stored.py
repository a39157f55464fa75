"""Contents of a checkpoint: config, classes, preprocessing and weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mmdet.registry import MODELS
from mmengine.config import ConfigDict
from mmengine.registry import init_default_scope
from mmengine.runner import CheckpointLoader
from torch import Tensor

from damex.datasets.label_space import LabelSpace
from damex.engine.checkpoint import check_finite, check_tensors
from damex.errors import ConfigError, DataError, did_you_mean
from damex.inference.literal_config import check_types, read_literals
from damex.models.detectors import RoutedDetector

# Pipeline steps that need annotations.
ANNOTATION_STEPS = ("LoadAnnotations", "FilterAnnotations", "LoadEmptyAnnotations")


@dataclass(frozen=True)
class StoredDetector:
    """A checkpoint of a training on a mixture of datasets.

    Attributes:
        path: Path or URL of the checkpoint.
        config: The whole config as plain values; call `check_types` before building it.
        model: Config of the detector.
        pipeline: Test pipeline without annotations.
        meta: Metadata of the checkpoint, such as ``epoch``.
    """

    path: str
    config: dict[str, Any]
    model: dict[str, Any]
    pipeline: list[dict[str, Any]]
    space: LabelSpace
    state: Mapping[str, Tensor]
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, path: str) -> StoredDetector:
        """Read a checkpoint (a file or URL) as data, without running code from it.

        Raises:
            DataError: If it cannot be read, or holds more than data.
            ConfigError: If it is not of a training on a mixture of datasets.
        """
        checkpoint = CheckpointLoader.load_checkpoint(path, "cpu")
        meta = checkpoint.get("meta") or {}
        state = checkpoint.get("state_dict")
        if not isinstance(state, Mapping) or not isinstance(meta.get("cfg"), str):
            raise ConfigError(
                f"the checkpoint {path} holds no config, so that nothing says which "
                "detector its weights are of; use one that a training with damex wrote."
            )
        if "datasets" not in (meta.get("dataset_meta") or {}):
            raise ConfigError(
                f"the checkpoint {path} is of a training without a mixture, and "
                "nothing says which dataset has which classes; use mmdet's own tools."
            )
        config = read_literals(meta["cfg"], where=path)
        model = config.get("model")
        if not isinstance(model, dict):
            raise DataError(f"the config in {path} has no model.")
        forget_processes(model)
        pipeline = _test_pipeline(config, path)
        for part in (model, pipeline):
            check_types(part, where=path)
        check_finite(state, path=path)
        space = LabelSpace.from_metainfo(meta["dataset_meta"])
        return cls(path, config, model, pipeline, space, state, meta)

    @property
    def mixture(self) -> list[dict[str, Any]]:
        """The ``mixture`` entries of the config; empty if it has none."""
        entries = self.config.get("mixture")
        return entries if isinstance(entries, list) else []

    def build(self, device: str = "cpu") -> RoutedDetector:
        """Build the detector with its weights, in eval mode.

        Raises:
            ConfigError: If it is not damex's, its weights do not fit, or the device is
                missing.
        """
        _check_device(device)
        init_default_scope("mmdet")
        kind = MODELS.get(self.model.get("type", ""))
        if not isinstance(kind, type) or not issubclass(kind, RoutedDetector):
            raise ConfigError(
                f"the checkpoint {self.path} is of a {self.model.get('type')!r}, which "
                "is no detector of damex; use mmdet's DetInferencer."
            )
        detector = MODELS.build(ConfigDict(copy.deepcopy(self.model)))
        check_tensors(self.state, detector, path=self.path)
        detector.load_state_dict(dict(self.state))
        detector.eval()
        return detector.to(device)

    def dataset_id(self, name: str) -> int:
        """Index of a dataset; ConfigError if it is unknown."""
        if name not in self.space.dataset_names:
            raise ConfigError(
                f"the checkpoint {self.path} knows no dataset {name!r}; "
                f"{did_you_mean(name, self.space.dataset_names)}"
            )
        return self.space.dataset_id(name)


def millions(state: Mapping[str, Tensor]) -> str:
    """Number of parameters in millions, formatted."""
    return f"{sum(tensor.numel() for tensor in state.values()) / 1e6:.2f}"


def forget_processes(model: Mapping[str, Any]) -> None:
    """Set a model config, in place, to hold all experts in one process."""
    if isinstance(model.get("moe"), dict):
        model["moe"].pop("expert_parallel", None)


def _check_device(device: str) -> None:
    """Reject a device that is not available to torch."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # not compiled in; missing
        raise ConfigError(
            f"--device {device}: {str(error).splitlines()[0]}; use cpu or cuda:0."
        ) from error


def _test_pipeline(config: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Test pipeline without the steps that need annotations."""
    loader = config.get("test_dataloader") or config.get("val_dataloader") or {}
    steps = (loader.get("dataset") or {}).get("pipeline") or config.get("test_pipeline")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise DataError(
            f"the config in {path} says nothing about images (no pipeline)."
        )
    kept = [step for step in steps if step.get("type") not in ANNOTATION_STEPS]
    if not kept or kept[0].get("type") != "LoadImageFromFile":
        raise DataError(
            f"the pipeline in {path} does not begin with LoadImageFromFile."
        )
    first = {k: v for k, v in kept[0].items() if k != "backend_args"}  # local files
    return [first, *kept[1:]]
