"""Optimizers that treat each expert as its own, and operations across experts.

Axes: E experts, P tensors of a bank of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from damex.errors import check_number
from damex.moe.layer import MoELayer


class NormalizedGD(Optimizer):
    """Normalized gradient descent (Chen et al. 2022, arXiv 2208.02813, Algorithm 1).

    Expert e moves by lr * g_e / ||g_e||_F, where g_e is its gradient over all tensors
    of the group, so that experts with few tokens keep up; with zero gradient it stays.
    Without momentum and weight decay. Groups are those of `expert_parameters`, one per
    bank: the first axis of their tensors counts experts, else ValueError.
    """

    keeps_state = False

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 0.001
    ) -> None:
        check_number("NormalizedGD", ">= 0", lr=lr)
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
        """Move all experts and return the loss of `closure`, if given."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            _move(group["params"], lr=group["lr"])
        return loss


def expert_parameters(
    model: nn.Module,
) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
    """Split the parameters of a model for `NormalizedGD` and another optimizer.

    Returns one group per MoE layer for `NormalizedGD`, and all other parameters
    (routers and shared experts among them). Raises ValueError without an MoE layer.
    """
    banks: list[Any] = [m.experts for m in model.modules() if isinstance(m, MoELayer)]
    groups: list[dict[str, Any]] = [dict(params=[*bank.parameters()]) for bank in banks]
    if not groups:
        raise ValueError("expert_parameters: the model has no MoELayer")
    taken = {id(p) for group in groups for p in group["params"]}
    return groups, [p for p in model.parameters() if id(p) not in taken]


@torch.no_grad()
def copy_expert_to_all(
    bank: nn.Module, *, expert: int, optimizer: Optimizer | None = None
) -> None:
    """Make all experts of a bank copies of one, gradients and moments included.

    The first axis of all its parameters and buffers counts experts. Optimizer state
    that is not per expert, such as the step count, is unchanged.
    """
    for tensor in (*bank.parameters(), *bank.buffers()):
        state = {} if optimizer is None else optimizer.state.get(tensor, {})
        for copied in (tensor, tensor.grad, *state.values()):
            if isinstance(copied, Tensor) and copied.shape[:1] == tensor.shape[:1]:
                copied.copy_(copied[expert].clone().expand_as(copied))


@torch.no_grad()
def decay_to_mean(parameter: Tensor, share: float, *, parts: int = 1) -> None:
    """Move every expert in place by a share in [0, 1] of its distance to the mean.

    The first axis counts experts. If they are cut from copies of an FFN into `parts`
    (fine-grained experts), the mean is over copies, for each part separately.
    """
    copies = parameter.unflatten(0, (-1, parts))
    copies.lerp_(copies.mean(0, keepdim=True).expand_as(copies), share)


def _move(bank: list[nn.Parameter], *, lr: float) -> None:
    pairs = [(p, p.grad) for p in bank if p.grad is not None]
    if not pairs:
        return
    # float64, as squares of small float32 gradients vanish and lr / norm may overflow.
    grads = [grad.double().reshape(grad.shape[0], -1) for _, grad in pairs]
    # Chen et al. 2022, eq. 3.4: ||g_m||_F over all tensors of expert m.
    norms_PE = torch.stack([torch.linalg.vector_norm(grad, dim=1) for grad in grads])
    norm_E = norms_PE.square().sum(0).sqrt()
    for (parameter, _), grad in zip(pairs, grads, strict=True):
        # Chen et al. 2022, eq. 3.4: W_m <- W_m - lr * g_m / ||g_m||_F.
        step = torch.where(norm_E == 0, 0.0, lr / norm_E).unsqueeze(1) * grad
        parameter.sub_(step.view_as(parameter).to(parameter.dtype))


class Muon(Optimizer):
    """Muon (Jordan et al. 2024): momentum whose singular values are made equal.

    The last two axes of a parameter are a matrix, others count experts: each expert is
    updated as if it were alone, and rests if its gradient is zero. An update has the
    root mean square of those of AdamW (Liu et al. 2025, arXiv 2502.16982), so that both
    may share a learning rate and a weight decay. A matrix moves as by
    ``torch.optim.Muon(..., adjust_lr_fn='match_rms_adamw')``. Raises ValueError for
    parameters with one axis.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.001,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        settings = dict(lr=lr, weight_decay=weight_decay, momentum=momentum)
        check_number("Muon", ">= 0", **settings)
        super().__init__(params, settings)
        shapes = [p.shape for group in self.param_groups for p in group["params"]]
        for shape in shapes:
            if len(shape) < 2:
                raise ValueError(f"Muon: needs matrices, got shape {tuple(shape)}")

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update all matrices and return the loss of `closure`, if given."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "momentum_buffer" not in state:  # others fill it at the start
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                # Else old momentum would move it as far as a gradient, without end.
                has_tokens = p.grad.flatten(-2).any(-1)[..., None, None].to(p.dtype)
                mean = state["momentum_buffer"]
                mean.lerp_(p.grad, (1 - momentum) * has_tokens)
                update = _orthogonal(p.grad.lerp(mean, momentum))  # Nesterov's
                rms = 0.2 * math.sqrt(max(p.shape[-2:]))
                p.mul_(1 - lr * group["weight_decay"] * has_tokens)
                p.sub_(lr * rms * has_tokens * update)
        return loss


def _orthogonal(matrices: Tensor) -> Tensor:
    """Approximate U V^T of matrices U S V^T (..., A, B) by Newton and Schulz.

    Five steps of a polynomial that moves singular values in (0, 1] to about 0.7 to 1.2.
    """
    flat = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if flat else matrices.mT
    x = x.to(torch.bfloat16 if _computes_bfloat16(x.device.type) else torch.float32)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return (x if flat else x.mT).to(matrices.dtype)


def _computes_bfloat16(device_type: str) -> bool:
    """Whether natively: emulated on a CPU, it is 10 times as slow as float32."""
    if device_type == "cpu":
        return torch.backends.cpu.get_cpu_capability() == "AVX512"
    return device_type == "cuda" and torch.cuda.is_bf16_supported(False)


class ChainedOptimizer(Optimizer):
    """Step two optimizers of different parameters as one.

    Its parameter groups are those of the first and then the second, the same dicts, so
    that schedulers, clipping, `zero_grad` and gradient scalers act on both. The state
    dict has the usual form and contains both; `defaults` are those of the first. Raises
    ValueError if a parameter belongs to both.
    """

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        # Without defaults, which torch would write into the groups of both.
        super().__init__([*first.param_groups, *second.param_groups], {})
        self.defaults = dict(first.defaults)
        self.optimizers = (first, second)
        self.state.update(first.state)
        self.state.update(second.state)
        self._share()

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step both; return the loss of `closure`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that belong to neither optimizer (ValueError)."""
        if hasattr(self, "optimizers"):  # while torch builds it, they are missing
            raise ValueError(
                "ChainedOptimizer: a group that is added belongs to none of the two; "
                "give all groups to the optimizers that it is made of"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state of both."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Give the two optimizers the groups and state of this one."""
        first, second = self.optimizers
        border = len(first.param_groups)
        first.param_groups = self.param_groups[:border]
        second.param_groups = self.param_groups[border:]
        first.state = second.state = self.state
