"""All kinds of layers for property tests; a new gate or router joins by a row."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from damex.moe import (
    BiasBalancer,
    CosineRouter,
    DatasetRoutingLoss,
    ExpertCapacity,
    FFNExperts,
    HierarchicalRouter,
    ImportanceLoss,
    LinearRouter,
    LoadBalanceLoss,
    LowRankExperts,
    MLPRouter,
    MoELayer,
    RouterZLoss,
    SharedExpert,
    TopKGate,
)
from damex.papers.dense_gates import DenseSoftmaxGate, DenseToSparseGate
from damex.papers.expert_choice import ExpertChoiceGate

D, H, E = 8, 12, 4
needs_grouped_mm = pytest.mark.skipif(
    not hasattr(functional, "grouped_mm"), reason="this torch has no grouped_mm"
)
GROUP_EXPERTS = [[0], [1, 2], [3]]


def biased(gate):
    gate.balance.bias_E += torch.tensor([0.3, 0.0, -0.3, 0.1])
    return gate


def begun(gate, progress):
    gate.begin_step(progress)
    return gate


def drawn(experts):
    for parameter in experts.parameters():  # those that start at zero, too
        nn.init.normal_(parameter)
    return experts


ROUTERS = {
    "linear": lambda e: LinearRouter(D, e, bias=True, init_std=1.0),
    "mlp": lambda e: MLPRouter(D, e, hidden_dims=5, init_std=1.0),
    "cosine": lambda e: CosineRouter(D, e, proj_dims=5),
    "hierarchical": lambda e: HierarchicalRouter(
        D, e, num_groups=len(GROUP_EXPERTS), init_std=1.0
    ),
}
GATES = {
    "top1": lambda: TopKGate(1),
    "top2": lambda: TopKGate(2),
    "top3 renormalised": lambda: TopKGate(3, renormalize=True),
    "top2 noisy": lambda: TopKGate(2, noise="gaussian", noisy_weights=True),
    "top2 balanced": lambda: biased(TopKGate(2, balance=BiasBalancer(E))),
    "dense": DenseSoftmaxGate,
    "dense to sparse": lambda: begun(DenseToSparseGate(threshold=0.2), 0.5),
    "expert choice": lambda: ExpertChoiceGate(num_tokens=3),
    "expert choice all": lambda: ExpertChoiceGate(share=0.4, weights="all"),
}
# Experts with a capacity: which tokens they serve depends on the whole batch.
CAPPED = {
    "top1 with a capacity": lambda: TopKGate(1, capacity=ExpertCapacity(factor=1.0)),
    "top2 with a capacity": lambda: TopKGate(2, capacity=ExpertCapacity(factor=0.75)),
}
EXPERTS = {
    "low rank": lambda e: drawn(LowRankExperts(e, D, 4)),
}
# Every gate and a shared expert behind the linear router, other routers before top-2,
# other experts behind it.
LAYERS = {
    **{name: dict(gate=gate) for name, gate in GATES.items()},
    "shared expert": dict(gate=GATES["top1"], shared=True),
    **{name: dict(gate=gate) for name, gate in CAPPED.items()},
    **{
        name: dict(gate=GATES["top2"], router=router)
        for name, router in ROUTERS.items()
        if name != "linear"
    },
    **{name: dict(gate=GATES["top2"], experts=bank) for name, bank in EXPERTS.items()},
}
every_layer = pytest.mark.parametrize("parts", LAYERS.values(), ids=LAYERS.keys())


def make_layer(
    gate=GATES["top1"],
    *,
    router=ROUTERS["linear"],
    experts=lambda e: FFNExperts(e, D, H),
    num_experts=E,
    shared=False,
    seed=0,
    **kwargs,
):
    torch.manual_seed(seed)
    kwargs.setdefault("group_experts", GROUP_EXPERTS)
    kwargs.setdefault(
        "losses",
        [DatasetRoutingLoss(), LoadBalanceLoss(), ImportanceLoss(), RouterZLoss()],
    )
    return MoELayer(
        router=router(num_experts),
        gate=gate(),
        experts=experts(num_experts),
        shared_expert=SharedExpert(D, H) if shared else None,
        **kwargs,
    )


def make_batch(num_images=2, num_tokens=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_images, num_tokens, D, generator=generator)
    return tokens, torch.arange(num_images) % len(GROUP_EXPERTS)


def train_step(layer, tokens, **kwargs):
    """Outputs, losses and all gradients of one step with fixed noise."""
    layer.train().zero_grad()
    torch.manual_seed(3)
    out, record = layer(tokens, **kwargs)
    (out.square().sum() + sum(record.losses.values())).backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    losses = {name: loss.detach() for name, loss in record.losses.items()}
    return out.detach(), losses, grads
