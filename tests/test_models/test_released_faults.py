"""The faults of DAMEX's released code, each as a test that this package passes.

Read in the code at github.com/jinga-lala/DAMEX, commit 20ded9d.
"""

import pytest
import torch
from torch.nn import functional

from damex.models.insertion import moe_blocks


def test_two_images_of_two_datasets_give_the_loss_of_each_image_on_its_own(
    build, make_batch, run_loss
):
    """Fault: router logits lie query by query and targets image by image, so that with
    two images per device half of the targets are wrong.
    """
    detector = build()
    seen = {}
    for block in moe_blocks(detector):
        block.register_forward_pre_hook(
            lambda block, inputs: seen.update({block: inputs[0].detach()})
        )
    batch = make_batch([2, 0], sizes=[(64, 96), (64, 32)], boxes=[2, 2])
    loss = run_loss(detector, batch)["loss_moe_dataset_routing"]
    layers, mixed_up = [], []
    for block, tokens_BND in seen.items():
        alone = [
            block.moe(tokens_BND[image : image + 1], group_ids_B=torch.tensor([group]))
            for image, group in enumerate((2, 0))
        ]
        # As many tokens each, so the mean over tokens is the mean over images.
        values = [record.losses["dataset_routing"] for _, record in alone]
        layers.append(torch.stack(values).mean())
        logits = torch.stack([record.logits_VE for _, record in alone], dim=1)
        target = torch.tensor([2, 0]).repeat_interleave(logits.shape[0])
        mixed_up.append(0.1 * functional.cross_entropy(logits.flatten(0, 1), target))
    torch.testing.assert_close(loss, torch.stack(layers).mean())
    assert not torch.isclose(loss, torch.stack(mixed_up).mean(), rtol=1e-4)


@pytest.mark.parametrize(
    ("moe", "served"), [("damex", 900), ("damex_official_code", 141)]
)
def test_a_good_router_costs_no_query_unless_the_released_code_is_asked_for(
    build, make_batch, monkeypatch, run_loss, run_predict, moe, served
):
    """Fault: once the router sends an image's queries to the expert of its dataset,
    84 % of them find no place there, at test time, too.
    """
    detector = build(moe=moe, num_groups=8, num_queries=900)
    good = torch.zeros(8)
    good[5] = 6.0
    for block in moe_blocks(detector):
        monkeypatch.setattr(
            block.moe.router, "forward", lambda rows: good.expand(len(rows), 8)
        )
    samples = run_predict(detector, make_batch([5], sizes=[(256, 256)]))
    for counts in samples[0].routing_counts.values():
        assert counts == [0, 0, 0, 0, 0, served, 0, 0]
    losses = run_loss(detector, make_batch([5], sizes=[(256, 256)]))
    if moe == "damex":
        assert "moe_drop_rate" not in losses
    else:
        # 900 queries and 25 groups of two denoising ones for each of 2 boxes: 1000
        # tokens; ceil(1000 / 8) = 125 and int(1.25 * 125) = 156 places.
        assert losses["moe_drop_rate"].item() == pytest.approx(1 - 156 / 1000)
