"""Build the modules of a MoE layer from their configs, with helpful errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mmdet.registry import MODELS

from damex.errors import ConfigError, did_you_mean
from damex.models.config import FineGrained, MoEConfig
from damex.models.signatures import (
    accepted,
    check_arguments,
    module_class,
    parameters_of,
)
from damex.moe import (
    FFNExperts,
    GroupChoice,
    LinearRouter,
    MoELayer,
    SharedExpert,
    TopKGate,
    expert_groups,
)

# Subpackages of damex.moe by field.
FOLDERS = MappingProxyType({"router": "routers", "gate": "gates", "losses": "losses"})


def build_layer(
    config: MoEConfig,
    experts: Mapping[str, Any],
    *,
    num_groups: int | None,
    shared_expert: Mapping[str, Any] = MappingProxyType({}),
) -> MoELayer:
    """Build router, gate, experts and losses, and assemble the layer.

    ``experts`` and ``shared_expert`` are properties of the replaced block, passed to
    modules that accept them. ``num_groups`` is None outside of a mixture.

    Raises:
        ConfigError: If a module is unknown, an argument is wrong, or the modules do not
            fit together.
    """
    num_experts = _num_experts(config, num_groups)
    groups = group_experts(config, num_groups, num_experts)
    choice = _group_choice(config)
    if groups is None and choice.options:
        raise ConfigError(
            f"moe.{choice.options[0]} needs dataset groups, and there is no mixture; "
            "train on a MixtureDataset, or leave it out."
        )
    bank = build_module(
        config.experts,
        "experts",
        num_experts=num_experts,
        **accepted(module_class(config.experts), experts),
    )
    shared = _build_shared_expert(config, bank, shared_expert)
    gate = _build_gate(config, num_experts)
    try:
        layer = MoELayer(
            router=build_module(
                config.router,
                "router",
                offer=dict(num_groups=len(groups)) if groups else {},
                num_experts=num_experts,
                embed_dims=experts.get("embed_dims") or bank.embed_dims,
            ),
            gate=gate,
            experts=bank,
            shared_expert=shared,
            losses=[build_module(loss, "losses") for loss in config.losses],
            group_experts=groups,
            group_choice=choice,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"moe: {error}") from error
    if config.fine_grained is not None:
        _check_fine_grained(config, config.fine_grained, layer)
    return layer


def _build_shared_expert(
    config: MoEConfig, bank: Any, values: Mapping[str, Any]
) -> SharedExpert | None:
    """Build the configured shared expert, or that of fine-grained experts."""
    fine = config.fine_grained
    if fine is not None:  # excludes shared_expert, see _check_fine_grained
        if fine.shared == 0 or not isinstance(bank, FFNExperts):
            return None
        # All parts of one FFN share its activation and dropout.
        alike = dict(activation=bank.activation, dropout=bank.dropout)
        return SharedExpert(**{**values, **alike})
    if config.shared_expert is not None:
        return build_module(config.shared_expert, "shared_expert", **values)
    if getattr(bank, "needs_shared_expert", False):
        raise ConfigError(
            f"moe.experts is {type(bank).__name__!r}, which only adds to an FFN, and "
            "there is none; set moe.shared_expert=dict(type='SharedExpert')."
        )
    return None


def _num_experts(config: MoEConfig, num_groups: int | None) -> int:
    num_experts = config.num_experts or num_groups
    if num_experts is None:
        raise ConfigError(
            "moe.num_experts is not set and there is no mixture to take it from; set "
            "num_experts, or train on a MixtureDataset."
        )
    return num_experts


def group_experts(
    config: MoEConfig, num_groups: int | None, num_experts: int
) -> tuple[tuple[int, ...], ...] | None:
    """Assign experts to dataset groups.

    Returns:
        Expert ids by group; fine-grained experts as whole copies of the FFN. None
        outside of a mixture, or if groups outnumber experts and no module needs them.

    Raises:
        ConfigError: If groups outnumber experts and a module needs groups.
    """
    if not num_groups:
        return None
    fine = config.fine_grained
    most, field = num_experts, "num_experts"
    if fine is not None:
        most, field = fine.copies, "fine_grained.copies"
    if num_groups > most:
        if not _asks_for_groups(config):
            return None
        raise ConfigError(
            f"the mixture has {num_groups} dataset groups but moe.{field} is {most}; "
            f"set {field.rsplit('.', 1)[-1]}={num_groups} or more, or let datasets "
            "share experts by giving their mixture entries the same group='...'."
        )
    parts = 1 if fine is None else fine.routed
    return tuple(
        tuple(unit * parts + part for unit in units for part in range(parts))
        for units in expert_groups(num_groups, most)
    )


def _group_choice(config: MoEConfig) -> GroupChoice:
    """Return the options that restrict an image's tokens to one group's experts."""
    return GroupChoice(**{name: vars(config)[name] for name in vars(GroupChoice())})


def _asks_for_groups(config: MoEConfig) -> bool:
    """Whether a loss, the router or an option needs dataset groups."""
    if _group_choice(config).options:
        return True
    kinds = map(module_class, config.losses)
    if any(getattr(kind, "needs_groups", False) for kind in kinds):
        return True
    router = config.router
    return "num_groups" not in router and "num_groups" in parameters_of(
        module_class(router)
    )


def _build_gate(config: MoEConfig, num_experts: int) -> Any:
    fine = config.fine_grained
    settings = {**({} if fine is None else fine.gate), **config.gate}
    gate = build_module(settings, "gate", offer=dict(num_experts=num_experts))
    for name in ("k", "end_k"):
        k = getattr(gate, name, None)
        if k is not None and k > num_experts:
            raise ConfigError(
                f"moe.gate.{name} is {k}, but there are {num_experts} experts; set "
                f"{name} to {num_experts} or less."
            )
    return gate


def _check_fine_grained(config: MoEConfig, fine: FineGrained, layer: MoELayer) -> None:
    """Reject settings that keep fine-grained experts from starting equal to the FFN."""
    shared = config.shared_expert
    found: dict[str, tuple[Any, Any]] = {
        "block.norm": (config.block.norm, "post"),
        "gate": (type(layer.gate).__name__, TopKGate.__name__),
        "experts": (type(layer.experts).__name__, FFNExperts.__name__),
        "shared_expert": (None if shared is None else shared["type"], None),
    }
    settings = dict(**fine.gate, capacity=None)
    if fine.routed > 1:  # copies are interchangeable, but not parts of two
        found["router"] = (type(layer.router).__name__, LinearRouter.__name__)
        settings["noise"] = None
    for name, wanted in settings.items():
        found[f"gate.{name}"] = (getattr(layer.gate, name, wanted), wanted)
    for field, (value, wanted) in found.items():
        if value != wanted:
            raise ConfigError(
                f"moe.{field} is {value!r}, but with moe.fine_grained it must be "
                f"{wanted!r}, or the detector would not start equal to the dense one; "
                "leave it out."
            )


def build_module(
    config: Mapping[str, Any],
    field: str,
    *,
    offer: Mapping[str, Any] = MappingProxyType({}),
    **values: Any,
) -> Any:
    """Build one module; values of its config take precedence over those given here.

    A dict among the values is a module, too, and needs a ``type``. ``offer`` holds
    values passed only to modules whose ``__init__`` names them.

    Raises:
        ConfigError: If the type is unknown or an argument is wrong.
    """
    own = {
        name: build_module(value, f"{field}.{name}", offer=offer)
        if isinstance(value, Mapping)
        else value
        for name, value in config.items()
        if name != "type"
    }
    kind, module = config.get("type"), module_class(config)
    if module is None:
        raise ConfigError(
            f"moe.{field} has the unknown type {str(kind)!r}; "
            f"{did_you_mean(str(kind), _known_modules(field))}"
        )
    named = parameters_of(module)
    wanted = {name: value for name, value in offer.items() if name in named}
    check_arguments(module, own, field=f"moe.{field}")
    try:
        return MODELS.build({"type": kind, **values, **wanted, **own})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"moe.{field} = {dict(config)}: {error}") from error


def _known_modules(field: str) -> list[str]:
    """Return the names of damex's modules for a field, or of all of them."""
    folder = f"damex.moe.{FOLDERS.get(field, '')}"
    return sorted(
        name
        for name, module in MODELS.module_dict.items()
        if module.__module__.startswith(folder)
    )
