"""Tests of damex.moe.grouped."""

import pytest
import torch
from packaging.version import Version

from damex.moe.grouped import grouped_linear
from tests.test_moe.layers import needs_grouped_mm

BACKENDS = [
    "auto",
    "split",
    pytest.param("grouped_mm", marks=needs_grouped_mm),
]
COUNTS = {
    "odd sizes": [3, 5, 1],
    "empty in the middle": [4, 0, 3],
    "empty first and last": [0, 7, 0],
    "one token": [0, 0, 1],
    "no tokens": [0, 0, 0],
}


def inputs(counts, *, dtype=torch.float32, width=8, out=16):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        return x.requires_grad_()

    num_experts = len(counts)
    leaves = (
        draw(sum(counts), width),
        draw(num_experts, width, out),
        draw(num_experts, out),
    )
    return leaves, torch.tensor(counts)


def definition(x, weight, bias, counts_E):
    """Row by row."""
    experts = torch.arange(len(counts_E)).repeat_interleave(counts_E)
    rows = [x[r] @ weight[e] + bias[e] for r, e in enumerate(experts)]
    # The zero ties all leaves to the graph, also without any row.
    tie = 0 * (x.sum() + weight.sum() + bias.sum())
    return tie + (torch.stack(rows) if rows else x.new_zeros(0, bias.shape[1]))


def expected_of(counts):
    """Output and gradients of the definition."""
    leaves, counts_E = inputs(counts)
    out = definition(*leaves, counts_E)
    (out * torch.linspace(-1, 1, out.shape[1])).sum().backward()
    return out, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("learns", range(3))
def test_what_does_not_learn_gets_no_gradient(learns, backend):
    _, expected = expected_of([3, 0, 2])
    leaves, counts_E = inputs([3, 0, 2])
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index == learns)
    out = grouped_linear(*leaves, counts_E, backend=backend)
    (out * torch.linspace(-1, 1, out.shape[1])).sum().backward()
    for index, leaf in enumerate(leaves):
        if index == learns:
            torch.testing.assert_close(leaf.grad, expected[index])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_autocast_computes_in_bfloat16(counts, backend):
    leaves, counts_E = inputs(counts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grouped_linear(*leaves, counts_E, backend=backend)
    assert out.dtype == torch.bfloat16
    # sum() hands back a gradient with stride 0, which crashes a bare grouped_mm.
    out.sum().backward()
    expected, _ = expected_of(counts)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"),
    reason="torch 2.6 cannot read counts inside of torch.func",
)
def test_transforms_of_torch_func_go_through():
    (x, weight, bias), counts_E = inputs([2, 0, 1], dtype=torch.float64)

    def out(weight):
        return grouped_linear(x, weight, bias, counts_E).square().sum()

    slope = torch.func.jacfwd(out)(weight)
    out(weight).backward()
    torch.testing.assert_close(slope, weight.grad)
    curvature = torch.func.jacfwd(torch.func.jacfwd(out))(weight.detach())
    assert curvature.shape == weight.shape * 2


def test_autocast_leaves_float64_alone():
    leaves, counts_E = inputs([2, 1], dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = [
            grouped_linear(*leaves, counts_E, backend=backend)
            for backend in ("auto", "split")
        ]
    assert [out.dtype for out in outs] == [torch.float64, torch.float64]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="bfloat16 has its own kernel on a GPU alone"
)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_cuda_bfloat16_agrees_with_the_definition(counts):
    kwargs = dict(dtype=torch.bfloat16, width=16, out=24)
    leaves, counts_E = inputs(counts, **kwargs)
    expected = definition(*leaves, counts_E)
    expected.sum().backward()
    on_gpu = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    out = grouped_linear(*on_gpu, counts_E.cuda())
    out.sum().backward()
    grads = [leaf.grad.cpu() for leaf in on_gpu]
    torch.testing.assert_close(out.cpu(), expected, rtol=0.02, atol=0.02)
    expected_grads = [leaf.grad for leaf in leaves]
    torch.testing.assert_close(grads, expected_grads, rtol=0.02, atol=0.02)
