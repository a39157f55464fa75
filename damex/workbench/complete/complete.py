"""``damex data complete``: write the labels that another dataset of a mixture has.

These are pseudo-labels (self-training): detections of a teacher on training images.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.ops import box_iou

from damex.datasets.coco_records import read_coco
from damex.datasets.entries import entry_of_folder
from damex.datasets.pixels import read_pixels
from damex.engine.console import filter_console
from damex.engine.summary import markdown
from damex.errors import ConfigError, DataError, check_known, printable
from damex.files import atomic_folder, check_free, write_json, write_text
from damex.inference.drawing import Color, draw_boxes, palette
from damex.inference.predictor import Predictor
from damex.progress import Bar
from damex.workbench.check.browse import css_color, data_uri, render_page
from damex.workbench.check.labels import is_kept_apart
from damex.workbench.complete.datasets import (
    Label,
    LabeledDataset,
    read_datasets,
    write_dataset,
)
from damex.workbench.complete.teacher import (
    MIN_OBJECTS,
    MIN_PRECISION,
    SAME_OBJECT,
    DetectorTeacher,
    FileTeacher,
    Found,
    Teacher,
    Threshold,
    find_thresholds,
)
from damex.workbench.zero_config import named_folders, run_name

SIDE = 640  # of a drawn image, in pixels
OWN: Color = (90, 90, 90)

Labels = Mapping[str, Sequence[Label]]  # by dataset
Thresholds = Mapping[str, Threshold]  # by class


def complete(
    checkpoint: str | None,
    *,
    data: Sequence[str],
    out: str,
    detections: str | None,
    delete: Sequence[int],
    batch_size: int,
    device: str | None,
    trust: bool,
    **options: Any,
) -> None:
    """Complete datasets by a detector or a file; options as in the command's help."""
    if delete:
        if checkpoint or detections or data:
            raise ConfigError("--delete needs --out FOLDER, and nothing else.")
        print(printable(delete_labels(Path(out), delete)))
        return
    if (checkpoint is None) == (detections is None):
        raise ConfigError(
            "data complete needs one teacher: a CHECKPOINT of damex train, or --from "
            "FILE.json with the detections of another model."
        )
    if detections is not None and not data:
        raise ConfigError("--from needs the datasets: --data FOLDER FOLDER.")
    filter_console()
    if detections is not None:
        teacher: Teacher = FileTeacher(detections)
    else:
        predictor = Predictor(str(checkpoint), device=device, trust=trust)
        teacher = DetectorTeacher(predictor, batch_size=batch_size)
    folders, source = named_folders(data), str(checkpoint or detections)
    report = write_completed(teacher, folders, Path(out), source=source, **options)
    print(printable(report))


def write_completed(
    teacher: Teacher,
    folders: Mapping[str, str],
    out: Path,
    *,
    source: str,
    classes: Sequence[str] = (),
    min_score: float | None = None,
    samples: int = 24,
) -> str:
    """Write datasets into a new folder, and return a report for the screen.

    As `damex.Detector.complete`, which has the errors, too. Without ``folders``, they
    are those of the teacher's training. ``source`` names the teacher in the files, and
    ``samples`` is the number of images of each dataset on the page.
    """
    check_free(out)
    known = [dict(entry) for entry in teacher.mixture]
    entries = [entry_of_folder(*one, known) for one in folders.items()] or known
    if not entries:
        raise ConfigError("the teacher's checkpoint has no mixture; add --data FOLDER.")
    for root in (entry["root"] for entry in entries if entry.get("root")):
        if out.resolve().is_relative_to(Path(root).resolve()):
            raise ConfigError(
                f"--out {out} lies inside of {root}, whose annotations it would then "
                "be; choose a folder outside."
            )
    for name in classes:
        check_known(name, teacher.classes, f"--classes: the teacher finds no {name!r}")
    chosen = classes or teacher.classes
    datasets = read_datasets(entries, teacher.known, classes)
    missing = _missing(teacher, datasets, chosen)
    wanted = [*dict.fromkeys(name for row in missing.values() for name in row)]
    references = [*datasets, *_readable(teacher, datasets, classes)]
    with atomic_folder(out) as draft:
        with Bar() as bar:
            found = find_thresholds(teacher, references, wanted, min_score, bar)
            _check(found, wanted)
            plain = {name: one.plain for name, one in found.items()}
            about = dict(teacher=source, thresholds=plain)
            labels = {}
            for one in datasets:
                lacks, folder = missing[one.name], draft / one.name
                used = {n: found[n] for n in lacks if n in found and found[n].labels}
                mine = find_labels(teacher, one, lacks, used, bar)
                labels[one.name] = write_dataset(folder, one, mine, [*used], about)
            write_page(draft, out, datasets, labels, found, samples, bar)
        write_json(draft / "report.json", about, indent=1)
    lines = [*_unknown(teacher, datasets), *report(missing, labels, found)]
    lines += [f"look at them: {out / 'index.html'}", _next_command(out, entries)]
    return "\n".join(lines)


