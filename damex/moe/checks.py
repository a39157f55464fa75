"""What the options of a module must be; errors name the module and the option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

RANGES: Mapping[str, Callable[[float], bool]] = MappingProxyType(
    {
        ">= 0": lambda value: value >= 0.0,
        "above 0": lambda value: value > 0.0,
        "in [0, 1)": lambda value: 0.0 <= value < 1.0,
        "in [0, 1]": lambda value: 0.0 <= value <= 1.0,
        "in (0, 1]": lambda value: 0.0 < value <= 1.0,
    }
)


def check_number(owner: str, expected: str, **options: float | None) -> None:
    """Raises ValueError unless each option is None or in a range.

    Args:
        owner: Who has the options.
        expected: One of `RANGES`.
        **options: Their values.
    """
    for name, value in options.items():
        if value is not None and not RANGES[expected](value):
            raise ValueError(f"{owner}: {name} must be {expected}, got {value}")


def check_sizes(owner: str, **sizes: int) -> None:
    """Raises ValueError unless all sizes are positive."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{owner}: {name} must be at least 1, got {size}")


def check_choice(owner: str, choices: Iterable[str], **options: str) -> None:
    """Raises ValueError unless each option is one of the choices."""
    for name, value in options.items():
        if value not in choices:
            raise ValueError(
                f"{owner}: unknown {name} {value!r}; use one of {[*choices]}"
            )
