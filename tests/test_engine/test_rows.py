"""Rows of classes and of datasets are remapped by name."""

import copy

import pytest
import torch
from mmdet.registry import MODELS

from damex.engine.config import label_space_of
from damex.engine.freezing import freeze_all_but
from damex.engine.rows import RowNames, remap_notes, remap_rows
from damex.errors import ConfigError
from damex.models.insertion import moe_blocks
from damex.models.queries import selects_by_first_class
from tests.test_inference.conftest import SPACE

COCO = tuple(f"c{i}" for i in range(80))
ABC = ("a", "b", "c", "d")
XYZ, ZXY = RowNames(ABC, ("x", "y", "z")), RowNames(ABC, ("z", "x", "y"))
LABELS = "dn_query_generator.label_embedding.weight"
FIRST = "bbox_head.cls_branches.0.weight"


def remap(state, detector, stored, wanted):
    return remap_rows(state, detector, stored=stored, wanted=wanted)


def named(sample, classes):
    """Detections of a sample by the names of their classes."""
    found = sample.pred_instances
    return [classes[label] for label in found.labels], found.scores, found.bboxes


def test_detections_are_those_of_another_order_of_classes(
    build_mmdet, detector_name, make_batch, run_predict
):
    """In all heads of all detectors, the two-stage ones and the softmax included."""
    detector = build_mmdet(detector_name)
    batch = make_batch([0, 1])
    before = [named(sample, COCO) for sample in run_predict(detector, batch)]
    state = dict(detector.state_dict())
    other = COCO[40:] + COCO[:40]
    assert remap(state, detector, RowNames(COCO), RowNames(other))
    detector.load_state_dict(state)
    after = [named(sample, other) for sample in run_predict(detector, batch)]
    for (names, scores, boxes), (names_now, scores_now, boxes_now) in zip(
        before, after, strict=True
    ):
        assert names == names_now
        torch.testing.assert_close(scores, scores_now)
        torch.testing.assert_close(boxes, boxes_now)


@pytest.mark.parametrize(
    ("name", "expected"), [("MoEDeformableDETR", True), ("MoEDINO", False)]
)
def test_a_subclass_has_the_first_stage_of_its_detector(build_mmdet, name, expected):
    detector = build_mmdet(name)
    detector.as_two_stage = True
    detector.__class__ = type("MyDetector", (type(detector),), {})
    assert selects_by_first_class(detector) == expected


REFINED = dict(as_two_stage=True, with_box_refine=True)
SHARED = dict(as_two_stage=True)  # one classifier is that of all layers


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("MoEDINO", {}),
        ("MoEDDQDETR", {}),
        ("MoEDeformableDETR", REFINED),
        ("MoEDeformableDETR", SHARED),
    ],
)
def test_denoising_labels_move_and_a_first_stage_keeps_its_single_class(
    build_mmdet, name, changes
):
    """Deformable DETR in two stages chooses queries by row 0, whatever class it is."""
    detector = build_mmdet(name, **changes)
    is_deformable = name == "MoEDeformableDETR"
    last = f"bbox_head.cls_branches.{len(detector.bbox_head.cls_branches) - 1}.weight"
    state, own = dict(detector.state_dict()), detector.state_dict()
    moved = remap(state, detector, RowNames(COCO), RowNames(COCO[::-1]))
    assert torch.equal(state[last][0], own[last][0 if changes == REFINED else -1])
    assert torch.equal(state[FIRST], own[FIRST].flip(0))
    labels = set() if is_deformable else {LABELS}
    assert moved == {key for key in state if "cls_branches" in key} | labels
    for key in labels:
        assert torch.equal(state[key], own[key].flip(0))


def test_new_and_ambiguous_classes_start_as_the_detector_has_them(build):
    target = build(num_groups=2)
    own, given = target.state_dict()[FIRST], torch.randn(80, 64)
    wanted, state = RowNames(("new", "c7", "c0", "other")), {FIRST: given.clone()}
    moved = remap(state, target, RowNames(COCO), wanted)
    assert moved == {FIRST}
    assert torch.equal(state[FIRST], torch.stack([own[0], given[7], given[0], own[3]]))
    assert [*remap_notes(RowNames(COCO), wanted, moved)] == [
        "classes: loaded by name: c7, c0; newly initialized: new, other; only in the "
        "checkpoint: 78."
    ]
    twice, wanted = RowNames(("a", "b", "a", "d")), RowNames(("d", "a", "b", "x"))
    state = {FIRST: given[:4].clone()}
    remap(state, target, twice, wanted)
    assert torch.equal(state[FIRST], torch.stack([given[3], own[1], given[1], own[3]]))


