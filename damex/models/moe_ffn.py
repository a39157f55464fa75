"""MoEFFN: a mixture of experts in the place of mmcv's ``FFN``."""

from __future__ import annotations

from typing import Any

import torch
from mmcv.cnn.bricks.drop import DropPath
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from damex.models.context import RoutingContext
from damex.models.fine_grained import SplitStart
from damex.moe import MoELayer

__all__ = ["MoEFFN"]


class MoEFFN(nn.Module):
    """Residual MoE block that is called like mmcv's ``FFN``.

    It also loads what an ``FFN`` saved: every expert then starts as that FFN, and the
    router keeps its own weights (sparse upcycling, Komatsuzaki et al. 2023). With
    ``split`` the experts are the parts of that FFN instead, and equal it together.

    Args:
        moe: The layer.
        name: Name of the block in records and reports, for instance ``decoder.0``.
        context: Where group ids and the token mask come from and records go to.
        with_cp: Recompute the experts in the backward pass instead of keeping their
            activations. What the context holds is handed over as arguments, since the
            step is closed by then.
        norm: Norm before the router and the experts, not on the residual; None for
            none.
        drop_path: Chance, in training, that the experts' answer to a token is left out;
            what stays is scaled up by 1 / (1 - drop_path). Each token has its own
            chance, as in the released code of DAMEX, where queries are the first axis.
        split: Starts the experts as the parts of one FFN; None for whole FFNs.
    """

    def __init__(
        self,
        moe: MoELayer,
        *,
        name: str,
        context: RoutingContext,
        with_cp: bool = False,
        norm: nn.Module | None = None,
        drop_path: float = 0.0,
        split: SplitStart | None = None,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.moe = moe
        self.name = name
        self.context = context
        self.norm = norm
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else None
        self.split = split
        if split is not None:
            split.draw(moe)
        self.register_load_state_dict_pre_hook(_upcycle)

    def reset_parameters(self) -> None:
        """Draw router and experts anew; the norm is not touched."""
        self.moe.reset_parameters()
        if self.split is not None:
            self.split.draw(self.moe)

    def forward(self, query_BND: Tensor, identity_BND: Tensor | None = None) -> Tensor:
        """Add the experts' output to the query.

        Args:
            query_BND: Tokens, (images, tokens, channels).
            identity_BND: What the output is added to; the query by default.

        Returns:
            Tokens of the same shape; padded tokens keep their residual unchanged.
        """
        inputs: dict[str, Any] = dict(
            token_mask_BN=self.context.token_mask_BN,
            group_ids_B=self.context.group_ids_B,
            foreground_BN=self.context.foreground_BN,
        )
        tokens_BND = query_BND if self.norm is None else self.norm(query_BND)
        if self.with_cp and self.training:
            output_BND, record = checkpoint(
                self.moe, tokens_BND, use_reentrant=False, **inputs
            )
        else:
            output_BND, record = self.moe(tokens_BND, **inputs)
        self.context.add(self.name, record)
        if self.drop_path is not None and self.training:
            output_BND = self._drop(output_BND, self.drop_path)
        return (query_BND if identity_BND is None else identity_BND) + output_BND

    def _drop(self, output_BND: Tensor, drop_path: DropPath) -> Tensor:
        mask_BN = self.context.token_mask_BN
        if mask_BN is None:
            rows_TD = drop_path(output_BND.flatten(0, 1))
            return rows_TD.unflatten(0, output_BND.shape[:2])
        # Only real tokens draw, so that padding does not shift the random stream.
        rows_VD = drop_path(output_BND[mask_BN])
        return torch.zeros_like(output_BND).index_put((mask_BN,), rows_VD)


def _upcycle(block: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Turn the tensors of an FFN in a state dict into those of the experts."""
    del rest  # what else torch hands to such a hook
    dense = {
        "w1_EDH": (f"{prefix}layers.0.0.weight", True),
        "b1_EH": (f"{prefix}layers.0.0.bias", False),
        "w2_EHD": (f"{prefix}layers.1.weight", True),
        "b2_ED": (f"{prefix}layers.1.bias", False),
    }
    own = block.state_dict()
    if "moe.experts.slope_E1" in own:
        dense["slope_E1"] = (f"{prefix}layers.0.1.weight", False)  # of nn.PReLU
    if block.split is not None:
        _upcycle_split(block, state, prefix, [key for key, _ in dense.values()])
        return
    found = {}
    for name, (key, is_matrix) in dense.items():
        target = own.get(f"moe.experts.{name}")
        if key not in state or target is None:
            return
        tensor = state[key].t() if is_matrix else state[key]
        if tensor.shape != target.shape[1:]:
            return  # the loader reports the keys that do not fit
        found[f"moe.experts.{name}"] = tensor.expand_as(target).clone()
    for key, _ in dense.values():
        del state[key]
    _put(state, prefix, own, found)


def _upcycle_split(
    block: Any, state: dict[str, Any], prefix: str, keys: list[str]
) -> None:
    """Turn the tensors of an FFN in a state dict into the parts of that FFN."""
    if not all(key in state for key in keys):
        return
    try:
        found = block.split.state(block.moe, [state[key] for key in keys])
    except ValueError:
        return  # another width: the loader reports the keys that do not fit
    for key in keys:
        del state[key]
    found = {f"moe.{name}": tensor for name, tensor in found.items()}
    _put(state, prefix, block.state_dict(), found)


def _put(
    state: dict[str, Any], prefix: str, own: dict[str, Any], found: dict[str, Any]
) -> None:
    """Add what was found; what a dense checkpoint cannot know stays as it is."""
    for name, tensor in own.items():
        state.setdefault(prefix + name, tensor)
    for name, tensor in found.items():
        state[prefix + name] = tensor
