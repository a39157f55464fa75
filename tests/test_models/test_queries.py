from types import SimpleNamespace

import pytest
import torch
from mmdet.models.layers import CdnQueryGenerator
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData
from torch.nn import functional

from damex.errors import ConfigError
from damex.models.insertion import moe_blocks
from damex.models.queries import (
    boxes_of,
    encoder_foreground,
    image_mask_of,
    query_foreground,
    real_query_mask,
    valid_ratio_of,
)


def test_mask_follows_mmdets_generator():
    """Images of 2, 0 and 4 boxes: blocks of 4 denoising queries, filled with zeros."""
    generator = CdnQueryGenerator(
        num_classes=3,
        embed_dims=8,
        num_matching_queries=5,
        group_cfg=dict(dynamic=True, num_dn_queries=20),
    )
    samples = []
    for count in (2, 0, 4):
        sample = DetDataSample(metainfo=dict(img_shape=(32, 48)))
        sample.gt_instances = InstanceData(
            bboxes=torch.tensor([[4.0, 4.0, 20.0, 20.0]]).repeat(count, 1),
            labels=torch.zeros(count, dtype=torch.long),
        )
        samples.append(sample)
    query_BND, _, _, meta = generator(samples)
    # 20 / 4 boxes = 5 groups, positive and negative.
    assert meta["num_denoising_queries"] == 40
    first, last = [True, True, False, False] * 10, [True] * 40
    assert real_query_mask(query_BND).tolist() == [first, [False] * 40, last]


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


MOE = dict(
    layers=dict(encoder=[0], decoder=[0]),
    losses=[dict(type="DatasetRoutingLoss", weight=1.0, tokens="foreground")],
)


@pytest.fixture
def boxes():
    """Those of a batch of 64 x 128 (height x width): a full image, and one 32 high."""
    sizes = {(64, 128): [0.0, 16.0, 64.0, 32.0], (32, 128): [88.0, 0.0, 128.0, 32.0]}
    return boxes_of(
        SimpleNamespace(
            gt_instances=InstanceData(bboxes=torch.tensor([box])), img_shape=size
        )
        for size, box in sizes.items()
    )


def test_feature_cells_by_their_centres(boxes):
    ratio = torch.tensor([[1.0, 1.0], [0.5, 1.0]], dtype=torch.float64)
    masks = encoder_foreground(boxes, torch.tensor([[4, 8], [1, 2]]), ratio)
    # Centres in pixels: 8, 24, ... 120; coarse level: y = 32, x = 32 and 96.
    none = [0] * 8
    first = [none, [1, 1, 1, 1, 0, 0, 0, 0], none, none]
    # x of 88 lies on the left edge, which counts; rows 2 and 3 are padding
    second = [[0, 0, 0, 0, 0, 1, 1, 1]] * 2 + [none, none]
    assert masks[:, :32].int().view(2, 4, 8).tolist() == [first, second]
    # y = 32 is the lower edge of both boxes, which does not count
    assert masks[:, 32:].int().tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("size", [2, 4])
def test_queries_by_the_centre_of_their_reference(boxes, size):
    # The same share of the image is another pixel in the second, which is half as high.
    points = torch.tensor([[0.25, 0.3], [0.7, 0.9], [0.5, 0.3], [0.6875, 0.0]])
    references = torch.cat([points, torch.full((4, 2), 0.9)], dim=1)[:, :size]
    masks = query_foreground(boxes, references.expand(2, 4, size))
    assert masks.int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 1]]


def test_a_detector_counts_its_foreground_tokens(build, make_batch, records, run_loss):
    """Two images of different size: what is counted, and the loss of that."""
    detector = build(moe=MOE)
    batch = make_batch([2, 0], sizes=[(64, 96), (32, 96)], boxes=[1, 1])
    batch["data_samples"][0].gt_instances.bboxes = torch.tensor([[0.0, 0, 16, 24]])
    batch["data_samples"][1].gt_instances.bboxes = torch.tensor([[32.0, 0, 64, 32]])
    losses = run_loss(detector, batch)
    # 64 x 96 at strides 8, 16, 32. First: 2 x 3 cells; centres 8 and (8, 24): the
    # second is on the edge, so 1; none at stride 32 (centre 16 on the edge).
    # Second: 4 x 4, 2 x 2 and 1 cell; the padded half is not counted.
    encoder = records["encoder.0"]
    encoder = encoder.packing.unpack(encoder.foreground_V)
    assert encoder.sum(1).tolist() == [6 + 1, 16 + 4 + 1]
    expected = []
    for record in records.values():
        counted_V = record.foreground_V
        target_V = record.packing.spread(torch.tensor([2, 0]))
        assert 0 < counted_V.sum() < len(counted_V)
        expected.append(
            functional.cross_entropy(record.logits_VE[counted_V], target_V[counted_V])
        )
    torch.testing.assert_close(
        losses["loss_moe_dataset_routing"], torch.stack(expected).mean()
    )


