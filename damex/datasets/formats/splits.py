"""Split assignment: from the folder, the config, or a hash of the images."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from damex.datasets.formats.images import content_share, for_all
from damex.datasets.formats.records import Contents, Options, Sample, Summary
from damex.datasets.formats.tree import (
    SPLITS,
    Tree,
    parent,
    some,
    split_name,
    split_of_file,
    split_of_folder,
    stem,
)
from damex.errors import ConfigError, did_you_mean

DEFAULT_VAL_SHARE = 0.1


def split_of_table(path: str, tables: Sequence[str]) -> str | None:
    """Split of one of several files with many images each.

    Files of one split, such as train2014 and train2017, may overlap: they keep their
    paths.
    """
    split = split_of_file(path)
    if split is not None and [*map(split_of_file, tables)].count(split) == 1:
        return split
    return path if split is not None or len(tables) > 1 else None


def splits_of_label_files(
    tree: Tree, samples: Sequence[Sample], summary: Summary
) -> dict[str, list[Sample]]:
    """Splits by ``ImageSets/train.txt``, ``ImageSets/Main/train.txt`` etc.

    Without these lists, by folders named like splits. Lists of one name in several
    folders (VOC2007 and VOC2012) are joined; VOC's lists per class are skipped.
    """
    splits: dict[str, list[Sample]] = {}
    by_stem: dict[str, list[Sample]] = {}
    by_folder: dict[str, list[Sample]] = {}
    # KITTI has equal names in training/ and testing/.
    for sample in sorted(samples, key=lambda s: _folder_split(s) != "train"):
        by_stem.setdefault(stem(sample.source), []).append(sample)
    for path in tree.with_suffix(".txt"):
        parts = parent(path).split("/")
        if "ImageSets" not in parts or parts[-1] not in ("ImageSets", "Main"):
            continue
        names = tree.lines(path)
        if all(re.search(r"\s(-1|0|1)$", name) for name in names if name):
            continue  # also an empty one
        base = "".join(f"{part}/" for part in parts[: parts.index("ImageSets")])
        split = split_name(stem(path)) or stem(path)
        for number, name in enumerate(names, start=1):
            near = (s for s in by_stem.get(name, ()) if s.source.startswith(base))
            if (found := next(near, None)) is not None:
                splits.setdefault(split, []).append(found)
            elif name:
                what = "names in a list of images without an annotation"
                summary.drop(what, f"{path}:{number}: {name}")
    for sample in samples:
        if (folder := _folder_split(sample)) is not None:
            by_folder.setdefault(folder, []).append(sample)
    return splits or by_folder


def _folder_split(sample: Sample) -> str | None:
    return split_of_folder(parent(sample.source))


def choose_splits(
    tree: Tree, contents: Contents, options: Options, summary: Summary
) -> dict[str, list[Sample]]:
    """Samples by split: from the entry, else from the folder.

    Without validation images, some of ``train`` are chosen by a hash of their content.

    Raises:
        ConfigError: If a named split is missing, or ``val_share`` contradicts.
    """
    found = contents.splits or {"train": contents.samples}
    chosen: dict[str, list[Sample]] = {}
    for split in SPLITS:
        names = getattr(options, split)
        if names is not None:
            chosen[split] = _selected(tree, contents, names, split, summary)
        elif found.get(split):
            chosen[split] = found[split]
    if "train" not in chosen and "trainval" in found:
        chosen["train"] = found["trainval"]
    # Evaluation images named by the entry are not trained on.
    named = ("val", "test") if options.train is None else ()
    held = {s.image for key in named if getattr(options, key) for s in chosen[key]}
    if held:
        chosen["train"] = [s for s in chosen.get("train", ()) if s.image not in held]
    if not chosen.get("train"):
        raise ConfigError(
            f"{tree.root} has no images for train, only the lists "
            f"{some([*found])}; name one with train='...'."
        )
    _count_unused(contents, chosen, summary)
    if "val" in chosen and options.val_share is not None:
        raise ConfigError(
            f"{tree.root}: val_share={options.val_share} cannot be used, since there "
            "is a val split already; leave it out."
        )
    if "val" not in chosen and options.val_share != 0.0:
        share = DEFAULT_VAL_SHARE if options.val_share is None else options.val_share
        chosen["train"], val = _by_content(tree, chosen["train"], share, summary)
        chosen["val"] = val
    return {split: chosen[split] for split in SPLITS if chosen.get(split)}


def _count_unused(
    contents: Contents, chosen: dict[str, list[Sample]], summary: Summary
) -> None:
    """Count images, and records of images annotated elsewhere, that are in no split."""
    used = {id(sample) for samples in chosen.values() for sample in samples}
    images = {sample.image for samples in chosen.values() for sample in samples}
    for sample in contents.samples:
        if sample.image not in images:
            summary.drop("annotated images in no split that is used", sample.image)
        elif id(sample) not in used:
            what = "annotations of used images in a file that no split uses"
            summary.drop(what, f"{sample.source}: {sample.image}")
    train = {sample.image for sample in chosen["train"]}
    for split in ("val", "test"):
        for sample in chosen.get(split, ()):
            if sample.image in train:
                what = f"WARNING: images of {split} are images of train, too"
                summary.note(what, sample.image)


def _selected(
    tree: Tree, contents: Contents, names: Iterable[str], split: str, summary: Summary
) -> list[Sample]:
    """Samples of a named list, an annotation file, a folder or a list of images."""
    found: dict[int, Sample] = {}
    for word in names:
        name = word.replace("\\", "/").rstrip("/")
        samples = contents.splits.get(name)
        if samples is None:
            samples = [s for s in contents.samples if s.source == name]
        if not samples and name in tree.files and name.endswith(".txt"):
            samples = _listed(tree, contents, name, summary)
        if not samples:
            folder = f"{name}/"
            samples = [
                sample
                for sample in contents.samples
                if sample.image.startswith(folder) or sample.source.startswith(folder)
            ]
        if not samples:
            known = [*contents.splits, *filter(None, tree.folders)]
            raise ConfigError(
                f"{tree.root}: {split}={word!r} is not a split, folder, list of images "
                f"or annotation file with images of it; {did_you_mean(word, known)}"
            )
        found.update((id(sample), sample) for sample in samples)
    return list(found.values())


def _listed(
    tree: Tree, contents: Contents, path: str, summary: Summary
) -> list[Sample]:
    """Samples of a list of images, possibly without folder and suffix."""
    images: dict[str, list[str]] = {}
    for sample in contents.samples:
        for key in {sample.image, stem(sample.image)}:
            images.setdefault(key, []).append(sample.image)
    found: set[str] = set()
    for number, line in enumerate(tree.lines(path), start=1):
        is_stem = "." not in line and "/" not in line
        matches = images.get(tree.locate_image(line) or "", ())
        matches = matches or (images.get(line, ()) if is_stem else ())
        found.update(matches)
        if line and not matches:
            what = f"lines of the list {path} that match no annotated image"
            summary.drop(what, f"{path}:{number}: {line}")
    return [sample for sample in contents.samples if sample.image in found]


def _by_content(
    tree: Tree, samples: list[Sample], share: float, summary: Summary
) -> tuple[list[Sample], list[Sample]]:
    """Split by file hash, stable when images are added; at least one for validation."""
    found = for_all(content_share, tree.root, (sample.image for sample in samples))
    shares = {k: 1.0 if isinstance(v, OSError) else v for k, v in found.items()}
    distinct = sorted(set(shares.values()))
    limit = share
    if len(distinct) > 1 and distinct[0] >= share:
        limit = distinct[1]
        summary.note(
            f"no image falls into the validation share of {share:g}: the nearest was "
            f"taken; val_share={distinct[0] + 0.005:.2f} makes that lasting",
            min(shares, key=lambda name: shares[name]),
        )
    elif distinct and distinct[-1] < share:
        limit = distinct[-1]
    val = [sample for sample in samples if shares[sample.image] < limit]
    train = [sample for sample in samples if shares[sample.image] >= limit]
    return train, val