@pytest.mark.parametrize(
    ("moe", "stored", "wanted"),
    [
        ("damex_best", RowNames(ABC, ("x", "y")), RowNames(ABC, ("x", "y"))),
        ("damex_best", RowNames(), RowNames(ABC, ("x", "y"))),
        ("damex_best", RowNames(COCO, ("x",)), RowNames(ABC, ("x", "y"))),
        # experts that are not taught datasets
        ("vanilla", RowNames(ABC, ("x", "y")), RowNames(ABC, ("y", "x"))),
    ],
    ids=["the same", "unknown", "of another size", "no groups"],
)
def test_other_rows_stay(build, moe, stored, wanted):
    detector = build(num_groups=2, moe=moe)
    state = dict(detector.state_dict())
    before = dict(state)
    assert remap(state, detector, stored, wanted) == set()
    assert all(state[key] is before[key] for key in before)


@pytest.mark.parametrize("moe", ["damex", "damex_best"])
def test_losses_are_those_of_another_order_of_datasets(
    build, make_batch, run_loss, moe
):
    detector = build(moe=moe)
    for block in moe_blocks(detector):
        for parameter in block.moe.experts.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
        block.moe.set_group_choice(
            type(block.moe.group_choice)(teacher_forcing=True)  # no noise in the choice
        )
    before = run_loss(detector, make_batch([0, 1, 2]))
    state = dict(detector.state_dict())
    remap(state, detector, XYZ, ZXY)
    detector.load_state_dict(state)
    after = run_loss(detector, make_batch([1, 2, 0]))
    for name, loss in before.items():
        if "loss" in name:
            torch.testing.assert_close(loss, after[name], rtol=1e-4, atol=1e-5)
    wrong = run_loss(detector, make_batch([0, 1, 2]))
    assert not torch.allclose(before["loss_cls"], wrong["loss_cls"], rtol=1e-4)


def test_a_new_dataset_starts_as_the_detector_has_it(build):
    source, target = build(moe="damex_best"), build(moe="damex_best", num_groups=4)
    given = copy.deepcopy(source.state_dict())
    up = next(key for key in given if key.endswith("up_ELD"))
    router = up.replace("experts.up_ELD", "router.weight_ED")
    given[up] = torch.randn(given[up].shape)
    state, wanted = dict(given), RowNames(ABC, ("z", "n", "x", "y"))
    moved = remap(state, target, XYZ, wanted)
    own = target.state_dict()
    for key, new in ((up, torch.zeros_like(given[up][0])), (router, own[router][1])):
        expected = torch.stack([given[key][2], new, given[key][0], given[key][1]])
        assert torch.equal(state[key], expected)
    target.load_state_dict(state)  # the group mask has its new size
    assert [*remap_notes(XYZ, wanted, moved)] == [
        "experts of datasets: loaded by name: z, x, y; newly initialized: n."
    ]


@pytest.fixture
def build_own(own_experts, build):
    """``build_own(type)``: a detector with a bank of the user's own."""

    def make(kind, **changes):
        moe = dict(
            layers=dict(decoder=[1]),
            experts=dict(type=kind),
            gate=dict(type="TopKGate", k=1, renormalize=True),
            losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
        )
        return build(moe=moe, **changes)

    return make


OWN = "decoder.layers.1.ffn.moe.experts.weight"
FOREIGN = r"a OwnExperts, which does not declare whether 'weight' has a row for each"


def test_a_bank_of_the_user_moves_as_it_declares(build_own):
    detector = build_own("DeclaredExperts")
    state = dict(detector.state_dict())
    given = state[OWN].clone()
    assert OWN in remap(state, detector, XYZ, ZXY)
    assert torch.equal(state[OWN], given[[2, 0, 1]])
    kept = freeze_all_but(detector, SPACE, ["park"])
    assert kept[OWN].tolist() == [True, False, True]


