"""Contents of a checkpoint: config, classes, weights, and preprocessing of images."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from mmdet.registry import MODELS
from mmengine.config import ConfigDict
from mmengine.evaluator import Evaluator
from mmengine.registry import init_default_scope
from mmengine.runner import CheckpointLoader, Runner
from torch import Tensor

import damex.registry  # noqa: F401  (first: it keeps mmdet silent)
from damex.config_files import import_modules
from damex.datasets.coco_records import read_coco
from damex.datasets.geometry import set_image_size
from damex.datasets.label_space import LabelSpace
from damex.datasets.spec import is_tile, parse_mixture
from damex.engine.checkpoint import check_finite, check_tensors
from damex.engine.config import heads_of
from damex.engine.model_folder import is_label_space
from damex.engine.resumption import EVALUATED
from damex.engine.summary import PREFIX, class_scores, scores_of, summarise
from damex.errors import ConfigError, DataError, printable
from damex.evaluation import MixtureMetric
from damex.files import atomic_write, check_free, write_text
from damex.inference.trust import check_parts, forget_pretrained, read_literals
from damex.models.detectors import RoutedDetector
from damex.progress import Bar

# Pipeline steps that need annotations.
ANNOTATION_STEPS = ("LoadAnnotations", "FilterAnnotations", "LoadEmptyAnnotations")
NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class DetectorCheckpoint:
    """A checkpoint of a training on a mixture of datasets.

    Attributes:
        path: Path or URL of the checkpoint.
        config: The whole config as plain values; build only what `checked` returns.
        pipeline: Test pipeline without annotations.
        meta: Metadata of the checkpoint, such as ``epoch``.
        trust: Whether the user trusts the checkpoint: everything in it may be built.
        forgotten: Places in the config of initial weights that were left out.
        scores: Of its own weights, as in ``summary.json``; empty if it holds none.
        changed: When its file was last written, in nanoseconds; None for a URL.
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
    scores: Mapping[str, Any] = field(default_factory=dict)
    changed: int | None = None

    @classmethod
    def read(cls, path: str, *, trust: bool = False) -> DetectorCheckpoint:
        """Read a checkpoint (a file or URL) as data, without running code from it.

        With ``trust``, its ``custom_imports`` are imported, and all classes allowed.
        DataError if it cannot be read, holds more than data, or needs ``trust``;
        ConfigError if it is not of a training on a mixture of datasets.
        """
        checkpoint = CheckpointLoader.load_checkpoint(path, "cpu")
        meta = checkpoint.get("meta") or {}
        state = checkpoint.get("state_dict")
        if not isinstance(state, Mapping) or not isinstance(meta.get("cfg"), str):
            raise ConfigError(
                f"the checkpoint {path} holds no config to build its detector from; "
                "use one that a training with damex wrote."
            )
        stored = meta.get("dataset_meta")
        if not isinstance(stored, dict) or "datasets" not in stored:
            raise ConfigError(
                f"the checkpoint {path} is of a training without a mixture and lists "
                "no datasets with their classes; use mmdet's own tools."
            )
        if not is_label_space(stored):
            raise DataError(
                f"the checkpoint {path} is damaged: the classes and datasets of its "
                "metadata (dataset_meta) do not fit together."
            )
        config = read_literals(meta["cfg"], where=path)
        model = config.get("model")
        if not isinstance(model, dict):
            raise DataError(f"the config in {path} has no model.")
        disable_expert_parallel(model)
        pipeline = _test_pipeline(config, path)
        forgotten: tuple[str, ...] = ()
        if trust:
            import_modules(config)
        else:
            forgotten = (*forget_pretrained(model, keep_published=True),)
            check_parts(dict(model=model, pipeline=pipeline), where=path)
        _check_names([*state], path)
        check_finite(state, path=path)
        space = LabelSpace.from_metainfo(stored)
        counts = {head.get("num_classes") for _, head in heads_of(model, "model")}
        groups = len(space.group_names)
        if (
            counts - {space.num_classes}
            or (model.get("num_groups") or groups) != groups
        ):
            raise DataError(
                f"the checkpoint {path} is damaged: its metadata (dataset_meta) lists "
                f"{space.num_classes} classes in {groups} groups, its detector others."
            )
        own = (name for classes in space.dataset_classes for name in classes)
        _check_names((*space.classes, *space.dataset_names, *space.groups, *own), path)
        return cls(
            *(path, config, model, pipeline, space, state, meta, trust, forgotten),
            scores=_own_scores(checkpoint),
            changed=last_change(path),
        )

    def checked(self, key: str) -> Any:
        """A copy of a part of the config, which can be built.

        DataError if the user does not trust it, and it is not in the allow-list.
        """
        part = copy.deepcopy(self.config.get(key))
        if not self.trust:
            check_parts({key: part}, where=self.path)
        return part

    @property
    def mixture(self) -> list[dict[str, Any]]:
        """The checked ``mixture`` entries of the config; empty if it has none."""
        entries = self.checked("mixture")
        entries = entries if isinstance(entries, list) else []
        return [one for one in entries if isinstance(one, dict) and one.get("name")]

    def build(self, device: str = "cpu") -> RoutedDetector:
        """Build the detector with its weights, in eval mode.

        ConfigError if it is not damex's, its weights do not fit, or the device is
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
        metrics = self.config.get("val_evaluator")
        metrics = metrics if isinstance(metrics, list) else [metrics or {}]
        words = {
            key: metric[key]
            for metric in metrics
            for key in ("max_dets", "dataset_known")
            if isinstance(metric, dict)
            and metric.get("type") == MixtureMetric.__name__
            and key in metric
        }
        evaluator = Evaluator(MixtureMetric(classwise=classwise, **words))
        evaluator.dataset_meta = self.space.to_metainfo()
        with Bar() as bar, torch.inference_mode():
            bar.begin(label, len(images))
            for batch in images:
                evaluator.process(detector.test_step(batch), batch)
                bar.step()
        scores = scores_of(evaluator.evaluate(len(images.dataset)))
        return {**summarise(scores), **class_scores(scores, self.space)}

    def resized(self, size: tuple[int, int]) -> DetectorCheckpoint:
        """The same for images of another size (width, height) in pixels.

        ConfigError if it is not a size, or the test pipeline does not resize.
        """
        model, pipeline = copy.deepcopy((self.model, self.pipeline))
        loader = dict(dataset=dict(pipeline=pipeline))
        set_image_size(dict(image_size=size, model=model, test_dataloader=loader))
        return replace(self, model=model, pipeline=pipeline)

    def tile_of(self, names: Sequence[str]) -> int | None:
        """``tile`` of the training on datasets; None if it is not the same for all."""
        entries = self.config.get("mixture")
        rows = entries if isinstance(entries, list) else []
        rows = [row for row in rows if isinstance(row, Mapping)]
        tiles = [row.get("tile") for row in rows if row.get("name") in names]
        tile = tiles[0] if tiles and all(one == tiles[0] for one in tiles) else None
        # A stranger's checkpoint may hold any value.
        return tile if is_tile(tile) else None

    def validation_images(self, name: str, *, count: int) -> list[Path]:
        """Sample ``count`` validation images of a dataset, evenly over its COCO file.

        Paths of the config are relative to the working directory. ConfigError if its
        entry does not name a COCO file; DataError if the file, or all of its images,
        are missing.
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


