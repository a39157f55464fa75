"""torch.compile of the whole layer: one graph for every gate, and what eager gives."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.nn import functional

from damex.moe import (
    AffineExperts,
    BiasBalancer,
    CosineRouter,
    DatasetRoutingLoss,
    DenseSoftmaxGate,
    DenseToSparseGate,
    ExpertCapacity,
    ExpertChoiceGate,
    FFNExperts,
    HierarchicalRouter,
    ImportanceLoss,
    LinearRouter,
    LoadBalanceLoss,
    LoadLoss,
    LowRankExperts,
    MLPRouter,
    MoELayer,
    Packing,
    RouterZLoss,
    SharedExpert,
    TopKGate,
)

D, H, E = 8, 16, 4


def begun(gate):
    gate.begin_step(0.0)
    return gate


GATES = {
    "top1": lambda: TopKGate(1),
    "top2 noisy": lambda: TopKGate(2, noise="gaussian", noisy_weights=True),
    "top2 renormalised": lambda: TopKGate(2, renormalize=True),
    "with a capacity": lambda: TopKGate(2, capacity=ExpertCapacity(factor=0.75)),
    "balanced": lambda: TopKGate(1, balance=BiasBalancer(E)),
    "dense": DenseSoftmaxGate,
    "dense to sparse": lambda: begun(DenseToSparseGate(threshold=0.2, end_k=2)),
    "expert choice": lambda: ExpertChoiceGate(num_tokens=3),
    "expert choice all": lambda: ExpertChoiceGate(share=0.4, weights="all"),
}
ROUTERS = {
    "mlp": lambda: MLPRouter(D, E, init_std=1.0),
    "cosine": lambda: CosineRouter(D, E, proj_dims=5),
    "hierarchical": lambda: HierarchicalRouter(D, E, num_groups=2, init_std=1.0),
}
EXPERTS = {
    "ffn": lambda backend: FFNExperts(E, D, H, backend=backend),
    "low rank": lambda backend: LowRankExperts(E, D, 4, backend=backend),
    "affine": lambda backend: AffineExperts(E, D),
}
LAYERS = {
    **{name: dict(gate=gate) for name, gate in GATES.items()},
    **{name: dict(router=router) for name, router in ROUTERS.items()},
    "shared expert": dict(shared=True),
    "low rank": dict(shared=True, experts="low rank"),
    "affine": dict(shared=True, experts="affine"),
}
MASK = torch.arange(7) < torch.tensor([[7], [4]])
# Gates that decide how many routes there are.
DATA_DEPENDENT = ("dense to sparse", "with a capacity")
LOSSES = (DatasetRoutingLoss, LoadBalanceLoss, ImportanceLoss, RouterZLoss)
needs_grouped_mm = pytest.mark.skipif(
    not hasattr(functional, "grouped_mm"), reason="this torch has no grouped_mm"
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make_layer(
    *,
    gate=GATES["top1"],
    router=lambda: LinearRouter(D, E, init_std=1.0),
    experts="ffn",
    shared=False,
    losses=LOSSES,
    backend="grouped_mm",
):
    torch.manual_seed(0)
    return MoELayer(
        router=router(),
        gate=gate(),
        experts=EXPERTS[experts](backend),
        shared_expert=SharedExpert(D, H) if shared else None,
        losses=[loss() for loss in losses],
        group_experts=[[0, 1], [2, 3]],
    )


def run(function, layer, tokens, mask):
    """Output, losses and gradients of one step with fixed noise."""
    layer.zero_grad()
    torch.manual_seed(3)
    out, record = function(
        tokens,
        packing=None if mask is None else Packing.of_mask(mask),
        group_ids_B=torch.tensor([0, 1]),
    )
    (out.square().sum() + sum(record.losses.values())).backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    losses = {name: loss.detach() for name, loss in record.losses.items()}
    return out.detach(), losses, grads


def tokens_BND(seed=1):
    return torch.randn(2, 7, D, generator=torch.Generator().manual_seed(seed))


@needs_grouped_mm
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_gives_what_eager_gives(name, masked):
    layer = make_layer(**LAYERS[name])
    mask = MASK if masked else None
    asks = name in DATA_DEPENDENT or (masked and "expert choice" in name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=asks):
        for seed in (1, 2):  # other tokens make other numbers of routes
            expected = run(layer, layer, tokens_BND(seed), mask)
            found = run(compiled, layer, tokens_BND(seed), mask)
            torch.testing.assert_close(found, expected)


@needs_grouped_mm
def test_one_graph_without_any_real_token():
    layer = make_layer(losses=[LoadBalanceLoss])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    run(compiled, layer, tokens_BND(), MASK)
    nothing = torch.zeros_like(MASK)
    out, _, grads = run(compiled, layer, tokens_BND(), nothing)
    assert torch.equal(out, torch.zeros(2, 7, D))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads.values())


def test_split_breaks_the_graph_and_changes_nothing():
    layer = make_layer(backend="split")
    expected = run(layer, layer, tokens_BND(), MASK)
    with pytest.raises(Exception, match=r"(?i)data-dependent|graph"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(
            tokens_BND(),
            packing=Packing.of_mask(MASK),
            group_ids_B=torch.tensor([0, 1]),
        )
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(run(compiled, layer, tokens_BND(), MASK), expected)


@needs_grouped_mm
def test_the_load_loss_is_part_of_the_graph():
    layer = make_layer(losses=[LoadLoss])
    expected = run(layer, layer, tokens_BND(), None)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, layer, tokens_BND(), None), expected)


@pytest.mark.slow
@needs_grouped_mm
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_inductor_gives_what_eager_gives():
    layer = make_layer(gate=GATES["top2 renormalised"])
    expected = run(layer, layer, tokens_BND(), None)
    compiled = torch.compile(layer, fullgraph=True)
    found = run(compiled, layer, tokens_BND(), None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
