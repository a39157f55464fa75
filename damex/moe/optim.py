"""Gradient descent in which every expert moves by the same length, and mean decay.

Axes: E experts, P tensors of a bank of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from damex.moe.layer import MoELayer


class NormalizedGD(Optimizer):
    """Normalised gradient descent (Chen et al. 2022, arXiv 2208.02813, Algorithm 1).

    Expert e moves by lr * g_e / ||g_e||_F, where g_e is its gradient over all tensors
    of the group together, so that experts with few tokens keep up. Experts without
    gradient do not move. There is no momentum and no weight decay.

    Args:
        params: Groups as `expert_parameters` gives them, one per bank of experts; each
            tensor of a group has one slice per expert along its first axis.
        lr: Length of the step of each expert, in Frobenius norm.

    Raises:
        ValueError: If `lr` is negative, or tensors of a group differ in their number of
            experts.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 0.001
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"NormalizedGD: lr must be >= 0, got {lr}")
        super().__init__(params, dict(lr=lr))
        for number, group in enumerate(self.param_groups):
            shapes = [tuple(p.shape) for p in group["params"]]
            if len({shape[:1] for shape in shapes}) > 1 or () in shapes:
                raise ValueError(
                    f"NormalizedGD: the tensors of group {number} must have one slice "
                    f"per expert along their first axis, got shapes {shapes}; give "
                    "each bank of experts its own group, see expert_parameters"
                )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Moves all experts.

        Args:
            closure: Computes the loss and its gradients anew, if given.

        Returns:
            What `closure` returned.
        """
        loss = _evaluate(closure)
        for group in self.param_groups:
            _move(group["params"], lr=group["lr"])
        return loss


def _evaluate(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def expert_parameters(
    model: nn.Module,
) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
    """Parts the parameters of a model for `NormalizedGD` and another optimiser.

    Args:
        model: With one or more MoE layers.

    Returns:
        experts: One group per MoE layer, ready for `NormalizedGD`.
        others: All other parameters: routers, shared experts and the rest.

    Raises:
        ValueError: If there is no MoE layer.
    """
    banks = [m.experts for m in model.modules() if isinstance(m, MoELayer)]
    groups: list[dict[str, Any]] = [
        dict(params=list(bank.parameters()))
        for bank in banks
        if isinstance(bank, nn.Module)
    ]
    if not groups:
        raise ValueError("expert_parameters: the model has no MoELayer")
    taken = {id(p) for group in groups for p in group["params"]}
    return groups, [p for p in model.parameters() if id(p) not in taken]


@torch.no_grad()
def copy_expert_to_all(
    bank: nn.Module, *, expert: int, optimizer: Optimizer | None = None
) -> None:
    """Makes all experts of a bank copies of one, gradients and moments included.

    What an optimiser keeps once per parameter, such as its count of steps, stays.

    Args:
        bank: All its parameters and buffers have one slice per expert along their first
            axis.
        expert: The number of the one.
        optimizer: Trains the bank; None for the weights alone.
    """
    for tensor in (*bank.parameters(), *bank.buffers()):
        state = {} if optimizer is None else optimizer.state.get(tensor, {})
        for copied in (tensor, tensor.grad, *state.values()):
            if isinstance(copied, Tensor) and copied.shape[:1] == tensor.shape[:1]:
                copied.copy_(copied[expert].clone().expand_as(copied))


@torch.no_grad()
def decay_to_mean(parameter: Tensor, share: float, *, parts: int = 1) -> None:
    """Moves every expert a share of the way to the mean of the experts.

    Args:
        parameter: One slice per expert along its first axis; changed in place. The mean
            stays where it is.
        share: In [0, 1]; 1 makes all experts equal.
        parts: Where experts are cut from copies of an FFN (see `damex.moe.split`),
            parts per copy: the mean is over copies, for each part on its own.
    """
    copies = parameter.unflatten(0, (-1, parts))
    copies.lerp_(copies.mean(0, keepdim=True).expand_as(copies), share)


def _move(bank: list[nn.Parameter], *, lr: float) -> None:
    pairs = [(p, p.grad) for p in bank if p.grad is not None]
    if not pairs:
        return
    # float64, as squares of small float32 gradients vanish and lr / norm may overflow.
    grads = [grad.double().reshape(grad.shape[0], -1) for _, grad in pairs]
    norms_PE = torch.stack([torch.linalg.vector_norm(grad, dim=1) for grad in grads])
    norm_E = norms_PE.square().sum(0).sqrt()
    for (parameter, _), grad in zip(pairs, grads, strict=True):
        step = torch.where(norm_E == 0, 0.0, lr / norm_E).unsqueeze(1) * grad
        parameter.sub_(step.view_as(parameter).to(parameter.dtype))


class ChainedOptimizer(Optimizer):
    """Steps two optimisers of different parameters as one.

    Its parameter groups are those of the first and then those of the second, the same
    dicts, so a scheduler moves the learning rates of both; so do clipping, `zero_grad`
    and a gradient scaler see all parameters. The state dict has the form of any torch
    optimiser's and holds both.

    Args:
        first: Gives the default values that trainers ask for, such as the learning
            rate.
        second: Of other parameters.

    Raises:
        ValueError: If a parameter belongs to both.
    """

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        # Without defaults, as torch would write those of one into the other's groups.
        super().__init__([*first.param_groups, *second.param_groups], {})
        self.defaults = dict(first.defaults)
        self.first = first
        self.second = second
        self.state.update(first.state)
        self.state.update(second.state)
        self._share()

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Steps both; see `NormalizedGD.step`."""
        loss = _evaluate(closure)
        self.first.step()
        self.second.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads groups and state of both.

        Args:
            state_dict: Of a `ChainedOptimizer` of the same parameters.
        """
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Hands this optimiser's groups and state to the two."""
        border = len(self.first.param_groups)
        self.first.param_groups = self.param_groups[:border]
        self.second.param_groups = self.param_groups[border:]
        self.first.state = self.second.state = self.state
