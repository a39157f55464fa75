"""Find duplicate images: in train and val, or twice in a split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from damex.datasets.findings import Finding
from damex.datasets.image_checks import ImageRecord, Look

# Cosine of two gradients: 0.99 and above if recompressed or resized, 0.95 and below
# for successive pictures of one scene.
NEAR = 0.98
# Maximum number of near images to compare box by box.
NEAREST = 10
# Minimum IoU of boxes of one object, and share of such boxes in duplicate images.
SAME_BOX, SAME_OBJECTS = 0.5, 0.75
# Rows per block of the matrix of all pairs.
BLOCK = 512
# Expected number of images per hash, for diverse images.
BUCKET = 64
# Probability that a near pair shares no hash.
MISSED = 1e-9


def find_leaks(
    images: Sequence[ImageRecord], looks: Sequence[Look]
) -> Iterator[Finding]:
    """Findings about images with the same content, or nearly the same look.

    Faulty and undecoded images are skipped.
    """
    pairs = zip(images, looks, strict=True)
    decoded = [(image, look) for image, look in pairs if look.digest]
    # Training images first: the second of a pair is reported.
    decoded.sort(key=lambda pair: pair[0].split != "train")
    groups: dict[bytes, list[ImageRecord]] = {}
    gradients: dict[bytes, np.ndarray] = {}
    for image, look in decoded:
        if look.gradient is not None:
            gradients.setdefault(look.digest, look.gradient)
        groups.setdefault(look.digest, []).append(image)
    for first, *others in groups.values():
        for other in others:
            yield _identical(first, other)
    digests = [*gradients]
    if digests:
        gradients_ND = np.stack([gradients[digest] for digest in digests])
        yield from _near(gradients_ND, [groups[digest] for digest in digests])


def same_files(images: Sequence[ImageRecord]) -> Iterator[Finding]:
    """Files listed by several splits, without reading them."""
    first: dict[str, ImageRecord] = {}
    for image in sorted(images, key=lambda image: image.split != "train"):
        known = first.setdefault(str(image.path), image)
        if known is not image and _is_leak(known, image):
            yield _identical(known, image)


def near_pairs(gradients_ND: np.ndarray) -> np.ndarray:
    """Sorted pairs (P, 2) of rows, i < j, with a cosine of at least ``NEAR``.

    Only rows that share a hash bucket are compared; a near pair is missed once in a
    billion. If rows are few or mostly near, all pairs are compared. Rows have norm 1,
    or 0, which are near to nothing.
    """
    rows_N = np.flatnonzero(gradients_ND.any(axis=1))
    found = [np.empty((0, 2), np.int64)]
    for bucket in _buckets(gradients_ND[rows_N]):
        rows = rows_N[bucket]
        found.append(rows[_pairs(gradients_ND[rows])])
    return np.unique(np.concatenate(found), axis=0)


def _buckets(gradients_ND: np.ndarray) -> list[np.ndarray]:
    """Row sets containing near pairs (random planes: P(same bit) = 1 - angle / pi)."""
    count, width = gradients_ND.shape
    bits = max(round(np.log2(max(count, 1) / BUCKET)), 1)
    shared = (1 - np.arccos(NEAR) / np.pi) ** bits
    rng, found = np.random.default_rng(0), []
    for _ in range(int(np.ceil(np.log(MISSED) / np.log(1 - shared)))):
        planes_DK = rng.standard_normal((width, bits)).astype(gradients_ND.dtype)
        hash_N = (gradients_ND @ planes_DK > 0) @ (1 << np.arange(bits))
        order = np.argsort(hash_N, kind="stable")
        ends = np.flatnonzero(np.diff(hash_N[order])) + 1
        found += [rows for rows in np.split(order, ends) if len(rows) > 1]
    whole = np.arange(count)
    return found if sum(len(rows) ** 2 for rows in found) < count**2 else [whole]


def _pairs(gradients_ND: np.ndarray) -> np.ndarray:
    """Like :func:`near_pairs`, but over all pairs, in blocks."""
    found: list[np.ndarray] = [np.empty((0, 2), np.int64)]
    for start in range(0, len(gradients_ND), BLOCK):
        cosine_BM = gradients_ND[start : start + BLOCK] @ gradients_ND[start:].T
        rows, columns = np.nonzero(cosine_BM >= NEAR)
        is_pair = columns > rows
        found.append(np.stack([rows[is_pair], columns[is_pair]], axis=1) + start)
    return np.concatenate(found)


def _near(
    gradients_ND: np.ndarray, groups: Sequence[list[ImageRecord]]
) -> Iterator[Finding]:
    """For each image one of the same look, train first; different boxes are counted."""
    alike: dict[str, list[tuple[ImageRecord, ImageRecord]]] = {}
    is_train_N = np.array([group[0].split == "train" for group in groups])
    boxes_N5 = np.stack([_sum_of_boxes(group[0]) for group in groups])
    for high, lows in _by_image(near_pairs(gradients_ND)):
        train = lows[is_train_N[lows]]
        firsts = train if len(train) else lows
        for other in groups[high]:
            distances = np.abs(boxes_N5[firsts] - _sum_of_boxes(other)).sum(axis=1)
            nearest = firsts[np.argsort(distances, kind="stable")[:NEAREST]].tolist()
            same = [low for low in nearest if _show_the_same(groups[low][0], other)]
            first = groups[(same or nearest)[0]][0]
            if same:
                cosine = float(gradients_ND[same[0]] @ gradients_ND[high])
                yield _looks_like(first, other, cosine)
            else:
                alike.setdefault(other.place.dataset, []).append((first, other))
    for pairs in alike.values():
        yield _fixed_camera(pairs)


def _by_image(pairs_P2: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The second image of pairs with all its first ones."""
    order = np.lexsort((pairs_P2[:, 0], pairs_P2[:, 1]))
    highs, starts = np.unique(pairs_P2[order, 1], return_index=True)
    return zip(highs.tolist(), np.split(pairs_P2[order, 0], starts)[1:], strict=True)


