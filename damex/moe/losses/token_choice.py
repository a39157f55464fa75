"""Which tokens a routing loss counts: all of them, or those on objects.

Axes: T tokens.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from damex.moe.record import RoutingRecord

TokenChoice = Literal["all", "foreground"]


def check_tokens(owner: str, tokens: str) -> None:
    """Raises ValueError, naming the loss, unless the choice is known."""
    if tokens not in get_args(TokenChoice):
        raise ValueError(
            f"{owner}: unknown tokens {tokens!r}; use one of {get_args(TokenChoice)}"
        )


def counted_tokens(
    record: RoutingRecord, tokens: TokenChoice, *, owner: str
) -> Tensor | None:
    """Mask of the real tokens that a loss counts.

    Args:
        record: Record of one forward.
        tokens: 'all' for all real tokens, 'foreground' for those on objects.
        owner: The loss, for the message.

    Returns:
        valid_T: None where all tokens count.

    Raises:
        ValueError: If the foreground is asked for and the record does not know it.
    """
    if tokens == "all":
        return record.token_mask_T
    if record.foreground_T is None:
        raise ValueError(
            f"{owner}: tokens='foreground' needs foreground_T in the routing record; "
            "give the layer's forward foreground_BN, or set tokens='all'"
        )
    return record.foreground_T & record.valid_mask()
