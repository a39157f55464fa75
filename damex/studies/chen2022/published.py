"""Values of the paper's tables: mean and deviation of ten runs, or of a single run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["BALANCED", "DISPATCH", "MIXTURES", "SINGLES"]

Moment = tuple[float, float]

# Tables 1 and 3: accuracy in per cent and dispatch entropy in nats.
MIXTURES: Mapping[tuple[str, str], tuple[Moment, Moment]] = MappingProxyType(
    {
        ("1", "identity"): ((92.99, 2.11), (1.300, 0.044)),
        ("1", "cubic"): ((99.46, 0.55), (0.098, 0.087)),
        ("2", "identity"): ((88.48, 1.96), (1.294, 0.036)),
        ("2", "cubic"): ((98.09, 1.27), (0.171, 0.103)),
        ("3", "identity"): ((95.93, 1.34), (1.160, 0.100)),
        ("3", "cubic"): ((99.99, 0.02), (0.008, 0.011)),
        ("4", "identity"): ((93.30, 1.48), (1.160, 0.155)),
        ("4", "cubic"): ((98.92, 1.18), (0.089, 0.120)),
    }
)

# Table 9: accuracy of linear mixtures with the load balance loss.
BALANCED: Mapping[str, Moment] = MappingProxyType(
    {"1": (93.81, 1.02), "2": (89.20, 2.20), "3": (95.12, 0.58), "4": (92.50, 1.55)}
)

# Tables 3, 7 ("verify") and 8: accuracy of single models by number of filters.
SINGLES: Mapping[tuple[str, str, int], float] = MappingProxyType(
    {
        ("1", "identity", 128): 68.71,
        ("1", "identity", 512): 67.63,
        ("1", "cubic", 128): 79.48,
        ("1", "cubic", 512): 78.18,
        ("1", "relu", 128): 72.28,
        ("1", "celu", 128): 81.75,
        ("1", "gelu", 128): 79.04,
        ("1", "tanh", 128): 81.72,
        ("2", "identity", 128): 60.59,
        ("2", "identity", 512): 63.04,
        ("2", "cubic", 128): 72.29,
        ("2", "cubic", 512): 52.09,
        ("2", "relu", 128): 80.12,
        ("2", "celu", 128): 78.99,
        ("2", "gelu", 128): 82.01,
        ("2", "tanh", 128): 81.03,
        ("3", "identity", 128): 74.81,
        ("3", "identity", 512): 74.54,
        ("3", "cubic", 128): 72.69,
        ("3", "cubic", 512): 67.78,
        ("4", "identity", 128): 74.63,
        ("4", "identity", 512): 72.98,
        ("4", "cubic", 128): 68.60,
        ("4", "cubic", 512): 61.65,
        ("verify", "identity", 128): 74.81,
        ("verify", "cubic", 128): 72.69,
        ("verify", "relu", 128): 73.45,
        ("verify", "celu", 128): 76.91,
        ("verify", "gelu", 128): 74.01,
        ("verify", "tanh", 128): 74.76,
    }
)

# Tables 4 to 6: clusters by experts, after training. All are of setting 1.
DISPATCH: Mapping[str, tuple[tuple[int, ...], ...]] = MappingProxyType(
    {
        "Table 4": (
            (0, 0, 0, 0, 0, 3971, 0, 0),
            (0, 0, 4009, 0, 0, 0, 0, 0),
            (0, 0, 0, 0, 0, 0, 0, 4041),
            (0, 3979, 0, 0, 0, 0, 0, 0),
        ),
        "Table 5": (
            (0, 0, 3971, 0, 0, 0, 0, 0),
            (0, 0, 0, 0, 0, 4, 4005, 0),
            (8, 4, 4, 6, 0, 1304, 4, 2711),
            (3979, 0, 0, 0, 0, 0, 0, 0),
        ),
        "Table 6": (
            (0, 630, 1629, 1298, 27, 87, 4, 296),
            (136, 1107, 1884, 651, 0, 0, 0, 231),
            (0, 594, 1976, 1471, 0, 0, 0, 0),
            (0, 377, 1480, 1891, 0, 0, 0, 231),
        ),
    }
)
