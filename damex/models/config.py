"""InsertionPlan: what a ``moe`` config asks for, checked before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mmdet.registry import MODELS
from torch import nn

from damex.errors import ConfigError, did_you_mean
from damex.models.context import RoutingContext
from damex.models.fine_grained import FineGrained, read_fine_grained
from damex.moe import expert_groups

__all__ = [
    "BlockOptions",
    "InsertionPlan",
    "check_arguments",
    "layers_of",
    "parameters_of",
    "read_block_options",
    "read_plan",
    "take_closing_norm",
]

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


PLAIN = (bool, int, float, str, NoneType)


def check_arguments(
    part: Callable[..., Any], arguments: Mapping[str, Any], *, field: str
) -> None:
    """Refuse arguments that a part does not have, or of another type than it says.

    Only plain types are looked at: numbers, text, truth values, None and literals.

    Args:
        part: The class, or a function that builds the part.
        arguments: What the config sets, without ``type``.
        field: Where it stands, for instance ``moe.gate``.

    Raises:
        ConfigError: If an argument is unknown or has another type.
    """
    parameters = parameters_of(part)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = _hints(part)
    for name, value in arguments.items():
        if name not in parameters:
            if open_ended:
                continue
            raise ConfigError(
                f"{field}.{name} = {value!r} is no argument of {part.__name__}; "
                f"{did_you_mean(name, parameters)} What an inherited {field} sets goes "
                f"away with {field}._delete_=True."
            )
        allowed = list(_members(hints.get(name, Any)))
        if not _all_plain(allowed) or any(_fits(value, kind) for kind in allowed):
            continue
        kinds = " or ".join(_word(kind) for kind in allowed)
        raise ConfigError(f"{field}.{name} must be {kinds}, got {value!r}.")


def parameters_of(part: Callable[..., Any] | None) -> Mapping[str, inspect.Parameter]:
    """What a part takes, by name.

    Args:
        part: The class, or a function that builds the part; None takes nothing, and so
            does a module without an ``__init__`` of its own.
    """
    if part is None or getattr(part, "__init__", None) is nn.Module.__init__:
        return {}
    return inspect.signature(part).parameters


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    builder: Any = vars(part).get("__init__", part) if inspect.isclass(part) else part
    try:
        return get_type_hints(builder)
    except NameError:  # a name that is imported for type checkers only
        return {}


def _members(hint: Any) -> Iterator[Any]:
    """The types of a union, and the values of a literal as literals."""
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    elif get_origin(hint) is Literal:
        yield from (Literal[value] for value in get_args(hint))
    else:
        yield hint


def _all_plain(kinds: list[Any]) -> bool:
    return all(kind in PLAIN or get_origin(kind) is Literal for kind in kinds)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return repr(get_args(kind)[0])
    return "None" if kind is NoneType else f"of type {kind.__name__}"


NORMS = ("post", "pre")
FIELDS = ("norm", "drop_path")


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """The field ``moe.block``.

    Attributes:
        norm: 'post' leaves the layer as DETRs have it, norm(x + MoE(x)). 'pre' is
            x + MoE(norm(x)) with no norm behind it, as in the released code of DAMEX.
        drop_path: Chance, in training, that the experts' answer to a token is left out.
    """

    norm: Literal["post", "pre"] = "post"
    drop_path: float = 0.0


def read_block_options(config: Any) -> BlockOptions:
    """Check and read ``moe.block``.

    Args:
        config: A dict of `BlockOptions`' fields, or None for the defaults.

    Raises:
        ConfigError: If a field is unknown or its value not allowed.
    """
    if config is None:
        return BlockOptions()
    if not isinstance(config, Mapping):
        raise ConfigError(f"moe.block must be a dict of {FIELDS}, got {config!r}.")
    for key in config:
        if key not in FIELDS:
            raise ConfigError(
                f"moe.block has the unknown key {key!r}; {did_you_mean(key, FIELDS)}"
            )
    options = BlockOptions(**config)
    if options.norm not in NORMS:
        raise ConfigError(
            f"moe.block.norm must be one of {NORMS}, got {options.norm!r}."
        )
    drop = options.drop_path
    if (
        isinstance(drop, bool)
        or not isinstance(drop, (int, float))
        or not 0 <= drop < 1
    ):
        raise ConfigError(f"moe.block.drop_path must lie in [0, 1), got {drop!r}.")
    return options


def take_closing_norm(layer: nn.Module, name: str) -> nn.Module:
    """Take the norm after the feed-forward block out of a transformer layer.

    An identity stays in its place. When a checkpoint of the untouched layer is loaded,
    the weights of its closing norm become those of the block's own norm: it is the
    same kind of norm over the same channels, and the best start at hand, though no
    equal one, as it now stands before the experts.

    Args:
        layer: A layer of mmdet with ``norms``, the last of which follows ``ffn``.
        name: Of the layer, for the message.

    Raises:
        ConfigError: If the layer has no such norm.
    """
    norms = getattr(layer, "norms", None)
    if not isinstance(norms, nn.ModuleList) or isinstance(norms[-1], nn.Identity):
        raise ConfigError(
            f"moe.block.norm='pre' needs a norm to move, but layer {name} "
            f"({type(layer).__name__}) has no list 'norms' that ends with one."
        )
    norm = norms[-1]
    norms[-1] = nn.Identity()
    layer.register_load_state_dict_pre_hook(_closing_norm_becomes_own)
    return norm


def _closing_norm_becomes_own(
    layer: Any, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Rename the closing norm's tensors in a state dict of the untouched layer."""
    del rest  # what else torch hands to such a hook
    closing = f"{prefix}norms.{len(layer.norms) - 1}."
    for key in [key for key in state if key.startswith(closing)]:
        own = f"{prefix}ffn.norm.{key.removeprefix(closing)}"
        state.setdefault(own, state[key])
        del state[key]
