"""Layouts of Transformers detectors: where the parts are that damex uses.

A new layout is one class with the members of :class:`HybridEncoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from damex.errors import ConfigError


def _weighted(losses: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return losses times their weights; others, such as counts, have none."""
    weights = dict(
        ce=getattr(config, "class_loss_coefficient", 1),
        bbox=config.bbox_loss_coefficient,
        giou=config.giou_loss_coefficient,
    )
    return {
        name: weights[kind] * value
        for name, value in losses.items()
        if (kind := name.split("_")[1]) in weights
    }


class HybridEncoder:
    """RT-DETRv2 and its successors: an encoder of one map, and denoising.

    Attributes:
        criterion: Name of Transformers' class with ``get_loss``.
        backbones: ``model_type`` of the backbones that fit.
        class_rows: Modules with a row of weights for each class.
        counts_all_boxes: Whether losses are divided by the boxes of all processes.
    """

    backbones: tuple[str, ...] = ("rt_detr_resnet", "hgnet_v2", "TimmBackbone")
    heads = ("model.decoder.class_embed", "model.enc_score_head")
    class_rows: tuple[str, ...] = (*heads, "model.denoising_class_embed")
    counts_all_boxes = False

    def __init__(self, criterion: str) -> None:
        self.criterion = criterion

    def check(self, config: Any) -> None:
        """Raise a ConfigError for parts that do not fit each other."""
        width = config.encoder_hidden_dim
        if {*config.decoder_in_channels} != {width}:
            raise ConfigError(
                "model.config.decoder_in_channels is "
                f"{list(config.decoder_in_channels)}, but the encoder gives maps of "
                f"encoder_hidden_dim={width} channels; set each of them to this number."
            )
        for name, usual in (("auxiliary_loss", True), ("learn_initial_query", False)):
            if getattr(config, name, usual) != usual:
                raise ConfigError(f"model.config.{name} must be {usual} to train.")
        if getattr(config, "encoder_type", "hybrid") != "hybrid":
            raise ConfigError(
                f"model.config.encoder_type is {config.encoder_type!r}, which damex "
                "does not support; it supports 'hybrid'."
            )

    def tidy(self, model: Any) -> None:
        """Leave each parameter one name, and a gradient only if a forward reads it."""
        for name in {"class_embed", "bbox_embed"} & {*dict(model.named_children())}:
            delattr(model, name)  # second names

    def sites(self, model: Any) -> dict[str, list[nn.Module]]:
        """Return the layers of encoder and decoder, each with an ``mlp``."""
        return dict(
            encoder=[one for aifi in model.model.encoder.aifi for one in aifi.layers],
            decoder=[*model.model.decoder.layers],
        )

    def class_heads(self, model: Any) -> list[nn.Module]:
        """Return the linear classifiers, the one that selects the queries last."""
        layers, cells = map(model.get_submodule, self.heads)
        return [*layers.children(), cells]

    def strides(self, config: Any) -> list[int]:
        """Return the strides of the feature maps whose cells become queries."""
        strides = [*config.feat_strides]
        while len(strides) < config.num_feature_levels:
            strides.append(2 * strides[-1])
        return strides

    def counted(self, config: Any) -> slice:
        """Return the queries that make detections, of all in a training."""
        return slice(-config.num_queries, None)  # behind those of denoising

    def weighted(self, losses: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Return losses whose sum is Transformers' loss."""
        return dict(losses)

    def activation(self, config: Any, part: str) -> str:
        """Return the name of the activation in FFNs of encoder or decoder."""
        own = getattr(config, f"{part}_activation_function", None)
        return own or config.activation_function

    def widen(self, config: Any, part: str, units: int, *, gates: int) -> int:
        """Give all FFNs of a part ``units`` hidden units, or as few more as can be.

        FFNs with ``gates=2`` have a gate for each unit. Returns the number.
        """
        setattr(config, f"{part}_ffn_dim", units * gates)
        return units


class DeformableEncoder(HybridEncoder):
    """Deformable DETR of one stage: an encoder of all maps, and learned queries.

    All layers have one classifier, and one box head unless they refine boxes.
    """

    backbones = ("resnet", "timm_backbone", "TimmBackbone")
    class_rows = ("class_embed",)

    def check(self, config: Any) -> None:
        """Raise a ConfigError for variants that do not learn, or fail later."""
        why = dict(
            two_stage="Transformers gives its first stage no loss",
            position_embedding_type="others end at 50 rows and columns of a map",
            tie_word_embeddings="heads have two names",
        )
        for name, reason in why.items():
            usual, found = getattr(type(config), name), getattr(config, name)
            if found != usual:
                raise ConfigError(
                    f"model.config.{name} is {found!r}, which damex does not support, "
                    f"as {reason}; it supports {usual!r}."
                )
        maps = len(config.backbone_config.out_indices)
        if maps > config.num_feature_levels:
            raise ConfigError(
                f"the backbone gives {maps} maps, but model.config.num_feature_levels="
                f"{config.num_feature_levels}; set at least {maps}."
            )

    def tidy(self, model: Any) -> None:
        """Leave each parameter one name: optimizers take it once."""
        model.class_embed, decoder = _LastHead(model.class_embed), model.model.decoder
        if decoder.bbox_embed is None:
            model.bbox_embed = _LastHead(model.bbox_embed)
        else:
            del decoder.bbox_embed
            vars(decoder)["bbox_embed"] = model.bbox_embed  # not as a module of its own

    def sites(self, model: Any) -> dict[str, list[nn.Module]]:
        """Return the layers of encoder and decoder."""
        parts = model.model
        return dict(encoder=[*parts.encoder.layers], decoder=[*parts.decoder.layers])

    def class_heads(self, model: Any) -> list[nn.Module]:
        """Return the classifier of all layers; queries are not selected."""
        return [model.class_embed[-1]]

    def strides(self, config: Any) -> list[int]:
        """Return 1: sides may have any length, and no cell becomes a query."""
        return [1]

    weighted = staticmethod(_weighted)


class _LastHead(nn.ModuleList):
    """The head of the last layer, under its name, at the places of all layers."""

    def __init__(self, heads: nn.ModuleList) -> None:
        super().__init__()
        self.add_module(str(len(heads) - 1), heads[-1])

    def __getitem__(self, index: Any) -> Any:
        return next(self.children())


class WindowedBackbone:
    """RF-DETR: a DINOv2 with windows, no encoder, and groups of queries.

    In the place of an encoder are the blocks behind the last but one feature map. All
    layers have one classifier; each group of queries has its own selection.
    """

    criterion = "transformers.loss.loss_lw_detr:LwDetrImageLoss"
    backbones = ("rf_detr_dinov2",)
    class_rows = ("class_embed", "model.enc_out_class_embed")
    counts_all_boxes = True

    def check(self, config: Any) -> None:
        """Pass: all depends on the backbone."""

    def tidy(self, model: Any) -> None:
        """Freeze what no forward reads: DDP expects gradients of the others."""
        backbone = model.model.backbone.backbone
        unread = [*backbone.encoder.layer[self._outputs(model)[-1] :].parameters()]
        if backbone.embeddings.mask_token is not None:
            unread.append(backbone.embeddings.mask_token)
        for parameter in unread:
            parameter.requires_grad_(False)

    def sites(self, model: Any) -> dict[str, list[nn.Module]]:
        """Return the last blocks of the backbone, and the layers of the decoder."""
        first, last = [0, *self._outputs(model)][-2:]
        return dict(
            encoder=[*model.model.backbone.backbone.encoder.layer[first:last]],
            decoder=[*model.model.decoder.layers],
        )

    def class_heads(self, model: Any) -> list[nn.Module]:
        """Return the classifier of all layers, and those of the groups."""
        return [model.class_embed, *model.model.enc_out_class_embed]

    def strides(self, config: Any) -> list[int]:
        """Return the patch size."""
        return [config.backbone_config.patch_size]

    def counted(self, config: Any) -> slice:
        """Return the first group of queries."""
        return slice(config.num_queries)

    weighted = staticmethod(_weighted)

    def activation(self, config: Any, part: str) -> str:
        """Return that of the backbone for the encoder."""
        if part == "encoder":
            return config.backbone_config.hidden_act
        return config.decoder_activation_function

    def widen(self, config: Any, part: str, units: int, *, gates: int) -> int:
        """Widen blocks of the backbone by whole widths of it, and return the units."""
        if part == "decoder":
            config.decoder_ffn_dim = units
            return units
        backbone = config.backbone_config
        while (found := _block_units(backbone)) < units:
            backbone.mlp_ratio += 1
        return found

    def _outputs(self, model: Any) -> list[int]:
        """Return how many blocks each feature map has behind it."""
        config = model.config.backbone_config
        return [number % len(config.stage_names) for number in config.out_indices]


def _block_units(config: Any) -> int:
    """Return the hidden units of a block's FFN, as Transformers rounds them."""
    units = config.hidden_size * config.mlp_ratio
    return (units * 2 // 3 + 7) // 8 * 8 if config.use_swiglu_ffn else units
