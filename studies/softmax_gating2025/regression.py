"""The paper's regression functions: MoE layers as functions of a parameter vector.

Axes: S parameter vectors, P free parameters, N points, D width of a token, E = K fitted
experts, A coordinates of a gate's slope, Q parameters of an expert, G groups.

Inputs have one dimension. An expert is sigma(a x + b), or sigma(a t(x) + b) with
t(x) = x / sqrt(1 + x^2), the "normalised input" of the paper's Definition 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacfwd, vmap

from damex.moe import (
    Assignment,
    FFNExperts,
    HierarchicalRouter,
    LinearRouter,
    MLPRouter,
    MoELayer,
    Packing,
    expert_groups,
)
from damex.papers.dense_gates import DenseSoftmaxGate
from studies.softmax_gating2025.measures import Hierarchy, Measure, Truth

Gating = Literal["softmax", "linear_temperature", "tanh_temperature", "hierarchical"]
NUM_GROUPS = 2  # G of a hierarchy


class TemperatureGate(DenseSoftmaxGate):
    """Softmax of logits / tau; tau = exp(log_scale) is estimated with the router."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, logits_VE: Tensor, packing: Packing | None = None) -> Assignment:
        """Weigh all experts."""
        return super().forward(logits_VE / self.log_scale.exp(), packing)


class Family:
    """All mixtures of one form with K experts.

    Args:
        gating: 'softmax' (eq. 2), 'linear_temperature' (12), 'tanh_temperature' (17
            with pi(x, b1) = tanh(b1 x)) or 'hierarchical' (20).
        num_experts: K.
        activation: That of the experts; 'identity' makes them linear.
        points_N: Where the functions are evaluated.
        normalised: Whether experts see t(x) rather than x.
    """

    def __init__(
        self,
        gating: Gating,
        num_experts: int,
        *,
        activation: str,
        points_N: Tensor,
        normalised: bool = False,
    ) -> None:
        self.gating = gating
        self.num_experts = num_experts
        self.activation = activation
        self._expert_input = 1 if normalised else 0
        self._slope = "router.weight_ED"
        self._bias = "router.bias_E"
        if gating == "tanh_temperature":
            self._slope, self._bias = "router.w1_HD", "router.b2_E"
        tokens_ND = points_N.unsqueeze(1)
        if normalised:
            t_N1 = tokens_ND / (1 + tokens_ND.square()).sqrt()
            tokens_ND = torch.cat([tokens_ND, t_N1], dim=1)
        layer = self._layer(tokens_ND.shape[1])
        self.regression = Regression(layer, tokens_ND, free=self._free())

    @property
    def has_temperature(self) -> bool:
        """Whether tau is estimated."""
        return self.gating in ("linear_temperature", "tanh_temperature")

    @property
    def translates(self) -> bool:
        """Whether a common slope of all gates cancels, as with linear routers."""
        return self.gating != "tanh_temperature"

    def theta(self, truth: Truth) -> Tensor:
        """theta_P at which the layer is a mixture of K experts; see `Truth.split`."""
        bias_K = _float64(truth.gate_bias)
        slope_K = _float64(truth.gate_slope)
        reference_K = torch.tensor(self._reference())
        values = {
            self._bias: bias_K - bias_K[reference_K],
            self._slope: slope_K,
            "experts.w1_EDH": _float64(truth.expert_slope),
            "experts.b1_EH": _float64(truth.expert_bias),
            "gate.log_scale": _float64(truth.temperature).log(),
            "router.group_weight_GD": _float64(truth.group_slope),
            "router.group_bias_G": _float64(truth.group_bias),
        }
        parameters = self.regression.parameters(
            torch.zeros(self.regression.num_parameters, dtype=torch.float64)
        )
        for name, mask in self._free().items():
            ones = [1] * (mask.dim() - values[name].dim())
            column = values[name].reshape((*values[name].shape, *ones))
            parameters[name] = torch.where(mask, column, parameters[name])
        return self.regression.vector(parameters)

    def measure(self, theta_SP: Tensor) -> Measure:
        """The mixing measures of fitted parameters, not yet aligned."""
        parameters = self.regression.parameters(theta_SP)
        tau_S = None
        log_weight_SK = parameters[self._bias]
        if self.has_temperature:
            tau_S = parameters["gate.log_scale"].exp()
            log_weight_SK = log_weight_SK / tau_S.unsqueeze(1)
        slope_SK = parameters["experts.w1_EDH"][:, :, self._expert_input, 0]
        return Measure(
            log_weight_SK,
            parameters[self._slope][:, :, :1],
            torch.stack([slope_SK, parameters["experts.b1_EH"][:, :, 0]], dim=2),
            tau_S,
        )

    def hierarchy(self, theta_SP: Tensor) -> Hierarchy:
        """The two-level measures of fitted parameters, not yet aligned."""
        parameters = self.regression.parameters(theta_SP)
        flat = self.measure(theta_SP)
        groups = expert_groups(NUM_GROUPS, self.num_experts)
        inner = [flat.part([*group]) for group in groups]
        return Hierarchy(
            parameters["router.group_bias_G"],
            parameters["router.group_weight_GD"][:, :, :1],
            inner,
        )

    def _layer(self, embed_dims: int) -> MoELayer:
        E = self.num_experts
        experts = FFNExperts(E, embed_dims, 1, activation=self.activation)
        gate = TemperatureGate() if self.has_temperature else DenseSoftmaxGate()
        router: LinearRouter | MLPRouter | HierarchicalRouter
        if self.gating == "hierarchical":
            router = HierarchicalRouter(embed_dims, E, num_groups=NUM_GROUPS)
        elif self.gating == "tanh_temperature":
            router = MLPRouter(embed_dims, E, hidden_dims=E, activation="tanh")
        else:
            router = LinearRouter(embed_dims, E, bias=True)
        layer = MoELayer(router=router, gate=gate, experts=experts)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            experts.w2_EHD[:, 0, 0] = 1.0
            if isinstance(router, MLPRouter):
                # pi(x, b1_i) of eq. 17 is the i-th hidden unit.
                router.w2_EH.copy_(torch.eye(E))
        return layer

    def _reference(self) -> list[int]:
        """For each expert whose gate is pinned: the last one, or that of its group."""
        if self.gating != "hierarchical":
            return [self.num_experts - 1] * self.num_experts
        groups = expert_groups(NUM_GROUPS, self.num_experts)
        return [group[-1] for group in groups for _ in group]

    def _free(self) -> dict[str, Tensor]:
        """Mask of the estimated elements."""
        E, D = self.num_experts, self._expert_input + 1
        moves_E = torch.ones(E, dtype=torch.bool)
        moves_E[self._reference()] = False
        first_D = torch.arange(D) == 0
        slopes_ED = moves_E.unsqueeze(1) & first_D if self.translates else first_D
        seen_ED1 = (torch.arange(D) == self._expert_input).view(1, D, 1)
        free = {
            self._slope: slopes_ED.expand(E, D),
            self._bias: moves_E,
            "experts.w1_EDH": seen_ED1.expand(E, D, 1),
            "experts.b1_EH": torch.ones(E, 1, dtype=torch.bool),
        }
        if self.has_temperature:
            free["gate.log_scale"] = torch.tensor(True)
        if self.gating == "hierarchical":
            moves_G = torch.arange(NUM_GROUPS) < NUM_GROUPS - 1
            free["router.group_weight_GD"] = moves_G.unsqueeze(1) & first_D
            free["router.group_bias_G"] = moves_G
        return free


