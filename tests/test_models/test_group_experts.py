"""Groups of datasets per expert, and several experts per group, by config."""

import copy
import logging

import pytest
import torch
from mmengine.logging import MMLogger

from damex.errors import ConfigError
from damex.models.context import RoutingContext
from damex.models.insertion import insert_moe, moe_blocks


def moe(*, k, num_experts, **changes):
    return dict(
        layers=dict(decoder=[0]),
        num_experts=num_experts,
        gate=dict(type="TopKGate", k=k),
        losses=[dict(type="DatasetRoutingLoss", weight=1.0)],
        **changes,
    )


def run_loss(detector, batch):
    detector.train()
    data = detector.data_preprocessor(copy.deepcopy(batch), True)
    return detector(**data, mode="loss")


@pytest.mark.parametrize(("k", "num_experts"), [(1, 2), (1, 5), (2, 4), (2, 5)])
def test_tokens_learn_to_go_to_the_experts_of_their_group(
    build, make_batch, k, num_experts
):
    detector = build(moe=moe(k=k, num_experts=num_experts), num_groups=2)
    batch = make_batch([0, 1, 0, 1])
    for group, image in zip([0, 1, 0, 1], batch["inputs"], strict=True):
        image.copy_(image // 4 + 190 * group)  # dark and bright
    block = moe_blocks(detector)[0]
    experts = [row.nonzero().flatten() for row in block.moe.group_experts_GE]
    assert sorted(torch.cat(experts).tolist()) == list(range(num_experts))
    optimizer = torch.optim.AdamW(detector.parameters(), lr=2e-3)
    for _ in range(12):
        losses = run_loss(detector, batch)
        optimizer.zero_grad()
        losses["loss_moe_dataset_routing"].backward()
        optimizer.step()
    assert losses["moe_own_share"] > 0.95
    detector.eval()
    data = detector.data_preprocessor(copy.deepcopy(batch), False)
    with torch.no_grad():
        samples = detector(**data, mode="predict")
    for group, sample in zip([0, 1, 0, 1], samples, strict=True):
        counts = torch.tensor(sample.routing_counts["decoder.0"])
        assert counts[experts[group]].sum() > 0.9 * counts.sum()


def test_the_loss_leaves_the_experts_of_a_group_free(build, make_batch):
    """Two equal experts per group: log 2, whatever the share between the two."""
    detector = build(moe=moe(k=2, num_experts=4), num_groups=2)
    router = moe_blocks(detector)[0].moe.router
    torch.nn.init.zeros_(router.weight_ED)
    loss = run_loss(detector, make_batch([0, 1]))["loss_moe_dataset_routing"]
    torch.testing.assert_close(loss, torch.tensor(2.0).log())


@pytest.mark.parametrize(
    ("k", "num_experts", "losses", "warned"),
    [
        (2, 5, None, False),  # groups of 2, 2 and 1 experts, and no dataset loss
        (2, 5, [dict(type="DatasetRoutingLoss")], True),
        (2, 6, [dict(type="DatasetRoutingLoss")], False),
        (1, 3, [dict(type="DatasetRoutingLoss")], False),
    ],
)
def test_k_beyond_the_smallest_group_is_said(build, k, num_experts, losses, warned):
    config = {**moe(k=k, num_experts=num_experts), "losses": losses}
    dense = build(moe=None)
    report = insert_moe(dense, config, context=RoutingContext(), num_groups=3)
    assert len(report.notes) == warned
    if warned:
        assert report.notes[0].startswith(
            "moe.gate.k is 2, but a dataset group has 1 of the 5 experts"
        )
        assert report.notes[0].endswith("set k=1, or num_experts=6 or more.")


def test_it_is_a_warning_in_the_log(build):
    logger = MMLogger.get_current_instance()
    seen = []
    handler = logging.Handler()
    handler.emit = seen.append
    logger.addHandler(handler)
    try:
        build(moe=moe(k=2, num_experts=5), num_groups=3)
    finally:
        logger.removeHandler(handler)
    warnings = [r for r in seen if r.levelno == logging.WARNING]
    assert any("moe.gate.k is 2" in r.getMessage() for r in warnings)


@pytest.mark.parametrize("name", ["cosine", "hierarchical", "fine_grained"])
def test_many_datasets_need_no_expert_each_where_nothing_asks_for_it(
    build, make_batch, name
):
    detector = build(moe=name, num_groups=17)
    batch = make_batch([0, 16])
    losses = run_loss(detector, batch)
    assert "moe_own_share" not in losses
    assert torch.isfinite(losses["loss_moe_load_balance"])
    detector.eval()
    data = detector.data_preprocessor(batch, False)
    with torch.no_grad():
        samples = detector(**data, mode="predict")
    assert "group_experts" not in samples[0]
    assert "routing_counts" in samples[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(), "17 dataset groups but moe.num_experts is 4; set num_experts=17"),
        (dict(losses=[], router=dict(type="HierarchicalRouter")), "17 dataset groups"),
    ],
)
def test_parts_that_work_with_groups_need_an_expert_for_each(build, changes, words):
    with pytest.raises(ConfigError, match=words):
        build(moe={**moe(k=1, num_experts=4), **changes}, num_groups=17)
