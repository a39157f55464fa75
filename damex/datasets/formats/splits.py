"""Split assignment: from the folder, the config, or a hash of the images."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from damex.datasets.formats.images import content_share, for_all
from damex.datasets.formats.records import Contents, Ledger, Options, Sample
from damex.datasets.formats.tree import (
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


def splits_by_folder(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Samples by the split that the folder of their annotation file is named after."""
    splits: dict[str, list[Sample]] = {}
    for sample in samples:
        if (split := split_of_folder(parent(sample.source))) is not None:
            splits.setdefault(split, []).append(sample)
    return splits


def split_of_table(path: str, tables: Sequence[str]) -> str | None:
    """Split of one of several files with many images each.

    Files of one split, such as train2014 and train2017, may overlap: they keep their
    paths.
    """
    split = split_of_file(path)
    if split is not None and [*map(split_of_file, tables)].count(split) == 1:
        return split
    return path if split is not None or len(tables) > 1 else None


def splits_by_image_sets(
    tree: Tree, find: Callable[[str, str], Sample | None], ledger: Ledger
) -> dict[str, list[Sample]]:
    """Read ``ImageSets/train.txt``, ``ImageSets/Main/train.txt`` etc. by list name.

    Lists of one name in several folders (VOC2007 and VOC2012) are joined; VOC's lists
    per class are skipped. ``find`` maps a folder and a name to a sample or None.
    """
    splits: dict[str, list[Sample]] = {}
    for path in tree.with_suffix(".txt"):
        parts = parent(path).split("/")
        if "ImageSets" not in parts or parts[-1] not in ("ImageSets", "Main"):
            continue
        names = tree.lines(path)
        if all(re.search(r"\s(-1|0|1)$", name) for name in names if name):
            continue  # also an empty one
        base = "/".join(parts[: parts.index("ImageSets")])
        split = split_name(stem(path)) or stem(path)
        for number, name in enumerate(names, start=1):
            sample = find(base, name) if name else None
            if name and sample is None:
                what = "names in a list of images without an annotation"
                ledger.drop(what, f"{path}:{number}: {name}")
            elif sample is not None:
                splits.setdefault(split, []).append(sample)
    return splits


def choose_splits(
    tree: Tree, contents: Contents, options: Options, ledger: Ledger
) -> dict[str, list[Sample]]:
    """Samples by split: from the entry, else from the folder.

    Without validation images, some of ``train`` are chosen by a hash of their content.

    Raises:
        ConfigError: If a named split is missing, or ``val_share`` contradicts.
    """
    own = contents.splits or {"train": contents.samples}
    chosen: dict[str, list[Sample]] = {}
    for split in ("train", "val", "test"):
        told = getattr(options, split)
        if told is not None:
            chosen[split] = _selected(tree, contents, told, split, ledger)
        elif own.get(split):
            chosen[split] = own[split]
    if "train" not in chosen and "trainval" in own:
        chosen["train"] = own["trainval"]
    _leave_out(chosen, options)
    if not chosen.get("train"):
        raise ConfigError(
            f"{tree.root} has no images for train, only the lists "
            f"{some([*own])}; name one with train='...'."
        )
    _note_unused(contents, chosen, ledger)
    if "val" in chosen and options.val_share is not None:
        raise ConfigError(
            f"{tree.root}: val_share={options.val_share} cannot be used, since there "
            "is a val split already; leave it out."
        )
    if "val" not in chosen and options.val_share != 0.0:
        share = DEFAULT_VAL_SHARE if options.val_share is None else options.val_share
        chosen["train"], val = _by_content(tree, chosen["train"], share, ledger)
        if val:
            chosen["val"] = val
    return {
        split: chosen[split] for split in ("train", "val", "test") if split in chosen
    }


def _leave_out(chosen: dict[str, list[Sample]], options: Options) -> None:
    """Remove evaluation images named by the entry from a train split of the folder."""
    for split in ("val", "test"):
        if getattr(options, split) is not None and options.train is None:
            held = {sample.image for sample in chosen[split]}
            train = chosen.get("train", ())
            chosen["train"] = [s for s in train if s.image not in held]


def _note_unused(
    contents: Contents, chosen: Mapping[str, list[Sample]], ledger: Ledger
) -> None:
    """Count images, and records of images annotated elsewhere, that are in no split."""
    used = {id(sample) for samples in chosen.values() for sample in samples}
    images = {sample.image for samples in chosen.values() for sample in samples}
    for sample in contents.samples:
        if sample.image not in images:
            ledger.drop("annotated images in no split that is used", sample.image)
        elif id(sample) not in used:
            what = "annotations of used images in a file that no split uses"
            ledger.drop(what, f"{sample.source}: {sample.image}")
    train = {sample.image for sample in chosen.get("train", ())}
    for split in ("val", "test"):
        common = [s.image for s in chosen.get(split, ()) if s.image in train]
        if common:
            what = f"WARNING: images of {split} are images of train, too"
            ledger.note(what, common[0], len(common))


def _selected(
    tree: Tree, contents: Contents, told: Iterable[str], split: str, ledger: Ledger
) -> list[Sample]:
    """Samples of a named list, an annotation file, a folder or a list of images."""
    found: dict[int, Sample] = {}
    for one in told:
        name = one.replace("\\", "/").rstrip("/")
        samples = _named(tree, contents, name, ledger)
        if not samples:
            known = [*contents.splits, *(f for f in sorted(tree.folders) if f)]
            raise ConfigError(
                f"{tree.root}: {split}={one!r} is no split, folder, list of images or "
                f"annotation file with images of it; {did_you_mean(one, known)}"
            )
        found.update((id(sample), sample) for sample in samples)
    return list(found.values())


def _named(tree: Tree, contents: Contents, name: str, ledger: Ledger) -> list[Sample]:
    if name in contents.splits:
        return contents.splits[name]
    by_source = [sample for sample in contents.samples if sample.source == name]
    if by_source:
        return by_source
    if name in tree.files and name.endswith(".txt"):
        return _listed(tree, contents, name, ledger)
    folder = f"{name}/"
    return [
        sample
        for sample in contents.samples
        if sample.image.startswith(folder) or sample.source.startswith(folder)
    ]


def _listed(tree: Tree, contents: Contents, path: str, ledger: Ledger) -> list[Sample]:
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
            ledger.drop(what, f"{path}:{number}: {line}")
    return [sample for sample in contents.samples if sample.image in found]


def _by_content(
    tree: Tree, samples: list[Sample], share: float, ledger: Ledger
) -> tuple[list[Sample], list[Sample]]:
    """Split by file hash, stable when images are added; at least one for validation."""
    shares = {
        name: 1.0 if isinstance(value, OSError) else value
        for name, value in for_all(
            content_share, tree.root, (sample.image for sample in samples)
        ).items()
    }
    distinct = sorted(set(shares.values()))
    limit = share
    if len(distinct) > 1 and distinct[0] >= share:
        limit = distinct[1]
        ledger.note(
            f"no image falls into the validation share of {share:g}: the nearest was "
            f"taken; val_share={distinct[0] + 0.005:.2f} makes that lasting",
            next(name for name in shares if shares[name] == distinct[0]),
        )
    elif distinct and distinct[-1] < share:
        limit = distinct[-1]
    val = [sample for sample in samples if shares[sample.image] < limit]
    train = [sample for sample in samples if shares[sample.image] >= limit]
    return train, val
