"""All losses with bfloat16 inputs under autocast: what float32 gives for them."""

from __future__ import annotations

import pytest
import torch

from damex.moe import (
    DatasetRoutingLoss,
    ImportanceLoss,
    LoadBalanceLoss,
    LoadLoss,
    RouterZLoss,
    RoutingRecord,
    SeparateRouterLoss,
    TopKGate,
    gate_l1,
    presence_loss,
)

T, E = 1000, 6
ROUTING = (
    DatasetRoutingLoss(),
    ImportanceLoss(),
    LoadBalanceLoss(),
    LoadBalanceLoss(scores="logit"),
    LoadLoss(),
    RouterZLoss(),
    SeparateRouterLoss(),
)


def on_a_record(loss):
    group_experts_GE = torch.arange(E) % 2 == torch.arange(2).unsqueeze(1)

    def compute(logits_TE):
        # Routes are those of the float32 logits, so that values can be compared.
        routes = TopKGate(2)(logits_TE.detach().float().unsqueeze(0))
        record = RoutingRecord(
            logits_TE=logits_TE,
            token_mask_T=torch.arange(T) % 7 > 0,
            group_ids_T=torch.arange(T) % 5 % 2,
            assignment=routes,
            group_experts_GE=group_experts_GE,
        )
        return loss(record)

    return compute


LOSSES = {
    **{repr(loss): on_a_record(loss) for loss in ROUTING},
    "gate_l1": lambda gates_BC: gate_l1([gates_BC.relu(), gates_BC[:, :2].relu()]),
    "presence_loss": lambda logits_BE: presence_loss(
        logits_BE, torch.arange(T).unsqueeze(1) % 9 == torch.arange(E)
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_gives_the_float32_value_and_a_finite_gradient(name):
    generator = torch.Generator().manual_seed(0)
    # Off zero, so that the sums over tokens are longer than bfloat16's 8 bits.
    inputs = 3.0 * torch.randn(T, E, generator=generator) + torch.arange(E)
    inputs = inputs.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name](inputs)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(LOSSES[name](inputs.float()).item(), rel=1e-5)
    loss.backward()
    assert inputs.grad.isfinite().all()
    assert inputs.grad.any()
