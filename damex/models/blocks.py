"""Drop-in replacements of mmdet's blocks by mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from mmcv.cnn.bricks.drop import DropPath
from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from damex.models.context import RoutingContext
from damex.models.starts import (
    DENSE_EXPERT,
    DensePhase,
    SplitStart,
    Start,
    ffn_starts,
    fork_rng,
    load_starts,
    phase_starts,
)
from damex.moe import FFNExperts, MoELayer, Packing


class MoEBlock(nn.Module):
    """Base class of blocks; they also load the weights of the module they replace.

    Args:
        name: Name in records and reports, for instance ``decoder.0``.
        with_cp: Recompute the experts in the backward pass. The step is closed by then,
            so the contents of the context are passed as arguments.
    """

    dense_phase: DensePhase | None

    def __init__(
        self, moe: MoELayer, *, name: str, context: RoutingContext, with_cp: bool
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.moe = moe
        self.name = name
        self.context = context
        self.dense_phase = None
        self.register_load_state_dict_pre_hook(load_starts)

    def starts(self, state: Mapping[str, Any], prefix: str) -> dict[str, Start]:
        """Return how tensors start from those of another form in a state dict.

        By name; ``prefix`` is that of the block's keys.
        """
        raise NotImplementedError

    def _run(self, function: Callable[[Tensor], Any], x: Tensor) -> Any:
        """Run a part of the block, recomputed in the backward pass with ``with_cp``."""
        if self.with_cp and self.training:
            return checkpoint(function, x, use_reentrant=False)
        return function(x)


class MoEFFN(MoEBlock):
    """Residual MoE block that is called like mmcv's ``FFN``.

    Args:
        dense: The replaced FFN; its layer scale and drop path are kept under mmcv's
            names.
        norm: Norm before router and experts, not on the residual.
        drop_path: Probability, in training, of dropping a token's expert output; the
            rest is scaled by 1 / (1 - drop_path). Drawn per token, as in the released
            code of DAMEX, where queries are the first axis.
        split: Initializes the experts as slices of one FFN, equal to it together.
        dense_phase: While open, the block is a dense FFN (that of one expert) for all
            tokens, padding included; nothing is routed or recorded.
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
        super().__init__(moe, name=name, context=context, with_cp=with_cp)
        self.norm = norm
        self.gamma2 = nn.Identity() if dense is None else dense.gamma2
        self.dropout_layer = nn.Identity() if dense is None else dense.dropout_layer
        self.dense_activation = None if dense is None else activation_of(dense)
        # mmdet initializes the biases of an FFN only when building it.
        self.dense_biases = [] if dense is None else _biases(dense)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else None
        self.split = split
        self.dense_phase = dense_phase
        if split is not None:
            split.draw(self)

    def starts(self, state: Mapping[str, Any], prefix: str) -> dict[str, Start]:
        """Return the starts from an FFN, or from experts with a dense phase."""
        return ffn_starts(self, state, prefix) or phase_starts(self, state, prefix)

    @property
    def is_dense(self) -> bool:
        """Whether the block is still a dense FFN."""
        return self.dense_phase is not None and self.dense_phase.is_open

    def reset_parameters(self) -> None:
        """Re-initialize router and experts; norm and layer scale are kept."""
        self.moe.reset_parameters()
        if self.split is not None:
            self.split.draw(self)

    def forward(self, query_BND: Tensor, identity_BND: Tensor | None = None) -> Tensor:
        """Add the experts' output to ``identity_BND``, by default the query.

        Except in a dense phase, padded tokens keep their residual unchanged.
        """
        tokens_BND = query_BND if self.norm is None else self.norm(query_BND)
        count = self.context.num_auxiliary
        if self.is_dense:
            output_BND = self._run_dense(tokens_BND)
        elif count == 0:
            output_BND = self._route(tokens_BND)
        else:
            main_BND = self._route(tokens_BND[:, :-count])
            auxiliary_BND = self._route(tokens_BND[:, -count:], is_auxiliary=True)
            output_BND = torch.cat([main_BND, auxiliary_BND], dim=1)
        output_BND = self.dropout_layer(self.gamma2(output_BND))
        return (query_BND if identity_BND is None else identity_BND) + output_BND

    def _route(self, tokens_BND: Tensor, *, is_auxiliary: bool = False) -> Tensor:
        """Return the experts' output; records of auxiliary tokens are discarded."""
        packing, foreground_BN = self.context.packing, self.context.foreground_BN
        if is_auxiliary:
            packing = None
            if foreground_BN is not None:
                foreground_BN = foreground_BN.new_zeros(tokens_BND.shape[:2])
        moe = partial(
            self.moe,
            packing=packing,
            group_ids_B=self.context.group_ids_B,
            foreground_BN=foreground_BN,
            earlier_votes_BG=self.context.votes_BG,
        )
        with self.moe.gate.uncounted() if is_auxiliary else nullcontext():
            output_BND, record = self._run(moe, tokens_BND)
        if not is_auxiliary:
            self.context.add(self.name, record)
        return self._drop_tokens(output_BND, record.packing)

    def _run_dense(self, tokens_BND: Tensor) -> Tensor:
        """Return the output of the expert that acts as the dense FFN."""
        run = partial(
            cast(FFNExperts, self.moe.experts).forward_expert, expert=DENSE_EXPERT
        )
        output_BND = self._run(run, tokens_BND)
        return self._drop_tokens(output_BND, Packing(*tokens_BND.shape[:2]))

    def _drop_tokens(self, output_BND: Tensor, packing: Packing) -> Tensor:
        if self.drop_path is None or not self.training:
            return output_BND
        # Only real tokens draw, so that padding does not shift the random stream.
        return packing.unpack(self.drop_path(packing.pack(output_BND)))


def activation_of(dense: FFN) -> str:
    """Return the name of an FFN's activation in `FFNExperts`."""
    return type(dense.layers[0][1]).__name__.lower()


def _biases(dense: FFN) -> list[Tensor]:
    linears = (dense.layers[0][0], dense.layers[1])
    return [linear.bias.detach().clone() for linear in linears]


@contextmanager
def ffns_in_place(detector: nn.Module) -> Iterator[list[tuple[MoEFFN, FFN]]]:
    """Temporarily replace the MoE blocks by new FFNs; yield each block with its FFN.

    Weights drawn meanwhile are drawn as for a dense detector, so that two trainings
    with one seed, with and without experts, differ by the experts alone. This makes
    their difference less noisy, as initial weights matter much in short trainings.
    """
    layers: list[Any] = [
        m for m in detector.modules() if isinstance(getattr(m, "ffn", None), MoEFFN)
    ]
    places = []
    with fork_rng(), torch.no_grad():
        for layer in layers:
            ffn = FFN(**layer.ffn_cfg).to(next(layer.ffn.parameters()).device)
            linears = (ffn.layers[0][0], ffn.layers[1])
            for linear, bias in zip(linears, layer.ffn.dense_biases, strict=True):
                linear.bias.copy_(bias)
            places.append((layer.ffn, ffn))
    try:
        for layer, (_, ffn) in zip(layers, places, strict=True):
            layer.ffn = ffn
        yield places
    finally:
        for layer, (block, _) in zip(layers, places, strict=True):
            layer.ffn = block
