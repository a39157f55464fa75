"""Every token goes to every expert, weighted by the softmax.

Axes: B images, N tokens per image, T = B*N tokens, D model width, H hidden width,
E experts, K experts per token, R routes (token-expert pairs), G dataset groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from damex.moe.assignment import Assignment
from damex.moe.gates.flatten import flatten_images


class DenseSoftmaxGate(nn.Module):
    """The classical mixture of experts (Nguyen et al. 2025, eq. 2): no expert is off.

    Smooth in the router's weights and without unused experts, at E times the compute
    of one expert.
    """

    def forward(
        self, logits_BNE: Tensor, token_mask_BN: Tensor | None = None
    ) -> Assignment:
        """Weighs all experts.

        Args:
            logits_BNE: Clean router logits.
            token_mask_BN: True for real tokens; the others get no route.

        Returns:
            Routes over the flattened T = B*N tokens, E for each real token; the
            weights of a token sum to 1.
        """
        logits_TE, mask_T = flatten_images(logits_BNE, token_mask_BN)
        num_tokens, num_experts = logits_TE.shape
        ids_E = torch.arange(num_experts, device=logits_TE.device)
        return Assignment.from_topk(
            ids_E.expand(num_tokens, num_experts),
            torch.softmax(logits_TE, dim=-1),
            num_experts=num_experts,
            token_mask_T=mask_T,
        )