def test_a_bank_that_declares_nothing_is_rejected_if_experts_would_move(build_own):
    detector = build_own("OwnExperts")
    state = dict(detector.state_dict())
    assert remap(state, detector, XYZ, XYZ) == set()
    for groups in (("z", "x", "y"), ("x", "y", "n"), ("x", "y")):
        with pytest.raises(ConfigError, match=FOREIGN):
            remap(state, detector, XYZ, RowNames(ABC, groups))
    with pytest.raises(ConfigError, match=FOREIGN):
        freeze_all_but(detector, SPACE, ["park"])


def test_all_that_damex_has_declares_its_rows():
    """Names of its tensors end in their axes."""
    kinds = dict(
        LinearRouter=dict(embed_dims=8, bias=True),
        MLPRouter=dict(embed_dims=8),
        CosineRouter=dict(embed_dims=8),
        HierarchicalRouter=dict(embed_dims=8, num_groups=2),
        FFNExperts=dict(embed_dims=8, hidden_dims=8, activation="prelu"),
        LowRankExperts=dict(embed_dims=8),
        PatchConvExperts=dict(in_channels=8, out_channels=8, patch_size=2),
        BiasBalancer=dict(),
    )
    for kind, options in kinds.items():
        module = MODELS.build(dict(type=kind, num_experts=4, **options))
        axes = {name: name.rpartition("_")[2] for name in module.state_dict()}
        for declared, axis in (("expert_rows", "E"), ("group_rows", "G")):
            rows = {name for name, own in axes.items() if own.startswith(axis)}
            assert {*getattr(module, declared, ())} == rows


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        (dict(dataset_meta=dict(classes=("a", "b"))), RowNames(("a", "b"))),
        (dict(dataset_meta=dict(CLASSES=["a", "b"])), RowNames(("a", "b"))),
        (dict(CLASSES=("a", "b")), RowNames(("a", "b"))),
        (dict(CLASSES="cell"), RowNames(("cell",))),
        ({}, RowNames()),
    ],
)
def test_names_in_checkpoints_of_all_versions_of_mmdet(meta, expected):
    assert RowNames.of_meta(meta) == expected


def test_a_training_starts_from_rows_of_the_same_name(
    make_runner, two_datasets, monkeypatch
):
    """Four classes and two datasets in both, in another order."""
    first = make_runner(moe="damex_best")
    first.model.init_weights()
    with torch.no_grad():
        for block in moe_blocks(first.model):
            block.moe.experts.up_ELD.normal_()
    save = dict(save_optimizer=False, save_param_scheduler=False)
    first.save_checkpoint(first.work_dir, "first.pth", **save)
    path = f"{first.work_dir}/first.pth"

    def load(**options):
        runner, logged = make_runner(moe="damex_best", load_from=path, **options), []
        monkeypatch.setattr(runner.logger, "warning", logged.append)
        runner.load_or_resume()
        return runner, logged

    _, logged = load(**{"moe.num_experts": 4})
    assert logged == [
        f"{path}: 2 experts per layer of the checkpoint become 4: 0 (street) from 0, 1 "
        "(street) new, 2 (park) from 1, 3 (park) new; new ones are newly "
        "initialized."
    ]
    assert load(mixture=two_datasets)[1] == []
    second, logged = load(mixture=two_datasets[::-1])
    assert [line.split(": ")[1] for line in logged] == [
        "classes",
        "experts of datasets",
    ]
    old, new = label_space_of(first.cfg), label_space_of(second.cfg)
    assert old.classes != new.classes
    order = [old.classes.index(name) for name in new.classes]
    heads = (runner.model.bbox_head.cls_branches for runner in (first, second))
    for before, after in zip(*heads, strict=True):
        assert torch.equal(before.weight[order], after.weight)
    order = [old.group_names.index(name) for name in new.group_names]
    pairs = zip(moe_blocks(first.model), moe_blocks(second.model), strict=True)
    for before, after in pairs:
        assert torch.equal(before.moe.experts.up_ELD[order], after.moe.experts.up_ELD)