def _missing(
    teacher: Teacher, datasets: Sequence[LabeledDataset], classes: Sequence[str]
) -> dict[str, list[str]]:
    """The classes to complete, by dataset; ConfigError without any."""
    names = {*teacher.known, *(one.name for one in datasets)}
    shared = [name for name in classes if not is_kept_apart(name, names)]
    missing = {
        one.name: [name for name in shared if name not in one.classes]
        for one in datasets
    }
    if not any(missing.values()):
        raise ConfigError(
            f"nothing to complete: each of the datasets {', '.join(missing)} labels "
            f"all classes to look for: {', '.join(shared) or 'none'}."
        )
    return missing


def _check(found: Thresholds, wanted: Sequence[str]) -> None:
    """Refuse to write datasets without a new label."""
    if not any(one.labels for one in found.values()):
        few = [name for name in wanted if name not in found]
        raise ConfigError(
            f"nothing to complete: no class reaches a precision of {MIN_PRECISION} on "
            "validation images that label it; with fewer than "
            f"{MIN_OBJECTS} objects there: {', '.join(few) or 'none'}. Name datasets "
            "that label the classes with --data, train the teacher longer, or set "
            "--min-score."
        )


def _readable(
    teacher: Teacher, datasets: Sequence[LabeledDataset], classes: Sequence[str]
) -> list[LabeledDataset]:
    """The other datasets of a training for the thresholds, if their images are here."""
    names, found = {one.name for one in datasets}, []
    for entry in teacher.mixture:
        if entry.get("name") not in names:
            with suppress(ConfigError, DataError):
                found += read_datasets([entry], teacher.known, classes)
    return [one for one in found if all(p.is_file() for p in one.splits["val"].paths)]


def _unknown(teacher: Teacher, datasets: Iterable[LabeledDataset]) -> list[str]:
    """A line on datasets that the teacher was not trained on."""
    others = [one.name for one in datasets if one.name not in teacher.known]
    if not (others and teacher.known):
        return []
    return [
        f"not of the training: {', '.join(others)}; their class names are taken as "
        f"they are (trained: {', '.join(teacher.known)})"
    ]


def find_labels(
    teacher: Teacher,
    dataset: LabeledDataset,
    names: Collection[str],
    thresholds: Thresholds,
    bar: Bar,
) -> list[Label]:
    """Find the objects of classes in the training images of a dataset.

    A detection that covers a labeled object is that object under another name, and is
    left out. Classes without a threshold compete with the others for an object.
    """
    if not thresholds:
        return []
    split, labels = dataset.splits["train"], []
    found = teacher.find(split.paths, names, bar, own=dataset.name)
    for image, (detections, own) in enumerate(zip(found, split.objects, strict=True)):
        for place in _new_objects(detections, own.corners_N4[~own.is_crowd_N]):
            name = detections.names[place]
            score = float(detections.scores_N[place])
            if name in thresholds and score >= thresholds[name].ignored:
                x1, y1, x2, y2 = map(float, detections.boxes_N4[place])
                is_accepted = score >= thresholds[name].accepted
                labels.append(Label(image, (x1, y1, x2, y2), name, score, is_accepted))
    return labels


def _new_objects(found: Found, own_K4: np.ndarray) -> list[int]:
    """Positions of detections that match no labeled object."""
    if not len(found.scores_N) or not len(own_K4):
        return [*range(len(found.scores_N))]
    boxes = (torch.as_tensor(one).double() for one in (found.boxes_N4, own_K4))
    overlap_N = box_iou(*boxes).amax(dim=1)
    return (overlap_N <= SAME_OBJECT).nonzero().flatten().tolist()


def report(
    missing: Mapping[str, Sequence[str]], labels: Labels, found: Thresholds
) -> list[str]:
    """Lines with a row per dataset and class."""
    rows = []
    for dataset, names in missing.items():
        counts = Counter((one.name, one.is_accepted) for one in labels[dataset])
        for name in filter(found.__contains__, names):
            one = found[name]
            shares = (
                "-" if v is None else f"{v:.2f}" for v in (one.precision, one.recall)
            )
            score = f"{one.accepted:.2f}" if one.labels else "never"
            cells = (f"{counts[name, kind]:,}" for kind in (True, False))
            rows.append((dataset, name, *cells, score, *shares))
    header = ("dataset", "class", "labels", "ignored", "labels from score")
    lines = [
        markdown((*header, "precision", "recall"), rows).rstrip(),
        "precision, recall: of labels, on validation images that label the class; "
        "expect less of both in completed images, much less if they look different",
    ]
    if skipped := {name for row in missing.values() for name in row} - {*found}:
        lines.append(
            f"not completed, for want of {MIN_OBJECTS} validation objects: "
            f"{', '.join(sorted(skipped))}; --min-score 0.5 sets the scores of all"
        )
    return lines


