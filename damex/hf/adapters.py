"""Experts parallel to the FFNs of a Transformers detector.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.build import build_layer, module_class
from damex.models.config import MoEConfig
from damex.models.context import RoutingContext
from damex.models.insertion import InsertionReport, layer_notes, report_row
from damex.models.sites import layer_numbers
from damex.moe import MoELayer, SharedExpert

SUPPORTED = frozenset(
    {"layers", "num_experts", "router", "gate", "experts", "shared_expert", "losses"}
    | {"with_cp", "teacher_forcing", "image_vote", "oracle"}
)


class MoEAdapter(MoEFFN):
    """Experts whose output is added to that of a layer's own FFN.

    The FFN is the shared expert. It stays in place, its weights keep their names, and
    it may be of any kind: a hook adds the output of the experts to its own.

    Args:
        counted: The tokens of each image that are counted and have routing losses;
            None for all. Others, such as denoising queries, pass the experts, too.
        windows: Number of windows of an image, which follow each other in the batch.
    """

    def __init__(
        self,
        moe: MoELayer,
        *,
        name: str,
        context: RoutingContext,
        counted: slice | None,
        windows: int = 1,
        with_cp: bool,
    ) -> None:
        super().__init__(moe, name=name, context=context, with_cp=with_cp)
        self.counted = counted or slice(None)
        self.windows = windows
        self.register_load_state_dict_pre_hook(_keep_new)

    def forward(self, tokens_BND: Tensor) -> Tensor:  # type: ignore[override]
        """Return the output of the experts."""
        shape, windows = tokens_BND.shape, self.windows
        tokens_BND = tokens_BND.reshape(shape[0] // windows, windows * shape[1], -1)
        first, last, _ = self.counted.indices(tokens_BND.shape[1])
        outputs = [self._route(tokens_BND[:, first:last])]
        if first > 0:
            outputs.insert(0, self._route(tokens_BND[:, :first], is_auxiliary=True))
        if last < tokens_BND.shape[1]:
            outputs.append(self._route(tokens_BND[:, last:], is_auxiliary=True))
        output_BND = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return output_BND.reshape(shape)

    def add_to(self, mlp: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        """Forward hook of an FFN: add the experts' output."""
        return output + self(args[0])


def _keep_new(
    adapter: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Pre-load hook: experts that a plain model does not have stay as they are."""
    if not any(key.startswith(prefix) for key in state):
        own = adapter.state_dict()
        state.update({f"{prefix}{name}": tensor for name, tensor in own.items()})


def insert_adapters(
    sites: dict[str, list[nn.Module]],
    config: MoEConfig,
    *,
    context: RoutingContext,
    num_groups: int | None,
    counted: slice,
    windows: int = 1,
) -> InsertionReport:
    """Add experts to the ``mlp`` of chosen layers, as the layer's ``adapter``.

    ``sites`` are the layers of encoder and decoder; ``num_groups`` is None outside of a
    mixture. ``counted`` are the decoder's queries that make detections, ``windows`` the
    number of parts of an image in the batch of the encoder.

    Raises:
        ConfigError: If a layer does not exist, or a part of ``moe`` replaces FFNs.
    """
    _check(config)
    rows, layer = [], None
    numbers = [
        (component, number)
        for component, chosen in config.layers.chosen.items()
        for number in layer_numbers(chosen, len(sites[component]), component)
    ]
    for component, number in numbers:
        site: Any = sites[component][number]
        mlp = site.mlp
        width = next(m.in_features for m in mlp.modules() if isinstance(m, nn.Linear))
        shared = dict(embed_dims=width, hidden_dims=1)
        layer = build_layer(
            config, dict(embed_dims=width), num_groups=num_groups, shared_expert=shared
        )
        layer.shared_expert = None  # the FFN is
        if hasattr(site, "adapter"):
            raise ConfigError(f"moe.layers.{component}: {number} is listed twice.")
        site.adapter = MoEAdapter(
            layer,
            name=f"{component}.{number}",
            context=context,
            counted=counted if component == "decoder" else None,
            windows=windows if component == "encoder" else 1,
            with_cp=config.with_cp,
        )
        mlp.register_forward_hook(site.adapter.add_to)
        rows.append(report_row(site.adapter, mlp, f"parallel to {type(mlp).__name__}"))
    assert layer is not None  # read_moe rejects a choice of no layer
    return InsertionReport(tuple(rows), (*layer_notes(layer),))


def _check(config: MoEConfig) -> None:
    """Reject options that need an FFN of mmdet, or were not tried with others."""
    default = MoEConfig(router={}, gate={}, experts={})
    for name, value in vars(config).items():
        if name not in SUPPORTED and value != vars(default)[name]:
            raise ConfigError(
                f"moe.{name} changes the FFNs of mmdet's detectors and is not "
                "available in a MoETransformersDetector; leave it out."
            )
    if any(loss.get("tokens") == "foreground" for loss in config.losses):
        raise ConfigError(
            "moe.losses: tokens='foreground' needs reference points, which a "
            "MoETransformersDetector does not report; leave tokens out."
        )
    if config.layers.backbone is not None:
        raise ConfigError(
            "moe.layers.backbone: a MoETransformersDetector takes experts in the "
            "encoder and decoder; set moe.layers=dict(encoder='all', decoder='all')."
        )
    kind = module_class(config.experts)
    if kind is not None and not getattr(kind, "needs_shared_expert", False):
        raise ConfigError(
            f"moe.experts is {kind.__name__!r}, copies of mmdet's FFN, which other "
            "FFNs cannot be copied to; in a MoETransformersDetector experts are "
            "parallel to the FFN: set moe.experts=dict(type='LowRankExperts') and "
            "moe.shared_expert=dict(type='SharedExpert'), as moe='damex_best' does."
        )
    shared = config.shared_expert
    if shared is None or module_class(shared) is not SharedExpert or len(shared) > 1:
        raise ConfigError(
            "moe.shared_expert must be dict(type='SharedExpert') in a "
            "MoETransformersDetector, whose own FFN it is, got "
            f"{None if shared is None else dict(shared)}."
        )
