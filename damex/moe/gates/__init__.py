"""Gates: logits -> Assignment, one per file."""

from damex.moe.gates.bias_balancer import BiasBalancer
from damex.moe.gates.capacity import ExpertCapacity
from damex.moe.gates.dense_softmax import DenseSoftmaxGate
from damex.moe.gates.dense_to_sparse import DenseToSparseGate
from damex.moe.gates.expert_choice import ExpertChoiceGate
from damex.moe.gates.topk import TopKGate

__all__ = [
    "BiasBalancer",
    "DenseSoftmaxGate",
    "DenseToSparseGate",
    "ExpertCapacity",
    "ExpertChoiceGate",
    "TopKGate",
]
