"""MixtureRunner: mmengine's Runner for configs with a mixture."""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
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
from torch.distributed.fsdp import FSDPModule

from damex.compat import ensure_ops
from damex.engine.checkpoint import check_finite, check_fit, replace_misfits
from damex.engine.config import complete_config, label_space_of
from damex.engine.console import ProgressHook, filter_console
from damex.engine.freezing import FreezeRowsHook, freeze_all_but
from damex.engine.hooks import (
    IterationSeedHook,
    RoutingAlarmHook,
    TrainingStepHook,
    average_batch_norms,
    bare_model,
    routed_detector,
)
from damex.engine.monitoring import PendingEvaluationHook, check_monitored
from damex.engine.optim import intervals, resolve_fractions
from damex.engine.optimizer_state import check_resumable, load_moments, optimizer_of
from damex.engine.resumption import (
    AccumulationHook,
    DataProgressHook,
    latest_checkpoint,
)
from damex.engine.rows import remap_checkpoint
from damex.engine.sharding import (
    check_sharding,
    exclude_from_ddp,
    is_fully_sharded,
    prepare_optimizer,
    shard_fully,
    whole_detector,
    whole_experts,
    wrapper_config,
)
from damex.engine.summary import RunSummaryHook, versions
from damex.engine.work_dir import WorkDir, is_local, on_first, orderly_end
from damex.errors import ConfigError
from damex.files import atomic_write
from damex.models.insertion import moe_blocks, upcycling_note

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
class MixtureRunner(Runner):
    """Runner that completes the config, keeps the console readable and runs anywhere.

    It is the default of damex's tools; ``runner_type='MixtureRunner'`` in a config
    selects it in mmdet's tools, too. It fills in the settings that follow from the
    mixture; takes the length of training from a top-level ``max_epochs`` or
    ``max_iters``; always adds damex's hooks; limits the console to warnings
    (``console='full'`` shows all); requires a checkpoint to resume or evaluate to fit;
    and runs several processes without a GPU.

    It locks its work directory. A full disk, Ctrl-C and non-finite losses end it in one
    line, with the last checkpoint and the command to continue. Checkpoints and the
    config are written atomically, and a failed start leaves no files behind.
    """

    has_begun = False  # to train or to evaluate
    is_running = False
    evaluates = False
    _train_loop: Any
    _val_loop: Any
    _load_from: Any
    _has_loaded: bool
    _kept_rows: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self, model: Any, work_dir: str, **kwargs: Any) -> None:
        self.folder = WorkDir(work_dir)
        self.signals: list[float] = []  # times of those received in this run
        with orderly_end(self):
            super().__init__(model, work_dir, **kwargs)

    @classmethod
    def from_cfg(cls, cfg: Config | ConfigDict) -> Runner:
        """Build a runner, with or without a mixture; ConfigError for a bad setting."""
        cfg, notes = complete_config(cfg)
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
            resolve_fractions(scheduler, epochs=self.max_epochs, iters=self.max_iters)
        )

    def setup_env(self, env_cfg: dict) -> None:
        """Set up processes, with gloo if there is no GPU."""
        is_launched = self.launcher == "pytorch" and not is_distributed()
        if is_launched and get_device() == "cpu":
            seconds = env_cfg.get("dist_cfg", {}).get("timeout") or 1800  # as torch
            limit = timedelta(seconds=seconds)
            torch.distributed.init_process_group(backend="gloo", timeout=limit)
        super().setup_env(env_cfg)
        self.folder.logs = self.folder.path / self.timestamp

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Log everything to the file, and only warnings to the screen."""
        logger = super().build_logger(*args, **kwargs)
        for handler in logger.handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handleError = self._log_failed  # type: ignore[method-assign]
        if self.cfg.get("console", "progress") == "progress":
            filter_console(logger)
        logger.info(ensure_ops().summary())
        return logger

    def _log_failed(self, record: logging.LogRecord) -> None:
        """Raise the error of a line that could not be written, during a run only."""
        error = sys.exc_info()[1]
        if self.is_running and isinstance(error, OSError):
            raise error

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
            self._kept_rows = freeze_all_but(model, label_space_of(self.cfg), datasets)
        if self.distributed and self.cfg.get("sync_bn"):
            norms = (one for one in model.modules() if isinstance(one, nn.BatchNorm2d))
            if any(hasattr(one, "act") for one in norms):  # of timm
                raise ConfigError(
                    "sync_bn drops the activations in this backbone's norms; remove it."
                )
        if not is_model_wrapper(model):
            if self.distributed:
                model_wrapper_cfg = wrapper_config(model_wrapper_cfg, model, self.cfg)
            exclude_from_ddp(model, model_wrapper_cfg or {})
        if is_fully_sharded(self):
            return model.to(get_device())  # sharded once weights are loaded
        return super().wrap_model(model_wrapper_cfg, model)

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Build the wrapper; it reduces the gradients of sharded experts."""
        wrapper = super().build_optim_wrapper(optim_wrapper)
        if wrapper is not optim_wrapper:
            prepare_optimizer(bare_model(self), wrapper)
        return wrapper

    def build_visualizer(self, visualizer: Any = None) -> Any:
        """Build a visualizer for this run; by its name, another would be reused."""
        if isinstance(visualizer, dict):
            visualizer = {**visualizer, "name": f"{self.log_dir}/{time.monotonic_ns()}"}
        return super().build_visualizer(visualizer)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call hooks, unless the run was interrupted."""
        self.check_interrupt()
        super().call_hook(fn_name, **kwargs)

    def check_interrupt(self) -> None:
        """Raise KeyboardInterrupt after a signal to stop."""
        if self.signals:
            raise KeyboardInterrupt

    def train(self) -> nn.Module:
        """Train as configured.

        Raises:
            ConfigError: If another process trains in the work directory, the disk is
                full, losses are not finite, or settings exclude each other.
            DataError: If the data are unsound.
            KeyboardInterrupt: On Ctrl-C and SIGTERM, with a line for the user.
        """
        self.evaluates = False
        with orderly_end(self):
            if in_use := on_first(self.folder.lock):
                raise ConfigError(in_use)
            self.check_start()
            check_sharding(self, "val_dataloader")
            return super().train()

    def val(self) -> dict:
        """Evaluate on the validation data; see mmengine."""
        self.evaluates = True
        with orderly_end(self):
            return super().val()

    def test(self) -> dict:
        """Evaluate on the test data; ConfigError if sharding does not allow it."""
        self.evaluates = True
        with orderly_end(self):
            check_sharding(self, "test_dataloader")
            return super().test()

    def check_start(self) -> None:
        """Check settings, then let hooks check the data before it is loaded.

        mmengine's earliest stage, ``before_run``, comes when all datasets are loaded;
        ``before_loading`` comes first, in a training only.

        Raises:
            ConfigError: If settings exclude each other.
            DataError: If a hook finds the data unsound.
        """
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
                "experts with the FFNs from which they were copied; leave one out."
            )
        for hook in self.hooks:
            if hasattr(hook, "before_loading"):  # call_hook would hide where errors are
                hook.before_loading(self)

    def load_or_resume(self) -> None:
        """Load or resume as configured; warn if the schedule is not the config's."""
        if self._resume and self._load_from is None and not self._has_loaded:
            self._load_from = latest_checkpoint(self.work_dir)
            if self._load_from is None:
                raise ConfigError(
                    f"--resume: {self.work_dir} holds no checkpoint of an earlier run "
                    "(no file last_checkpoint). Start without --resume, or name the "
                    "folder with --work-dir."
                )
        planned = intervals(self.param_schedulers)
        if self._has_loaded or not (self._resume or self._load_from):
            super().load_or_resume()
        else:
            with whole_experts(self):
                if self._resume and self.evaluates:  # weights alone, as best_*.pth has
                    self.load_checkpoint(self._load_from)
                    self._has_loaded = False  # a training still resumes
                else:
                    super().load_or_resume()
        if is_fully_sharded(self) and not isinstance(self.model, FSDPModule):
            shard_fully(self.model, optimizer_of(self.optim_wrapper))
        if self._resume and not self.evaluates:
            self.folder.iterations[Path(self._load_from).name] = self.iter
        elif not self.evaluates and self.rank == 0:  # else --resume takes a run before
            Path(self.work_dir, "last_checkpoint").unlink(missing_ok=True)
            if older := sorted(Path(self.work_dir).glob("best_*.pth")):
                self.logger.warning(
                    f"{older[-1]} is of an earlier training, and stays: the summary "
                    "names the best checkpoint of this one."
                )
        self.has_begun = True
        self.dump_config()
        if intervals(self.param_schedulers) != planned:
            self.logger.warning(
                "--resume: the learning rate continues on the checkpoint's schedule, "
                "which has another length than the config's; for the config's, start a "
                "new training from it with load_from=CHECKPOINT."
            )

    def dump_config(self) -> None:
        """Write the config once the run has begun; evaluation keeps a training's."""
        written = self.written_config
        is_kept = self.evaluates and written.exists()
        if self.has_begun and self.rank == 0 and not is_kept:
            with atomic_write(written) as part:
                self.cfg.dump(part)

    @property
    def written_config(self) -> Path:
        """The config in the work directory, from which a training can be resumed."""
        return self.folder.path / Path(self.cfg.filename or f"{self.timestamp}.py").name

    def save_checkpoint(
        self, out_dir: str, filename: str, *args: Any, **kwargs: Any
    ) -> None:
        """Save the whole atomically; called on every process, written by the first."""
        average_batch_norms(self)
        with whole_detector(self):
            if self.rank != 0 or not is_local(out_dir, *args[:1], **kwargs):
                super().save_checkpoint(out_dir, filename, *args, **kwargs)
                return
            with atomic_write(Path(out_dir) / filename) as part:
                super().save_checkpoint(str(part.parent), part.name, *args, **kwargs)
        if kwargs.get("meta"):
            self.folder.iterations[filename] = kwargs["meta"]["iter"]

    def _init_model_weights(self) -> None:
        """Draw whole experts, as mmengine broadcasts the first process's weights."""
        if self._resume:  # all are in the checkpoint, initial ones may be out of reach
            return
        with whole_experts(self):
            super()._init_model_weights()

    def load_checkpoint(
        self,
        filename: str,
        map_location: str | Callable = "cpu",
        strict: bool = False,
        revise_keys: Sequence = ((r"^module\.", ""),),
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
            if self._resume and not self.evaluates:
                check_resumable(
                    checkpoint,
                    model,
                    self.optim_wrapper,
                    has_schedules=self.param_schedulers is not None,
                    path=filename,
                )
        for note in filter(None, notes):
            self.logger.warning(f"{filename}: {note}")
        if "state_dict" not in checkpoint:  # which EMAHook reads
            checkpoint = dict(state_dict=checkpoint)
        self.call_hook("after_load_checkpoint", checkpoint=checkpoint)
        checkpoint = _load_checkpoint_to_model(
            model, checkpoint, strict, revise_keys=[*revise_keys]
        )
        self._has_loaded = True
        self.logger.info(f"Load checkpoint from {filename}")
        if is_start and self.cfg.get("load_optimizer"):
            given = checkpoint, model, self.optim_wrapper.optimizer
            self.logger.info(load_moments(*given, path=filename, without=remapped))
        return checkpoint
