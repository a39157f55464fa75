import pytest
import torch

from damex.errors import ConfigError
from damex.models.denoising import denoising_query_mask
from damex.models.insertion import moe_blocks


def test_mask_follows_the_layout_of_mmdets_generator():
    """Two images with 1 and 3 boxes, two groups of positive and negative queries."""
    # block = 3; 2 groups x (positive, negative) = 4 blocks = 12 denoising queries.
    mask_BN = denoising_query_mask([1, 3], num_denoising=12, num_matching=2)
    assert mask_BN is not None
    first = [True, False, False] * 4 + [True, True]
    assert mask_BN.tolist() == [first, [True] * 14]


def test_mask_agrees_with_mmdets_generator():
    """Fillers are exactly the queries that the generator leaves at zero."""
    from mmdet.models.layers import CdnQueryGenerator
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    generator = CdnQueryGenerator(
        num_classes=3,
        embed_dims=8,
        num_matching_queries=5,
        group_cfg=dict(dynamic=True, num_dn_queries=20),
    )
    boxes_per_image = [2, 0, 4]
    samples = []
    for count in boxes_per_image:
        sample = DetDataSample(metainfo=dict(img_shape=(32, 32)))
        sample.gt_instances = InstanceData(
            bboxes=torch.tensor([[4.0, 4.0, 20.0, 20.0]]).repeat(count, 1),
            labels=torch.zeros(count, dtype=torch.long),
        )
        samples.append(sample)
    query_BND, _, _, meta = generator(samples)
    mask_BN = denoising_query_mask(
        boxes_per_image,
        num_denoising=meta["num_denoising_queries"],
        num_matching=5,
    )
    assert mask_BN is not None
    assert torch.equal(
        query_BND.abs().sum(-1) > 0, mask_BN[:, : meta["num_denoising_queries"]]
    )
    assert mask_BN[:, -5:].all()


@pytest.mark.parametrize(("boxes", "queries"), [([2, 2], 8), ([0, 0], 0)])
def test_no_mask_where_all_queries_are_real(boxes, queries):
    assert denoising_query_mask(boxes, num_denoising=queries, num_matching=3) is None


def test_experts_choose_no_queries_where_some_hold_the_ground_truth(
    build_mmdet, detector_name
):
    """Else a change of the boxes would change which matching queries are served."""
    moe = dict(
        layers=dict(encoder=[0], decoder=[1]),
        num_experts=2,
        gate=dict(type="ExpertChoiceGate", share=0.5),
    )
    if detector_name not in ("MoEDINO", "MoEDDQDETR"):
        assert len(moe_blocks(build_mmdet(detector_name, moe=moe))) == 2
        return
    with pytest.raises(ConfigError, match=r"moe.gate is ExpertChoiceGate .*decoder\.1"):
        build_mmdet(detector_name, moe=moe)
    moe["layers"] = dict(encoder="all")
    assert len(moe_blocks(build_mmdet(detector_name, moe=moe))) == 2
