"""Geometry of images: one size for all pipelines, and the same view in all of them."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from damex.config_files import LOADERS, mixture_datasets, mixtures_of
from damex.datasets.coco_records import parse_records, read_json, used_boxes
from damex.datasets.coco_schema import Expectations
from damex.datasets.mmdet_configs import image_scales, wrapped
from damex.datasets.pixels import ORIENTATION
from damex.datasets.spec import DatasetSpec, parse_mixture
from damex.datasets.windows import Advice, advice_for
from damex.errors import ConfigError, DataError

Size = tuple[int, int]  # width and height in pixels
# Options of pipeline steps that are image sizes, and the steps that have them.
SIZES = ("scale", "scales", "size", "crop_size", "img_scale", "max_size")
STEPS = ("Resize", "Crop", "Pad", "Mosaic", "MixUp")
STRIDE = 32  # a canvas is whole cells of the coarsest feature map
DRAWS = 8  # of a step, to see whether it is random
ROUNDING = 0.05  # of the ratio of a resized image


def image_size_of(cfg: Mapping[str, Any]) -> Size:
    """Largest width and height of evaluated images; ConfigError without a `Resize`."""
    for loader in ("test_dataloader", "val_dataloader"):
        for pipeline in pipelines_of(cfg, loader).values():
            for step in pipeline:
                scale: Any = step.get("scale") if step.get("type") == "Resize" else None
                pair = [scale] * 2 if np.ndim(scale) == 0 else [*scale]
                if len(pair) == 2 and all(map(_is_count, pair)):
                    return int(pair[0]), int(pair[1])
    raise ConfigError(
        "the evaluation has no Resize(scale=(width, height)), which sets the size of "
        "images; add one to the pipeline of test_dataloader."
    )


def set_image_size(cfg: Mapping[str, Any]) -> list[str]:
    """Give all pipelines the top-level ``image_size``, in place.

    ``image_size`` is the longest side in pixels, or width and height: the ``scale`` of
    the ``Resize`` of evaluation. If it is not, that ``Resize`` gets it, and all other
    sizes of the pipelines change in proportion: those of training, padding, crops, and
    a ``pad_size_divisor`` that pads each image to one canvas. ConfigError if it is
    not a size, evaluation does not resize, or only some sizes are of another image
    size.

    Returns:
        A note if sizes changed: a config may have inherited ``image_size``.
    """
    wanted = cfg.get("image_size")
    if wanted is None:
        return []
    pair = [wanted] * 2 if isinstance(wanted, (int, float)) else wanted
    if np.size(pair) != 2 or not all(_is_count(x) for x in pair):
        raise ConfigError(
            "image_size must be the longest side of an image in pixels, or (width, "
            f"height), got {wanted!r}."
        )
    new, old = (int(pair[0]), int(pair[1])), image_size_of(cfg)
    if new == old:
        return []
    config = dict(cfg.items())
    steps = [(s, key) for s in sized_steps(config) for key in SIZES if key in s]
    for step, key in steps:
        if tuple(np.ravel(step[key])) == new:
            raise ConfigError(
                f"image_size is {wanted!r}, and so is {key} of {step['type']}, but "
                f"evaluation resizes to {old[0]} x {old[1]}: it is not clear which "
                "sizes are of another image size. Give evaluation the scale "
                f"{new}, or leave image_size out."
            )
    for step, key in steps:
        if step["type"] == "Pad" and np.min(step[key] or 0) >= max(old):
            step[key] = (max(new), max(new))  # a canvas holds portraits, too
        else:
            step[key] = _in_proportion(step[key], old, new, by_side="scale" in key)
    preprocessor = (cfg.get("model") or {}).get("data_preprocessor") or {}
    if preprocessor.get("pad_size_divisor", 1) >= max(old):
        preprocessor["pad_size_divisor"] = -(-max(new) // STRIDE) * STRIDE
    return [
        f"image_size is {wanted}: the Resize of evaluation, {old[0]} x {old[1]}, "
        f"becomes {new[0]} x {new[1]}, and all other sizes of the pipelines change in "
        "proportion."
    ]


def choose_tiles(cfg: Mapping[str, Any]) -> list[str]:
    """Replace ``tile="auto"`` in the mixture of a config by a number or None, in place.

    ConfigError if training data is neither a COCO file nor a folder, or is not resized.

    Returns:
        The choice and its reason for each such dataset.
    """
    notes = []
    dataset = (cfg.get("train_dataloader") or {}).get("dataset") or {}
    common = next(iter(mixture_datasets(dataset)), dataset).get("pipeline") or ()
    for number, entry in enumerate(cfg.get("mixture") or ()):
        if not isinstance(entry, dict) or entry.get("tile") != "auto":
            continue
        spec = DatasetSpec.from_config(entry, number)
        tile, reason, _, views = _advice_of(spec, common)
        # A written config has the mixture in its dataloaders as well.
        copies = [
            one
            for mixture in mixtures_of(cfg)
            for one in mixture.get("datasets") or ()
            if (one.get("name"), one.get("tile")) == (spec.name, "auto")
        ]
        for one in (entry, *copies):
            one["tile"] = tile
        chosen, cost = "whole images", ""
        if tile is not None:
            chosen = f"windows of {tile} px"
            cost = f"; an image is {views} views in evaluation and prediction"
        notes.append(f"tile='auto' of {spec.name} is {chosen}: {reason}{cost}.")
    return notes


def _advice_of(spec: DatasetSpec, pipeline: Sequence[Any]) -> Advice:
    """Advice for the training images of a dataset; the loader reports invalid ones."""
    unread = Advice(None, "its annotations cannot be read", 0)
    try:
        source = spec.coco_source("train")
        scales = image_scales(spec.pipeline("train") or pipeline)
    except (ConfigError, DataError):
        return unread
    if source is None or not scales:
        problem = (
            "reads the sizes of boxes from root or from a COCO file, and train is a "
            "dataset class"
            if source is None
            else "needs a Resize with a scale in the pipeline of training"
        )
        raise ConfigError(
            f"dataset {spec.name!r}: tile='auto' {problem}; give the side of a window "
            "in pixels, or leave tile out."
        )
    document, _ = read_json(source.annotations, source.location)
    records, _ = parse_records(document, source.location, spec.classes)
    if records is None:
        return unread
    used_N = used_boxes(records, Expectations(classes=spec.classes))
    box_N4, size_N2 = records.box_N4[used_N], records.size_N2[used_N]
    return advice_for(box_N4, size_N2, max(scales, key=min))


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and value > 1 and float(value).is_integer()


def sized_steps(node: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Steps with sizes anywhere in a config, each object once."""
    seen = set() if seen is None else seen
    if id(node) in seen or not isinstance(node, (Mapping, list, tuple)):
        return
    seen.add(id(node))
    if isinstance(node, Mapping):
        if any(name in str(node.get("type")) for name in STEPS):
            yield node
        node = [value for key, value in node.items() if key != "model"]
    for value in node:
        yield from sized_steps(value, seen)


