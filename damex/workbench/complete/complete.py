"""``damex data complete``: write the labels that another dataset of a mixture has."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.ops import box_iou

from damex.engine.console import filter_console
from damex.engine.summary import markdown
from damex.errors import ConfigError, DataError, did_you_mean, printable
from damex.files import make_folder, write_json
from damex.inference.predictor import Predictor
from damex.progress import Bar
from damex.workbench.complete.datasets import (
    Label,
    LabeledDataset,
    read_datasets,
    write_dataset,
)
from damex.workbench.complete.page import write_page
from damex.workbench.complete.teacher import (
    SAME_OBJECT,
    DetectorTeacher,
    FileTeacher,
    Found,
    Teacher,
)
from damex.workbench.complete.thresholds import (
    MIN_OBJECTS,
    Threshold,
    find_thresholds,
)
from damex.workbench.zero_config import named_folders


def complete(
    checkpoint: str | None,
    *,
    data: Sequence[str],
    out: str,
    detections: str | None,
    classes: Sequence[str],
    min_score: float | None,
    delete: Sequence[int],
    samples: int,
    batch_size: int,
    device: str | None,
    trust: bool,
) -> None:
    """Complete datasets by a detector or a file; options as in the command's help."""
    if delete:
        print(printable(delete_labels(Path(out), delete)))
        return
    if (checkpoint is None) == (detections is None):
        raise ConfigError(
            "data complete needs one teacher: a CHECKPOINT of damex train, or --from "
            "FILE.json with the detections of another model."
        )
    filter_console()
    if detections is not None:
        teacher: Teacher = FileTeacher(detections)
    else:
        predictor = Predictor(str(checkpoint), device=device, trust=trust)
        teacher = DetectorTeacher(predictor, batch_size=batch_size)
    report = write_completed(
        teacher,
        named_folders(data),
        Path(out),
        classes=classes,
        min_score=min_score,
        samples=samples,
        source=str(checkpoint or detections),
    )
    print(printable(report))


