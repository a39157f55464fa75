"""What can be checked without training: Theorem 4.1 and Lemma 5.1.

Axes: B samples, P patches, D numbers in a patch, K clusters, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from damex.moe import TopKGate
from damex.studies.cluster_data import ClusterSamples, ClusterTask

__all__ = ["additive_margin", "routing_shares", "smoothness"]

# Signs of two features can be told apart in 7 of 8 equally likely cases. With these
# sizes w_k of +-v_k and b_k of c_k all eighths but one come out right for every pair
# k < l of clusters: |b_k| < w_k - w_l < b_l, and |b_k| < w_k + w_l.
FEATURE_K = (15.5, 14.5, 13.0, 10.0)
CENTER_K = (0.0, 1.25, 2.75, 6.0)
THRESHOLD = 0.75  # under all signals of setting "verify", five deviations of noise


def additive_margin(task: ClusterTask, samples: ClusterSamples) -> Tensor:
    """A sum over patches of one function that attains the bound of Theorem 4.1.

    The bound would say nothing if trained models stayed far below it and nothing else
    came near.

    Args:
        task: Whose directions the function is built from.
        samples: Data of setting "verify", whose signals pass the threshold.

    Returns:
        margin_B: Positive where label 1 is predicted.
    """
    feature_BPK = samples.patches_BPD @ task.signals_KD.t()
    center_BPK = samples.patches_BPD @ task.centers_KD.t()
    seen_BPK = feature_BPK.sign() * (feature_BPK.abs() > THRESHOLD)
    value_BP = seen_BPK @ torch.tensor(FEATURE_K)
    value_BP = value_BP + (center_BPK > THRESHOLD).float() @ torch.tensor(CENTER_K)
    return value_BP.sum(1)


def routing_shares(logits_E: Tensor, draws: int) -> Tensor:
    """How often the gate of the study routes to each expert in training.

    Args:
        logits_E: h, the same for each draw of the noise.
        draws: Number of draws.
    """
    gate = TopKGate(1, noise="uniform")
    counts_E = gate(logits_E.expand(1, draws, -1)).counts_E
    return counts_E.double() / draws


def smoothness(
    *, num_experts: int, distance: float, pairs: int, draws: int
) -> list[float]:
    """Change of the routing over the bound of Lemma 5.1, for random pairs (h, h').

    Args:
        num_experts: E.
        distance: |h - h'|_inf.
        pairs: Number of pairs.
        draws: Draws of noise for each.

    Returns:
        |p - p'|_inf / (E^2 |h - h'|_inf) of each pair; at most 1.
    """
    ratios = []
    for _ in range(pairs):
        logits_E = torch.rand(num_experts)
        step_E = distance * (torch.randint(2, (num_experts,)) * 2.0 - 1.0)
        step_E[0], step_E[1] = distance, -distance
        change_E = routing_shares(logits_E, draws)
        change_E = change_E - routing_shares(logits_E + step_E, draws)
        ratios.append(change_E.abs().max().item() / (num_experts**2 * distance))
    return ratios
