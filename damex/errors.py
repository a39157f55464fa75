"""How damex words an error: what, where, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A field of a config has a value that cannot work."""


class DataError(ValueError):
    """A file of a dataset does not hold what its config promises."""


def did_you_mean(name: str, known: Iterable[str], *, limit: int = 20) -> str:
    """Suggest the nearest known name and list what exists.

    Args:
        name: The name that was not found.
        known: The names that exist.
        limit: How many names are listed at most.

    Returns:
        A sentence such as ``did you mean 'car'? It has: bus, car.``
    """
    names = [str(item) for item in known]
    lowered = {item.lower(): item for item in names}
    near = difflib.get_close_matches(name.lower(), lowered, n=1)
    start = f"did you mean {lowered[near[0]]!r}? It" if near else "it"
    shown = ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
    return f"{start} has: {shown or 'nothing'}."