def _float64(values: float | Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Regression:
    """Values and Jacobians of a layer's first output at fixed points.

    The layer is the one that a detector would train, in float64 and evaluation mode.

    Args:
        layer: The mixture; its present parameters are used where nothing is free.
        tokens_ND: The points, as the layer sees them.
        free: For each parameter's name which of its elements are estimated; parameters
            that are not named stay as they are.
    """

    def __init__(
        self, layer: MoELayer, tokens_ND: Tensor, *, free: Mapping[str, Tensor]
    ) -> None:
        self.layer = layer.double().eval().requires_grad_(False)
        self.tokens_1ND = tokens_ND.double().unsqueeze(0)
        self._shapes = {name: p.shape for name, p in self.layer.named_parameters()}
        masks = [
            free.get(name, torch.zeros(shape, dtype=torch.bool)).expand(shape)
            for name, shape in self._shapes.items()
        ]
        mask = torch.cat([mask.flatten() for mask in masks])
        self._place = torch.eye(len(mask), dtype=torch.float64)[:, mask]
        flat = torch.cat([p.detach().flatten() for p in self.layer.parameters()])
        self._base = flat.masked_fill(mask, 0.0)

    @property
    def num_parameters(self) -> int:
        """P."""
        return self._place.shape[1]

    def parameters(self, theta_P: Tensor) -> dict[str, Tensor]:
        """All parameters of the layer, by name; a leading axis S is kept."""
        flat = theta_P @ self._place.T + self._base
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = flat.split(sizes, dim=-1)
        return {
            name: part.reshape((*theta_P.shape[:-1], *shape))
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def vector(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The free elements theta_P of all parameters of a layer, without an axis S."""
        flat = torch.cat([parameters[name].flatten() for name in self._shapes])
        return flat.double() @ self._place

    def position(self, name: str) -> int:
        """Where the first free element of a parameter is in theta_P.

        Raises ValueError if none is free.
        """
        start = 0
        for other, shape in self._shapes.items():
            found = self._place[start : start + shape.numel()].any(0).nonzero()
            if other == name and len(found):
                return int(found[0])
            start += shape.numel()
        raise ValueError(f"Regression.position: no element of {name!r} is free")

    def values(self, theta_SP: Tensor) -> Tensor:
        """f_SN at every point."""
        return vmap(self._values)(theta_SP)

    def values_and_jacobian(self, theta_SP: Tensor) -> tuple[Tensor, Tensor]:
        """f_SN and its derivatives (S, N, P)."""

        def twice(theta_P: Tensor) -> tuple[Tensor, Tensor]:
            f_N = self._values(theta_P)
            return f_N, f_N

        jacobian_SNP, f_SN = vmap(jacfwd(twice, has_aux=True))(theta_SP)
        return f_SN, jacobian_SNP

    def _values(self, theta_P: Tensor) -> Tensor:
        parameters = self.parameters(theta_P)
        out_1ND, _ = functional_call(self.layer, parameters, (self.tokens_1ND,))
        return out_1ND[0, :, 0]
