"""Gates: logits -> Assignment, one per file."""

from damex.moe.gates.topk import TopKGate

__all__ = ["TopKGate"]
