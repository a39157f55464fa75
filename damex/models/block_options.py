"""How an MoE block stands in its transformer layer: its norm and its drop path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from damex.errors import ConfigError, did_you_mean

__all__ = ["BlockOptions", "read_block_options", "take_closing_norm"]

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
