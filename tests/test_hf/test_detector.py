"""Transformers detectors: equal to the plain model, and detectors as mmdet's are."""

import copy

import pytest
import timm
import torch
from mmdet.registry import MODELS
from mmengine.structures import InstanceData
from torch import nn

from damex.errors import ConfigError, DataError
from damex.moe import LinearRouter, LowRankExperts, MoELayer, TopKGate
from tests.test_hf.conftest import BACKBONES, PREPROCESSOR, TIMM
from tests.test_models.test_detectors import assert_same

pytest.importorskip("transformers", reason="needs the extra hf")

from damex.hf.adapters import MoEAdapter
from damex.hf.detector import TransformersHead, adjusted_losses
from damex.hf.families import build_model
from damex.models.context import RoutingContext


def plain_of(detector, model_of, family):
    """The model of Transformers alone, with the weights of a detector."""
    model = model_of(family)
    backbone = MODELS.build(model.backbone) if "backbone" in model else None
    plain = build_model(model.config, 4, backbone)
    state = detector.detr.state_dict()
    plain.load_state_dict({k: v for k, v in state.items() if ".adapter." not in k})
    if backbone is not None:
        plain.model.backbone.model._backbone = backbone.net  # as Transformers has it
    return plain


def labels_of(batch, width, height):
    """Objects as Transformers takes them: centre and size, of the padded input."""
    labels = []
    for sample in batch["data_samples"]:
        x1, y1, x2, y2 = sample.gt_instances.bboxes.unbind(1)
        sides = [(x1 + x2) / 2 / width, (y1 + y2) / 2 / height]
        sides += [(x2 - x1) / width, (y2 - y1) / height]
        labels.append(
            dict(class_labels=sample.gt_instances.labels, boxes=torch.stack(sides, 1))
        )
    return labels


def test_loss_and_outputs_are_those_of_the_plain_model_at_the_start(
    family, sizes, build_hf, model_of, make_batch, run_loss, run_predict, total
):
    detector, batch = build_hf(family), make_batch([0, 1], sizes=sizes, boxes=[2, 3])
    plain = plain_of(detector, model_of, family).train()
    losses = run_loss(detector, batch)
    routing = losses["loss_moe_dataset_routing"]
    width = sizes[0][1]
    pixels = torch.zeros(2, 3, 64, width)
    for image, one in zip(pixels, batch["inputs"], strict=True):
        image[:, : one.shape[1], : one.shape[2]] = one[[2, 1, 0]] / 255.0
    torch.manual_seed(1)  # the noise of the denoising queries, as in run_loss
    theirs = plain(pixel_values=pixels, labels=labels_of(batch, width, 64)).loss
    torch.testing.assert_close(total(losses) - routing, theirs, rtol=1e-6, atol=1e-5)
    own = {name for name in losses if name not in ("moe_routing_accuracy",)}
    assert all(name.startswith("loss_") for name in own)

    detector.eval()
    plain = plain_of(detector, model_of, family).eval()
    with torch.no_grad():
        logits, boxes = detector(pixels, mode="tensor")
        found = plain(pixel_values=pixels)
    assert torch.equal(logits[0], found.logits)
    assert torch.equal(boxes[0], found.pred_boxes)


