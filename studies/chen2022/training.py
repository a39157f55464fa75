"""What is trained, and how: mixtures (Algorithm 1) and single models.

Full size on one thread: a cubic mixture takes about 18 s, a linear one 10 s.

Axes: K clusters, E experts, B samples, C outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from damex.moe import (
    MoELayer,
    NormalizedGD,
    RoutingRecord,
    TopKGate,
    dispatch_counts,
    dispatch_entropy,
    expert_parameters,
)
from studies.chen2022.models import (
    OFFICIAL,
    PAPER,
    PAPER_X10,
    PATCH_DIMS,
    PatchwiseExperts,
    Recipe,
    build_mixture,
    class_margin,
    draw_train_and_test,
    mixture_loss,
)
from studies.cluster_data import ClusterSamples
from studies.harness import Session, seeded

SEEDS = 5
PAPER_SEEDS = 10  # runs behind each mean of Tables 1 and 3
DATA_SEEDS = range(4)
LONG_STEPS = 2000
CURVE_STRIDE = 10
EXPERT_LR, ROUTER_LR = 0.001, 0.1
ENOUGH, WORSE = 0.314, 0.02  # when the code stops early
SINGLE_ACTIVATIONS = ("identity", "cubic", "relu", "celu", "gelu", "tanh")
SINGLE_LR = 0.01
SINGLE_LINEAR_LR = 0.003
SINGLE_WEIGHT_DECAY = 5e-4
SINGLE_INPUT_SCALE = 10.0
CHUNK = 1000  # samples whose hidden values fit into a cache


@dataclass(frozen=True)
class Case:
    """Mixtures that differ in their seed only.

    Attributes:
        recipe: The form.
        setting: Key of `studies.cluster_data.SETTINGS`.
        activation: Of the experts.
        balance: Whether to add the load balance loss.
        data_seed: Of the one set of data that all seeds share, as the authors' code has
            it; None for new data with each seed.
    """

    recipe: Recipe
    setting: str
    activation: str
    balance: bool = False
    data_seed: int | None = None

    @property
    def where(self) -> str:
        """What the report calls the setting."""
        text = f"{self.recipe.name}, setting {self.setting}"
        if self.data_seed is None:
            return text
        return f"{text}, all on the data of seed {self.data_seed}"


@dataclass(frozen=True)
class Single:
    """A single model, trained once as in the paper."""

    setting: str
    activation: str
    num_filters: int = 128


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        num: Samples for training, and as many for test.
        cases: Mixtures with their seeds.
        reasons: Further mixtures, of which nothing is claimed: they tell why others are
            as they are.
        singles: Single models.
        single_steps: Their steps; the code takes 801.
        draws: Draws of noise for Lemma 5.1.
    """

    num: int
    cases: Mapping[Case, range]
    reasons: Mapping[Case, range]
    singles: tuple[Single, ...]
    single_steps: int
    draws: int


def make_plan(session: Session) -> Plan:
    """The full plan, or a quick one with smaller data."""
    if session.quick:
        return _quick_plan(session.seed_range(1))
    both = ("identity", "cubic")
    seeds, published = session.seed_range(SEEDS), session.seed_range(PAPER_SEEDS)
    cases = {Case(OFFICIAL, s, a): published for s in "1234" for a in both}
    cases |= {Case(OFFICIAL, s, "identity", balance=True): seeds for s in "1234"}
    printed = (PAPER_X10, PAPER)
    cases |= {Case(r, s, a): seeds for r in printed for s in "1234" for a in both}
    reasons = {Case(OFFICIAL, "2", "cubic", data_seed=d): seeds for d in DATA_SEEDS}
    longer = replace(PAPER, name=f"paper, {LONG_STEPS} steps", steps=LONG_STEPS)
    reasons[Case(longer, "1", "cubic")] = seeds
    singles = [Single(s, a) for s in ("1", "2", "verify") for a in SINGLE_ACTIVATIONS]
    singles += [Single(s, a) for s in "34" for a in both]
    singles += [Single(s, a, 512) for a in both for s in "1234"]
    return Plan(
        num=16_000,
        cases=cases,
        reasons=reasons,
        singles=tuple(singles),
        single_steps=250,
        draws=400_000,
    )


def _quick_plan(seeds: range) -> Plan:
    """Setting 1 with few samples: shows that all parts work."""
    both = ("identity", "cubic")
    recipes = [replace(r, steps=250) for r in (OFFICIAL, PAPER_X10)]
    cases = {Case(r, "1", a): seeds for r in recipes for a in both}
    cases[Case(recipes[0], "1", "identity", balance=True)] = seeds
    return Plan(
        num=2000,
        cases=cases,
        reasons={Case(recipes[0], "1", "cubic", data_seed=1): seeds},
        singles=(Single("3", "identity", 32), Single("3", "cubic", 32)),
        single_steps=100,
        draws=50_000,
    )


@dataclass(frozen=True, eq=False)
class Outcome:
    """A trained mixture.

    Attributes:
        accuracy: On test data, per cent.
        entropy: Dispatch entropy in nats: as released on training data with noise, in
            the paper's form on test data without.
        noisy_entropy: In the last step of training.
        curve: Dispatch entropy of training data every `CURVE_STRIDE` steps, with noise
            as released and without in the paper's form.
        first_KE: Dispatch of training data in the first step, with noise.
        last_KE: Dispatch that `entropy` is taken of.
        steps: Steps until the end, early or not.
    """

    accuracy: float
    entropy: float
    noisy_entropy: float
    curve: Sequence[float]
    first_KE: Tensor
    last_KE: Tensor
    steps: int


