"""What is trained, and how: the paper as printed, and the authors' code.

The two differ in more than a constant, and the published accuracies come from the code.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from damex.moe import LoadBalanceLoss, MoELayer, TopKGate
from damex.studies.chen2022.data import PATCH_DIMS
from damex.studies.chen2022.experts import PatchwiseExperts
from damex.studies.patch_sum_router import PatchSumRouter

__all__ = [
    "OFFICIAL",
    "PAPER",
    "PAPER_X10",
    "Recipe",
    "build_mixture",
    "class_margin",
    "mixture_loss",
]

NUM_EXPERTS = 8
NUM_FILTERS = 16
BALANCE_WEIGHT = 1e-4


@dataclass(frozen=True)
class Recipe:
    """One of the forms in which the experiment exists.

    Attributes:
        name: How it is called in the report.
        input_scale: Factor on all patches.
        as_released: Whether model, loss and optimiser are those of the code: the raw
            noisy logit weighs the expert, two logits with biases, a softmax before the
            cross-entropy, the sum of norms, noise at test time, early stop. Otherwise
            those of sections 3.2 and 3.3.
        steps: Full-batch steps.
    """

    name: str
    input_scale: float = 1.0
    as_released: bool = False
    steps: int = 500


PAPER = Recipe("paper")
PAPER_X10 = Recipe("paper, inputs x10", input_scale=10.0)
OFFICIAL = Recipe("official_code", input_scale=10.0, as_released=True, steps=501)


def build_mixture(
    recipe: Recipe, activation: str, *, balance: bool = False
) -> MoELayer:
    """A new mixture of `NUM_EXPERTS` experts.

    Args:
        recipe: The form.
        activation: Of the experts: 'cubic', or 'identity' for linear ones.
        balance: Whether to add the load balance loss (Table 9).
    """
    if recipe.as_released:
        gate = TopKGate(1, noise="uniform", noisy_weights=True, weights="logit")
        experts = PatchwiseExperts(
            NUM_EXPERTS,
            PATCH_DIMS,
            NUM_FILTERS,
            num_outputs=2,
            activation=activation,
            bias=True,
            init="uniform",
        )
        loss = LoadBalanceLoss(weight=BALANCE_WEIGHT, scores="logit")
    else:
        gate = TopKGate(1, noise="uniform")
        experts = PatchwiseExperts(
            NUM_EXPERTS, PATCH_DIMS, NUM_FILTERS, activation=activation
        )
        loss = LoadBalanceLoss(weight=BALANCE_WEIGHT)
    return MoELayer(
        router=PatchSumRouter(NUM_EXPERTS, PATCH_DIMS),
        gate=gate,
        experts=experts,
        losses=[loss] if balance else [],
    )


def mixture_loss(recipe: Recipe, out_BC: Tensor, labels_B: Tensor) -> Tensor:
    """Mean loss of eq. 3.3, or that of the code.

    Args:
        recipe: The form.
        out_BC: Output of the layer: C = 1, or 2 as released.
        labels_B: -1.0 or 1.0.
    """
    if recipe.as_released:
        # The code hands probabilities to a cross-entropy that takes logits.
        probs_BC = out_BC.softmax(1)
        return functional.cross_entropy(probs_BC, (labels_B > 0).long())
    return functional.softplus(-labels_B * out_BC.squeeze(1)).mean()


def class_margin(out_BC: Tensor) -> Tensor:
    """Positive where label 1 is predicted, from one or two outputs, (B,)."""
    if out_BC.shape[1] == 1:
        return out_BC.squeeze(1)
    return out_BC[:, 1] - out_BC[:, 0]
