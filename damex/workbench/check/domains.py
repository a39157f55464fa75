"""Find datasets that look alike: no router can tell their images apart.

Experts of a dataset see its labels alone. Where an image does not show which dataset it
is from, such experts answer with the classes of the wrong one, so that datasets that
look alike share experts.

Axes: N images, F features.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from damex.datasets.coco_checks import check_coco
from damex.datasets.coco_schema import Expectations
from damex.datasets.findings import Finding, Location
from damex.datasets.image_files import ImageRecord, images_of_any_size
from damex.datasets.pixels import read_pixels
from damex.datasets.spec import DatasetSpec, parse_mixture
from damex.workbench.check.sources import image_records, read_source, sources_of

SAMPLE = 100  # images of a dataset that are looked at
FEWEST = 20  # fewer images per dataset decide nothing
SIDE, CELLS = 32, 4  # side of the small picture, and cells along it that are described
DIRECTIONS = 8  # of edges that are counted
RIDGE = 0.1
# Share of images whose dataset is recognized; 0.5 is chance. Halves of one dataset
# reach 0.59, of 32 images each 0.73; datasets of different sources 0.80 and more
# (docs/results/split-labels.md).
TOLD_APART = 0.75


class Pair(NamedTuple):
    """Two datasets, and the share of images whose dataset is recognized."""

    first: str
    second: str
    accuracy: float


def look_of(path: Path) -> np.ndarray:
    """Colors, contrasts and directions of edges of an image file (F)."""
    with Image.open(path) as image:
        image.draft("RGB", (SIDE, SIDE))
        is_deep = image.mode[0] in "IF"  # convert would clip values above 255
        whole = Image.fromarray(read_pixels(path).image) if is_deep else image
        small = whole.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    pixels_HWC = np.asarray(small, np.float32) / 255
    cell = SIDE // CELLS
    blocks = pixels_HWC.reshape(CELLS, cell, CELLS, cell, 3)
    down, across = np.gradient(pixels_HWC.mean(2))
    angles = np.arctan2(down, across) % np.pi / np.pi * DIRECTIONS
    edges = np.bincount(
        angles.astype(int).ravel() % DIRECTIONS,
        weights=np.hypot(down, across).ravel(),
        minlength=DIRECTIONS,
    )
    parts = (blocks.mean((1, 3)), blocks.std((1, 3)), edges / SIDE**2)
    return np.concatenate([part.ravel() for part in parts])


def recognized(first_NF: np.ndarray, second_NF: np.ndarray) -> float:
    """Share of images whose dataset a ridge regression on all others recognizes.

    The mean over both datasets; leaving an image out is exact and needs one inverse
    (Hastie et al., The Elements of Statistical Learning, eq. 7.64).
    """
    looks_NF = np.concatenate([first_NF, second_NF])
    looks_NF = (looks_NF - looks_NF.mean(0)) / (looks_NF.std(0) + 1e-6)
    signs_N = np.repeat([1.0, -1.0], [len(first_NF), len(second_NF)])
    kernel_NN = looks_NF @ looks_NF.T / looks_NF.shape[1] + 1.0  # with an intercept
    hat_NN = kernel_NN @ np.linalg.inv(kernel_NN + RIDGE * np.eye(len(signs_N)))
    left_out_N = signs_N - (signs_N - hat_NN @ signs_N) / (1 - np.diag(hat_NN))
    is_right_N = left_out_N * signs_N > 0
    return float((is_right_N[signs_N > 0].mean() + is_right_N[signs_N < 0].mean()) / 2)


def look_alikes(images: Mapping[str, Sequence[Path]]) -> list[Pair]:
    """Pairs of datasets that look alike, from a sample of the images of each.

    Files that Pillow does not read are skipped, and so are datasets of fewer than
    ``FEWEST`` images.
    """
    looks_of_all = {name: looks_of(paths) for name, paths in images.items()}
    looks = {name: one for name, one in looks_of_all.items() if len(one) >= FEWEST}
    pairs = (
        Pair(first, second, recognized(looks[first], looks[second]))
        for first, second in combinations(looks, 2)
    )
    return [pair for pair in pairs if pair.accuracy < TOLD_APART]


def looks_of(paths: Sequence[Path]) -> np.ndarray:
    """The look (N, F) of a sample of image files, without those that are unreadable."""
    chosen = random.Random(0).sample(sorted(paths), min(SAMPLE, len(paths)))
    found = []
    with images_of_any_size():
        for path in chosen:
            # PIL's readers raise anything; the data check names the fault.
            with suppress(Exception):
                found.append(look_of(path))
    return np.stack(found) if found else np.empty((0, 0))


def groups_of(pairs: Sequence[Pair]) -> dict[str, str]:
    """Names of groups by dataset; a group is what pairs connect."""
    group_of: dict[str, set[str]] = {}
    for first, second, _ in pairs:
        joined = group_of.get(first, {first}) | group_of.get(second, {second})
        group_of |= dict.fromkeys(joined, joined)
    return {name: "+".join(sorted(group)) for name, group in group_of.items()}


def share_experts(mixture: Sequence[dict[str, Any]]) -> list[Pair]:
    """Give one ``group`` to the entries of datasets that look alike, in place.

    Nothing is changed if an entry names a group already. Data that cannot be read look
    like nothing; the loader reports them.
    """
    if any("group" in entry for entry in mixture):
        return []
    images = {spec.name: _train_images(spec) for spec in parse_mixture(mixture)}
    pairs = look_alikes(images)
    groups = groups_of(pairs)
    for entry in mixture:
        if entry["name"] in groups:
            entry["group"] = groups[entry["name"]]
    return pairs


def _train_images(spec: DatasetSpec) -> list[Path]:
    """Paths of the training images; none if a file cannot be read."""
    paths = []
    for source in sources_of(spec, ["train"]):
        document = None if isinstance(source, Finding) else read_source(source)[0]
        if isinstance(source, Finding) or document is None:
            continue
        records, _ = check_coco(document, source.location, Expectations())
        if records is not None:
            found = image_records(records, source.images, Expectations())
            paths += [image.path for image in found if image.is_used]
    return paths


def has_experts(cfg: Mapping[str, Any]) -> bool:
    """Whether the detector of a config, resolved or not, has experts."""
    parts = (cfg, cfg.get("model") or {})  # a resolved config has ``moe`` in its model
    # "dense" is a file of configs/_base_/moe by name.
    return any(part.get("moe") not in (None, "dense") for part in parts)


def check_looks(
    images: Sequence[ImageRecord], groups: Mapping[str, str], *, is_mixture: bool
) -> Iterator[Finding]:
    """Findings about datasets of different ``groups`` whose training images look alike.

    With `is_mixture`, experts of the detector are each of a group: a warning.
    """
    paths: dict[str, list[Path]] = {}
    for image in images:
        if image.split == "train" and image.is_used:
            paths.setdefault(image.location.dataset, []).append(image.path)
    pairs = look_alikes(paths)
    shared = groups_of(pairs)
    for first, second, accuracy in pairs:
        if groups[first] != groups[second]:
            text = (
                f"looks like {second}: the dataset of an image is recognized in "
                f"{accuracy:.0%}, where 50% is chance. Experts of a dataset learn its "
                "labels alone and would get images of the other; give both entries "
                f"group='{shared[first]}', or train without experts (moe=None)."
            )
            location = Location(first, "its training images")
            level = "warning" if is_mixture else "info"
            yield location.finding("looks-alike", None, text, level=level)
