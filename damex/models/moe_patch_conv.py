"""MoEPatchConv: experts on patches in the place of a convolution."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from damex.models.context import RoutingContext
from damex.moe import MoELayer, PatchConvExperts, real_patches, route_patches

__all__ = ["MoEPatchConv"]


class MoEPatchConv(nn.Module):
    """A convolution whose output channels are shared out among experts.

    Patches that no expert took are zero here and keep what the block's identity path
    gives them. It also loads what the convolution saved: each expert then starts as its
    slice of the output channels.

    Args:
        moe: Router, gate and `PatchConvExperts`.
        name: Name of the block in records and reports.
        context: Where group ids and the extent of the images come from and records go
            to.
        with_cp: Recompute the experts in the backward pass.
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
        self.register_load_state_dict_pre_hook(_slice_channels)

    def forward(self, map_BCHW: Tensor) -> Tensor:
        """Convolve the patches that were chosen.

        Args:
            map_BCHW: Feature map, (images, channels, height, width).

        Returns:
            Feature map of the same height and width.
        """
        size = (map_BCHW.shape[2], map_BCHW.shape[3])
        share_B2 = self.context.image_share_B2
        mask_BN = None
        if share_B2 is not None:
            experts = cast(PatchConvExperts, self.moe.experts)
            mask_BN = real_patches(share_B2, size, experts.patch_size)
        route = partial(
            route_patches,
            self.moe,
            patch_mask_BN=mask_BN,
            group_ids_B=self.context.group_ids_B,
        )
        if self.with_cp and self.training:
            out_BFHW, record = checkpoint(route, map_BCHW, use_reentrant=False)
        else:
            out_BFHW, record = route(map_BCHW)
        self.context.add(self.name, record)
        return out_BFHW


def _slice_channels(
    block: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Turn the kernel of a dense convolution in a state dict into the experts'."""
    del rest  # what else torch hands to such a hook
    key, own = f"{prefix}weight", block.state_dict()
    target = own["moe.experts.weight_EOCKK"]
    kernel = state.get(key)
    if kernel is None or kernel.shape != target.flatten(0, 1).shape:
        return  # the loader reports the keys that do not fit
    del state[key]
    for name, tensor in own.items():
        state[prefix + name] = tensor
    state[f"{prefix}moe.experts.weight_EOCKK"] = kernel.reshape(target.shape)