@pytest.mark.parametrize("boxes", [[2, 1], [0, 0]], ids=["boxes", "no boxes"])
def test_every_parameter_gets_a_gradient(
    family, sizes, build_hf, make_batch, run_loss, total, boxes
):
    detector = build_hf(family, moving=True)
    loss = total(run_loss(detector, make_batch([0, 0], sizes=sizes, boxes=boxes)))
    loss.backward()
    assert torch.isfinite(loss)
    lacking = [
        name
        for name, parameter in detector.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    assert lacking == []
    up = [p for n, p in detector.named_parameters() if n.endswith("up_ELD")]
    # Both images are of dataset 0: forcing sends nothing to the expert of dataset 1.
    assert all(p.grad[0].abs().sum() > 0 and p.grad[1].abs().sum() == 0 for p in up)


def test_denoising_queries_pass_the_experts_and_are_not_counted(
    family, sizes, build_hf, make_batch, records, run_loss, monkeypatch
):
    """Three boxes: 12 // 3 groups of 2 x 3 denoising queries before 20 others.

    RF-DETR has 2 more groups of 20 behind. Its 64 x 64 pixels are 2 x 2 windows of 16
    patches and a class token. Deformable DETR has neither, and encodes all maps.
    """
    seen = []
    add_to = MoEAdapter.add_to

    def see(adapter, mlp, args, output):
        seen.append((adapter.name, adapter(args[0]) != 0, adapter.context))
        return add_to(adapter, mlp, args, output)

    monkeypatch.setattr(MoEAdapter, "add_to", see)
    detector = build_hf(family, moving=True)
    run_loss(detector, make_batch([0, 1], sizes=sizes, boxes=[1, 3]))
    # Of 64 x 96 pixels: maps of strides 8, 16 and 32, or the last.
    tokens, queries, counted_tokens = [(2, 6, 32)], 24 + 20, 12
    if family == "rf_detr":
        tokens, queries, counted_tokens = [(2 * 4, 1 + 16, 32)] * 2, 20 + 40, 2 * 4 * 17
    if family.startswith("deformable_detr"):
        tokens, queries, counted_tokens = [(2, 96 + 24 + 6, 32)], 20, 2 * 126
    encoder = [f"encoder.{number}" for number in range(len(tokens))]
    assert [name for name, *_ in seen] == [*encoder, "decoder.0", "decoder.1"]
    shapes = [tuple(moved.shape) for _, moved, _ in seen]
    assert shapes == [*tokens, *[(2, queries, 32)] * 2]
    assert all(moved.any(dim=-1).all() for _, moved, _ in seen)
    counted = {name: len(record.logits_VE) for name, record in records.items()}
    many = dict.fromkeys(encoder, counted_tokens)
    assert counted == {**many, "decoder.0": 40, "decoder.1": 40}


@pytest.mark.parametrize("part", [slice(-4, None), slice(3), slice(1, 5)], ids=str)
def test_some_tokens_are_counted(part):
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, 2), gate=TopKGate(1), experts=LowRankExperts(2, 8)
    )
    torch.nn.init.normal_(layer.experts.up_ELD)
    context = RoutingContext()
    tokens_BND = torch.randn(3, 7, 8)
    some, every = (
        MoEAdapter(layer, name="a", context=context, counted=some, with_cp=False)
        for some in (part, None)
    )
    with context.step():
        output_BND = some(tokens_BND)
        record = context.records["a"]
        torch.testing.assert_close(output_BND, every(tokens_BND))
    expected = layer.router(tokens_BND[:, part].flatten(0, 1))
    torch.testing.assert_close(record.logits_VE, expected)


def test_an_image_does_not_depend_on_the_others_of_its_batch(
    family, sizes, build_hf, make_batch, run_predict
):
    detector = build_hf(family, moving=True)
    size, _ = sizes
    sizes = [size, size[::-1], (70, 90), size] * 2  # 70 x 90 becomes 96 x 96
    batch = make_batch([0, 1] * 4, sizes=sizes)
    together = run_predict(detector, batch)
    for image, found in enumerate(together):
        alone = {key: values[image : image + 1] for key, values in batch.items()}
        (other,) = run_predict(detector, alone)
        assert other.routing_counts == found.routing_counts
        assert_same([other], [found], rtol=1e-4, atol=1e-3)


def test_boxes_are_pixels_of_the_original_image(
    build_hf, make_batch, run_predict, monkeypatch
):
    """48 x 80 pixels, half of the original's, are padded to 64 x 96."""
    detector = build_hf("rt_detr_v2", moe=None)
    logits = torch.full((1, 20, 4), -9.0)
    logits[0, 3, 2] = 2.0
    boxes = torch.full((1, 20, 4), 0.5)
    boxes[0, 3] = torch.tensor([0.5, 0.5, 0.25, 0.5])

    class Found:
        def __init__(self, **_):
            self.logits, self.pred_boxes = logits, boxes

    monkeypatch.setattr(detector.detr, "forward", Found)
    batch = make_batch([0], sizes=[(48, 80)])
    batch["data_samples"][0].set_metainfo(
        dict(scale_factor=(0.5, 0.5), ori_shape=(96, 160))
    )
    (sample,) = run_predict(detector, batch)
    found = sample.pred_instances
    assert len(found) == 10
    assert found.labels[0] == 2
    assert found.scores[0].item() == pytest.approx(0.8808, abs=1e-4)  # sigmoid(2)
    # Centre (48, 32), 24 wide, 32 high in the input; twice that in the original.
    assert found.bboxes[0].tolist() == pytest.approx([72, 32, 120, 96])


