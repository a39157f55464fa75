"""What gates are told at the start and the end of a training step's forward.

That a new step begins, which balancing waits for, how far the training is, and that
all load of the step is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from mmengine.logging import MessageHub

from damex.models.moe_ffn import MoEFFN
from damex.models.moe_patch_conv import MoEPatchConv

__all__ = [
    "gather_loads",
    "prepare_gates",
    "training_iteration",
    "training_progress",
]


def training_iteration() -> tuple[int, int] | None:
    """Number of the iteration and of all, from mmengine's message hub.

    Returns:
        The first iteration has number 0; None where no runner trains.
    """
    hub = MessageHub.get_current_instance()
    now, end = hub.get_info("iter"), hub.get_info("max_iters")
    return None if now is None or end is None else (now, end)


def training_progress() -> float | None:
    """Share of the training that is done.

    Returns:
        0 in the first iteration and 1 in the last; None where no runner trains.
    """
    iteration = training_iteration()
    if iteration is None:
        return None
    now, end = iteration
    return min(now / max(end - 1, 1), 1.0)


def prepare_gates(
    blocks: Iterable[MoEFFN | MoEPatchConv], progress: float | None
) -> None:
    """Tell gates with a ``balance`` or ``set_progress`` that a step begins.

    A balance takes in the load of the step before; ``set_progress`` hears how far the
    training is. A step is one forward in training: with gradient accumulation every
    micro-batch counts as one.

    Args:
        blocks: The MoE blocks of a detector.
        progress: Share of the training that is done, in [0, 1]; None leaves the gates
            as they are.
    """
    for block in blocks:
        gate = block.moe.gate
        balance = getattr(gate, "balance", None)
        if balance is not None:
            balance.step()
        if progress is not None and hasattr(gate, "set_progress"):
            gate.set_progress(progress)


def gather_loads(blocks: Iterable[MoEFFN | MoEPatchConv]) -> None:
    """Let gates with a ``balance`` sum the load of the forward over all processes.

    A checkpoint may be written before the next step, and one process writes it for all.

    Args:
        blocks: The MoE blocks of a detector.
    """
    for block in blocks:
        balance = getattr(block.moe.gate, "balance", None)
        if balance is not None:
            balance.gather()
