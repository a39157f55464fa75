"""Two optimisers that look like one, for trainers that can hold only one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim import Optimizer


class JoinedOptimizer(Optimizer):
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

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Steps both.

        Args:
            closure: Computes the loss and its gradients anew, if given.

        Returns:
            What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.first.step()
        self.second.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads groups and state of both.

        Args:
            state_dict: Of a `JoinedOptimizer` of the same parameters.
        """
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Hands this optimiser's groups and state to the two."""
        border = len(self.first.param_groups)
        self.first.param_groups = self.param_groups[:border]
        self.second.param_groups = self.param_groups[border:]
        self.first.state = self.second.state = self.state