def _in_proportion(value: Any, old: Size, new: Size, *, by_side: bool) -> Any:
    """A size, or nested sizes, of images that were ``old`` for images of ``new``.

    With ``by_side``, the larger number of a pair bounds the longer side, as in mmcv.
    """
    if isinstance(value, (list, tuple)):
        kind, pair = type(value), tuple(value)
        if pair in (old, old[::-1]):
            return kind(new if pair == old else new[::-1])
        if by_side and len(pair) == 2 and all(map(_is_count, pair)):
            ends: Any = (max, min) if pair[0] > pair[1] else (min, max)
            rows = zip(pair, ends, strict=True)
            return kind(_rounded(side, end(new) / end(old)) for side, end in rows)
        return kind(_in_proportion(x, old, new, by_side=by_side) for x in value)
    if by_side and value == old[0] == old[1]:
        return new  # one number is both sides
    return _rounded(value, max(new) / max(old)) if _is_count(value) else value


def _rounded(side: float, factor: float) -> int:
    return max(round(side * factor), 1)


def pipelines_of(cfg: Mapping[str, Any], loader: str) -> dict[str, Sequence[Any]]:
    """Pipelines of the datasets of a dataloader, by name or number."""
    dataset = (cfg.get(loader) or {}).get("dataset") or {}
    mixtures = mixture_datasets(dataset)
    if not mixtures:
        return {f"dataset {n}": steps for n, steps in enumerate(_chains(dataset))}
    common, split = mixtures[0].get("pipeline") or (), mixtures[0].get("split", "train")
    entries = mixtures[0].get("datasets") or cfg.get("mixture") or ()
    return {  # a folder has none of its own, and looking at it takes time
        spec.name: (spec.pipeline(split) if spec.root is None else None) or common
        for spec in parse_mixture(entries)
    }