def last_change(path: str) -> int | None:
    """Return when a file was last written, in nanoseconds; None if there is none."""
    file = Path(path).expanduser()
    return file.stat().st_mtime_ns if file.exists() else None


def millions(state: Mapping[str, Tensor]) -> str:
    """Number of parameters in millions; statistics of batch norms are none."""
    kept = [v.numel() for key, v in state.items() if not key.endswith(NORM_STATISTICS)]
    return f"{sum(kept) / 1e6:.2f}"


def _own_scores(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of a checkpoint's own weights, as by `summarise`; empty if it has none.

    A training adds them to its best checkpoint; others are written before they are
    evaluated.
    """
    try:
        hub = checkpoint["message_hub"]
        if hub["runtime_info"][EVALUATED] != checkpoint["meta"]["iter"]:
            return {}
        found = {
            key.removeprefix("val/"): float(history.current())
            for key, history in hub["log_scalars"].items()
            if key.startswith(f"val/{PREFIX}")
        }
        return summarise(scores_of(found)) if found else {}
    except Exception:  # what a stranger writes into a history may be anything
        return {}


def _check_names(names: Iterable[str], path: str) -> None:
    """Reject names that a terminal would not show as they are."""
    for name in names:
        if printable(str(name)) != str(name):
            raise DataError(
                f"the checkpoint {path} has the name {name!r:.80}, whose characters "
                "control a terminal; it was not used."
            )


def disable_expert_parallel(model: Mapping[str, Any]) -> None:
    """Set a model config, in place, to hold all experts in one process."""
    if isinstance(model.get("moe"), dict):
        model["moe"].pop("expert_parallel", None)


def _test_pipeline(config: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Test pipeline without the steps that need annotations."""
    steps: Any = config.get("test_dataloader") or config.get("val_dataloader")
    for key in ("dataset", "pipeline"):
        steps = steps.get(key) if isinstance(steps, dict) else None
    steps = steps or config.get("test_pipeline")
    steps = steps if isinstance(steps, list | tuple) else ()
    steps = [dict(step) for step in steps if isinstance(step, dict)]
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
    for file in (path, path.with_suffix(".py")) if with_config else (path,):
        check_free(file)


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
