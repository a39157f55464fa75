"""InsertionPlan: what a ``moe`` config asks for, checked before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmdet.registry import MODELS

from damex.errors import ConfigError, did_you_mean
from damex.models.block_options import BlockOptions, read_block_options
from damex.models.context import RoutingContext
from damex.models.fine_grained import FineGrained, read_fine_grained
from damex.models.part_arguments import parameters_of
from damex.moe import expert_groups

__all__ = ["InsertionPlan", "layers_of", "read_plan"]

MOE_FIELDS = (
    "layers",
    "num_experts",
    "router",
    "gate",
    "experts",
    "shared_expert",
    "losses",
    "with_cp",
    "block",
    "fine_grained",
    "router_stage",
)


@dataclass(frozen=True)
class InsertionPlan:
    """What all layers of a detector share.

    Attributes:
        moe: The config.
        context: What the blocks read and write during a forward pass.
        num_experts: Number of experts.
        groups: The experts of each dataset group; None outside of a mixture, and where
            there are fewer experts than groups and nothing asks for groups.
        fine: The fine-grained start, if any.
        options: Norm and drop path of the blocks.
        with_cp: Whether experts are recomputed in the backward pass.
    """

    moe: Mapping[str, Any]
    context: RoutingContext
    num_experts: int
    groups: Sequence[Sequence[int]] | None
    fine: FineGrained | None
    options: BlockOptions
    with_cp: bool


def read_plan(
    moe: Mapping[str, Any], *, context: RoutingContext, num_groups: int | None
) -> InsertionPlan:
    """Read the fields that all layers share.

    Args:
        moe: See :func:`damex.models.insertion.insert_moe`.
        context: Goes into the plan.
        num_groups: Number of dataset groups; None outside of a mixture.

    Raises:
        ConfigError: If a field is unknown or has a value that cannot work.
    """
    for key in moe:
        if key not in MOE_FIELDS:
            raise ConfigError(
                f"moe has the unknown key {key!r}; {did_you_mean(key, MOE_FIELDS)}"
            )
    layers_of(moe)
    with_cp = moe.get("with_cp")
    if with_cp not in (None, True, False):
        raise ConfigError(f"moe.with_cp must be True or False, got {with_cp!r}.")
    fine = read_fine_grained(moe.get("fine_grained"))
    options = read_block_options(moe.get("block"))
    asked = moe.get("num_experts")
    if fine is not None:
        fine.check_fields(num_experts=asked, norm=options.norm)
        asked = fine.num_experts
    num_experts = _num_experts(asked, num_groups)
    return InsertionPlan(
        moe=moe,
        context=context,
        num_experts=num_experts,
        groups=_groups(moe, num_groups, num_experts, fine),
        fine=fine,
        options=options,
        with_cp=bool(with_cp),
    )


def layers_of(moe: Mapping[str, Any]) -> Mapping[str, Any]:
    """The choice of layers.

    Args:
        moe: The config.

    Raises:
        ConfigError: If it is no dict.
    """
    layers = moe.get("layers") or {}
    if not isinstance(layers, Mapping):
        raise ConfigError(
            "moe.layers must be a dict such as dict(decoder=[0, 2, 4]), got "
            f"{layers!r}."
        )
    return layers


def _num_experts(num_experts: int | None, num_groups: int | None) -> int:
    if num_experts is None:
        if num_groups is None:
            raise ConfigError(
                "moe.num_experts is not set and there is no mixture to take it "
                "from; set num_experts, or train on a MixtureDataset."
            )
        return num_groups
    if type(num_experts) is not int or num_experts < 1:
        raise ConfigError(
            f"moe.num_experts must be an integer of 1 or more, got {num_experts!r}."
        )
    return num_experts


def _groups(
    moe: Mapping[str, Any],
    num_groups: int | None,
    num_experts: int,
    fine: FineGrained | None,
) -> tuple[tuple[int, ...], ...] | None:
    """The experts of each dataset group, where there are enough for all of them."""
    if not num_groups:
        return None
    most = num_experts if fine is None else fine.copies
    if num_groups > most and not _asks_for_groups(moe):
        return None
    if fine is not None:
        return fine.groups(num_groups)
    if num_groups > num_experts:
        raise ConfigError(
            f"the mixture has {num_groups} dataset groups but moe.num_experts is "
            f"{num_experts}; set num_experts={num_groups} or more, or let datasets "
            "share experts by giving their mixture entries the same group='...'."
        )
    return expert_groups(num_groups, num_experts)


def _asks_for_groups(moe: Mapping[str, Any]) -> bool:
    """Whether a loss or the router works with the experts of dataset groups."""
    losses = moe.get("losses")
    kinds = map(_kind, losses if isinstance(losses, (list, tuple)) else ())
    if any(getattr(kind, "needs_groups", False) for kind in kinds):
        return True
    router = moe.get("router") or {}
    return "num_groups" not in router and "num_groups" in parameters_of(_kind(router))


def _kind(part: Any) -> Any:
    """The class behind the config of a part; None where it names none."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return MODELS.get(kind) if isinstance(kind, str) else kind
