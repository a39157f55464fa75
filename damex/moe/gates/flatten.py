"""From images of tokens to one list of tokens.

Axes: B images, N tokens per image, T = B*N tokens, E experts.
"""

from __future__ import annotations

from torch import Tensor


def flatten_images(
    logits_BNE: Tensor, token_mask_BN: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Joins the tokens of all images, for gates to which images are all the same.

    Args:
        logits_BNE: Router logits.
        token_mask_BN: True for real tokens; None when all are real.

    Returns:
        logits_TE: The tokens of image 0, then those of image 1, and so on.
        token_mask_T: In the same order; None when all are real.
    """
    mask_T = None if token_mask_BN is None else token_mask_BN.flatten()
    return logits_BNE.flatten(0, 1), mask_T
