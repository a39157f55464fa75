"""The four parts of a MoE layer and what each must offer.

A new gate, router, expert bank or loss is one class in one new file that fits one of
these protocols; nothing else changes. None of them has to inherit from anything, and
parts with parameters or a training mode are `torch.nn.Module`s.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from damex.moe.routing import Assignment, RoutingRecord


class Router(Protocol):
    """Scores experts for tokens: (..., D) -> logits (..., E), row by row.

    Logits are float32 (or float64) whatever autocast says, and their softmax over E is
    the routing distribution: a two-level router returns the sum of its two
    log-softmaxes. Rows must not look at each other; the layer hands over real tokens
    only, without their image structure.
    """

    num_experts: int

    def __call__(self, tokens: Tensor, /) -> Tensor:
        """Returns the logits of each row of `tokens`."""

    def reset_parameters(self) -> None:
        """Draws new parameters."""


class Gate(Protocol):
    """Turns logits into routes.

    A gate sees the images apart (B, N, E), so that a gate in which experts choose among
    the tokens of an image keeps images independent. Token indices of the answer count
    through the flattened B*N tokens. Masked tokens must get no route. In evaluation the
    answer must be deterministic.

    Three things are optional. `set_progress(progress)`, with progress from 0 to 1, is
    called before every training step. An attribute `balance`, a module or None, gets
    its `step()` called then. `has_fixed_routes` is False where tokens may differ in
    their number of routes; losses that need it equal are then refused. A forward itself
    must not change what a repetition of it would choose, or activation recomputation
    would go wrong.
    """

    def __call__(
        self, logits_BNE: Tensor, token_mask_BN: Tensor | None, /
    ) -> Assignment:
        """Returns the routes of the real tokens."""


class Experts(Protocol):
    """A bank of E experts in one tensor per parameter.

    Every parameter must get a gradient (zeros if need be) on every backward, also when
    an expert, or all of them, received no token.
    """

    num_experts: int

    def __call__(self, tokens_RD: Tensor, counts_E: Tensor, /) -> Tensor:
        """Maps rows sorted by expert to outputs of shape (R, D)."""

    def reset_parameters(self) -> None:
        """Draws new parameters."""


class RoutingLoss(Protocol):
    """A training loss on the routing of one layer.

    A loss is a scalar that does not change with the content or amount of padding, and
    is zero, but attached to the graph, when no token is real.

    Optional is `check_layer(*, gate, num_groups)`, called when a layer is built: it
    raises ValueError if the loss cannot work with the gate, or with that many dataset
    groups (None without a group-expert map).
    """

    @property
    def name(self) -> str:
        """Key of the loss; unique within a layer."""

    @property
    def weight(self) -> float:
        """Factor that the layer applies."""

    @property
    def needs_groups(self) -> bool:
        """Whether the loss reads dataset group ids and the group-expert map."""

    def __call__(self, record: RoutingRecord, /) -> Tensor:
        """Returns the unweighted loss of one forward."""
