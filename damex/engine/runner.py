"""MixtureRunner: mmengine's Runner for configs with a mixture."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
from mmdet.registry import MODELS
from mmengine.config import Config, ConfigDict
from mmengine.device import get_device
from mmengine.dist import is_distributed
from mmengine.hooks import EMAHook
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.registry import RUNNERS
from mmengine.runner import CheckpointLoader, Runner
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from torch import Tensor, nn

from damex.compat import ensure_ops
from damex.config_files import LOADERS, mixture_datasets
from damex.curation.check import checked_while_loading, refusal
from damex.datasets.geometry import check_views
from damex.engine.checkpoint import check_finite, check_fit, replace_misfits
from damex.engine.config import (
    check_answers,
    check_settings,
    label_space_of,
    misspelt_keys,
    resolve_config,
)
from damex.engine.console import ProgressHook, filter_console
from damex.engine.freezing import FreezeRowsHook, freeze_all_but
from damex.engine.hooks import (
    IterationSeedHook,
    RoutingAlarmHook,
    TrainingStepHook,
    bare_model,
    routed_detector,
)
from damex.engine.monitoring import PendingEvaluationHook, check_monitored
from damex.engine.optim import in_steps, set_length, spans
from damex.engine.optimizer_state import check_resumable, load_moments
from damex.engine.orderly_runner import OrderlyRunner
from damex.engine.resumption import AccumulationHook, DataProgressHook
from damex.engine.rows import remap_checkpoint
from damex.engine.summary import RunSummaryHook, versions
from damex.errors import ConfigError, DataError, did_you_mean
from damex.models.detectors import RoutedDetector
from damex.models.insertion import moe_blocks, upcycling_note

DDP = "MMDistributedDataParallel"
HOOKS_OF_DAMEX = (
    IterationSeedHook,
    TrainingStepHook,
    DataProgressHook,
    AccumulationHook,
    ProgressHook,
    RunSummaryHook,
    RoutingAlarmHook,
    PendingEvaluationHook,
)


@RUNNERS.register_module()
class MixtureRunner(OrderlyRunner):
    """Runner that completes the config, keeps the console readable and runs anywhere.

    It is the default of damex's tools; ``runner_type='MixtureRunner'`` in a config
    selects it in mmdet's tools, too. It fills in the settings that follow from the
    mixture; takes the length of training from a top-level ``max_epochs`` or
    ``max_iters``; always adds damex's hooks; limits the console to warnings
    (``console='full'`` shows all); requires a checkpoint to resume or evaluate to fit;
    and runs several processes without a GPU.
    """

    _train_loop: Any
    _val_loop: Any
    _kept_rows: Mapping[str, Tensor] = MappingProxyType({})

    @classmethod
    def from_cfg(cls, cfg: Config | ConfigDict) -> Runner:
        """Build a runner, with or without a mixture; ConfigError for a bad setting."""
        check_settings(cfg)
        notes = misspelt_keys(cfg)
        cfg = resolve_config(cfg)
        notes += check_views(cfg)
        check_detector(cfg["model"])
        check_answers(cfg["model"])
        set_length(cfg)
        for loader in LOADERS:
            if cfg.get(loader) and cfg[loader].get("num_workers") == 0:
                cfg[loader]["persistent_workers"] = False  # torch rejects True
        runner = super().from_cfg(cfg)
        for note in notes:
            runner.logger.warning(note)
        return runner

    def register_hooks(
        self, default_hooks: dict | None = None, custom_hooks: list | None = None
    ) -> None:
        """Register the config's hooks and damex's: ``custom_hooks`` would drop them."""
        super().register_hooks(default_hooks, custom_hooks)
        if self._kept_rows:
            self.register_hook(FreezeRowsHook(self._kept_rows))
        for hook in HOOKS_OF_DAMEX:
            if not any(isinstance(known, hook) for known in self.hooks):
                self.register_hook(hook())

    def build_param_scheduler(self, scheduler: Any) -> Any:
        """Build schedulers; points in time below 1 are fractions of the training."""
        return super().build_param_scheduler(
            in_steps(scheduler, epochs=self.max_epochs, iters=self.max_iters)
        )

    def setup_env(self, env_cfg: dict) -> None:
        """Set up processes, with gloo if there is no GPU."""
        is_launched = self.launcher == "pytorch" and not is_distributed()
        if is_launched and get_device() == "cpu":
            seconds = env_cfg.get("dist_cfg", {}).get("timeout") or 1800  # as torch
            limit = timedelta(seconds=seconds)
            torch.distributed.init_process_group(backend="gloo", timeout=limit)
        super().setup_env(env_cfg)

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Log everything to the file, and only warnings to the screen."""
        logger = super().build_logger(*args, **kwargs)
        if self.cfg.get("console", "progress") == "progress":
            filter_console(logger)
        logger.info(ensure_ops().summary())
        return logger

    def _log_env(self, env_cfg: dict) -> None:
        """Log versions and settings, without mmengine's compiler queries."""
        settings = dict(
            platform=platform.platform(),
            **versions(),
            cuda=torch.version.cuda,
            gpus=[*map(torch.cuda.get_device_name, range(torch.cuda.device_count()))],
            processes=self.world_size,
            launcher=self.launcher,
            **{**self._randomness_cfg, **env_cfg, "seed": self.seed},
        )
        lines = [f"{name}: {value}" for name, value in settings.items()]
        self.logger.info("\n    ".join(["Environment:", *lines]))
        self.logger.info(f"{torch.__config__.show()}\nConfig:\n{self.cfg.pretty_text}")

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Apply ``train_only``, then wrap for several processes."""
        datasets = self.cfg.get("train_only")
        if datasets is not None:  # before DDP looks at requires_grad
            space = label_space_of(self.cfg)
            self._kept_rows = freeze_all_but(model, space, datasets)
        wrapper = model_wrapper_cfg
        if wrapper is None:
            wrapper = dict(broadcast_buffers=False)
        is_ours = self.distributed and wrapper.get("type", DDP) == DDP
        if is_ours and not is_model_wrapper(model):
            # Some parameters have no gradient in each stage.
            in_stages = getattr(model, "trains_in_stages", False)
            unused = in_stages or self.cfg.get("find_unused_parameters", False)
            defaults: dict[str, Any] = dict(type=DDP, find_unused_parameters=unused)
            if get_device() == "cpu":
                defaults["device_ids"] = None
            model_wrapper_cfg = {**defaults, **wrapper}
        return super().wrap_model(model_wrapper_cfg, model)

    def check_start(self) -> None:
        """Check settings and data; ConfigError or DataError if training is unsound."""
        detector = routed_detector(self)
        check_monitored(self, has_experts=bool(moe_blocks(self.model)))
        gating = getattr(detector, "channel_gating", None)
        needs_checkpoint = {
            "load_optimizer": self.cfg.get("load_optimizer"),
            "train_only": self.cfg.get("train_only"),
            "moe.channels.frozen": gating is not None and gating.path.frozen,
        }
        for name, value in needs_checkpoint.items():
            if value and self._load_from is None and not self._resume:
                raise ConfigError(
                    f"{name}={value} builds on an earlier training, and the config "
                    f"names no checkpoint of one; set load_from=CHECKPOINT, or leave "
                    f"{name} out."
                )
        averages = any(isinstance(hook, EMAHook) for hook in self.hooks)
        if averages and detector is not None and detector.upcycling is not None:
            raise ConfigError(
                "moe.upcycling and EMAHook cannot be combined: averages would mix "
                "experts with the FFNs from which they were copied; leave one of "
                "them out."
            )
        if self.cfg.get("data_check", "quick") == "off" or not self.cfg.get("mixture"):
            return
        inspection, check = checked_while_loading(self.cfg)
        error = self._load_data(check)
        # Only the first process reports faulty data.
        fault = self.on_first(lambda: refusal(self.cfg, self.logger, inspection))
        if fault is not None and self.rank == 0:
            raise DataError(fault)
        if fault is not None:
            raise ConfigError("process 0 found errors in the data.")
        if error is not None:
            raise error

    def _load_data(self, check: Callable) -> ConfigError | DataError | None:
        """Build both loops, whose datasets call ``check`` on what they read, once."""
        datasets = [
            dataset
            for loader in (self._train_dataloader, self._val_dataloader)
            for dataset in mixture_datasets((loader or {}).get("dataset"))
        ]
        for dataset in datasets:
            dataset["check"] = check
        try:
            self._train_loop = self.build_train_loop(self._train_loop)
            if self._val_loop is not None:
                self._val_loop = self.build_val_loop(self._val_loop)
        except (ConfigError, DataError) as error:
            return error
        finally:
            for dataset in datasets:  # it holds all that it has seen
                del dataset["check"]
        return None

    def load_or_resume(self) -> None:
        """Load or resume as configured; warn if the schedule is not the config's."""
        planned = spans(self.param_schedulers)
        super().load_or_resume()
        if spans(self.param_schedulers) != planned:
            self.logger.warning(
                "--resume: the learning rate continues on the checkpoint's schedule, "
                "which has another length than the config's; for the config's, start a "
                "new training from it with load_from=CHECKPOINT."
            )

    def load_checkpoint(
        self,
        filename: str,
        map_location: str | Callable = "cpu",
        strict: bool = False,
        revise_keys: list | None = None,
    ) -> dict:
        """Load a checkpoint as data; to resume or evaluate, it has to fit exactly.

        As a start for training, missing tensors and other shapes are allowed, as in
        mmengine: dense weights initialize every expert (and so do their moments with
        ``load_optimizer=True``), and classes and experts of datasets are matched by
        name.

        Raises:
            DataError: If the file is missing, damaged, or holds more than data.
            ConfigError: If it does not fit, or has no moments to take over.
        """
        checkpoint = CheckpointLoader.load_checkpoint(filename, map_location)
        state = checkpoint.get("state_dict", checkpoint)
        meta = checkpoint.get("meta") or {}
        check_finite(state, path=filename)
        meta.pop("config", None)  # mmengine's resume would execute this text
        model, space = bare_model(self), label_space_of(self.cfg)
        is_start, remapped = not (self._resume or self.evaluates), set[str]()
        notes: list[str | None] = []
        if is_start:
            detector = routed_detector(self)
            remapped, found = remap_checkpoint(state, meta, detector, space)
            notes += [*found, replace_misfits(state, model)]
            notes += [upcycling_note(model, state)]
        else:
            notes += [check_fit(checkpoint, model, space, path=filename)]
            if self._resume:
                check_resumable(
                    checkpoint,
                    self.optim_wrapper,
                    has_schedules=self.param_schedulers is not None,
                    path=filename,
                )
        for note in filter(None, notes):
            self.logger.warning(f"{filename}: {note}")
        self.call_hook("after_load_checkpoint", checkpoint=checkpoint)
        revise_keys = revise_keys or [(r"^module\.", "")]
        checkpoint = _load_checkpoint_to_model(
            model, checkpoint, strict, revise_keys=revise_keys
        )
        self._has_loaded = True
        self.logger.info(f"Load checkpoint from {filename}")
        if is_start and self.cfg.get("load_optimizer"):
            optimizer = self.optim_wrapper.optimizer
            self.logger.info(
                load_moments(
                    checkpoint, model, optimizer, path=filename, without=remapped
                )
            )
        return checkpoint


def check_detector(model: Any) -> None:
    """Raise ConfigError for ``moe`` in another detector; drop ``moe=None`` there."""
    kind = model.get("type")
    kind = MODELS.get(kind) if isinstance(kind, str) else kind
    if not isinstance(kind, type) or issubclass(kind, RoutedDetector):
        return
    if model.pop("moe", None) is None:
        return
    routed = sorted(
        name
        for name, known in MODELS.module_dict.items()
        if isinstance(known, type) and issubclass(known, RoutedDetector)
    )
    raise ConfigError(
        f"moe is set, but model.type={kind.__name__!r} takes no experts; "
        f"{did_you_mean(f'MoE{kind.__name__}', routed)} Or set moe=None."
    )
