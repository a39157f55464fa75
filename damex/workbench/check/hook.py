"""DataCheckHook: the quick check of the data before a training."""

from __future__ import annotations

from collections.abc import Callable

from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.runner import BaseLoop, Runner

from damex.config_files import mixture_datasets
from damex.engine.work_dir import on_first
from damex.errors import ConfigError, DataError


@HOOKS.register_module()
class DataCheckHook(Hook):
    """Check training and validation data as ``damex data check --quick`` does.

    A fault ends the training before it begins; warnings go to the log. MixtureRunner
    calls the hook before the datasets are loaded, so that files are read once; other
    runners call it after that. ``data_check='off'`` in the config switches it off.
    """

    def __init__(self) -> None:
        self._is_done = False

    def before_loading(self, runner: Runner) -> None:
        """Check; DataError for unsound data, ConfigError on the other processes."""
        cfg = runner.cfg
        if cfg.get("data_check", "quick") == "off" or not cfg.get("mixture"):
            return
        from damex.workbench.check.check import checked_while_loading, refusal

        self._is_done = True
        inspection, check = checked_while_loading(cfg)
        error = _load_data(runner, check)
        # Only the first process reports faulty data.
        problem = on_first(lambda: refusal(cfg, runner.logger, inspection))
        if problem is not None and runner.rank == 0:
            raise DataError(problem)
        if problem is not None:
            raise ConfigError("the data check failed on process 0.")
        if error is not None:
            raise error

    def before_run(self, runner: Runner) -> None:
        """Check before a training if the runner has not called the hook so far."""
        if isinstance(runner._train_loop, BaseLoop) and not self._is_done:
            self.before_loading(runner)


def _load_data(runner: Runner, check: Callable) -> ConfigError | DataError | None:
    """Build both loops; their datasets call ``check`` once on the data they read."""
    datasets = [
        dataset
        for loader in (runner._train_dataloader, runner._val_dataloader)
        for dataset in mixture_datasets((loader or {}).get("dataset"))
    ]
    for dataset in datasets:
        dataset["check"] = check
    try:
        runner._train_loop = runner.build_train_loop(runner._train_loop)
        if runner._val_loop is not None:
            runner._val_loop = runner.build_val_loop(runner._val_loop)
    except (ConfigError, DataError) as error:
        return error
    finally:
        for dataset in datasets:  # it holds all that it has seen
            del dataset["check"]
    return None