def _chains(dataset: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Steps for the images of each plain dataset, with those of its wrappers."""
    inner = wrapped(dataset)
    last = [*(dataset.get("pipeline") or ())]
    if not inner and last:
        yield last
    for one in inner:
        for first in _chains(one):
            yield first + last


def check_views(cfg: Mapping[str, Any]) -> list[str]:
    """Check that evaluation shows images to the detector as training does.

    Compared is all that is not random: loading with EXIF orientation and channel order,
    size, aspect ratio, padding, normalization, and any other step. The top-level key
    ``pipeline_check="off"`` skips the check. ConfigError if an image looks different;
    it names both steps.

    Returns:
        Notes on pipelines that cannot be compared.
    """
    notes: list[str] = []
    if cfg.get("pipeline_check", "on") == "off":
        return []
    trained, seen = pipelines_of(cfg, LOADERS[0]), set()
    with tempfile.TemporaryDirectory() as folder:
        probe = _write_probe(Path(folder), orientation=6)  # a quarter turn
        for loader in LOADERS[1:]:
            for name, steps in pipelines_of(cfg, loader).items():
                pair = repr((trained.get(name), steps))
                if name not in trained or pair in seen:
                    continue
                seen.add(pair)
                where = f"{loader}, {name}"
                try:
                    views = [view_of(one, probe) for one in (trained[name], steps)]
                except _CannotRunError as error:
                    notes.append(f"{where} was not compared with training: {error}.")
                    continue
                _compare(*views, where=where)
    return notes


class _CannotRunError(Exception):
    """A step does not run on the probe."""


def padding_notes(cfg: Mapping[str, Any]) -> list[str]:
    """Note that training pads an image with its batch, and evaluation does not.

    None if all images get one canvas, or random sizes, as in mmdet's DETRs.
    """
    loader = cfg.get(LOADERS[0]) or {}
    if loader.get("batch_size", 1) == 1 or cfg.get("pipeline_check", "on") == "off":
        return []
    preprocessor = (cfg.get("model") or {}).get("data_preprocessor") or {}
    divisor = preprocessor.get("pad_size_divisor", 1)
    with tempfile.TemporaryDirectory() as folder:
        probes = [_write_probe(Path(folder), orientation=turn) for turn in (1, 6)]
        pipelines = pipelines_of(cfg, LOADERS[0])  # mostly one for all datasets
        for name, steps in {repr(row[1]): row for row in pipelines.items()}.values():
            with contextlib.suppress(_CannotRunError):
                views = [view_of(steps, probe) for probe in probes]
                sizes = [view.shown["img_shape"][:2] for view in views]
                cells = {tuple(-(-side // divisor) for side in size) for size in sizes}
                if len(cells) > 1 and not any(view.is_resized for view in views):
                    square = (max(map(max, sizes)),) * 2
                    return [
                        f"training pads a batch ({name}) to its largest image, and "
                        "evaluation none: images that are not square may lose AP. Give "
                        f"all pipelines dict(type='Pad', size={square}) after Resize."
                    ]
    return []


def _write_probe(folder: Path, *, orientation: int) -> Path:
    """Write a color image of 96 x 60 pixels, to be shown as its EXIF says."""
    places_HW = np.add.outer(np.linspace(0, 90, 60), np.linspace(0, 120, 96))
    pixels_HWC = np.stack([places_HW, 0.5 * places_HW + 60, 250 - places_HW], -1)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = folder / f"probe{orientation}.jpg"
    Image.fromarray(pixels_HWC.astype(np.uint8)).save(path, exif=exif, quality=95)
    return path


@dataclass
class View:
    """How a pipeline shows an image, apart from random steps.

    Attributes:
        loaded: Results of the first step.
        steps: Steps that change the image, with the size (width, height) after each.
        shown: Results of the last step.
        is_resized: Whether a random step resizes.
        keeps_ratio: Whether no step stretches.
    """

    loaded: Mapping[str, Any]
    steps: list[tuple[Mapping[str, Any], Size]] = field(default_factory=list)
    shown: Mapping[str, Any] = field(default_factory=dict)
    is_resized: bool = False
    keeps_ratio: bool = True


def view_of(pipeline: Sequence[Mapping[str, Any]], path: Path) -> View:
    """Run the steps of a pipeline on an image, and leave out the random ones."""
    box = dict(bbox=[5.0, 5.0, 50.0, 50.0], bbox_label=0, ignore_flag=0)
    state: dict[str, Any] = dict(img_path=str(path), img_id=0, instances=[box])
    view = View(state)
    for step in pipeline:
        if "Pack" in str(step.get("type")):
            break
        draws = _draws(step, state)
        if not draws:
            continue  # it rejects the image
        resized = [draw for draw in draws if _scale(draw) != _scale(state)]
        ratios = [across / down for across, down, *_ in map(_scale, resized)]
        view.keeps_ratio &= all(abs(ratio - 1) < ROUNDING for ratio in ratios)
        if not all(_is_same(draws[0], draw) for draw in draws):
            view.is_resized |= bool(resized)
            continue
        if "img" not in state:
            view.loaded = draws[0]
        if not _is_same(state, draws[0]):
            view.steps.append((step, draws[0]["img_shape"][1::-1]))
        state = draws[0]
    view.shown = state
    return view


def _draws(step: Mapping[str, Any], state: Mapping[str, Any]) -> list[dict[str, Any]]:
    # Imports that take seconds; a check of data only reads the size of images.
    from mmdet.registry import TRANSFORMS

    from damex.datasets.mixture import local_seed

    draws = []
    for seed in range(DRAWS):
        with local_seed(seed):
            try:
                transform = TRANSFORMS.build(dict(step))
                draws.append(transform(copy.deepcopy(dict(state))))
            except Exception as error:  # steps raise anything
                reason = " ".join(str(error).split()) or type(error).__name__
                raise _CannotRunError(
                    f"{step.get('type')} does not run on a single image ({reason})"
                ) from error
    return [draw for draw in draws if draw is not None]


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results show the same: pixels, and how many of them are image."""
    if "img" not in one or "img" not in other:
        return ("img" in one) == ("img" in other)
    (a, b), shapes = (one["img"], other["img"]), (one["img_shape"], other["img_shape"])
    is_alike = a.shape == b.shape and tuple(shapes[0][:2]) == tuple(shapes[1][:2])
    return is_alike and np.allclose(a, b)


def _scale(results: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(results.get("scale_factor") or (1.0, 1.0))


def _compare(train: View, test: View, *, where: str) -> None:
    """Raise ConfigError if two pipelines show an image differently."""
    if not train.is_resized and _is_same(train.shown, test.shown):
        return
    steps = [train.steps, test.steps]
    if train.is_resized:  # sizes differ by intention
        skipped = int(_is_same(train.loaded, test.loaded))
        steps = [
            [s for s in one[skipped:] if "Resize" not in str(s[0].get("type"))]
            for one in steps
        ]
    for mine, other in zip_longest(*steps, fillvalue=(None, None)):
        if mine[0] != other[0] or (mine[1] != other[1] and not train.is_resized):
            raise ConfigError(
                f"training and evaluation ({where}) show an image differently: "
                f"training applies {_words(*mine)}, evaluation {_words(*other)}. Use "
                "the same steps in both pipelines, and random ones in training alone; "
                "or set pipeline_check='off' if this is intended."
            )
    if train.keeps_ratio != test.keeps_ratio:
        kept = ("evaluation", "training")[train.keeps_ratio]
        raise ConfigError(
            f"training and evaluation ({where}) show an image differently: only "
            f"{kept} keeps the aspect ratio; set keep_ratio of Resize alike in both "
            "pipelines, or set pipeline_check='off' if this is intended."
        )


def _words(step: Mapping[str, Any] | None, size: Size | None) -> str:
    if step is None or size is None:
        return "nothing"
    options = ", ".join(f"{k}={v!r}" for k, v in step.items() if k != "type")
    return f"{step['type']}({options}), so that it has {size[0]} x {size[1]} px"
