"""The paper's regression functions: a MoE layer as a function of a parameter vector.

Axes: S parameter vectors, P free parameters, N points, D width of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call, jacfwd, vmap

from damex.moe import MoELayer

__all__ = ["Regression"]


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
        """All parameters of the layer, by name.

        Args:
            theta_P: Values of the free ones; a leading axis S is kept.
        """
        flat = theta_P @ self._place.T + self._base
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = flat.split(sizes, dim=-1)
        return {
            name: part.reshape((*theta_P.shape[:-1], *shape))
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def vector(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The free elements of all parameters of a layer.

        Args:
            parameters: As `parameters` returns them, without the axis S.

        Returns:
            theta_P.
        """
        flat = torch.cat([parameters[name].flatten() for name in self._shapes])
        return flat.double() @ self._place

    def position(self, name: str) -> int:
        """Where the first free element of a parameter is in theta_P.

        Args:
            name: Name of the parameter.

        Raises:
            ValueError: If nothing of it is free.
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
