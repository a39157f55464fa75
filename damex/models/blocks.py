"""MoEFFN: a mixture of experts in the place of mmcv's ``FFN``."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from mmcv.cnn.bricks.drop import DropPath
from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from damex.models.context import RoutingContext
from damex.models.dense_phase import DENSE_EXPERT, DensePhase
from damex.models.upcycling import SplitStart, slice_channels, upcycle
from damex.moe import (
    FFNExperts,
    MoELayer,
    Packing,
    PatchConvExperts,
    real_patches,
    route_patches,
)


class MoEFFN(nn.Module):
    """Residual MoE block that is called like mmcv's ``FFN``.

    It also loads what an ``FFN`` saved; see :mod:`damex.models.upcycling`.

    Args:
        moe: The layer.
        name: Name of the block in records and reports, for instance ``decoder.0``.
        context: Where group ids and the packing come from and records go to.
        dense: The FFN that is replaced; its layer scale and drop path stay, under
            mmcv's names.
        with_cp: Recompute the experts in the backward pass instead of keeping their
            activations. What the context holds is handed over as arguments, since the
            step is closed by then.
        norm: Norm before the router and the experts, not on the residual; None for
            none.
        drop_path: Probability, in training, that the experts' output for a token is
            dropped; what stays is scaled up by 1 / (1 - drop_path). Each token is drawn
            alone, as in the released code of DAMEX, where queries are the first axis.
        split: Starts the experts as slices of one FFN, which they equal together; None
            for whole FFNs.
        dense_phase: While it is open the block is a dense FFN, that of one expert: all
            tokens pass it, padded ones too, and nothing is routed or recorded.
    """

    def __init__(
        self,
        moe: MoELayer,
        *,
        name: str,
        context: RoutingContext,
        dense: FFN | None = None,
        with_cp: bool = False,
        norm: nn.Module | None = None,
        drop_path: float = 0.0,
        split: SplitStart | None = None,
        dense_phase: DensePhase | None = None,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.moe = moe
        self.name = name
        self.context = context
        self.norm = norm
        self.gamma2 = nn.Identity() if dense is None else dense.gamma2
        self.dropout_layer = nn.Identity() if dense is None else dense.dropout_layer
        self.dense_activation = None if dense is None else activation_of(dense)
        # mmdet draws biases when it builds an FFN, and never again.
        self.dense_biases = [] if dense is None else first_biases(dense)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else None
        self.split = split
        self.dense_phase = dense_phase
        if split is not None:
            split.draw(moe)
        self.register_load_state_dict_pre_hook(upcycle)

    @property
    def is_dense(self) -> bool:
        """Whether the block is a dense FFN still."""
        return self.dense_phase is not None and self.dense_phase.is_open

    def reset_parameters(self) -> None:
        """Draw router and experts anew; norm and layer scale are not touched."""
        self.moe.reset_parameters()
        if self.split is not None:
            self.split.draw(self.moe)

    def forward(self, query_BND: Tensor, identity_BND: Tensor | None = None) -> Tensor:
        """Add the experts' output to the query.

        Args:
            query_BND: Tokens, (images, tokens, channels).
            identity_BND: What the output is added to; the query by default.

        Returns:
            Tokens of the same shape; padded tokens keep their residual unchanged, but
            in a dense phase.
        """
        tokens_BND = query_BND if self.norm is None else self.norm(query_BND)
        count = self.context.num_auxiliary
        if self.is_dense:
            output_BND = self._run_dense(tokens_BND)
        elif count == 0:
            output_BND = self._run(tokens_BND)
        else:
            main_BND = self._run(tokens_BND[:, :-count])
            auxiliary_BND = self._run(tokens_BND[:, -count:], is_auxiliary=True)
            output_BND = torch.cat([main_BND, auxiliary_BND], dim=1)
        output_BND = self.dropout_layer(self.gamma2(output_BND))
        return (query_BND if identity_BND is None else identity_BND) + output_BND

    def _run(self, tokens_BND: Tensor, *, is_auxiliary: bool = False) -> Tensor:
        """The experts' output; nobody keeps the record of auxiliary tokens."""
        packing, foreground_BN = self.context.packing, self.context.foreground_BN
        if is_auxiliary:
            packing = None
            if foreground_BN is not None:
                foreground_BN = foreground_BN.new_zeros(tokens_BND.shape[:2])
        inputs: dict[str, Any] = dict(
            packing=packing,
            group_ids_B=self.context.group_ids_B,
            foreground_BN=foreground_BN,
            earlier_votes_BG=self.context.votes_BG,
        )
        if self.with_cp and self.training:
            output_BND, record = checkpoint(
                self.moe, tokens_BND, use_reentrant=False, **inputs
            )
        else:
            output_BND, record = self.moe(tokens_BND, **inputs)
        if not is_auxiliary:
            self.context.add(self.name, record)
        return self._drop_tokens(output_BND, record.packing)

    def _run_dense(self, tokens_BND: Tensor) -> Tensor:
        """The output of the one expert that stands for a dense FFN."""
        run = partial(
            cast(FFNExperts, self.moe.experts).forward_expert, expert=DENSE_EXPERT
        )
        if self.with_cp and self.training:
            output_BND = checkpoint(run, tokens_BND, use_reentrant=False)
        else:
            output_BND = run(tokens_BND)
        return self._drop_tokens(output_BND, Packing(*tokens_BND.shape[:2]))

    def _drop_tokens(self, output_BND: Tensor, packing: Packing) -> Tensor:
        if self.drop_path is None or not self.training:
            return output_BND
        # Only real tokens draw, so that padding does not shift the random stream.
        return packing.unpack(self.drop_path(packing.pack(output_BND)))


def activation_of(dense: FFN) -> str:
    """Name of an FFN's activation, as `FFNExperts` knows it.

    Args:
        dense: With two linear layers.
    """
    return type(dense.layers[0][1]).__name__.lower()


def first_biases(dense: FFN) -> list[Tensor]:
    """Copies of the biases of an FFN's two layers.

    Args:
        dense: With two linear layers.
    """
    return [
        bias.detach().clone()
        for bias in (dense.layers[0][0].bias, dense.layers[1].bias)
    ]


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
        self.register_load_state_dict_pre_hook(slice_channels)

    def forward(self, map_BCHW: Tensor) -> Tensor:
        """Convolve the patches that were chosen.

        Args:
            map_BCHW: Feature map, (images, channels, height, width).

        Returns:
            Feature map of the same height and width.
        """
        size = (map_BCHW.shape[2], map_BCHW.shape[3])
        ratio_B2 = self.context.valid_ratio_B2
        packing = None
        if ratio_B2 is not None:
            experts = cast(PatchConvExperts, self.moe.experts)
            mask_BN = real_patches(ratio_B2, size, experts.patch_size)
            packing = Packing.of_mask(mask_BN)
        route = partial(
            route_patches,
            self.moe,
            packing=packing,
            group_ids_B=self.context.group_ids_B,
            earlier_votes_BG=self.context.votes_BG,
        )
        if self.with_cp and self.training:
            out_BFHW, record = checkpoint(route, map_BCHW, use_reentrant=False)
        else:
            out_BFHW, record = route(map_BCHW)
        self.context.add(self.name, record)
        return out_BFHW