def train_mixture(case: Case, num: int, seed: int) -> Outcome:
    """Algorithm 1: normalised descent for experts, plain descent for the router."""
    recipe = case.recipe
    data_seed = seed if case.data_seed is None else case.data_seed
    train, test = draw_train_and_test(case.setting, num, data_seed)
    with seeded(seed):
        layer = build_mixture(recipe, case.activation, balance=case.balance)
        counts, curve = _descend(recipe, layer, train)
        layer.train(recipe.as_released)  # the code never leaves training mode
        with torch.no_grad():
            out_BC, record = _forward(layer, _tokens(recipe, test), test.clusters_B)
    last_KE = counts[-1] if recipe.as_released else dispatch_counts(record)
    return Outcome(
        accuracy=accuracy(class_margin(out_BC), test.labels_B),
        entropy=dispatch_entropy(last_KE).item(),
        noisy_entropy=dispatch_entropy(counts[-1]).item(),
        curve=curve,
        first_KE=counts[0],
        last_KE=last_KE,
        steps=len(counts),
    )


def train_single(single: Single, num: int, *, steps: int) -> float:
    """Test accuracy, %, of the code's single model: two logits, biases, inputs x10."""
    train, test = draw_train_and_test(single.setting, num, seed=0)
    with seeded(0):
        model = PatchwiseExperts(
            1,
            PATCH_DIMS,
            single.num_filters,
            num_outputs=2,
            activation=single.activation,
            bias=True,
            init="uniform",
            init_scale=1.0,
        )
    linear = single.activation == "identity"
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=SINGLE_LINEAR_LR if linear else SINGLE_LR,
        weight_decay=SINGLE_WEIGHT_DECAY,
    )
    rows_BX = train.patches_BPD.flatten(1) * SINGLE_INPUT_SCALE
    classes_B = (train.labels_B > 0).long()
    for _ in range(steps):
        optimizer.zero_grad()
        for rows, classes in zip(
            rows_BX.split(CHUNK), classes_B.split(CHUNK), strict=True
        ):
            out = model(rows, torch.tensor([len(rows)]))
            loss = functional.cross_entropy(out, classes, reduction="sum")
            (loss / len(rows_BX)).backward()
        optimizer.step()
    with torch.no_grad():
        chunks = (test.patches_BPD.flatten(1) * SINGLE_INPUT_SCALE).split(CHUNK)
        outs = [model(rows, torch.tensor([len(rows)])) for rows in chunks]
    return accuracy(class_margin(torch.cat(outs)), test.labels_B)


@torch.no_grad()
def sum_norm_step(bank: Sequence[nn.Parameter], lr: float) -> None:
    """A step of the released code: norms of an expert's tensors are added up."""
    # float64, as squares of small float32 gradients vanish.
    grads = [p.grad.double() for p in bank if p.grad is not None]
    norm_E = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).sum(0)
    factor_E = torch.where(norm_E == 0, 0.0, lr / norm_E)
    for parameter, grad in zip(bank, grads, strict=True):
        step = factor_E.unsqueeze(1) * grad.flatten(1)
        parameter.sub_(step.view_as(parameter).to(parameter.dtype))


def accuracy(margin_B: Tensor, labels_B: Tensor) -> float:
    """Share of margins with the sign of the label, per cent."""
    return 100.0 * (margin_B * labels_B > 0).double().mean().item()


def _descend(
    recipe: Recipe, layer: MoELayer, train: ClusterSamples
) -> tuple[list[Tensor], list[float]]:
    """The dispatch of every step, and the curve of its entropy."""
    experts, others = expert_parameters(layer)
    move_experts: Callable[[], object] = NormalizedGD(experts, lr=EXPERT_LR).step
    if recipe.as_released:
        move_experts = partial(sum_norm_step, experts[0]["params"], EXPERT_LR)
    router_optimizer = torch.optim.SGD(others, lr=ROUTER_LR)
    tokens_B1X = _tokens(recipe, train)
    counts: list[Tensor] = []
    curve: list[float] = []
    best = float("inf")
    for step in range(recipe.steps):
        out_BC, record = _forward(layer, tokens_B1X, train.clusters_B)
        loss = mixture_loss(recipe, out_BC, train.labels_B)
        loss = torch.stack([loss, *record.losses.values()]).sum()
        counts.append(dispatch_counts(record))
        if step % CURVE_STRIDE == 0:
            shown = counts[-1] if recipe.as_released else _clean_counts(record)
            curve.append(dispatch_entropy(shown).item())
        if loss.item() <= best:
            best = loss.item()
        elif recipe.as_released and not ENOUGH < loss.item() <= best + WORSE:
            break
        layer.zero_grad()
        loss.backward()
        move_experts()
        router_optimizer.step()
    return counts, curve


def _tokens(recipe: Recipe, data: ClusterSamples) -> Tensor:
    """A sample is an image of one token, all its patches side by side."""
    return data.patches_BPD.flatten(1).unsqueeze(1) * recipe.input_scale


def _forward(
    layer: MoELayer, tokens_B1X: Tensor, clusters_B: Tensor
) -> tuple[Tensor, RoutingRecord]:
    """Outputs and routes; the clusters are there to be counted only."""
    out_B1C, record = layer(tokens_B1X, group_ids_B=clusters_B)
    return out_B1C.squeeze(1), record


def _clean_counts(record: RoutingRecord) -> Tensor:
    """What the dispatch would be without noise."""
    assignment = TopKGate(1)(record.logits_VE)
    return dispatch_counts(replace(record, assignment=assignment))
