"""Property tests of damex.moe.layer."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from damex.moe import BiasBalancer, ExpertCapacity, LoadBalanceLoss, Packing, TopKGate
from damex.papers.dense_gates import DenseSoftmaxGate, DenseToSparseGate
from damex.papers.expert_choice import ExpertChoiceGate
from tests.test_moe.layers import (
    CAPPED,
    GATES,
    LAYERS,
    ROUTERS,
    D,
    E,
    H,
    begun,
    every_layer,
    make_batch,
    make_layer,
    train_step,
)

MORE_GATES = {
    **CAPPED,
    "dense to dense": lambda: begun(DenseToSparseGate(threshold=0.0), 1.0),
}


class Reordered(nn.Module):
    """A router whose experts stand in another order."""

    def __init__(self, router, order):
        super().__init__()
        self.router, self.order, self.num_experts = router, order, len(order)

    def forward(self, tokens):
        return self.router(tokens)[..., self.order]


def test_the_layers_with_a_capacity_drop_something():
    for gate in CAPPED.values():
        _, record = make_layer(gate).eval()(make_batch()[0])
        assert record.assignment.dropped.num_routes > 0


# Enough room for all: with less, tokens would lose their only expert.
ONE_EXPERT_GATES = {
    "top1": GATES["top1"],
    "top1 with room": lambda: TopKGate(1, capacity=ExpertCapacity(factor=1.0)),
    "top1 balanced": lambda: TopKGate(1, balance=BiasBalancer(1)),
    "dense": DenseSoftmaxGate,
    "dense to sparse": GATES["dense to sparse"],
    "expert choice of all": lambda: ExpertChoiceGate(share=1.0, weights="one"),
}


@pytest.mark.parametrize("gate", ONE_EXPERT_GATES.values(), ids=ONE_EXPERT_GATES)
def test_one_expert_equals_the_dense_ffn(gate):
    layer = make_layer(gate, num_experts=1, group_experts=None, losses=())
    tokens, _ = make_batch()
    dense = layer.experts.forward_expert(tokens, expert=0)
    torch.testing.assert_close(layer(tokens)[0], dense)


@every_layer
def test_output_is_the_weighted_sum_over_routes(parts):
    layer = make_layer(**parts).eval()
    tokens, _ = make_batch()
    out, record = layer(tokens)
    rows = tokens.flatten(0, 1)
    expected = torch.zeros_like(rows)
    if layer.shared_expert is not None:
        expected = layer.shared_expert(rows)
    routes = record.assignment
    for token, expert, weight in zip(
        routes.token_index_R, routes.expert_index_R, routes.weight_R, strict=True
    ):
        row = layer.experts(rows[token].unsqueeze(0), torch.eye(E).long()[expert])
        expected[token] = expected[token] + weight * row[0]
    torch.testing.assert_close(out.flatten(0, 1), expected)


@every_layer
def test_permuting_tokens_permutes_outputs(parts):
    layer = make_layer(**parts).eval()
    tokens, _ = make_batch()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    out, _ = layer(tokens)
    shuffled, _ = layer(tokens[:, order])
    torch.testing.assert_close(shuffled, out[:, order])


@every_layer
def test_permuting_experts_changes_nothing(parts):
    layer = make_layer(**parts).eval()
    tokens, _ = make_batch()
    out, _ = layer(tokens)
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.copy_(parameter[order].clone())
    layer.router = Reordered(layer.router, order)
    if parts["gate"] is GATES["top2 balanced"]:
        layer.gate.balance.bias_E = layer.gate.balance.bias_E[order]
    permuted, _ = layer(tokens)
    torch.testing.assert_close(permuted, out)


@every_layer
@pytest.mark.parametrize(
    ("content", "amount"), [(0.0, 1), (100.0, 6), (torch.nan, 1)], ids=str
)
def test_padding_changes_no_output_loss_or_gradient(parts, content, amount):
    layer = make_layer(**parts)
    tokens, group_ids = make_batch()
    padding = torch.full((2, amount, D), content)
    padded = torch.cat([tokens, padding], dim=1)
    mask = torch.arange(7 + amount).expand(2, -1) < 7
    plain = train_step(layer, tokens, group_ids_B=group_ids)
    out, losses, grads = train_step(
        layer, padded, group_ids_B=group_ids, packing=Packing.of_mask(mask)
    )
    assert torch.equal(out[:, 7:], torch.zeros(2, amount, D))
    # Sums may run in another order: of a softmax over a longer row, with the width of
    # the CPU's vectors, and of the gradients of a router's logits.
    step = (out[:, :7], losses, grads)
    torch.testing.assert_close(step, plain, rtol=1e-6, atol=1e-6)


@every_layer
def test_padded_tokens_get_zero_gradients_even_if_nan(parts):
    layer = make_layer(**parts)
    tokens, group_ids = make_batch()
    tokens[0, 2:] = torch.nan
    tokens.requires_grad_()
    mask = ~tokens.isnan().any(dim=2)
    train_step(layer, tokens, group_ids_B=group_ids, packing=Packing.of_mask(mask))
    assert torch.equal(tokens.grad[~mask], torch.zeros(5, D))
    assert (tokens.grad[mask] != 0).any(dim=1).all()


@every_layer
def test_evaluation_is_deterministic_and_ignores_groups(parts):
    layer = make_layer(**parts).eval()
    tokens, group_ids = make_batch()
    out, record = layer(tokens)
    again, _ = layer(tokens)
    with_ids, record_with_ids = layer(tokens, group_ids_B=group_ids)
    assert torch.equal(out, again)
    assert torch.equal(out, with_ids)
    assert record.losses == record_with_ids.losses == {}
    assert record.group_ids_V is None
    assert record_with_ids.group_ids_V.tolist() == [0] * 7 + [1] * 7


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in CAPPED])
def test_images_of_a_batch_are_independent_in_evaluation(name):
    layer = make_layer(**LAYERS[name]).eval()
    tokens, _ = make_batch(3)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3, [True] * 7])
    together, _ = layer(tokens, packing=Packing.of_mask(mask))
    for image in range(3):
        alone, _ = layer(
            tokens[image : image + 1], packing=Packing.of_mask(mask[image : image + 1])
        )
        torch.testing.assert_close(together[image], alone[0])


@every_layer
@pytest.mark.parametrize("num_tokens", [0, 7], ids=["no tokens", "only padding"])
def test_gradients_exist_without_any_real_token(parts, num_tokens):
    layer = make_layer(**parts)
    packing = None
    if num_tokens > 0:
        packing = Packing.of_mask(torch.zeros(2, num_tokens, dtype=torch.bool))
    tokens, ids = make_batch(num_tokens=num_tokens)
    out, losses, grads = train_step(layer, tokens, group_ids_B=ids, packing=packing)
    assert torch.equal(out, torch.zeros(2, num_tokens, D))
    assert {loss.item() for loss in losses.values()} == {0.0}
    assert not any(grad.any() for grad in grads.values())


# One token alone has no place at an expert with 0.75 places.
@pytest.mark.parametrize("name", [n for n in LAYERS if n != "top2 with a capacity"])
def test_exactly_the_experts_with_tokens_get_gradients(name):
    layer = make_layer(**LAYERS[name], losses=())
    tokens, _ = make_batch(1, 1)
    torch.manual_seed(3)  # as train_step
    used_E = layer(tokens)[1].assignment.counts_E > 0
    _, _, grads = train_step(layer, tokens)
    assert used_E.any()
    for name, grad in grads.items():
        if name.startswith("experts."):
            assert torch.equal((grad != 0).flatten(1).any(1), used_E), name


def test_loss_weights_and_names():
    losses = [LoadBalanceLoss(weight=2.0, name="a"), LoadBalanceLoss(name="b")]
    _, record = make_layer(losses=losses)(make_batch()[0])
    assert record.losses["a"].item() == pytest.approx(200 * record.losses["b"].item())


@every_layer
def test_copies_after_a_forward(parts):
    layer = make_layer(**parts)
    tokens, group_ids = make_batch()
    layer(tokens, group_ids_B=group_ids)
    layer.eval()
    out, _ = layer(tokens)
    fresh = make_layer(**parts, seed=9).eval()
    assert not torch.equal(fresh(tokens)[0], out)
    fresh.load_state_dict(layer.state_dict())
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert torch.equal(copied(tokens)[0], out)


def test_state_dict_holds_full_experts_and_the_group_map():
    state = make_layer().state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "group_experts_GE": (3, E),
        "router.weight_ED": (E, D),
        "router.bias_E": (E,),
        "experts.w1_EDH": (E, D, H),
        "experts.b1_EH": (E, H),
        "experts.w2_EHD": (E, H, D),
        "experts.b2_ED": (E, D),
    }


@every_layer
def test_autocast_keeps_float32_routing_and_the_same_choices(parts):
    layer = make_layer(**parts).eval()
    tokens, _ = make_batch(4, 50)
    out, record = layer(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half_out, half_record = layer(tokens)
    assert half_record.logits_VE.dtype == torch.float32
    assert torch.equal(half_record.logits_VE, record.logits_VE)
    assert torch.equal(
        half_record.assignment.expert_index_R, record.assignment.expert_index_R
    )
    assert half_out.dtype == torch.float32
    assert not torch.equal(half_out, out)
    torch.testing.assert_close(half_out, out, rtol=0.05, atol=0.05)


@every_layer
def test_training_under_autocast_gives_every_parameter_a_float32_gradient(parts):
    layer = make_layer(**parts)
    tokens, group_ids = make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, losses, grads = train_step(layer, tokens, group_ids_B=group_ids)
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    assert {grad.dtype for grad in grads.values()} == {torch.float32}


@every_layer
def test_bfloat16_tokens_come_back_as_bfloat16(parts):
    layer = make_layer(**parts).to(torch.bfloat16).eval()
    tokens = make_batch()[0].to(torch.bfloat16)
    out, record = layer(tokens)
    assert out.dtype == torch.bfloat16
    logits = layer.router.float()(tokens.float()).flatten(0, 1)
    # The temperature of the cosine router is a bfloat16 itself.
    rtol = 0.01 if parts.get("router") is ROUTERS["cosine"] else 1e-5
    torch.testing.assert_close(record.logits_VE, logits, rtol=rtol, atol=1e-5)


# Noise is drawn anew at every call, which finite differences cannot follow.
@pytest.mark.parametrize("name", [name for name in LAYERS if "noisy" not in name])
def test_float64_gradcheck_of_the_whole_layer(name):
    layer = make_layer(**LAYERS[name]).double()
    tokens = make_batch(2, 3)[0].double().requires_grad_()
    group_ids = torch.tensor([0, 1])
    mask = torch.tensor([[True, True, True], [True, False, True]])

    def step(tokens_BND, *_):
        out, record = layer(
            tokens_BND, packing=Packing.of_mask(mask), group_ids_B=group_ids
        )
        return out, *record.losses.values()

    inputs = (tokens, *layer.parameters())
    assert torch.autograd.gradcheck(step, inputs, fast_mode=True)


@every_layer
def test_gradient_checkpointing_gives_the_same_losses_and_gradients(parts):
    layer = make_layer(**parts)
    tokens, group_ids = make_batch()
    plain = train_step(layer, tokens, group_ids_B=group_ids)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, x, **kwargs):
            return checkpoint(self.inner, x, use_reentrant=False, **kwargs)

    out, losses, grads = train_step(Checkpointed(), tokens, group_ids_B=group_ids)
    assert torch.equal(out, plain[0])
    assert all(torch.equal(losses[name], plain[1][name]) for name in losses)
    for name, grad in plain[2].items():
        assert torch.equal(grads[f"inner.{name}"], grad), name


@every_layer
def test_reset_parameters_repairs_a_blanket_initialisation(parts):
    layer = make_layer(**parts)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 7.0)
    layer.reset_parameters()
    assert all((parameter != 7.0).all() for parameter in layer.parameters())


def test_bad_inputs():
    layer, (tokens, group_ids) = make_layer(), make_batch()
    with pytest.raises(ValueError, match=r"\['dataset_routing'\] need group_ids_B"):
        layer(tokens)
    with pytest.raises(ValueError, match=r"\(B, N, D\), got shape \(7, 8\)"):
        layer(tokens[0], group_ids_B=group_ids)
    mask = torch.ones(7, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"7 images with 2 tokens each, .* 2 with 7"):
        layer(tokens, packing=Packing.of_mask(mask), group_ids_B=group_ids)
    with pytest.raises(ValueError, match=r"bool of shape \(2, 7\), got torch.bool"):
        layer(tokens, foreground_BN=mask, group_ids_B=group_ids)
    with pytest.raises(ValueError, match=r"int64 of shape \(2,\).* shape \(1,\)"):
        layer(tokens, group_ids_B=group_ids[:1])
    with pytest.raises(ValueError, match=r"lie in \[-1, 3\).* got \[0, 3\]"):
        layer(tokens, group_ids_B=torch.tensor([0, 3]))


@pytest.mark.parametrize("name", [*GATES, *MORE_GATES])
def test_gates_tell_whether_every_token_has_as_many_routes(name):
    """By what a loss needs of them: a known number of routes per token."""
    gate = {**GATES, **MORE_GATES}[name]()
    found = gate(torch.randn(7, E)).routes_per_token is not None
    assert gate.has_fixed_routes == found