def test_a_dataset_gets_detections_of_its_classes(family, sizes, build_hf, make_batch):
    """As in the evaluation, where a dataset is known: annotated_labels."""
    detector = build_hf(family).eval()
    batch = make_batch([0, 1], sizes=sizes)
    for sample, labels in zip(batch["data_samples"], [[0, 1], [3]], strict=True):
        sample.set_metainfo(dict(annotated_labels=labels))
    with torch.inference_mode():
        found = detector.test_step(batch)
    assert [{*s.dataset_instances.labels.tolist()} for s in found][1] == {3}
    assert {*found[0].dataset_instances.labels.tolist()} <= {0, 1}


def test_a_training_goes_on_after_a_prediction_in_inference_mode(
    family, build_hf, make_batch, run_loss, total
):
    """Transformers caches anchors and places, of a size that no other test uses."""
    detector, batch = build_hf(family), make_batch([0], sizes=[(160, 160)])
    detector.eval()
    with torch.inference_mode():
        detector.test_step(copy.deepcopy(batch))
    total(run_loss(detector, batch)).backward()


def test_copies_and_state_dicts_predict_the_same(
    family, sizes, build_hf, make_batch, run_loss, run_predict
):
    detector, batch = build_hf(family, moving=True), make_batch([0, 1], sizes=sizes)
    run_loss(detector, batch)
    expected = run_predict(detector, batch)
    twin = copy.deepcopy(detector)
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter.zero_()  # the copy has experts of its own
    other = build_hf(family)
    other.load_state_dict(twin.state_dict())
    for one in (twin, other):
        assert_same(run_predict(one, batch), expected)


COVERAGE = dict(labels=[[0, 1], [2, 3]], groups=[0, 1])


def taught_classes(detector, batch, run_loss, total):
    """Classes of which a row of any classifier gets a gradient."""
    total(run_loss(detector, batch)).backward()
    grads = [
        head.weight.grad.abs().sum(1) + head.bias.grad.abs()
        for head in detector.bbox_head.cls_branches
    ]
    assert all(torch.isfinite(grad).all() for grad in grads)
    rows = [(grad != 0).nonzero().flatten().tolist() for grad in grads]
    assert all(row == rows[0] for row in rows)  # of both layers, and of the cells
    return rows[0]


def with_labels(batch, label):
    for sample in batch["data_samples"]:
        sample.gt_instances.labels.fill_(label)
    return batch


@pytest.mark.parametrize("boxes", [2, 0])
def test_ignored_classes_get_no_gradient_at_all(
    family, sizes, build_hf, make_batch, run_loss, total, boxes
):
    detector = build_hf(
        family, label_coverage=COVERAGE, ignore_unannotated_classes=True
    )
    batch = with_labels(make_batch([0, 0], sizes=sizes, boxes=[boxes] * 2), 1)
    assert taught_classes(detector, batch, run_loss, total) == [0, 1]


@pytest.mark.parametrize(
    ("above", "predicted", "expected"),
    [(1e-9, [], [0, 1]), (1e-9, [0], [1]), (1 - 1e-9, [0], [0, 1, 2, 3])],
    ids=["found", "predicted labels", "not found"],
)
def test_classes_that_may_be_right_are_ignored(
    family, sizes, build_hf, make_batch, run_loss, total, above, predicted, expected
):
    """No object is matched here, so each query may be right."""
    detector = build_hf(
        family, label_coverage=COVERAGE, ignore_unannotated_classes=above
    )
    batch = make_batch([0, 0], sizes=sizes, boxes=[0, 0])
    for sample in batch["data_samples"]:
        sample.set_metainfo(dict(predicted_labels=predicted))
    assert taught_classes(detector, batch, run_loss, total) == expected


def test_a_matched_query_learns_a_class_that_is_ignored_elsewhere(
    family, sizes, build_hf, make_batch, run_loss, total
):
    """Class 0 has labels of a detector, which are not complete."""
    options = dict(label_coverage=COVERAGE, ignore_unannotated_classes=1e-9)
    detector = build_hf(family, **options)
    batch = with_labels(make_batch([0, 0], sizes=sizes), 0)
    plain = total(run_loss(detector, batch))
    for sample in batch["data_samples"]:
        sample.set_metainfo(dict(predicted_labels=[0]))
    losses = run_loss(detector, batch)
    assert total(losses) < plain  # a masked target would cost 10,000
    assert 0 in taught_classes(detector, batch, run_loss, total)


def test_a_crowd_teaches_nothing_of_its_class(
    family, sizes, build_hf, make_batch, run_loss, total
):
    """It covers the first image, all of it; no image has another object."""
    detector = build_hf(family)
    batch = make_batch([0, 1], sizes=sizes, boxes=[0, 0])
    for sample in batch["data_samples"]:
        sample.ignored_instances = InstanceData(
            bboxes=torch.tensor([[-200.0, -200.0, 300.0, 300.0]]),
            labels=torch.tensor([2]),
        )
    assert taught_classes(detector, batch, run_loss, total) == [0, 1, 3]


