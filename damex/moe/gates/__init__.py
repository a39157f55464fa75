"""The base class of gates.

Axes: V real tokens, E experts.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from damex.moe.routing import Assignment, GroupChoice, Packing


class Gate(nn.Module):
    """Turns router logits into routes.

    A subclass implements `forward`, which must be deterministic in evaluation. A
    forward pass must not change what its repetition would choose, or activation
    recomputation would be wrong: state changes in `begin_step` and `end_step`, called
    by the trainer before and after every forward pass in training.
    """

    compares_tokens: ClassVar[bool] = False
    """Whether the experts of a token depend on the other tokens of its image."""

    @property
    def has_fixed_routes(self) -> bool:
        """Whether all routed tokens get the same number of experts."""
        return True

    @property
    def has_constant_weights(self) -> bool:
        """Whether weights are always 1, so that the output teaches no router."""
        return False

    def has_even_load(self, tokens: str) -> bool:
        """Whether experts always get equally many of 'all' or 'foreground' tokens."""
        return False

    def check_group_choice(self, choice: GroupChoice, *, smallest: int) -> None:
        """Reject a restriction to one group's experts; called when a layer is built.

        `smallest` is the size of the smallest group. A subclass that supports it
        overrides this, and its `forward` takes `allowed_VE`: bool, at least one expert
        per token, None for all. It restricts the choice and does not change the
        weights.
        """
        raise ValueError(
            f"{type(self).__name__} does not keep a token to the experts of one group "
            f"and cannot be combined with {' and '.join(choice.options)}; use "
            "TopKGate, or leave the option out"
        )

    def begin_step(self, progress: float | None) -> None:
        """Begin a training step at a share of the training in [0, 1], if known."""

    def end_step(self) -> None:
        """End a training step: its counts are complete."""

    def forward(self, logits_VE: Tensor, packing: Packing | None = None) -> Assignment:
        """Choose the routes; without a packing all tokens belong to one image."""
        raise NotImplementedError