def write_completed(
    teacher: Teacher,
    folders: Mapping[str, str],
    out: Path,
    *,
    classes: Sequence[str],
    **options: Any,
) -> str:
    """Complete the datasets in folders, or without any those of a detector.

    Options as for :func:`complete_datasets`. Returns a report for the screen.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; remove it, or choose another folder.")
    known, trained = teacher.known, teacher.mixture
    entries = [dict(name=name, root=root) for name, root in folders.items()]
    if not (entries or trained):
        raise ConfigError("--from needs the datasets: --data FOLDER FOLDER.")
    datasets = read_datasets(entries or trained, known)
    witnesses = [*datasets, *_readable(trained, known, datasets)]
    chosen = _chosen(teacher, classes)
    options.update(witnesses=witnesses, classes=chosen)
    return complete_datasets(teacher, datasets, out, **options)


def _readable(
    entries: Iterable[Mapping[str, Any]],
    known: Mapping[str, Mapping[str, str]],
    datasets: Sequence[LabeledDataset],
) -> list[LabeledDataset]:
    """The other datasets of a detector whose files are here, for its thresholds."""
    names, found = {one.name for one in datasets}, []
    for entry in entries:
        if entry["name"] not in names:
            try:
                found += read_datasets([entry], known)
            except (ConfigError, DataError):
                continue
    return found


def complete_datasets(
    teacher: Teacher,
    datasets: Sequence[LabeledDataset],
    folder: Path,
    *,
    witnesses: Sequence[LabeledDataset],
    classes: Sequence[str],
    min_score: float | None = None,
    samples: int = 24,
    source: str = "",
) -> str:
    """Write datasets with the labels that they lack into a new folder.

    Args:
        teacher: Finds the objects.
        datasets: The datasets to complete.
        folder: The new folder; written completely or not at all.
        witnesses: Datasets whose validation images decide about thresholds.
        classes: Names of the mixture to look for.
        min_score: Threshold of all classes; by default each has its own.
        samples: Number of images of each dataset on the page.
        source: Name of the teacher, for the files.

    Returns:
        A report for the screen.

    Raises:
        ConfigError: If no class can be completed.
    """
    # A class of the name dataset/class is kept apart on purpose.
    apart = tuple(f"{one.name}/" for one in datasets)
    shared = [name for name in classes if not name.startswith(apart)]
    missing = {one.name: one.missing(shared) for one in datasets}
    wanted = tuple(dict.fromkeys(name for row in missing.values() for name in row))
    if not wanted:
        raise ConfigError(
            "nothing to complete: each of the datasets "
            f"{', '.join(missing)} labels all classes to look for: "
            f"{', '.join(shared) or 'none'}."
        )
    draft = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    make_folder(draft)
    try:
        with Bar() as bar:
            thresholds = find_thresholds(teacher, witnesses, wanted, min_score, bar)
            about = dict(
                teacher=source, thresholds={k: v.plain for k, v in thresholds.items()}
            )
            labels = {}
            for one in datasets:
                names = [name for name in missing[one.name] if name in thresholds]
                found = find_labels(teacher, one, names, thresholds, bar)
                labels[one.name] = write_dataset(
                    draft / one.name, one, found, names, about
                )
            write_page(draft, datasets, labels, thresholds, samples, bar)
        write_json(
            draft / "report.json", {**about, "labels": _counts(labels)}, indent=1
        )
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return report(folder, datasets, missing, labels, thresholds)


def _chosen(teacher: Teacher, classes: Sequence[str]) -> Sequence[str]:
    """The classes to look for; ConfigError if the teacher knows one of them not."""
    for name in classes:
        if name not in teacher.classes:
            raise ConfigError(
                f"--classes: the teacher finds no {name!r}; "
                f"{did_you_mean(name, teacher.classes)}"
            )
    return classes or teacher.classes


def find_labels(
    teacher: Teacher,
    dataset: LabeledDataset,
    names: Collection[str],
    thresholds: Mapping[str, Threshold],
    bar: Bar,
) -> list[Label]:
    """Find the objects of classes in the training images of a dataset.

    A find that covers a labeled box is that object under another name, and left out.
    """
    if not names:
        return []
    split = dataset.splits["train"]
    labels = []
    for image, found in enumerate(teacher.find(split.paths, names, bar)):
        for place in _new_objects(found, split.boxes_of(image)):
            name, score = found.names[place], float(found.scores_N[place])
            if score >= thresholds[name].doubtful:
                x1, y1, x2, y2 = map(float, found.boxes_N4[place])
                is_sure = score >= thresholds[name].sure
                labels.append(Label(image, (x1, y1, x2, y2), name, score, is_sure))
    return labels


def _new_objects(found: Found, own_K4: np.ndarray) -> list[int]:
    """Positions of finds that are no labeled object."""
    if not len(found.scores_N) or not len(own_K4):
        return [*range(len(found.scores_N))]
    boxes = (torch.as_tensor(one).double() for one in (found.boxes_N4, own_K4))
    overlap_N = box_iou(*boxes).amax(dim=1)
    return (overlap_N <= SAME_OBJECT).nonzero().flatten().tolist()


def _counts(labels: Mapping[str, Sequence[Label]]) -> dict[str, dict[str, list[int]]]:
    """By dataset and class: the numbers of labels and of ignored boxes."""
    counts = {}
    for dataset, rows in labels.items():
        sure, doubtful = (
            Counter(one.name for one in rows if one.is_sure == is_sure)
            for is_sure in (True, False)
        )
        names = sorted({*sure, *doubtful})
        counts[dataset] = {name: [sure[name], doubtful[name]] for name in names}
    return counts


def report(
    folder: Path,
    datasets: Sequence[LabeledDataset],
    missing: Mapping[str, Sequence[str]],
    labels: Mapping[str, Sequence[Label]],
    thresholds: Mapping[str, Threshold],
) -> str:
    """Text with a row per dataset and class, and the next command."""
    counts, rows = _counts(labels), []
    skipped = {name for row in missing.values() for name in row} - {*thresholds}
    for dataset, names in missing.items():
        for name in names:
            if (one := thresholds.get(name)) is None:
                continue
            sure, doubtful = counts[dataset].get(name, (0, 0))
            expected = (_share(one.precision), _share(one.recall))
            score = "-" if one.sure == float("inf") else f"{one.sure:.2f}"
            rows.append((dataset, name, f"{sure:,}", f"{doubtful:,}", score, *expected))
    header = (
        "dataset",
        "class",
        "labels",
        "ignored",
        "score from",
        "precision",
        "recall",
    )
    lines = [markdown(header, rows), ""]
    lines.append(
        "precision, recall: of labels, expected from validation images of the datasets "
        "that label the class"
    )
    if skipped:
        lines.append(
            f"not completed, for want of {MIN_OBJECTS} validation objects: "
            f"{', '.join(sorted(skipped))}; give --min-score 0.5 to choose yourself"
        )
    folders = " ".join(str(folder / one.name) for one in datasets)
    lines += [
        f"look at them: {folder / 'index.html'}",
        f"train on them: damex train --data {folders}",
    ]
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def delete_labels(folder: Path, ids: Sequence[int]) -> str:
    """Delete predicted labels, by id, from the training file of a completed dataset.

    Raises:
        ConfigError: If the folder holds no such file, or an id is not of one of them.
    """
    file = folder / "train.json"
    if not file.is_file():
        raise ConfigError(
            f"--out: {folder} has no train.json; name the folder of one completed "
            "dataset, as in --out completed/boards --delete 12 57."
        )
    document = json.loads(file.read_text(encoding="utf-8"))
    predicted = {row["id"] for row in document["annotations"] if row.get("predicted")}
    if unknown := sorted({*ids} - predicted):
        raise ConfigError(
            f"--delete: {file} has no predicted label with the id {unknown[0]}; labels "
            "of people are not deleted."
        )
    kept = [row for row in document["annotations"] if row["id"] not in {*ids}]
    write_json(file, {**document, "annotations": kept})
    return f"{file}: {len({*ids})} labels deleted, {len(predicted) - len({*ids})} left"