def test_a_loss_is_shown_as_to_mmdets_heads():
    """Of the input, the first image is half the width and a quarter of the height."""

    class Criterion:
        def get_loss(self, loss, outputs, targets, indices, num_boxes):
            return outputs["logits"]

    before, seen = Criterion.get_loss, []
    head = TransformersHead(3, {})
    head.get_targets = lambda logits, boxes: seen.append(torch.stack(boxes))
    head.loss_cls.register_forward_pre_hook(
        lambda module, inputs: (inputs[0] + 1, seen.append(inputs[1]))
    )
    outputs = dict(
        logits=torch.zeros(2, 2, 3),
        pred_boxes=torch.tensor([[[0.25, 0.125, 0.1, 0.05]] * 2] * 2),
    )
    matched = [(torch.tensor([1]), torch.tensor([0])), (torch.tensor([]).long(),) * 2]
    ratio_B4 = torch.tensor([[0.5, 0.25, 0.5, 0.25], [1.0] * 4])
    with adjusted_losses(Criterion, head, ratio_B4, share=1.0):
        changed = Criterion().get_loss("vfl", outputs, None, matched, 1)
        same = Criterion().get_loss("boxes", outputs, None, matched, 1)
    assert Criterion.get_loss is before
    assert torch.equal(changed, torch.ones(2, 2, 3))
    assert torch.equal(same, torch.zeros(2, 2, 3))
    boxes_BQ4, labels_R = seen
    torch.testing.assert_close(boxes_BQ4[0], torch.tensor([[0.5, 0.5, 0.2, 0.2]] * 2))
    assert torch.equal(boxes_BQ4[1], outputs["pred_boxes"][1])
    assert labels_R.tolist() == [3, 0, 3, 3]  # 3 is no class: no object is matched


def test_a_backbone_of_timm_starts_from_its_weights_and_is_frozen(
    build_hf, make_batch, run_loss, total, tmp_path
):
    given = timm.create_model("test_efficientnet").state_dict()
    torch.save(given, tmp_path / "timm.pth")
    frozen = dict(pretrained=str(tmp_path / "timm.pth"), frozen_stages=2)
    backbone = dict(TIMM, norm_eval=True, **frozen)
    detector = build_hf("d_fine timm", backbone=backbone)
    net = detector.backbone.model._backbone.net
    state = {name: value.clone() for name, value in net.state_dict().items()}
    assert all(torch.equal(value, given[name]) for name, value in state.items())
    total(run_loss(detector, make_batch([0, 1]))).backward()
    after = net.state_dict()  # the statistics of batch norms, too
    assert all(torch.equal(value, state[name]) for name, value in after.items())
    taught = {n.split(".")[1] for n, p in net.named_parameters() if p.grad is not None}
    assert taught == {"3", "4"}


def test_batch_norms_start_as_the_identity(family, build_hf):
    """Those of RT-DETRv2 would have scales around 0; some families have none."""
    norms = [m for m in build_hf(family).modules() if isinstance(m, nn.BatchNorm2d)]
    frozen = family in ("deformable_detr", "deformable_detr refined")
    assert len(norms) > 10 or family == "rf_detr" or (frozen and norms == [])
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() for norm in norms)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (dict(config=dict(model_type="yolos")), "yolos.*supports rt_detr_v2, d_fine"),
        (dict(config=dict(decoder_layer=3)), "decoder_layer is unknown.*decoder_lay"),
        (dict(config=dict(encoder_hidden_dim=64)), "decoder_in_channels is .32, 32"),
        (dict(config=dict(model_type="deimv2", encoder_type="lite")), "is 'lite', wh"),
        (dict(config=dict(num_queries="many")), "model.config: .*num_queries"),
        (dict(config=dict(auxiliary_loss=False)), "auxiliary_loss must be True"),
        (dict(config=dict(learn_initial_query=True)), "initial_query must be False"),
        (dict(bbox_head=dict(num_classes=None)), "needs model.bbox_head.num_classes"),
        (dict(test_cfg=dict(max_per_img=81)), "can make 80 detections .*=81 asks"),
        (dict(data_preprocessor=dict(pad_size_divisor=16)), "strides up to 32"),
        (dict(label_prior=dict(source="head")), "label_prior is not available"),
        (dict(image_balance=0.5), "image_balance is not available"),
        (dict(backbone=TIMM), "model.backbone and model.config.backbone_config"),
        (dict(backbone=dict(type="ResNet", depth=18)), "'ResNet'; a MoETransformers"),
        (
            dict(
                backbone=dict(TIMM, out_indices=(1, 2, 3)),
                config=dict(backbone_config=None),
            ),
            r"strides .4, 8, 16., but model.config.feat_strides is .8, 16, 32.",
        ),
    ],
)
def test_a_wrong_config_is_named(build_hf, changes, error):
    if "data_preprocessor" in changes:
        changes["data_preprocessor"]["type"] = "DetDataPreprocessor"
    with pytest.raises(ConfigError, match=error):
        build_hf("rt_detr_v2", **changes)