def _next_command(out: Path, entries: Sequence[Mapping[str, Any]]) -> str:
    """The training on completed datasets, with the windows of the teacher's."""
    names = [entry["name"] for entry in entries]
    words = ["--data", *(str(out / name) for name in names)]
    tiles = [f"{one['name']}={one['tile']}" for one in entries if one.get("tile")]
    words += ["--tile", *tiles] if tiles else []
    words += ["--work-dir", f"work_dirs/{run_name(names)}-completed"]
    train = f"damex train {shlex.join(words)}"
    return f"train on them, with --model if the detector is not tiny: {train}"


def write_page(
    folder: Path,
    out: Path,
    datasets: Sequence[LabeledDataset],
    labels: Mapping[str, Sequence[Label]],
    thresholds: Mapping[str, Any],
    samples: int,
    bar: Bar,
) -> None:
    """Write ``index.html`` with ``samples`` images of each dataset.

    Images with a detection that is nearest to its threshold come first. ``out`` is
    where the folder will be.
    """
    colors, parts = palette(thresholds), []
    limits = {name: min(one.accepted, 1.0) for name, one in thresholds.items()}
    for dataset in datasets:
        of_image: dict[int, list[Label]] = {}
        for one in labels[dataset.name]:
            of_image.setdefault(one.image, []).append(one)
        doubt = {  # distance of the nearest detection to the threshold of labels
            image: min(abs(one.score - limits[one.name]) for one in found)
            for image, found in of_image.items()
        }
        order = sorted(of_image, key=doubt.__getitem__)
        bar.begin(f"draw {dataset.name}", min(samples, len(order)))
        tiles = []
        for image in order[:samples]:
            tiles.append(_tile(dataset, image, of_image[image], colors))
            bar.step()
        rows, place = labels[dataset.name], shlex.quote(str(out / dataset.name))
        parts.append(
            dict(
                name=dataset.name,
                tiles=tiles,
                images=len(of_image),
                accepted=sum(one.is_accepted for one in rows),
                ignored=sum(not one.is_accepted for one in rows),
                command=f"damex data complete --out {place} --delete",
            )
        )
    values = dict(datasets=parts, thresholds=thresholds)
    page = render_page("damex.workbench.complete", **values)
    write_text(folder / "index.html", printable(page))


def _tile(
    dataset: LabeledDataset,
    image: int,
    labels: Sequence[Label],
    colors: Mapping[str, Color],
) -> dict[str, Any]:
    """An image with the existing labels in grey, and its detections dashed."""
    split = dataset.splits["train"]
    try:
        content = read_pixels(split.paths[image], "color").image
    except OSError as error:
        raise DataError(
            f"dataset {dataset.name!r}: an image to draw cannot be read ({error}); "
            "repair the file, or take it out of the annotations."
        ) from error
    pixels = Image.fromarray(content[..., ::-1])
    scale = min(SIDE / max(pixels.size), 1.0)
    pixels = pixels.resize([max(round(side * scale), 1) for side in pixels.size])
    own = split.objects[image].corners_N4
    found = sorted(labels, key=lambda one: -one.score)
    boxes_N4 = scale * np.vstack([[one.box for one in found], own.reshape(-1, 4)])
    drawn = draw_boxes(
        np.asarray(pixels),
        boxes_N4,
        [f"{one.id}{'' if one.is_accepted else '?'}" for one in found]
        + [""] * len(own),
        [colors[one.name] for one in found] + [OWN] * len(own),
        dashed=[True] * len(found) + [False] * len(own),
    )
    rows = [dict(vars(one), color=css_color(colors[one.name])) for one in found]
    name = str(split.images[image].get("file_name"))
    return dict(name=name, uri=data_uri(Image.fromarray(drawn)), labels=rows)


def delete_labels(folder: Path, ids: Sequence[int]) -> str:
    """Delete predicted labels, by id, from the training file of a completed dataset.

    ConfigError if the folder holds no such file, or an id is not of one of them.
    """
    file = folder / "train.json"
    if not file.is_file():
        raise ConfigError(
            f"--out: {folder} has no train.json; name the folder of one completed "
            "dataset, as in --out completed/boards --delete 12 57."
        )
    document = read_coco(file, folder.name)
    predicted = {row["id"] for row in document["annotations"] if row.get("predicted")}
    if unknown := sorted({*ids} - predicted):
        raise ConfigError(
            f"--delete: {file} has no predicted label with the id {unknown[0]}; "
            "existing labels are not deleted."
        )
    kept = [row for row in document["annotations"] if row["id"] not in {*ids}]
    write_json(file, {**document, "annotations": kept})
    left = len(predicted) - len({*ids})
    return f"{file}: {len({*ids})} predicted labels deleted, {left} left"
