"""Algorithm 1 from ``optim_wrapper`` on the tiny detector and in whole runs."""

import copy
from pathlib import Path

import mmdet.registry
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.optim.scheduler import CosineAnnealingLR, LinearLR
from torch import nn

from damex.errors import ConfigError
from damex.models.insertion import moe_blocks
from damex.moe import FFNExperts, LinearRouter, MoELayer, TopKGate, expert_parameters
from damex.papers.expert_choice import ExpertChoiceGate

ROOT = Path(__file__).parents[2]
SCHEDULE = "_base_/schedules/adamw_tiny_normalized_experts.py"
PLAIN = dict(
    optimizer=dict(type="AdamW", lr=0.01, weight_decay=0.1),
    clip_grad=dict(max_norm=0.1, norm_type=2),
)
SPLIT = dict(
    PLAIN,
    constructor="ExpertOptimWrapperConstructor",
    experts=dict(type="NormalizedGD", lr=0.5),
)


class Model(nn.Module):
    """Two MoE layers between two linear ones; expert 2 of the first gets no token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList(
            MoELayer(
                router=LinearRouter(4, 3, bias=True),
                gate=gate,
                experts=FFNExperts(3, 4, 6),
            )
            for gate in (TopKGate(1), ExpertChoiceGate(num_tokens=3))
        )
        self.head = nn.Linear(4, 1)
        with torch.no_grad():
            self.layers[0].router.bias_E[2] = -99.0

    def forward(self, tokens_BND):
        x = self.stem(tokens_BND)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x).square().sum()


def step(model, wrapper, seed=0):
    tokens = torch.randn(2, 20, 4, generator=torch.Generator().manual_seed(seed))
    wrapper.update_params(model(tokens))


def moved_LE(before, model):
    rows = []
    for old, new in zip(before.layers, model.layers, strict=True):
        pairs = zip(old.experts.parameters(), new.experts.parameters(), strict=True)
        squares = [(b - a).double().flatten(1).square().sum(1) for a, b in pairs]
        rows.append(sum(squares).sqrt())
    return torch.stack(rows).detach()


def test_experts_move_by_lr_and_the_rest_as_plain_adamw_moves_it():
    model = Model()
    plain, start = copy.deepcopy(model), copy.deepcopy(model)
    wrapper = build_optim_wrapper(model, copy.deepcopy(SPLIT))
    step(model, wrapper)
    step(plain, build_optim_wrapper(plain, copy.deepcopy(PLAIN)))
    expected = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(moved_LE(start, model), expected, rtol=1e-5, atol=0)
    theirs = dict(plain.named_parameters())
    others = [name for name, _ in model.named_parameters() if ".experts." not in name]
    assert len(others) == 8
    for name, parameter in model.named_parameters():
        if name in others:
            assert torch.equal(parameter, theirs[name]), name


def test_schedulers_move_both_learning_rates():
    wrapper = build_optim_wrapper(Model(), copy.deepcopy(SPLIT))
    LinearLR(wrapper, start_factor=0.1, by_epoch=False, begin=0, end=10)
    lrs = [group["lr"] for group in wrapper.optimizer.param_groups]
    assert lrs == pytest.approx([0.001, 0.05, 0.05])
    assert wrapper.get_lr()["base_lr"] == pytest.approx([0.001])
    cosine = build_optim_wrapper(Model(), copy.deepcopy(SPLIT))
    scheduler = CosineAnnealingLR(cosine, T_max=2, eta_min_ratio=0.02, by_epoch=False)
    cosine.step()
    scheduler.step()
    # halfway between the whole and 2 percent of it
    lrs = [group["lr"] for group in cosine.optimizer.param_groups]
    assert lrs == pytest.approx([0.0051, 0.255, 0.255])


def test_a_factor_of_custom_keys_reaches_its_experts():
    paramwise = dict(
        custom_keys={"layers.1": dict(lr_mult=0.1), "stem": dict(lr_mult=0.2)},
        norm_decay_mult=0.0,
    )
    model = Model()
    start = copy.deepcopy(model)
    wrapper = build_optim_wrapper(
        model, copy.deepcopy(dict(SPLIT, paramwise_cfg=paramwise))
    )
    step(model, wrapper)
    expected = torch.tensor([[0.5, 0.5, 0.0], [0.05] * 3], dtype=torch.float64)
    torch.testing.assert_close(moved_LE(start, model), expected, rtol=1e-5, atol=0)
    lrs = {id(g["params"][0]): g["lr"] for g in wrapper.optimizer.param_groups}
    assert lrs[id(model.stem.weight)] == pytest.approx(0.002)
    assert lrs[id(model.layers[1].router.weight_ED)] == pytest.approx(0.001)
    assert lrs[id(model.head.weight)] == pytest.approx(0.01)
    # every parameter once: 2 banks and 8 others
    assert len(wrapper.optimizer.param_groups) == 10


@pytest.mark.parametrize("paramwise", [None, dict(norm_decay_mult=0.0)])
def test_frozen_experts_stay_as_they_are(paramwise):
    model = Model()
    model.layers[0].experts.requires_grad_(False)
    model.layers[1].experts.b2_ED.requires_grad_(False)
    start = copy.deepcopy(model)
    cfg = copy.deepcopy(dict(SPLIT, paramwise_cfg=paramwise))
    wrapper = build_optim_wrapper(model, cfg)
    step(model, wrapper)
    expected = torch.tensor([[0.0] * 3, [0.5] * 3], dtype=torch.float64)
    torch.testing.assert_close(moved_LE(start, model), expected, rtol=1e-5, atol=0)
    held = [p for group in wrapper.optimizer.param_groups for p in group["params"]]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {*map(id, held)} == {*map(id, trained)}
    assert len(held) == len(trained)


def test_accumulated_gradients_make_one_step():
    model = Model()
    start = copy.deepcopy(model)
    wrapper = build_optim_wrapper(
        model, copy.deepcopy(dict(SPLIT, accumulative_counts=2))
    )
    step(model, wrapper)
    assert moved_LE(start, model).sum() == 0
    step(model, wrapper, seed=1)
    assert moved_LE(start, model).max().item() == pytest.approx(0.5)


@pytest.mark.parametrize("moe", ["damex", "pmoe_conv"])
def test_one_step_of_the_shipped_schedule_on_a_detector(moe, build):
    detector = build(moe=moe)
    cfg = Config.fromfile(ROOT / "configs" / SCHEDULE).optim_wrapper
    wrapper = build_optim_wrapper(detector, cfg)
    banks, _ = expert_parameters(detector)
    assert len(banks) == len(moe_blocks(detector)) == 2
    before = [[p.detach().clone() for p in bank["params"]] for bank in banks]
    total = sum(p.square().sum() for bank in banks for p in bank["params"])
    wrapper.update_params(total)
    for old, bank in zip(before, banks, strict=True):
        pairs = zip(old, bank["params"], strict=True)
        squares = [(b - a).double().flatten(1).square().sum(1) for a, b in pairs]
        lengths_E = sum(squares).sqrt().detach()
        torch.testing.assert_close(
            lengths_E, torch.full_like(lengths_E, 0.05), rtol=1e-4, atol=0
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(experts=None), "needs optim_wrapper.experts .*got None"),
        (
            dict(experts=dict(type="NormalisedGD", lr=0.1)),
            "unknown type 'NormalisedGD'; did you mean 'NormalizedGD'",
        ),
        (dict(experts=dict(type="NormalizedGD")), "learning rate lr of 0 or more"),
        (dict(experts=dict(lr=0.1)), "with a type .*0.1"),
        (dict(experts=dict(type="NormalizedGD", lr=-1)), "0 or more, .*-1"),
        (
            dict(experts=dict(type="NormalizedGD", lr=0.1, betas=1)),
            "optim_wrapper.experts = .*betas",
        ),
        (
            dict(paramwise_cfg=dict(custom_keys={"w1_EDH": dict(lr_mult=0.1)})),
            r"different factors .*0.experts.w1_EDH': 0.1",
        ),
    ],
)
def test_a_config_that_cannot_work_names_field_and_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_optim_wrapper(Model(), copy.deepcopy({**SPLIT, **changes}))


def test_an_optimizer_of_a_user_is_known(monkeypatch):
    registry = mmdet.registry.OPTIMIZERS  # where mmdet's pages register it
    monkeypatch.setitem(registry.module_dict, "Mine", torch.optim.SGD)
    experts = dict(type="Mine", lr=0.1)
    wrapper = build_optim_wrapper(Model(), copy.deepcopy({**SPLIT, "experts": experts}))
    assert type(wrapper.optimizer.optimizers[1]) is torch.optim.SGD


def test_a_model_without_trained_experts_is_refused():
    frozen = Model()
    for layer in frozen.layers:
        layer.experts.requires_grad_(False)
    for model in (frozen, nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match=r"dense \(moe=None\) or all its experts"):
            build_optim_wrapper(model, copy.deepcopy(SPLIT))


@pytest.mark.parametrize("moe", [None, "damex_best"])
@pytest.mark.parametrize("paramwise", [None, {"ffn": dict(lr_mult=0.1)}])
def test_muon_takes_attention_and_ffns_of_all_experts_and_no_other(
    moe, paramwise, build
):
    detector = build(moe=moe)
    cfg = dict(PLAIN, constructor="MuonOptimWrapperConstructor")
    if paramwise:
        cfg["paramwise_cfg"] = dict(custom_keys=paramwise)
    wrapper = build_optim_wrapper(detector, copy.deepcopy(cfg))
    names = {id(p): name for name, p in detector.named_parameters()}
    rates = [
        {
            names[id(p)]: (g["lr"], g["weight_decay"])
            for g in groups
            for p in g["params"]
        }
        for groups in (one.param_groups for one in wrapper.optimizer.optimizers)
    ]
    layers = nn.ModuleList([*detector.encoder.layers, *detector.decoder.layers])
    expected = [m.weight for m in layers.modules() if isinstance(m, nn.Linear)]
    attention = (m for m in layers.modules() if isinstance(m, nn.MultiheadAttention))
    expected += [m.in_proj_weight for m in attention]
    for block in moe_blocks(detector):
        banks = (*block.moe.experts.parameters(), *block.moe.shared_expert.parameters())
        expected += [p for p in banks if p.dim() == 3]
    assert {*rates[1]} == {names[id(p)] for p in expected}
    assert not {*rates[0]} & {*rates[1]}
    assert {*rates[0]} | {*rates[1]} == {*names.values()}
    low = [name for name in rates[1] if paramwise and "ffn" in name]
    assert {rates[1][name] for name in low} <= {(0.001, 0.1)}
    assert {one for name, one in rates[1].items() if name not in low} == {(0.01, 0.1)}


def test_muon_needs_an_encoder_or_decoder():
    cfg = dict(PLAIN, constructor="MuonOptimWrapperConstructor")
    with pytest.raises(ConfigError, match="no matrix in layers of an encoder"):
        build_optim_wrapper(Model(), copy.deepcopy(cfg))