@pytest.mark.parametrize(
    ("moe", "error"),
    [
        (dict(experts=dict(type="FFNExperts")), "'FFNExperts', copies of mmdet's"),
        (dict(layers=dict(decoder=[0, 0])), "layers.decoder: 0 is listed twice"),
        (dict(losses=[dict(tokens="foreground")]), "needs reference points"),
        (dict(shared_expert=None), "shared_expert must be"),
        (dict(layers=dict(encoder=[1])), "encoder has 1 layers"),
        (dict(layers=dict(backbone=[1])), "in the encoder and decoder"),
        (dict(upcycling=dict(share=0.5), shared_expert=None), "moe.upcycling changes"),
        (dict(block=dict(norm="pre")), "moe.block changes the FFNs"),
    ],
)
def test_experts_that_do_not_fit_are_named(build_hf, model_of, moe, error):
    best = model_of("d_fine").moe
    with pytest.raises(ConfigError, match=error):
        build_hf("d_fine", moe={**best, **moe})


def test_an_image_with_fewer_cells_than_queries_is_named(
    build_hf, make_batch, run_predict
):
    """32 x 32 at strides 8, 16, 32: 16 + 4 + 1 cells, and 30 queries."""
    detector = build_hf("rt_detr_v2", config=dict(num_queries=30))
    with pytest.raises(DataError, match=r"21 feature map cells, fewer than .*=30: "):
        run_predict(detector, make_batch([0], sizes=[(32, 32)]))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            dict(config=dict(backbone_config=BACKBONES["d_fine"])),
            "is a 'hgnet_v2', but",
        ),
        (dict(config=dict(backbone_config=None), backbone=TIMM), "is a 'TimmBackbone'"),
        (
            dict(data_preprocessor=dict(PREPROCESSOR, pad_size_divisor=8)),
            "strides up to 8, and 2 windows; set a multiple of 16",
        ),
    ],
)
def test_a_wrong_config_of_rf_detr_is_named(build_hf, changes, error):
    with pytest.raises(ConfigError, match=error):
        build_hf("rf_detr", **changes)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (dict(two_stage=True, with_box_refine=True), "two_stage is True.*no loss"),
        (dict(position_embedding_type="learned"), "learned.*50 rows.*supports 'sine'"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings is False"),
        (dict(num_feature_levels=1), "gives 2 maps, but .*num_feature_levels=1"),
        (
            dict(
                backbone_config=dict(
                    model_type="timm_backbone", backbone=TIMM["name"], out_indices=[2]
                )
            ),
            "batch norms lose their activations in Transformers; set model.backbone=",
        ),
    ],
)
def test_a_wrong_config_of_deformable_detr_is_named(build_hf, config, error):
    with pytest.raises(ConfigError, match=error):
        build_hf("deformable_detr", config=config)


def test_windows_need_squares(build_hf, make_batch, run_predict):
    """Transformers would mix up the patches of other images."""
    with pytest.raises(DataError, match=r"96 x 64 pixels, and the windows .* squares"):
        run_predict(build_hf("rf_detr"), make_batch([0], sizes=[(64, 96)]))


def test_windows_of_an_image_are_routed_together():
    """Two images of two windows: a vote of each image, as without windows."""
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, 2), gate=TopKGate(1), experts=LowRankExperts(2, 8)
    )
    torch.nn.init.normal_(layer.experts.up_ELD)
    options = dict(context=RoutingContext(), name="a", counted=None, with_cp=False)
    windowed, whole = (MoEAdapter(layer, windows=n, **options) for n in (2, 1))
    tokens_BND = torch.randn(2, 6, 8)
    with options["context"].step():
        found = windowed(tokens_BND.view(4, 3, 8))
        packing = options["context"].records["a"].packing
        assert (packing.num_images, packing.num_tokens) == (2, 6)
        torch.testing.assert_close(found.view(2, 6, 8), whole(tokens_BND))
