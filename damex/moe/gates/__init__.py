"""What a gate is: the base class of all of them.

Axes: V real tokens, E experts.
"""

from __future__ import annotations

from torch import Tensor, nn

from damex.moe.group_choice import GroupChoice
from damex.moe.routing import Assignment, Packing


class Gate(nn.Module):
    """Turns router logits into routes.

    A subclass implements `forward`, which in evaluation has to be deterministic. A
    forward must not change what a repetition of it would choose, or activation
    recomputation would go wrong: state moves in `begin_step` and `end_step`, which the
    trainer calls before and after every forward in training.
    """

    @property
    def has_fixed_routes(self) -> bool:
        """Whether all tokens that are routed get the same number of experts."""
        return True

    def check_group_choice(self, choice: GroupChoice, *, smallest: int) -> None:
        """Refuses to keep tokens to one group's experts; called when a layer is built.

        A subclass that can overrides this, and its `forward` takes `allowed_VE`: bool,
        the experts that a token may be routed to, one or more per token; None for all.
        It changes the choice and not the weights: these mean the same for all tokens.

        Args:
            choice: Options, one of them on.
            smallest: Experts of the smallest group.

        Raises:
            ValueError: If the gate cannot do it.
        """
        raise ValueError(
            f"{type(self).__name__} does not keep a token to the experts of one group, "
            f"as {' and '.join(choice.options)} would have it; use TopKGate, or "
            f"leave {' and '.join(choice.options)} out"
        )

    def begin_step(self, progress: float | None) -> None:
        """Begins a training step.

        Args:
            progress: Share of the training that is done, from 0 to 1; None where
                nobody knows.
        """

    def end_step(self) -> None:
        """Ends a training step: what is counted in it is complete."""

    def forward(self, logits_VE: Tensor, packing: Packing | None = None) -> Assignment:
        """Chooses the routes.

        Args:
            logits_VE: Clean router logits of the real tokens, image by image.
            packing: To which image each token belongs, for gates that keep images
                apart; None for one image.

        Returns:
            The routes; tokens are counted as the rows of `logits_VE`.
        """
        raise NotImplementedError
