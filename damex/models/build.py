"""Parts of a mixture of experts built from their configs, with errors that help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mmdet.registry import MODELS

from damex.errors import ConfigError, did_you_mean
from damex.models.config import check_arguments, parameters_of
from damex.moe import MoELayer

__all__ = ["assemble_layer", "build_part"]

# Where damex keeps the parts for a field.
FOLDERS = MappingProxyType({"router": "routers", "gate": "gates", "losses": "losses"})


def assemble_layer(
    moe: Mapping[str, Any],
    experts: Any,
    *,
    embed_dims: int,
    num_experts: int,
    groups: Sequence[Sequence[int]] | None,
    gate_defaults: Mapping[str, Any] = MappingProxyType({}),
    shared_expert: Any = None,
) -> MoELayer:
    """Put router, gate and losses of the config around built experts.

    Args:
        moe: The config of the mixture of experts.
        experts: The built bank.
        embed_dims: Width of what the router sees.
        num_experts: Number of experts.
        groups: The experts of each dataset group; None outside of a mixture.
        gate_defaults: Fields of the gate that the config may leave out.
        shared_expert: A built shared expert, if any.

    Raises:
        ConfigError: If a part is unknown, an argument is wrong, or the parts do not
            fit together.
    """
    losses = moe.get("losses") or []
    if not isinstance(losses, (list, tuple)):
        raise ConfigError(f"moe.losses must be a list of dicts, got {losses!r}.")
    gate = _build_gate(moe.get("gate"), gate_defaults, num_experts)
    try:
        return MoELayer(
            router=build_part(
                moe.get("router"),
                "LinearRouter",
                "router",
                offer=dict(num_groups=len(groups)) if groups else {},
                num_experts=num_experts,
                embed_dims=embed_dims,
            ),
            gate=gate,
            experts=experts,
            shared_expert=shared_expert,
            losses=[build_part(cfg, None, "losses") for cfg in losses],
            group_experts=groups,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"moe: {error}") from error


def _build_gate(
    config: Mapping[str, Any] | None, defaults: Mapping[str, Any], num_experts: int
) -> Any:
    if defaults:
        config = {**defaults, **(config or {})}
    gate = build_part(config, "TopKGate", "gate", offer=dict(num_experts=num_experts))
    for name in ("k", "end_k"):
        k = getattr(gate, name, None)
        if k is not None and k > num_experts:
            raise ConfigError(
                f"moe.gate.{name} is {k}, but there are {num_experts} experts; set "
                f"{name} to {num_experts} or less."
            )
    return gate


def build_part(
    config: Mapping[str, Any] | None,
    default: str | None,
    field: str,
    *,
    offer: Mapping[str, Any] = MappingProxyType({}),
    **values: Any,
) -> Any:
    """Build one part; values of the config win over the defaults.

    What is in ``offer`` is handed only to a part whose ``__init__`` names it. A value
    that is a dict is a part, too, and needs a ``type``.

    Args:
        config: The part as the config has it; None for the default.
        default: Type of a part that names none; None where it has to.
        field: Name of the field in ``moe``, for messages.
        offer: Values for parts that ask for them.
        **values: Values for any part.

    Raises:
        ConfigError: If the type is unknown or an argument is wrong.
    """
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"moe.{field} must be a dict with a type, such as "
            f"dict(type={default or 'LoadBalanceLoss'!r}), got {config!r}."
        )
    own = {
        name: build_part(value, None, f"{field}.{name}", offer=offer)
        if isinstance(value, Mapping)
        else value
        for name, value in (config or {}).items()
    }
    kind = own.pop("type", default)
    part = MODELS.get(kind) if isinstance(kind, str) else kind
    if part is None:
        raise ConfigError(
            f"moe.{field} has the unknown type {str(kind)!r}; "
            f"{did_you_mean(str(kind), _known_parts(field))}"
        )
    named = parameters_of(part)
    wanted = {name: value for name, value in offer.items() if name in named}
    check_arguments(part, own, field=f"moe.{field}")
    try:
        return MODELS.build({"type": kind, **values, **wanted, **own})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"moe.{field} = {dict(config or {})}: {error}") from error


def _known_parts(field: str) -> list[str]:
    """Names of the parts that stand in damex for a field, or of all parts."""
    folder = f"damex.moe.{FOLDERS.get(field, '')}"
    return sorted(
        name
        for name, part in MODELS.module_dict.items()
        if part.__module__.startswith(folder)
    )
