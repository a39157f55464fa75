"""Build the modules of a MoE layer from their configs, with helpful errors."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mmdet.registry import MODELS
from torch import nn

from damex.errors import ConfigError, did_you_mean
from damex.models.config import FineGrained, MoEConfig, is_dict
from damex.moe import (
    FFNExperts,
    Gate,
    GroupChoice,
    LinearRouter,
    MoELayer,
    RoutingLoss,
    SeparateRouterLoss,
    SharedExpert,
    TopKGate,
    expert_groups,
)

ROOMS = ("damex.moe.", "damex.papers.")  # with the classes of a layer


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
    num_experts = config.num_experts or num_groups
    if num_experts is None:
        raise ConfigError(
            "moe.num_experts is not set and there is no mixture to take it from; set "
            "num_experts, or train on a MixtureDataset."
        )
    groups = _group_experts(config, num_groups, num_experts)
    named = parameters_of(module_class(config.experts))
    given = {k: v for k, v in experts.items() if _takes_all(named) or k in named}
    bank = build_module(config.experts, "experts", num_experts=num_experts, **given)
    try:
        layer = MoELayer(
            shared_expert=_build_shared_expert(config, bank, shared_expert),
            gate=_build_gate(config, num_experts),
            router=build_module(
                config.router,
                "router",
                offer=dict(num_groups=len(groups)) if groups else {},
                num_experts=num_experts,
                embed_dims=experts.get("embed_dims") or bank.embed_dims,
            ),
            experts=bank,
            losses=[build_module(loss, "losses") for loss in config.losses],
            group_experts=groups,
            group_choice=_group_choice(config),
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"moe: {error}") from error
    if config.fine_grained is not None:
        _check_fine_grained(config, config.fine_grained, layer)
    if config.router_warmup is None and any(
        isinstance(loss, SeparateRouterLoss) for loss in layer.losses
    ):
        raise ConfigError(
            "moe.losses: SeparateRouterLoss has no minimum and is for a warm-up in "
            "which routers are trained alone; set moe.router_warmup=dict(share=0.1), "
            "or remove it."
        )
    return layer


def _group_experts(
    config: MoEConfig, num_groups: int | None, num_experts: int
) -> tuple[tuple[int, ...], ...] | None:
    """Assign experts (whole copies of the FFN if fine-grained) to dataset groups.

    None outside of a mixture, or if groups outnumber experts and no module needs them.
    """
    options = _group_choice(config).options
    if not num_groups and options:
        raise ConfigError(
            f"moe.{options[0]} needs dataset groups, but there is no mixture; train on "
            "a MixtureDataset, or leave it out."
        )
    if not num_groups:
        return None
    fine = config.fine_grained
    most, field = num_experts, "num_experts"
    if fine is not None:
        most, field = fine.copies, "fine_grained.copies"
    if num_groups > most:
        if not _needs_groups(config):
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


def _needs_groups(config: MoEConfig) -> bool:
    """Whether a loss, the router or an option needs dataset groups."""
    losses, router = map(module_class, config.losses), config.router
    return (
        bool(_group_choice(config).options)
        or any(getattr(loss, "needs_groups", False) for loss in losses)
        or "num_groups" in parameters_of(module_class(router)).keys() - router.keys()
    )


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


def _build_gate(config: MoEConfig, num_experts: int) -> Any:
    fine = config.fine_grained
    settings = {**({} if fine is None else fine.gate), **config.gate}
    gate = build_module(settings, "gate", offer=dict(num_experts=num_experts))
    k = getattr(gate, "k", None) or 0
    if k > num_experts:
        raise ConfigError(
            f"moe.gate.k is {k}, but there are {num_experts} experts; set k to "
            f"{num_experts} or less."
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
            f"{did_you_mean(str(kind), _known_types(field))}"
        )
    named = parameters_of(module)
    unknown = [] if _takes_all(named) else [name for name in own if name not in named]
    if unknown:
        raise ConfigError(
            f"moe.{field}.{unknown[0]} = {own[unknown[0]]!r} is not an argument of "
            f"{module.__name__}; {did_you_mean(unknown[0], named)} "
            f"moe.{field}._delete_=True discards inherited arguments."
        )
    wanted = {name: value for name, value in offer.items() if name in named}
    try:
        return MODELS.build({"type": kind, **values, **wanted, **own})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"moe.{field} = {dict(config)}: {error}") from error


def _known_types(field: str) -> list[str]:
    bases: dict[str, type] = {"gate": Gate, "losses": RoutingLoss}
    base, suffix = bases.get(field), "Router" if field == "router" else ""
    return sorted(
        name
        for name, other in MODELS.module_dict.items()
        if name.endswith(suffix) and inspect.isclass(other)
        if (issubclass(other, base) if base else other.__module__.startswith(ROOMS))
    )


def module_class(module: Mapping[str, Any]) -> Any:
    """Return the class named by a module's ``type``, a registered name or the class."""
    kind = module.get("type")
    return MODELS.get(kind) if isinstance(kind, str) else kind


def parameters_of(module: Callable[..., Any] | None) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or builder, by name.

    Empty for None, and for a class that does not define ``__init__``.
    """
    if module is None or getattr(module, "__init__", None) is nn.Module.__init__:
        return {}
    return inspect.signature(module).parameters


def _takes_all(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def resolved_moe(config: MoEConfig) -> dict[str, Any]:
    """Return the ``moe`` tree as plain dicts with defaults filled in, for checkpoints.

    Memory options, expert placement and group choice are omitted, as they are not
    properties of the experts. Losses are keyed by type.
    """
    left_out = {"with_cp", "expert_parallel", *vars(GroupChoice())}
    tree = {k: v for k, v in vars(config).items() if k not in left_out}
    tree["losses"] = {str(loss.get("type")): loss for loss in config.losses}
    return _resolved(tree)


def _resolved(value: Any) -> Any:
    """Return plain containers and values, with the defaults of modules."""
    if dataclasses.is_dataclass(value):
        return _resolved(vars(value))
    if is_dict(value):
        named = parameters_of(module_class(value)).values()
        defaults = {p.name: p.default for p in named if p.default is not p.empty}
        return {k: _resolved(v) for k, v in {**defaults, **value}.items()}
    if isinstance(value, (list, tuple)):
        return [_resolved(item) for item in value]
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else getattr(value, "__name__", repr(value))


def moe_difference(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """Describe how two trees of `resolved_moe` differ; None if they are equal.

    One line such as ``moe.gate.k was 1 and is 2``.
    """
    return "; ".join(_differences(saved, present, "moe")) or None


def _differences(saved: Any, present: Any, where: str) -> Iterator[str]:
    both = (saved, present)
    if all(map(is_dict, both)) and saved.get("type") == present.get("type"):
        for key in sorted({*saved, *present}):
            yield from _differences(saved.get(key), present.get(key), f"{where}.{key}")
    elif saved != present:
        was, now = (v.get("type", "set") if is_dict(v) else repr(v) for v in both)
        yield f"{where} was {was} and is {now}"
