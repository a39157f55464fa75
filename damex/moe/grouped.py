"""One linear map per expert over rows sorted by expert, and its backends.

Axes: E experts, R rows, D input width and F output width of one linear map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

BACKENDS = ("auto", "split", "grouped_mm")


def grouped_linear(
    x_RD: Tensor,
    weight_EDF: Tensor,
    bias_EF: Tensor | None,
    counts_E: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Apply expert e's linear map to the e-th segment of rows.

    All backends give the same result, run under autocast, and give experts without rows
    zero gradients, never None. Raises ValueError if the backend does not support the
    input.

    - 'split': one `linear` per segment; fastest on the CPU, synchronizes with the host.
    - 'grouped_mm': one kernel for all experts, without synchronization.
    - 'auto': 'grouped_mm' for bfloat16 on CUDA devices with the fast kernel, else
      'split'.
    """
    backend = choose_backend(x_RD, weight_EDF, backend=backend)
    # In a compiled graph the number of rows may be unknown until it runs.
    if backend == "grouped_mm" and (torch.compiler.is_compiling() or len(x_RD) > 0):
        return _grouped_mm_linear(x_RD, weight_EDF, bias_EF, counts_E)
    return _split_linear(x_RD, weight_EDF, bias_EF, counts_E)


def choose_backend(x_RD: Tensor, weight_EDF: Tensor, *, backend: str = "auto") -> str:
    """Resolve 'auto' to 'split' or 'grouped_mm'; ValueError if it cannot run."""
    if backend == "grouped_mm":
        obstacle = _grouped_mm_obstacle(x_RD, weight_EDF)
        if obstacle is not None:
            raise ValueError(
                f"grouped_linear: backend 'grouped_mm' needs {obstacle}; "
                "use backend='auto' or 'split'"
            )
    if backend != "auto":
        return backend
    fast = (
        x_RD.device.type == "cuda"
        and _compute_dtype(x_RD) == torch.bfloat16
        and torch.cuda.get_device_capability(x_RD.device) >= (9, 0)
        and _grouped_mm_obstacle(x_RD, weight_EDF) is None
    )
    return "grouped_mm" if fast else "split"


def map_segments(
    function: Callable[..., Tensor],
    x_RD: Tensor,
    parameters: Sequence[Tensor],
    counts_E: Tensor,
) -> Tensor:
    """Apply `function(rows, *parameters_of_e)` to each expert's segment of rows.

    The first axis of `parameters` is E. Empty segments are skipped, which gives their
    experts zero gradients. The counts are read on the host unless there is only one
    expert.
    """
    num_experts = counts_E.shape[0]
    unbound = [parameter.unbind() for parameter in parameters]
    if num_experts == 1:
        return function(x_RD, *(slices[0] for slices in unbound))
    sizes = counts_E.tolist() if x_RD.shape[0] > 0 else [0] * num_experts
    # Without rows, expert 0 maps an empty slice, which connects all parameters to the
    # graph: unbind gives the skipped experts zero gradients.
    used = [e for e, size in enumerate(sizes) if size > 0] or [0]
    segments = x_RD.split(sizes)
    outs = [function(segments[e], *(slices[e] for slices in unbound)) for e in used]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def spread_over_rows(values_EF: Tensor, counts_E: Tensor, num_rows: int) -> Tensor:
    """Repeat each expert's values for every row of its segment.

    A product with one-hot rows is deterministic in the backward pass, where a gather
    would add with atomics.
    """
    experts_E = torch.arange(counts_E.shape[0], device=counts_E.device)
    # output_size avoids a synchronization with the host.
    expert_index_R = experts_E.repeat_interleave(counts_E, output_size=num_rows)
    one_hot_RE = expert_index_R.unsqueeze(1) == experts_E
    return one_hot_RE.to(values_EF.dtype) @ values_EF


def _split_linear(
    x_RD: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None, counts_E: Tensor
) -> Tensor:
    # torch.compile and torch.func transforms (torch has no public test for them) do not
    # support the custom function below.
    transformed = torch._C._are_functorch_transforms_active()
    if torch.compiler.is_compiling() or transformed or weight_EDF.shape[0] == 1:
        parameters = (weight_EDF,) if bias_EF is None else (weight_EDF, bias_EF)
        return map_segments(_linear, x_RD, parameters, counts_E)
    dtype = _compute_dtype(x_RD)
    bias_EF = None if bias_EF is None else bias_EF.to(dtype)
    return _SplitLinear.apply(
        x_RD.to(dtype), weight_EDF.to(dtype), bias_EF, counts_E.tolist()
    )


