"""Fine-grained experts in a detector: cut from a dense FFN, which they start equal to.

The cutting itself is in `damex.moe.split`; this is its config and its checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from damex.errors import ConfigError, did_you_mean
from damex.moe import (
    FFNExperts,
    LinearRouter,
    MoELayer,
    TopKGate,
    expert_groups,
    load_dense_split,
    repeat_router_rows,
    split_hidden_dims,
)

__all__ = ["FineGrained", "SplitStart", "read_fine_grained"]

FIELDS = ("parts", "copies")


@dataclass(frozen=True, kw_only=True)
class FineGrained:
    """The field ``moe.fine_grained`` (Dynamic-DINO, ICCV 2025, arXiv 2507.17436).

    Attributes:
        parts: Pieces that a dense FFN is cut into, and experts per token: compute stays
            that of the FFN. 2 is best in the paper, 4 overfits.
        copies: Copies of the cut FFN; ``parts * copies`` experts. More is better there.
    """

    parts: int
    copies: int

    @property
    def num_experts(self) -> int:
        """Experts in all."""
        return self.parts * self.copies

    @property
    def gate(self) -> dict[str, Any]:
        """What the gate needs for the mixture to equal the FFN at the start."""
        return dict(k=self.parts, renormalize=True, weight_scale=float(self.parts))

    def groups(self, num_groups: int) -> tuple[tuple[int, ...], ...]:
        """The experts of each dataset group: whole copies, shared out in order.

        Args:
            num_groups: Number of dataset groups.

        Raises:
            ConfigError: If there are more groups than copies.
        """
        if num_groups > self.copies:
            raise ConfigError(
                f"the mixture has {num_groups} dataset groups but "
                f"moe.fine_grained.copies is {self.copies}; set copies={num_groups} or "
                "more, or let datasets share experts by the same group='...'."
            )
        return tuple(
            tuple(c * self.parts + p for c in copies for p in range(self.parts))
            for copies in expert_groups(num_groups, self.copies)
        )

    def width(self, hidden_dims: int) -> int:
        """Hidden width of each expert.

        Args:
            hidden_dims: That of the dense FFN.

        Raises:
            ConfigError: If the FFN is narrower than there are parts.
        """
        try:
            return split_hidden_dims(hidden_dims, parts=self.parts)
        except ValueError as error:
            raise ConfigError(f"moe.fine_grained.parts: {error}") from error

    def check_fields(self, *, num_experts: int | None, norm: str) -> None:
        """Refuse fields of ``moe`` that contradict this one.

        Args:
            num_experts: ``moe.num_experts``; it follows from parts and copies.
            norm: ``moe.block.norm``.

        Raises:
            ConfigError: If one of them does.
        """
        if num_experts not in (None, self.num_experts):
            raise ConfigError(
                f"moe.num_experts is {num_experts!r}, but moe.fine_grained makes parts "
                f"* copies = {self.num_experts} experts; leave num_experts out."
            )
        if norm != "post":
            _refuse("block.norm", norm, "post")

    def check(self, moe: MoELayer) -> None:
        """Refuse parts with which the mixture would not equal the FFN at the start.

        Args:
            moe: The layer as the config has it.

        Raises:
            ConfigError: If the router, the gate or the experts do not fit.
        """
        wanted = dict(**self.gate, noise=None, capacity=None)
        if not isinstance(moe.gate, TopKGate):
            _refuse("gate", type(moe.gate).__name__, "TopKGate")
        for field, value in wanted.items():
            if getattr(moe.gate, field) != value:
                _refuse(f"gate.{field}", getattr(moe.gate, field), value)
        for field, part, kind in (
            ("router", moe.router, LinearRouter),
            ("experts", moe.experts, FFNExperts),
        ):
            if not isinstance(part, kind):
                _refuse(field, type(part).__name__, kind.__name__)
        if moe.shared_expert is not None:
            _refuse("shared_expert", type(moe.shared_expert).__name__, None)


@dataclass(frozen=True, kw_only=True)
class SplitStart:
    """How fine-grained experts start: as the parts of one dense FFN.

    Attributes:
        parts: Pieces of the FFN.
        hidden_dims: H, hidden width of the FFN before it is cut.
    """

    parts: int
    hidden_dims: int

    def draw(self, moe: MoELayer) -> None:
        """Draw a dense FFN, cut it into the experts, and tie the router's rows.

        Args:
            moe: Changed in place.
        """
        experts: Any = moe.experts
        dense = FFNExperts(
            1,
            experts.embed_dims,
            self.hidden_dims,
            activation=experts.activation,
            init_std=experts.init_std,
            output_bias=experts.output_bias,
        ).to(experts.w1_EDH.device)
        w1_HD, w2_DH = dense.w1_EDH[0].t(), dense.w2_EHD[0].t()
        slope = () if dense.slope_E1 is None else (dense.slope_E1[0],)
        self._load(moe, (w1_HD, dense.b1_EH[0], w2_DH, dense.b2_ED[0], *slope))

    def state(self, moe: MoELayer, dense: Sequence[Tensor]) -> dict[str, Tensor]:
        """State of the experts and the router that equals a dense FFN.

        Args:
            moe: Left as it is; its router decides which copy gets which token.
            dense: The tensors of an FFN as in `damex.moe.load_dense_split`, for PReLU
                experts with the slope behind them.

        Returns:
            Tensors by their names in the layer.

        Raises:
            ValueError: If the FFN has another width.
        """
        other = copy.deepcopy(moe)
        self._load(other, dense)
        return {
            name: tensor
            for name, tensor in other.state_dict().items()
            if name.startswith(("experts.", "router."))
        }

    def _load(self, moe: Any, dense: Sequence[Tensor]) -> None:
        slope_1 = dense[4] if len(dense) > 4 else None
        load_dense_split(moe.experts, *dense[:4], parts=self.parts, slope_1=slope_1)
        repeat_router_rows(moe.router, parts=self.parts)


def read_fine_grained(config: Any) -> FineGrained | None:
    """Check and read ``moe.fine_grained``.

    Args:
        config: ``dict(parts=2, copies=4)``, or None for experts of the FFN's own width.

    Raises:
        ConfigError: If a field is unknown, missing or no positive integer.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"moe.fine_grained must be dict(parts=2, copies=4) or None, got {config!r}."
        )
    for key in config:
        if key not in FIELDS:
            raise ConfigError(
                f"moe.fine_grained has the unknown key {key!r}; "
                f"{did_you_mean(key, FIELDS)}"
            )
    for field in FIELDS:
        value = config.get(field)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"moe.fine_grained.{field} must be an integer of 1 or more, "
                f"got {value!r}."
            )
    return FineGrained(**config)


def _refuse(field: str, value: Any, wanted: Any) -> None:
    raise ConfigError(
        f"moe.{field} is {value!r}, but with moe.fine_grained it must be {wanted!r}, "
        "or the detector would not start equal to the dense one; leave it out."
    )
