import copy

import pytest
import torch
from torch import nn

from damex.moe import GatedConv2d, GatingPath, ShallowEmbedding, gate_l1


@pytest.fixture
def path():
    torch.manual_seed(0)
    return GatingPath(ShallowEmbedding(3, widths=(4, 4)), {"stage.0": 5, "stage.1": 7})


@pytest.fixture
def images_BCHW():
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_one_embedding_feeds_a_gate_per_layer(path, images_BCHW):
    gates = path.eval()(images_BCHW)
    assert torch.equal(gates.logits_BE, path.embedding(images_BCHW))
    assert {name: g.shape for name, g in gates.layers.items()} == {
        "stage.0": (4, 5),
        "stage.1": (4, 7),
    }
    weight_CE = path.state_dict()["heads.stage_1.weight_CE"]
    expected_BC = (gates.logits_BE @ weight_CE.t()).clamp(min=0)
    torch.testing.assert_close(gates.layers["stage.1"], expected_BC)


def test_stage_two_leaves_the_gating_path_bit_identical(path, images_BCHW):
    """Batch norm statistics too, in training mode and with weight decay."""
    base = GatedConv2d(nn.Conv2d(3, 5, 3), norm=nn.BatchNorm2d(5))
    model = nn.ModuleDict(dict(path=path, base=base))
    path.freeze()
    before = copy.deepcopy(model.state_dict())
    model.train()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1
    )
    for _ in range(2):
        gates_BC = path(images_BCHW).layers["stage.0"]
        base(images_BCHW, gates_BC).square().sum().backward()
        optimizer.step()
    after = model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert {name.split(".")[0] for name in changed} == {"base"}
    assert "base.conv.weight" in changed


def test_stage_one_trains_all_of_it(path, images_BCHW):
    path.train()
    gates = path(images_BCHW)
    before = path.embedding.norms[0].running_mean.clone()
    gate_l1(list(gates.layers.values())).backward()
    assert [n for n, p in path.named_parameters() if p.grad is None] == []
    path(images_BCHW)
    assert not torch.equal(path.embedding.norms[0].running_mean, before)


def test_a_frozen_copy_stays_frozen(path):
    path.freeze()
    other = copy.deepcopy(path)
    other.train()
    assert not other.embedding.norms[0].training


def test_layers_are_needed():
    with pytest.raises(ValueError, match="one or more layers"):
        GatingPath(ShallowEmbedding(3), {})
