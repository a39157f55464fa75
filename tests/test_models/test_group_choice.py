"""Who chooses the dataset group, in real detectors."""

import copy

import pytest
import torch

from damex.config_files import merge_options, read_config
from damex.errors import ConfigError
from damex.models.config import read_moe
from damex.models.context import RoutingContext
from damex.models.insertion import insert_moe, moe_blocks
from damex.moe import MoELayer

DATASET_LOSS = dict(type="DatasetRoutingLoss", weight=0.1)
LINEAR = dict(
    layers=dict(encoder=[0], decoder=[0, 2]),
    num_experts=6,
    gate=dict(type="TopKGate", k=1, noise="gaussian"),
    losses=[DATASET_LOSS, dict(type="LoadBalanceLoss")],
)
HIERARCHICAL = {**LINEAR, "router": dict(type="HierarchicalRouter")}
both_routers = pytest.mark.parametrize("moe", [LINEAR, HIERARCHICAL], ids=["lin", "hi"])
SIZES = [(64, 64), (64, 32), (32, 64)]


def groups_of_images(record):
    """The groups that the tokens of each image went to, two experts each."""
    images = record.packing.spread(torch.arange(record.packing.num_images))
    routes = record.assignment
    image_R = images[routes.token_index_R]
    group_R = routes.expert_index_R // 2
    return [
        set(group_R[image_R == b].tolist()) for b in range(record.packing.num_images)
    ]


def spread_routers(detector):
    """Routers that prefer no group in all images: as drawn, logits hardly differ."""
    with torch.no_grad():
        for block in moe_blocks(detector):
            for name, weight in block.moe.router.named_parameters():
                if "weight" in name:
                    weight.mul_(20.0)
    return detector


@both_routers
@pytest.mark.parametrize("with_cp", [False, True])
def test_a_forced_detector_trains_inside_of_its_groups(
    build, make_batch, records, run_loss, total, moe, with_cp
):
    detector = spread_routers(
        build(moe={**moe, "teacher_forcing": True, "with_cp": with_cp})
    )
    batch = make_batch([2, 0, 1], sizes=SIZES)
    losses = run_loss(detector, batch)
    for record in records.values():
        assert groups_of_images(record) == [{2}, {0}, {1}]
    # What the router would do by itself, which has learned nothing yet.
    assert losses["moe_routing_accuracy"] < 1.0
    assert losses["loss_moe_dataset_routing"] > 0
    total(losses).backward()
    for name, parameter in detector.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@both_routers
def test_an_image_vote_holds_in_all_layers_and_is_what_metrics_report(
    build, make_batch, records, run_predict, moe
):
    detector = spread_routers(build(moe={**moe, "image_vote": True}))
    samples = run_predict(detector, make_batch([None] * 3, sizes=SIZES))
    votes_BG = 0.0
    for record in records.values():
        own_VG = record.probs_VE.double().view(-1, 3, 2).sum(2).log()
        votes_BG = votes_BG + record.packing.unpack(own_VG).sum(1)
        torch.testing.assert_close(record.votes_BG, votes_BG, rtol=1e-4, atol=1e-4)
        winners = votes_BG.argmax(1).tolist()
        assert groups_of_images(record) == [{winner} for winner in winners]
        free_V = record.probs_VE.view(-1, 3, 2).sum(2).argmax(1)
        assert free_V.unique().numel() > 1  # there is something to outvote
    assert list(records) == ["encoder.0", "decoder.0", "decoder.2"]
    for sample, winner in zip(samples, winners, strict=True):
        other = [e for e in range(6) if e // 2 != winner]
        counts = sample.routing_counts["decoder.2"]
        assert sum(counts) == 50
        assert sum(counts[e] for e in other) == 0


@both_routers
def test_the_oracle_predicts_by_the_dataset_and_alone_reads_it(
    build, make_batch, records, run_predict, moe
):
    detector = spread_routers(build(moe={**moe, "oracle": True}))
    found = []
    for groups in ([2, 0, 1], [0, 1, 2]):
        samples = run_predict(detector, make_batch(groups, sizes=SIZES))
        found.append(samples[0].pred_instances.scores)
        for record in records.values():
            assert groups_of_images(record) == [{g} for g in groups]
    assert not torch.equal(*found)
    with pytest.raises(ConfigError, match="a sample has no group_id") as caught:
        run_predict(detector, make_batch([0, None, 1], sizes=SIZES))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(), None),
        (dict(image_vote=True), None),
        (dict(teacher_forcing=True), None),
        (dict(oracle=True), "ALL SCORES ARE AN UPPER BOUND"),
        (dict(teacher_forcing=True, losses=[]), "nothing teaches the router"),
        (dict(teacher_forcing=True, num_experts=3), "datasets decide the load"),
    ],
)
def test_what_would_mislead_is_said_in_one_line(build, options, said):
    config = read_moe({**LINEAR, **options})
    report = insert_moe(build(moe=None), config, context=RoutingContext(), num_groups=3)
    assert len(report.notes) == (said is not None)
    if said is not None:
        assert said in report.notes[0]
        assert "\n" not in report.notes[0]


