"""Which experts belong to which group of datasets."""

from __future__ import annotations

__all__ = ["expert_groups"]


def expert_groups(num_groups: int, num_experts: int) -> tuple[tuple[int, ...], ...]:
    """Share experts among dataset groups, evenly and in order.

    Args:
        num_groups: Number of groups (G).
        num_experts: Number of experts (E), at least G.

    Returns:
        The experts of each group. When G does not divide E, the first groups get one
        more.

    Raises:
        ValueError: If there are more groups than experts.

    Example:
        >>> expert_groups(2, 5)
        ((0, 1, 2), (3, 4))
    """
    if not 1 <= num_groups <= num_experts:
        raise ValueError(
            f"expert_groups needs 1 <= num_groups <= num_experts, got {num_groups} "
            f"groups and {num_experts} experts"
        )
    small, more = divmod(num_experts, num_groups)
    starts = [g * small + min(g, more) for g in range(num_groups + 1)]
    return tuple(tuple(range(starts[g], starts[g + 1])) for g in range(num_groups))
