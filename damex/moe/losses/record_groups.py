"""The dataset groups in a routing record, for losses that need them.

Axes: T tokens, G dataset groups, E experts.
"""

from __future__ import annotations

from torch import Tensor

from damex.moe.record import RoutingRecord


def record_groups(record: RoutingRecord, *, owner: str) -> tuple[Tensor, Tensor]:
    """Group of every token and experts of every group.

    Args:
        record: Record of one forward.
        owner: The loss, for the message.

    Returns:
        group_ids_T: -1 where unknown.
        group_experts_GE: True where a group may use an expert.

    Raises:
        ValueError: If the record lacks one of them.
    """
    if record.group_ids_T is None or record.group_experts_GE is None:
        raise ValueError(
            f"{owner}: the routing record needs group_ids_T and group_experts_GE; give "
            "the layer group_experts and its forward group_ids_B"
        )
    return record.group_ids_T, record.group_experts_GE
