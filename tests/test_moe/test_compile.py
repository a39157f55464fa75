"""torch.compile of the whole layer: one graph for every gate, and what eager gives."""

import shutil

import pytest
import torch

from damex.moe import LoadBalanceLoss, LoadLoss, Packing
from tests.test_moe.layers import (
    CAPPED,
    GATES,
    LAYERS,
    D,
    make_batch,
    make_layer,
    needs_grouped_mm,
    train_step,
)

pytestmark = pytest.mark.slow  # half a minute for torch's compiler
MASK = torch.arange(7) < torch.tensor([[7], [4]])
# The number of routes depends on the data.
DATA_DEPENDENT = ("dense to sparse", *CAPPED)
COMPILED = {
    **{name: parts for name, parts in LAYERS.items() if name != "top2"},
    "load loss": dict(losses=[LoadLoss()]),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def layer_of(backend="grouped_mm", **parts):
    layer = make_layer(**parts)
    layer.experts.backend = backend
    return layer


def run(function, layer, mask=None, seed=1):
    """Output, losses and gradients of one step of a layer or of its compiled form."""
    layer.zero_grad()
    tokens, ids = make_batch(seed=seed)
    packing = None if mask is None else Packing.of_mask(mask)
    out, losses, _ = train_step(function, tokens, group_ids_B=ids, packing=packing)
    return out, losses, {name: p.grad.clone() for name, p in layer.named_parameters()}


@needs_grouped_mm
@pytest.mark.parametrize(
    ("name", "masked"),
    # Routers and experts get rows of tokens, whether or not some were left out.
    [(n, m) for n in COMPILED for m in (True, False) if m or n in {*GATES, *CAPPED}],
)
def test_one_graph_gives_what_eager_gives(name, masked):
    layer = layer_of(**COMPILED[name])
    mask = MASK if masked else None
    asks = name in DATA_DEPENDENT or (masked and "expert choice" in name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=asks):
        for seed in (1, 2):  # other tokens make other numbers of routes
            expected = run(layer, layer, mask, seed)
            torch.testing.assert_close(run(compiled, layer, mask, seed), expected)


@needs_grouped_mm
def test_one_graph_without_any_real_token():
    layer = layer_of(losses=[LoadBalanceLoss()])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    run(compiled, layer, MASK)
    out, _, grads = run(compiled, layer, torch.zeros_like(MASK))
    assert torch.equal(out, torch.zeros(2, 7, D))
    assert not any(grad.any() for grad in grads.values())


def test_split_breaks_the_graph_and_changes_nothing():
    layer = layer_of("split")
    expected = run(layer, layer, MASK)
    with pytest.raises(Exception, match=r"(?i)data-dependent|graph"):
        run(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer, MASK)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(run(compiled, layer, MASK), expected)


@needs_grouped_mm
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_inductor_gives_what_eager_gives():
    layer = layer_of(gate=GATES["top3 renormalised"])
    expected = run(layer, layer)
    found = run(torch.compile(layer, fullgraph=True), layer)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