def test_positive_denoising_queries_are_foreground(
    build, make_batch, records, run_loss
):
    """Their centres move by less than half of the box, so they stay inside of it."""
    detector = build(moe=MOE)
    run_loss(detector, make_batch([0, 1], boxes=[1, 1]))
    # One box: 50 groups, each one positive and one negative query; 50 matching ones.
    foreground = records["decoder.0"].foreground_V.view(2, -1)
    assert foreground.shape[1] == 150
    assert foreground[:, 0:100:2].all()
    assert not foreground[:, 1:100:2].all()


def test_a_batch_without_boxes_has_a_zero_loss_and_trains(
    build, make_batch, records, run_loss
):
    detector = build(moe=MOE)
    losses = run_loss(detector, make_batch([0, 1], boxes=[0, 0]))
    assert not any(record.foreground_V.any() for record in records.values())
    assert losses["loss_moe_dataset_routing"] == 0.0
    losses["loss_moe_dataset_routing"].backward()


def test_nothing_is_left_over_and_nothing_kept_where_no_loss_asks(
    build, make_batch, records, run_loss
):
    detector = build(moe=MOE)
    run_loss(detector, make_batch([0, 1]))
    assert detector.routing.boxes is None
    assert detector.routing.foreground_BN is None
    run_loss(build(), make_batch([0, 1]))
    assert records["decoder.0"].foreground_V is None


def test_recomputation_counts_the_same(build, make_batch, run_loss):
    batch, outcomes = make_batch([0, 2], sizes=[(64, 64), (64, 32)]), []
    for with_cp in (False, True):
        detector = build(moe={**MOE, "with_cp": with_cp})
        loss = run_loss(detector, batch)["loss_moe_dataset_routing"]
        loss.backward()
        grads = [p.grad for p in detector.parameters() if p.grad is not None]
        outcomes.append((loss.detach(), grads))
    torch.testing.assert_close(outcomes[1], outcomes[0])


@pytest.mark.parametrize("name", ["MoEDETR", "MoEConditionalDETR", "MoEDABDETR"])
def test_detectors_without_reference_points_refuse(name, build_mmdet):
    with pytest.raises(
        ConfigError, match=f"reference points, which {name} does not have"
    ):
        build_mmdet(name, moe=MOE)


DDQ = dict(
    layers=dict(decoder="all"),
    gate=dict(type="TopKGate", k=1),
    losses=[dict(type="DatasetRoutingLoss", weight=1.0)],
)


@pytest.fixture
def selected(monkeypatch):
    """How many distinct queries DDQ selects in each image, fillers left out."""
    from mmdet.models.detectors import ddq_detr

    found, align = [], ddq_detr.align_tensor

    def spy(tensors, length=None):
        if length is not None:
            found.append([len(tensor) for tensor in tensors])
        return align(tensors, length)

    monkeypatch.setattr(ddq_detr, "align_tensor", spy)
    return lambda: found[-1]


def test_fillers_of_ddq_are_not_routed(
    build_mmdet, make_batch, records, run_loss, run_predict, selected
):
    """More queries are wanted than there are proposals: mmdet adds zeros."""
    detector = build_mmdet("MoEDDQDETR", moe=DDQ)
    detector.num_queries = 120
    detector.dn_query_generator.num_matching_queries = 120
    detector.data_preprocessor.pad_size_divisor = 64  # predicted in one pass
    batch = make_batch([0, 1], sizes=[(64, 64), (64, 32)], boxes=[2, 2])
    samples = run_predict(detector, batch)
    real = selected()
    assert 0 < min(real) <= max(real) < 120
    for name, record in records.items():
        assert record.assignment.num_routes == sum(real)
        assert [sum(sample.routing_counts[name]) for sample in samples] == real
    run_loss(detector, batch)
    # 12 denoising queries / 2 boxes = 6 groups, positive and negative, of 2 images.
    for record in records.values():
        assert record.assignment.num_routes == sum(selected()) + 2 * 6 * 2 * 2


