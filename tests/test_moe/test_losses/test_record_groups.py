import dataclasses

import pytest
import torch

from damex.moe import DatasetRoutingLoss, RoutingRecord, SeparateRouterLoss, TopKGate

LOGITS_TE = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
RECORD = RoutingRecord(
    logits_TE=LOGITS_TE,
    token_mask_T=None,
    assignment=TopKGate(1)(LOGITS_TE.unsqueeze(0)),
    group_ids_T=torch.tensor([0, 1]),
    group_experts_GE=torch.eye(2, dtype=torch.bool),
)


@pytest.mark.parametrize("loss", [DatasetRoutingLoss(), SeparateRouterLoss()])
@pytest.mark.parametrize("missing", ["group_ids_T", "group_experts_GE"])
def test_both_losses_say_what_their_record_lacks(loss, missing):
    assert torch.isfinite(loss(RECORD))
    record = dataclasses.replace(RECORD, **{missing: None})
    message = f"{type(loss).__name__}: .*needs group_ids_T and group_experts_GE"
    with pytest.raises(ValueError, match=message):
        loss(record)
