"""``load_optimizer=True``: start a training with moments of a checkpoint, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mmengine.optim import OptimWrapper
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from damex.errors import ConfigError
from damex.models.moments import Origin, moment_origins
from damex.moe import ChainedOptimizer, NormalizedGD

# Group options that torch or a scheduler adds.
LATE_OPTIONS = {"initial_lr", "foreach", "fused", "maximize", "capturable"}
LATE_OPTIONS |= {"differentiable", "decoupled_weight_decay"}
NAMES = "optimizer_names"  # in a checkpoint's meta
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of an optimiser's parameters, in the index order of its state."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def take_over_moments(
    checkpoint: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    path: str,
    without: Collection[str] = (),
) -> str:
    """Initialize moments of a new training from a checkpoint, by parameter name.

    The moments of an FFN become those of its experts, as its weights do; see
    :mod:`damex.models.moments`. New parameters, those of another shape and those in
    `without`, whose rows have another meaning, start without moments. Learning rates
    and schedules are not loaded. Returns a sentence for the log.

    Raises:
        ConfigError: If the checkpoint has no moments, no parameter names for them or
            those of another optimiser, or the kind of optimiser is not supported.
    """
    needed = _needed_keys(optimizer)
    stored = _stored_state(checkpoint, path)
    origins = moment_origins(model, checkpoint["state_dict"])
    parameters = dict(model.named_parameters())
    state, bare = {}, []
    names = parameter_names(model, optimizer)
    for index, (name, keys) in enumerate(zip(names, needed, strict=True)):
        origin = origins[name]
        found = stored.get(origin.source)
        if keys and found and name not in without:
            _check_keys(found, keys, path)
            converted = {key: _converted(found[key], origin, key) for key in keys}
            if _fits(converted, parameters[name]):
                state[index] = converted
        if index not in state:
            bare.append(name)
    # Keep the new training's parameter groups and learning rates.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    sentence = f"{len(state)} of {len(names)} parameters start with moments of {path}"
    return f"{sentence}; without: {', '.join(bare)}" if bare else sentence


def check_resumable(
    checkpoint: Mapping[str, Any], optim_wrapper: Any, *, path: str
) -> None:
    """Raise ConfigError if a checkpoint's progress is missing or its optimiser differs.

    Wrappers of several optimisers are left to mmengine.
    """
    start = "or start a new training from it with load_from=CHECKPOINT."
    if not {"epoch", "iter"} <= (checkpoint.get("meta") or {}).keys():
        raise ConfigError(
            f"--resume: {path} does not hold how far a training came (prune, merge and "
            f"grow write such checkpoints); name one that a training wrote, {start}"
        )
    saved = (checkpoint.get("optimizer") or {}).get("param_groups")
    if saved is None or not isinstance(optim_wrapper, OptimWrapper):
        return
    optimizer = optim_wrapper.optimizer
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    sizes = [[len(group["params"]) for group in one] for one in (groups, saved)]
    pairs = zip(groups, saved, strict=False)
    missing = set().union(*(group.keys() - old.keys() for group, old in pairs))
    if missing := missing - LATE_OPTIONS:
        raise ConfigError(
            f"--resume: optim_wrapper.optimizer is {kind}, and {path} was trained with "
            f"another kind, whose options lack {', '.join(sorted(missing))}; set the "
            f"optimizer of that training, {start}"
        )
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"--resume: {kind} has {sum(sizes[0])} parameters in {len(groups)} groups, "
            f"and in {path} it has {sum(sizes[1])} in {len(saved)}; set the "
            f"optim_wrapper (paramwise_cfg) of that training, {start}"
        )


def _needed_keys(optimizer: Optimizer) -> list[tuple[str, ...]]:
    """State keys of each parameter, in the order of the optimiser."""
    if isinstance(optimizer, ChainedOptimizer):
        return _needed_keys(optimizer.first) + _needed_keys(optimizer.second)
    rows: list[tuple[str, ...]] = []
    for group in optimizer.param_groups:
        if isinstance(optimizer, (Adam, AdamW)):
            keys: tuple[str, ...] = ("step", "exp_avg", "exp_avg_sq")
            keys += ("max_exp_avg_sq",) if group["amsgrad"] else ()
        elif isinstance(optimizer, SGD):
            keys = ("momentum_buffer",) if group["momentum"] else ()
        elif isinstance(optimizer, NormalizedGD):
            keys = ()
        else:
            raise ConfigError(
                "load_optimizer=True knows the moments of Adam, AdamW and SGD, and "
                f"optim_wrapper.optimizer is {type(optimizer).__name__}; take one of "
                "them, or set load_optimizer=False."
            )
        rows += [keys] * len(group["params"])
    return rows


def _stored_state(checkpoint: Mapping[str, Any], path: str) -> dict[str, dict]:
    """Optimiser state by parameter name."""
    if "optimizer" not in checkpoint:
        raise ConfigError(
            f"load_optimizer=True: the checkpoint {path} holds no optimiser; save it "
            "with default_hooks.checkpoint.save_optimizer=True, or set "
            "load_optimizer=False."
        )
    names = (checkpoint.get("meta") or {}).get(NAMES)
    if names is None:
        raise ConfigError(
            f"load_optimizer=True: the checkpoint {path} does not say which parameters "
            "its optimiser's state is of (it is older than this option, or not saved "
            "by damex); set load_optimizer=False."
        )
    state = checkpoint["optimizer"]["state"]
    return {name: state[i] for i, name in enumerate(names) if i in state}


def _check_keys(found: Mapping[str, Any], keys: tuple[str, ...], path: str) -> None:
    missing = [key for key in keys if found.get(key) is None]
    if missing:
        raise ConfigError(
            f"load_optimizer=True: the checkpoint {path} was trained with another kind "
            f"of optimiser, which kept {', '.join(found)} and no {missing[0]}; train "
            "on with the same kind, or set load_optimizer=False."
        )


def _converted(value: Any, origin: Origin, key: str) -> Any:
    """Convert a moment to the new parameter; step counters are kept."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.clone()
    return origin.convert(value, key in SECOND_MOMENTS).clone()


def _fits(state: Mapping[str, Any], parameter: nn.Parameter) -> bool:
    moments = [v for v in state.values() if isinstance(v, Tensor) and v.dim() > 0]
    return all(moment.shape == parameter.shape for moment in moments)
