"""MoEFFN: a mixture of experts in the place of mmcv's ``FFN``."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from mmcv.cnn.bricks.drop import DropPath
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from damex.models.context import RoutingContext
from damex.models.fine_grained import SplitStart
from damex.models.upcycling import upcycle
from damex.moe import MoELayer, Packing, PatchConvExperts, real_patches, route_patches

__all__ = [
    "MoEFFN",
    "MoEPatchConv",
]


class MoEFFN(nn.Module):
    """Residual MoE block that is called like mmcv's ``FFN``.

    It also loads what an ``FFN`` saved; see :mod:`damex.models.upcycling`.

    Args:
        moe: The layer.
        name: Name of the block in records and reports, for instance ``decoder.0``.
        context: Where group ids and the packing come from and records go to.
        with_cp: Recompute the experts in the backward pass instead of keeping their
            activations. What the context holds is handed over as arguments, since the
            step is closed by then.
        norm: Norm before the router and the experts, not on the residual; None for
            none.
        drop_path: Chance, in training, that the experts' answer to a token is left out;
            what stays is scaled up by 1 / (1 - drop_path). Each token has its own
            chance, as in the released code of DAMEX, where queries are the first axis.
        split: Starts the experts as the parts of one FFN, which they equal together;
            None for whole FFNs.
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
        self.register_load_state_dict_pre_hook(upcycle)

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
            packing=self.context.packing,
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
        # Only real tokens draw, so that padding does not shift the random stream.
        packing = self.context.packing or Packing.full(*output_BND.shape[:2])
        return packing.unpack(drop_path(packing.pack(output_BND)))


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
        packing = None
        if share_B2 is not None:
            experts = cast(PatchConvExperts, self.moe.experts)
            mask_BN = real_patches(share_B2, size, experts.patch_size)
            packing = Packing.of_mask(mask_BN)
        route = partial(
            route_patches,
            self.moe,
            packing=packing,
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
