"""``load_optimizer=True``: start a training with moments of a checkpoint, by name.

Optimizers keep tensors of a parameter's shape, such as Adam's two moments. Where
experts start as a dense FFN they follow its weights (Komatsuzaki et al. 2023, arXiv
2212.05055, appendix B.6: vision models start better with them), see
`damex.models.starts`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from damex.errors import ConfigError
from damex.models.blocks import MoEBlock, MoEFFN
from damex.models.starts import Start, closing_norm
from damex.moe import Muon

# Group options that torch or a scheduler adds.
LATE_OPTIONS = {"initial_lr", "foreach", "fused", "maximize", "capturable"}
LATE_OPTIONS |= {"differentiable", "decoupled_weight_decay"}
NAMES = "optimizer_names"  # in a checkpoint's meta
MOMENTS = {"exp_avg_sq": "second", "max_exp_avg_sq": "second"}


def optimizer_of(optim_wrapper: Any) -> Optimizer | None:
    """Return the optimizer of a wrapper; None for a wrapper of several."""
    is_built = isinstance(optim_wrapper, OptimWrapper)  # in evaluation it is a config
    return getattr(optim_wrapper, "optimizer", None) if is_built else None


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of an optimizer's parameters, in the index order of its state.

    Raises:
        ConfigError: If one is not a parameter of the model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [p for group in optimizer.param_groups for p in group["params"]]
    if others := [tuple(p.shape) for p in found if id(p) not in names]:
        raise ConfigError(
            f"optim_wrapper.optimizer has {len(others)} parameters that are not of the "
            f"model, such as one of shape {others[0]}: checkpoints do not hold them; "
            "make them parameters of a module of the model."
        )
    return [names[id(parameter)] for parameter in found]


def load_moments(
    checkpoint: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    path: str,
    without: Collection[str] = (),
) -> str:
    """Initialize moments of a new training from a checkpoint, by parameter name.

    The moments of an FFN become those of its experts, as its weights do. New
    parameters, those of another shape and those in `without`, whose rows were remapped,
    start without moments. Learning rates and schedules are not loaded. Returns a
    sentence for the log.

    Raises:
        ConfigError: If the checkpoint has no moments, no parameter names for them or
            those of another optimizer, or the kind of optimizer is not supported.
    """
    needed = _needed_keys(optimizer)
    stored = _stored_state(checkpoint, path)
    starts = moment_starts(model, checkpoint["state_dict"])
    parameters = dict(model.named_parameters())
    state, bare = {}, []
    names = parameter_names(model, optimizer)
    for index, (name, keys) in enumerate(zip(names, needed, strict=True)):
        source, convert = starts[name]
        found = stored.get(source or name)
        if keys and found and name not in without:
            _check_keys(found, keys, path)
            converted = {
                key: value.clone()
                if value.dim() == 0  # a step counter
                else convert(value, parameters[name], MOMENTS.get(key, "first")).clone()
                for key, value in ((key, torch.as_tensor(found[key])) for key in keys)
            }
            shape = parameters[name].shape
            if all(v.shape == shape for v in converted.values() if v.dim() > 0):
                state[index] = converted
        if index not in state:
            bare.append(name)
    # Keep the new training's parameter groups and learning rates.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    sentence = f"{len(state)} of {len(names)} parameters start with moments of {path}"
    return f"{sentence}; without: {', '.join(bare)}" if bare else sentence


def check_resumable(
    checkpoint: Mapping[str, Any],
    model: nn.Module,
    optim_wrapper: Any,
    *,
    has_schedules: bool,
    path: str,
) -> None:
    """Check that a training can continue from a checkpoint as if it had not stopped.

    Kinds of several optimizers in one wrapper are left to mmengine.

    Raises:
        ConfigError: If the checkpoint has no progress, optimizer or, unless the config
            has none either, learning rate schedules, or another kind of optimizer or
            order of its parameters.
    """
    start = "or start a new training from it with load_from=CHECKPOINT."
    if not {"epoch", "iter"} <= (checkpoint.get("meta") or {}).keys():
        raise ConfigError(
            f"--resume: {path} does not contain the progress of a training (nor do the "
            f"checkpoints of prune, merge and grow); name one that a training wrote, "
            f"{start}"
        )
    needed = ["optimizer", *["param_schedulers"] * has_schedules]
    if missing_parts := [name for name in needed if name not in checkpoint]:
        raise ConfigError(
            f"--resume: {path} holds no {' and no '.join(missing_parts)}, like every "
            "best_*.pth; resume from an epoch_N.pth or iter_N.pth of the training, "
            f"{start}"
        )
    optimizer = optimizer_of(optim_wrapper)
    if optimizer is None:
        return
    saved = checkpoint["optimizer"]["param_groups"]
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    sizes = [[len(group["params"]) for group in one] for one in (groups, saved)]
    pairs = zip(groups, saved, strict=False)
    missing = set().union(*(group.keys() - old.keys() for group, old in pairs))
    problem = ""
    if missing := missing - LATE_OPTIONS:
        problem = f"another kind, whose options lack {', '.join(sorted(missing))}"
    elif sizes[0] != sizes[1]:
        problem = (
            f"{sum(sizes[1])} parameters in {len(saved)} groups, not {sum(sizes[0])} "
            f"in {len(groups)}"
        )
    elif checkpoint["meta"].get(NAMES) not in (None, parameter_names(model, optimizer)):
        problem = "its parameters in another order"
    if problem:
        raise ConfigError(
            f"--resume: optim_wrapper.optimizer is {kind}, and {path} was trained with "
            f"{problem}; set the optim_wrapper (constructor, paramwise_cfg) of it, "
            f"{start}"
        )


def _needed_keys(optimizer: Optimizer) -> list[tuple[str, ...]]:
    """State keys of each parameter, in the order of the optimizer."""
    if parts := getattr(optimizer, "optimizers", ()):
        return [keys for part in parts for keys in _needed_keys(part)]
    rows: list[tuple[str, ...]] = []
    for group in optimizer.param_groups:
        if isinstance(optimizer, (Adam, AdamW)):
            keys: tuple[str, ...] = ("step", "exp_avg", "exp_avg_sq")
            keys += ("max_exp_avg_sq",) if group["amsgrad"] else ()
        elif isinstance(optimizer, (SGD, Muon)):
            keys = ("momentum_buffer",) if group["momentum"] else ()
        elif not getattr(optimizer, "keeps_state", True):
            keys = ()
        else:
            raise ConfigError(
                "load_optimizer=True supports moments of Adam, AdamW, Muon and SGD, "
                f"and optim_wrapper.optimizer is {type(optimizer).__name__}; use one "
                "of them, or set load_optimizer=False."
            )
        rows += [keys] * len(group["params"])
    return rows


def _stored_state(checkpoint: Mapping[str, Any], path: str) -> dict[str, dict]:
    names = (checkpoint.get("meta") or {}).get(NAMES)
    if "optimizer" not in checkpoint or names is None:
        what = "parameter names of its optimizer" if names is None else "optimizer"
        raise ConfigError(
            f"load_optimizer=True: the checkpoint {path} holds no {what}; save it with "
            "damex and default_hooks.checkpoint.save_optimizer=True, or set "
            "load_optimizer=False."
        )
    state = checkpoint["optimizer"]["state"]
    return {name: state[i] for i, name in enumerate(names) if i in state}


def _check_keys(found: Mapping[str, Any], keys: tuple[str, ...], path: str) -> None:
    missing = [key for key in keys if found.get(key) is None]
    if missing:
        raise ConfigError(
            f"load_optimizer=True: the checkpoint {path} was trained with another kind "
            f"of optimizer, which kept {', '.join(found)} but not {missing[0]}; use "
            "the same kind, or set load_optimizer=False."
        )


def moment_starts(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Start]:
    """Find where the moments of every parameter of a detector come from, by name.

    Most from a parameter of the same name, which need not exist in ``state``, the state
    dict of the earlier detector.
    """
    found = {name: Start(name) for name, _ in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, MoEBlock):
            for own, start in module.starts(state, f"{name}.").items():
                if start.source is not None and f"{name}.{own}" in found:
                    found[f"{name}.{own}"] = start
        if isinstance(module, MoEFFN) and module.norm is not None:
            parent = name.rpartition(".")[0]
            closing = closing_norm(model.get_submodule(parent), f"{parent}.")
            for own, _ in module.norm.named_parameters():
                if closing + own in state:
                    found[f"{name}.norm.{own}"] = Start(closing + own)
    return found
