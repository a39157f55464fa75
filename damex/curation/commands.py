"""What the commands of ``damex data`` read alike."""

from __future__ import annotations

import argparse

from mmengine.config import Config

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
from damex.engine.config_files import config_of
from damex.errors import ConfigError


def read_mixture(args: argparse.Namespace) -> Config:
    """The config of a command line, which needs no model here.

    Args:
        args: With ``config`` and ``cfg_options``.

    Raises:
        ConfigError: If the config cannot be read, or has no mixture.
    """
    cfg = config_of(args, needs_model=False)
    if cfg.get("mixture") is None:
        raise ConfigError(
            f"{args.config} sets no mixture=[dict(name=..., ...), ...]; see "
            "configs/own_datasets.py. A dataset without a config is checked by "
            "check --coco FILE --images DIR."
        )
    return cfg
