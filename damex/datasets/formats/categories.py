"""Categories of COCO files that name the data set and not an object."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def without_dummies(
    categories: Sequence[Mapping[str, Any]], used: Collection[Any], key: str = "name"
) -> list[Mapping[str, Any]]:
    """Leave out categories that are only a heading of the others.

    Roboflow's exports begin with one: category 0 is the name of the project, no box is
    of it, and all others have it as their ``supercategory``. As a class it would be an
    output that nothing ever teaches. A category that no box happens to use stays.

    Args:
        categories: COCO's records.
        used: Those with boxes, and those that are wanted in any case.
        key: What ``used`` holds: ``name`` or ``id``.

    Returns:
        The others, in their order.
    """

    def is_dummy(category: Mapping[str, Any]) -> bool:
        name = category.get("name")
        return category.get(key) not in used and any(
            other.get("supercategory") == name and other.get(key) != category.get(key)
            for other in categories
        )

    return [category for category in categories if not is_dummy(category)]