@pytest.mark.parametrize("option", ["teacher_forcing", "image_vote", "oracle"])
def test_options_change_no_parameter_key_or_random_number(
    build, make_batch, run_loss, option
):
    plain, other = build(moe=LINEAR), build(moe={**LINEAR, option: True})
    assert list(plain.state_dict()) == list(other.state_dict())
    other.load_state_dict(plain.state_dict())
    for detector in (plain, other):
        detector.draws = run_loss(detector, make_batch([0, 1])), torch.rand(3)
    assert torch.equal(plain.draws[1], other.draws[1])
    if option != "teacher_forcing":
        assert other.resolved_moe() == plain.resolved_moe()  # the same experts
        for name, value in plain.draws[0].items():
            assert torch.equal(value, other.draws[0][name]), name


@pytest.mark.parametrize(
    ("changes", "num_groups", "message"),
    [
        (dict(), None, "moe.teacher_forcing needs dataset groups, but there is no"),
        (dict(gate=dict(type="TopKGate", k=3)), 3, "k=3 and a group has 2; set k=2"),
        (dict(losses=(), num_experts=2), 3, "has 3 dataset groups but moe.num_experts"),
    ],
)
def test_errors_are_one_line(build, changes, num_groups, message):
    moe = {**LINEAR, "losses": [], "teacher_forcing": True, **changes}
    with pytest.raises(ConfigError, match=message) as caught:
        build(moe=moe, num_groups=num_groups)
    assert "\n" not in str(caught.value)


def test_ddq_forces_auxiliary_queries_too(
    build_mmdet, make_batch, run_loss, monkeypatch
):
    records = []
    route = MoELayer.route

    def listen(self, *args, **kwargs):
        records.append(route(self, *args, **kwargs))
        return records[-1]

    monkeypatch.setattr(MoELayer, "route", listen)
    moe = {**LINEAR, "layers": dict(decoder=[0]), "teacher_forcing": True}
    detector = build_mmdet("MoEDDQDETR", moe=moe, num_groups=3)
    run_loss(detector, make_batch([1, 2]))
    assert len(records) == 2
    for record in records:
        assert groups_of_images(record) == [{1}, {2}]


@pytest.mark.parametrize("place", ["moe", "model.moe"])
@pytest.mark.parametrize("is_resolved", [False, True])
def test_the_command_line_finds_moe_where_the_config_has_it(place, is_resolved):
    cfg = read_config("quickstart")
    if is_resolved:  # as in a work directory
        cfg.model.moe = cfg.pop("moe")
    merge_options(cfg, {f"{place}.oracle": True})
    moe = copy.deepcopy(cfg.model.moe if is_resolved else cfg.moe)
    assert ("moe" in cfg, "moe" in cfg.model) == (not is_resolved, is_resolved)
    assert read_moe(moe).oracle
