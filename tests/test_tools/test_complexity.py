"""Counts of a real detector against sums by hand."""

import runpy
import sys
from pathlib import Path

import mmdet
import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn

from tools.analysis.complexity import app, count_complexity

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "damex_dino" / "damex-dino-4scale_r50_8xb2-12e_coco-voc.py"
TINY = CONFIG.with_name("damex-dino-tiny_r18_1xb8-4e_toy.py")
MMDET_CONFIGS = Path(mmdet.__file__).parent / ".mim" / "configs"
# The tiny detector: 64 channels, FFN of 256, 50 queries, 3 levels of 128 x 128 pixels.
FFN = 64 * 256 + 256 + 256 * 64 + 64
FFN_FLOPS_PER_TOKEN = 2 * (64 * 256 + 256 * 64)
QUERIES = 50
ENCODER_TOKENS = 16 * 16 + 8 * 8 + 4 * 4


def build(moe):
    model = Config.fromfile(TINY).model
    model.bbox_head.num_classes = 7
    torch.manual_seed(0)
    return MODELS.build({**model, "moe": moe, "num_groups": 4 if moe else None})


def count(moe):
    parts = count_complexity(build(moe), height=128, width=128)
    return {part.name: part for part in parts}


@pytest.fixture(scope="module")
def dense():
    return count(None)


def test_dense_parts_add_up_and_all_parameters_are_active(dense):
    detector = build(None)
    total = sum(p.numel() for p in detector.parameters())
    assert sum(part.parameters for part in dense.values()) == total
    assert all(p.active_parameters == p.parameters for p in dense.values())


def experts_of(**moe):
    return dict(dict(layers=dict(decoder=[1]), num_experts=4), **moe)


def fine(routed):
    return dict(
        layers=dict(decoder=[1]),
        fine_grained=dict(parts=4, shared=4 - routed, copies=5),
    )


ROUTER = 4 * 64
QUARTER = 64 * 64 + 64 + 64 * 64  # every private expert has an output bias, too
SHARED = dict(shared_expert=dict(type="SharedExpert"))
LOW_RANK = dict(type="LowRankExperts", rank=8)
# What it adds to the dense part: parameters, active ones, operations.
COSTS = {
    **{
        name: (
            "decoder",
            experts_of(gate=gate),
            3 * FFN + ROUTER,
            (k - 1) * FFN + ROUTER,
            QUERIES * ((k - 1) * FFN_FLOPS_PER_TOKEN + 2 * ROUTER),
        )
        for name, gate, k in (
            ("top1", dict(type="TopKGate", k=1), 1),
            ("top3", dict(type="TopKGate", k=3), 3),
            ("dense", dict(type="DenseSoftmaxGate"), 4),
        )
    },
    **{
        f"{k} of 4 parts routed": (
            "decoder",
            fine(k),
            4 * k * QUARTER + 5 * k * (64 + 64),
            k * 64 + 5 * k * 64,
            QUERIES * 2 * 5 * k * 64,
        )
        for k in (1, 2)
    },
    "low rank": (
        "decoder",
        experts_of(experts=LOW_RANK, **SHARED),
        4 * 2 * 64 * 8 + ROUTER,
        2 * 64 * 8 + ROUTER,
        QUERIES * (2 * 2 * 64 * 8 + 2 * ROUTER),
    ),
    "expert choice": (  # 4 experts x 21 of 336 tokens each: a quarter
        "encoder",
        experts_of(
            layers=dict(encoder=[0]), gate=dict(type="ExpertChoiceGate", num_tokens=21)
        ),
        3 * FFN + ROUTER,
        ROUTER - FFN * 3 // 4,
        ENCODER_TOKENS * 2 * ROUTER - (ENCODER_TOKENS - 84) * FFN_FLOPS_PER_TOKEN,
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_experts_cost_what_a_token_meets(dense, name):
    part, moe, *expected = COSTS[name]
    found, plain = count(moe)[part], dense[part]
    fields = ("parameters", "active_parameters", "flops")
    assert [getattr(found, f) - getattr(plain, f) for f in fields] == expected


def test_patch_experts_are_active_by_the_patches_they_take():
    # Each of 4 experts takes 1 of the 4 patches of the last 4 x 4 map: a quarter.
    moe = dict(
        layers=dict(backbone=[3]),
        num_experts=4,
        gate=dict(type="ExpertChoiceGate", num_tokens=1),
        experts=dict(type="PatchConvExperts", patch_size=2),
    )
    backbone = count(moe)["backbone"]
    experts = 256 * 256 * 3 * 3
    assert backbone.parameters - backbone.active_parameters == experts * 3 // 4


def test_counting_leaves_the_detector_as_it_was():
    detector = build(dict(layers=dict(decoder=[1]), num_experts=4)).train()
    detector.init_weights()  # mmdet leaves some memory as it is, which may be NaN
    before = {k: v.clone() for k, v in detector.state_dict().items()}
    count_complexity(detector, height=64, width=64)
    assert detector.training
    assert not any(m._forward_hooks for m in detector.modules())
    after: nn.Module = detector
    assert all(torch.equal(before[k], v) for k, v in after.state_dict().items())


def test_the_command_counts_a_config_without_its_datasets(monkeypatch, capsys):
    arguments = [str(CONFIG), "--classes", "80", "--shape", "192", "256"]
    monkeypatch.setattr(sys, "argv", ["complexity.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "tools/analysis/complexity.py"), run_name="__main__")
    assert end.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("one image of 192 x 256")
    rows = {
        cells[0]: cells[1:]
        for line in output.splitlines()
        if (cells := [cell.strip() for cell in line.split("│")[1:-1]])
    }
    # Two experts of 256-2048-256 in three layers; one of two is active.
    ffn = (256 * 2048 + 2048 + 2048 * 256 + 256) / 1e6
    parameters, active, dense = map(float, rows["decoder"][:3])
    assert parameters - dense == pytest.approx(3 * ffn, abs=0.003)
    assert active - dense == pytest.approx(0, abs=0.003)


def test_options_about_datasets_are_counted_without_them(capsys):
    options = ["--cfg-options", "model.dataset_head.loss_weight=1.0", "moe=dense"]
    size = ["--classes", "3", "--groups", "40", "--shape", "64", "64"]
    app(["quickstart", *size, *options])
    (row,) = (r for r in capsys.readouterr().out.splitlines() if "awareness" in r)
    # For each group the head has 64 weights and a bias.
    assert float(row.split("│")[2]) == pytest.approx(40 * (64 + 1) / 1e6, abs=5e-4)


def test_a_detector_of_mmdet_is_its_own_dense_one(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    plain = MMDET_CONFIGS / "detr/detr_r50_8xb2-150e_coco.py"
    app([str(plain), "--shape", "64", "64"])
    total = capsys.readouterr().out.splitlines()[-2]
    parameters, _, dense = [float(cell) for cell in total.split("│")[2:5]]
    assert parameters == dense == pytest.approx(41.6, abs=0.1)  # DETR's 41 M
