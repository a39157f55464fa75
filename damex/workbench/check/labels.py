"""``damex data labels``: classes of a mixture that are merged, or could be."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from damex.datasets.coco_records import parse_records, read_coco
from damex.datasets.label_space import LabelFile, LabelSpace
from damex.datasets.spec import DatasetSpec, parse_mixture
from damex.errors import ConfigError, check_known, printable
from damex.files import check_free, write_text
from damex.options import option_of
from damex.workbench.check.classes import are_labels, similar_names
from damex.workbench.check.sources import mixture_config_of

FEW = 10  # minimum number of boxes to compare sizes and shapes
FACTOR = 3.0  # ratio of medians that suggests different things
ADVICE = (
    "Objects of these classes in images of these datasets are taught as background. If "
    "there are any, damex data complete adds labels for them, and "
    "model.ignore_unannotated_classes=0.15 forgives detections of them."
)


@dataclass(frozen=True)
class ClassCount:
    """Labeled boxes of one class of one dataset."""

    own: str  # the dataset's name of the class
    target: str | None  # the class of the mixture; None if left out
    boxes: int | None = None  # their number; None if the dataset is not a COCO file
    supercategory: str = ""
    scales: Sequence[float] | np.ndarray = ()  # square root of the share of the image
    shapes: Sequence[float] | np.ndarray = ()  # width over height


Counts = Mapping[str, Sequence[ClassCount]]  # per dataset
# Per class of the mixture: datasets, and their classes.
Rows = Mapping[str, Sequence[tuple[str, ClassCount]]]


def labels(data: Sequence[str], *, cfg_options: Sequence[str], out: str | None) -> None:
    """Print the merge table of a config or folders; write an initial label file."""
    cfg = mixture_config_of(data, cfg_options)
    specs = parse_mixture(cfg["mixture"])
    rules = cfg.get("label_space") or "union"
    if out is not None and Path(out).suffix != ".json":
        raise ConfigError(f"--out must end in .json, got {out!r}.")
    if out is not None:
        check_free(Path(out))
    space = LabelSpace.from_specs(specs, mode=rules)
    counts = {
        spec.name: count_classes(spec, mapping)
        for spec, mapping in zip(specs, space.dataset_classes, strict=True)
    }
    print(printable("\n".join(report(counts, space))))
    if out is None:
        return
    current = {  # of all used classes
        one.name: {
            count.own: count.target
            for count in counts[one.name]
            if count.own in one.own_classes
        }
        for one in specs
    }
    write_text(out, LabelFile(current, unlisted="error").to_text())
    if cfg.filename is None:  # the file replaces these options
        said = re.compile(r"label_space=|mixture\.\d+\.rename\b")
        kept = [word for word in cfg_options if not said.match(word)]
        words = ["--data", *data, "--cfg-options", *kept, option_of("label_space", out)]
        use = f"train with it:\n  damex train {shlex.join(words)}"
    else:
        renaming = ", ".join(spec.name for spec in specs if spec.rename)
        also = f", and remove rename from the entries of {renaming}" if renaming else ""
        use = f"set label_space = {out!r} at the top level of the config{also}."
    print(f"\nwritten: {out}. Edit it, and {use}")


def count_classes(spec: DatasetSpec, mapping: Mapping[str, str]) -> list[ClassCount]:
    """Count training labels by class; ``mapping`` is class name -> mixture class."""
    source = spec.coco_source("train") or spec.coco_source("val")
    if source is None:
        return [ClassCount(own, mapping.get(own)) for own in spec.own_classes]
    document = read_coco(source.annotations, spec.name)
    above = {
        str(category["name"]): str(category.get("supercategory") or "")
        for category in document["categories"]
    }
    for name in spec.classes or ():
        check_known(name, above, f"dataset {spec.name!r}: classes names {name!r}")
    records, _ = parse_records(document, source.location, above)
    assert records is not None  # read_coco has checked it
    with np.errstate(all="ignore"):  # sides of 0, and sizes that are unknown
        side_N2 = records.box_N4[:, 2:]
        scale_N = np.sqrt((side_N2 / records.size_N2).prod(axis=1))
        shape_N = side_N2[:, 0] / side_N2[:, 1]
        is_valid_N = (side_N2 > 0).all(axis=1) & np.isfinite(scale_N) & (scale_N > 0)
    found, is_label_N = [], are_labels(records)
    for number, name in enumerate(records.categories.values()):
        is_own_N = (records.class_N == number) & is_label_N
        about = mapping.get(name), int(is_own_N.sum()), above[name]
        boxes_B = is_own_N & is_valid_N
        found.append(ClassCount(name, *about, scale_N[boxes_B], shape_N[boxes_B]))
    return found


def report(counts: Counts, space: LabelSpace) -> list[str]:
    """The merge table, near-miss names, and names that may mean different things."""
    rows = by_target(counts)
    shared = sum(len({dataset for dataset, _ in row}) > 1 for row in rows.values())
    width = max(len(name) for name in rows)
    lines = [
        f"{len(rows)} classes of {len(counts)} datasets; {shared} in more than one",
        f"{'class':{width}}  dataset: own word, boxes",
    ]
    for name, row in rows.items():
        cells = "; ".join(f"{dataset}: {_cell(count, name)}" for dataset, count in row)
        lines.append(f"{name:{width}}  {cells}")
    _, missing = class_notes(space)
    left_out = [
        f"{dataset}: {_cell(count, '')}"
        for dataset, found in counts.items()
        for count in found
        if count.target is None
    ]
    sections = {
        "near-miss names (one class, or two?)": near_misses(rows, counts),
        "merged by name, but perhaps different things": sorted(conflicts(rows)),
        "left out": left_out,
        "not annotated by all datasets": [*missing, *([ADVICE] if missing else [])],
    }
    for title, found in sections.items():
        lines += ["", f"{title}:", *(f"  {line}" for line in found or ["none"])]
    return lines


def by_target(counts: Counts) -> Rows:
    """Per class of the mixture: datasets and counts; most datasets first."""
    rows: dict[str, list[tuple[str, ClassCount]]] = {}
    for dataset, found in counts.items():
        for count in found:
            if count.target is not None:
                rows.setdefault(count.target, []).append((dataset, count))
    return dict(sorted(rows.items(), key=lambda row: -len({d for d, _ in row[1]})))


def _cell(count: ClassCount, target: str) -> str:
    own = "" if count.own == target else f"{count.own!r}, "
    return own + ("not counted" if count.boxes is None else f"{count.boxes:,}")


def is_kept_apart(name: str, datasets: Collection[str]) -> bool:
    """Whether a class is named ``dataset/class``: not merged, on purpose."""
    prefix, slash, _ = name.partition("/")
    return bool(slash) and prefix in datasets


def near_misses(rows: Rows, datasets: Collection[str]) -> list[str]:
    """Pairs of classes of the mixture with nearly the same name."""
    names = [name for name in rows if not is_kept_apart(name, datasets)]
    lines = []
    for first, second, why in similar_names(names):
        a, b = ({dataset for dataset, _ in rows[name]} for name in (first, second))
        if a == b and len(a) == 1:  # two names in one dataset are two things
            continue
        where = f"{', '.join(sorted(a))} and {', '.join(sorted(b))}"
        lines.append(f"{first!r} and {second!r} ({why}), of {where}")
    return lines


def conflicts(rows: Rows) -> Iterator[str]:
    """Classes of equal name in several datasets that may mean different things.

    A hint from supercategories, and median size and shape of boxes.
    """
    for name, row in rows.items():
        for (first, a), (second, b) in combinations(row, 2):
            if first == second or a.own.casefold() != b.own.casefold():
                continue  # merged on purpose
            if reasons := list(_differences(a, b)):
                yield f"{name!r} of {first} and {second}: {'; '.join(reasons)}"


def _differences(a: ClassCount, b: ClassCount) -> Iterator[str]:
    ours, theirs = (
        "" if one.supercategory in ("none", one.own) else one.supercategory
        for one in (a, b)
    )
    if ours and theirs and ours.casefold() != theirs.casefold():
        yield f"supercategories {ours!r} and {theirs!r}"
    if min(len(a.scales), len(b.scales)) < FEW:
        return
    x, y = np.median(a.scales), np.median(b.scales)
    if max(x, y) > FACTOR * min(x, y):
        yield f"side of a typical box {x:.0%} and {y:.0%} of the image's"
    x, y = np.median(a.shapes), np.median(b.shapes)
    if max(x, y) > FACTOR * min(x, y):
        yield f"width over height of a typical box {x:.2g} and {y:.2g}"


def class_notes(
    space: LabelSpace, limit: int | None = None
) -> tuple[list[str], list[str]]:
    """Lines on the classes that are merged, and on those that a dataset lacks.

    As in "'car' is one class of photos and playroom", and "photos does not annotate:
    dog, tree". After ``limit`` names of a line, and lines on merged classes, the others
    are counted.
    """
    owns: dict[str, dict[str, list[str]]] = {name: {} for name in space.classes}
    mappings = zip(space.dataset_names, space.dataset_classes, strict=True)
    for dataset, mapping in mappings:
        for own, name in mapping.items():
            owns[name].setdefault(dataset, []).append(own)
    shared: dict[tuple[str, ...], list[str]] = {}
    for name, found in owns.items():
        words = [
            f"{dataset}: {', '.join(map(repr, own))}"
            for dataset, own in found.items()
            if own != [name]
        ]
        text = f"{name!r} ({'; '.join(words)})" if words else repr(name)
        shared.setdefault(tuple(found), []).append(text)
    merged = []
    for (*others, last), names in shared.items():
        if others:
            verb = "are each" if names[1:] else "is"
            text = f"{', '.join(_few(names, limit))} {verb} one class of "
            merged.append(f"{text}{', '.join(others)} and {last}")
    missing = []
    for dataset in space.dataset_names:
        names = [
            name
            for name, found in owns.items()
            if dataset not in found and not is_kept_apart(name, space.dataset_names)
        ]
        if names:
            line = f"{dataset} does not annotate: {', '.join(_few(names, limit))}"
            missing.append(line)
    return _few(merged, limit), missing


def _few(names: Sequence[str], limit: int | None) -> list[str]:
    """The first names, and how many more there are."""
    shown = [*names[:limit]]
    more = len(names) - len(shown)
    return [*shown, f"and {more} more"] if more else shown