def _linear(rows_RD: Tensor, weight_DF: Tensor, bias_F: Tensor | None = None) -> Tensor:
    return functional.linear(rows_RD, weight_DF.t(), bias_F)


class _SplitLinear(torch.autograd.Function):
    """One product per expert, written in place into the result.

    With many experts and few tokens the weight gradient is the largest tensor of a
    step; autograd would compute it in pieces and copy them together.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weight_EDF: Tensor,
        bias_EF: Tensor | None,
        sizes: list[int],
    ) -> Tensor:
        ctx.save_for_backward(x_RD, weight_EDF)
        ctx.sizes = sizes
        out_RF = x_RD.new_empty(x_RD.shape[0], weight_EDF.shape[2])
        outs, rows = out_RF.split(sizes), x_RD.split(sizes)
        for e, (out, row, weight) in enumerate(
            zip(outs, rows, weight_EDF, strict=True)
        ):
            if bias_EF is None:
                torch.mm(row, weight, out=out)
            else:
                torch.addmm(bias_EF[e], row, weight, out=out)
        return out_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_EDF = ctx.saved_tensors
        rows, grad_rows = x_RD.split(ctx.sizes), grads[0].split(ctx.sizes)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x_RD)
            for out, grad, weight in zip(
                of_x.split(ctx.sizes), grad_rows, weight_EDF, strict=True
            ):
                torch.mm(grad, weight.t(), out=out)
        if ctx.needs_input_grad[1]:
            of_weight = torch.empty_like(weight_EDF)
            for out, row, grad in zip(of_weight, rows, grad_rows, strict=True):
                torch.mm(row.t(), grad, out=out)
        if ctx.needs_input_grad[2]:
            of_bias = weight_EDF.new_empty(len(weight_EDF), weight_EDF.shape[2])
            for out, grad in zip(of_bias, grad_rows, strict=True):
                torch.sum(grad, 0, out=out)
        return of_x, of_weight, of_bias, None


def _grouped_mm_linear(
    x_RD: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None, counts_E: Tensor
) -> Tensor:
    """Call `F.grouped_mm` (only here) and work around its hazards.

    - It ignores autocast: everything is cast here.
    - Rows past the last (int32) offset are uninitialized: the counts sum to R.
    - It has no bias: `spread_over_rows` adds one.
    - It crashes on incoming gradients with stride 0, as `out.sum()` makes them.
    - Its weight gradients of empty groups are not zero on every device (pytorch/pytorch
      issue 172439).
    - Zero rows fail under torch.compile (pull 192497): the caller avoids them.
    """
    dtype = _compute_dtype(x_RD)
    offsets_E = counts_E.cumsum(0, dtype=torch.int32)
    weight_EDF = _ZeroGradWhenEmpty.apply(weight_EDF.to(dtype), counts_E)
    out_RF = _ContiguousGrad.apply(
        functional.grouped_mm(x_RD.to(dtype).contiguous(), weight_EDF, offs=offsets_E)
    )
    if bias_EF is None:
        return out_RF
    return out_RF + spread_over_rows(bias_EF.to(dtype), counts_E, x_RD.shape[0])


def _grouped_mm_obstacle(x_RD: Tensor, weight_EDF: Tensor) -> str | None:
    """Return what `F.grouped_mm` needs and this input lacks, or None."""
    if not hasattr(functional, "grouped_mm"):
        return f"torch 2.10 or newer (this is {torch.__version__})"
    dtype = _compute_dtype(x_RD)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"bfloat16, float16 or float32, not {dtype}"
    if any(width * dtype.itemsize % 16 for width in weight_EDF.shape[1:]):
        return (
            "rows that are a multiple of 16 bytes, which widths "
            f"{tuple(weight_EDF.shape[1:])} in {dtype} are not"
        )
    return None


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that `linear` computes in: autocast's, except for float64."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class _ContiguousGrad(torch.autograd.Function):
    """Identity that makes the incoming gradient contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


class _ZeroGradWhenEmpty(torch.autograd.Function):
    """Identity on expert weights; experts without rows get exactly zero gradients."""

    @staticmethod
    def forward(ctx: Any, weight_EDF: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(counts_E)
        return weight_EDF.view_as(weight_EDF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (counts_E,) = ctx.saved_tensors
        return grads[0].masked_fill((counts_E == 0).view(-1, 1, 1), 0.0), None
