"""Lists of image names in ``ImageSets``, as Pascal VOC and KITTI have them."""

from __future__ import annotations

from collections.abc import Callable

from damex.datasets.formats.records import Ledger, Sample
from damex.datasets.formats.tree import Tree, parent, split_name, stem


def splits_by_image_sets(
    tree: Tree, find: Callable[[str, str], Sample | None], ledger: Ledger
) -> dict[str, list[Sample]]:
    """Read ``ImageSets/train.txt`` or ``ImageSets/Main/train.txt`` and their like.

    Lists of one name in several folders (VOC2007 and VOC2012) are joined. VOC's lists
    per class, with a second column, are passed over.

    Args:
        tree: The folder.
        find: The sample of (the folder that ImageSets is in, a name); None if there is
            none.
        ledger: For names without a sample.

    Returns:
        Samples by ``train``, ``val``, ``test`` or the name of another list.
    """
    splits: dict[str, list[Sample]] = {}
    for path in tree.with_suffix(".txt"):
        parts = parent(path).split("/")
        if "ImageSets" not in parts or parts[-1] not in ("ImageSets", "Main"):
            continue
        names = [line for line in tree.lines(path) if line]
        if any(len(name.split()) > 1 for name in names):
            continue
        base = "/".join(parts[: parts.index("ImageSets")])
        split = split_name(stem(path)) or stem(path)
        for number, name in enumerate(names, start=1):
            sample = find(base, name)
            if sample is None:
                what = "names in a list of images without an annotation"
                ledger.drop(what, f"{path}:{number}: {name}")
            else:
                splits.setdefault(split, []).append(sample)
    return splits
