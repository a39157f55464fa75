"""Gates: logits -> Assignment."""

from damex.moe.gates.balancing import BiasBalancer, ExpertCapacity
from damex.moe.gates.base import Gate
from damex.moe.gates.dense import DenseSoftmaxGate, DenseToSparseGate
from damex.moe.gates.expert_choice import ExpertChoiceGate
from damex.moe.gates.topk import TopKGate

__all__ = [
    "BiasBalancer",
    "DenseSoftmaxGate",
    "DenseToSparseGate",
    "ExpertCapacity",
    "ExpertChoiceGate",
    "Gate",
    "TopKGate",
]
