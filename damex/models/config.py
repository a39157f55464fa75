"""The ``moe=`` config of a detector: frozen dataclasses and their reader.

``None`` selects the default, except for numbers, strings and booleans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from damex.errors import ConfigError, check_known

Config = TypeVar("Config")
Module = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """Validation rule of a field; ``words`` describe it in messages.

    A dict is read into the dataclass ``nested`` if set, and gets ``type`` by default.
    """

    words: str
    is_allowed: Callable[[Any], bool]
    nested: Any = None
    type: str | None = None


def is_dict(value: Any) -> bool:
    """Whether a value is a dict or a config's dict."""
    return isinstance(value, Mapping)


def are_dicts(value: Any) -> bool:
    """Whether a value is a list of dicts."""
    return isinstance(value, (list, tuple)) and all(map(is_dict, value))


def one_of(*allowed: str) -> Rule:
    """Allow the given values."""
    return Rule(f"one of {allowed}", lambda value: value in allowed)


def branch(nested: type, example: str) -> Rule:
    """Allow a dict that is read into a dataclass."""
    return Rule(f"a dict such as {example}", is_dict, nested=nested)


def _numbers_or(unit: str, *names: str) -> Rule:
    words = ", ".join(map(repr, names[:-1]))
    return Rule(
        f"a list of {unit} numbers, {words} or {names[-1]!r}",
        lambda value: isinstance(value, (list, tuple)) or value in [*names],
    )


def _module(kind: str) -> Rule:
    return Rule(f"a dict with a type, such as dict(type={kind!r})", is_dict, type=kind)


COUNT = Rule("an integer of 1 or more", lambda v: type(v) is int and v >= 1)
NUMBER = Rule("an integer of 0 or more", lambda v: type(v) is int and v >= 0)
FLAG = Rule("True or False", lambda v: isinstance(v, bool))
TEXT = Rule("a text", lambda v: isinstance(v, str))
NON_NEGATIVE = Rule(
    "a number of 0 or more", lambda v: type(v) in (int, float) and 0.0 <= v < math.inf
)
BELOW_ONE = Rule(
    "a number in [0, 1)", lambda v: type(v) in (int, float) and 0.0 <= v < 1.0
)
SHARE = Rule(
    "a number between 0 and 1, both left out",
    lambda v: isinstance(v, float) and 0.0 < v < 1.0,
)
FLAG_OR_SHARE = Rule(
    "True, False or a number between 0 and 1, both left out",
    lambda v: isinstance(v, bool) or SHARE.is_allowed(v),
)
LOSSES = Rule(
    "a list of dicts, each a dict with a type such as dict(type='LoadBalanceLoss')",
    are_dicts,
)
LAYERS = _numbers_or("layer", "all", "even")
STAGES = _numbers_or("stage", "all", "even", "last")


@dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """The field ``moe.layers``: indices from 0, 'all', or 'even' for 0, 2, 4 and so on.

    ``backbone`` selects stages of a ResNet; there 'last' is allowed, too.
    """

    backbone: Annotated[Any, STAGES] = None
    encoder: Annotated[Any, LAYERS] = None
    decoder: Annotated[Any, LAYERS] = None

    @property
    def chosen(self) -> dict[str, Any]:
        """The selected layers by component; components without a selection omitted."""
        return {k: v for k, v in vars(self).items() if v not in (None, [], ())}


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The field ``moe.block``: norm and drop path (per token, in training).

    Attributes:
        norm: 'post' is norm(x + MoE(x)) as in DETRs. 'pre' is x + MoE(norm(x)) without
            a norm after it, as in the released code of DAMEX.
    """

    norm: Annotated[str, one_of("post", "pre")] = "post"
    drop_path: Annotated[float, BELOW_ONE] = 0.0


@dataclass(frozen=True, kw_only=True)
class FineGrained:
    """The field ``moe.fine_grained`` (Dynamic-DINO, ICCV 2025, arXiv 2507.17436).

    Attributes:
        parts: Pieces that the dense FFN is cut into. A token takes as many, so compute
            is that of the FFN. 2 is best in the paper, 4 overfits.
        copies: Copies of the routed pieces; in the paper, more is better.
        shared: Pieces that form one shared expert instead of being copied.
    """

    parts: Annotated[int, COUNT]
    copies: Annotated[int, COUNT]
    shared: Annotated[int, NUMBER] = 0

    @property
    def routed(self) -> int:
        """Number of copied pieces, and of experts per token."""
        return self.parts - self.shared

    @property
    def num_experts(self) -> int:
        """Total number of experts."""
        return self.routed * self.copies

    @property
    def gate(self) -> dict[str, Any]:
        """Gate settings with which the experts equal the FFN at the start."""
        return dict(k=self.routed, renormalize=True, weight_scale=float(self.routed))


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """An initial phase of the training; exactly one of the two lengths is set.

    Attributes:
        share: Length as a share of all iterations, in (0, 1), rounded up.
        iters: Length in iterations.
    """

    share: Annotated[float | None, SHARE] = None
    iters: Annotated[int | None, COUNT] = None

    where = "moe"
    missed = "nothing else would happen"

    def __post_init__(self) -> None:
        if (self.share is None) == (self.iters is None):
            raise ConfigError(
                f"{self.where}: set one of share and iters, got "
                f"share={self.share!r} and iters={self.iters!r}."
            )

    def length(self, max_iters: int) -> int:
        """Return the length in iterations of a training of ``max_iters``.

        Raises:
            ConfigError: If the training ends before the phase. Checked at run time,
                when the length of an epoch-based training is known.
        """
        if self.iters is None:
            return math.ceil((self.share or 0.0) * max_iters)
        if self.iters >= max_iters:
            raise ConfigError(
                f"{self.where}.iters is {self.iters}, but the training has {max_iters} "
                f"iterations, so {self.missed}; set fewer iters, or share=0.1 in their "
                "place."
            )
        return self.iters


@dataclass(frozen=True, kw_only=True)
class WarmupConfig(PhaseConfig):
    """The field ``moe.router_warmup``: train the routers alone first, on ``loss``."""

    loss: Annotated[str, TEXT] = "separate_router"

    where = "moe.router_warmup"
    missed = "nothing but the routers would ever learn"


@dataclass(frozen=True, kw_only=True)
class UpcyclingConfig(PhaseConfig):
    """The field ``moe.upcycling``; see :class:`damex.papers.phases.InRunUpcycling`."""

    where = "moe.upcycling"
    missed = "the detector would never have experts"


@dataclass(frozen=True, kw_only=True)
class ChannelConfig:
    """The field ``moe.channels`` (DeepMoE, UAI 2019, arXiv 1806.01531).

    Attributes:
        embedding: Module config; ``embed_dims`` defaults to the number of targets.
        gate_init: See :class:`damex.papers.channels.GatingPath`.
        l1_weight: Factor of the sparsity penalty.
        aux_weight: Factor of the loss on the embedding.
        aux_target: What the embedding predicts: 'classes' in the image, or 'datasets'.
        frozen: Keep the gates of stage 1 without losses (the paper's stage 2).
    """

    embedding: Annotated[Module, _module("ShallowEmbedding")]
    gate_init: Annotated[str, TEXT] = "uniform"
    l1_weight: Annotated[float, NON_NEGATIVE] = 1e-3
    aux_weight: Annotated[float, NON_NEGATIVE] = 1.0
    aux_target: Annotated[str, one_of("classes", "datasets")] = "classes"
    frozen: Annotated[bool, FLAG] = False


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The field ``moe`` of a detector. Modules are dicts with a ``type``.

    Attributes:
        layers: Where the experts go.
        num_experts: By default the number of dataset groups.
        router: Scores experts.
        gate: Chooses experts by the scores.
        experts: By default FFNs; `PatchConvExperts` for a backbone.
        shared_expert: Expert for all tokens, in addition to their routed experts.
        losses: Routing losses.
        with_cp: Recompute the experts in the backward pass to save memory.
        expert_parallel: Number of processes that share a layer's experts; 1 for none.
        block: Norm and drop path around the experts.
        fine_grained: Cut experts from the dense FFN.
        router_warmup: Train the routers alone at first.
        upcycling: Train a dense detector at first.
        channels: Gate channels instead of adding experts; needs only ``layers``.
        teacher_forcing, image_vote, oracle: See :class:`damex.moe.GroupChoice`.
    """

    layers: Annotated[LayersConfig, branch(LayersConfig, "dict(decoder=[0, 2, 4])")] = (
        LayersConfig()
    )
    num_experts: Annotated[int | None, COUNT] = None
    router: Annotated[Module, _module("LinearRouter")]
    gate: Annotated[Module, _module("TopKGate")]
    experts: Annotated[Module, _module("FFNExperts")]
    shared_expert: Annotated[Module | None, _module("SharedExpert")] = None
    losses: Annotated[Sequence[Module], LOSSES] = ()
    with_cp: Annotated[bool, FLAG] = False
    expert_parallel: Annotated[int, COUNT] = 1
    block: Annotated[
        BlockConfig, branch(BlockConfig, "dict(norm='pre', drop_path=0.2)")
    ] = BlockConfig()
    fine_grained: Annotated[
        FineGrained | None, branch(FineGrained, "dict(parts=2, copies=4)")
    ] = None
    router_warmup: Annotated[
        WarmupConfig | None, branch(WarmupConfig, "dict(share=0.1) or dict(iters=500)")
    ] = None
    upcycling: Annotated[
        UpcyclingConfig | None,
        branch(UpcyclingConfig, "dict(share=0.5) or dict(iters=500)"),
    ] = None
    channels: Annotated[
        ChannelConfig | None, branch(ChannelConfig, "dict(aux_target='classes')")
    ] = None
    teacher_forcing: Annotated[bool, FLAG] = False
    image_vote: Annotated[bool, FLAG] = False
    oracle: Annotated[bool, FLAG] = False

    def __post_init__(self) -> None:
        for name in ("fine_grained", "shared_expert", "router_warmup"):
            if self.upcycling is not None and getattr(self, name) is not None:
                raise ConfigError(
                    f"moe.upcycling and moe.{name} cannot be set together; leave one "
                    "of them out, or train the dense detector first and start from it "
                    "with load_from=CHECKPOINT and load_optimizer=True."
                )
        fine = self.fine_grained
        if fine is None:
            return
        if self.num_experts not in (None, fine.num_experts):
            raise ConfigError(
                f"moe.num_experts is {self.num_experts}, but moe.fine_grained makes "
                f"(parts - shared) * copies = {fine.num_experts} experts; leave it out."
            )
        object.__setattr__(self, "num_experts", fine.num_experts)


def read_moe(moe: Mapping[str, Any]) -> MoEConfig:
    """Read the ``moe`` of a detector from its config.

    Raises:
        ConfigError: If a field is unknown, missing or invalid, or no layer is chosen.
    """
    if not is_dict(moe):
        raise ConfigError(
            f"moe must be a dict such as dict(layers=dict(decoder=[0])), got {moe!r}."
        )
    if moe.get("channels") is not None:
        for key in moe:
            if key not in ("layers", "channels"):
                raise ConfigError(
                    f"moe.channels has no experts and no use for moe.{key}; keep "
                    "layers and channels, or remove channels."
                )
    config = read_config(MoEConfig, moe, "moe")
    if not config.layers.chosen:
        raise ConfigError(
            f"moe.layers = {moe.get('layers')} chooses no layer, so the detector "
            "would stay dense; set moe.layers=dict(decoder=[0, 2, 4]), "
            "moe.layers=dict(backbone=[3]), or moe=None for a dense detector."
        )
    return config


def read_config(
    kind: Callable[..., Config], values: Mapping[str, Any], where: str
) -> Config:
    """Read the dict at ``where`` in the config into one of the dataclasses above.

    Raises:
        ConfigError: If a field is unknown, missing or invalid.
    """
    rules = {
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(kind, include_extras=True).items()
    }
    for key in values:
        check_known(key, rules, f"{where} has the unknown key {key!r}")
    found = {}
    for spec in dataclasses.fields(kind):  # type: ignore[arg-type]
        rule = rules[spec.name]
        value: Any = values.get(spec.name)
        if value is None and spec.default is dataclasses.MISSING and rule.type:
            value = {}
        is_number = isinstance(spec.default, (bool, int, float, str))
        has_default = spec.default is not dataclasses.MISSING
        if value is None and has_default and not (spec.name in values and is_number):
            continue
        place = f"{where}.{spec.name}"
        if not rule.is_allowed(value):
            raise ConfigError(f"{place} must be {rule.words}, got {value!r}.")
        if rule.nested is not None:
            value = read_config(rule.nested, value, place)
        found[spec.name] = value if rule.type is None else {"type": rule.type, **value}
    return kind(**found)
