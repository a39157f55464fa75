"""Check the annotations of a dataset's split; no image is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from damex.curation.boxes import Expectations, check_boxes
from damex.curation.findings import Finding, Place, Said
from damex.curation.records import Records


def check_records(
    records: Records, place: Place, expected: Expectations
) -> Iterator[Finding]:
    """Everything that is odd in readable records."""
    yield from _unknown_images(records, place)
    yield from _unknown_categories(records, place)
    yield from _duplicate_files(records, place)
    yield from check_boxes(records, place, expected)
    yield from _boxes_per_image(records, place, expected)


def _unknown_images(records: Records, place: Place) -> Iterator[Finding]:
    known = {str(image["id"]) for image in records.images}

    def describe(position: int) -> Said:
        found = records.annotations[position]["image_id"]
        text = f"image_id {found!r} is that of no image, so the box is left out."
        if str(found) in known:
            text += " An image has this id as another type: write both as numbers."
        else:
            text += " Correct it, or take the record out."
        return Said(records.annotation_name(position), text)

    lost = np.flatnonzero(records.image_N < 0)
    yield from place.each("unknown-image-id", lost.tolist(), describe)


def _unknown_categories(records: Records, place: Place) -> Iterator[Finding]:
    known = records.categories
    lost = [
        position
        for position, record in enumerate(records.annotations)
        if record["category_id"] not in known
    ]

    def describe(position: int) -> Said:
        found = records.annotations[position]["category_id"]
        ids = ", ".join(map(repr, [*known][:10])) or "none"
        text = (
            f"category_id {found!r} is not listed, so the box is left out; expected "
            f"one of {ids}{', ...' if len(known) > 10 else ''}. Correct it, or add "
            "the category."
        )
        return Said(records.annotation_name(position), text)

    yield from place.each("unknown-category-id", lost, describe)


def _duplicate_files(records: Records, place: Place) -> Iterator[Finding]:
    names = [image.get("file_name") for image in records.images]
    texts = [name for name in names if isinstance(name, str)]
    counts = Counter(texts)
    if len(counts) == len(texts):
        return
    first: dict[str, int] = {}
    again = []
    for position, name in enumerate(names):
        if isinstance(name, str) and first.setdefault(name, position) != position:
            again.append(position)

    def describe(position: int) -> Said:
        other = records.images[first[names[position] or ""]]["id"]
        text = (
            f"image {other} has the same file_name {names[position]!r}; each would "
            "teach that the objects of the other are background. Merge the two."
        )
        return Said(f"image {records.images[position]['id']}", text)

    yield from place.each("duplicate-file-name", again, describe)


def _boxes_per_image(
    records: Records, place: Place, expected: Expectations
) -> Iterator[Finding]:
    in_use = {key for key, name in records.categories.items() if expected.uses(name)}
    # By id: of two images with one id neither is empty.
    counts = Counter(
        record["image_id"]
        for record in records.annotations
        if record["category_id"] in in_use or expected.classes is None
    )
    images = records.images
    empty = [i for i, image in enumerate(images) if not counts[image["id"]]]

    def describe_empty(position: int) -> Said:
        text = (
            f"{records.image_name(position)} has no box: training leaves it out, "
            "evaluation does not. Nothing to do if nothing is to be seen in it."
        )
        return Said(f"image {images[position]['id']}", text)

    yield from place.each("image-without-boxes", empty, describe_empty)
    if expected.num_queries is None:
        return
    limit = expected.num_queries
    full = [i for i, image in enumerate(images) if counts[image["id"]] > limit]

    def describe_full(position: int) -> Said:
        image = images[position]
        text = (
            f"{records.image_name(position)} has {counts[image['id']]} boxes, and the "
            f"detector has {limit} queries, each of which finds one object at most. "
            "Set model.num_queries higher, or cut the image into tiles."
        )
        return Said(f"image {image['id']}", text)

    yield from place.each("many-boxes", full, describe_full)
