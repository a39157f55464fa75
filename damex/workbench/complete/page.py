"""A page of completed datasets: their images, the doubtful ones first."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from damex.datasets.pixels import read_pixels
from damex.errors import DataError
from damex.files import write_text
from damex.inference.drawing import Color, draw_boxes, palette
from damex.progress import Bar
from damex.workbench.check.browse import css_color, data_uri, render_page
from damex.workbench.complete.datasets import Label, LabeledDataset

SIDE = 640  # of a drawn image, in pixels
OWN: Color = (90, 90, 90)
COMMAND = ("damex", "data", "complete")


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
        order = sorted(of_image, key=lambda i: _doubt(of_image[i], limits))
        bar.begin(f"draw {dataset.name}", min(samples, len(order)))
        tiles = []
        for image in order[:samples]:
            tiles.append(_tile(dataset, image, of_image[image], colors))
            bar.step()
        rows = labels[dataset.name]
        parts.append(
            dict(
                name=dataset.name,
                tiles=tiles,
                images=len(of_image),
                accepted=sum(one.is_accepted for one in rows),
                ignored=sum(not one.is_accepted for one in rows),
                command=shlex.join(
                    [*COMMAND, "--out", str(out / dataset.name), "--delete"]
                ),
            )
        )
    values = dict(datasets=parts, thresholds=thresholds)
    page = render_page("damex.workbench.complete", **values)
    write_text(folder / "index.html", page)


def _doubt(labels: Sequence[Label], limits: Mapping[str, float]) -> float:
    """Distance of the nearest detection to the threshold of labels."""
    return min(abs(one.score - limits[one.name]) for one in labels)


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
