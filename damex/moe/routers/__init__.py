"""Routers: tokens -> logits over experts, one per file."""

from damex.moe.routers.linear import LinearRouter

__all__ = ["LinearRouter"]
