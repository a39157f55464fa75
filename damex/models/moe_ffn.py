"""MoEFFN: a mixture of experts in the place of mmcv's ``FFN``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from damex.models.context import RoutingContext
from damex.moe import MoELayer

__all__ = ["MoEFFN"]


class MoEFFN(nn.Module):
    """Residual MoE block that is called like mmcv's ``FFN``.

    It also loads what an ``FFN`` saved: every expert then starts as that FFN, and the
    router keeps its own weights (sparse upcycling, Komatsuzaki et al. 2023).

    Args:
        moe: The layer.
        name: Name of the block in records and reports, for instance ``decoder.0``.
        context: Where group ids and the token mask come from and records go to.
        with_cp: Recompute the experts in the backward pass instead of keeping their
            activations. What the context holds is handed over as arguments, since the
            step is closed by then.
    """

    def __init__(
        self,
        moe: MoELayer,
        *,
        name: str,
        context: RoutingContext,
        with_cp: bool = False,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.moe = moe
        self.name = name
        self.context = context
        self.register_load_state_dict_pre_hook(_upcycle)

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
        )
        if self.with_cp and self.training:
            output_BND, record = checkpoint(
                self.moe, query_BND, use_reentrant=False, **inputs
            )
        else:
            output_BND, record = self.moe(query_BND, **inputs)
        self.context.add(self.name, record)
        return (query_BND if identity_BND is None else identity_BND) + output_BND


def _upcycle(block: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
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
    for name, tensor in {**own, **found}.items():
        state[prefix + name] = tensor