def _sum_of_boxes(image: ImageRecord) -> np.ndarray:
    """Number of boxes and sums of their corners, as a quick comparison."""
    return np.array([(1.0, *box[1:]) for box in image.boxes]).reshape(-1, 5).sum(axis=0)


def _show_the_same(first: ImageRecord, other: ImageRecord) -> bool:
    """Whether most boxes agree, classes aside (datasets may differ in these)."""
    if first.place.dataset != other.place.dataset:
        return True
    both = [*first.boxes, *other.boxes]
    found = sum(_is_among(box, other.boxes) for box in first.boxes)
    found += sum(_is_among(box, first.boxes) for box in other.boxes)
    return bool(both) and found >= SAME_OBJECTS * len(both)


def _is_among(
    box: tuple[str, float, float, float, float],
    others: Sequence[tuple[str, float, float, float, float]],
) -> bool:
    name, x1, y1, x2, y2 = box
    for other, a1, b1, a2, b2 in others:
        shared = max(min(x2, a2) - max(x1, a1), 0) * max(min(y2, b2) - max(y1, b1), 0)
        whole = (x2 - x1) * (y2 - y1) + (a2 - a1) * (b2 - b1) - shared
        if other == name and shared >= SAME_BOX * whole:
            return True
    return False


def _looks_like(first: ImageRecord, other: ImageRecord, cosine: float) -> Finding:
    text = (
        f"looks like {first.path} ({first.record} of {first.place.file}), "
        f"likeness {cosine:.3f}. "
    )
    if _is_leak(first, other):
        text += (
            "Look at both, and take one of them out: a score on images that were "
            "trained on says nothing."
        )
        return other.finding("leak-near", text)
    return other.finding(
        "near-duplicate-image", f"{text}Nothing to do if that is meant."
    )


def _fixed_camera(pairs: Sequence[tuple[ImageRecord, ImageRecord]]) -> Finding:
    """One finding for all images of a dataset that only look similar."""
    (first, other), count = pairs[0], len(pairs)
    text = (
        f"{count} images look like another one of the dataset and show other objects, "
        f"or none, such as {other.path} and {first.path}: a fixed camera, or frames of "
        "a video? Then scores hold for this scene alone; split by time or place to "
        "know more."
    )
    return other.place.finding("fixed-camera", None, text, count=count)


def _identical(first: ImageRecord, other: ImageRecord) -> Finding:
    where = f"{first.path} ({first.record} of {first.place.file})"
    if _is_leak(first, other):
        text = (
            f"is the training image {where}: a score on images that were trained "
            f"on says nothing. Take it out of {first.split} or {other.split}."
        )
        return other.finding("leak-identical", text)
    text = f"has the same content as {where}. "
    text += (
        "Take one of them out."
        if first.place.dataset == other.place.dataset
        else "Nothing to do if the two datasets annotate different classes in it."
    )
    return other.finding("duplicate-image", text)


def _is_leak(first: ImageRecord, other: ImageRecord) -> bool:
    return first.split == "train" and other.split != "train"