def test_auxiliary_queries_of_ddq_pass_the_experts_and_teach_no_router(
    build_mmdet, make_batch, records, run_loss, total
):
    gate = dict(DDQ["gate"], balance=dict(type="BiasBalancer"))
    detector = build_mmdet("MoEDDQDETR", moe=dict(DDQ, gate=gate))
    batch = make_batch([0, 1], boxes=[1, 3])
    losses = run_loss(detector, batch)
    # 20 distinct queries of each image and 30 auxiliary ones; 12 denoising queries / 3
    # boxes = 4 groups, positive and negative, where the images have 1 and 3 boxes.
    assert detector.cache_dict["num_dense_queries"] == 30
    for record in records.values():
        assert record.assignment.num_routes == 2 * 20 + 8 * (1 + 3)
    for block in moe_blocks(detector):
        counts_E = records[block.name].assignment.counts_E
        assert block.moe.gate.balance.counts_E.equal(counts_E)
    experts = [block.moe.experts for block in moe_blocks(detector)]
    total({k: v for k, v in losses.items() if "_aux_loss" in k}).backward()
    assert any(bank.w2_EHD.grad.abs().sum() > 0 for bank in experts)


def test_ddq_may_keep_fewer_queries_than_detections_it_is_asked_for(build_mmdet):
    head = build_mmdet("MoEDDQDETR").bbox_head
    head.test_cfg = dict(max_per_img=9)
    scores, boxes = torch.randn(2, 4), torch.rand(2, 4)
    found = head._predict_by_feat_single(scores, boxes, dict(img_shape=(32, 48)), False)
    assert len(found.scores) == 8


def test_ddq_with_one_expert_is_the_dense_detector(build_mmdet, make_batch, run_loss):
    """Its auxiliary losses, too: those queries are not left without an FFN."""
    dense = build_mmdet("MoEDDQDETR")
    sparse = build_mmdet("MoEDDQDETR", moe=DDQ, num_groups=1)
    sparse.load_state_dict(dense.state_dict())
    batch = make_batch([0, 0])
    expected, losses = run_loss(dense, batch), run_loss(sparse, batch)
    assert any("_aux_loss" in key for key in expected)
    for key, value in expected.items():
        torch.testing.assert_close(losses[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_where_objects_outnumber_queries(
    dtype, detector_name, build_mmdet, make_batch, run_loss, total
):
    """20 queries, 30 dense ones in DDQ; 40 objects in one of the images."""
    detector = build_mmdet(detector_name)
    batch = make_batch([0, 1], sizes=[(64, 96), (64, 64)], boxes=[40, 2])
    with torch.autocast("cpu", dtype=dtype):
        losses = run_loss(detector, batch)
    loss = total(losses)
    loss.backward()
    expected = total(run_loss(detector, batch))  # in float32
    torch.testing.assert_close(loss.float(), expected, rtol=0.05, atol=0.0)
    for key, parameter in detector.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), key


def test_sure_predictions_are_matched_in_float16(
    detector_name, build_mmdet, make_batch, run_loss, total
):
    """1 - sigmoid(9) is below float16's step, where the logarithm was infinite."""
    detector = build_mmdet(detector_name)
    for name, parameter in detector.bbox_head.named_parameters():
        if "cls" in name and name.endswith("bias"):
            torch.nn.init.constant_(parameter, 9.0)
    batch = make_batch([0, 1], sizes=[(64, 96), (64, 64)])
    with torch.autocast("cpu", dtype=torch.float16):
        loss = total(run_loss(detector, batch))
    expected = total(run_loss(detector, batch))
    torch.testing.assert_close(loss.float(), expected, rtol=0.05, atol=0.0)


def test_the_share_of_height_and_of_width_that_is_image():
    shapes = [dict(img_shape=(96, 160)), dict(img_shape=(48, 40))]
    samples = [SimpleNamespace(metainfo=shape, **shape) for shape in shapes]
    images = torch.zeros(2, 3, 96, 160)
    assert valid_ratio_of(images, samples).tolist() == [[1.0, 1.0], [0.5, 0.25]]
    mask_BHW = image_mask_of(images, samples)
    assert mask_BHW[1].nonzero().max(0).values.tolist() == [47, 39]
    assert mask_BHW.sum((1, 2)).tolist() == [96 * 160, 48 * 40]
    assert valid_ratio_of(images, samples[:1]) is None
